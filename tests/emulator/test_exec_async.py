"""Asynchronous copies in kernels: what may be read when, and what a hang says."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from smfree.emulator.errors import CopyFault, Deadlock, MemoryFault, Unsupported
from smfree.emulator.exec.schedule import SCHEDULES
from smfree.emulator.tensormap import encode
from tests.emulator.exec_kit import (
    KERNELS,
    Machine,
    Outcome,
    cuda_kernel,
    every_schedule,
    execute,
    report,
    repository_kernel,
)

_SHARED = ".shared .align 8 .b64 full;\n.shared .align 128 .b8 tile[4096];"
_DATA = np.random.default_rng(12).integers(0, 1 << 32, 2048).astype(np.uint32)

# %r20 = the barrier, %r22 = tile, %r23 = this thread's word in the tile, %rd20 = its word of the source,
# %p1 = thread 0.
_PROLOGUE = """
mov.u32 %r20, full;
mov.u32 %r22, tile;
shl.b32 %r23, %r2, 2;
cvt.u64.u32 %rd20, %r23;
add.u32 %r23, %r23, %r22;
add.s64 %rd20, %rd20, %rd1;
setp.eq.u32 %p1, %r2, 0;
"""
_INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r20], 1;\nbar.sync 0;\n"
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
_BULK_LOAD = """
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {bytes};
.loc 1 40 0
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r22], [%rd1], {bytes}, [%r20];
"""
_WAIT = """
W:
mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20], 0;
@!%p8 bra W;
"""
_OUT = ".loc 1 60 0\nld.shared.u32 %r30, [%r23];\nst.global.u32 [%rd3], %r30;\n"


def go(body: str, schedule: str, *, block: int = 64, **more: object) -> Outcome:
    return execute(_PROLOGUE + body, schedule=schedule, shared=_SHARED, a=_DATA, block=block, **more)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------- cp.async

_CP4 = ".loc 1 30 0\n{guard} cp.async.ca.shared.global [%r23], [%rd20], 4;\n"


@every_schedule
def test_c02_a_block_barrier_alone_does_not_wait_for_cp_async(schedule: str) -> None:
    """Half of the threads copy for all; the others read after bar.sync."""
    body = "setp.lt.u32 %p2, %r2, 32;\n" + _CP4.format(guard="@%p2") + "{wait}bar.sync 0;\n"
    body += "xor.b32 %r23, %r23, 64;\nld.shared.u32 %r30, [%r23];\nst.global.u32 [%rd3], %r30;"
    body = body.replace("ld.shared", "@%p2 ld.shared").replace("st.global", "@%p2 st.global")
    with report(
        "destination of the cp.async of 4 bytes", "which is not complete", "case.cu:30",
        "issued by CTA 0 thread",
        rule="copy.destination_read", kind=CopyFault,
    ):  # fmt: skip
        go(body.format(wait=""), schedule)
    for wait in ("cp.async.wait_all;\n", "cp.async.commit_group;\ncp.async.wait_group 0;\n"):
        got = go(body.format(wait=wait), schedule).out
        assert got[:32].tolist() == _DATA[np.arange(32) ^ 16].tolist()


@every_schedule
def test_own_data_needs_the_wait_too(schedule: str) -> None:
    """An engine that completed copies at issue would let this pass."""
    with report("reads the destination of the cp.async", "case.cu:60", rule="copy.destination_read"):
        go(_CP4.format(guard="") + _OUT, schedule)
    with report("reads the destination of the cp.async", rule="copy.destination_read"):
        go(_CP4.format(guard="") + "cp.async.commit_group;\n" + _OUT, schedule)
    assert (
        go(_CP4.format(guard="") + "cp.async.wait_all;\n" + _OUT, schedule).out.tolist()
        == _DATA[:64].tolist()
    )


@every_schedule
def test_c03_an_undrained_prefetch_over_reused_bytes(schedule: str) -> None:
    body = (
        _CP4.format(guard="")
        + "cp.async.commit_group;\n{wait}.loc 1 70 0\nst.shared.u32 [%r23], %r2;\n"
        + _OUT
    )
    with report("overwrites the destination of the cp.async", "case.cu:70", "case.cu:30", kind=CopyFault):
        go(body.format(wait="cp.async.wait_group 1;\n"), schedule)
    drained = "cp.async.wait_group 0;\nbar.sync 0;\n"
    assert go(body.format(wait=drained), schedule).out.tolist() == list(range(64))
    go(_CP4.format(guard="") + "cp.async.commit_group;", schedule)  # exit with a pending group is no error


@every_schedule
def test_c06_wait_group_leaves_the_newest_groups_pending(schedule: str) -> None:
    """Three groups of 256 bytes each; which are usable after wait_group N."""
    issue = "".join(
        f"cp.async.ca.shared.global [%r23+{256 * i}], [%rd20+{256 * i}], 4;\ncp.async.commit_group;\n"
        for i in range(3)
    )
    for number in range(4):
        for read in range(3):
            body = issue + f"cp.async.wait_group {number};\n" + _OUT.replace("[%r23]", f"[%r23+{256 * read}]")
            if read < 3 - number:
                assert go(body, schedule).out.tolist() == _DATA[64 * read : 64 * read + 64].tolist()
            else:
                with report("reads the destination of the cp.async", rule="copy.destination_read"):
                    go(body, schedule)


@every_schedule
@pytest.mark.parametrize("size", [0, 4, 12, 16])
def test_c10_src_size_zero_fills_the_rest(size: int, schedule: str) -> None:
    body = f"""
    shl.b32 %r10, %r2, 4;
    cvt.u64.u32 %rd10, %r10;
    add.u32 %r10, %r10, %r22;
    add.s64 %rd10, %rd10, {"%rd1" if size else "0"};
    mov.u32 %r11, {size};
    cp.async.cg.shared.global [%r10], [%rd10], 16, %r11;
    cp.async.wait_all;
    ld.shared.v4.u32 {{%r12, %r13, %r14, %r15}}, [%r10];
    mul.wide.u32 %rd11, %r2, 16;
    add.s64 %rd11, %rd11, %rd0;
    st.global.v4.u32 [%rd11], {{%r12, %r13, %r14, %r15}};
    """
    got = go(body, schedule, words=256).out.reshape(64, 4)
    want = _DATA[:256].reshape(64, 4).copy()
    want[:, size // 4 :] = 0
    assert (got == want).all()


def test_c10_src_size_differs_by_lane_and_has_a_limit() -> None:
    body = """
    shl.b32 %r10, %r2, 4;
    cvt.u64.u32 %rd10, %r10;
    add.u32 %r10, %r10, %r22;
    add.s64 %rd10, %rd10, %rd1;
    and.b32 %r11, %r2, 3;
    mul.lo.u32 %r11, %r11, {step};
    .loc 1 37 0
    cp.async.ca.shared.global [%r10], [%rd10], 16, %r11;
    cp.async.wait_all;
    ld.shared.v4.u32 {{%r12, %r13, %r14, %r15}}, [%r10];
    mul.wide.u32 %rd11, %r2, 16;
    add.s64 %rd11, %rd11, %rd0;
    st.global.v4.u32 [%rd11], {{%r12, %r13, %r14, %r15}};
    """
    got = go(body.format(step=4), "min-pc", words=256).out.reshape(64, 4)
    want = _DATA[:256].reshape(64, 4).copy()
    for t in range(64):
        want[t, t % 4 :] = 0
    assert (got == want).all()
    with report("src-size", "18", "case.cu:37", "thread 3"):
        go(body.format(step=6), "min-pc", words=256)


@every_schedule
def test_ignore_src_zero_fills_where_it_is_true(schedule: str) -> None:
    body = """
    setp.lt.u32 %p2, %r2, 10;
    cp.async.ca.shared.global [%r23], [%rd20], 4, %p2;
    cp.async.wait_all;
    """
    got = go(body + _OUT, schedule).out
    assert got.tolist() == [0] * 10 + _DATA[10:64].tolist()
    negated = body.replace("4, %p2", "4, !%p2")
    assert go(negated + _OUT, schedule).out.tolist() == _DATA[:10].tolist() + [0] * 54


@every_schedule
def test_c04_alignment_of_both_sides(schedule: str) -> None:
    copy = ".loc 1 35 0\n@%p1 cp.async.ca.shared.global [%r22+{d}], [%rd1+{s}], {n};\ncp.async.wait_all;"
    for d, s, n, operand in (
        (4, 0, 8, "destination"),
        (0, 4, 8, "source"),
        (8, 0, 16, "destination"),
        (0, 2, 4, "source"),
    ):
        with report(operand, f"{n}-byte aligned", "case.cu:35", rule="copy.misaligned"):
            go(copy.format(d=d, s=s, n=n), schedule)
    for d, s, n in ((4, 4, 4), (8, 8, 8), (16, 16, 16)):
        go(copy.format(d=d, s=s, n=n), schedule)


# ----------------------------------------------------------------------------------------- bulk copies, loads


@every_schedule
def test_a_bulk_load_is_not_there_before_its_wait(schedule: str) -> None:
    """Read at once, or after a block barrier: a report under every schedule; an engine that completed copies
    at issue would pass both."""
    load = _BULK_LOAD.format(bytes=256)
    for between in ("", "bar.sync 0;\n"):
        for seed in range(8) if schedule == "random" else range(1):
            with report(
                "reads the destination of the cp.async.bulk load of 256 bytes", "case.cu:40", "case.cu:60",
                rule="copy.destination_read",
            ):  # fmt: skip
                go(_INIT + load + between + _OUT, schedule, seed=seed, block=32)
    assert go(_INIT + load + _WAIT + _OUT, schedule).out.tolist() == _DATA[:64].tolist()


_ORDER = """
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 512;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r22], [%rd1], 256, [%r20];
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r22+256], [%rd1], 256, [%r20];
"""


def test_when_a_source_is_read_depends_on_the_schedule() -> None:
    """The source changes while the copy is in flight. Early completion delivers the old data, late completion
    has the race reported: nothing is decided at issue."""
    body = (
        _INIT
        + _BULK_LOAD.format(bytes=256)
        + """
    @!%p1 bra JOIN;
    mov.u32 %r10, 0;
    WORK:
    ld.volatile.global.u32 %r11, [%rd0+4096];
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p2, %r10, 4;
    @%p2 bra WORK;
    .loc 1 47 0
    st.global.u32 [%rd1], 5;
    JOIN:
    """
    )
    early = go(body + _WAIT + _OUT, "async-earliest", words=2048, zero_out=True).out
    assert early[0] == _DATA[0]
    with report("still reads", "cp.async.bulk load of 256 bytes", "case.cu:47", rule="copy.race"):
        go(body + _WAIT + _OUT, "async-latest", words=2048, zero_out=True)


def test_the_order_of_completion_depends_on_the_schedule() -> None:
    """Two loads count on two barriers; a thread records which it sees first."""
    shared = ".shared .align 8 .b64 full[2];\n.shared .align 128 .b8 tile[4096];"
    body = """
    @%p1 mbarrier.init.shared::cta.b64 [%r20], 1;
    @%p1 mbarrier.init.shared::cta.b64 [%r20+8], 1;
    bar.sync 0;
    setp.ge.u32 %p2, %r2, 32;
    @%p2 bra WATCH;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 256;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r22], [%rd1], 256, [%r20];
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20+8], 256;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r22+256], [%rd1], 256, [%r20+8];
    bra END;
    WATCH:
    mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r20], 0;
    mbarrier.test_wait.parity.shared::cta.b64 %p4, [%r20+8], 0;
    or.pred %p5, %p3, %p4;
    @!%p5 bra WATCH;
    selp.u32 %r10, 1, 0, %p3;
    selp.u32 %r11, 2, 0, %p4;
    or.b32 %r10, %r10, %r11;
    st.global.u32 [%rd3], %r10;
    END:
    A:
    mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20], 0;
    @!%p8 bra A;
    B:
    mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20+8], 0;
    @!%p8 bra B;
    """
    seen = {
        s: set(execute(_PROLOGUE + body, schedule=s, shared=shared, a=_DATA, block=64).out[32:].tolist())
        for s in ("min-pc", "async-latest")
    }
    assert seen == {"min-pc": {1}, "async-latest": {2}}


@every_schedule
def test_b02_bulk_alignment_names_operand_and_value(schedule: str) -> None:
    copy = """
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {n};
    mov.u32 %r10, {n};
    .loc 1 41 0
    @%p1 {bulk} [%r22+{d}], [%rd1+{s}], %r10, [%r20];
    """
    for d, s, n, phrases in (
        (0, 4, 32, ("source", "16-byte aligned")),
        (8, 0, 32, ("destination", "16-byte aligned")),
        (0, 0, 24, ("size", "24", "multiple of 16")),
    ):
        with report(*phrases, "case.cu:41", "CTA 0 thread 0", kind=CopyFault):
            go(_INIT + copy.format(d=d, s=s, n=n, bulk=_BULK), schedule)
    got = go(
        _INIT + copy.format(d=16, s=16, n=32, bulk=_BULK) + _WAIT + _OUT.replace("[%r23]", "[%r23+16]"),
        schedule,
        block=8,
    )
    assert got.out.tolist() == _DATA[4:12].tolist()


@every_schedule
def test_bulk_copies_out_of_bounds(schedule: str) -> None:
    for d, s, text in ((4000, 0, "shared"), (0, 8192 - 64, "allocation")):
        body = f"""
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 256;
        @%p1 {_BULK} [%r22+{d}], [%rd1+{s}], 256, [%r20];
        """
        with report(text, "256", "CTA 0 thread 0"):
            go(_INIT + body, schedule)


def test_a_bulk_copy_that_starts_past_shared_memory_is_named() -> None:
    body = f"@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 256;\n@%p1 {_BULK} "
    told = "of 256 bytes at offset 0x2080 leaves the 4224 bytes this CTA has"
    with report(f"cp.async.bulk destination {told}", "CTA 0 thread 0", rule="shared.bounds"):
        go(f"{_INIT}{body}[%r22+8192], [%rd1], 256, [%r20];", "min-pc")
    with report(f"cp.async.bulk source {told}", "CTA 0 thread 0", rule="shared.bounds"):
        go(_FILL + _STORE.replace("%r22", "%r22+8192"), "min-pc")
    go(f"{_INIT}{body}[%r22+3840], [%rd1], 256, [%r20];\n{_WAIT}", "min-pc")


@pytest.mark.parametrize("schedule", ["timed", "min-pc", "async-latest"])
@pytest.mark.parametrize("use", ["read", "store", "refill"])
def test_a_wait_that_fewer_bytes_than_were_copied_let_through(use: str, schedule: str) -> None:
    """Two tiles, one of them announced: the wait for both succeeds when one is there."""
    copies = "".join(f"@%p1 {_BULK} [%r22+{at}], [%rd1+{at}], 128, [%r20];\n" for at in (0, 128))
    loads = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], {};\n.loc 1 41 0\n" + copies
    store = _STORE + "@%p1 cp.async.bulk.wait_group 0;\n"
    after = {"read": _OUT, "store": store, "refill": ".loc 1 45 0\n" + copies}[use]
    with report(
        "which is not complete; phase 0 of full of CTA 0, in which it was issued, has completed without its "
        "bytes: fewer were announced than the copies bring",
        "issued by CTA 0 thread 0 at case.cu:41",
        kind=CopyFault,
    ):
        go(_INIT + loads.format(128) + _WAIT + after, schedule)
    with report("which is not complete; wait for", kind=CopyFault):
        go(_INIT + loads.format(256) + after, schedule)
    if use != "refill":
        go(_INIT + loads.format(256) + _WAIT + after, schedule)


@every_schedule
def test_a_bulk_load_on_a_barrier_that_was_never_initialised(schedule: str) -> None:
    body = (
        "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r22], [%rd1], 64, [%r20];"
    )
    with report("no barrier has been initialised", rule="mbarrier.uninitialised"):
        go(body, schedule)


# ---------------------------------------------------------------------------------------- bulk copies, stores

_FILL = "st.shared.u32 [%r23], %r2;\nfence.proxy.async.shared::cta;\nbar.sync 0;\n"
_STORE = """
.loc 1 50 0
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r22], 256;
@%p1 cp.async.bulk.commit_group;
"""


@every_schedule
def test_b16_refilling_the_source_of_a_bulk_store(schedule: str) -> None:
    refill = "add.u32 %r31, %r2, 1000;\n.loc 1 55 0\nst.shared.u32 [%r23], %r31;\n"
    done = "@%p1 cp.async.bulk.wait_group 0;\n"
    stranger = "setp.eq.u32 %p2, %r2, 1;\n@%p2 cp.async.bulk.wait_group.read 0;\n"  # who issued nothing
    for wait in ("", stranger):
        if schedule == "async-earliest":  # there the store has read its source by then
            assert go(_FILL + _STORE + wait + refill + done, schedule).out.tolist() == list(range(64))
            continue
        with report(
            "overwrites the source of the cp.async.bulk store of 256 bytes", "case.cu:55", "case.cu:50",
            rule="copy.source_modified",
        ):  # fmt: skip
            go(_FILL + _STORE + wait + refill + done, schedule)
    read = "@%p1 cp.async.bulk.wait_group.read 0;\nbar.sync 0;\n"
    assert go(_FILL + _STORE + read + refill + done, schedule).out.tolist() == list(range(64))


@every_schedule
def test_the_read_form_of_the_wait_does_not_make_the_result_visible(schedule: str) -> None:
    look = ".loc 1 58 0\n@%p1 ld.global.u32 %r30, [%rd0+4];\n@%p1 st.global.u32 [%rd0+256], %r30;\n"
    if schedule not in ("async-earliest", "random"):
        with report("has yet to write", "wait_group, not .read", "case.cu:58", rule="copy.race"):
            go(_FILL + _STORE + "@%p1 cp.async.bulk.wait_group.read 0;\n" + look, schedule, words=128)
    got = go(_FILL + _STORE + "@%p1 cp.async.bulk.wait_group 0;\n" + look, schedule, words=128).out
    assert got[64] == 1


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("async-earliest", "random")])
def test_a_cta_that_exits_under_its_bulk_copies(schedule: str) -> None:
    with report(
        "CTA 0 exits while the cp.async.bulk store of 256 bytes",
        "wait_group.read",
        "case.cu:50",
        rule="copy.exit",
    ):
        go(_FILL + _STORE, schedule)
    with report(
        "CTA 0 exits while the cp.async.bulk load of 256 bytes", "mbarrier", "case.cu:40", rule="copy.exit"
    ):
        go(_INIT + _BULK_LOAD.format(bytes=256), schedule)
    got = go(_FILL + _STORE + "@%p1 cp.async.bulk.wait_group.read 0;", schedule).out
    assert got.tolist() == list(range(64))  # sources read is enough to leave


# --------------------------------------------------------------------------------------------- real kernels

_TILE = 1024


def _bulk(edit: tuple[str, str] | None, schedule: str, num_bytes: int) -> np.ndarray:
    k = repository_kernel("tma/bulk.cu", f"-DTILE_BYTES={_TILE}", "-DNUM_STAGES=2", "-DTHREADS=32", edit=edit)
    m = Machine(schedule)
    data = np.random.default_rng(1).integers(0, 256, num_bytes).astype(np.uint8)
    src, dst = m.put(data), m.empty(num_bytes)
    m.launch(k, struct.pack("<QQQ", dst, src, num_bytes), grid=2, block=32, shared_bytes=2 * _TILE)
    assert (m.get(dst, num_bytes, np.uint8) == data).all()
    return data


@every_schedule
def test_announcing_one_tile_too_many_in_the_bulk_kernel(schedule: str) -> None:
    right = "mbarrier_arrive_expect_tx(full_at(s), tile_bytes);"
    wrong = "mbarrier_arrive_expect_tx(full_at(s), tile_bytes + TILE_BYTES);"
    _bulk(None, schedule, 6 * _TILE + 48)
    with report(
        "full[0] of CTA 0, phase 0 (parity 0): 1024 of 2048 bytes missing, 0 of 1 arrivals missing",
        "full[0] of CTA 1, phase 0", "CTA 1 thread 0 at case.cu:", kind=Deadlock,
    ):  # fmt: skip
        _bulk((right, wrong), schedule, 6 * _TILE)


@pytest.mark.parametrize("schedule", [s for s in SCHEDULES if s not in ("async-earliest", "random")])
def test_forgetting_the_last_wait_of_the_bulk_kernel(schedule: str) -> None:
    last = "cp_async_bulk_wait_group<0>();  // shared memory must outlive the stores that read it"
    with report("exits while the cp.async.bulk store", rule="copy.exit"):
        _bulk((last, ""), schedule, 4 * _TILE)


_TENSOR = """
#include "ptx.cuh"
extern __shared__ __align__(128) u8 smem[];
extern "C" __global__ void k(QUALIFIER TensorMap map, u32* out, int x, int y) {
  const u32 tile = smem_addr(smem), full = tile + 512;
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(full, 512);
    cp_async_bulk_tensor_2d_shared_global(tile, &map, x, y, full);
  }
  __syncthreads();
  while (!mbarrier_try_wait_parity(full, 0)) {}
  for (u32 i = threadIdx.x; i < 128; i += blockDim.x) out[i] = ((u32*)smem)[i];
}
"""


def _tensor(qualifier: str, schedule: str, x: int, y: int) -> np.ndarray:
    """A 16 x 8 box of a 32 x 32 tensor of uint32, from column x and row y."""
    k = cuda_kernel(_TENSOR.replace("QUALIFIER", qualifier), f"-I{KERNELS / 'include'}")
    m = Machine(schedule)
    tensor, out = m.put(_DATA[:1024]), m.put(np.zeros(128, np.uint32))
    packed = encode("UINT32", tensor, [32, 32], [128], [16, 8])
    params = packed + struct.pack("<Qii", out, x, y)
    m.launch(k, params, block=32, shared_bytes=520)
    return m.get(out, 128).reshape(8, 16)


@every_schedule
def test_a_tensor_load_delivers_its_box_and_fills_what_lies_outside(schedule: str) -> None:
    tensor = _DATA[:1024].reshape(32, 32)
    assert (_tensor("const __grid_constant__", schedule, 4, 3) == tensor[3:11, 4:20]).all()
    want = np.zeros((8, 16), np.uint32)
    want[:3, :8] = tensor[29:, 24:]
    assert (_tensor("const __grid_constant__", schedule, 24, 29) == want).all()


@every_schedule
def test_e14_a_by_value_map_that_the_compiler_copied_to_local_memory(schedule: str) -> None:
    with report("local memory", "__grid_constant__", "case.cu:", rule="tensormap.local", kind=CopyFault):
        _tensor("", schedule, 4, 3)


# ------------------------------------------------------------------------------------------ grid-wide waiting

_GRID_BARRIER = """
extern "C" __global__ void k(unsigned* count, unsigned* out) {
  extern __shared__ unsigned pad[];
  if (threadIdx.x == 0) {
    atomicAdd(count, 1);
    while (*(volatile unsigned*)count < gridDim.x) {}
  }
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = *(volatile unsigned*)count;
}"""


@every_schedule
def test_d24_grid_barrier_with_more_ctas_than_fit(schedule: str) -> None:
    """200 KB of shared memory: one CTA per SM, 132 in all."""
    k = cuda_kernel(_GRID_BARRIER)
    for grid in (132, 140):
        m = Machine(schedule)
        count, out = m.put(np.zeros(1, np.uint32)), m.empty(4 * 64 * grid)
        params = struct.pack("<QQ", count, out)
        if grid == 132:
            m.launch(k, params, grid=grid, block=64, shared_bytes=200_000)
            assert (m.get(out, 64 * grid) == grid).all()
            continue
        with report(
            "CTAs 132-139 never started: 132 CTAs fill the device", "at most 132", "looping for ever",
            "case.cu:6", "barrier 0 of CTA 0: 1 of 64 threads missing (0)", kind=Deadlock,
        ):  # fmt: skip
            m.launch(k, params, grid=grid, block=64, shared_bytes=200_000)


# --------------------------------------------------------------------------------------------------- refusals

_REFUSED = [
    "applypriority.global.L2::evict_normal [%rd1], 128;",
    "discard.global.L2 [%rd1], 128;",
    "st.async.shared::cta.mbarrier::complete_tx::bytes.u32 [%r22], %r2, [%r20];",
]


@pytest.mark.parametrize("text", _REFUSED)
def test_copies_that_are_not_modelled_are_refused_by_name(text: str) -> None:
    with report(text.rstrip(";"), "case.cu:21", "PTX line", "not modelled", kind=Unsupported):
        execute(
            _PROLOGUE + f"mov.b16 %h1, 1;\nmov.b64 %rd4, 0;\n.loc 1 21 0\n{text}", shared=_SHARED, a=_DATA
        )


def test_reading_shared_memory_that_nobody_wrote() -> None:
    with report("nobody has written", "case.cu:60", rule="memory.uninitialized", kind=MemoryFault):
        go(_OUT, "min-pc")
