"""Waiting without progress: polling loops, waits that time out, and the proof that nothing can change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.lanes import Group, LaneSet
from smfree.emulator.exec.polls import Look, looks, on_host

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch
    from smfree.emulator.host_memory import HostMemory
    from smfree.emulator.memory import GlobalMemory

DEFAULT_TRY_WAIT_NS = 1000.0  # the ISA leaves the limit to the system; only a hang ever sees it
MAX_TIME_OUTS = 10_000
MARKS_KEPT = 4096
POLITE_TURNS = 256  # of one loop, before other groups get a turn
TIRED_TURNS = 4096  # before joins are given up and copies complete
CROWDED_TURNS = 16  # before kernels and copies beside this one get a turn
FAIR_TURNS = 16  # before a fair schedule looks at joins and spinners again


@dataclass(slots=True)
class Spin:
    """A polling group that is parked. ``progress``: the state of the launch that it has seen.

    ``looks``: the words it polls; ``complete``: nothing else can end its loop; ``public``: somebody outside
    of the kernel may.
    """

    group: Group
    progress: int
    looks: list[Look]
    complete: bool
    public: bool

    def has_news(self, progress: int) -> bool:
        """Whether another turn could differ from the last."""
        if self.complete:
            return any(look.changed() for look in self.looks)
        return self.progress != progress


class StallUnit:
    """``spinning`` holds the polling groups that are parked until what they see may change.

    A loop that counts while it polls changes its registers in every turn, so it never stands still. Under
    schedules that are not fair by themselves it steps aside: ``_polite`` until the other groups have had
    their turn, ``_tired`` until everything else has happened that can.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.spinning: list[Spin] = []
        self._marks: dict[tuple[int, int], tuple[tuple[tuple[int, int], int], list[Any], LaneSet, int]] = {}
        self._polite: list[Group] = []
        self._tired: list[Group] = []
        self._mark: tuple[tuple[int, int], Any] = ((-1, 0), None)
        self._time_outs = 0

    # ---------------------------------------------------------------- time-outs

    def time_out(self) -> bool:
        """Sleeping waits give up. False when nothing has changed since they last did: a deadlock."""
        sleepers = self.launch.sync.sleepers
        mark = (self._seen, self._picture())
        self._time_outs += 1
        if not sleepers or self._same_picture(mark, self._mark) or self._time_outs > MAX_TIME_OUTS:
            return False
        self._mark = mark
        growth = 2.0 ** min(self._time_outs - 1, 40)
        self.launch.sync.time_out(DEFAULT_TRY_WAIT_NS * growth * self.launch.cycles_per_ns)
        return True

    @property
    def _seen(self) -> tuple[int, int]:
        """What a polling loop can tell apart besides its registers: shared state, the clock if it looks."""
        return self.launch.progress, self.launch.clock_reads

    def _picture(self) -> list[tuple[int, int, list[Any]]]:
        """Everything that could make sleeping or spinning threads act differently next time."""
        groups = [*self.launch.sync.sleepers, *(spin.group for spin in self.spinning)]
        return [(g.pc, id(g.lanes), [g.regs[r] for r in self.launch.program.live(g.pc)]) for g in groups]

    @staticmethod
    def _same_picture(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
        if a[0] != b[0] or b[1] is None or len(a[1]) != len(b[1]):
            return False
        key = lambda item: item[:2]  # noqa: E731
        return all(
            x[:2] == y[:2] and all(_equal(u, v) for u, v in zip(x[2], y[2], strict=True))
            for x, y in zip(sorted(a[1], key=key), sorted(b[1], key=key), strict=True)
        )

    # ---------------------------------------------------------------- polling loops

    def is_spinning(self, g: Group, last: int) -> bool:
        """At a backward branch, the instruction ``last``, to where ``g`` stands now: park the group if a turn
        changed neither shared state nor its registers, or if it has had enough turns."""
        launch = self.launch
        key = (g.pc, id(g.lanes))
        seen = (self._seen, self._time_outs)  # after a time-out a wait goes back to sleep: that is no polling
        now = [g.regs[r] for r in launch.program.live(g.pc)]
        before = self._marks.get(key)
        if len(self._marks) >= MARKS_KEPT:
            self._marks.clear()
        turns = 0 if before is None else before[3] + 1
        self._marks[key] = (seen, now, g.lanes, turns)  # the lanes, so that their id stays theirs
        if before is None:
            return False
        still = before[0] == seen
        if (still or launch.crowded) and all(_equal(a, b) for a, b in zip(before[1], now, strict=True)):
            spin = Spin(g, launch.progress, *looks(launch, g, g.pc, last))
            if (still and not spin.complete) or (spin.complete and not spin.has_news(launch.progress)):
                if spin.looks and all(look.weak for look in spin.looks):
                    launch.memory.away.polls_weakly(g, spin.looks)
                self.spinning.append(spin)
                return True
        if launch.schedule.fair:
            return turns % FAIR_TURNS == FAIR_TURNS - 1 and self._lets_look(g)
        return turns >= (CROWDED_TURNS if launch.crowded else POLITE_TURNS) and self._steps_aside(g, turns)

    def _lets_look(self, g: Group) -> bool:
        """Back to the schedule, which alone releases joins in time; spinners with news run again, too."""
        self.wake()
        if not self.launch.flow.at_join and not self.launch.runnable:
            return False
        self.launch.runnable.append(g)
        return True

    def _steps_aside(self, g: Group, turns: int) -> bool:
        """Whether it is time to let others go first."""
        launch = self.launch
        if launch.crowded:
            aside = self._polite if turns % CROWDED_TURNS else self._tired
        elif turns % POLITE_TURNS == 0 and launch.runnable:
            aside = self._polite
        elif turns % TIRED_TURNS == 0 and (
            self._polite or self.spinning or launch.flow.at_join or launch.copy.pending
        ):
            aside = self._tired
        else:
            return False
        aside.append(g)
        return True

    def next_turn(self, *, tired: bool = False) -> bool:
        """Groups that stepped aside go on."""
        aside = self._tired if tired else self._polite
        self.launch.runnable.extend(aside)
        went = bool(aside)
        aside.clear()
        return went

    def wake(self) -> bool:
        """Spinning groups run again once what they see has changed.

        Whoever polls memory goes on after the latest change, because it is not known which one it waits for.
        A look at an mbarrier knows the time of its phase.
        """
        return self._resume([s for s in self.spinning if s.has_news(self.launch.progress)], None)

    def changed(self, home: GlobalMemory | HostMemory, lo: int, hi: int, time: float) -> bool:
        """Somebody has changed [lo, hi) of ``home``, visible from ``time`` on (cycles): who polls it goes on
        then."""
        return self._resume([s for s in self.spinning if any(k.meets(home, lo, hi) for k in s.looks)], time)

    def look(self, time: float) -> bool:
        """Somebody may have changed memory by ``time``: who polls what is different now goes on."""
        return self._resume([s for s in self.spinning if any(k.changed() for k in s.looks)], time)

    def _resume(self, spins: list[Spin], time: float | None) -> bool:
        """These go on, not before ``time`` (None: the latest change that the launch itself has made)."""
        if not spins:
            return False
        launch, gone = self.launch, set(map(id, spins))
        self.spinning = [s for s in self.spinning if id(s) not in gone]
        for spin in spins:
            g = spin.group
            if launch.clock is not None and not (time is None and g.polls):
                earliest = launch.change_time if time is None else time
                w = g.lanes.warp_slice
                launch.time[w] = np.maximum(launch.settle(g), earliest)
            launch.runnable.append(g)
        return True

    @property
    def forlorn(self) -> bool:
        """Whether nobody outside can end any of the loops."""
        return not any(spin.public for spin in self.spinning)

    @property
    def polls_host(self) -> bool:
        """Whether a loop polls host memory, which somebody outside may write."""
        return any(on_host(spin.looks) for spin in self.spinning)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if a is None or b is None:
        return False
    return bool(np.array_equal(a, b))
