"""The hardware barriers of a CTA: bar.sync, bar.arrive, bar.red (PTX ISA, "bar{.cta}, barrier{.cta}")."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import BarrierFault, Severity
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.warp import per_lane
from smfree.emulator.specs import WARP_SIZE

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch


@dataclass(frozen=True, slots=True)
class Reduction:
    """barrier.red: how the predicates in register ``source`` are combined into ``target``."""

    mode: str  # "popc", "and", "or"
    source: int
    negated: bool
    target: int

    def votes(self, g: Group) -> Any:
        """bool[n]: the predicate of each lane."""
        mine = per_lane(g.regs[self.source], g)
        return ~mine if self.negated else mine

    def result(self, true: Any, threads: Any) -> Any:
        """What threads receive of whose CTA so many predicates out of ``threads`` are true."""
        if self.mode == "popc":
            return true.astype(np.uint32)
        return true == threads if self.mode == "and" else true > 0


@dataclass(slots=True)
class BarrierWait:
    """Parked at a hardware barrier."""

    number: int
    reduction: Reduction | None = None


@dataclass
class _Barrier:
    """One barrier number over all slots: arrivals of the current generation, and what each warp arrived
    with. A warp has arrived when all of its threads that have not exited have, and counts as 32 threads."""

    arrived: Any  # threads
    warps_in: Any  # whole warps; what a thread count is held against
    partial: Any  # threads per warp that wait for the rest of theirs
    expected: Any  # 0 = all threads of the CTA
    pc_of_warp: Any
    parked: list[Group] = field(default_factory=list)


class BarrierUnit:
    """The hardware barriers of one launch, by their number."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.by_number: dict[int, _Barrier] = {}

    def meet(
        self, g: Group, number: int, expected: int | None, *, aligned: bool, arrive_only: bool,
        reduction: Reduction | None = None,
    ) -> bool:  # fmt: skip
        """bar.sync / bar.arrive / bar.red: True when the group may go on."""
        launch, lanes = self.launch, g.lanes
        launch.counters.barriers += len(lanes.warps)
        launch.settle(g)
        b = self._barrier(number)
        if expected is not None and (expected % WARP_SIZE or expected <= 0):
            raise BarrierFault(
                f"the thread count of a barrier must be a positive multiple of {WARP_SIZE} (got {expected})",
                rule="bar.count",
                index=0,
            )
        if expected is None and not b.parked and self._whole_ctas(b, g):
            self._reduce(number, [(g, reduction)])
            self._level_times(number, [g], lanes.slots)
            launch.did_something()
            return True
        self._check_one_instruction(b, g, number, aligned=aligned)
        if arrive_only and expected is None:
            raise BarrierFault("bar.arrive needs a thread count", rule="bar.count", index=0)
        self._check_one_count(b, g, number, expected or 0)
        b.arrived[lanes.slots] += lanes.slot_counts
        b.partial[lanes.warps] += lanes.warp_counts
        b.expected[lanes.slots] = expected or 0
        b.pc_of_warp[lanes.warps] = g.pc
        if not arrive_only:
            g.wait = BarrierWait(number, reduction)
            b.parked.append(g)
        self._release(number, b, lanes.slots)
        return arrive_only

    def _whole_ctas(self, b: _Barrier, g: Group) -> bool:
        """Whether this group is all the live threads of its CTAs, and nobody arrived before."""
        slots = g.lanes.slots
        return bool((g.lanes.slot_counts == self.launch.live[slots]).all()) and not b.arrived[slots].any()

    def _barrier(self, number: int) -> _Barrier:
        if number not in self.by_number:
            geometry = self.launch.geometry
            arrived, warps_in, expected = (np.zeros(geometry.slots, np.int64) for _ in range(3))
            partial, pc_of_warp = np.zeros(geometry.num_warps, np.int64), np.full(geometry.num_warps, -1)
            self.by_number[number] = _Barrier(arrived, warps_in, partial, expected, pc_of_warp)
        return self.by_number[number]

    def reset(self, slots: Any) -> None:
        """New CTAs move into these slots."""
        for b in self.by_number.values():
            self._clear(b, slots)

    def _clear(self, b: _Barrier, slots: Any) -> None:
        wpc = self.launch.geometry.warps_per_cta
        warps = (slots[:, None] * wpc + np.arange(wpc)).ravel()
        b.arrived[slots] = b.warps_in[slots] = 0
        b.partial[warps] = 0
        b.pc_of_warp[warps] = -1

    def _check_one_count(self, b: _Barrier, g: Group, number: int, expected: int) -> None:
        slots = g.lanes.slots
        other = np.flatnonzero((b.arrived[slots] > 0) & (b.expected[slots] != expected))
        if len(other):
            i = int(other[0])
            before = int(b.expected[slots[i]])
            raise BarrierFault(
                f"barrier {number} was joined for {before or 'all'} threads before, now for "
                f"{expected or 'all'}; the counts of all bar.sync and bar.arrive on one barrier must agree",
                rule="bar.count",
                index=int(np.searchsorted(g.lanes.slot, slots[i])),
            )

    def _check_one_instruction(self, b: _Barrier, g: Group, number: int, *, aligned: bool) -> None:
        before = b.pc_of_warp[g.lanes.warps]
        other = (before >= 0) & (before != g.pc) & (b.partial[g.lanes.warps] > 0)
        if aligned and other.any():
            w = int(np.flatnonzero(other)[0])
            there, here = self.launch.line_of(int(before[w])), self.launch.line_of(g.pc)
            raise BarrierFault(
                f"lanes of one warp reached barrier {number} at different aligned instructions: {there} "
                f"and {here}; "
                "an aligned barrier must be executed by the whole warp together (use barrier.sync, or "
                "move it out of "
                "the branch)",
                rule="bar.divergent",
                index=int(g.lanes.warp_starts[w]),
            )

    def _release(self, number: int, b: _Barrier, slots: Any) -> None:
        """Let the CTAs among ``slots`` go whose arrivals are complete."""
        launch = self.launch
        expected = b.expected[slots]
        if expected.any():
            self._count_warps(b, slots)
        arrived = np.where(expected > 0, b.warps_in[slots] * WARP_SIZE, b.arrived[slots])
        need = np.where(expected > 0, expected, launch.live[slots])
        over = arrived > need
        if over.any():
            i = int(np.flatnonzero(over)[0])
            raise BarrierFault(
                f"barrier {number} expects {int(need[i])} threads, {int(arrived[i])} arrived; the counts "
                "of all bar.sync and bar.arrive on one barrier must agree",
                rule="bar.count",
            )
        full = (arrived == need) & (arrived > 0)
        if not full.any():
            return
        done = slots[full]
        self._check_same_instruction(number, b, done)
        self._clear(b, done)
        launch.did_something()
        released: list[Group] = []
        kept: list[Group] = []
        open_slots = np.zeros(launch.geometry.slots, np.bool_)
        open_slots[done] = True
        for parked in b.parked:
            yes, no = launch.flow.part_slots(parked, open_slots)
            if yes is not None:
                yes.wait = parked.wait
                released.append(yes)
            if no is not None:
                no.wait = parked.wait
                kept.append(no)
        b.parked = kept
        self._reduce(number, [(g, g.wait.reduction) for g in released])
        self._level_times(number, released, done)
        launch.flow.resume(released)

    def _reduce(self, number: int, groups: list[tuple[Group, Reduction | None]]) -> None:
        """Hand the combined predicates to all threads that leave a barrier.red."""
        modes = {r.mode if r else "no reduction" for _, r in groups}
        if modes == {"no reduction"}:
            return
        if len(modes) > 1:
            raise BarrierFault(
                f"barrier {number} was met by different forms of barrier ({', '.join(sorted(modes))}), which "
                "is unpredictable; use barrier.red with one operation in all threads",
                rule="bar.mixed",
                index=0,
            )
        true, threads = (np.zeros(self.launch.geometry.slots, np.int64) for _ in range(2))
        for g, r in groups:
            assert r is not None
            np.add.at(true, g.lanes.slot, r.votes(g))
            np.add.at(threads, g.lanes.slot, 1)
        for g, r in groups:
            assert r is not None
            g.regs[r.target] = r.result(true, threads)[g.lanes.slot]

    def _count_warps(self, b: _Barrier, slots: Any) -> None:
        """Count the warps of which all living threads are there."""
        wpc = self.launch.geometry.warps_per_cta
        warps = slots[:, None] * wpc + np.arange(wpc)
        living = self.launch.live_lanes(warps.ravel()).sum(axis=1).reshape(warps.shape)
        whole = (b.partial[warps] > 0) & (b.partial[warps] >= living)
        b.warps_in[slots] += whole.sum(axis=1)
        b.partial[warps[whole]] = 0

    def _check_same_instruction(self, number: int, b: _Barrier, done: Any) -> None:
        wpc = self.launch.geometry.warps_per_cta
        pcs = b.pc_of_warp[done[:, None] * wpc + np.arange(wpc)]
        high, low = pcs.max(axis=1), np.where(pcs < 0, np.iinfo(np.int64).max, pcs).min(axis=1)
        differ = np.flatnonzero(high != low)
        if not len(differ):
            return
        high_pc, low_pc = int(high[differ[0]]), int(low[differ[0]])
        instrs = self.launch.kernel.instrs
        if any("arrive" in instrs[pc].modifiers for pc in (high_pc, low_pc)):
            return  # the producer/consumer use of bar.arrive and bar.sync
        if all(
            "aligned" not in instrs[pc].modifiers and instrs[pc].opcode == "barrier"
            for pc in (high_pc, low_pc)
        ):
            return
        self.launch.report(
            BarrierFault(
                f"different warps met barrier {number} at different instructions: "
                f"{self.launch.line_of(low_pc)} and "
                f"{self.launch.line_of(high_pc)}; hardware allows it, but an edit of one side changes the "
                "meeting",
                rule="bar.different_instructions",
                severity=Severity.STRICT,
            )
        )

    def _level_times(self, number: int, released: list[Group], done: Any) -> None:
        """All warps of a CTA leave the barrier together."""
        launch = self.launch
        if launch.clock is None:
            return
        trace = launch.trace
        if trace is None:
            self._leave_together(released, done, launch.clock.bar_sync_cycles)
            return
        arrived = [launch.time[g.lanes.warps] for g in released]
        self._leave_together(released, done, launch.clock.bar_sync_cycles)
        for g, before in zip(released, arrived, strict=True):
            trace.waited(g, f"bar.sync {number}", before, launch.time[g.lanes.warps])

    def _leave_together(self, released: list[Group], done: Any, cycles: float) -> None:
        launch = self.launch
        if len(done) == 1:
            newest = max(float(launch.time[g.lanes.warp_slice].max()) for g in released)
            for g in released:
                launch.time[g.lanes.warp_slice] = newest + cycles
            return
        wpc = launch.geometry.warps_per_cta
        latest = np.full(launch.geometry.slots, -np.inf)
        for g in released:
            np.maximum.at(latest, g.lanes.warps // wpc, launch.time[g.lanes.warps])
        for g in released:
            launch.time[g.lanes.warps] = latest[g.lanes.warps // wpc] + cycles

    def lanes_left(self, slots: Any) -> None:
        """Threads exited: barriers that waited only for them open."""
        for number, b in list(self.by_number.items()):
            waited = slots[b.arrived[slots] > 0]
            if len(waited):
                self._release(number, b, waited)
