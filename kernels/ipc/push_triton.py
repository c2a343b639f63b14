"""The Triton twin of push.py: what Triton can say of an AllGather between GPUs, and how it says it.

Differences that the PTX shows (Triton 3.9):

* A signal is an atomic: ``tl.atomic_xchg(sem="release", scope="sys")``. One thread does it, after a bar.sync
  that the kernel asks for (``tl.debug_barrier``). Every peer's has a release of its own, one after the other,
  where push.cu has one for all peers. And it needs a link that carries all atomics: NVLink. push.cu's store
  takes PCIe, too.
* There is no load with semantics. The wait is inline PTX, ``ld.acquire.sys``, and every thread polls: nobody
  has to hand on what it acquired.
* A peer is a pointer argument, so that its 16-byte alignment is known: at most 8 ranks, the own one first,
  then those of rank + 1, rank + 2 ... A vector is stored to the own dst, too, wherever src lies.
* Shards and their offsets are multiples of 64 bytes: under a mask Triton keeps 16-byte accesses only when the
  bound is a known multiple of 16 words.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import triton
import triton.language as tl

from kernels.common import LaunchInfo, OperandError, check_threads, check_whole, plain_integers, require
from kernels.ipc.grid import check_resident, suitable_ctas
from kernels.ipc.reach import atomics_reason
from kernels.ipc.signals import SignalLayout
from smfree.cuda import Capabilities, Kernel, TritonSource, triton_unavailable

if TYPE_CHECKING:
    from kernels.ipc.group import Group, Member
    from kernels.ipc.shards import Shards

MAX_RANKS = 8
SHARD_MULTIPLE = 64
"""Bytes: 16 words of 4."""
WORD_BYTES = 4


@triton.jit
def load_acquire_sys(pointer):
    """A word, and after it what its writer had released."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [pointer], dtype=tl.uint32, is_pure=False, pack=1
    )


@triton.jit
def wait_word(
    control, slot, peer, word, wanted, step, number, WORLD_SIZE: tl.constexpr, RECORDS: tl.constexpr
):
    """Waits until a word of the slot has reached an epoch, as in signals.cuh. Gives 0 when the host has
    aborted, else 1: every thread sees that for itself."""
    abort = load_acquire_sys(control)
    seen = load_acquire_sys(word)
    while ((seen - wanted).to(tl.int32, bitcast=True) < 0) & (abort == 0):
        abort = load_acquire_sys(control)
        seen = load_acquire_sys(word)
    alive = 1
    if (seen - wanted).to(tl.int32, bitcast=True) < 0:
        record = control + RECORDS // 4 + (slot * WORLD_SIZE + peer) * 4
        tl.store(record, step)
        tl.store(record + 1, wanted)
        tl.store(record + 2, seen)
        tl.store(record + 3, number)
        alive = 0
    return alive


