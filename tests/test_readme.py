"""What the Markdown pages show is true: examples run and print what they say, commands name what exists."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kernels.mbarrier.phases import Operation
from kernels.reduce import allreduce, reduce_scatter
from kernels.reduce.trees import Tree, two_trees
from smfree.cli import main
from smfree.emulator.counters import Counters
from smfree.measure.nodes import Tally
from tests.docs_kit import PAGES, ROOT, Block, Command, blocks, commands, examples
from tests.kernels.reduce_kit import reduce_group

EXAMPLES = examples()
COMMANDS = commands()
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")


def words_of(text: str) -> list[str]:
    """Printed text without line breaks, this machine's paths, line numbers and register names."""
    text = text.replace(f"{ROOT}/", "")
    text = " ".join(text.split())
    text = re.sub(r"launched at \S+", "launched at LINE", text)
    text = re.sub(r"(\.cuh?:|PTX line )\d+", r"\1N", text)
    return re.sub(r"%rd?\d+", "%r", text).split()


@pytest.mark.parametrize(("block", "output"), EXAMPLES, ids=[block.id for block, _ in EXAMPLES])
def test_an_example_runs_and_prints_what_the_page_says(
    block: Block, output: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SMFREE_CACHE_DIR", str(tmp_path))
    if "spawn(work" in block.text:  # its processes import the file that calls it
        printed = run_as_file(block.text, tmp_path / "page.py")
    else:
        with contextlib.redirect_stdout(io.StringIO()) as written:
            exec(compile(block.text, block.id, "exec"), {"__name__": "__main__"})
        printed = written.getvalue()
    assert words_of(printed) == words_of(output or "")


def run_as_file(text: str, path: Path) -> str:
    """What it prints, run from the checkout's root."""
    path.write_text(text, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout


def test_the_readme_has_examples_of_every_kind() -> None:
    assert len([1 for block, _ in EXAMPLES if block.page.name == "README.md"]) >= 4
    assert any("deadlock:" in (output or "") for _, output in EXAMPLES)


def printed_by(files: str, chosen: str) -> str:
    """What these benchmarks print on the emulated H100, of the points that the -k expression chooses."""
    command = f"-m pytest {files} --device emu:h100 --jobs 1 -k".split()
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(
        [sys.executable, *command, chosen],
        cwd=ROOT,
        env=alone,  # pytest-benchmark times nothing inside a worker
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout


def test_the_excerpt_is_what_the_benchmark_prints() -> None:
    """The row of the smallest tile, hot: cycles of each engine. The compiler's version moves them a bit."""
    printed_text = printed_by("bench/bench_latency.py", "128B and L2")
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown, printed = (
        next(line.split()[2:] for line in text.splitlines() if line.startswith(" 128 B "))
        for text in (page, printed_text)
    )
    assert len(printed) == 4
    assert [int(word) for word in shown[:4]] == pytest.approx([int(word) for word in printed], rel=0.05)


def test_the_pipelines_page_shows_what_the_benchmarks_print() -> None:
    """Cycles of control operations and of the ring with four stages, as the table has them."""
    printed_text = printed_by(
        "bench/bench_control.py bench/bench_pipeline.py", "bench_control or (ring-4KiB-4stage)"
    )
    page = (ROOT / "docs" / "mbarrier.md").read_text(encoding="utf-8")

    def ring(text: str) -> list[float]:
        (line,) = re.findall(r"^ring +4 KiB +4 +1:1 +(.*)$", text, re.MULTILINE)
        return [float(word.rstrip("%")) for word in line.split()][2:8]

    def control(text: str) -> dict[str, int]:
        lines = {one: re.findall(rf"^{re.escape(one)}  +(.*)$", text, re.MULTILINE) for one in Operation}
        return {one.value: int(found[0].split()[-2]) for one, found in lines.items() if found}

    assert ring(printed_text) == pytest.approx(ring(page), rel=0.1)
    assert len(control(printed_text)) == len(Operation) - 1
    assert control(page) == pytest.approx(control(printed_text), rel=0.1, abs=2)


def test_the_tma_page_shows_what_clusters_print() -> None:
    """Cycles of each path and of the multicast; bytes through registers and L2 bytes exactly."""
    printed_text = printed_by("bench/bench_cluster.py", "dsmem or 2ctas-4perSM")
    page = (ROOT / "docs" / "tma.md").read_text(encoding="utf-8")

    def rings(text: str) -> dict[tuple[str, str], list[float]]:
        """(tile, path) -> cycles, bytes per cycle, bytes through registers per byte."""
        found = re.findall(r"^ +2 +1 +(\d+) KiB  ([\w.:]+) +(\d+) +([\d.]+) +(\d)", text, re.MULTILINE)
        return {(tile, path): [float(word) for word in numbers] for tile, path, *numbers in found}

    def casts(text: str) -> dict[str, list[float]]:
        """Form -> L2 bytes per byte, cycles, bytes per cycle; each for itself and multicast."""
        found = re.findall(r"^(bulk|tensor) +4 KiB +2 +4 +(.*)$", text, re.MULTILINE)
        return {form: [float(word) for word in words.split()] for form, words in found}

    shown, printed = rings(page), rings(printed_text)
    assert len(printed) == 9 and shown.keys() == printed.keys()
    for place, row in printed.items():
        assert shown[place] == pytest.approx(row, rel=0.1, abs=0.1)
    assert [row[2] for row in shown.values()] == [row[2] for row in printed.values()]
    shown_casts, printed_casts = casts(page), casts(printed_text)
    assert set(printed_casts) == {"bulk", "tensor"}
    for form, numbers in printed_casts.items():
        assert shown_casts[form][:2] == numbers[:2] == [1.0, 0.5]
        assert shown_casts[form] == pytest.approx(numbers, rel=0.1)


def test_the_reduce_page_shows_what_the_benchmark_prints() -> None:
    """A row's microseconds of three ways. Points that ran before move a time by half a percent, and the
    compiler's version moves it a bit; the page has one decimal."""
    printed_text = printed_by(
        "bench/bench_allreduce.py", "64KiB and 4ranks and (ring.sm or oneshot or twoshot)"
    )
    page = (ROOT / "docs" / "reduce.md").read_text(encoding="utf-8")

    def times(text: str) -> dict[str, float]:
        (names,) = re.findall(r"^ +ranks +message  +(ring.*)$", text, re.MULTILINE)
        (cells,) = re.findall(r"^ +4 +64 KiB +(.*)$", text, re.MULTILINE)
        numbers = re.findall(r"([\d.]+) +[\d.]+\*?(?: l)?", cells)
        return dict(zip(names.split(), map(float, numbers), strict=True))

    shown, printed = times(page), times(printed_text)
    assert len(printed) == 3
    assert {way: shown[way] for way in printed} == pytest.approx(printed, rel=0.02, abs=0.1)


def test_a_prediction_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """What a page shows below a lone ``smfree predict`` are lines of its report, in order."""
    shown = [
        (before.text, after.text)
        for page in PAGES
        for before, after in pairwise(blocks(page))
        if before.text.startswith("$ smfree predict") and after.language == "text"
    ]
    assert shown
    for command, text in shown:
        assert main(shlex.split(command)[2:]) == 0
        assert text in capsys.readouterr().out, command


def test_the_reduce_page_has_what_counters_show() -> None:
    """Chunks that a rank sends, reads and writes, and those of copy engines: the table's formulas for N = 4.
    Reads of words that are polled come on top, less than a chunk. The TMA's reads are not counted apart."""
    page = (ROOT / "docs" / "reduce.md").read_text(encoding="utf-8")
    ranks, nbytes = 4, 1 << 15
    known = {"N": ranks, "I": sum(inner(tree) for tree in two_trees(ranks))}
    (table,) = re.findall("^## What moves$(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (ReduceScatter, )?(`.*`) \| [^|]+ \| (.*) \|$", table, re.MULTILINE)
    seen = set()
    for scatter, names, cells in rows:
        sent, read, written, copied = (
            eval(re.sub(r"(?<=[\dN]) (?=[N(])", " * ", cell).replace("^", "**"), known.copy())
            for cell in cells.split(" | ")
        )
        for way in re.findall("`(.*?)`", names):
            seen.add((bool(scatter), way))
            found = chunks_moved(way, ranks, nbytes, scatter=bool(scatter))
            assert found["sent"] == sent and found["copied"] == copied, way
            assert written <= found["written"] < written + 0.1 or way in ("ring.tma", "nvls"), way
            if way == "ring.tma":
                assert found["tma"] == read + written
            elif way != "nvls":  # who reads a rank's memory through the switch is not counted with the rank
                assert read <= found["read"] < read + 1, way
    assert seen == {(False, way) for way in allreduce.WAYS} | {(True, way) for way in reduce_scatter.WAYS}


def inner(tree: Tree) -> int:
    """Ranks with a parent and children."""
    return sum(bool(tree.children(rank)) for rank in range(len(tree.parents))) - 1


def chunks_moved(way: str, ranks: int, nbytes: int, *, scatter: bool) -> dict[str, float]:
    """The mean over the ranks, without signals, of one reduction of ``nbytes``."""
    with reduce_group(ranks, scratch_bytes=1 << 18, oneshot_bytes=nbytes) as (group, space):
        src, dst = group.symmetric(nbytes, "src"), group.symmetric(nbytes, "dst")
        for member in group.members:
            src.array(member.rank).fill(0, stream=member.stream)
        collective: Any = reduce_scatter if scatter else allreduce
        config = collective.throughput_config(space, way, nbytes)
        config = replace(config, ctas=4 if way == "tree" else 1)
        chunks = [dst.array(rank).bytes_view(0, nbytes // ranks) for rank in range(ranks)]
        given = (space, chunks if scatter else dst, src)
        collective.prepare(*given, dtype="float32", way=way, config=config)
        group.wait()
        before = Tally([member.device for member in group.members])
        (reduce_scatter.reduce_scatter if scatter else allreduce.allreduce)(
            *given, dtype="float32", way=way, config=config
        )
        group.wait()
        counted = before.since()

    def total(*names: str) -> float:
        return sum(one[name] for one in counted for name in names) / nbytes

    signals = total("peer_signal_bytes")
    return {
        "sent": total("nvlink_sent_bytes") - signals,
        "read": total("global_load_bytes", "copy_engine_read_bytes"),
        "written": total("global_store_bytes", "copy_engine_write_bytes") - signals,
        "copied": total("copy_engine_read_bytes", "copy_engine_write_bytes"),
        "tma": total("bytes_async"),
    }


@pytest.mark.parametrize("command", COMMANDS, ids=[command.id for command in COMMANDS])
def test_a_command_names_what_exists(command: Command) -> None:
    program, *args = command.words
    if program == "make":
        check_make(args)
    elif program == "pytest":
        check_pytest(args)
    elif program == "python" and args[0] == "-m":
        assert importlib.util.find_spec(args[1]) is not None
    elif program == "python":
        unknown = {a.split("=")[0] for a in args if a.startswith("--")} - options_of(args[0])
        assert not unknown, f"{args[0]} has no {unknown}"
    elif program == "smfree":
        assert args[0] in ("devices", "compare", "timeline", "predict")
        unknown = {a.split("=")[0] for a in args if a.startswith("--")} - options_of(
            f"-m smfree.cli {args[0]}"
        )
        assert not unknown, f"smfree {args[0]} has no {unknown}"
    elif program in ("cp", "cd", "git", ".venv/bin/pre-commit"):
        missing = [a for a in args if a.startswith(("kernels/", "scripts/")) and not (ROOT / a).exists()]
        assert not missing
    else:
        pytest.fail(f"{program}: teach this test what it is")


def check_make(args: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for arg in args:
        name, is_variable, value = arg.partition("=")
        if not is_variable:
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"the Makefile has no target {name}"
            continue
        assert f"$({name})" in makefile, f"the Makefile has no variable {name}"
        if name == "ARGS":
            check_pytest(["bench/" if "bench" in args else "tests/", *shlex.split(value)])


def check_pytest(args: list[str]) -> None:
    """The path exists, pytest knows the options, and a filter selects some point of the benchmarks."""
    places = [arg for arg in args if "/" in arg and not arg.startswith("-")]
    assert places and all((ROOT / place).exists() for place in places)
    unknown = {arg.split("=")[0] for arg in args if arg.startswith("--")} - options_of("-m pytest")
    assert not unknown, f"pytest has no {unknown}"
    if "-k" in args and "bench/" in places:
        chosen = args[args.index("-k") + 1]
        test = re.sub(r"\b(?!(?:and|or|not)\b)[\w.]+", lambda word: f"({word[0]!r} in name)", chosen)
        assert any(eval(test, {"name": name}) for name in points()), f"-k {chosen!r} selects nothing"


@cache
def points() -> tuple[str, ...]:
    """The name of every benchmark point on the emulated devices."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "bench/", "--device", "emu:a100,emu:h100", "--collect-only", "-q"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return tuple(line for line in done.stdout.splitlines() if "::" in line)


@cache
def options_of(script: str) -> frozenset[str]:
    """Options that ``python SCRIPT --help`` lists ("-m pytest" for pytest itself)."""
    done = subprocess.run(
        [sys.executable, *shlex.split(script), "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return frozenset(OPTION.findall(done.stdout))


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page_names_options_links_and_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    programs = ("-m pytest", "-m smfree.cli compare", "-m smfree.cli timeline", "-m smfree.cli predict")
    programs += ("scripts/gpu_run.py", "scripts/draw_timelines.py", "-m smfree.emulator.server")
    known = frozenset().union(*(options_of(program) for program in programs)) | {"--query-metrics"}
    assert set(OPTION.findall(text)) <= known
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    files = re.findall(r"`((?:kernels|smfree|scripts|tests|bench|docs)/[\w./*]+)`", text)
    real = [name for name in files if not re.search("FAMILY|NAME", name)]
    assert not [name for name in real if not list(ROOT.glob(name.rstrip("/")))]
    assert not re.search(r"(?<![\w.~])/(?:home|root|work|Users)/", text), "a path of one machine"


def test_every_rule_in_the_emulators_page_is_one_of_the_code() -> None:
    page = (ROOT / "docs" / "emulator.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.endswith(("| error |", "| strict |"))]
    named = {rule for row in rows for rule in re.findall(r"`([a-z.]+\.[a-z_]+)`", row.split("|")[1])}
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "smfree" / "emulator").rglob("*.py"))
    assert len(named) > 30
    assert not {rule for rule in named if f'"{rule}"' not in code} - composed_rules(code)


def composed_rules(code: str) -> set[str]:
    """Rules whose name is put together where they are raised."""
    assert '"copy.destination_" + ("overwritten" if writes else "read")' in code
    return {"copy.destination_read", "copy.destination_overwritten"}


def test_every_counter_is_defined() -> None:
    page = (ROOT / "docs" / "counting.md").read_text(encoding="utf-8")
    missing = [name for name in Counters.__dataclass_fields__ if f"`{name}`" not in page]
    assert not missing, "docs/counting.md does not define them"
