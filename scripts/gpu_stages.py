"""Single stages of gpu_run.py: environment, compile, sass, hangs, counters. Each writes into --out."""

from __future__ import annotations

import argparse
import csv
import io
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from bench.axes import ENGINES, KIB, TRITON_ENGINES, latency_points, throughput_points  # noqa: E402
from kernels.common import ConfigError  # noqa: E402
from kernels.engine import engine  # noqa: E402
from kernels.mbarrier import faults, faults_cluster  # noqa: E402
from kernels.mbarrier.faults import Ending, Fault, FaultConfig  # noqa: E402
from kernels.mbarrier.faults_cluster import ClusterFault, ClusterFaultConfig  # noqa: E402
from kernels.watchdog import run_watched  # noqa: E402
from smfree.cuda import Capabilities, Device, compile_cuda, compile_triton  # noqa: E402
from smfree.cuda.cache import CompileCache  # noqa: E402
from smfree.cuda.compile_cuda import CudaSource  # noqa: E402
from smfree.cuda.image import ModuleImage  # noqa: E402
from smfree.measure.options import Axes  # noqa: E402
from smfree.measure.versions import versions  # noqa: E402

TILE_BYTES = 4 * KIB
IN_FLIGHT_BYTES = 16 * KIB
THREADS = 128
COUNTED_BYTES = 4 << 20
HANG_S = 30.0
"""Time limit of a process with a ring that hangs: it starts, compiles and ends its waits in a few seconds."""


# --- environment --------------------------------------------------------------------------------------------


def environment(device: Device, out: Path) -> None:
    """Machine, driver, packages, GPU."""
    lines = [f"python {sys.version}", f"system {platform.platform()}", f"device {device!r}"]
    lines += [f"{name} {version}" for name, version in versions(device).items()]
    lines += [f"{name}: {getattr(device.capabilities, name)}" for name in sorted(vars(device.capabilities))]
    for command in (
        ["nvidia-smi"],
        ["nvidia-smi", "-q", "-d", "CLOCK,PERFORMANCE,COMPUTE"],
        ["nvidia-smi", "topo", "-m"],
        ["nvidia-smi", "topo", "-p2p", "r"],
        ["nvidia-smi", "nvlink", "-s"],
        ["ncu", "--version"],
    ):
        lines.append(f"$ {' '.join(command)}\n{_output(command)}")
    (out / "environment.txt").write_text("\n".join(lines) + "\n")


