"""Real failing cases of kinds B and C (docs/cases.md) that need no kernel of ours; each with a clean twin."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from smfree.emulator.errors import CopyFault, PtxError
from smfree.emulator.ptx.check import load
from smfree.emulator.tensormap import encode
from tests.emulator.exec_kit import Machine, every_schedule, kernel, report
from tests.emulator.ptx_kit import module_text, ptxas

DATA = np.random.default_rng(5).integers(0, 1 << 32, (24, 32)).astype(np.uint32)
STAGE = 16 * 4  # bytes of a tile of 16 words: a row of the tensor's box


def pitched(pitch: int, kind: str, row: int, schedule: str, strict: str = "error") -> np.ndarray:
    """Two stages ``pitch`` bytes apart, each with 16 words of one row of DATA; what lies in the second."""
    shared = ".shared .align 8 .b64 full;\n.shared .align 128 .b8 tile[1024];"
    copy = {
        "tensor": "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
        " [%r21], [%rd6, {%r10, %r11}], [%r20];",
        "bulk": "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r21], [%rd7], 64, [%r20];",
    }[kind]
    stages = "".join(
        f"add.u32 %r21, %r22, {stage * pitch};\nmov.u32 %r11, {row + stage};\n"
        f"add.s64 %rd7, %rd1, {(row + stage) * 128};\n.loc 1 {30 + stage} 0\n@%p1 {copy}\n"
        for stage in range(2)
    )
    body = f"""
    mov.u32 %r20, full;
    mov.u32 %r22, tile;
    mov.b64 %rd6, map;
    cvta.param.u64 %rd6, %rd6;
    mov.u32 %r10, 0;
    setp.eq.u32 %p1, %r2, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {2 * STAGE};
    {stages}
    bar.sync 0;
    W:
    mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20], 0;
    @!%p8 bra W;
    shl.b32 %r12, %r2, 2;
    add.u32 %r12, %r12, %r22;
    ld.shared.u32 %r13, [%r12+{pitch}];
    st.global.u32 [%rd3], %r13;
    """
    m = Machine(schedule, strict=strict)
    tensor, out = m.put(DATA), m.empty(64)
    packed = encode("UINT32", tensor, [32, 24], [128], [16, 1])
    params = struct.pack("<QQQI", out, tensor, 0, 0).ljust(64, b"\0") + packed
    m.launch(kernel(body, shared=shared, params=", .param .align 64 .b8 map[128]"), params, block=16)
    return m.get(out, 16)


@every_schedule
def test_b11_a_small_tile_leaves_the_second_stage_misaligned(schedule: str) -> None:
    """Tensor copies want 128-byte aligned stages, whatever the tile; plain bulk copies 16."""
    with report(
        "cp.async.bulk.tensor shared destination must be 128-byte aligned", "64 past", "case.cu:31",
        "CTA 0 thread 0", rule="copy.misaligned", kind=CopyFault,
    ):  # fmt: skip
        pitched(64, "tensor", 3, schedule)
    assert pitched(128, "tensor", 3, schedule).tolist() == DATA[4, :16].tolist()
    with report("must be 16-byte aligned", "8 past", "case.cu:31", rule="copy.misaligned", kind=CopyFault):
        pitched(72, "bulk", 3, schedule)
    assert pitched(80, "bulk", 3, schedule).tolist() == DATA[4, :16].tolist()


@every_schedule
def test_b21_a_load_past_the_last_tile_is_zeros_and_counts(schedule: str) -> None:
    """While draining, a ring may load beyond the tensor: zeros, all bytes announced arrive, no hang."""
    assert pitched(128, "tensor", 23, schedule).tolist() == [0] * 16
    assert pitched(128, "tensor", 22, schedule).tolist() == DATA[23, :16].tolist()
    with report("cp.async.bulk source", "outside every allocation", "case.cu:31", rule="memory.bounds"):
        pitched(128, "bulk", 23, schedule)  # a plain bulk copy knows no tensor


@pytest.mark.parametrize(
    ("case", "right", "wrong", "says"),
    [
        ("C05", "cp.async.ca.shared.global [%r2], [%rd1], 4;", "cp.async.ca.shared.global [%r2], [%rd1], 2;",
         "cp.async copies 4, 8 or 16 bytes, got 2"),
        ("C08", "cp.async.cg.shared.global [%r2], [%rd1], 16;", "cp.async.cg.shared.global [%r2], [%rd1], 8;",
         "cp.async.cg copies 16 bytes, got 8; use .ca for 4 and 8"),
        ("C08", "cp.async.ca.shared.global [%r2], [%rd1], 8;", "cp.async.cg.shared.global [%r2], [%rd1], 4;",
         "cp.async.cg copies 16 bytes, got 4; use .ca for 4 and 8"),
    ],
)  # fmt: skip
def test_c05_c08_sizes_that_the_assembler_refuses(case: str, right: str, wrong: str, says: str) -> None:
    """The parser follows ptxas, not the ISA's example that shows .cg with 8 bytes."""
    load(module_text(right, "sm_80"))
    with pytest.raises(PtxError) as caught:
        load(module_text(wrong, "sm_80"))
    assert caught.value.rule == "cp.async.size" and says in str(caught.value), case
    assert ptxas(module_text(right, "sm_80"), "sm_80").accepted
    assert not ptxas(module_text(wrong, "sm_80"), "sm_80").accepted
