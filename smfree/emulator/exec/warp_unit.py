"""Warp-wide instructions: lanes park until all members of their mask that have not exited are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import BarrierFault
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.warp import per_lane

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch


@dataclass(slots=True)
class WarpWait:
    """Parked at a warp-wide instruction until all member lanes are there.

    ``meets``: what instructions may stand for each other; empty: all lanes are at the same one.
    """

    mask: int
    act: Callable[[Group], bool | None]
    meets: str = ""


class WarpUnit:
    """``parked`` holds the groups that wait at warp-wide instructions of one launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.parked: list[Group] = []

    def lanes_left(self) -> None:
        """Threads exited: the others go on without them."""
        for g in list(self.parked):
            if g in self.parked:
                self.parked.remove(g)
                self._try(g)

    def gather(self, g: Group, mask: int, act: Callable[[Group], bool | None], *, meets: str = "") -> bool:
        """Run ``act`` once every live member of the mask is in the group; park the lanes until then.
        ``act`` answers False when it has parked the group itself.

        ``meets``: the members may execute different instructions of this name (bar.warp.sync).
        """
        value = g.regs[mask]
        if g.lanes.full_warps and type(value) is not np.ndarray and int(value) == 0xFFFFFFFF:
            return act(g) is not False
        g.wait = WarpWait(mask, act, meets)
        mates = [p for p in self.parked if p.pc == g.pc and np.isin(p.lanes.warps, g.lanes.warps).any()]
        if mates:
            self.parked = [p for p in self.parked if p not in mates]
            wait = g.wait
            g = self.launch.current = self.launch.flow.merge_parked([g, *mates])
            g.wait = wait
        return self._try(g, resume_self=bool(mates))

    def _try(self, g: Group, *, resume_self: bool = True) -> bool:
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
            self.parked.append(g)
            self._meet_elsewhere(g)
            return False
        self._part(g, complete)
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

    def _part(self, g: Group, complete: Any) -> None:
        """The complete lanes of a group act and go on, the others stay parked."""
        wait: WarpWait = g.wait
        yes, no = self.launch.flow.part_mask(g, complete)
        if no is not None:
            no.wait = wait
            self.parked.append(no)
        if yes is not None:
            yes.wait = None
            if wait.act(yes) is not False:
                self.launch.flow.resume([yes])

    def _meet_elsewhere(self, g: Group) -> None:
        """The members may stand at different instructions of one name."""
        parked = [p for p in self.parked if p.wait.meets == g.wait.meets]
        near = [p for p in parked if np.isin(p.lanes.warps, g.lanes.warps).any()]
        verdicts = [(p, self._complete(p, near)) for p in near]
        for p, complete in verdicts:
            if complete.any():
                self.parked.remove(p)
                self._part(p, complete)