def _output(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        return "not found"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "no answer within 20 s"
    return done.stdout + done.stderr


# --- compile ------------------------------------------------------------------------------------------------


def sources(capabilities: Capabilities, axes: Axes) -> Iterator[Any]:
    """The source of every latency and throughput point that is possible on the device."""
    for point in latency_points(axes):
        mover = engine(point.engine)
        if mover.unavailable(capabilities) is None:
            try:
                yield mover.latency_config(capabilities, point.tile_bytes, point.threads, point.leg).source
            except ConfigError:
                continue
    for copy in throughput_points(axes):
        mover = engine(copy.engine)
        if mover.unavailable(capabilities) is None:
            threads = copy.threads if copy.bytes_in_flight is not None else None
            try:
                yield mover.throughput_config(
                    capabilities,
                    copy.tile_bytes,
                    bytes_in_flight_per_sm=copy.bytes_in_flight,
                    threads=threads,
                ).source
            except ConfigError:
                continue


def compile_one(job: tuple[Any, Capabilities]) -> tuple[str, str]:
    """Compile into the cache; returns (name, error)."""
    source, capabilities = job
    try:
        return _image(source, capabilities).name, ""
    except Exception as error:  # reported by name; the other compilations go on
        return repr(source), f"{type(error).__name__}: {error}"


def _image(source: Any, capabilities: Capabilities) -> ModuleImage:
    if isinstance(source, CudaSource):
        return compile_cuda(source, capabilities.arch, cache=CompileCache())
    return compile_triton(source, capabilities.compute_capability, cache=CompileCache())


def compile_all(device: Device, axes: Axes) -> int:
    """Fill the compile cache on all cores, so that the measuring stages only load."""
    jobs = [(source, device.capabilities) for source in dict.fromkeys(sources(device.capabilities, axes))]
    cuda = [job for job in jobs if isinstance(job[0], CudaSource)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        results = list(pool.map(compile_one, cuda, chunksize=4))
    results += [
        compile_one(job) for job in jobs if not isinstance(job[0], CudaSource)
    ]  # Triton does not pickle
    errors = [f"{name}: {error}" for name, error in results if error]
    print(f"{len(results)} sources compiled, {len(errors)} errors")
    print("\n".join(errors))
    return len(errors)


# --- SASS ---------------------------------------------------------------------------------------------------


def dump_sass(device: Device, out: Path) -> None:
    """SASS, PTX, registers and spills of each engine's copy."""
    folder = out / "sass"
    folder.mkdir(exist_ok=True)
    for name, config in configs(device):
        image = device.compile_image(config.source)
        (folder / f"{name}.ptx").write_text(image.ptx)
        for kernel, facts in image.functions.items():
            function = image.sass(kernel)
            lines = [
                f"// {name} {kernel}: {config}",
                f"// registers {facts.registers}, spill bytes {facts.spill_bytes}",
            ]
            lines += [f"{i.address:06x}  {i.guard:6} {i.opcode} {i.operands}" for i in function.instructions]
            (folder / f"{name}.sass").write_text("\n".join(lines) + "\n")
        print(f"{name}: done")


def configs(device: Device) -> Iterator[tuple[str, Any]]:
    """Every engine that this device has, at one matched configuration."""
    for name in ENGINES + TRITON_ENGINES:
        mover = engine(name)
        reason = mover.unavailable(device.capabilities)
        if reason is not None:
            print(f"{name}: skipped, {reason}")
            continue
        try:
            yield (
                name,
                mover.throughput_config(
                    device.capabilities, TILE_BYTES, bytes_in_flight_per_sm=IN_FLIGHT_BYTES, threads=THREADS
                ),
            )
        except ConfigError as error:
            print(f"{name}: skipped, {error}")


# --- hangs --------------------------------------------------------------------------------------------------


def ring(device: Device, fault: Fault | ClusterFault) -> bool:
    """One run of the ring of faults.cu, or of faults_cluster.cu; whether its result is right."""
    config: Any = FaultConfig(fault=fault) if isinstance(fault, Fault) else ClusterFaultConfig(fault=fault)
    scale = faults.scale if isinstance(fault, Fault) else faults_cluster.scale
    data = np.arange(7 * config.tile_bytes // 4, dtype=np.uint32)
    src, dst = device.asarray(data), device.asarray(np.zeros_like(data))
    scale(dst, src, config=config)
    device.synchronize()
    return bool(np.array_equal(dst.numpy(), 2 * data))


def hangs(device: Device, out: Path) -> int:
    """Each fault that hangs, in a child process, with what its bounded waits recorded; then the correct ring.
    Gives the number of those that did not end as they must."""
    if not device.capabilities.has_tma:
        print(f"{device.name} has no TMA, which the ring of faults.cu uses")
        return 0
    wrong = 0
    with (out / "hangs.txt").open("w") as file:
        for fault in (*by_mistake(ClusterFault), *by_mistake(Fault)):
            report = run_watched(ring, fault, spec=device.spec, timeout_s=HANG_S)
            clean = fault.ending is Ending.CORRECT
            right = report.hung is not clean and report.outcome.value is clean
            right |= fault is Fault.BYTES_SHORT and not device.is_emulated  # see Fault.ending
            wrong += not right
            lines = [f"{fault.name}: {fault.mistake}{'' if right else ': NOT AS EXPECTED'}"]
            lines += [f"    {line}" for line in str(report).splitlines()]
            lines += [
                f"    {wait.barrier} holds 0x{word:016x}" for wait in report.waits for word in wait.words
            ]
            for stream in (file, sys.stdout):
                print("\n".join(lines), file=stream, flush=True)
    return wrong


def by_mistake(kind: type[Fault] | type[ClusterFault]) -> list[Any]:
    """Those that hang, then the correct one."""
    found = [fault for fault in kind if fault.ending is not Ending.BREAKS]
    return sorted(found, key=lambda fault: fault.ending is Ending.CORRECT)


# --- counters -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """An emulated counter, the Nsight Compute metrics whose sum it is, and how close docs/counting.md
    says."""

    counter: str
    metrics: tuple[str, ...]
    scale: float = 1.0
    exact: bool = True


_L1 = "l1tex__t_{what}_pipe_lsu_mem_global_op_{op}.sum"

COMPARED = (
    Compared("global_load_requests", (_L1.format(what="requests", op="ld"),)),
    Compared("global_load_sectors", (_L1.format(what="sectors", op="ld"),)),
    Compared("global_store_requests", (_L1.format(what="requests", op="st"),)),
    Compared("global_store_sectors", (_L1.format(what="sectors", op="st"),)),
    Compared("cp_async_requests", ("smsp__inst_executed_op_ldgsts.sum",)),
    Compared(
        "tma_requests",
        ("smsp__sass_inst_executed_op_tma_ld.sum", "smsp__sass_inst_executed_op_tma_st.sum"),
    ),
    Compared(
        "shared_load_wavefronts", ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",), exact=False
    ),
    Compared(
        "shared_store_wavefronts", ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",), exact=False
    ),
    Compared("dram_read_bytes", ("dram__bytes_read.sum",), exact=False),
    Compared("dram_write_bytes", ("dram__bytes_write.sum",), exact=False),
)


def copy_each(device: Device) -> Iterator[tuple[str, Mapping[str, int]]]:
    """One verified copy per engine; yields the emulated counters (empty on a real GPU)."""
    host = np.frombuffer(np.random.default_rng(11).bytes(COUNTED_BYTES), np.uint32)
    for name, config in configs(device):
        src, dst = device.asarray(host), device.empty(host.shape, host.dtype)
        dst.fill(0)
        device.synchronize()
        if device.is_emulated:
            device.emulator.l2.flush()  # as ncu does before each kernel
        engine(name).copy(dst, src, config=config)
        device.synchronize()
        counters = device.emulator.last_launch.counters.as_dict() if device.is_emulated else {}
        np.testing.assert_array_equal(dst.numpy(), host)
        yield name, counters


def counters(device: Device, out: Path) -> int:
    """Emulated counters, and beside them Nsight Compute's where it may read them."""
    twin = "emu:h100" if device.capabilities.has_tma else "emu:a100"
    with Device.open(twin) as emulated:
        modelled = dict(copy_each(emulated))
    measured, note = (
        ({}, "no real GPU here: emulated counters only") if device.is_emulated else profile(device.spec)
    )
    rows, wrong = compare(modelled, measured)
    (out / "counters.json").write_text(
        json.dumps({"emulated": modelled, "ncu": measured, "note": note}, indent=1)
    )
    text = "\n".join([note, *rows])
    (out / "counters.txt").write_text(text + "\n")
    print(text)
    return wrong


def compare(
    modelled: Mapping[str, Mapping[str, int]], measured: Mapping[str, Mapping[str, float]]
) -> tuple[list[str], int]:
    """Lines "engine counter emulated measured verdict", and how many exact counters differ."""
    lines, wrong = [], 0
    for name, found in modelled.items():
        for row in COMPARED:
            values = [measured.get(name, {}).get(metric) for metric in row.metrics]
            known = [value for value in values if value is not None]
            real = sum(known) / row.scale if len(known) == len(values) else None
            mine = found[row.counter]
            if real is None:
                verdict = "not measured"
            elif row.exact:
                verdict = "equal" if real == mine else "DIFFERS"
                wrong += real != mine
            else:
                verdict = f"{mine / real:.2f} of measured" if real else "near"
            shown = "-" if real is None else f"{real:.0f}"
            lines.append(f"{name:18} {row.counter:24} {mine:12d} {shown:>12} {verdict}")
    return lines, wrong


def profile(spec: str) -> tuple[dict[str, dict[str, float]], str]:
    """Nsight Compute's metrics by engine, and a note. Metrics that this ncu does not know are left out."""
    if shutil.which("ncu") is None:
        return {}, "ncu is not on PATH: emulated counters only"
    metrics = sorted({metric for row in COMPARED for metric in row.metrics})
    dropped: list[str] = []
    for _ in range(len(metrics)):
        command = ["ncu", "--clock-control", "none"]  # counts do not depend on clocks: leave those alone
        command += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
        command += [sys.executable, __file__, "copies", "--device", spec, "--out", "."]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        unknown = [
            m
            for m in metrics
            if m.removesuffix(".sum") in done.stderr + done.stdout and not _table(done.stdout)
        ]
        if not unknown:
            break
        metrics = [metric for metric in metrics if metric not in unknown]
        dropped += unknown
        if not metrics:
            break
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        return {}, "ncu may not read counters here (ERR_NVGPUCTRPERM): emulated counters only"
    table = _table(done.stdout)
    if not table:
        return {}, f"ncu gave no table (rc {done.returncode}): {(done.stderr or done.stdout)[-400:]}"
    names = re.findall(r"^COPY (\S+)$", done.stdout, re.MULTILINE)
    found = {
        name: {metric: _number(row[metric]) for metric in metrics if row.get(metric)}
        for name, row in zip(names, table, strict=False)
    }
    return found, "ncu read the counters" + (f"; it does not know {', '.join(dropped)}" if dropped else "")


def _table(text: str) -> list[dict[str, str]]:
    """The rows of ncu's CSV (the row of units left out)."""
    start = text.find('"ID"')
    if start < 0:
        return []
    rows = list(csv.DictReader(io.StringIO(text[start:])))
    return [row for row in rows if (row.get("ID") or "").isdigit()]


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=["environment", "compile", "sass", "hangs", "counters", "copies"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--axes", choices=[axes.value for axes in Axes], default="full")
    given = parser.parse_args()
    with Device.open(given.device) as device:
        if given.stage == "environment":
            environment(device, given.out)
        elif given.stage == "compile":
            return min(compile_all(device, Axes(given.axes)), 100)
        elif given.stage == "sass":
            dump_sass(device, given.out)
        elif given.stage == "hangs":
            return hangs(device, given.out)
        elif given.stage == "counters":
            return min(counters(device, given.out), 100)
        else:
            for name, _ in copy_each(device):
                print(f"COPY {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
