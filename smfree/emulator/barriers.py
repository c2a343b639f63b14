"""mbarrier objects of every resident CTA (PTX ISA, "mbarrier").

State is dense: one row of eight int64 per 8 bytes of shared memory, so that a whole group of lanes is served by
one gather and one scatter. ``key`` is the flat shared address divided by 8.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smfree.emulator.memory import Report, SharedMemory

MAX_COUNT = (1 << 20) - 1


@dataclass(frozen=True, slots=True)
class BarrierState:
    """What :meth:`MBarriers.describe` answers; the deadlock report is made from it."""

    key: int
    initialised: bool
    ever_initialised: bool
    ever_touched: bool
    phase: int
    expected: int
    pending: int
    arrived: int
    tx_pending: int
    tx_announced: int
    tx_completed: int


class MBarriers:
    """All mbarriers of ``slots`` resident CTAs with ``pitch`` bytes of shared memory each.

    Methods take arrays ``key`` (int64[n], duplicates = several lanes on one barrier, processed as if one after
    another in lane order) and ``time`` (float64[n], SM cycles). Breaking a rule raises
    :class:`~smfree.emulator.errors.BarrierFault` with ``index``; findings of severity ``strict`` go through
    ``report`` (which raises by default) and, if it returns, hardware's usual behaviour follows.
    """

    def __init__(
        self, slots: int, pitch: int, *, memory: SharedMemory | None = None, report: Report | None = None
    ) -> None: ...

    def keys(self, addr: np.ndarray) -> np.ndarray:
        """Flat shared addresses -> keys; misaligned (not a multiple of 8) raises."""
        raise NotImplementedError

    def reset(self, slots: np.ndarray) -> None:
        """A new CTA moves into each of ``slots``: forget their barriers."""

    def init(self, key: np.ndarray, count: np.ndarray | int, time: np.ndarray) -> None:
        """``mbarrier.init``: phase 0, ``count`` expected arrivals (1..2^20-1)."""

    def inval(self, key: np.ndarray) -> None:
        """``mbarrier.inval``: the bytes may be reused; their content is undefined."""

    def arrive(
        self,
        key: np.ndarray,
        count: np.ndarray | int,
        time: np.ndarray,
        *,
        expect_tx: np.ndarray | int | None = None,
        drop: bool = False,
        no_complete: bool = False,
    ) -> np.ndarray:
        """``mbarrier.arrive[.expect_tx]`` / ``arrive_drop``. Returns uint64[n], the state before each arrival."""
        raise NotImplementedError

    def expect_tx(self, key: np.ndarray, nbytes: np.ndarray | int, time: np.ndarray) -> None:
        """``mbarrier.expect_tx``: raise the transaction count; never completes a phase."""

    def complete_tx(self, key: np.ndarray, nbytes: np.ndarray | int, time: np.ndarray) -> None:
        """``mbarrier.complete_tx``, and what an asynchronous copy does when its bytes have landed."""

    def raise_pending(self, key: np.ndarray, count: np.ndarray | int) -> None:
        """The first half of ``cp.async.mbarrier.arrive`` without ``.noinc``: pending count + ``count``."""

    def test(self, key: np.ndarray, parity: np.ndarray | int) -> np.ndarray:
        """``test_wait.parity`` / ``try_wait.parity`` -> bool[n]: has the phase of that parity completed?"""
        raise NotImplementedError

    def test_state(self, key: np.ndarray, state: np.ndarray) -> np.ndarray:
        """``test_wait`` / ``try_wait`` by the state an arrive returned -> bool[n]."""
        raise NotImplementedError

    def pending_count(self, state: np.ndarray) -> np.ndarray:
        """``mbarrier.pending_count``: the pending count inside an opaque state -> uint32[n]."""
        raise NotImplementedError

    def park(self, key: np.ndarray) -> None:
        """These lanes now sleep until the current phase of ``key`` completes (after a test that answered false)."""

    def unpark(self, key: np.ndarray) -> None:
        """These lanes are about to test again (woken or timed out). Pairs with :meth:`park`."""

    def phase(self, key: np.ndarray) -> np.ndarray:
        """Number of completed phases -> int64[n]."""
        raise NotImplementedError

    def completion_time(self, key: np.ndarray, parity: np.ndarray | int) -> np.ndarray:
        """When the newest completed phase of that parity completed -> float64[n] (init time on a fresh one)."""
        raise NotImplementedError

    def drain_completed(self) -> np.ndarray:
        """Keys (sorted, unique int64) whose phase completed since the last call."""
        raise NotImplementedError

    def is_live(self, lo: int, hi: int) -> bool:
        """Does a live barrier overlap the flat shared bytes [lo, hi)?"""
        raise NotImplementedError

    def describe(self, key: int) -> BarrierState:
        """Everything a report wants to say about one barrier."""
        raise NotImplementedError
