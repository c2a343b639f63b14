"""Calls in a process of their own: hangs, crashes and faults are results."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smfree.cuda import Device, TritonSource, compile_triton
from smfree.cuda.isolation import Ending, run_isolated
from tests.cuda import triton_kernels as kernels
from tests.cuda.sources import COPY, source

PATIENCE_S = 120.0


def _hang() -> None:
    time.sleep(600)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _leave() -> None:
    os._exit(3)


def _double(x: int) -> int:
    return 2 * x


def _no_pickle() -> Any:
    return lambda: 1


def _say_and_hang(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def _isolate_a_hang(path: str) -> None:
    run_isolated(_say_and_hang, path, timeout_s=600)


def _alive(pid: int) -> bool:
    """Running, not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def _read_past_the_end(spec: str) -> float:
    with Device.open(spec) as device:
        kernel = device.compile(source(COPY)).kernel()
        short = device.asarray(np.arange(32, dtype=np.uint32))
        kernel.launch(1, 64, [device.empty(64, np.uint32), short, np.uint32(64)])
        device.synchronize()
        return 1.0


def _compile_specialised(stages: int) -> int:
    made = TritonSource(
        kernels.sum_specialised,
        {"out": "*fp32", "src": "tensordesc<fp32[64, 32]>", "steps": "i32"},
        {"ROWS": 64, "COLS": 32, "STAGES": stages},
        ("out",),
        num_stages=stages,
    )
    return compile_triton(made, (10, 0)).functions["sum_specialised"].registers


def test_call_that_returns_or_raises() -> None:
    assert run_isolated(_double, 21, timeout_s=PATIENCE_S).value == 42
    failed = run_isolated(_double, None, timeout_s=PATIENCE_S)
    assert failed.ending is Ending.RAISED and failed.text.startswith("TypeError: ")


def test_a_result_that_cannot_be_pickled_says_so() -> None:
    outcome = run_isolated(_no_pickle, timeout_s=PATIENCE_S)
    assert outcome.ending is Ending.RAISED and "pickle" in outcome.text


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for the child in /proc")
def test_the_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    parent = multiprocessing.get_context("spawn").Process(target=_isolate_a_hang, args=(str(note),))
    parent.start()
    _wait_until(lambda: note.exists() and bool(note.read_text()))
    child = int(note.read_text())
    assert _alive(child)
    parent.kill()
    parent.join()
    _wait_until(lambda: not _alive(child))


def test_hang_is_a_result() -> None:
    """F09: the watchdog ends it, and says so."""
    started = time.monotonic()
    outcome = run_isolated(_hang, timeout_s=3)
    assert outcome.ending is Ending.TIMED_OUT and outcome.text == "_hang did not end within 3 s"
    assert time.monotonic() - started < 60


def test_crash_is_a_result() -> None:
    crashed = run_isolated(_crash, timeout_s=PATIENCE_S)
    assert crashed.ending is Ending.DIED and "killed by SIGSEGV" in crashed.text
    left = run_isolated(_leave, timeout_s=PATIENCE_S)
    assert left.ending is Ending.DIED and "exit code 3" in left.text


def test_faulting_kernel_leaves_this_process_alone(h100: Device) -> None:
    """E15: the fault happens in a child; this process' device goes on."""
    outcome = run_isolated(_read_past_the_end, "emu:h100", timeout_s=PATIENCE_S)
    assert outcome.ending is Ending.RAISED
    assert "KernelFaultError" in outcome.text and "CUDA_ERROR_ILLEGAL_ADDRESS" in outcome.text
    assert np.array_equal(h100.asarray(np.arange(4)).numpy(), np.arange(4))


@pytest.mark.parametrize("stages", [1, 2])
def test_warp_specialised_configurations_compile_under_a_watchdog(stages: int) -> None:
    """F09: one stage and two; whatever Triton makes of it, the run goes on."""
    outcome = run_isolated(_compile_specialised, stages, timeout_s=PATIENCE_S)
    assert outcome.ending is Ending.RETURNED, outcome.text
    assert outcome.value > 0
