"""Kernels that hang, ended by their own bounded waits: what each records, and that the suite goes on."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.common import KERNELS, ConfigError
from kernels.mbarrier.faults import Ending as Fate
from kernels.mbarrier.faults import Fault, FaultConfig, scale
from kernels.mbarrier.registry import PIPELINES
from kernels.watchdog import CAPACITY, StuckWait, WatchedDevice, new_log, read_log, run_watched
from smfree.cuda import CudaSource, Device, KernelFaultError, compile_cuda
from smfree.cuda.image import machine_code
from smfree.cuda.isolation import Ending
from tests.kernels.test_deadlocks import EMPTY_WAIT, FULL_WAIT

TILES = 7
FULL_LINE, EMPTY_LINE = (int(place.partition(":")[2]) for place in (FULL_WAIT, EMPTY_WAIT))
CONSUMERS, PRODUCER = tuple(range(64)), (64,)

# Per fault: barrier, parity waited for, which is that of the phase at hand, and who waits at which line.
CONSUMERS_0 = ("full[0]", 0, CONSUMERS, FULL_LINE)
CONSUMERS_1 = ("full[0]", 1, CONSUMERS, FULL_LINE)
PRODUCER_0 = ("empty[0]", 0, PRODUCER, EMPTY_LINE)
RECORDS = {
    Fault.BYTES_SHORT: {CONSUMERS_0, PRODUCER_0},
    Fault.BYTES_OVER: {CONSUMERS_0, PRODUCER_0},
    Fault.LOAD_MISSING: {CONSUMERS_1},
    Fault.ARRIVE_MISSING: {CONSUMERS_0, PRODUCER_0},
    Fault.PRODUCER_NOT_REACHED: {CONSUMERS_0},
    Fault.PRODUCER_LEAVES_EARLY: {CONSUMERS_1},
    Fault.ARRIVALS_SHORT: {CONSUMERS_1, PRODUCER_0},
    Fault.RELEASE_MISSING: {CONSUMERS_1, PRODUCER_0},
}


def run_fault(device: Device, fault: Fault, tiles: int = TILES, grid: int = 1) -> bool:
    """Whether the result is right."""
    config = FaultConfig(fault=fault)
    data = np.random.default_rng(5).integers(0, 1 << 32, tiles * config.tile_bytes // 4, dtype=np.uint32)
    src, dst = device.asarray(data), device.asarray(np.zeros_like(data))
    scale(dst, src, config=config, grid=grid)
    device.synchronize()
    return bool(np.array_equal(dst.numpy(), 2 * data))


def records_of(waits: tuple[StuckWait, ...]) -> set[tuple[str, int, tuple[int, ...], int]]:
    for wait in waits:
        assert wait.phase_parity == wait.parity and wait.source == "faults.cu"
    return {(wait.barrier, wait.parity, wait.threads, wait.line) for wait in waits}


def hang_and_die(device: Device) -> None:
    run_fault(device, Fault.LOAD_MISSING)
    os.kill(os.getpid(), signal.SIGKILL)


def test_every_hanging_fault_has_its_record() -> None:
    assert set(RECORDS) == {fault for fault in Fault if fault.ending is Fate.HANGS}


@pytest.mark.parametrize("spec", ["emu:h100", "emu:b200"])
@pytest.mark.parametrize("fault", RECORDS, ids=lambda fault: fault.name)
def test_the_record_names_barrier_parity_threads_and_line(fault: Fault, spec: str) -> None:
    log = new_log()
    with WatchedDevice(spec, log) as device:
        assert run_fault(device, fault) is False
        assert run_fault(device, Fault.NONE) is True, "the context goes on after a hang"
    waits, dropped = read_log(log)
    assert records_of(waits) == RECORDS[fault] and dropped == 0
    assert all(wait.cta == 0 and wait.waited_us >= device.limit_ns // 1000 for wait in waits)
    assert all(wait.words == () for wait in waits), "the emulated GPU lets nobody read a live barrier"


def test_the_suite_goes_on_after_hangs_in_child_processes(device: Device) -> None:
    """On a GPU every hanging fault and then the correct ring; on an emulated one, which hangs in this process
    too (above), two of them."""
    if not device.capabilities.has_tma:
        pytest.skip(f"{device.name} has no TMA, which the ring of faults.cu uses")
    faults = [Fault.RELEASE_MISSING, Fault.LOAD_MISSING] if device.is_emulated else list(RECORDS)
    for fault in (*faults, Fault.NONE):
        report = run_watched(run_fault, fault, spec=device.spec, timeout_s=60 if device.is_emulated else 20)
        assert report.outcome.ending is Ending.RETURNED, report.outcome.text
        if fault is Fault.BYTES_SHORT and not device.is_emulated:
            continue  # hardware that counts the copy in pieces may meet the announced number on the way
        assert report.outcome.value is (fault is Fault.NONE)
        assert report.hung is (fault is not Fault.NONE) and report.dropped == 0
        assert records_of(report.waits) == RECORDS.get(fault, set()), str(report)
        assert all(bool(wait.words) is not device.is_emulated for wait in report.waits)


def test_records_outlive_a_child_that_dies() -> None:
    report = run_watched(hang_and_die, spec="emu:h100")
    assert report.outcome.ending is Ending.DIED and report.hung
    assert records_of(report.waits) == RECORDS[Fault.LOAD_MISSING]
    assert "full[0] of CTA 0, in a phase of parity 1" in str(report) and "killed by SIGKILL" in str(report)


def test_threads_without_a_record_are_counted() -> None:
    log, grid = new_log(), CAPACITY // 64 + 4
    with WatchedDevice("emu:h100", log) as device:
        run_fault(device, Fault.PRODUCER_NOT_REACHED, tiles=grid, grid=grid)
    waits, dropped = read_log(log)
    assert dropped == 4 * 64
    assert len({wait.cta for wait in waits}) >= CAPACITY // 64
    assert sum(len(wait.threads) for wait in waits) == CAPACITY


_BEFORE_SM_90 = """
#include "ptx.cuh"
extern "C" __global__ void lonely(u32* done) {
  __shared__ u64 first, second[3];
  if (threadIdx.x == 0) {
    mbarrier_init(smem_addr(&first), 32);
    for (u32 i = 0; i < 3; ++i) mbarrier_init(smem_addr(&second[i]), 33);
  }
  __syncthreads();
  mbarrier_arrive(smem_addr(&first));
  wait_parity(smem_addr(&first), 0);
  mbarrier_arrive(smem_addr(&second[2]));
  wait_parity(smem_addr(&second[2]), 0);
  done[threadIdx.x] = 1;
}
"""


def test_before_sm_90_the_polling_loop_has_a_bound_too() -> None:
    log = new_log()
    with WatchedDevice("emu:a100", log, limit_ns=20_000) as device:
        done = device.asarray(np.zeros(32, np.uint32))
        kernel = device.compile(CudaSource(KERNELS / "mbarrier" / "lonely.cu", text=_BEFORE_SM_90)).kernel()
        kernel.launch(1, 32, [done])
        assert not done.numpy().any()
    ((wait,), _) = read_log(log)
    line = 1 + _BEFORE_SM_90[: _BEFORE_SM_90.index("wait_parity(smem_addr(&second")].count("\n")
    assert (wait.barrier, wait.parity, wait.line) == ("second[2]", 0, line)
    assert wait.threads == tuple(range(32)) and wait.phase_parity == 0


_COUNTED = """
#include "ptx.cuh"
extern "C" __global__ void counted() {
  __shared__ u64 never;
  if (threadIdx.x == 0) mbarrier_init(smem_addr(&never), 1);
  __syncthreads();
  if (threadIdx.x >= 32) wait_parity(smem_addr(&never), 0);
  bar_sync(1, 64);
}
"""


def counted(device: Device) -> None:
    source = CudaSource(KERNELS / "mbarrier" / "counted.cu", text=_COUNTED)
    device.compile(source).kernel().launch(1, 64, [])


def test_a_counted_barrier_that_waits_for_exited_threads_still_hangs_and_the_records_say_why() -> None:
    report = run_watched(counted, spec="emu:h100")
    assert (
        report.outcome.ending is Ending.RAISED
        and "barrier 1 of CTA 0: 32 of 64 threads" in report.outcome.text
    )
    ((wait,),) = (report.waits,)
    assert (wait.barrier, wait.threads, wait.line) == ("never", tuple(range(32, 64)), 7) and report.hung


def test_without_a_log_the_kernel_ends_with_a_fault() -> None:
    config = FaultConfig(fault=Fault.PRODUCER_NOT_REACHED)
    source = CudaSource(config.source.path, {**dict(config.source.defines), "WATCHDOG_NS": 50_000})
    with Device.open("emu:h100") as device:
        data = device.asarray(np.zeros(128, np.uint32))
        device.compile(source).kernel().launch(
            1, config.threads, [data, data, np.uint32(1)], shared_bytes=1024
        )
        with pytest.raises(KernelFaultError, match="the kernel executed trap"):
            device.synchronize()


@pytest.mark.parametrize("name", [name for name, made in PIPELINES.items() if made.max_stages > 1])
def test_a_correct_pipeline_ends_before_its_bounds(name: str) -> None:
    pipeline, log = PIPELINES[name], new_log()
    config = pipeline.config(1024, 2, max_ctas=2)
    with WatchedDevice("emu:a100" if name == "ring_async" else "emu:h100", log) as device:
        rng = np.random.default_rng(7)
        x, y = (rng.standard_normal(9 * 256 + 77).astype(np.float32) for _ in range(2))
        dst = device.empty(x.shape, np.float32)
        pipeline.run(dst, device.asarray(x), device.asarray(y), alpha=0.5, config=config)
        assert np.array_equal(dst.numpy(), np.float32(0.5) * x + y)  # one rounding: halving is exact
        assert "watchdog_log" in device.compile(config.source).image.ptx
    assert read_log(log) == ((), 0)


# ------------------------------------------------------------------------------------------ what it costs

HEADER = KERNELS / "include" / "ptx.cuh"
WATCHDOG = re.compile(
    r'#ifdef WATCHDOG_NS\n#include "watchdog\.cuh"[^\n]*\n#else\n(.*?)#endif\n(?=\n)', re.DOTALL
)
SOURCES = {
    name: pipeline.config(1024, 2).source for name, pipeline in PIPELINES.items() if pipeline.max_stages > 1
}
SOURCES["faults"] = FaultConfig().source


@pytest.mark.parametrize("name", SOURCES)
def test_without_watchdog_ns_the_sass_is_that_of_a_header_that_never_had_it(
    name: str, tmp_path: Path
) -> None:
    plain, cuts = WATCHDOG.subn(r"\1", HEADER.read_text())
    assert cuts == 1 and "watchdog" not in plain.lower()
    (tmp_path / "ptx.cuh").write_text(plain)
    source = SOURCES[name]
    defines = dict(source.defines)
    for arch in ("sm_80", "sm_90a") if name == "ring_async" else ("sm_90a", "sm_120a"):
        code = machine_code(compile_cuda(source, arch).cubin)
        bare = CudaSource(source.path, defines, source.options, include_dirs=(tmp_path,))
        assert code == machine_code(compile_cuda(bare, arch).cubin)
        bounded = CudaSource(source.path, {**defines, "WATCHDOG_NS": 1000}, source.options)
        assert code != machine_code(compile_cuda(bounded, arch).cubin)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"limit_ns": 0}, r"limit_ns is 1 to 2\^63 - 1 \(got 0\); leave it out"),
        ({"limit_ns": -5}, r"limit_ns is 1 to 2\^63 - 1 \(got -5\)"),
        ({"limit_ns": 1.5}, r"limit_ns must be a whole number \(got 1.5\)"),
        ({"schedule": "random"}, r"which only the schedule 'timed' has \(got 'random'\)"),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        WatchedDevice("emu:h100", new_log(), **options)
