"""mbarriers: arrivals, waits and who sleeps in them; and fences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.barriers import MBarriers
from smfree.emulator.exec.lanes import Group

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch


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


def _meet(keys: Any, completed: Any) -> bool:
    """Whether the two have a key in common."""
    return bool((keys == completed[0]).any() if len(completed) == 1 else np.isin(keys, completed).any())


def _distinct(keys: Any) -> Any:
    """The keys without repetitions; nearly always it is one."""
    return keys[:1] if (keys == keys[0]).all() else np.unique(keys)


class SyncUnit:
    """mbarriers and fences of one launch. ``sleepers`` wait in mbarrier.try_wait."""

    def __init__(self, launch: Launch, pitch: int) -> None:
        self.launch = launch
        slots = launch.geometry.slots
        self.mbarriers = MBarriers(
            slots, pitch, memory=launch.memory.shared, report=launch.report, name=launch.name_barrier
        )
        self.sleepers: list[Group] = []

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
            launch.spend(g, launch.clock.mbarrier_arrive_cycles)
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
            self.launch.spend(g, limit)
        self.launch.flow.resume(sleepers)

    # ---------------------------------------------------------------- fences

    def fence(self, g: Group, scope: str) -> None:
        launch = self.launch
        launch.counters.fences += len(g.lanes.warps)
        if scope in ("cluster", "gpu", "sys"):
            launch.memory.settle_stores(g, scope)
        if launch.clock is not None:
            launch.spend(g, launch.clock.fence_cycles[scope])
