"""The script for a GPU machine: time limits, going on after a failure, reading Nsight Compute's tables."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest

from scripts import gpu_run, gpu_stages

NCU_TABLE = """==PROF== Connected to process 7
COPY lsu
COPY tma.bulk
"ID","Kernel Name","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","smsp__sass_inst_executed_op_tma_ld.sum"
"","","",""
"0","lsu_copy","8,192","0"
"1","tma_bulk_copy","0","1,024"
"""


def stage(name: str, code: str, limit_s: float = 30.0) -> gpu_run.Stage:
    return gpu_run.Stage(name, (sys.executable, "-c", code), limit_s)


def test_a_good_and_a_bad_stage_say_so_and_keep_their_logs(tmp_path: Path) -> None:
    good = gpu_run.run_stage(stage("good", "print('hello')"), tmp_path, 60)
    bad = gpu_run.run_stage(stage("bad", "raise SystemExit(3)"), tmp_path, 60)
    assert (good.result, bad.result) == ("ok", "failed (rc 3)")
    assert (tmp_path / "good.log").read_text().endswith("hello\n")
    text = gpu_run.summary_text("emu:h100", [good, bad], tmp_path)
    assert "failed (rc 3)" in text
    assert "good.log  hello" in text


def test_a_stage_over_its_limit_is_interrupted_first(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "try:\n    print('start', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('wrote what there was')\n"
    )
    outcome = gpu_run.run_stage(stage("slow", code, 2.0), tmp_path, 60)
    assert outcome.result == "over its limit of 2 s"
    assert outcome.seconds < 20
    assert "wrote what there was" in (tmp_path / "slow.log").read_text()


def test_no_stage_starts_without_time_left(tmp_path: Path) -> None:
    assert gpu_run.run_stage(stage("late", "print(1)"), tmp_path, 1.0).result == "no time left"


def test_all_limits_together_are_known_and_tests_and_benchmarks_have_room() -> None:
    found = {item.name: item for item in gpu_run.stages("cuda:0", Path("x"), quick=False)}
    assert list(found) == [
        "environment", "driver_facts", "cuda", "processes", "ipc", "reduce", "compile", "sass", "tests",
        "timing", "hangs", "latency", "throughput", "counters", "host", "peers", "reductions", "pipelines",
    ]  # fmt: skip
    assert "--benchmark-json=x/latency.json" in found["latency"].command
    assert gpu_run.TOTAL_S < 600


def test_kernels_that_wait_for_each_other_have_one_worker_and_are_in_no_other_stage() -> None:
    found = {item.name: " ".join(item.command) for item in gpu_run.stages("cuda", Path("x"), quick=False)}
    for name in ("cuda", "processes", "ipc", "reduce"):
        assert "--device cuda " in found[name] and "-m node -n 1 " in found[name]
    assert "--device cuda:0 " in found["tests"] and "not node" in found["tests"]
    for path in ("test_ipc_on_node", "test_reduce_processes", "test_allreduce", "test_reduce_failures"):
        assert f"--ignore=tests/kernels/{path}.py" in found["ipc"]
    for stage, path in (("processes", "test_reduce_processes"), ("reduce", "test_reduce_failures")):
        assert f" tests/kernels/{path}.py" in found[stage]


@pytest.mark.parametrize(
    ("device", "one", "gpus"),
    [("cuda:2,3", "cuda:2", 2), ("emu:h100", "emu:h100", 16), ("emu:h100:0", "emu:h100", 1),
     ("emu:h100x4", "emu:h100", 4)],
)  # fmt: skip
def test_a_device_string_has_a_first_gpu_and_a_number(device: str, one: str, gpus: int) -> None:
    assert (gpu_run.first_of(device), gpu_run.gpus_of(device)) == (one, gpus)


def test_a_stage_for_more_gpus_than_there_are_is_left_out_and_no_failure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gpu_run.main(["--out", str(out), "--device", "emu:h100:0", "--quick", "--only", "peers"]) == 0
    text = (out / "summary.txt").read_text()
    assert "left out: needs 2 GPUs, emu:h100:0 has 1" in text


def test_a_stage_that_there_is_not_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--out", str(tmp_path / "out"), "--device", "emu:h100", "--only", "facts,ipc"]
    assert gpu_run.main(arguments) == 1
    assert "no stage facts; there are environment, driver_facts" in capsys.readouterr().out


def test_the_answers_of_the_driver_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--out", str(out), "--device", "emu:h100", "--quick", "--only", "driver_facts"]
    assert gpu_run.main(arguments) == 0
    rows = json.loads((out / "driver_facts.json").read_text())
    assert {"question", "emulated", "real"} == set(rows[0])


def test_a_run_writes_its_summary_and_an_archive_and_counts_failures(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert gpu_run.main(["--out", str(out), "--device", "emu:h100", "--quick", "--only", "environment"]) == 0
    assert json.loads((out / "summary.json").read_text())[0]["result"] == "ok"
    assert "driver_cuda" in (out / "environment.txt").read_text()
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert {"out/summary.json", "out/environment.txt", "out/environment.log"} <= set(archive.getnames())


def test_what_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_run, "NEEDED", ("numpy", "no_such_package"))
    assert gpu_run.main(["--out", str(tmp_path / "out"), "--device", "emu:h100"]) == 1
    assert "this Python has no no_such_package; install it first" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [("emu:none", "unknown device 'emu:none'"), ("cuda:99", "cuda:99 was asked for, but this")],
)
def test_a_device_that_is_not_there_is_one_sentence(
    asked: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_run.main(["--out", str(tmp_path / "out"), "--device", asked]) == 1
    text = capsys.readouterr().out
    assert text.startswith(said) and text.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_every_hang_is_survived_and_told(tmp_path: Path) -> None:
    """Needs no GPU: the same stage on the emulated one."""
    arguments = ["--out", str(tmp_path), "--device", "emu:h100", "--quick", "--only", "hangs"]
    assert gpu_run.main(arguments) == 0, (tmp_path / "hangs.log").read_text()
    text = (tmp_path / "hangs.txt").read_text()
    assert (
        "LOAD_MISSING: the last tile is announced, but its copy is not issued\n    full[0] of CTA 0" in text
    )
    assert (
        "ARRIVALS_OF_TWO: empty[] counts the consumer warps of two CTAs, one CTA consumes\n    empty" in text
    )
    assert text.endswith("NONE: nothing: the correct ring\n    no wait ran out of time\n")


def test_ncu_table_is_read_past_its_chatter_and_units() -> None:
    rows = gpu_stages._table(NCU_TABLE)
    assert [row["Kernel Name"] for row in rows] == ["lsu_copy", "tma_bulk_copy"]
    assert gpu_stages._number(rows[0]["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"]) == 8192.0


@pytest.mark.parametrize(("real", "verdict", "wrong"), [(8192.0, "equal", 0), (4096.0, "DIFFERS", 1)])
def test_exact_counters_must_be_equal(real: float, verdict: str, wrong: int) -> None:
    emulated = {row.counter: 8192 for row in gpu_stages.COMPARED}
    metric = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
    lines, found = gpu_stages.compare({"lsu": emulated}, {"lsu": {metric: real}})
    assert found == wrong
    assert lines[0].endswith(verdict)
    assert lines[1].endswith("not measured")


def test_near_counters_give_a_ratio_and_never_fail() -> None:
    emulated = {row.counter: 100 for row in gpu_stages.COMPARED}
    lines, wrong = gpu_stages.compare({"lsu": emulated}, {"lsu": {"dram__bytes_read.sum": 200.0}})
    assert wrong == 0
    assert any(line.endswith("0.50 of measured") for line in lines)


def test_every_compared_metric_is_in_the_counting_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "counting.md").read_text()
    for row in gpu_stages.COMPARED:
        for metric in row.metrics:
            assert metric in page, metric
