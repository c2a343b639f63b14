"""One line of a reduction wrong: what sums it gives, under which schedule; the right kernel is clean there.

What only hardware can show is not here: a relaxed acquire, a relaxed room word (its reads are done when they
are issued), a missing fence between proxies.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.reduce import allreduce, reduce_scatter
from kernels.reduce.elements import Element
from kernels.reduce.message import chunk_of
from kernels.reduce.order import expected
from tests.kernels.mutant_kit import edited, reported
from tests.kernels.reduce_kit import SMALL, inputs, reduce_group

Edits = tuple[tuple[str, str], ...]
STALE = 0x3C
CONFIG = {**SMALL, "ctas": 1, "unroll": 1, "tile_bytes": 128}


@dataclass(frozen=True)
class Calls:
    """Calls that follow each other without a wait: AllReduces into one dst, or ReduceScatters. The first goes
    ``way``, and so do the others unless ``then`` says another. ``config``: values besides CONFIG."""

    way: str
    schedule: str
    ranks: int = 2
    count: int = 160
    calls: int = 2
    scatter: bool = False
    then: str = ""
    config: tuple[tuple[str, int], ...] = ()


def whole_numbers(ranks: int, count: int, call: int) -> list[NDArray[np.uint32]]:
    """Of up to 20 bits: float32 sums them exactly, in whatever order."""
    values = np.random.default_rng([call, ranks]).integers(-(2**20), 2**20, (ranks, count))
    return list(values.astype(np.float32).view(np.uint32))


def wrong_sums(calls: Calls, seed: int = 0) -> dict[tuple[int, int], int]:
    """By (call, rank), how many elements of what the rank copied away behind the call were not its sums."""
    ranks, count, nbytes = calls.ranks, calls.count, 4 * calls.count
    data = [whole_numbers(ranks, count, call) for call in range(calls.calls)]
    with reduce_group(ranks, calls.schedule, seed) as (group, space):
        dst, kept = group.symmetric(nbytes, "dst"), {}
        src = [[member.device.asarray(given[member.rank]) for member in group.members] for given in data]
        for member in group.members:
            for memory in (dst, space.memory):
                memory.array(member.rank).fill(STALE, stream=member.stream)
            member.stream.synchronize()
        for call in range(calls.calls):
            way = calls.then if call and calls.then else calls.way
            if calls.scatter:
                chunks = [chunk_of(nbytes, Element.F32, ranks, rank) for rank in range(ranks)]
                parts = [
                    dst.array(rank).bytes_view(begin, end - begin) for rank, (begin, end) in enumerate(chunks)
                ]
                config = configured(reduce_scatter, space, way, nbytes, calls.config)
                reduce_scatter.reduce_scatter(
                    space, parts, src[call], dtype="float32", way=way, config=config
                )
            else:
                config = configured(allreduce, space, way, nbytes, calls.config)
                allreduce.allreduce(space, dst, src[call], dtype="float32", way=way, config=config)
            for member in group.members:
                kept[call, member.rank] = copy = member.device.empty(nbytes)
                copy.copy_from_device(dst.array(member.rank), stream=member.stream)
        group.wait()
        found = {}
        for (call, rank), array in kept.items():
            begin, end = chunk_of(nbytes, Element.F32, ranks, rank) if calls.scatter else (0, nbytes)
            want = np.sum([bits.view(np.float32) for bits in data[call]], axis=0, dtype=np.float32)
            got = array.numpy().view(np.float32)
            found[call, rank] = int((got != want)[begin // 4 : end // 4].sum())
        return found


def configured(module: Any, space: Any, way: str, nbytes: int, values: tuple[tuple[str, int], ...]) -> Any:
    """A small configuration of the way, with ``values``."""
    config = module.throughput_config(space, way, nbytes)
    has = {one.name for one in fields(config)}
    return replace(config, **{name: n for name, n in {**CONFIG, **dict(values)}.items() if name in has})


@cache
def right_is_clean(calls: Calls, seed: int = 0) -> bool:
    """The kernel as it is."""
    return not any(wrong_sums(calls, seed).values())


SYNC = "if (!sync_ranks(signals, SIGNAL_STEP_TERMS, turn + 1)) return;"
DIRECT_EXIT = ("if (sync_ranks(signals, SIGNAL_STEP_EXIT)) close_signals", "close_signals")
NVLS_ENTRY = "  if (!sync_aliases(signals, SIGNAL_STEP_ENTRY)) return;"
NVLS_EXIT = "  if (!sync_aliases(signals, SIGNAL_STEP_EXIT)) return;"
LARGE = (("piece_bytes", 2048),)
TREE = (("ctas", 4), ("piece_bytes", 256))
WIDE = (("ctas", 2), ("unroll", 2))
ALONE = (("threads", 32), ("piece_bytes", 4096))
EARLY = """
      if (threadIdx.x == 1 && step > 0 && step <= SCATTER_STEPS)
        st_release_sys(ring.theirs, ring.epoch + ++ring.done);
      u8* const to = base_of("""

WRONG: dict[str, tuple[Edits, Calls]] = {
    "ring: no wait for data": (
        (("data ? step > 0 :", "data ? false :"),), Calls("ring.sm", "timed")),
    "ring: a piece less is waited for": (
        (("(data ? sent :", "(data ? sent - 1 :"),), Calls("ring.sm", "timed")),
    "ring: no wait for room": (
        ((": step < SCATTER_STEPS && into_scratch >= NUM_SLOTS;", ": false;"),),
        Calls("ring.sm", "producer-ahead", ranks=4, calls=1)),
    "ring: room of a piece less": (
        (("into_scratch - NUM_SLOTS + 1)", "into_scratch - NUM_SLOTS)"),),
        Calls("ring.sm", "producer-ahead", ranks=4, calls=1)),
    "ring: room is told before it is read": (
        (("uses = step > 0 && step <= SCATTER_STEPS;", "uses = false;"), ("u8* const to = base_of(", EARLY)),
        Calls("ring.sm", "random", ranks=4, count=500, calls=1, config=WIDE)),
    "ring: no bar.sync behind the wait": (
        (("return !__syncthreads_or(!alive);", "return alive;"),), Calls("ring.sm", "timed")),
    "ring: no bar.sync before the signal": (
        (("__syncthreads();  // the accesses of all threads, before the releases of two", ""),),
        Calls("ring.sm", "random", count=300, config=WIDE)),
    "ring: relaxed signals": (
        (("st_release_sys(ring.theirs,", "st_relaxed_sys(ring.theirs,"),), Calls("ring.sm", "async-latest")),
    "ring: epochs used again": ((("  close_ring(ring);", ""),), Calls("ring.sm", "min-pc")),
    "ring: no barrier behind a ReduceScatter": (
        (("if (!SCATTER_ONLY) return true;", "return true;"),),
        Calls("ring.sm", "async-earliest", ranks=3, count=1000, scatter=True, then="direct", config=LARGE)),
    "oneshot: no barrier": (((SYNC, "__syncthreads();"),), Calls("oneshot", "timed")),
    "oneshot: one side": ((("(before + turn) % 2 *", "0 *"),), Calls("oneshot", "min-pc")),
    "oneshot: turns not counted on": (
        (("counts[c] = before + num_turns;", ";"),), Calls("oneshot", "producer-ahead", count=32, calls=3)),
    "oneshot: epochs used again": ((("  close_signals(signals);", ""),), Calls("oneshot", "min-pc")),
    "twoshot: no barrier behind the terms": (((SYNC, "__syncthreads();"),), Calls("twoshot", "timed")),
    "twoshot: one side": ((("blockIdx.x * 2 + turn % 2", "blockIdx.x * 2"),), Calls("twoshot", "min-pc")),
    "twoshot: no barrier at the end": ((DIRECT_EXIT,), Calls("twoshot", "producer-ahead")),
    "twoshot: no barrier behind a ReduceScatter": (
        (DIRECT_EXIT,),
        Calls("direct", "producer-ahead", count=2000, scatter=True, config=ALONE)),
    "twoshot: relaxed signals": (
        (("{ st_release_sys(signals.theirs,", "{ st_relaxed_sys(signals.theirs,"),),
        Calls("twoshot", "async-latest")),
    "tree: no wait for room": (
        (("if (!room || k >= NUM_SLOTS)", "if (!room)"),),
        Calls("tree", "producer-ahead", ranks=4, count=500, calls=1, config=TREE)),
    "tree: no wait for the broadcast": (
        (("threadIdx.x < 3 && speaker", "threadIdx.x < 3 && up && speaker"),),
        Calls("tree", "timed", ranks=4, count=500, calls=1, config=TREE)),
    "tree: no bar.sync before the signal": (
        (("__syncthreads();  // the accesses of all threads, before a few", "// before a few"),),
        Calls("tree", "random", ranks=3, count=700, calls=1, config=(("ctas", 4), *LARGE))),
    "tree: relaxed signals": (
        (("st_release_sys(speaker.theirs,", "st_relaxed_sys(speaker.theirs,"),),
        Calls("tree", "async-latest", ranks=3, count=100, calls=1, config=(("ctas", 4),))),
    "tree: epochs used again": (
        (("control->epochs[SIGNAL_TREE + blockIdx.x] = epoch + k;", ";"),),
        Calls("tree", "min-pc", ranks=3, count=100, config=(("ctas", 4),))),
    "nvls: no entry": (((NVLS_ENTRY, "  __syncthreads();"),), Calls("nvls", "min-pc")),
    "nvls: no exit": (((NVLS_EXIT, ""),), Calls("nvls", "producer-ahead")),
}  # fmt: skip
"""What the line says instead, and calls that show it."""
SEEDS = range(1, 20)
"""Of the random schedule: the first that shows it."""


@pytest.mark.parametrize("name", WRONG, ids=lambda name: name.replace(": ", "-").replace(" ", "-"))
def test_the_sums_are_wrong(name: str) -> None:
    edits, calls = WRONG[name]
    seeds = SEEDS if calls.schedule == "random" else [0]
    with edited(calls.way, *edits):
        shown = next((seed for seed in seeds if any(wrong_sums(calls, seed).values())), None)
    assert shown is not None
    assert right_is_clean(calls, shown)


def test_a_stage_that_is_refilled_before_its_stores_have_read_it() -> None:
    calls = Calls("ring.tma", "producer-ahead", count=1000, calls=1, config=LARGE)
    with (
        edited("ring.tma", ("cp_async_bulk_wait_group_read<DEFER>();", "")),
        reported("overwrites the source of the cp.async.bulk store", "ring_bulk.cu", "has not been read yet"),
    ):
        wrong_sums(calls)
    assert right_is_clean(calls)


def test_a_piece_that_is_signalled_when_its_stores_have_only_been_read() -> None:
    """The next rank loads what is still under way to it."""
    calls = Calls("ring.tma", "async-latest")
    with (
        edited("ring.tma", ("cp_async_bulk_wait_group<0>();", "cp_async_bulk_wait_group_read<0>();")),
        reported("cp.async.bulk load reads", "has yet to write", "wait_group, not .read"),
    ):
        wrong_sums(calls)
    assert right_is_clean(calls)


@pytest.mark.parametrize("element", [Element.F16, Element.BF16], ids=["float16", "bfloat16"])
def test_sums_kept_in_the_element_have_other_bits_but_for_a_ring(element: Element) -> None:
    """A ring adds two at a time and rounds: float32 has 2 p + 2 digits, so rounding to it first changes
    nothing."""
    every = "for (u32 k = 1; k < SOURCES; ++k) add(sums, widen(values[k]))"
    data = inputs(3, 100, element)
    for way, differs in (("twoshot", True), ("ring.sm", False)):
        with (
            reduce_group(3) as (group, space),
            edited(way, (every, f"{every}, sums = widen(narrow(sums))")),
        ):
            dst = group.symmetric(data[0].nbytes, "dst")
            config = configured(allreduce, space, way, dst.nbytes, ())
            src = [member.device.asarray(data[member.rank]) for member in group.members]
            allreduce.allreduce(space, dst, src, dtype=element, way=way, config=config)
            group.wait()
            for member in group.members:
                got = dst.array(member.rank).numpy().view(element.bits)
                assert (got != expected(way, data, element)).any() == differs
