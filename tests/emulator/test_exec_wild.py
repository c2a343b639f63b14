"""Addresses far outside everything: a null pointer minus something, an overflowed sum. Always a report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smfree.emulator.errors import EmulationError
from tests.emulator.exec_kit import execute
from tests.emulator.mbarrier_kit import SHARED, init

DATA = np.arange(64, dtype=np.uint32)
#: The last one's end does not fit 63 bits.
WILD = (-16, -(1 << 63), (1 << 63) - 16)

_FILL = (
    init(1)
    + """
st.shared.v4.u32 [%r22], {%r2, %r2, %r2, %r2};
fence.proxy.async.shared::cta;
bar.sync 0;
"""
)
_STORE = "@%p1 {} [%rd20], [%r22], 16;\n@%p1 cp.async.bulk.commit_group;\n@%p1 cp.async.bulk.wait_group 0;\n"
ACCESSES = {
    "ld": "ld.global.u32 %r10, [%rd20];",
    "ld generic": "ld.u32 %r10, [%rd20];",
    "ld.v4": "ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%rd20];",
    "st": "st.global.u32 [%rd20], %r2;",
    "atom": "atom.global.add.u32 %r10, [%rd20], 1;",
    "shared": "ld.shared.u32 %r10, [%rd20];",
    "local": "ld.local.u32 %r10, [%rd20];",
    "cp.async": init(1) + "shl.b32 %r23, %r2, 4;\nadd.u32 %r22, %r22, %r23;\n"
    "cp.async.cg.shared.global [%r22], [%rd20], 16;\ncp.async.wait_all;",
    "bulk load": init(1) + "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 16;\n"
    "@%p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r22], [%rd20], 16, [%r20];",
    "bulk store": _FILL + _STORE.format("cp.async.bulk.global.shared::cta.bulk_group"),
    "bulk reduction": _FILL + _STORE.format("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32"),
    "tensor map": "fence.proxy.tensormap::generic.acquire.gpu [%rd20], 128;",
}  # fmt: skip
RULES = ("memory.bounds", "shared.bounds", "local.bounds", "memory.generic", "cluster.rank",
         "tensormap.map_alignment", "tensormap.space")  # fmt: skip


def go(body: str, address: int, spread: int, schedule: str) -> Any:
    """Each lane's address is ``spread`` bytes from its neighbour's."""
    start = f"mov.u64 %rd20, {address % (1 << 64)};\nmul.wide.u32 %rd21, %r2, {spread};\n"
    move = "add.s64 %rd20, %rd20, %rd21;\n" if spread else ""
    return execute(start + move + body, shared=SHARED, a=DATA, schedule=schedule)


@pytest.mark.parametrize("schedule", ["timed", "min-pc"])
@pytest.mark.parametrize("spread", [0, 256])
@pytest.mark.parametrize("address", WILD)
@pytest.mark.parametrize("access", ACCESSES)
def test_a_wild_address_is_told(access: str, address: int, spread: int, schedule: str) -> None:
    with pytest.raises(EmulationError) as caught:
        go(ACCESSES[access], address, spread, schedule)
    assert caught.value.rule in RULES, caught.value
    if caught.value.rule == "memory.bounds":
        assert f"0x{address % (1 << 64):x}" in str(caught.value)


@pytest.mark.parametrize("schedule", ["timed", "min-pc"])
@pytest.mark.parametrize("address", [0, *WILD])
def test_a_prefetch_there_is_no_access(address: int, schedule: str) -> None:
    seen = go("cp.async.bulk.prefetch.L2.global [%rd20], 16;", address, 0, schedule).counters
    assert (seen.dram_read_bytes, seen.tma_requests) == (0, 32)


def test_lanes_that_go_astray_one_by_one() -> None:
    """Lane 31 alone reads 16 bytes before the null pointer."""
    body = "setp.eq.u32 %p2, %r2, 31;\nmov.u64 %rd20, %rd1;\n@%p2 mov.u64 %rd20, 0xfffffffffffffff0;\n"
    with pytest.raises(EmulationError, match="thread 31") as caught:
        execute(body + "ld.global.u32 %r10, [%rd20];", a=DATA)
    assert "load of 4 bytes at 0xfffffffffffffff0" in str(caught.value)
    assert caught.value.rule == "memory.bounds"
