"""One access of a group, or several issued as one; what its addresses share with those of the last time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.coalescing import sectors_per_warp, wavefronts_per_warp
from smfree.emulator.exec.lanes import Group, LaneSet
from smfree.emulator.specs import LINE_BYTES, SECTOR_BYTES

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch


@dataclass(slots=True)
class Issue:
    """Accesses issued together: one, or several of a group (``lanes`` repeated).

    ``delays``: instructions issued up to each of several, since the first."""

    group: Group
    lanes: LaneSet
    delays: Any

    def __init__(self, group: Group, times: int = 1, delays: Any = None) -> None:
        self.group = group
        self.lanes = group.lanes if times == 1 else group.lanes.repeated(times)
        self.delays = delays

    def times(self, launch: Launch) -> Any:
        """When each warp issues each of the accesses."""
        t = launch.settle(self.group)
        if self.delays is None:
            return t
        assert launch.clock is not None
        return (t + self.delays[:, None] * launch.clock.alu_latency).ravel()


class Pattern:
    """What the addresses of one access have in common with the last time: everything but where they start.

    ``rel`` are the addresses relative to the first lane's, ``phase`` that one's place in a 128-byte line.
    Sector, wavefront and line counts depend on nothing else, so a loop derives them once.
    """

    __slots__ = ("_lanes", "_nbytes", "_runs", "_sectors", "_waves", "high", "low", "phase", "rel")

    def __init__(self, lanes: LaneSet, rel: Any, phase: int, nbytes: int) -> None:
        self.rel, self.phase = rel, phase
        self.low, self.high = int(rel.min()), int(rel.max()) + nbytes
        self._lanes, self._nbytes = lanes, nbytes
        self._sectors: tuple[Any, int] | None = None
        self._waves: tuple[Any, int] | None = None
        self._runs: tuple[Any, Any, Any, Any] | None = None

    def fits(self, lanes: LaneSet, rel: Any, phase: int, nbytes: int) -> bool:
        same = self._lanes is lanes and self.phase == phase and self._nbytes == nbytes
        return same and bool((self.rel == rel).all())

    @property
    def sectors(self) -> tuple[Any, int]:
        """Sectors of each warp, and of all."""
        if self._sectors is None:
            found = sectors_per_warp(self.rel + self.phase, self._nbytes, self._lanes.warp_starts)
            self._sectors = found, int(found.sum())
        return self._sectors

    @property
    def moved(self) -> Any:
        """Bytes of the sectors of each warp: what a link carries."""
        return self.sectors[0] * float(SECTOR_BYTES)

    @property
    def packets(self) -> Any:
        """Runs of each warp: its packets on a link."""
        lines, _, first_runs, _ = self.runs
        return np.diff(np.append(first_runs, len(lines))).astype(np.float64)

    @property
    def waves(self) -> tuple[Any, int]:
        """Shared-memory wavefronts of each warp, and of all."""
        if self._waves is None:
            lanes = self._lanes
            lane_id = None if lanes.full_warps else lanes.laneid
            found = wavefronts_per_warp(self.rel + self.phase, self._nbytes, lanes.warp_starts, lane_id)
            self._waves = found, int(found.sum())
        return self._waves

    @property
    def runs(self) -> tuple[Any, Any, Any, Any]:
        """Runs of lanes in one line: relative line, bytes, each warp's first run; and bytes per warp."""
        if self._runs is None:
            lanes = self._lanes
            lines = (self.rel + self.phase) // LINE_BYTES
            new = np.ones(lanes.n, np.bool_)
            np.not_equal(lines[1:], lines[:-1], out=new[1:])
            new[lanes.warp_starts] = True
            at = np.flatnonzero(new)
            nbytes = np.diff(at, append=lanes.n) * self._nbytes
            per_warp = lanes.warp_counts * self._nbytes
            self._runs = lines[at], nbytes, np.searchsorted(at, lanes.warp_starts), per_warp
        return self._runs
