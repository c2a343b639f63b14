"""setmaxnreg: who owns how many registers, who waits for them, and what is undefined."""

from __future__ import annotations

import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

from smfree.cuda import CudaSource, Device
from smfree.emulator.errors import BarrierFault, Deadlock, EmulationError
from smfree.emulator.exec.launch import LaunchResult
from smfree.emulator.ptx.check import load
from smfree.emulator.ptx.setmaxnreg import entry_registers
from tests.emulator.exec_kit import Machine, every_schedule, report
from tests.emulator.ptx_kit import ptxas_path

_BOUND = ".maxntid 384\n.minnctapersm 1"

# 384 threads: the producer's warpgroup 0 takes the first body, the consumers' 1 and 2 the second. Then all
# write out[thread] = 1. %r1 = thread, %r2 = its warpgroup, %r3 = its warp, %p1: producer.
_KERNEL = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out)
{bound}
{{
.reg .pred %p<6>;
.reg .b32 %r<16>;
.reg .b64 %rd<6>;
ld.param.u64 %rd1, [out];
mov.u32 %r1, %tid.x;
shr.u32 %r2, %r1, 7;
shr.u32 %r3, %r1, 5;
setp.eq.u32 %p1, %r2, 0;
@%p1 bra PRODUCER;
{consumer}
bra DONE;
PRODUCER:
{producer}
DONE:
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd3, %rd1, %rd2;
mov.u32 %r4, 1;
st.global.u32 [%rd3], %r4;
ret;
}}
"""


def dec(count: int) -> str:
    return f"setmaxnreg.dec.sync.aligned.u32 {count};\n"


def inc(count: int) -> str:
    return f"setmaxnreg.inc.sync.aligned.u32 {count};\n"


def text(producer: str, consumer: str, bound: str = _BOUND) -> str:
    return _KERNEL.format(producer=producer, consumer=consumer, bound=bound)


def run(
    producer: str,
    consumer: str,
    *,
    bound: str = _BOUND,
    threads: int = 384,
    grid: int = 2,
    registers: int | None = None,
    machine: Machine | None = None,
) -> LaunchResult:
    """Run the kernel; every thread has to come to its end."""
    m = machine or Machine()
    out = m.put(np.zeros(threads, np.uint32))
    k = load(text(producer, consumer, bound)).kernels["k"]
    result = m.launch(k, struct.pack("<Q", out), grid, threads, registers=registers)
    assert m.get(out, threads).all()
    return result


@every_schedule
def test_consumers_take_what_the_producer_gives_up(schedule: str) -> None:
    """168 x 3 warpgroups at entry are 40 + 232 + 232."""
    result = run(dec(40), inc(232), machine=Machine(schedule))
    assert not result.findings


def test_registers_come_from_the_compiled_kernel_where_known() -> None:
    run(dec(40), inc(160), registers=120)
    with report("14336 of 14336 registers missing, the pool holds 0", kind=Deadlock):
        run(dec(24), inc(248), registers=136, grid=1)


def test_too_few_registers_hang_and_the_report_says_who_has_them() -> None:
    with report(
        "registers of CTA 1: 2048 of 2304 registers missing, the pool holds 256",
        "per thread, warps 0-3 own 40, warps 4-10 own 240, warp 11 owns 168",
        "waiting: CTA 1 threads 352-383 at PTX line 18",
        kind=Deadlock,
    ):
        run(dec(40), inc(240))


def test_a_timed_increase_waits_for_the_release() -> None:
    pause = "mov.u32 %r5, 5000;\nnanosleep.u32 %r5;\n"
    machine = Machine("timed")
    slow = run(pause + dec(40), inc(232), machine=machine).cycles
    fast = run(pause + dec(40), "", machine=machine).cycles
    assert slow >= 5000 * 1.98
    assert slow == pytest.approx(fast, abs=100)


def test_an_increase_that_nobody_pays_for_hangs() -> None:
    with report("16384 of 16384 registers missing, the pool holds 0", "warps 0-11 own 168;", kind=Deadlock):
        run("", inc(232), grid=1)


@pytest.mark.parametrize(
    ("producer", "consumer", "says"),
    [
        (dec(40) + "bar.sync 1, 128;\n" + dec(64), inc(232),
         "dec to 64 registers per thread, but the warp owns 40: "),
        (inc(40), inc(232),
         "inc to 40 registers per thread, but the warp owns 168: undefined; use setmaxnreg.dec"),
    ],
)  # fmt: skip
def test_the_wrong_direction_is_undefined(producer: str, consumer: str, says: str) -> None:
    with report(says, rule="setmaxnreg.direction"):
        run(producer, consumer)


def test_the_count_that_a_warp_has_already_is_no_change() -> None:
    """Triton's kernels ask again for what they have, in some warps only and with nothing in between."""
    again = "setp.ne.u32 %p2, %r3, 0;\n@%p2 bra DONE;\n" + dec(168) + inc(168)
    run(again, inc(168) + inc(168), bound=".maxnreg 168")


def test_every_warp_of_a_warpgroup_has_to_execute_it() -> None:
    only_warp_0 = "setp.ne.u32 %p2, %r3, 0;\n@%p2 bra DONE;\n"
    says = "warp 0 executed 1 setmaxnreg and warp 1 of the same warpgroup 0"
    with report("CTA 0 exits", says, rule="setmaxnreg.warpgroup", kind=BarrierFault):
        run(only_warp_0 + dec(40), inc(168))
    run(dec(40), inc(168))


