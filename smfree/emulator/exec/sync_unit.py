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


@dataclass(slots=True)
class BarrierWait:
    """Parked at a hardware barrier."""

    number: int


@dataclass(slots=True)
class MBarrierWait:
    """Parked in mbarrier.try_wait; ``token`` is the parity or the state waited for."""

    keys: Any
    token: Any
    by_parity: bool
    predicate: int
    limit_ns: float | None

    def part(self, index: Any) -> MBarrierWait:
        return MBarrierWait(
            self.keys[index], self.token[index], self.by_parity, self.predicate, self.limit_ns
        )


@dataclass(slots=True)
class WarpWait:
    """Parked at a warp-wide instruction until all member lanes are there."""

    mask: int
    act: Callable[[Group], None]


@dataclass
class _Barrier:
    """One barrier number over all slots: arrivals of the current generation, and what each warp arrived
    with."""

    arrived: Any
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
        self, g: Group, number: int, expected: int | None, *, aligned: bool, arrive_only: bool
    ) -> bool:
        """bar.sync / bar.arrive: True when the group may go on."""
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
            self._level_times([g], lanes.slots)
            launch.did_something()
            return True
        self._check_one_instruction(b, g, number, aligned=aligned)
        b.arrived[lanes.slots] += lanes.slot_counts
        b.expected[lanes.slots] = expected or 0
        b.pc_of_warp[lanes.warps] = g.pc
        if not arrive_only:
            g.wait = BarrierWait(number)
            b.parked.append(g)
        elif expected is None:
            raise BarrierFault("bar.arrive needs a thread count", rule="bar.count", index=0)
        self._release(number, b, lanes.slots)
        return arrive_only

    def _whole_ctas(self, b: _Barrier, g: Group) -> bool:
        """Whether this group is all the live threads of its CTAs, and nobody arrived before."""
        slots = g.lanes.slots
        return bool((g.lanes.slot_counts == self.launch.live[slots]).all()) and not b.arrived[slots].any()

    def _barrier(self, number: int) -> _Barrier:
        if number not in self.barriers:
            geometry = self.launch.geometry
            self.barriers[number] = _Barrier(
                np.zeros(geometry.slots, np.int64), np.zeros(geometry.slots, np.int64),
                np.full(geometry.num_warps, -1, np.int64),
            )  # fmt: skip
        return self.barriers[number]

    def _check_one_instruction(self, b: _Barrier, g: Group, number: int, *, aligned: bool) -> None:
        before = b.pc_of_warp[g.lanes.warps]
        other = (before >= 0) & (before != g.pc)
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
        arrived, expected = b.arrived[slots], b.expected[slots]
        need = np.where(expected > 0, expected, launch.live[slots])
        over = arrived > need
        if over.any():
            i = int(np.flatnonzero(over)[0])
            raise BarrierFault(
                f"barrier {number} expects {int(need[i])} threads, {int(arrived[i])} arrived; the counts "
                "of all "
                "bar.sync and bar.arrive on one barrier must agree",
                rule="bar.count",
            )
        full = (arrived == need) & (arrived > 0)
        if not full.any():
            return
        done = slots[full]
        self._check_same_instruction(number, b, done)
        b.arrived[done] = 0
        wpc = launch.geometry.warps_per_cta
        b.pc_of_warp[(done[:, None] * wpc + np.arange(wpc)).ravel()] = -1
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
        self._level_times(released, done)
        launch.flow.resume(released)

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

    def _level_times(self, released: list[Group], done: Any) -> None:
        """All warps of a CTA leave the barrier together."""
        launch = self.launch
        if launch.clock is None:
            return
        wpc = launch.geometry.warps_per_cta
        latest = np.full(launch.geometry.slots, -np.inf)
        for g in released:
            np.maximum.at(latest, g.lanes.warps // wpc, launch.time[g.lanes.warps])
        for g in released:
            launch.time[g.lanes.warps] = latest[g.lanes.warps // wpc] + launch.clock.bar_sync_cycles

    def lanes_left(self, slots: Any) -> None:
        """Threads exited: barriers that waited only for them open, warp instructions go on without them."""
        for number, b in list(self.barriers.items()):
            if b.parked:
                self._release(number, b, slots[b.arrived[slots] > 0])
        for g in list(self.warp_parked):
            self.warp_parked.remove(g)
            self._try_warp(g)

    # ---------------------------------------------------------------- warp-wide instructions

    def gather_warp(self, g: Group, mask: int, act: Callable[[Group], None]) -> bool:
        """Run ``act`` once every live member of the mask is in the group; park the others' warps until
        then."""
        value = g.regs[mask]
        if g.lanes.full_warps and type(value) is not np.ndarray and int(value) == 0xFFFFFFFF:
            act(g)
            return True
        g.wait = WarpWait(mask, act)
        mates = [p for p in self.warp_parked if p.pc == g.pc and np.isin(p.lanes.warps, g.lanes.warps).any()]
        if mates:
            self.warp_parked = [p for p in self.warp_parked if p not in mates]
            waits = g.wait
            g = self.launch.flow.merge_parked([g, *mates])
            g.wait = waits
        return self._try_warp(g, resume_self=bool(mates))

    def _try_warp(self, g: Group, *, resume_self: bool = True) -> bool:
        wait: WarpWait = g.wait
        lanes = g.lanes
        mask = per_lane(g.regs[wait.mask], g).astype(np.int64)
        bit = 1 << lanes.laneid
        outside = np.flatnonzero(mask & bit == 0)
        if len(outside):
            raise BarrierFault(
                f"a lane executes a .sync instruction whose member mask 0x{int(mask[outside[0]]):08x} "
                "leaves it out",
                rule="warp.mask",
                index=int(outside[0]),
            )
        present = np.bitwise_or.reduceat(bit, lanes.warp_starts)
        members = np.bitwise_or.reduceat(mask, lanes.warp_starts)
        complete = (members & self.launch.live_mask(lanes.warps) & ~present) == 0
        if complete.all():
            g.wait = None
            wait.act(g)
            if resume_self:
                self.launch.flow.resume([g])
                return False
            return True
        yes, no = self.launch.flow.part_mask(g, complete[lanes.warp_index])
        if no is not None:
            no.wait = wait
            self.warp_parked.append(no)
        if yes is not None:
            yes.wait = None
            wait.act(yes)
            self.launch.flow.resume([yes])
        return False

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
        state = self.mbarriers.arrive(
            keys, count, launch.lane_times(g), expect_tx=expect_tx, drop=drop, no_complete=no_complete
        )
        launch.did_something()
        self.wake_mbarriers()
        return state

    def wait(
        self, g: Group, predicate: int, keys: Any, token: Any, *, by_parity: bool, may_sleep: bool,
        limit_ns: float | None,
    ) -> bool:  # fmt: skip
        """mbarrier.test_wait / try_wait. Lanes whose phase is incomplete sleep (try_wait) or see false."""
        launch = self.launch
        done = self._test(keys, token, by_parity)
        hits = int(done.sum())
        launch.counters.mbarrier_wait_hits += hits
        launch.counters.mbarrier_wait_misses += g.lanes.n - hits
        if launch.clock is not None:
            self._charge_wait(g, keys, token, done, by_parity)
        if hits == g.lanes.n:
            g.regs[predicate] = np.bool_(True)
            return True
        if not may_sleep:
            g.regs[predicate] = done
            return True
        wait = MBarrierWait(keys, token, by_parity, predicate, limit_ns)
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
        t = launch.settle(g) + clock.mbarrier_wait_hit_cycles
        if by_parity and done.any():
            completed = np.where(done, self.mbarriers.completion_time(keys, token), -np.inf)
            latest = np.maximum.reduceat(completed, g.lanes.warp_starts)
            t = np.where(latest > t, latest + clock.mbarrier_wait_wake_cycles, t)
        launch.time[g.lanes.warp_slice] = t

    def wake_mbarriers(self) -> None:
        """Wake the sleepers whose phase has completed."""
        completed = self.mbarriers.drain_completed()
        if not len(completed) or not self.sleepers:
            return
        launch = self.launch
        awake: list[Group] = []
        kept: list[Group] = []
        for g in self.sleepers:
            wait: MBarrierWait = g.wait
            if not np.isin(wait.keys, completed).any():
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
        if scope in ("gpu", "sys"):
            launch.memory.settle_stores(g)
        launch.advance(g, launch.clock.fence_cycles[scope])
