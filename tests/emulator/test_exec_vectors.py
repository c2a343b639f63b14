"""Vector accesses whose registers other vectors take apart or put together."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tests.emulator.exec_kit import Machine, kernel

# Every thread moves 32 bytes from a to out through shared memory; %r20 = its 32 bytes there.
_ADDRESSES = """
mov.u32 %r20, tile;
shl.b32 %r21, %r2, 5;
add.u32 %r20, %r20, %r21;
cvt.u64.u32 %rd20, %r21;
add.s64 %rd21, %rd1, %rd20;
add.s64 %rd22, %rd0, %rd20;
"""
_WIDE_LOAD = "ld.global.v8.b32 {%r4, %r5, %r6, %r7, %r8, %r9, %r10, %r11}, [%rd21];"
_HALF_LOADS = """
ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd21];
ld.global.v4.b32 {%r8, %r9, %r10, %r11}, [%rd21+16];
"""
_HALF_STORES = """
st.shared.v4.b32 [%r20], {%r4, %r5, %r6, %r7};
st.shared.v4.b32 [%r20+16], {%r8, %r9, %r10, %r11};
ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r20];
ld.shared.v4.b32 {%r8, %r9, %r10, %r11}, [%r20+16];
"""
_HALVES_OUT = """
st.global.v4.b32 [%rd22], {%r4, %r5, %r6, %r7};
st.global.v4.b32 [%rd22+16], {%r8, %r9, %r10, %r11};
"""
_WIDE_OUT = "st.global.v8.b32 [%rd22], {%r4, %r5, %r6, %r7, %r8, %r9, %r10, %r11};"


@pytest.mark.parametrize(
    "body",
    [
        _WIDE_LOAD + _HALF_STORES + _WIDE_OUT,
        _WIDE_LOAD + _HALVES_OUT,
        _HALF_LOADS + _WIDE_OUT,
    ],
    ids=["wide-halves-wide", "wide-halves", "halves-wide"],
)
def test_a_wide_vector_is_stored_as_two_halves_and_back(body: str) -> None:
    machine = Machine(profile="b200")
    data = np.random.default_rng(5).integers(0, 1 << 32, 64 * 8, dtype=np.uint32)
    out = machine.empty(data.nbytes)
    k = kernel(_ADDRESSES + body, shared=".shared .align 32 .b8 tile[2048];", target="sm_100a")
    machine.launch(k, struct.pack("<QQQI", out, machine.put(data), 0, 0), block=64)
    assert np.array_equal(machine.get(out, len(data)), data)
