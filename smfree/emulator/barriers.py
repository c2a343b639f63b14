"""mbarrier objects of every resident CTA (PTX ISA, "mbarrier").

State is dense: one row of 16 int64 per 8 bytes of shared memory (pages untouched until used), so that a group
of lanes is served by one gather and one scatter. ``key`` is the flat shared address divided by 8.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from smfree.emulator.bytespace import (
    BARRIER,
    UNWRITTEN,
    Report,
    as_addresses,
    max_reduce,
    or_reduce,
    raise_finding,
)
from smfree.emulator.errors import BarrierFault, Severity
from smfree.emulator.shared import SharedMemory

MAX_COUNT = (1 << 20) - 1

# Columns of a row. LIVE: 0 never initialised, 1 live, 2 invalidated. SEEN: the phase number at the last
# successful wait. LAST, DONE0, DONE1 hold float64 bits: newest event, completion of the newest even and of
# the newest odd phase.
_LIVE, _EXPECTED, _PENDING, _TX, _PHASE, _SEEN, _LAST, _DONE0, _DONE1 = range(9)
_PARKED, _OVERDUE, _ANNOUNCED, _COMPLETED, _ARRIVED = range(9, 14)
_COLUMNS = 16
_PENDING_BITS = 21
_Int = np.ndarray | int


@dataclass(frozen=True, slots=True)
class BarrierState:
    """What :meth:`MBarriers.describe` answers; the deadlock report is made from it.

    ``tx_pending`` = announced - completed bytes of this phase (negative: landed before they were announced).
    """

    key: int
    initialised: bool
    ever_initialised: bool
    phase: int
    expected: int
    pending: int
    arrived: int
    tx_pending: int
    tx_announced: int
    tx_completed: int

    @property
    def ever_touched(self) -> bool:
        """Has anyone arrived, announced or completed bytes since init?"""
        return bool(self.phase or self.arrived or self.tx_announced or self.tx_completed)

    def __str__(self) -> str:
        if not self.initialised:
            return "invalidated" if self.ever_initialised else "never initialised"
        head = f"phase {self.phase}: "
        if not self.ever_touched:
            return f"{head}never touched: all {self.expected} arrivals missing, 0 bytes announced"
        text = f"{head}{self.pending} arrivals missing ({self.arrived} arrived), "
        if self.tx_pending < 0:
            return text + f"{-self.tx_pending} bytes landed that nobody announced"
        return text + f"{self.tx_pending} of {self.tx_announced} bytes missing"


def _sparse_zeros(rows: int, columns: int) -> np.ndarray:
    """int64 zeros of which a few rows far apart will be touched: small pages, so that each costs little."""
    memory = mmap.mmap(-1, max(rows * columns * 8, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int64, rows * columns).reshape(rows, columns)


class MBarriers:
    """All mbarriers of ``slots`` resident CTAs with ``pitch`` bytes of shared memory each.

    Methods take arrays ``key`` (int64[n]; duplicates are several lanes on one barrier, processed as if one
    after another in lane order) and ``time`` (float64[n], SM cycles). Breaking a rule raises
    :class:`BarrierFault` with ``index``; a finding of severity ``strict`` goes to ``report`` (which raises by
    default) and, if that returns, hardware's usual behaviour follows. With ``memory``, the bytes of live
    barriers are closed to plain accesses.
    """

    def __init__(
        self,
        slots: int,
        pitch: int,
        *,
        memory: SharedMemory | None = None,
        report: Report = raise_finding,
    ) -> None:
        self.slots, self.pitch, self.memory, self.report = slots, pitch, memory, report
        self._rows = _sparse_zeros(slots * pitch // 8, _COLUMNS)
        self._flat = self._rows.reshape(-1)
        self._times = self._rows.view(np.float64)
        self._used: dict[int, list[int]] = {}
        self._completed: list[int] = []
        self._live_lo, self._live_hi = 1 << 62, -1

    # --- life ---

    def keys(self, addr: np.ndarray) -> np.ndarray:
        """Flat shared addresses -> keys; outside or not a multiple of 8 is a fault."""
        addr = as_addresses(addr)
        mixed = int(or_reduce(addr)) if len(addr) else 0
        if mixed & 7 or mixed < 0 or int(max_reduce(addr, initial=0)) >= self.slots * self.pitch:
            bad = ((addr & 7) != 0) | (addr < 0) | (addr >= self.slots * self.pitch)
            index = int(np.argmax(bad))
            raise BarrierFault(
                f"an mbarrier object is 8-byte aligned and lies in shared memory (got "
                f"0x{int(addr[index]):x}); declare it as a .b64 / uint64_t in shared memory",
                rule="mbarrier.address",
                index=index,
            )
        return addr >> 3

    def reset(self, slots: np.ndarray) -> None:
        """A new CTA moves into each of ``slots``: forget their barriers. The bytes: SharedMemory.reset."""
        for slot in as_addresses(slots).tolist():
            used = self._used.pop(slot, None)
            if used:
                self._rows[used] = 0

    def init(self, key: np.ndarray, count: _Int, time: np.ndarray) -> None:
        """``mbarrier.init``: phase 0, ``count`` expected arrivals (1..2^20-1) per phase."""
        key = as_addresses(key)
        counts = np.broadcast_to(np.asarray(count, np.int64), key.shape)
        bad = (counts < 1) | (counts > MAX_COUNT)
        if bad.any():
            i = int(np.argmax(bad))
            raise self._fault(
                "mbarrier.count",
                f"mbarrier.init count must be 1..{MAX_COUNT} (got {int(counts[i])})",
                "pass the number of arrivals that complete one phase",
                int(key[i]),
                i,
            )
        seen: set[int] = set()
        for i, k in enumerate(key.tolist()):
            if k in seen or self._rows[k, _LIVE] == 1:
                raise self._fault(
                    "mbarrier.reinit",
                    "mbarrier.init over a live mbarrier",
                    "initialise it once, by one thread, or mbarrier.inval it first (two barriers there?)",
                    k,
                    i,
                )
            seen.add(k)
        if self.memory is not None:
            self.memory.check_write(key << 3, 8)
            self.memory.mark(key << 3, 8, BARRIER)
        rows = np.zeros((len(key), _COLUMNS), np.int64)
        rows[:, _LIVE] = 1
        rows[:, _EXPECTED] = rows[:, _PENDING] = counts
        times = rows.view(np.float64)
        times[:, _LAST] = times[:, _DONE1] = time
        self._rows[key] = rows
        for k in seen:
            self._used.setdefault(k * 8 // self.pitch, []).append(k)
        self._live_lo = min(self._live_lo, min(seen, default=self._live_lo))
        self._live_hi = max(self._live_hi, max(seen, default=self._live_hi))

    def inval(self, key: np.ndarray) -> None:
        """``mbarrier.inval``: the bytes may be reused; their content is undefined."""
        key = as_addresses(key)
        self._need_live(key, "mbarrier.inval")
        self._rows[key] = 0
        self._rows[key, _LIVE] = 2
        if self.memory is not None:
            self.memory.mark(key << 3, 8, UNWRITTEN)

    # --- arrivals and bytes ---

    def arrive(
        self,
        key: np.ndarray,
        count: _Int,
        time: np.ndarray,
        *,
        expect_tx: _Int | None = None,
        drop: bool = False,
        no_complete: bool = False,
    ) -> np.ndarray:
        """``mbarrier.arrive[.expect_tx]`` / ``arrive_drop`` -> uint64[n], the opaque state before each
        arrival.

        ``expect_tx`` bytes are announced first, then ``count`` arrivals happen. More arrivals than the phase
        still expects is an error; so is completing a phase with ``no_complete``.
        """
        key = as_addresses(key)
        n = key.shape[0]
        if n == 0:
            return np.empty(0, np.uint64)
        count = self._counts(key, count, "mbarrier.arrive count", MAX_COUNT)
        if expect_tx is not None:
            expect_tx = self._counts(key, expect_tx, "expect_tx bytes", MAX_COUNT, zero_ok=True)
        one = int(key[0])
        if n == 1 or (key == one).all():
            total = _total(count, n)
            bytes_total = 0 if expect_tx is None else _total(expect_tx, n)
            phase, pending = self._arrive_one(
                one, total, _latest(time), bytes_total, drop, no_complete, 0, count=count, n=n
            )
            states = np.full(n, phase << _PENDING_BITS | pending, np.int64)
            if n > 1:
                states -= np.arange(n) * count if isinstance(count, int) else np.cumsum(count) - count
            return states.view(np.uint64)
        return self._arrive_many(key, count, time, expect_tx, drop, no_complete)

    def _arrive_one(
        self,
        key: int,
        total: int,
        time: float,
        tx: int,
        drop: bool,
        no_complete: bool,
        index: int,
        *,
        count: _Int = 1,
        n: int = 1,
    ) -> tuple[int, int]:
        row = self._rows[key]
        live, expected, pending, balance, phase, seen = row[:6].tolist()
        if live != 1:
            raise self._not_initialised(key, "mbarrier.arrive", index)
        if tx:
            balance += tx
            if balance > MAX_COUNT:
                raise self._tx_range(key, tx, balance, index)
            row[_TX] = balance
            row[_ANNOUNCED] += tx
        if total > pending:
            if n > 1:
                steps = np.arange(1, n + 1) * count if isinstance(count, int) else np.cumsum(count)
                index = int(np.searchsorted(steps, pending, side="right"))
            raise self._overflow(key, row, total, n, index)
        if phase > seen:
            row[_SEEN] = phase
            self._early(key, phase, index)
        if drop:
            row[_EXPECTED] = expected - total
        row[_ARRIVED] += total
        times = self._times[key]
        if time > times[_LAST]:
            times[_LAST] = time
        if total == pending and no_complete:
            raise self._no_complete(key, phase, index)
        if total == pending and balance == 0:
            self._complete_one(key, row, phase, index)
        else:
            row[_PENDING] = pending - total
        return phase, pending

    def _complete_one(self, key: int, row: np.ndarray, phase: int, index: int) -> None:
        if row[_OVERDUE]:
            raise self._overrun(key, phase, int(row[_OVERDUE]), index)
        row[_PENDING] = row[_EXPECTED]
        row[_PHASE] = phase + 1
        row[_DONE0 + (phase & 1)] = row[_LAST]
        row[_OVERDUE] = row[_PARKED]
        row[_PARKED] = 0
        row[_ANNOUNCED : _ARRIVED + 1] = 0
        self._completed.append(key)

    def _arrive_many(
        self,
        key: np.ndarray,
        count: _Int,
        time: np.ndarray,
        expect_tx: _Int | None,
        drop: bool,
        no_complete: bool,
    ) -> np.ndarray:
        n = len(key)
        counts = np.broadcast_to(np.asarray(count, np.int64), n)
        order, starts, keys = _segments(key)
        total = np.add.reduceat(counts[order], starts)
        rows = self._rows.take(keys, axis=0)
        pending, phase = rows[:, _PENDING].copy(), rows[:, _PHASE].copy()
        tx: np.ndarray | int = 0
        if expect_tx is not None:
            tx = np.add.reduceat(np.broadcast_to(np.asarray(expect_tx, np.int64), n)[order], starts)
        balance = rows[:, _TX] + tx
        odd = (rows[:, _LIVE] != 1) | (total > pending) | (balance > MAX_COUNT) | (phase > rows[:, _SEEN])
        if no_complete:
            odd |= total == pending
        over = (total > pending) & (rows[:, _LIVE] == 1)
        if over.any():
            raise self._overflow_of_many(keys, rows, over, counts[order], order, starts)
        if odd.any():
            return self._one_by_one(key, counts, time, expect_tx, drop, no_complete)
        rows[:, _TX] = balance
        rows[:, _ANNOUNCED] += tx
        rows[:, _ARRIVED] += total
        rows[:, _PENDING] = pending - total
        if drop:
            rows[:, _EXPECTED] -= total
        self._raise_last(rows, time, order, starts)
        self._complete_rows(keys, rows, (total == pending) & (balance == 0), order[starts])
        before = (phase << _PENDING_BITS) | pending
        if len(keys) == n:
            out = np.empty(n, np.int64)
            out[order] = before
            return out.view(np.uint64)
        running = np.cumsum(counts[order]) - counts[order]
        lengths = np.diff(np.append(starts, n))
        out = np.empty(n, np.int64)
        out[order] = np.repeat(before + running[starts], lengths) - running
        return out.view(np.uint64)

    def _overflow_of_many(
        self,
        keys: np.ndarray,
        rows: np.ndarray,
        over: np.ndarray,
        counts: np.ndarray,
        order: np.ndarray,
        starts: np.ndarray,
    ) -> BarrierFault:
        """The first lane whose arrival is one too many for the phase; ``counts`` in ``order``."""
        running = np.cumsum(counts)
        lengths = np.diff(starts, append=len(counts))
        running -= np.repeat(running[starts] - counts[starts], lengths)
        excess = running > np.repeat(np.where(over, rows[:, _PENDING], MAX_COUNT << 1), lengths)
        index = int(order[excess].min())
        at = int(np.searchsorted(starts, np.flatnonzero(order == index)[0], side="right")) - 1
        total = int(counts[starts[at] : starts[at] + lengths[at]].sum())
        return self._overflow(int(keys[at]), rows[at], total, int(lengths[at]), index)

    def _overflow(self, key: int, row: np.ndarray, total: int, n: int, index: int) -> BarrierFault:
        lanes = f"{total} by {n} lanes at once" if n > 1 else f"{total}"
        return self._fault(
            "mbarrier.overflow",
            f"more arrivals than phase {int(row[_PHASE])} expects: {lanes}, {int(row[_PENDING])} of "
            f"{int(row[_EXPECTED])} pending",
            "let one elected thread arrive, or initialise the barrier with the number that does",
            key,
            index,
        )

    def _one_by_one(
        self,
        key: np.ndarray,
        counts: np.ndarray,
        time: np.ndarray,
        expect_tx: _Int | None,
        drop: bool,
        no_complete: bool,
    ) -> np.ndarray:
        """Lane after lane; how faults find their lane and findings are told one by one."""
        out = np.empty(len(key), np.int64)
        tx = np.broadcast_to(np.asarray(0 if expect_tx is None else expect_tx, np.int64), key.shape)
        times = np.broadcast_to(np.asarray(time, np.float64), key.shape)
        for i, k in enumerate(key.tolist()):
            phase, pending = self._arrive_one(
                k, int(counts[i]), float(times[i]), int(tx[i]), drop, no_complete, i
            )
            out[i] = phase << _PENDING_BITS | pending
        return out.view(np.uint64)

    def _raise_last(self, rows: np.ndarray, time: np.ndarray, order: np.ndarray, starts: np.ndarray) -> None:
        times = np.broadcast_to(np.asarray(time, np.float64), order.shape)
        last = rows.view(np.float64)[:, _LAST]
        np.maximum(last, max_reduceat(times[order], starts), out=last)

    def _complete_rows(self, keys: np.ndarray, rows: np.ndarray, done: np.ndarray, lane: np.ndarray) -> None:
        """Complete the phase of the rows marked ``done`` and write all rows back."""
        if done.any():
            which = np.flatnonzero(done)
            late = which[rows[which, _OVERDUE] > 0]
            if len(late):
                i = int(late[0])
                raise self._overrun(int(keys[i]), int(rows[i, _PHASE]), int(rows[i, _OVERDUE]), int(lane[i]))
            phase = rows[which, _PHASE]
            rows[which, _PENDING] = rows[which, _EXPECTED]
            rows[which, _DONE0 + (phase & 1)] = rows[which, _LAST]
            rows[which, _PHASE] = phase + 1
            rows[which, _OVERDUE] = rows[which, _PARKED]
            rows[which, _PARKED] = 0
            rows[which, _ANNOUNCED : _ARRIVED + 1] = 0
            self._completed.extend(keys[which].tolist())
        self._rows[keys] = rows

    def expect_tx(self, key: np.ndarray, nbytes: _Int, time: np.ndarray) -> None:
        """``mbarrier.expect_tx``: raise the transaction count; never completes a phase."""
        key = as_addresses(key)
        if not len(key):
            return
        nbytes = self._counts(key, nbytes, "expect_tx bytes", MAX_COUNT, zero_ok=True)
        order, starts, keys, tx = self._segment_bytes(key, nbytes)
        rows = self._live_rows(keys, order[starts], "mbarrier.expect_tx")
        balance = rows[:, _TX] + tx
        if (balance > MAX_COUNT).any():
            i = int(np.argmax(balance > MAX_COUNT))
            raise self._tx_range(int(keys[i]), int(tx[i]), int(balance[i]), int(order[starts[i]]))
        rows[:, _TX] = balance
        rows[:, _ANNOUNCED] += tx
        self._raise_last(rows, time, order, starts)
        self._rows[keys] = rows

    def complete_tx(self, key: np.ndarray, nbytes: _Int, time: np.ndarray) -> None:
        """``mbarrier.complete_tx``, and what an asynchronous copy does when its bytes have landed."""
        key = as_addresses(key)
        if not len(key):
            return
        nbytes = self._counts(key, nbytes, "complete_tx bytes", None, zero_ok=True)
        if len(key) == 1:
            self._complete_tx_one(int(key[0]), _total(nbytes, 1), _latest(np.atleast_1d(time)))
            return
        order, starts, keys, tx = self._segment_bytes(key, nbytes)
        rows = self._live_rows(keys, order[starts], "complete_tx of an asynchronous copy")
        balance = rows[:, _TX] - tx
        closing = rows[:, _PENDING] == 0
        if len(keys) < len(key) and (closing & (balance < 0)).any():
            # The bytes of some lane may complete the phase, the rest then counts for the next one.
            times = np.broadcast_to(np.asarray(time, np.float64), key.shape)
            each = np.broadcast_to(np.asarray(nbytes, np.int64), key.shape)
            for i in range(len(key)):
                self.complete_tx(key[i : i + 1], int(each[i]), times[i : i + 1])
            return
        if (balance < -MAX_COUNT).any():
            i = int(np.argmax(balance < -MAX_COUNT))
            raise self._tx_range(int(keys[i]), -int(tx[i]), int(balance[i]), int(order[starts[i]]))
        rows[:, _TX] = balance
        rows[:, _COMPLETED] += tx
        self._raise_last(rows, time, order, starts)
        self._complete_rows(keys, rows, closing & (balance == 0), order[starts])

    def _complete_tx_one(self, key: int, tx: int, time: float) -> None:
        row = self._rows[key]
        live, _, pending, balance, phase, _ = row[:6].tolist()
        if live != 1:
            raise self._not_initialised(key, "complete_tx of an asynchronous copy", 0)
        balance -= tx
        if balance < -MAX_COUNT:
            raise self._tx_range(key, -tx, balance, 0)
        row[_TX] = balance
        row[_COMPLETED] += tx
        times = self._times[key]
        if time > times[_LAST]:
            times[_LAST] = time
        if pending == 0 and balance == 0:
            self._complete_one(key, row, phase, 0)

    def raise_pending(self, key: np.ndarray, count: _Int = 1) -> None:
        """The first half of ``cp.async.mbarrier.arrive`` without ``.noinc``: pending count + ``count``."""
        key = as_addresses(key)
        if not len(key):
            return
        order, starts, keys, more = self._segment_bytes(key, count)
        rows = self._live_rows(keys, order[starts], "cp.async.mbarrier.arrive")
        pending = rows[:, _PENDING] + more
        if (pending > MAX_COUNT).any():
            i = int(np.argmax(pending > MAX_COUNT))
            raise self._fault(
                "mbarrier.pending_range",
                f"cp.async.mbarrier.arrive raises the pending count to {int(pending[i])}, above {MAX_COUNT}",
                "use .noinc and count the arrivals at init",
                int(keys[i]),
                int(order[starts[i]]),
            )
        self._rows[keys, _PENDING] = pending

    # --- waits ---

    def test(self, key: np.ndarray, parity: _Int) -> np.ndarray:
        """``test_wait.parity`` / ``try_wait.parity`` -> bool[n]: has the phase of that parity completed?

        Parity names the current phase (false) or the one before it (true); on a fresh barrier parity 1 is
        true. Parity outside {0, 1} is a strict finding; its low bit is used.
        """
        key = as_addresses(key)
        n = key.shape[0]
        if n == 0:
            return np.empty(0, bool)
        if isinstance(parity, np.ndarray) and parity.ndim == 0:
            parity = int(parity)
        worst = parity if isinstance(parity, int) else int(or_reduce(parity))
        if worst & ~1:
            parity = self._odd_parity(key, parity)
        one = int(key[0])
        if n == 1 or (key == one).all():
            row = self._rows[one]
            live, _, _, _, phase, seen = row[:6].tolist()
            if live != 1:
                raise self._not_initialised(one, "mbarrier wait", 0)
            low = phase & 1
            done = np.full(n, low != parity) if isinstance(parity, int) else parity != low
            if phase > seen and done.any():
                row[_SEEN] = phase
            return done
        at = key * _COLUMNS
        live_of = self._flat.take(at, mode="clip")
        if (live_of != 1).any():
            index = int(np.argmax(live_of != 1))
            raise self._not_initialised(int(key[index]), "mbarrier wait", index)
        phase_of = self._flat.take(at + _PHASE, mode="clip")
        done = (phase_of & 1) != parity
        if done.any():
            self._flat[at[done] + _SEEN] = phase_of[done]
        return done

    def _odd_parity(self, key: np.ndarray, parity: _Int) -> _Int:
        values = np.broadcast_to(np.asarray(parity).astype(np.int64), key.shape)
        index = int(np.argmax((values & ~1) != 0))
        self.report(
            self._fault(
                "mbarrier.parity",
                f"phase parity operand {int(values[index])} is outside {{0, 1}}",
                "pass (phase & 1); hardware seems to use the low bit",
                int(key[index]),
                index,
                severity=Severity.STRICT,
            )
        )
        return parity & 1

    def test_state(self, key: np.ndarray, state: np.ndarray) -> np.ndarray:
        """``test_wait`` / ``try_wait`` by a state that :meth:`arrive` returned -> bool[n].

        Only states of the current or the preceding phase are valid; another one is an error.
        """
        key = as_addresses(key)
        if not len(key):
            return np.empty(0, bool)
        rows = self._live_rows(key, np.arange(len(key)), "mbarrier wait")
        current = rows[:, _PHASE]
        asked = (np.asarray(state).astype(np.uint64) >> np.uint64(_PENDING_BITS)).astype(np.int64)
        stale = (asked > current) | (asked < current - 1)
        if stale.any():
            i = int(np.argmax(stale))
            raise self._fault(
                "mbarrier.state",
                f"wait by the state of phase {int(asked[i])} while phase {int(current[i])} runs",
                "only a state returned by an arrive in the current or the preceding phase may be waited on",
                int(key[i]),
                i,
            )
        done = asked < current
        self._rows[key[done], _SEEN] = current[done]
        return done

    @staticmethod
    def pending_count(state: np.ndarray) -> np.ndarray:
        """``mbarrier.pending_count``: the pending count inside an opaque state -> uint32[n]."""
        return (np.asarray(state).astype(np.uint64) & np.uint64((1 << _PENDING_BITS) - 1)).astype(np.uint32)

    def park(self, key: np.ndarray) -> None:
        """After a test that answered false, these lanes sleep until the current phase completes."""
        np.add.at(self._rows[:, _PARKED], as_addresses(key), 1)

    def unpark(self, key: np.ndarray) -> None:
        """These lanes test again now (woken or timed out). Pairs with :meth:`park`.

        A phase that completes while a parked waiter of the phase before has not tested again is an error: the
        waiter would miss it (parity aliasing).
        """
        _, _, keys, lanes = self._segment_bytes(as_addresses(key), 1)
        overdue = self._rows[keys, _OVERDUE]
        woken = np.minimum(overdue, lanes)
        self._rows[keys, _OVERDUE] = overdue - woken
        self._rows[keys, _PARKED] -= lanes - woken

    # --- questions ---

    def phase(self, key: np.ndarray) -> np.ndarray:
        """Number of completed phases -> int64[n]."""
        return self._rows[as_addresses(key), _PHASE]

    def completion_time(self, key: np.ndarray, parity: _Int) -> np.ndarray:
        """When the newest phase of that parity completed -> float64[n]; init's time on a fresh barrier."""
        return self._times[as_addresses(key), _DONE0 + (np.asarray(parity).astype(np.int64) & 1)]

    def drain_completed(self) -> np.ndarray:
        """Keys (sorted, unique int64) whose phase completed since the last call."""
        if not self._completed:
            return np.empty(0, np.int64)
        keys = np.unique(np.array(self._completed, np.int64))
        self._completed.clear()
        return keys

    def is_live(self, lo: int, hi: int) -> bool:
        """Does a live barrier overlap the flat shared bytes [lo, hi)?"""
        first, last = max(lo >> 3, self._live_lo), min((hi - 1) >> 3, self._live_hi)
        return first <= last and bool((self._rows[first : last + 1, _LIVE] == 1).any())

    def live_keys(self) -> np.ndarray:
        """Keys of all live barriers, sorted."""
        used = sorted({k for keys in self._used.values() for k in keys})
        keys = np.array(used, np.int64)
        return keys[self._rows[keys, _LIVE] == 1]

    def describe(self, key: int) -> BarrierState:
        """Everything a report wants to say about one barrier."""
        row = self._rows[key].tolist()
        return BarrierState(
            key,
            row[_LIVE] == 1,
            row[_LIVE] != 0,
            row[_PHASE],
            row[_EXPECTED],
            row[_PENDING],
            row[_ARRIVED],
            row[_TX],
            row[_ANNOUNCED],
            row[_COMPLETED],
        )

    # --- helpers and faults ---

    def _segment_bytes(
        self, key: np.ndarray, amount: _Int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        order, starts, keys = _segments(key)
        if isinstance(amount, int):
            return order, starts, keys, np.diff(starts, append=len(key)) * amount
        return order, starts, keys, np.add.reduceat(amount[order], starts)

    def _counts(
        self, key: np.ndarray, value: _Int, what: str, top: int | None, *, zero_ok: bool = False
    ) -> _Int:
        """``value`` as int or int64[n], inside 0 or 1..top."""
        if isinstance(value, int):
            low = high = value
        else:
            value = np.asarray(value).astype(np.int64)
            if value.ndim == 0:
                return self._counts(key, int(value), what, top, zero_ok=zero_ok)
            low, high = int(value.min()), int(value.max())
        if low < (0 if zero_ok else 1) or (top is not None and high > top):
            values = np.broadcast_to(np.asarray(value), key.shape)
            bad = (values < (0 if zero_ok else 1)) | (values > (top if top is not None else high))
            i = int(np.argmax(bad))
            raise self._fault(
                "mbarrier.operand_range",
                f"{what} must be {0 if zero_ok else 1}..{top or 'any'} (got {int(values[i])})",
                "split it over several phases or barriers" if zero_ok else "arrive with the lanes' own count",
                int(key[i]),
                i,
            )
        return value

    def _live_rows(self, keys: np.ndarray, lane: np.ndarray, what: str) -> np.ndarray:
        rows = self._rows.take(keys, axis=0)
        dead = rows[:, _LIVE] != 1
        if dead.any():
            i = int(np.argmax(dead))
            raise self._not_initialised(int(keys[i]), what, int(lane[i]))
        return rows

    def _need_live(self, key: np.ndarray, what: str) -> None:
        self._live_rows(key, np.arange(len(key)), what)

    def place(self, key: int) -> str:
        """'mbarrier at shared+0x40 (CTA slot 3)'."""
        return f"mbarrier at shared+0x{key * 8 % self.pitch:x} (CTA slot {key * 8 // self.pitch})"

    def _fault(
        self, rule: str, what: str, remedy: str, key: int, index: int, *, severity: Severity = Severity.ERROR
    ) -> BarrierFault:
        return BarrierFault(f"{what}, {self.place(key)}; {remedy}", rule=rule, index=index, severity=severity)

    def _not_initialised(self, key: int, what: str, index: int) -> BarrierFault:
        if self._rows[key, _LIVE] == 2:
            return self._fault(
                "mbarrier.invalidated",
                f"{what} after mbarrier.inval",
                "initialise it again first",
                key,
                index,
            )
        content = "bytes nobody has written"
        if self.memory is not None and self.memory.written[key * 8 : key * 8 + 8].any():
            word = int(self.memory.data[key * 8 : key * 8 + 8].view(np.uint64)[0])
            content = "zeroed bytes" if word == 0 else f"the data 0x{word:016x}"
        return self._fault(
            "mbarrier.uninitialised",
            f"{what}: no barrier has been initialised at this shared address, which holds {content}",
            "mbarrier.init it first (zeroing or expect_tx is no init), then fence or bar.sync before use",
            key,
            index,
        )

    def _tx_range(self, key: int, tx: int, balance: int, index: int) -> BarrierFault:
        step = f"expect_tx {tx}" if tx >= 0 else f"complete_tx {-tx}"
        return self._fault(
            "mbarrier.tx_range",
            f"transaction count must stay within +-{MAX_COUNT}: {step} brings it to {balance}",
            "announce fewer bytes per phase",
            key,
            index,
        )

    def _early(self, key: int, phase: int, index: int) -> None:
        self.report(
            self._fault(
                "mbarrier.early_arrive",
                f"arrival in phase {phase} before any successful wait on phase {phase - 1}",
                "at least one thread must have seen a phase complete before the next one is arrived on",
                key,
                index,
                severity=Severity.STRICT,
            )
        )

    def _no_complete(self, key: int, phase: int, index: int) -> BarrierFault:
        return self._fault(
            "mbarrier.no_complete",
            f"arrive.noComplete is the last arrival of phase {phase}",
            "use it only where later arrivals follow, or drop .noComplete (sm_90 and up)",
            key,
            index,
        )

    def _overrun(self, key: int, phase: int, waiters: int, index: int) -> BarrierFault:
        return self._fault(
            "mbarrier.overrun",
            f"phase {phase} completes while {waiters} lanes still wait for phase {phase - 1}: their parity "
            "now names an unfinished phase",
            "count the waiters' own arrivals in the barrier, or let them release the stage",
            key,
            index,
        )


def max_reduceat(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return values if len(starts) == len(values) else np.maximum.reduceat(values, starts)


def _segments(key: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> (stable order by key, start of each distinct key in it, the distinct keys)."""
    n = len(key)
    if n == 1:
        zero = np.zeros(1, np.int64)
        return zero, zero, key
    if (key[1:] > key[:-1]).all():
        line = np.arange(n)
        return line, line, key
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return order, starts, ordered[starts]


def _total(value: _Int, n: int) -> int:
    return value * n if isinstance(value, int) else int(value.sum())


def _latest(time: np.ndarray) -> float:
    return float(time[0]) if len(time) == 1 else float(max_reduce(time))
