"""What a timed launch did and when: warps waiting, copies in flight, phases completing.

Off unless a :class:`Trace` is the device's ``trace``; then the units call the recorder of their launch.
Nothing here changes what a run does or how long it takes on the modelled clock. All times are modelled SM
cycles since the start of the launch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.report import variable_at

if TYPE_CHECKING:
    from smfree.emulator.exec.lanes import Group, LaneSet
    from smfree.emulator.exec.launch import Launch
    from smfree.emulator.pending import PendingCopies

FORMAT_VERSION = 1


@dataclass(slots=True)
class Life:
    """One warp of a CTA, from its admission to the exit of its last thread."""

    cta: int
    warp: int
    start: float
    end: float


@dataclass(slots=True)
class Wait:
    """A warp that could not go on: on an mbarrier (``phase`` is the one waited for), a hardware barrier or a
    group of copies. ``end`` includes the cost of the waking; it is ``start`` where there was nothing to wait
    for."""

    cta: int
    warp: int
    on: str
    phase: int | None
    start: float
    end: float
    at: str


@dataclass(slots=True)
class Copy:
    """One asynchronous copy, from its issue until its bytes are at their destination.

    ``cta`` issued it; ``shared`` is the offset in the shared memory of CTA ``into`` that is written (loads)
    or read (stores), ``read`` the time at which the source may be overwritten. ``cp.async`` are told per warp
    and group.
    """

    cta: int
    warp: int
    kind: str
    num_bytes: int
    into: int
    shared: int
    barrier: str | None
    group: int | None
    start: float
    read: float
    end: float
    at: str


@dataclass(slots=True)
class Phase:
    """Phase ``phase`` of an mbarrier completed at ``time``."""

    cta: int
    barrier: str
    phase: int
    time: float


@dataclass(slots=True)
class LaunchTrace:
    """Events of one launch, in the order in which the emulator came by them. ``label`` is yours to set."""

    kernel: str
    device: str
    sm_clock_mhz: float
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    cycles: float = 0.0
    label: str = ""
    clock: str = "modelled"
    warps: list[Life] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)


class Trace:
    """Launches recorded on one device, oldest first. ``ctas``: which CTAs of each launch are kept."""

    def __init__(self, ctas: Collection[int] = (0,)) -> None:
        self.ctas = frozenset(ctas)
        self.launches: list[LaunchTrace] = []

    def begin(self, launch: Launch) -> Recorder:
        """The recorder of a launch that starts now."""
        recorder = Recorder(launch, self.ctas)
        self.launches.append(recorder.kept)
        return recorder

    def as_dict(self) -> dict[str, Any]:
        return {"smfree_trace": FORMAT_VERSION, "launches": [asdict(launch) for launch in self.launches]}

    def save(self, path: Path | str) -> Path:
        """Write the JSON that ``smfree timeline`` draws."""
        path = Path(path)
        path.write_text(json.dumps(self.as_dict(), indent=1) + "\n", encoding="utf-8")
        return path


class Recorder:
    """Called by the units of one launch."""

    def __init__(self, launch: Launch, ctas: frozenset[int]) -> None:
        self.launch = launch
        profile = launch.device.profile.device
        self.kept = LaunchTrace(
            launch.kernel.name,
            profile.name,
            profile.sm_clock_mhz,
            launch.grid,
            launch.block,
            launch.shared_bytes,
        )
        self._ctas = ctas
        self._lives: dict[tuple[int, int], Life] = {}
        self._waits: dict[tuple[int, int], Wait] = {}  # the latest of each warp
        self._missed: set[tuple[int, int]] = set()  # warps that will look again
        self._copies: dict[tuple[int, int, int], Copy] = {}  # cp.async by CTA, warp and group

    # ---------------------------------------------------------------- warps

    def entered(self, lanes: LaneSet) -> None:
        """CTAs moved into slots."""
        for cta, warp, _, t in self._warps(lanes.warps, self.launch.time[lanes.warps]):
            life = self._lives[cta, warp] = Life(cta, warp, t, t)
            self.kept.warps.append(life)

    def left(self, g: Group) -> None:
        """Threads exited."""
        for cta, warp, _, t in self._warps(g.lanes.warps, self.launch.time[g.lanes.warps]):
            life = self._lives[cta, warp]
            life.end = max(life.end, t)

    def finish(self, cycles: float) -> None:
        """The launch is over. Its times counted from the start of the device's clock until now."""
        self.kept.cycles = cycles
        origin = self.launch.origin
        spans: list[Life | Wait | Copy] = [*self.kept.warps, *self.kept.waits, *self.kept.copies]
        for each in spans:
            each.start -= origin
            each.end -= origin
        for copy in self.kept.copies:
            copy.read -= origin
        for phase in self.kept.phases:
            phase.time -= origin

    # ---------------------------------------------------------------- waits

    def looked(self, g: Group, keys: Any, done: Any, before: Any, after: Any) -> None:
        """A test_wait or try_wait. A warp whose lanes ask several barriers is told by its first lane. Looking
        again for the same phase is one wait."""
        if not self._wanted(g):
            return
        first = g.lanes.warp_starts
        phase = self.launch.sync.mbarriers.phase(keys[first]) - done[first]
        ends = np.broadcast_to(after, len(first)).tolist()
        for cta, warp, i, t in self._warps(g.lanes.warps, before):
            on, number, latest = (
                self._barrier(int(keys[first[i]])),
                int(phase[i]),
                self._waits.get((cta, warp)),
            )
            if (
                latest is not None
                and (cta, warp) in self._missed
                and (latest.on, latest.phase) == (on, number)
            ):
                latest.end = ends[i]
            else:
                self._wait(cta, warp, on, number, t, ends[i], g)
            (self._missed.discard if done[first[i]] else self._missed.add)((cta, warp))

    def waited(self, g: Group, on: str, before: Any, after: Any) -> None:
        """The warps of ``g`` stood still from ``before`` to ``after``."""
        if not self._wanted(g):
            return
        for cta, warp, i, t in self._warps(g.lanes.warps, before):
            self._wait(cta, warp, on, None, t, float(after[i]), g)

    def _wait(
        self, cta: int, warp: int, on: str, phase: int | None, start: float, end: float, g: Group
    ) -> None:
        wait = self._waits[cta, warp] = Wait(cta, warp, on, phase, start, end, self.launch.line_of(g.pc))
        self.kept.waits.append(wait)

    # ---------------------------------------------------------------- copies and phases

    def issued(self, g: Group, batch: PendingCopies) -> None:
        """Copies whose modelled times are known: those that CTAs which are kept issue, or get bytes of."""
        launch = self.launch
        threads, pitch = launch.geometry.threads, launch.memory.pitch
        shared = batch.dst if batch.kind.to_shared else batch.src
        into = launch.cta[shared // pitch].tolist()
        if not self._wanted(g) and self._ctas.isdisjoint(into):
            return
        at = launch.line_of(g.pc)
        starts = launch.time[g.lanes.warps]
        of_warp = dict(zip(g.lanes.warps.tolist(), starts.tolist(), strict=True))
        for i, lane in enumerate(batch.issuer.tolist()):
            slot, tid = divmod(lane, threads)
            cta, warp = int(launch.cta[slot]), tid // 32
            if cta not in self._ctas and into[i] not in self._ctas:
                continue
            copy = Copy(
                cta=cta,
                warp=warp,
                kind=batch.kind.value,
                num_bytes=int(batch.nbytes[i]),
                into=into[i],
                shared=int(shared[i]) % pitch,
                barrier=None if batch.key is None else self._barrier(int(batch.key[i])),
                group=None if batch.group is None else int(batch.group[i]),
                start=of_warp[slot * launch.geometry.warps_per_cta + warp],
                read=float(batch.read_at[i]),
                end=float(batch.complete_at[i]),
                at=at,
            )
            self._keep(copy)

    def _keep(self, copy: Copy) -> None:
        """A copy of its own, or (cp.async) one more piece of its warp's group."""
        if copy.kind != "cp.async" or copy.group is None:
            self.kept.copies.append(copy)
            return
        key = (copy.cta, copy.warp, copy.group)
        whole = self._copies.get(key)
        if whole is None:
            self._copies[key] = copy
            self.kept.copies.append(copy)
            return
        whole.num_bytes += copy.num_bytes
        whole.shared = min(whole.shared, copy.shared)
        whole.read, whole.end = max(whole.read, copy.read), max(whole.end, copy.end)

    def bound(self, g: Group, keys: Any) -> None:
        """cp.async.mbarrier.arrive: what a warp has copied since its last one completes on this barrier."""
        if not self._wanted(g):
            return
        first = g.lanes.warp_starts
        for cta, warp, i, _ in self._warps(g.lanes.warps, 0.0):
            for key in [key for key in self._copies if key[:2] == (cta, warp)]:
                self._copies.pop(key).barrier = self._barrier(int(keys[first[i]]))

    def completed(self, keys: Any) -> None:
        """Phases of these barriers have completed."""
        launch = self.launch
        barriers = launch.sync.mbarriers
        phases = barriers.phase(keys) - 1
        times = barriers.completion_time(keys, phases & 1)
        for key, phase, time in zip(keys.tolist(), phases.tolist(), times.tolist(), strict=True):
            cta = int(launch.cta[key * 8 // launch.memory.pitch])
            if cta in self._ctas:
                self.kept.phases.append(Phase(cta, self._barrier(key), phase, time))

    # ---------------------------------------------------------------- names

    def _wanted(self, g: Group) -> bool:
        return not self._ctas.isdisjoint(self.launch.cta[g.lanes.slots].tolist())

    def _warps(self, warps: Any, times: Any) -> Sequence[tuple[int, int, int, float]]:
        """(CTA, warp of the CTA, position, time) of the warps that are kept."""
        wpc = self.launch.geometry.warps_per_cta
        ctas = self.launch.cta[warps // wpc].tolist()
        return [
            (cta, warp % wpc, i, t)
            for i, (cta, warp, t) in enumerate(
                zip(ctas, warps.tolist(), np.broadcast_to(times, len(warps)).tolist(), strict=True)
            )
            if cta in self._ctas
        ]

    def _barrier(self, key: int) -> str:
        """ "full[1]" """
        return variable_at(self.launch, key * 8 % self.launch.memory.pitch)
