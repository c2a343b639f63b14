"""The Triton twin of ring.cu: AllReduce around a ring, with the same words, order of summation and bits.

:func:`ring_step` is one step of one piece: wait, add, store to the next rank, signal. ring.cuh says who sends
what, when, and why no barrier is needed. Calls of both may follow each other in one workspace.

Differences that the PTX shows (Triton 3.9):

* A piece is what the program has in flight: every thread holds ``unroll`` vectors of it.
* The source adds in float32, but of two halves the compiler makes ``add.f16x2`` and ``add.bf16x2`` (sm_90).
  float32 has twice their digits and two more, so the sum of two is rounded alike either way; that of three
  would not be.
* A signal is an atomic of one thread behind a bar.sync, two to a step, each with a release of its own, where
  ring.cu has one membar for both, and takes PCIe, which does not carry all atomics. A wait is inline PTX,
  ``ld.acquire.sys``, and every thread polls: no bar.sync hands on what was acquired
  (kernels/ipc/push_triton.py).
* Chunks are equal and multiples of 16 elements, so that a masked access keeps its 16 bytes. There are no
  single elements at the ends: whatever else is refused, and ring.sm takes it.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import triton
import triton.language as tl

from kernels.common import OperandError, require
from kernels.ipc.grid import VECTOR_BYTES
from kernels.ipc.push_triton import wait_word
from kernels.ipc.reach import atomics_reason
from kernels.ipc.signals import Step
from kernels.reduce.config import KernelWay, Operands, ReduceConfig, suitable_ctas
from kernels.reduce.elements import Element
from kernels.reduce.message import AllReduceMessage
from kernels.reduce.ring import check_slots
from smfree.cuda import Kernel, TritonSource, triton_unavailable

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.member import Member
    from kernels.reduce.workspace import Workspace

CHUNK_MULTIPLE = 16
"""Elements: what Triton must know of a bound to keep vectors under a mask."""
_TYPES = {Element.F32: "fp32", Element.F16: "fp16", Element.BF16: "bf16"}
_BUFFERS = ("src", "dst", "next_dst", "scratch", "next_scratch")


@triton.jit
def open_words(control, rank, slot, writer, reader, WORLD_SIZE: tl.constexpr, PADS: tl.constexpr,
               EPOCHS: tl.constexpr):  # fmt: skip
    """The word of the slot that ``writer`` writes for this rank, the one that this rank writes for
    ``reader``, and the epoch of both when the call begins."""
    pads = (control + PADS // 4).to(tl.pointer_type(tl.uint64))
    mine = tl.load(pads + rank).to(tl.pointer_type(tl.uint32)) + slot * WORLD_SIZE + writer
    theirs = tl.load(pads + reader).to(tl.pointer_type(tl.uint32)) + slot * WORLD_SIZE + rank
    return mine, theirs, tl.load(control + EPOCHS // 4 + slot)


@triton.jit
def ring_step(
    step, turn, buffers, at, chunk_elements, control, rank, channel, data, room,
    WORLD_SIZE: tl.constexpr, PIECE: tl.constexpr, NUM_SLOTS: tl.constexpr,
    DATA: tl.constexpr, ROOM: tl.constexpr, RECORDS: tl.constexpr,
    STEP_SCATTER: tl.constexpr, STEP_GATHER: tl.constexpr, STEP_ROOM: tl.constexpr,
):  # fmt: skip
    """Step ``step`` of the channel's piece number ``turn``, which is the elements ``at`` of every chunk.
    Gives 0 when the host has aborted, else 1: every thread sees that for itself."""
    SCATTER_STEPS: tl.constexpr = WORLD_SIZE - 1
    ALL_STEPS: tl.constexpr = 2 * (WORLD_SIZE - 1)
    src, dst, next_dst, scratch, next_scratch = buffers
    data_mine, data_theirs, data_epoch = data
    room_mine, room_theirs, room_epoch = room
    sent = turn * ALL_STEPS + step
    into_scratch = turn * SCATTER_STEPS + tl.minimum(step, SCATTER_STEPS)

    alive = 1
    if step > 0:  # what it uses has come
        kind = tl.where(step <= SCATTER_STEPS, STEP_SCATTER, STEP_GATHER)
        number = tl.where(step <= SCATTER_STEPS, step, step - SCATTER_STEPS)
        alive = wait_word(control, DATA + channel, (rank + WORLD_SIZE - 1) % WORLD_SIZE, data_mine,
                          data_epoch + sent.to(tl.uint32), kind, number, WORLD_SIZE, RECORDS)  # fmt: skip
    if (step < SCATTER_STEPS) & (into_scratch >= NUM_SLOTS) & (alive == 1):  # where it writes is free
        used = (into_scratch - NUM_SLOTS + 1).to(tl.uint32)
        alive = wait_word(control, ROOM + channel, (rank + 1) % WORLD_SIZE, room_mine, room_epoch + used,
                          STEP_ROOM, step, WORLD_SIZE, RECORDS)  # fmt: skip
    if alive == 1:
        mask = at < chunk_elements
        here = ((rank + 2 * WORLD_SIZE - 1 - step) % WORLD_SIZE).to(tl.int64) * chunk_elements + at
        first = (channel * NUM_SLOTS).to(tl.int64) * PIECE + tl.arange(0, PIECE)
        to = next_scratch + first + into_scratch % NUM_SLOTS * PIECE
        came = scratch + first + (into_scratch - 1) % NUM_SLOTS * PIECE
        if step == 0:
            tl.store(to, tl.load(src + here, mask=mask), mask=mask)
        elif step <= SCATTER_STEPS:
            own = tl.load(src + here, mask=mask)
            total = (tl.load(came, mask=mask).to(tl.float32) + own.to(tl.float32)).to(own.dtype)
            if step < SCATTER_STEPS:
                tl.store(to, total, mask=mask)
            else:
                tl.store(dst + here, total, mask=mask)
                tl.store(next_dst + here, total, mask=mask)
        elif step < ALL_STEPS:
            tl.store(next_dst + here, tl.load(dst + here, mask=mask), mask=mask)
        tl.debug_barrier()  # the accesses of all threads, before the releases of one
        if step < ALL_STEPS:
            tl.atomic_xchg(data_theirs, data_epoch + (sent + 1).to(tl.uint32), sem="release", scope="sys")
        if (step > 0) & (step <= SCATTER_STEPS):
            tl.atomic_xchg(room_theirs, room_epoch + into_scratch.to(tl.uint32), sem="release", scope="sys")
    return alive


@triton.jit
def ring_triton(
    src, dst, next_dst, scratch, next_scratch, control, chunk_elements, rank,
    WORLD_SIZE: tl.constexpr, PIECE: tl.constexpr, NUM_SLOTS: tl.constexpr,
    DATA: tl.constexpr, ROOM: tl.constexpr, PADS: tl.constexpr, EPOCHS: tl.constexpr, RECORDS: tl.constexpr,
    STEP_SCATTER: tl.constexpr, STEP_GATHER: tl.constexpr, STEP_ROOM: tl.constexpr,
):  # fmt: skip
    """A program is a channel. PIECE: elements of a piece."""
    buffers = (src, dst, next_dst, scratch, next_scratch)
    channel = tl.program_id(0)
    following, previous = (rank + 1) % WORLD_SIZE, (rank + WORLD_SIZE - 1) % WORLD_SIZE
    data = open_words(control, rank, DATA + channel, previous, following, WORLD_SIZE, PADS, EPOCHS)
    room = open_words(control, rank, ROOM + channel, following, previous, WORLD_SIZE, PADS, EPOCHS)
    alive, turn = 1, 0
    for piece in range(channel, tl.cdiv(chunk_elements, PIECE).to(tl.int32), tl.num_programs(0)):
        at = piece.to(tl.int64) * PIECE + tl.arange(0, PIECE)
        for step in range(2 * WORLD_SIZE - 1):
            if alive == 1:
                alive = ring_step(
                    step, turn, buffers, at, chunk_elements, control, rank, channel, data, room,
                    WORLD_SIZE, PIECE, NUM_SLOTS, DATA, ROOM, RECORDS, STEP_SCATTER, STEP_GATHER, STEP_ROOM,
                )  # fmt: skip
        turn += 1
    if alive == 1:  # the next call goes on from here
        epochs = control + EPOCHS // 4 + channel
        tl.store(epochs + DATA, data[2] + (turn * 2 * (WORLD_SIZE - 1)).to(tl.uint32))
        tl.store(epochs + ROOM, room[2] + (turn * (WORLD_SIZE - 1)).to(tl.uint32))


@dataclass(frozen=True, kw_only=True)
class TritonRingConfig(ReduceConfig):
    """``ctas`` programs, a channel each, with ``num_slots`` pieces in scratch memory. ``threads`` and
    ``unroll`` are powers of two. Raises ConfigError."""

    num_slots: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("threads", "unroll"):
            value = getattr(self, name)
            require(value & (value - 1) == 0, f"{name} must be a power of two", value, "round it")
        check_slots(self.num_slots)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece: all that a program has in flight from a source."""
        return self.bytes_in_flight_per_sm

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory per rank."""
        return self.ctas * self.num_slots * self.piece_bytes

    def source(  # type: ignore[override]
        self, workspace: Workspace, element: Element, more: Mapping[str, object] | None = None
    ) -> TritonSource:
        """What Triton compiles."""
        del more
        layout, slots = workspace.lane.layout, workspace.defines
        pointer = f"*{_TYPES[element]}"
        return TritonSource(
            ring_triton,
            {**dict.fromkeys(_BUFFERS, pointer), "control": "*u32", "chunk_elements": "i64", "rank": "i32"},
            {
                "WORLD_SIZE": layout.world_size,
                "PIECE": self.piece_bytes // element.bytes,
                "NUM_SLOTS": self.num_slots,
                "DATA": slots["SIGNAL_RING_DATA"],
                "ROOM": slots["SIGNAL_RING_ROOM"],
                "PADS": layout.pads_offset,
                "EPOCHS": layout.epochs_offset,
                "RECORDS": layout.records_offset,
                "STEP_SCATTER": int(Step.REDUCE_SCATTER),
                "STEP_GATHER": int(Step.ALL_GATHER),
                "STEP_ROOM": int(Step.ROOM),
            },
            (*_BUFFERS, "control", "chunk_elements"),
            num_warps=self.threads // 32,
        )


def unavailable(group: Group) -> str | None:
    """Why the ranks cannot run the twin, None when they can."""
    return group.direct_reason or atomics_reason(group.path) or triton_unavailable()


def throughput_config(workspace: Workspace, nbytes: int) -> TritonRingConfig:
    """For messages of ``nbytes``."""
    return TritonRingConfig(ctas=suitable_ctas(workspace, nbytes // workspace.group.world_size))


def arguments(member: Member, message: AllReduceMessage, config: TritonRingConfig) -> Sequence[object]:
    """Of the kernel."""
    del config
    group, rank = message.workspace.group, member.rank
    following = (rank + 1) % group.world_size
    dst, scratch = message.dst.pointers(rank), message.workspace.scratch.pointers(rank)
    buffers = (message.src(rank).ptr, dst[rank], dst[following], scratch[rank], scratch[following])
    return (
        *(np.uint64(pointer) for pointer in buffers),
        message.workspace.control(member).view(np.uint32),
        np.int64(message.count // group.world_size),
        np.int32(rank),
    )


class _TritonRing(KernelWay):
    """As every way, for fewer operands."""

    def prepare(self, member: Member, message: Operands, config: ReduceConfig) -> Kernel:
        """As of KernelWay. Raises OperandError, too, and ConfigError where the ranks cannot run it."""
        assert isinstance(message, AllReduceMessage)
        reason = self.unavailable(message.workspace.group)
        require(reason is None, "the Triton twin needs GPUs that it can signal", reason, "use way 'ring.sm'")
        multiple = CHUNK_MULTIPLE * message.workspace.group.world_size
        src, dst = message.src(member.rank).ptr, message.target(member.rank).ptr
        for rule, value, step in (
            (f"whole multiples of {CHUNK_MULTIPLE} elements for each rank", message.count, multiple),
            (f"a src aligned to {VECTOR_BYTES} bytes", src, VECTOR_BYTES),
            (f"a dst aligned to {VECTOR_BYTES} bytes", dst, VECTOR_BYTES),
        ):
            if value % step:
                raise OperandError(
                    f"the Triton twin takes {rule} (got {value}, {value % step} more than a multiple of "
                    f"{step}); use way 'ring.sm'"
                )
        return super().prepare(member, message, config)


RING_TRITON = _TritonRing("ring.triton", TritonRingConfig, throughput_config, unavailable, arguments)
"""Not one of the public ways: it takes fewer operands, and ring.sm is the one to use."""
