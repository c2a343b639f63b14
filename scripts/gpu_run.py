"""Run everything on one GPU machine in under ten minutes and keep it all in one folder.

    python scripts/gpu_run.py --out gpu-results                      # on a machine with GPUs, all of them
    python scripts/gpu_run.py --out try --device emu:h100 --quick    # the same stages here, emulated
    python scripts/gpu_run.py --out try --device emu:h100:0 --quick  # as on a machine with one GPU

Needs the checkout (nothing is installed) and triton 3.6, cuda-bindings 13, NVRTC, numpy, pytest,
pytest-benchmark, pytest-xdist, allpairspy, tabulate; what is missing, a GPU too, is said before anything
runs. Each stage is a process of its own with a time limit and a log; a failed stage does not stop the next
ones, and what there is so far is in the folder, and in the archive beside it, after each stage. It holds:
environment.txt, *.log, *.xml (what each test of several ranks gave), driver_facts.json, a JSON file per
benchmark, sass/*.sass, hangs.txt, counters.json, counters.txt, summary.json and summary.txt. The exit code is
the number of failed stages. Stages for which the machine has too few GPUs are left out, and say so.

All limits together are longer than the whole may take. Where time allows, give each part ten minutes:

    python scripts/gpu_run.py --out checks --only environment,sass,tests,timing,hangs
    python scripts/gpu_run.py --out copies --only compile,latency,throughput,counters
    python scripts/gpu_run.py --out pipelines --only pipelines
    python scripts/gpu_run.py --out node --only environment,driver_facts,cuda,ipc,host
    python scripts/gpu_run.py --out reduce --only processes,reduce
    python scripts/gpu_run.py --out peers --only peers               # from two GPUs on
    python scripts/gpu_run.py --out reductions --only reductions     # the same

Ranks share GPUs where there are fewer than ranks: one GPU tests everything but bandwidth and latency between
two. Kernels of several processes on one GPU take turns, milliseconds each, so what waits for a peer is slow.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
FACTS = str(Path(__file__).with_name("driver_facts.py"))
HELPER = str(Path(__file__).with_name("gpu_stages.py"))
NEEDED = ("numpy", "cuda", "triton", "pytest", "pytest_benchmark", "xdist", "allpairspy", "tabulate")
TOTAL_S = 580.0
GRACE_S = 15.0
MIN_S = 2.0


@dataclass(frozen=True)
class Stage:
    """A command with the seconds it may take, for machines with at least so many ``gpus``."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    gpus: int = 1


@dataclass
class Outcome:
    """How a stage ended: "ok", "failed (rc N)", "over its limit of N s", "no time left" or "left out: ...",
    and the last line that it ``said``."""

    name: str
    result: str
    seconds: float
    log: str
    said: str = ""

    @property
    def ok(self) -> bool:
        return self.result == "ok" or self.result.startswith("left out")


