"""Schedules: who runs next, and when asynchronous work completes.

A kernel must be right under all of them. None is real hardware's; each is legal, and each shows another kind
of mistake. ``timed`` alone has a clock.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from smfree.emulator.exec.lanes import Group, LaneSet, merge

if TYPE_CHECKING:
    from smfree.emulator.copies import PendingCopies
    from smfree.emulator.exec.launch import Launch

SCHEDULES = ("timed", "min-pc", "producer-ahead", "async-earliest", "async-latest", "random")


def make_schedule(name: str, seed: int = 0, device: int = 0) -> Schedule:
    """The schedule of this name; "random" is reproduced by its seed, another on each device of a node."""
    kinds: dict[str, type[Schedule]] = {
        "timed": Timed,
        "min-pc": MinPC,
        "producer-ahead": ProducerAhead,
        "async-earliest": AsyncEarliest,
        "async-latest": AsyncLatest,
        "random": Random,
    }
    if name not in kinds:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)} (got '{name}')")
    return kinds[name](seed, device)


class Schedule:
    """Lowest program counter first; copies complete, oldest first, only when nothing can run."""

    name = "min-pc"
    timed = False
    fair = False  # does every runnable group get its turn, whatever the others do?
    fuses = True  # may neighbouring accesses of a group act as one?

    slice_groups = 64  # picked in one slice of a launch that others run beside

    def __init__(self, seed: int = 0, device: int = 0) -> None:
        self.seed = seed

    def initial(self, lanes: LaneSet) -> list[LaneSet]:
        """How newly started lanes are grouped."""
        return [lanes]

    def before_pick(self, launch: Launch) -> None:
        """Complete asynchronous work that this schedule lets happen now."""

    def pick(self, launch: Launch) -> Group:
        """Take the next group out of ``launch.runnable``, merged with others at its place."""
        return take(launch, min(launch.runnable, key=lambda g: g.pc))

    def switch(self, launch: Launch, g: Group) -> bool:
        """Whether another group should run now instead of ``g``."""
        return any(other.pc <= g.pc for other in launch.runnable)

    def complete_some(self, launch: Launch) -> None:
        """Nothing can run: complete some pending copy."""
        batch = launch.copy.pending[0]
        left = np.flatnonzero(~batch.done)
        launch.copy.complete(batch, left if batch.kind.of_threads else left[:1])

    def least_time(self, launch: Launch) -> float:
        """There is no time."""
        return 0.0

    def slice_turns(self) -> float:
        """How many groups may be picked in a slice of a launch that others run beside."""
        return self.slice_groups

    def slice_ends(self, launch: Launch, turns: float) -> bool:
        """Whether it is the others' turn, with so many picks left."""
        return turns <= 0


class MinPC(Schedule):
    """The default of untimed runs."""


class AsyncEarliest(Schedule):
    """Copies complete as soon as may be, though never at issue: the issuer's next visible instruction is
    still too early."""

    name = "async-earliest"

    def __init__(self, seed: int = 0, device: int = 0) -> None:
        super().__init__(seed, device)
        self._fresh: list[PendingCopies] = []  # issued by the latest visible instruction
        self._seen: list[PendingCopies] = []

    def before_pick(self, launch: Launch) -> None:
        ripe = [b for b in launch.copy.pending if b in self._seen and b not in self._fresh]
        for batch in ripe if launch.runnable else list(launch.copy.pending):
            launch.copy.complete(batch, np.flatnonzero(~batch.done))

    def switch(self, launch: Launch, g: Group) -> bool:
        pending = list(launch.copy.pending)
        self._fresh = [b for b in pending if b not in self._seen]
        self._seen = pending
        return len(pending) > len(self._fresh) or super().switch(launch, g)


class AsyncLatest(Schedule):
    """Copies complete only when nothing can run, the newest first."""

    name = "async-latest"

    def complete_some(self, launch: Launch) -> None:
        batch = launch.copy.pending[-1]
        left = np.flatnonzero(~batch.done)
        launch.copy.complete(batch, left if batch.kind.of_threads else left[-1:])


class ProducerAhead(Schedule):
    """Whoever issues copies runs as far ahead as barriers let it; others only when it waits."""

    name = "producer-ahead"

    def pick(self, launch: Launch) -> Group:
        def rank(g: Group) -> tuple[bool, int]:
            return not self._issues(launch, g), -g.pc

        return take(launch, min(launch.runnable, key=rank))

    def switch(self, launch: Launch, g: Group) -> bool:
        return not self._issues(launch, g) and any(self._issues(launch, other) for other in launch.runnable)

    @staticmethod
    def _issues(launch: Launch, g: Group) -> bool:
        return bool(launch.copy.issuing[g.lanes.warp_slice].any())