@triton.jit
def sync_ranks(
    control, rank, slot, epoch, step, WORLD_SIZE: tl.constexpr, PADS: tl.constexpr, RECORDS: tl.constexpr
):
    """The barrier of a slot over all ranks, as in signals.cuh. Gives 0 when the host has aborted, else 1:
    every thread sees that for itself."""
    tl.debug_barrier()  # the accesses of all threads, before the releases of one
    pads = (control + PADS // 4).to(tl.pointer_type(tl.uint64))
    for turn in tl.static_range(1, WORLD_SIZE):
        peer = (rank + turn) % WORLD_SIZE
        theirs = tl.load(pads + peer).to(tl.pointer_type(tl.uint32)) + slot * WORLD_SIZE + rank
        tl.atomic_xchg(theirs, epoch, sem="release", scope="sys")
    alive = 1
    mine = tl.load(pads + rank).to(tl.pointer_type(tl.uint32)) + slot * WORLD_SIZE
    for turn in tl.static_range(1, WORLD_SIZE):
        peer = (rank + turn) % WORLD_SIZE
        alive &= wait_word(control, slot, peer, mine + peer, epoch, step, 0, WORLD_SIZE, RECORDS)
    return alive


@triton.jit
def allgather_push_triton(
    dst0, dst1, dst2, dst3, dst4, dst5, dst6, dst7,
    src, control, offset_words, num_words, rank,
    WORLD_SIZE: tl.constexpr, TILE_WORDS: tl.constexpr,
    PADS: tl.constexpr, EPOCHS: tl.constexpr, RECORDS: tl.constexpr,
    ENTRY: tl.constexpr, EXIT: tl.constexpr,
):  # fmt: skip
    """dst0: the own dst, the next WORLD_SIZE - 1 those of rank + 1, rank + 2 ...; the others are not used."""
    targets = (dst0, dst1, dst2, dst3, dst4, dst5, dst6, dst7)
    slot = tl.program_id(0)
    epochs = control + EPOCHS // 4 + slot
    epoch = tl.load(epochs)
    if sync_ranks(control, rank, slot, epoch + 1, ENTRY, WORLD_SIZE, PADS, RECORDS) == 1:
        for tile in range(slot, tl.cdiv(num_words, TILE_WORDS), tl.num_programs(0)):
            at = tile.to(tl.int64) * TILE_WORDS + tl.arange(0, TILE_WORDS)
            words = tl.load(src + at, mask=at < num_words)
            for turn in tl.static_range(WORLD_SIZE):
                tl.store(targets[turn] + offset_words + at, words, mask=at < num_words)
        if sync_ranks(control, rank, slot, epoch + 2, EXIT, WORLD_SIZE, PADS, RECORDS) == 1:
            tl.store(epochs, epoch + 2)


@dataclass(frozen=True, kw_only=True)
class TritonPushConfig:
    """How the twin is compiled and launched: ``ctas`` programs of ``threads`` threads, a slot
    each; ``tile_bytes`` in flight per program, a power of two. Raises ConfigError."""

    ctas: int = 16
    threads: int = 256
    tile_bytes: int = 16384

    def __post_init__(self) -> None:
        plain_integers(self)
        check_whole("ctas", self.ctas)
        require(self.ctas >= 1, "ctas must be at least 1", self.ctas, "use 16")
        check_threads(self.threads)
        for name in ("threads", "tile_bytes"):
            value = check_whole(name, getattr(self, name))
            power = value >= SHARD_MULTIPLE // 2 and value & (value - 1) == 0
            require(power, f"{name} must be a power of two", value, "round it")

    @property
    def shared_bytes(self) -> int:
        """Triton decides it: a few bytes, for what one thread's atomic gives to the others."""
        return 0

    @property
    def bytes_in_flight_per_sm(self) -> int:
        """Bytes that an SM with one program has asked for before it stores the first."""
        return self.tile_bytes

    def source(self, layout: SignalLayout) -> TritonSource:
        """What Triton compiles."""
        dst = [f"dst{i}" for i in range(MAX_RANKS)]
        return TritonSource(
            allgather_push_triton,
            {**dict.fromkeys(dst, "*i32"), "src": "*i32", "control": "*u32", "offset_words": "i64",
             "num_words": "i64", "rank": "i32"},
            {
                "WORLD_SIZE": layout.world_size,
                "TILE_WORDS": self.tile_bytes // WORD_BYTES,
                "PADS": layout.pads_offset,
                "EPOCHS": layout.epochs_offset,
                "RECORDS": layout.records_offset,
                "ENTRY": 1,
                "EXIT": 2,
            },
            (*dst, "src", "control", "offset_words", "num_words"),
            num_warps=self.threads // 32,
        )  # fmt: skip


def unavailable(group: Group) -> str | None:
    """Why the twin cannot run for these ranks, None when it can."""
    if group.world_size > MAX_RANKS:
        return f"the Triton twin has at most {MAX_RANKS} ranks ({group.world_size} are in the group)"
    return group.direct_reason or atomics_reason(group.path) or triton_unavailable()


def throughput_config(capabilities: Capabilities, largest_shard_bytes: int) -> TritonPushConfig:
    """For shards of at most so many bytes."""
    del capabilities
    return TritonPushConfig(ctas=suitable_ctas(largest_shard_bytes))


def prepare(member: Member, shards: Shards, config: TritonPushConfig) -> Kernel:
    """Compile (cached) and load on the member's device. Raises ConfigError, OperandError."""
    layout, reason = shards.dst.group.layout, unavailable(shards.dst.group)
    require(reason is None, "the Triton twin needs GPUs that it can signal", reason, "use sm.push")
    require(
        config.ctas <= layout.slots,
        f"every program has one of {layout.slots} slots",
        config.ctas,
        "use fewer",
    )
    src, own = shards.src(member.rank), shards.dst.array(member.rank)
    for name, value in (
        ("every shard's offset", [offset for offset in shards.offsets if offset % SHARD_MULTIPLE]),
        ("src's address modulo 16", [src.ptr % 16] if src.ptr % 16 else []),
        ("dst's address modulo 16", [own.ptr % 16] if own.ptr % 16 else []),
    ):
        if value:
            raise OperandError(
                f"the Triton twin moves shards at multiples of {SHARD_MULTIPLE} bytes, 16-byte aligned "
                f"({name}: {value[0]}); use sm.push"
            )
    kernel = member.device.compile(config.source(layout)).kernel()
    check_resident(member, kernel, shards.dst.group, config.ctas, config.threads, 0)
    return kernel


def launch(member: Member, shards: Shards, config: TritonPushConfig, kernel: Kernel) -> LaunchInfo:
    """Queue the member's part on its stream; ``kernel`` is what :func:`prepare` gave."""
    group, rank = shards.dst.group, member.rank
    pointers = shards.dst.pointers(rank)
    first = [pointers[(rank + turn) % group.world_size] for turn in range(group.world_size)]
    targets = first + [pointers[rank]] * (MAX_RANKS - group.world_size)
    words = [np.int64(n // WORD_BYTES) for n in (shards.offsets[rank], shards.offsets[rank + 1])]
    args = (
        *(np.uint64(target) for target in targets),
        shards.src(rank).view(np.int32),
        group.lane.control(rank).view(np.uint32),
        words[0],
        words[1] - words[0],
        np.int32(rank),
    )
    kernel.launch(config.ctas, None, args, stream=member.stream)
    return LaunchInfo(kernel, config.ctas, config.threads, 0)
