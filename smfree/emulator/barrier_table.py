"""What an mbarrier is made of: the table of all of them, their life, and how a broken rule is told.

One row of 16 int64 per 8 bytes of shared memory (pages untouched until used), so that a group of lanes is
served by one gather and one scatter.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
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
LIVE, EXPECTED, PENDING, TX, PHASE, SEEN, LAST, DONE0, DONE1 = range(9)
PARKED, OVERDUE, ANNOUNCED, COMPLETED, ARRIVED = range(9, 14)
COLUMNS = 16
PENDING_BITS = 21
Int = np.ndarray | int


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


def sparse_zeros(rows: int, columns: int) -> np.ndarray:
    """int64 zeros of which a few rows far apart will be touched: small pages, so that each costs little."""
    memory = mmap.mmap(-1, max(rows * columns * 8, 1))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.int64, rows * columns).reshape(rows, columns)


class BarrierTable:
    """Rows of all barriers of ``slots`` CTAs with ``pitch`` bytes of shared memory each; see MBarriers.

    ``name`` turns a key into text for reports.
    """

    def __init__(
        self,
        slots: int,
        pitch: int,
        *,
        memory: SharedMemory | None = None,
        report: Report = raise_finding,
        name: Callable[[int], str] | None = None,
    ) -> None:
        self.slots, self.pitch, self.memory, self.report = slots, pitch, memory, report
        self.name = name or (lambda key: f"CTA slot {key * 8 // pitch}")
        if memory is not None:
            memory.barrier_at = lambda addr: f"a live mbarrier ({self.name(addr >> 3)})"
        self._rows = sparse_zeros(slots * pitch // 8, COLUMNS)
        self._flat = self._rows.reshape(-1)
        self._times = self._rows.view(np.float64)
        self._used: dict[int, list[int]] = {}
        self._completed: list[int] = []

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

    def init(self, key: np.ndarray, count: Int, time: np.ndarray) -> None:
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
            if k in seen or self._rows[k, LIVE] == 1:
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
        rows = np.zeros((len(key), COLUMNS), np.int64)
        rows[:, LIVE] = 1
        rows[:, EXPECTED] = rows[:, PENDING] = counts
        times = rows.view(np.float64)
        times[:, LAST] = times[:, DONE1] = time
        self._rows[key] = rows
        for k in seen:
            self._used.setdefault(k * 8 // self.pitch, []).append(k)

    def inval(self, key: np.ndarray) -> None:
        """``mbarrier.inval``: the bytes may be reused; their content is undefined."""
        key = as_addresses(key)
        self._need_live(key, "mbarrier.inval")
        self._rows[key] = 0
        self._rows[key, LIVE] = 2
        if self.memory is not None:
            self.memory.mark(key << 3, 8, UNWRITTEN)

    # --- questions ---

    def phase(self, key: np.ndarray) -> np.ndarray:
        """Number of completed phases -> int64[n]."""
        return self._rows[as_addresses(key), PHASE]

    def completion_time(self, key: np.ndarray, parity: Int) -> np.ndarray:
        """When the newest phase of that parity completed -> float64[n]; init's time on a fresh barrier."""
        return self._times[as_addresses(key), DONE0 + (np.asarray(parity).astype(np.int64) & 1)]

    def drain_completed(self) -> np.ndarray:
        """Keys (sorted, unique int64) whose phase completed since the last call."""
        if not self._completed:
            return np.empty(0, np.int64)
        keys = np.unique(np.array(self._completed, np.int64))
        self._completed.clear()
        return keys

    def describe(self, key: int) -> BarrierState:
        """Everything a report wants to say about one barrier."""
        row = self._rows[key].tolist()
        return BarrierState(
            key,
            row[LIVE] == 1,
            row[LIVE] != 0,
            row[PHASE],
            row[EXPECTED],
            row[PENDING],
            row[ARRIVED],
            row[TX],
            row[ANNOUNCED],
            row[COMPLETED],
        )

    # --- helpers and faults ---

    def _segment_bytes(
        self, key: np.ndarray, amount: Int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        order, starts, keys = segments(key)
        if isinstance(amount, int):
            return order, starts, keys, np.diff(starts, append=len(key)) * amount
        return order, starts, keys, np.add.reduceat(amount[order], starts)

    def _counts(
        self, key: np.ndarray, value: Int, what: str, top: int | None, *, zero_ok: bool = False
    ) -> Int:
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
        dead = rows[:, LIVE] != 1
        if dead.any():
            i = int(np.argmax(dead))
            raise self._not_initialised(int(keys[i]), what, int(lane[i]))
        return rows

    def _need_live(self, key: np.ndarray, what: str) -> None:
        self._live_rows(key, np.arange(len(key)), what)

    def place(self, key: int) -> str:
        """'mbarrier at shared+0x40 (full[1] of CTA 3)'."""
        return f"mbarrier at shared+0x{key * 8 % self.pitch:x} ({self.name(key)})"

    def _fault(
        self, rule: str, what: str, remedy: str, key: int, index: int, *, severity: Severity = Severity.ERROR
    ) -> BarrierFault:
        return BarrierFault(f"{what}, {self.place(key)}; {remedy}", rule=rule, index=index, severity=severity)

    def _not_initialised(self, key: int, what: str, index: int) -> BarrierFault:
        if self._rows[key, LIVE] == 2:
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


def segments(key: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
