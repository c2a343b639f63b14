"""Host memory that kernels use at its own address: page-locked or registered."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from smfree.emulator.errors import MemoryFault
from smfree.emulator.host_memory import HostRange
from tests.emulator.exec_kit import Machine, every_schedule, kernel, report

_MOVE = """
shl.b32 %r10, %r1, 2;
cvt.u64.u32 %rd10, %r10;
add.s64 %rd11, %rd1, %rd10;
ld.global.u32 %r11, [%rd11];
add.u32 %r11, %r11, 1;
st.relaxed.sys.global.u32 [%rd3], %r11;
atom.sys.global.add.u32 %r12, [%rd2], 2;
"""


def bytes_of(found: HostRange) -> np.ndarray:
    start = found.address - found.base
    return found.bytes.raw[start : start + found.nbytes]


def go(machine: Machine, body: str, *addresses: int, block: int = 32) -> object:
    params = struct.pack("<QQQI", *addresses, 0)
    return machine.launch(kernel(body), params, 1, block)


@every_schedule
@pytest.mark.parametrize("way", ["allocated", "registered", "registered between vectors"])
def test_threads_load_store_and_count_in_host_memory(way: str, schedule: str) -> None:
    machine = Machine(schedule)
    host = machine.node.host
    data = np.arange(96, dtype=np.uint32) * 7
    if way == "allocated":
        ranges = [host.allocate(256, 0) for _ in range(3)]
    else:
        skip = 4 if "between" in way else 0
        own = [np.zeros(512, np.uint8) for _ in range(3)]
        starts = [-(-array.ctypes.data // 32) * 32 + skip for array in own]
        ranges = [host.register(start, 256, 0) for start in starts]
    out, source, count = ranges
    bytes_of(source)[:256] = data[:64].view(np.uint8)
    go(machine, _MOVE, out.address, source.address, count.address, block=64)
    assert np.array_equal(bytes_of(out).copy().view(np.uint32), data[:64] + 1)
    assert bytes_of(count)[:4].copy().view(np.uint32)[0] == 128 and not bytes_of(count)[4:].any()


def test_an_access_past_the_end_names_the_range() -> None:
    machine = Machine()
    host = machine.node.host
    out, source, count = host.allocate(96, 0), host.allocate(256, 0), host.allocate(256, 0)
    with report("store of 4 bytes", f"is outside host memory [0x{out.address:x}", "of 96 bytes", "thread 24",
                rule="memory.bounds", kind=MemoryFault):  # fmt: skip
        go(machine, _MOVE, out.address, source.address, count.address)
    with report("outside every allocation", rule="memory.bounds"):
        go(machine, _MOVE, machine.empty(128), source.address ^ 1 << 45, count.address)


def test_a_misaligned_access_is_an_error() -> None:
    machine = Machine()
    host = machine.node.host
    source, count = host.allocate(256, 0), host.allocate(256, 0)
    with report("load of 4 bytes must be 4-byte aligned", rule="memory.misaligned"):
        go(machine, _MOVE, machine.empty(128), source.address + 2, count.address)


def test_forgotten_memory_is_out_of_bounds() -> None:
    machine = Machine()
    host = machine.node.host
    source, count = host.allocate(256, 0), host.allocate(256, 0)
    address = source.address
    host.drop(address)
    with report(f"0x{address:x}", "outside every allocation", rule="memory.bounds"):
        go(machine, _MOVE, machine.empty(128), address, count.address)


def test_lanes_of_one_access_go_to_both_memories() -> None:
    machine = Machine()
    source = machine.node.host.allocate(256, 0)
    source.bytes.views[4][0] = 77
    mixed = """
    setp.eq.u32 %p1, %r2, 0;
    selp.b64 %rd10, %rd0, %rd1, %p1;
    ld.global.u32 %r11, [%rd10];
    st.global.u32 [%rd3], %r11;
    """
    out = machine.put(np.full(32, 5, np.uint32))
    go(machine, mixed, out, source.address, 0)
    assert machine.get(out, 32).tolist() == [5] + 31 * [77]
