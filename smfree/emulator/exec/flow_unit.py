"""Divergence: groups split where a program branches, and meet again at the join, or go their own ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smfree.emulator.exec.lanes import Group, Join, merge

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch


class FlowUnit:
    """Splits and joins of one launch. ``at_join`` holds the groups that wait, as a courtesy, for others."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.at_join: list[Group] = []

    def split(self, g: Group, mask: Any, join_pc: int | None, yes_pc: int, no_pc: int) -> tuple[Group, Group]:
        """Two groups of one; they meet again at ``join_pc`` where the program has such a place."""
        yes_lanes, no_lanes, yes_index, no_index = g.lanes.split(mask)
        join = g.join
        if join_pc is not None and (join is None or join.pc != join_pc):
            join = Join(join_pc, g)
        yes = g.part(yes_lanes, yes_index, self.launch.program.live(yes_pc), yes_pc)
        no = g.part(no_lanes, no_index, self.launch.program.live(no_pc), no_pc)
        for part in (yes, no):
            part.join = join
            if join is not g.join:
                part.origin, part.entry = join, list(part.regs)
        return yes, no

    def part_mask(self, g: Group, mask: Any) -> tuple[Group | None, Group | None]:
        """A parked or running group in two at the same instruction; None for an empty part."""
        if mask.all():
            return g, None
        if not mask.any():
            return None, g
        yes_lanes, no_lanes, yes_index, no_index = g.lanes.split(mask)
        live = self.launch.program.live(g.pc)
        return g.part(yes_lanes, yes_index, live, g.pc), g.part(no_lanes, no_index, live, g.pc)

    def part_slots(self, g: Group, open_slots: Any) -> tuple[Group | None, Group | None]:
        """Split by whether the lane's CTA is among the open ones."""
        lanes = g.lanes
        if lanes.one_slot is not None:
            return (g, None) if open_slots[lanes.one_slot] else (None, g)
        return self.part_mask(g, open_slots[lanes.slot])

    def meet(self, g: Group) -> Group | None:
        """Arrive at the group's join: the merged group if all are there, else None (it waits, as a
        courtesy)."""
        while (join := g.join) is not None and join.pc == g.pc:
            join.arrived.append(g)
            join.missing -= g.lanes.n
            if join.missing > 0:
                self.at_join.append(g)
                return None
            g = self._merged(join)
        return g

    def _merged(self, join: Join) -> Group:
        """All that arrived at a join, as one group on its way to the outer join."""
        parts = join.arrived
        if len(parts) > 1:
            g = merge(parts, join.pc, self.launch.program.live(join.pc), join.outer)
        else:
            g = parts[0]
            g.join = join.outer
        arrived = set(map(id, parts))
        self.at_join = [p for p in self.at_join if id(p) not in arrived]
        return g

    def enqueue(self, g: Group) -> None:
        """Make a group runnable, through its join if it stands at one."""
        met = self.meet(g)
        if met is not None:
            self.launch.runnable.append(met)

    def release(self, groups: list[Group]) -> None:
        """Let these groups go on without the lanes they were waiting for."""
        for g in list(groups):
            join = g.join
            assert join is not None
            join.arrived.remove(g)
            g.join = join.outer
            while g.join is not None and g.join.pc == g.pc:  # do not wait at an enclosing one either
                g.join.missing -= g.lanes.n
                g.join = g.join.outer
            self.launch.runnable.append(g)
        gone = set(map(id, groups))
        self.at_join = [p for p in self.at_join if id(p) not in gone]

    def resume(self, groups: list[Group]) -> None:
        """Parked groups go on after the instruction they waited in."""
        for g in groups:
            g.wait = None
            g.pc += 1
            self.enqueue(g)

    def merge_parked(self, groups: list[Group]) -> Group:
        """One group of several parked at the same instruction; joins they disagree on are given up."""
        joins = {id(g.join) for g in groups}
        join = groups[0].join if len(joins) == 1 else None
        if len(joins) > 1:
            for g in groups:
                self.leave_joins(g)
        pc = groups[0].pc
        return merge(groups, pc, self.launch.program.live(pc), join)

    def leave_joins(self, g: Group) -> None:
        """These lanes will not come to the joins they were expected at."""
        chain: list[Join] = []
        join, g.join = g.join, None
        while join is not None:
            join.missing -= g.lanes.n
            chain.append(join)
            join = join.outer
        for join in chain:
            if join.missing == 0 and join.arrived:
                self.enqueue(self._merged(join))
