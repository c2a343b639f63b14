"""Accesses of threads beyond the device's own memory: over NVLink to other devices, over PCIe to the host.

Loads and ``atom`` act at issue. Stores and ``red`` to another device land later (:mod:`flights`); those to
the host are there at once. Peer data is not kept in the own L2: it passes the owner's, whose hits and DRAM
bytes count for the owner.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.bytespace import fault, shown
from smfree.emulator.crossing import Asked, Crossing, Written, packets_of
from smfree.emulator.errors import EmulationError, Severity
from smfree.emulator.exec.flights import Flights
from smfree.emulator.exec.lanes import LaneSet
from smfree.emulator.exec.routing import Part, Router
from smfree.emulator.exec.values import UINT
from smfree.emulator.links import HOST
from smfree.emulator.strong import Shape

if TYPE_CHECKING:
    from smfree.emulator.exec.accesses import Issue, Pattern
    from smfree.emulator.exec.lanes import Group
    from smfree.emulator.exec.launch import Launch
    from smfree.emulator.exec.polls import Look
    from smfree.emulator.host_memory import HostMemory
    from smfree.emulator.memory import GlobalMemory
    from smfree.emulator.node import DeviceState


class Piece:
    """Some lanes of an access: as much of a LaneSet as a Pattern asks for.

    ``rows``: which of the access's warps they belong to, ``of_lane``: which of those each lane does.
    """

    full_warps = False

    def __init__(self, lanes: LaneSet, index: Any) -> None:
        self.n = lanes.n
        self.rows: Any = slice(None)
        self.warp_starts, self.warp_counts = lanes.warp_starts, lanes.warp_counts
        self.of_lane = lanes.warp_index
        if isinstance(index, slice):
            return
        warps = lanes.warp_index[index]
        new = np.flatnonzero(np.diff(warps, prepend=-1))
        self.n = len(warps)
        self.rows, self.warp_starts = warps[new], new
        self.warp_counts = np.diff(np.append(new, self.n))
        self.of_lane = np.repeat(np.arange(len(new)), self.warp_counts)


@dataclass(frozen=True, slots=True)
class Strong:
    """A strong access: "load", its scope, whether it writes, how many elements each lane has."""

    what: str
    scope: str
    writes: bool
    count: int = 1


class AwayUnit:
    """Of one launch. ``router`` says where addresses lead."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.router = Router(launch)
        self._crossings: dict[int, Crossing] = {}
        self._noted: dict[int, GlobalMemory | HostMemory] = {}

    # ---------------------------------------------------------------- accesses

    def strong(self, at: Issue, addr: Any, parts: list[Part] | None, size: int, access: Strong) -> None:
        """Check strong accesses, elements of ``size`` bytes, where several devices share the machine.

        A scope below .sys on another device's memory is told as strict: it is right as long as this device
        alone uses the word. Raises MemoryFault for a race with another device's
        (:mod:`~smfree.emulator.strong`).
        """
        launch, mine = self.launch, self.launch.device.ordinal
        for part in parts or [self.router.all_own(addr)]:
            with part.positions():
                peer = self.router.peer_of(part.region)
                if peer is not None and access.scope != "sys":
                    finding = fault(
                        "scope.too_narrow",
                        0,
                        f"{access.what} of {size} bytes with scope .{access.scope} by device {mine} at "
                        f"{shown(int(part.addr[0]))} in {part.region}: the scope does not reach device "
                        f"{peer.ordinal}",
                        "use .sys",
                    )
                    finding.severity = Severity.STRICT
                    launch.report(finding)
                self.note(at, part, size, access)
            if peer is not None and access.writes:
                self.count_signals(len(part.addr), size * access.count)

    def note(self, at: Issue, part: Part, size: int, access: Strong) -> None:
        """Take in a part's strong accesses. Raises MemoryFault when they race with another device's."""
        here = f"device {self.launch.device.ordinal} at {self.launch.here(at.group)}"
        label = f"{access.what}.{access.scope} of {size} bytes by {here}"
        elements = (part.addr[:, None] + size * np.arange(access.count)).ravel()
        try:
            self._note(part.memory, elements, Shape(size, access.writes, access.scope), label)
        except EmulationError as error:
            error.index = None if error.index is None else error.index // access.count
            raise

    def polls_weakly(self, g: Group, looks: Iterable[Look]) -> None:
        """A loop waits for words that only weak loads read: a race, if another device writes them. Raises
        MemoryFault."""
        if not self.router.several:
            return
        label = f"a loop of weak loads by device {self.launch.device.ordinal} at {self.launch.here(g)}"
        for look in looks:
            self._note(look.home, look.places, Shape(look.size, False, "weak"), label)

    def _note(self, memory: GlobalMemory | HostMemory, addr: Any, shape: Shape, label: str) -> None:
        memory.strong.note(self.launch, self.launch.device.ordinal, addr, shape, label)
        self._noted[id(memory)] = memory

    def finish(self) -> None:
        """The launch is over."""
        for memory in self._noted.values():
            memory.strong.forget(self.launch)

    def load(self, at: Issue, parts: list[Part], size: int, count: int) -> tuple[Any, Any]:
        """(uint[n, count], when each warp's registers are filled; None without a clock)."""
        launch, lanes = self.launch, at.lanes
        values = np.empty((lanes.n, count), UINT[8 * size])
        t = None if launch.clock is None else at.times(launch)
        ready = None if t is None else t.copy()
        for part in parts:
            with part.positions():
                self._flights.settle(part.memory, part.addr, size * count, lanes.ids[part.index])
                values[part.index] = part.memory.load(part.addr, size, count)
            piece, pattern, asked = self._asked(at, part, size * count, write=False)
            self.count(part, piece.n * size * count, write=False)
            if t is None:
                self._untimed(part, asked, write=False)
                continue
            assert ready is not None
            done = self._timed_load(part, pattern, lanes.sm[piece.rows], t[piece.rows], asked)
            ready[piece.rows] = np.maximum(ready[piece.rows], done)
        return values, ready

    def store(self, at: Issue, parts: list[Part], values: Any) -> tuple[Any, Any]:
        """Store uint[n, k] -> (accepted, performed) of each warp's part in own and host memory; None without
        a clock."""
        launch, lanes = self.launch, at.lanes
        nbytes = values.shape[1] * values.itemsize
        t = None if launch.clock is None else at.times(launch)
        accepted, performed = (None, None) if t is None else (t.copy(), t.copy())
        for part in parts:
            peer = self.router.peer_of(part.region)
            if peer is None:
                with part.positions():
                    part.memory.store(part.addr, values[part.index])  # first: it checks the bounds
            piece, pattern, asked = self._asked(at, part, nbytes, write=True)
            self.count(part, piece.n * nbytes, write=True)
            times = self._timed_store(part, pattern, lanes.sm[piece.rows], t, piece.rows, asked)
            if peer is not None:
                with part.positions():
                    self._flights.send(at.group, lanes, part, values[part.index], times, piece.of_lane, None)
            if times is None:
                continue
            assert accepted is not None and performed is not None
            accepted[piece.rows] = np.maximum(accepted[piece.rows], times.accepted)
            if peer is None:
                performed[piece.rows] = np.maximum(performed[piece.rows], times.acknowledged)
            else:
                launch.end_time = max(launch.end_time, float(times.acknowledged.max()))
        return accepted, performed

    def atomic(
        self, at: Issue, parts: list[Part], op: str, value: Any, compare: Any, *, waits: bool
    ) -> tuple[Any, Any]:
        """(old values, when each warp may go on); a ``red`` that lands later has zeros for them."""
        launch, lanes, nbytes = self.launch, at.lanes, value.itemsize
        old = np.zeros(lanes.n, value.dtype)
        value = np.broadcast_to(value, lanes.n)
        t = None if launch.clock is None else at.times(launch)
        done = None if t is None else t.copy()
        for part in parts:
            index = part.index
            peer = self.router.peer_of(part.region)
            piece, pattern, asked = self._asked(at, part, nbytes, write=True)
            self.count(part, piece.n * nbytes, write=True)
            with part.positions():
                if peer is not None and not waits:
                    times = self._timed_store(part, pattern, lanes.sm[piece.rows], t, piece.rows, asked)
                    self._flights.send(
                        at.group, lanes, part, value[index].reshape(-1, 1), times, piece.of_lane, op
                    )
                    if times is not None and done is not None:
                        done[piece.rows] = times.accepted
                        launch.end_time = max(launch.end_time, float(times.acknowledged.max()))
                    continue
                self._flights.settle(part.memory, part.addr, nbytes, now=True)
                other = None if compare is None else np.broadcast_to(compare, lanes.n)[index]
                old[index] = part.memory.atomic(op, part.addr, value[index], other)
            if t is None:
                self._untimed(part, asked, write=True)
            else:
                assert done is not None
                back = self._timed_load(part, pattern, lanes.sm[piece.rows], t[piece.rows], asked, write=True)
                done[piece.rows] = np.maximum(done[piece.rows], back)
            if peer is not None:
                latest = 0.0 if done is None else float(done.max())
                self.landed(peer, int(part.addr.min()), int(part.addr.max()) + nbytes, latest)
        return old, done

    def async_load(self, at: Issue, part: Part, sizes: Any, t: Any) -> tuple[Piece, int, Any]:
        """cp.async of one part, ``sizes`` bytes of each lane: its warps, sectors, and when each has its data;
        None without a clock."""
        reading = np.flatnonzero(sizes > 0)
        piece = Piece(at.lanes, part.index)
        self.count(part, int(sizes.sum()), write=False)
        done = None if t is None else t[piece.rows] + 0.0
        if not len(reading):
            return piece, 0, done
        index = reading if isinstance(part.index, slice) else part.index[reading]
        some = Part(index, part.region, part.addr[reading])
        inner, pattern, asked = self._asked(at, some, int(sizes.max()), write=False)
        if t is None:
            self._untimed(part, asked, write=False)
        else:
            assert done is not None and self.launch.clock is not None
            loaded = self._timed_load(some, pattern, at.lanes.sm[inner.rows], t[inner.rows], asked)
            where = np.searchsorted(np.arange(len(t))[piece.rows], inner.rows)
            done[where] = loaded + self.launch.clock.profile.cp_async.startup_cycles
        return piece, pattern.sectors[1], done

    def bulk(self, part: Part, sm: Any, t: Any, sizes: Any, misses: Any, *, write: bool, tensor: bool) -> Any:
        """Bulk or tensor copies of one part that leave the device: loads -> when complete, stores ->
        :class:`Written`; None without a clock. ``misses``: bytes the owner's L2 lacks."""
        moved = np.asarray(sizes, np.float64)
        asked = Asked(moved, moved, packets_of(moved), np.asarray(misses, np.float64))
        self.count(part, int(moved.sum()), write=write)
        crossing = self.crossing(part)
        assert crossing is not None
        if t is None:
            crossing.count(asked, write=write)
            return None
        way = crossing.bulk_store if write else crossing.bulk_load
        return way(sm, t, asked, tensor=tensor)

    def landed(self, device: DeviceState, lo: int, hi: int, cycles: float) -> None:
        """Bytes [lo, hi) of another device's memory have changed at this time of the launch."""
        assert self.router.node is not None, "there are other devices"
        self.launch.gave = True
        self.router.node.landed(device, lo, hi, self.launch.node_ns(cycles))

    # ---------------------------------------------------------------- counting

    @property
    def _flights(self) -> Flights:
        return self.launch.copy.flights

    def _asked(self, at: Issue, part: Part, nbytes: int, *, write: bool) -> tuple[Piece, Pattern, Asked]:
        """What the part's warps ask for; lines of device memory are in their L2 afterwards."""
        memory = self.launch.memory
        piece = Piece(at.lanes, part.index)
        pattern = memory.pattern(at, part.addr, nbytes) if isinstance(part.index, slice) else None
        if pattern is None:
            pattern = memory.new_pattern(piece, part.addr, nbytes)
        per_warp = pattern.runs[3]
        missed = np.zeros(len(per_warp))
        peer = self.router.peer_of(part.region)
        if peer is not None and self.launch.clock is not None:
            hits, _ = memory.l2_hits(pattern, part.addr, write=write, owner=peer)
            missed = (per_warp - hits).astype(np.float64)
        return piece, pattern, Asked(per_warp, pattern.moved, pattern.packets, missed)

    def count(self, part: Part, nbytes: int, *, write: bool) -> None:
        """Bytes that pass a link, in the launch's counters."""
        counters = self.launch.counters
        if part.device is None:
            counters.host_load_bytes += 0 if write else nbytes
            counters.host_store_bytes += nbytes if write else 0
        elif part.device is not self.launch.device:
            counters.peer_load_bytes += 0 if write else nbytes
            counters.peer_store_bytes += nbytes if write else 0

    def count_signals(self, lanes: int, nbytes: int) -> None:
        """Strong stores and atomics to other devices, ``nbytes`` a lane: :meth:`count` has them, too."""
        self.launch.counters.peer_signals += lanes
        self.launch.counters.peer_signal_bytes += lanes * nbytes

    def _untimed(self, part: Part, asked: Asked, *, write: bool) -> None:
        """Without a clock, what passes a link is counted only."""
        crossing = self.crossing(part)
        if crossing is not None:
            crossing.count(asked, write=write)

    # ---------------------------------------------------------------- time

    def crossing(self, part: Part) -> Crossing | None:
        """The way to the part's memory; None to the own, or where there is no node."""
        node = self.router.node
        if part.device is self.launch.device or node is None:
            return None
        end = HOST if part.device is None else part.device.ordinal
        if end not in self._crossings:
            launch = self.launch
            self._crossings[end] = Crossing(
                launch.device.clock, node.links, launch.device.ordinal, part.device, launch.node_ns,
                launch.cycles_of,
            )  # fmt: skip
        return self._crossings[end]

    def _timed_load(
        self, part: Part, pattern: Pattern, sm: Any, t: Any, asked: Asked, *, write: bool = False
    ) -> Any:
        """When loads, or atomics that ``write`` and come back, are done."""
        crossing, clock = self.crossing(part), self.launch.clock
        assert clock is not None
        if crossing is not None:
            return crossing.load(sm, t, asked)
        sectors, per_warp = pattern.sectors[0], pattern.runs[3]
        return clock.global_load(sm, t, per_warp, sectors, self._own_hits(part, pattern, write=write))

    def _timed_store(
        self, part: Part, pattern: Pattern, sm: Any, t: Any, rows: Any, asked: Asked
    ) -> Written | None:
        if t is None:
            self._untimed(part, asked, write=True)
            return None
        crossing, clock = self.crossing(part), self.launch.clock
        assert clock is not None
        if crossing is not None:
            return crossing.store(sm, t[rows], asked)
        sectors, per_warp = pattern.sectors[0], pattern.runs[3]
        misses = per_warp - self._own_hits(part, pattern, write=True)
        accepted, performed = clock.global_store(sm, t[rows], per_warp, sectors, misses)
        return Written(accepted, performed, performed)

    def _own_hits(self, part: Part, pattern: Pattern, *, write: bool) -> Any:
        """Bytes of own memory in the own L2; host memory without a node has none there."""
        if part.device is None:
            return np.zeros_like(pattern.runs[3])
        return self.launch.memory.l2_hits(pattern, part.addr, write=write)[0]