def stages(device: str, out: Path, *, quick: bool) -> list[Stage]:
    """The stages in order. ``quick`` takes the quick axes and fewer tests, for a run without a GPU. What
    needs one GPU uses the first that ``device`` names."""
    python, one, emulated = sys.executable, first_of(device), device.startswith("emu:")
    pytest = (python, "-m", "pytest", "--device", one, "-p", "no:cacheprovider", "-q")
    axes = ("--axes", "quick" if quick else "full")
    rounds = () if emulated else ("--rounds", "10")
    helper = (python, HELPER)
    place = ("--device", one, "--out", str(out))
    facts = (python, FACTS, "--json", str(out / "driver_facts.json"), *(["--emulated"] if emulated else []))
    # Of the kernels' tests those that run on this device. A fault ends its worker only; a test that hangs
    # shows where after a minute, and the others go on.
    workers = ("-n", str(max(1, (os.cpu_count() or 1) // 2)), "--max-worker-restart", "32")
    kernels = (*pytest, "-vv", "-k", one, "-o", "faulthandler_timeout=60", "tests/kernels")
    alone = "not timing and not node"
    tests = (*kernels, *workers, "-m", alone) if not quick else (*pytest, "tests/measure/test_timer.py")
    processes = ("tests/kernels/test_ipc_on_node.py", "tests/kernels/test_reduce_processes.py")
    groups = "tests/kernels/test_ipc_signals.py" if quick else "tests/kernels"
    reduce = ["tests/kernels/test_reduce_scatter.py"] if quick else reduction_tests()
    others = [f"--ignore={path}" for path in (*processes, *reduction_tests())]
    return [
        Stage("environment", (*helper, "environment", *place), 30),
        Stage("driver_facts", facts, 60),
        Stage("cuda", (*_ranks(device, out, "cuda"), "tests/cuda"), 120),
        Stage("processes", (*_ranks(device, out, "processes"), *processes), 240),
        Stage("ipc", (*_ranks(device, out, "ipc"), groups, *others), 240),
        Stage("reduce", (*_ranks(device, out, "reduce"), *reduce), 300),
        Stage("compile", (*helper, "compile", *place, *axes), 90),
        Stage("sass", (*helper, "sass", *place), 60),
        Stage("tests", tests, 180),
        Stage("timing", (*kernels, "-m", "timing"), 60),
        Stage("hangs", (*helper, "hangs", *place), 120),
        Stage("latency", (*pytest, *axes, *rounds, *_bench(out, "latency")), 200),
        Stage("throughput", (*pytest, *axes, *rounds, *_bench(out, "throughput")), 200),
        Stage("counters", (*helper, "counters", *place), 90),
        Stage("host", (*pytest, *axes, *rounds, *_bench(out, "host")), 300),
        Stage("peers", (*pytest, *axes, *rounds, *_bench(out, "peers")), 400, gpus=2),
        Stage("reductions", (*pytest, *axes, *rounds, *_bench(out, "reductions")), 500, gpus=2),
        Stage("pipelines", (*pytest, *axes, *rounds, *_bench(out, "pipelines")), 500),
    ]


def reduction_tests() -> list[str]:
    """The files with tests of reductions between the ranks of one process."""
    found = ["tests/kernels/test_allreduce.py"]
    found += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("tests/kernels/test_reduce_*.py"))]
    return [path for path in found if "processes" not in path]


def first_of(device: str) -> str:
    """The first GPU that a device string names."""
    from smfree.cuda.choose import Kind, parse_spec

    spec = parse_spec(device)
    return f"emu:{spec.profile}" if spec.kind is Kind.EMULATED else f"cuda:{(spec.ordinals or (0,))[0]}"


def gpus_of(device: str) -> int:
    """How many GPUs a device string names; ``emu:h100`` is as many as somebody asks for."""
    from smfree.cuda.choose import MAX_EMULATED
    from smfree.ranks.gpus import Gpus

    return MAX_EMULATED if device.startswith("emu:") and device == first_of(device) else Gpus.of(device).count


def _ranks(device: str, out: Path, name: str) -> tuple[str, ...]:
    """The tests of several ranks on the GPUs of ``device``, in one worker: kernels that wait for each other
    share the GPUs with nothing else. A fault, or a test without an end, costs that test only."""
    command = (
        sys.executable,
        "-m",
        "pytest",
        "--device",
        device,
        "-p",
        "no:cacheprovider",
        "-vv",
        "-m",
        "node",
    )
    worker = ("-n", "1", "--max-worker-restart", "16", "-o", "faulthandler_timeout=100")
    ends = ("-o", "faulthandler_exit_on_timeout=true") if int(version("pytest").split(".")[0]) >= 9 else ()
    return (*command, *worker, *ends, "--durations=10", f"--junitxml={out / name}.xml")


def _bench(out: Path, name: str) -> tuple[str, ...]:
    files = {
        "latency": ("bench/bench_latency.py", "bench/bench_uncertainty.py"),
        "throughput": ("bench/bench_throughput.py", "bench/bench_uncertainty.py"),
        "host": ("bench/bench_host.py", "bench/bench_ipc.py"),
        "peers": ("bench/bench_flag.py", "bench/bench_allgather.py"),
        "reductions": ("bench/bench_allreduce.py", "bench/bench_reduce_scatter.py"),
        "pipelines": ("bench/bench_control.py", "bench/bench_cluster.py", "bench/bench_pipeline.py"),
    }
    return (*files[name], f"--benchmark-json={out / name}.json")


def run_stage(stage: Stage, out: Path, left_s: float) -> Outcome:
    """Run one stage in its own process group. Interrupted first, so that pytest still writes what it has."""
    log = out / f"{stage.name}.log"
    limit = min(stage.limit_s, left_s)
    if limit < MIN_S:
        return Outcome(stage.name, "no time left", 0.0, "")
    start = time.monotonic()
    with log.open("w") as stream:
        stream.write(" ".join(stage.command) + "\n\n")
        stream.flush()
        process = subprocess.Popen(
            stage.command, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
            result = "ok" if code == 0 else f"failed (rc {code})"
        except subprocess.TimeoutExpired:
            result = f"over its limit of {limit:.0f} s"
            _stop(process)
    return Outcome(stage.name, result, time.monotonic() - start, log.name, last_line(log))


def last_line(log: Path) -> str:
    """What a stage said at its end."""
    lines = [line.strip("= ") for line in log.read_text(errors="replace").splitlines()[1:]]
    return next((line for line in reversed(lines) if line), "")[:100]


def _stop(process: subprocess.Popen[bytes]) -> None:
    for sign, wait_s in ((signal.SIGINT, GRACE_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
            process.wait(wait_s)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def no_device(spec: str) -> str:
    """Why there is no such device here; empty when there is one. Needs the packages."""
    from smfree.cuda.choose import choose
    from smfree.cuda.errors import DeviceSpecError, NoDeviceError

    try:
        choose(spec)
    except (DeviceSpecError, NoDeviceError) as error:
        return str(error)
    return ""


def unknown_stages(only: str) -> str:
    """What ``--only`` names that there is not; empty when all are there."""
    known = [stage.name for stage in stages("emu:h100", Path(), quick=True)]
    wrong = [name for name in filter(None, only.split(",")) if name not in known]
    return f"no stage {', '.join(wrong)}; there are {', '.join(known)}" if wrong else ""


def summary_text(device: str, outcomes: Sequence[Outcome], out: Path) -> str:
    """One line per stage and the files there are."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [f"device {device}, {sum(outcome.seconds for outcome in outcomes):.0f} s"]
    lines += [
        f"{o.name:{width}}  {o.seconds:6.1f} s  {o.result}  {o.log}  {o.said}".rstrip() for o in outcomes
    ]
    files = sorted(path for path in out.rglob("*") if path.is_file())
    lines += ["", f"{len(files)} files in {out}:"]
    lines += [f"  {path.relative_to(out)}  {path.stat().st_size} bytes" for path in files[:60]]
    return "\n".join(lines)


def keep(device: str, outcomes: Sequence[Outcome], out: Path) -> None:
    """Write the summary, and the whole folder into ``out``.tar.gz beside it."""
    (out / "summary.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    (out / "summary.txt").write_text(summary_text(device, outcomes, out) + "\n")
    shutil.make_archive(str(out), "gztar", root_dir=out.parent, base_dir=out.name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for everything")
    parser.add_argument("--device", default="cuda", help="cuda (all GPUs), cuda:N, emu:PROFILE")
    parser.add_argument("--quick", action="store_true", help="quick axes, few tests")
    parser.add_argument("--only", default="", help="comma list of stages")
    given = parser.parse_args(arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"this Python has no {', '.join(missing)}; install it first, or run another Python")
        return len(missing)
    problem = no_device(given.device) or unknown_stages(given.only)
    if problem:
        print(problem)
        return 1
    out: Path = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    outcomes: list[Outcome] = []
    gpus = gpus_of(given.device)
    wanted = set(filter(None, given.only.split(",")))
    for stage in stages(given.device, out, quick=given.quick):
        if wanted and stage.name not in wanted:
            continue
        if gpus < stage.gpus:
            few = f"left out: needs {stage.gpus} GPUs, {given.device} has {gpus}"
            outcomes.append(Outcome(stage.name, few, 0.0, ""))
            print(f"{stage.name}: {few}", flush=True)
            keep(given.device, outcomes, out)
            continue
        print(f"{stage.name}: at most {stage.limit_s:.0f} s ...", flush=True)
        outcomes.append(run_stage(stage, out, TOTAL_S - GRACE_S - (time.monotonic() - start)))
        print(f"{stage.name}: {outcomes[-1].result} after {outcomes[-1].seconds:.1f} s", flush=True)
        keep(given.device, outcomes, out)
    print((out / "summary.txt").read_text(), end="")
    return sum(not outcome.ok for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