class Random(Schedule):
    """Warps interleave at random at every visible instruction, copies complete at random moments, element
    by element."""

    name = "random"
    fuses = False
    fair = True

    def __init__(self, seed: int = 0, device: int = 0) -> None:
        super().__init__(seed, device)
        self.rng = np.random.default_rng([seed, device] if device else seed)

    def slice_turns(self) -> float:
        return float(self.rng.integers(1, 33))

    def initial(self, lanes: LaneSet) -> list[LaneSet]:
        starts = [*lanes.warp_starts.tolist(), lanes.n]
        return [lanes.geometry.lane_set(lanes.ids[a:b]) for a, b in pairwise(starts)]

    def before_pick(self, launch: Launch) -> None:
        while launch.copy.pending and self.rng.random() < 0.25:
            self.complete_some(launch)

    def pick(self, launch: Launch) -> Group:
        if launch.flow.at_join and self.rng.random() < 0.1:
            launch.flow.release([launch.flow.at_join[int(self.rng.integers(len(launch.flow.at_join)))]])
        return launch.runnable.pop(int(self.rng.integers(len(launch.runnable))))

    def switch(self, launch: Launch, g: Group) -> bool:
        return self.rng.random() < 0.3

    def complete_some(self, launch: Launch) -> None:
        batch = launch.copy.pending[int(self.rng.integers(len(launch.copy.pending)))]
        open_ = np.flatnonzero(~batch.done)
        if batch.kind.from_shared and self.rng.random() < 0.5:
            batch.read_sources(open_)
            return
        launch.copy.complete(batch, open_[self.rng.random(len(open_)) < 0.5] if len(open_) > 1 else open_)


class Timed(Schedule):
    """The group whose slowest-behind warp has the least modelled time goes first; copies complete when they
    are due.

    Groups within ``window_cycles`` of the least time may be run in one go, and copies due within it complete
    together: every warp and barrier keeps its own exact time, only the order of handling is that coarse.
    """

    name = "timed"
    timed = True
    fair = True
    window_cycles = 400.0

    def _times(self, launch: Launch, groups: list[Group]) -> list[float]:
        return [float(launch.time[g.lanes.warp_slice].min()) for g in groups]

    def least_time(self, launch: Launch) -> float:
        """When the next thing happens that the launch does by itself; infinite if nothing does."""
        return min([launch.copy.next_time(), *self._times(launch, launch.runnable)])

    def slice_turns(self) -> float:
        return np.inf

    def slice_ends(self, launch: Launch, turns: float) -> bool:
        return min(self._times(launch, launch.runnable)) > launch.limit

    def before_pick(self, launch: Launch) -> None:
        if not launch.runnable or not (launch.flow.at_join or launch.copy.pending):
            return
        now = min(self._times(launch, launch.runnable))
        if launch.flow.at_join:
            times = self._times(launch, launch.flow.at_join)
            early = now - self.window_cycles
            late = [g for g, t in zip(launch.flow.at_join, times, strict=True) if t < early]
            if late:
                launch.flow.release(late)
                now = min(times)
        launch.copy.complete_due(now)

    def pick(self, launch: Launch) -> Group:
        groups = launch.runnable
        if len(groups) == 1:
            return groups.pop()
        times = self._times(launch, groups)
        limit = min(times) + self.window_cycles
        return take(
            launch, min((g for g, t in zip(groups, times, strict=True) if t <= limit), key=lambda g: g.pc)
        )

    def switch(self, launch: Launch, g: Group) -> bool:
        if not launch.runnable and launch.copy.next_time() == np.inf and not launch.crowded:
            return False
        mine = float(launch.time[g.lanes.warp_slice].min())
        if launch.copy.next_time() <= mine or mine > launch.limit:
            return True
        others = zip(launch.runnable, self._times(launch, launch.runnable), strict=True)
        early, late = mine - self.window_cycles, mine + self.window_cycles
        return any(t < early or (other.pc <= g.pc and t <= late) for other, t in others)

    def complete_some(self, launch: Launch) -> None:
        due = launch.copy.next_time()
        launch.copy.complete_due(max(due, min(due + self.window_cycles, launch.limit)))


def take(launch: Launch, chosen: Group) -> Group:
    """Remove the chosen group from the runnable ones, merged with those at the same place and join."""
    same = [g for g in launch.runnable if g.pc == chosen.pc and g.join is chosen.join]
    if len(same) == 1:
        launch.runnable.remove(chosen)
        return chosen
    ids = set(map(id, same))
    launch.runnable = [g for g in launch.runnable if id(g) not in ids]
    return merge(same, chosen.pc, launch.program.live(chosen.pc), chosen.join)