def test_all_warps_of_a_warpgroup_execute_the_same_one() -> None:
    def by_warp(first: int) -> str:
        return f"setp.eq.u32 %p2, %r3, 0;\n@%p2 bra FIRST;\n{dec(40)}bra DONE;\nFIRST:\n{dec(first)}"

    with report(
        "warp 0 executes another setmaxnreg than warp 1 of its warpgroup, which executed "
        "setmaxnreg.dec.sync.aligned.u32 40 at PTX line 24",
        rule="setmaxnreg.warpgroup",
    ):
        run(by_warp(48), inc(168))
    run(by_warp(40), inc(168))


def test_a_warpgroup_has_four_warps() -> None:
    with report("CTA with 10 warps", "launch 384 threads", rule="setmaxnreg.warpgroup"):
        run(dec(40), inc(176), threads=320)


def test_the_lanes_of_a_warp_come_together() -> None:
    half = "and.b32 %r6, %r1, 16;\nsetp.ne.u32 %p2, %r6, 0;\n@%p2 bra HALF;\n"
    with report("0xffffffff waits for lanes 16-31 of warp 0", "PTX line 25", kind=Deadlock):
        run(half + dec(40) + "bra DONE;\nHALF:\nbar.warp.sync 0xffffffff;\n", inc(168), grid=1)
    run(half + "HALF:\n" + dec(40), inc(168))


def test_two_in_a_row_without_a_synchronisation_are_reported_when_the_warps_drift_apart() -> None:
    drift = "setp.eq.u32 %p2, %r3, 3;\n@!%p2 bra FAST;\nbar.sync 4, 128;\nFAST:\n"
    meet = "@%p2 bra DONE;\nbar.sync 4, 128;\n"
    body = drift + dec(64) + dec(40) + meet
    with report("before warp 3", "synchronise between", rule="setmaxnreg.unsynchronised"):
        run(body, inc(168))
    run(dec(64) + "bar.sync 4, 128;\n" + dec(40), inc(168))


def test_without_a_register_bound_it_has_no_effect() -> None:
    with report("has no register count at entry", "__launch_bounds__", rule="setmaxnreg.no_bound"):
        run(dec(40), inc(232), bound="")
    machine = Machine(strict="record")
    result = run(dec(40), inc(232), bound=".maxntid 384", machine=machine)
    assert [f.rule for f in result.findings] == ["setmaxnreg.no_bound"]


@pytest.mark.parametrize(
    "bound",
    [
        "", ".maxntid 384", ".reqntid 384", ".minnctapersm 2", ".maxnreg 168", ".maxnreg 24", ".maxnreg 255",
        ".maxntid 384\n.minnctapersm 1", ".reqntid 384\n.minnctapersm 1", ".maxntid 256\n.minnctapersm 2",
        ".maxntid 256\n.minnctapersm 3", ".maxntid 128\n.minnctapersm 1", ".maxntid 384\n.maxnreg 128",
        ".maxntid 384\n.minnctapersm 1\n.maxnreg 128",
    ],
)  # fmt: skip
@pytest.mark.parametrize("most", [40, 160, 232])
def test_the_count_at_entry_is_that_of_ptxas(bound: str, most: int) -> None:
    module = text(dec(40), inc(most), bound)
    log = _ptxas_log(module)
    ours = entry_registers(load(module).kernels["k"])
    if ours is None:
        assert "unable to determine register count at entry" in log
    else:
        assert "ignored" not in log and f"Used {ours} registers" in log


@pytest.mark.parametrize(
    ("producer", "consumer", "bound", "accepted"),
    [
        (dec(64), inc(48), ".maxnreg 168", False),
        (dec(64), inc(64), ".maxnreg 168", True),
        (dec(176), "", ".maxnreg 168", False),
        (dec(168), "", ".maxnreg 168", True),
        (dec(176), inc(176), ".maxnreg 168", True),
        (dec(176), inc(40), "", False),
    ],
)
def test_a_decrease_above_what_any_warp_owns_is_refused_as_by_ptxas(
    producer: str, consumer: str, bound: str, accepted: bool
) -> None:
    module = text(producer, consumer, bound)
    assert ("largest temporal register count" not in _ptxas_log(module)) is accepted
    if accepted:
        load(module)
    else:
        with report("no warp ever owns more than", rule="setmaxnreg.dec", kind=EmulationError):
            load(module)


def _ptxas_log(module: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.ptx"
        path.write_text(module)
        command = [str(ptxas_path()), "-v", "-arch=sm_90a", str(path), "-o", str(Path(folder) / "case.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr


_SOURCE = """
#include "ptx.cuh"
extern "C" __global__ void __launch_bounds__(384, 1) hand_over(unsigned* out) {
  if (threadIdx.x < 128) setmaxnreg_dec<40>();
  else setmaxnreg_inc<232>();
  out[threadIdx.x] = threadIdx.x;
}
"""


@pytest.mark.parametrize("spec", ["emu:h100", "emu:b200"])
def test_a_compiled_kernel_brings_its_register_count(spec: str) -> None:
    path = Path(__file__).parents[2] / "kernels" / "include" / "hand_over.cu"
    with Device.open(spec) as device:
        kernel = device.compile(CudaSource(path, {}, text=_SOURCE)).kernel("hand_over")
        out = device.empty((384,), np.uint32)
        kernel.launch(1, 384, [out])
        device.synchronize()
        assert np.array_equal(out.numpy(), np.arange(384))
