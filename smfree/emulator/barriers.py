"""mbarrier operations of a group of lanes at once (PTX ISA, "mbarrier"). Keys: flat shared address // 8."""

from __future__ import annotations

import numpy as np

from smfree.emulator.barrier_table import (
    ANNOUNCED,
    ARRIVED,
    COLUMNS,
    COMPLETED,
    DONE0,
    EXPECTED,
    LAST,
    LIVE,
    MAX_COUNT,
    OVERDUE,
    PARKED,
    PENDING,
    PENDING_BITS,
    PHASE,
    SEEN,
    TX,
    BarrierState,
    BarrierTable,
    Int,
    segments,
)
from smfree.emulator.bytespace import as_addresses, max_reduce, or_reduce
from smfree.emulator.errors import BarrierFault, Severity

__all__ = ["MAX_COUNT", "BarrierState", "MBarriers"]


class MBarriers(BarrierTable):
    """All mbarriers of ``slots`` resident CTAs with ``pitch`` bytes of shared memory each.

    Methods take arrays ``key`` (int64[n]; duplicates are several lanes on one barrier, processed as if one
    after another in lane order) and ``time`` (float64[n], SM cycles). Breaking a rule raises
    :class:`BarrierFault` with ``index``; a finding of severity ``strict`` goes to ``report`` (which raises by
    default) and, if that returns, hardware's usual behaviour follows. With ``memory``, the bytes of live
    barriers are closed to plain accesses.
    """

    # --- arrivals and bytes ---

    def arrive(
        self,
        key: np.ndarray,
        count: Int,
        time: np.ndarray,
        *,
        expect_tx: Int | None = None,
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
            states = np.full(n, phase << PENDING_BITS | pending, np.int64)
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
        count: Int = 1,
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
            row[TX] = balance
            row[ANNOUNCED] += tx
        if total > pending:
            if n > 1:
                steps = np.arange(1, n + 1) * count if isinstance(count, int) else np.cumsum(count)
                index = int(np.searchsorted(steps, pending, side="right"))
            raise self._overflow(key, row, total, n, index)
        if phase > seen:
            row[SEEN] = phase
            self._early(key, phase, index)
        if drop:
            row[EXPECTED] = expected - total
        row[ARRIVED] += total
        times = self._times[key]
        if time > times[LAST]:
            times[LAST] = time
        if total == pending and no_complete:
            raise self._no_complete(key, phase, index)
        if total == pending and balance == 0:
            self._complete_one(key, row, phase, index)
        else:
            row[PENDING] = pending - total
        return phase, pending

    def _complete_one(self, key: int, row: np.ndarray, phase: int, index: int) -> None:
        if row[OVERDUE]:
            raise self._overrun(key, phase, int(row[OVERDUE]), index)
        row[PENDING] = row[EXPECTED]
        row[PHASE] = phase + 1
        row[DONE0 + (phase & 1)] = row[LAST]
        row[OVERDUE] = row[PARKED]
        row[PARKED] = 0
        row[ANNOUNCED : ARRIVED + 1] = 0
        self._completed.append(key)

    def _arrive_many(
        self,
        key: np.ndarray,
        count: Int,
        time: np.ndarray,
        expect_tx: Int | None,
        drop: bool,
        no_complete: bool,
    ) -> np.ndarray:
        n = len(key)
        counts = np.broadcast_to(np.asarray(count, np.int64), n)
        order, starts, keys = segments(key)
        total = np.add.reduceat(counts[order], starts)
        rows = self._rows.take(keys, axis=0)
        pending, phase = rows[:, PENDING].copy(), rows[:, PHASE].copy()
        tx: np.ndarray | int = 0
        if expect_tx is not None:
            tx = np.add.reduceat(np.broadcast_to(np.asarray(expect_tx, np.int64), n)[order], starts)
        balance = rows[:, TX] + tx
        odd = (rows[:, LIVE] != 1) | (total > pending) | (balance > MAX_COUNT) | (phase > rows[:, SEEN])
        if no_complete:
            odd |= total == pending
        over = (total > pending) & (rows[:, LIVE] == 1)
        if over.any():
            raise self._overflow_of_many(keys, rows, over, counts[order], order, starts)
        if odd.any():
            return self._one_by_one(key, counts, time, expect_tx, drop, no_complete)
        rows[:, TX] = balance
        rows[:, ANNOUNCED] += tx
        rows[:, ARRIVED] += total
        rows[:, PENDING] = pending - total
        if drop:
            rows[:, EXPECTED] -= total
        self._raise_last(rows, time, order, starts)
        self._complete_rows(keys, rows, (total == pending) & (balance == 0), order[starts])
        before = (phase << PENDING_BITS) | pending
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
        excess = running > np.repeat(np.where(over, rows[:, PENDING], MAX_COUNT << 1), lengths)
        index = int(order[excess].min())
        at = int(np.searchsorted(starts, np.flatnonzero(order == index)[0], side="right")) - 1
        total = int(counts[starts[at] : starts[at] + lengths[at]].sum())
        return self._overflow(int(keys[at]), rows[at], total, int(lengths[at]), index)

    def _overflow(self, key: int, row: np.ndarray, total: int, n: int, index: int) -> BarrierFault:
        lanes = f"{total} by {n} lanes at once" if n > 1 else f"{total}"
        return self._fault(
            "mbarrier.overflow",
            f"more arrivals than phase {int(row[PHASE])} expects: {lanes}, {int(row[PENDING])} of "
            f"{int(row[EXPECTED])} pending",
            "let one elected thread arrive, or initialise the barrier with the number that does",
            key,
            index,
        )

    def _one_by_one(
        self,
        key: np.ndarray,
        counts: np.ndarray,
        time: np.ndarray,
        expect_tx: Int | None,
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
            out[i] = phase << PENDING_BITS | pending
        return out.view(np.uint64)

    def _raise_last(self, rows: np.ndarray, time: np.ndarray, order: np.ndarray, starts: np.ndarray) -> None:
        times = np.broadcast_to(np.asarray(time, np.float64), order.shape)
        last = rows.view(np.float64)[:, LAST]
        np.maximum(last, max_reduceat(times[order], starts), out=last)

    def _complete_rows(self, keys: np.ndarray, rows: np.ndarray, done: np.ndarray, lane: np.ndarray) -> None:
        """Complete the phase of the rows marked ``done`` and write all rows back."""
        if done.any():
            which = np.flatnonzero(done)
            late = which[rows[which, OVERDUE] > 0]
            if len(late):
                i = int(late[0])
                raise self._overrun(int(keys[i]), int(rows[i, PHASE]), int(rows[i, OVERDUE]), int(lane[i]))
            phase = rows[which, PHASE]
            rows[which, PENDING] = rows[which, EXPECTED]
            rows[which, DONE0 + (phase & 1)] = rows[which, LAST]
            rows[which, PHASE] = phase + 1
            rows[which, OVERDUE] = rows[which, PARKED]
            rows[which, PARKED] = 0
            rows[which, ANNOUNCED : ARRIVED + 1] = 0
            self._completed.extend(keys[which].tolist())
        self._rows[keys] = rows

    def expect_tx(self, key: np.ndarray, nbytes: Int, time: np.ndarray) -> None:
        """``mbarrier.expect_tx``: raise the transaction count; never completes a phase."""
        key = as_addresses(key)
        if not len(key):
            return
        nbytes = self._counts(key, nbytes, "expect_tx bytes", MAX_COUNT, zero_ok=True)
        order, starts, keys, tx = self._segment_bytes(key, nbytes)
        rows = self._live_rows(keys, order[starts], "mbarrier.expect_tx")
        balance = rows[:, TX] + tx
        if (balance > MAX_COUNT).any():
            i = int(np.argmax(balance > MAX_COUNT))
            raise self._tx_range(int(keys[i]), int(tx[i]), int(balance[i]), int(order[starts[i]]))
        rows[:, TX] = balance
        rows[:, ANNOUNCED] += tx
        self._raise_last(rows, time, order, starts)
        self._rows[keys] = rows

    def complete_tx(self, key: np.ndarray, nbytes: Int, time: np.ndarray) -> None:
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
        balance = rows[:, TX] - tx
        closing = rows[:, PENDING] == 0
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
        rows[:, TX] = balance
        rows[:, COMPLETED] += tx
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
        row[TX] = balance
        row[COMPLETED] += tx
        times = self._times[key]
        if time > times[LAST]:
            times[LAST] = time
        if pending == 0 and balance == 0:
            self._complete_one(key, row, phase, 0)

    def raise_pending(self, key: np.ndarray, count: Int = 1) -> None:
        """The first half of ``cp.async.mbarrier.arrive`` without ``.noinc``: pending count + ``count``."""
        key = as_addresses(key)
        if not len(key):
            return
        order, starts, keys, more = self._segment_bytes(key, count)
        rows = self._live_rows(keys, order[starts], "cp.async.mbarrier.arrive")
        pending = rows[:, PENDING] + more
        if (pending > MAX_COUNT).any():
            i = int(np.argmax(pending > MAX_COUNT))
            raise self._fault(
                "mbarrier.pending_range",
                f"cp.async.mbarrier.arrive raises the pending count to {int(pending[i])}, above {MAX_COUNT}",
                "use .noinc and count the arrivals at init",
                int(keys[i]),
                int(order[starts[i]]),
            )
        self._rows[keys, PENDING] = pending

    # --- waits ---

    def test(self, key: np.ndarray, parity: Int) -> np.ndarray:
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
                row[SEEN] = phase
            return done
        at = key * COLUMNS
        live_of = self._flat.take(at, mode="clip")
        if (live_of != 1).any():
            index = int(np.argmax(live_of != 1))
            raise self._not_initialised(int(key[index]), "mbarrier wait", index)
        phase_of = self._flat.take(at + PHASE, mode="clip")
        done = (phase_of & 1) != parity
        if done.any():
            self._flat[at[done] + SEEN] = phase_of[done]
        return done

    def _odd_parity(self, key: np.ndarray, parity: Int) -> Int:
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
        current = rows[:, PHASE]
        asked = (np.asarray(state).astype(np.uint64) >> np.uint64(PENDING_BITS)).astype(np.int64)
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
        self._rows[key[done], SEEN] = current[done]
        return done

    @staticmethod
    def pending_count(state: np.ndarray) -> np.ndarray:
        """``mbarrier.pending_count``: the pending count inside an opaque state -> uint32[n]."""
        return (np.asarray(state).astype(np.uint64) & np.uint64((1 << PENDING_BITS) - 1)).astype(np.uint32)

    def park(self, key: np.ndarray) -> None:
        """After a test that answered false, these lanes sleep until the current phase completes."""
        key = as_addresses(key)
        if (key == key[0]).all():
            self._rows[int(key[0]), PARKED] += len(key)
        else:
            np.add.at(self._rows[:, PARKED], key, 1)

    def unpark(self, key: np.ndarray) -> None:
        """These lanes test again now (woken or timed out). Pairs with :meth:`park`.

        A phase that completes while a parked waiter of the phase before has not tested again is an error: the
        waiter would miss it (parity aliasing).
        """
        key = as_addresses(key)
        if (key == key[0]).all():
            row = self._rows[int(key[0])]
            awake = min(int(row[OVERDUE]), len(key))
            row[OVERDUE] -= awake
            row[PARKED] -= len(key) - awake
            return
        _, _, keys, lanes = self._segment_bytes(key, 1)
        overdue = self._rows[keys, OVERDUE]
        woken = np.minimum(overdue, lanes)
        self._rows[keys, OVERDUE] = overdue - woken
        self._rows[keys, PARKED] -= lanes - woken


def max_reduceat(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    return values if len(starts) == len(values) else np.maximum.reduceat(values, starts)


def _total(value: Int, n: int) -> int:
    return value * n if isinstance(value, int) else int(value.sum())


def _latest(time: np.ndarray) -> float:
    return float(time[0]) if len(time) == 1 else float(max_reduce(time))
