"""Where threads wait for each other: hardware barriers, mbarriers, warp synchronisation, fences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.barriers import MBarriers
from smfree.emulator.errors import BarrierFault, Severity
from smfree.emulator.exec.lanes import WARP_SIZE, Group
from smfree.emulator.exec.warp import per_lane

if TYPE_CHECKING:
    from collections.abc import Callable

    from smfree.emulator.exec.launch import Launch

NUM_BARRIERS = 16


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


@dataclass(slots=True)
class MBarrierWait:
    """Parked in mbarrier.try_wait; ``token`` is the parity or the state waited for."""

    keys: Any
    token: Any
    by_parity: bool
    predicate: int
    limit_ns: float | None
    narrow: bool  # of scope .cta

    def part(self, index: Any) -> MBarrierWait:
        return MBarrierWait(
            self.keys[index], self.token[index], self.by_parity, self.predicate, self.limit_ns, self.narrow
        )


@dataclass(slots=True)
class WarpWait:
    """Parked at a warp-wide instruction until all member lanes are there.

    ``meets``: what instructions may stand for each other; empty: all lanes are at the same one.
    """

    mask: int
    act: Callable[[Group], bool | None]
    meets: str = ""


def _meet(keys: Any, completed: Any) -> bool:
    """Whether the two have a key in common."""
    return bool((keys == completed[0]).any() if len(completed) == 1 else np.isin(keys, completed).any())


def _distinct(keys: Any) -> Any:
    """The keys without repetitions; nearly always it is one."""
    return keys[:1] if (keys == keys[0]).all() else np.unique(keys)


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


class SyncUnit:
    """Barriers of one launch."""

    def __init__(self, launch: Launch, pitch: int) -> None:
        self.launch = launch
        geometry = launch.geometry
        self.mbarriers = MBarriers(geometry.slots, pitch, memory=launch.memory.shared, report=launch.report)
        self.barriers: dict[int, _Barrier] = {}
        self.sleepers: list[Group] = []  # in try_wait
        self.warp_parked: list[Group] = []

    # ---------------------------------------------------------------- hardware barriers

    def barrier(
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
        if number not in self.barriers:
            geometry = self.launch.geometry
            arrived, warps_in, expected = (np.zeros(geometry.slots, np.int64) for _ in range(3))
            partial, pc_of_warp = np.zeros(geometry.num_warps, np.int64), np.full(geometry.num_warps, -1)
            self.barriers[number] = _Barrier(arrived, warps_in, partial, expected, pc_of_warp)
        return self.barriers[number]

    def reset(self, slots: Any) -> None:
        """New CTAs move into these slots."""
        for b in self.barriers.values():
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
                released.append(yes)
            if no is not None:
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
        """Threads exited: barriers that waited only for them open, warp instructions go on without them."""
        for number, b in list(self.barriers.items()):
            waited = slots[b.arrived[slots] > 0]
            if len(waited):
                self._release(number, b, waited)
        for g in list(self.warp_parked):
            if g in self.warp_parked:
                self.warp_parked.remove(g)
                self._try_warp(g)

    # ---------------------------------------------------------------- warp-wide instructions

    def gather_warp(
        self, g: Group, mask: int, act: Callable[[Group], bool | None], *, meets: str = ""
    ) -> bool:
        """Run ``act`` once every live member of the mask is in the group; park the lanes until then.
        ``act`` answers False when it has parked the group itself.

        ``meets``: the members may execute different instructions of this name (bar.warp.sync).
        """
        value = g.regs[mask]
        if g.lanes.full_warps and type(value) is not np.ndarray and int(value) == 0xFFFFFFFF:
            return act(g) is not False
        g.wait = WarpWait(mask, act, meets)
        mates = [p for p in self.warp_parked if p.pc == g.pc and np.isin(p.lanes.warps, g.lanes.warps).any()]
        if mates:
            self.warp_parked = [p for p in self.warp_parked if p not in mates]
            wait = g.wait
            g = self.launch.current = self.launch.flow.merge_parked([g, *mates])
            g.wait = wait
        return self._try_warp(g, resume_self=bool(mates))

    def _try_warp(self, g: Group, *, resume_self: bool = True) -> bool:
        wait: WarpWait = g.wait
        complete = self._complete(g, [g])
        if complete.all():
            g.wait = None
            if wait.act(g) is False:
                return False
            if resume_self:
                self.launch.flow.resume([g])
                return False
            return True
        if wait.meets:
            self.warp_parked.append(g)
            self._meet_elsewhere(g)
            return False
        self._part_warp(g, complete)
        return False

    def _complete(self, g: Group, together: list[Group]) -> Any:
        """bool[n]: are all living members of the lane's mask among the lanes of ``together``?"""
        lanes = g.lanes
        mask, bit = self._masks(g)
        outside = np.flatnonzero(mask & bit == 0)
        if len(outside):
            raise BarrierFault(
                f"a lane executes a .sync instruction whose member mask 0x{int(mask[outside[0]]):08x} "
                "leaves it out",
                rule="warp.mask",
                index=int(outside[0]),
            )
        present = np.zeros(self.launch.geometry.num_warps, np.int64)
        for other in together:
            np.bitwise_or.at(present, other.lanes.warp, 1 << other.lanes.laneid)
        alive = self.launch.live_mask(lanes.warps)[lanes.warp_index]
        return (mask & alive & ~present[lanes.warp]) == 0

    def _masks(self, g: Group) -> tuple[Any, Any]:
        """Member mask and own bit of each lane."""
        return per_lane(g.regs[g.wait.mask], g).astype(np.int64), 1 << g.lanes.laneid

    def _part_warp(self, g: Group, complete: Any) -> None:
        """The complete lanes of a group act and go on, the others stay parked."""
        wait: WarpWait = g.wait
        yes, no = self.launch.flow.part_mask(g, complete)
        if no is not None:
            no.wait = wait
            self.warp_parked.append(no)
        if yes is not None:
            yes.wait = None
            if wait.act(yes) is not False:
                self.launch.flow.resume([yes])

    def _meet_elsewhere(self, g: Group) -> None:
        """The members may stand at different instructions of one name."""
        parked = [p for p in self.warp_parked if p.wait.meets == g.wait.meets]
        near = [p for p in parked if np.isin(p.lanes.warps, g.lanes.warps).any()]
        verdicts = [(p, self._complete(p, near)) for p in near]
        for p, complete in verdicts:
            if complete.any():
                self.warp_parked.remove(p)
                self._part_warp(p, complete)

    # ---------------------------------------------------------------- mbarriers

    def arrive(
        self,
        g: Group,
        keys: Any,
        count: Any,
        *,
        expect_tx: Any = None,
        drop: bool = False,
        no_complete: bool = False,
    ) -> Any:
        """mbarrier.arrive in all its forms; wakes whoever waited for the phase."""
        launch = self.launch
        launch.counters.mbarrier_arrivals += g.lanes.n
        if launch.clock is not None:
            launch.advance(g, launch.clock.mbarrier_arrive_cycles)
        launch.peers.arrived(g.lanes, keys)
        state = self.mbarriers.arrive(
            keys, count, self._times(g, keys), expect_tx=expect_tx, drop=drop, no_complete=no_complete
        )
        launch.did_something()
        self.wake_mbarriers()
        return state

    def change_tx(self, g: Group, keys: Any, nbytes: Any, *, complete: bool) -> None:
        """mbarrier.expect_tx and complete_tx."""
        change = self.mbarriers.complete_tx if complete else self.mbarriers.expect_tx
        change(keys, nbytes, self._times(g, keys))
        self.launch.did_something()
        self.wake_mbarriers()

    def _times(self, g: Group, keys: Any) -> Any:
        """When each lane's operation reaches its barrier."""
        launch = self.launch
        if launch.cluster_size == 1 or launch.clock is None:
            return launch.lane_times(g)
        return launch.lane_times(g) + launch.peers.delay(g.lanes, keys)

    def wait(
        self, g: Group, predicate: int, keys: Any, token: Any, *, by_parity: bool, may_sleep: bool,
        limit_ns: float | None, narrow: bool,
    ) -> bool:  # fmt: skip
        """mbarrier.test_wait / try_wait. Lanes whose phase is incomplete sleep (try_wait) or see false."""
        launch = self.launch
        done = self._test(keys, token, by_parity)
        hits = int(done.sum())
        launch.counters.mbarrier_wait_hits += hits
        launch.counters.mbarrier_wait_misses += g.lanes.n - hits
        if launch.clock is not None:
            self._charge_wait(g, keys, token, done, by_parity)
        if hits:
            launch.copy.waited(_distinct(keys[done]))
            launch.peers.saw_phase(g.lanes, keys, done, narrow=narrow)
        if hits == g.lanes.n:
            g.polls = False
            g.regs[predicate] = np.bool_(True)
            return True
        if not may_sleep:
            g.polls = True
            g.regs[predicate] = done
            return True
        wait = MBarrierWait(keys, token, by_parity, predicate, limit_ns, narrow)
        yes, no = launch.flow.part_mask(g, done)
        assert no is not None
        no.wait = wait if yes is None else wait.part(~done)
        self.mbarriers.park(no.wait.keys)
        self.sleepers.append(no)
        if yes is None:
            return False
        yes.regs[predicate] = np.bool_(True)
        launch.flow.resume([yes])
        return False

    def _test(self, keys: Any, token: Any, by_parity: bool) -> Any:
        return self.mbarriers.test(keys, token) if by_parity else self.mbarriers.test_state(keys, token)

    def _charge_wait(self, g: Group, keys: Any, token: Any, done: Any, by_parity: bool) -> None:
        """A wait costs a look; one whose phase completed later also costs the waking."""
        launch, clock = self.launch, self.launch.clock
        assert clock is not None
        before = launch.settle(g)
        t = before + clock.mbarrier_wait_hit_cycles
        if by_parity and done.any():
            completed = np.where(done, self.mbarriers.completion_time(keys, token), -np.inf)
            latest = np.maximum.reduceat(completed, g.lanes.warp_starts)
            t = np.where(latest > t, latest + clock.mbarrier_wait_wake_cycles, t)
        if launch.trace is not None:
            launch.trace.looked(g, keys, done, before, t)
        launch.time[g.lanes.warp_slice] = t

    def wake_mbarriers(self) -> None:
        """Wake the sleepers whose phase has completed."""
        completed = self.mbarriers.drain_completed()
        if self.launch.trace is not None and len(completed):
            self.launch.trace.completed(completed)
        if not len(completed) or not self.sleepers:
            return
        launch = self.launch
        awake: list[Group] = []
        kept: list[Group] = []
        for g in self.sleepers:
            wait: MBarrierWait = g.wait
            if not _meet(wait.keys, completed):
                kept.append(g)
                continue
            done = self._test(wait.keys, wait.token, wait.by_parity)
            if not done.any():
                kept.append(g)
                continue
            self.mbarriers.unpark(wait.keys[done])
            yes, no = launch.flow.part_mask(g, done)
            if no is not None:
                no.wait = wait.part(~done)
                kept.append(no)
            assert yes is not None
            part = wait if no is None else wait.part(done)
            if launch.clock is not None:
                self._charge_wait(yes, part.keys, part.token, np.ones(yes.lanes.n, np.bool_), wait.by_parity)
            yes.regs[wait.predicate] = np.bool_(True)
            launch.copy.waited(_distinct(part.keys))
            arriver, launch.current = launch.current, yes  # what is found now is found about those who waited
            launch.peers.saw_phase(yes.lanes, part.keys, True, narrow=part.narrow)
            launch.current = arriver
            awake.append(yes)
        self.sleepers = kept
        launch.flow.resume(awake)

    def time_out(self, cycles: float) -> None:
        """Every sleeping try_wait gives up and answers false, ``cycles`` later."""
        sleepers, self.sleepers = self.sleepers, []
        for g in sleepers:
            wait: MBarrierWait = g.wait
            self.mbarriers.unpark(wait.keys)
            g.regs[wait.predicate] = np.bool_(False)
            limit = cycles if wait.limit_ns is None else wait.limit_ns * self.launch.cycles_per_ns
            self.launch.advance(g, limit)
        self.launch.flow.resume(sleepers)

    # ---------------------------------------------------------------- fences

    def fence(self, g: Group, scope: str) -> None:
        launch = self.launch
        launch.counters.fences += len(g.lanes.warps)
        if launch.clock is None:
            return
        if scope in ("cluster", "gpu", "sys"):
            launch.memory.settle_stores(g)
        launch.advance(g, launch.clock.fence_cycles[scope])
