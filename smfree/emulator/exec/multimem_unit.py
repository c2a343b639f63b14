"""Accesses to multicast addresses: a store goes to all bound devices, its own among them, and lands at each
in its own time; a load brings what they have, combined.

The switch replicates and combines: a store passes the sender's port once and a port of each member, a load a
port of each member and the reader's once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.address_space import Mapping, MappingKind
from smfree.emulator.bytespace import fault, shown
from smfree.emulator.crossing import Written
from smfree.emulator.exec.away_unit import Piece, Strong
from smfree.emulator.exec.routing import Part, Region
from smfree.emulator.links import Links
from smfree.emulator.reductions import Reduction, sum_wide

if TYPE_CHECKING:
    from smfree.emulator.exec.accesses import Issue, Pattern
    from smfree.emulator.exec.launch import Launch


class MultimemUnit:
    """Those of one launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def send(self, at: Issue, addr: Any, values: Any, scope: str | None, reduction: Reduction | None) -> None:
        """``multimem.st`` of uint[n, k], or ``multimem.red``."""
        launch, lanes, nbytes = self.launch, at.lanes, values.shape[1] * values.itemsize
        name = "multimem.st" if reduction is None else "multimem.red"
        t = None if launch.clock is None else at.times(launch)
        for index, mapping in self._mappings(addr, nbytes, name):
            piece, parts = Piece(lanes, index), self._members(index, mapping, addr)
            if scope is not None:
                self._check(at, parts, values.itemsize, Strong(name, scope, True, values.shape[1]))
            pattern = launch.memory.new_pattern(piece, parts[0].addr, nbytes)
            rows = None if t is None else t[piece.rows]
            times = self._send_times(parts, pattern, lanes.sm[piece.rows], rows)
            away = self._count(parts, piece.n * nbytes, write=True)
            if away and scope is not None:
                launch.memory.away.count_signals(piece.n, nbytes)
            if reduction is None:
                launch.counters.bytes_through_registers += piece.n * nbytes
            for part, written in zip(parts, times, strict=True):
                with part.positions():
                    launch.copy.flights.send(
                        at.group, lanes, part, values[index], written, piece.of_lane, reduction
                    )
                if written is not None:
                    w = lanes.warps[piece.rows]
                    launch.time[w] = np.maximum(launch.time[w], written.accepted)
                    launch.end_time = max(launch.end_time, float(written.acknowledged.max()))

    def load(
        self,
        at: Issue,
        addr: Any,
        size: int,
        count: int,
        scope: str | None,
        reduction: Reduction,
        *,
        wide: bool,
    ) -> tuple[Any, Any]:
        """``multimem.ld_reduce`` -> (uint[n, count], when each warp has it; None without a clock). ``wide``:
        16-bit floats are summed in float32 and rounded once."""
        launch, lanes, nbytes = self.launch, at.lanes, size * count
        values: Any = None
        t = None if launch.clock is None else at.times(launch)
        ready = None if t is None else t.copy()
        for index, mapping in self._mappings(addr, nbytes, "multimem.ld_reduce"):
            piece, parts = Piece(lanes, index), self._members(index, mapping, addr)
            if scope is not None:
                self._check(at, parts, size, Strong("multimem.ld_reduce", scope, False, count))
            found = []
            for part in parts:
                with part.positions():
                    launch.copy.flights.settle(part.memory, part.addr, nbytes, lanes.ids[index])
                    found.append(part.memory.load(part.addr, size, count))
            whole = _combined(found, reduction, wide=wide)
            if values is None:
                values = np.empty((lanes.n, count), whole.dtype)
            values[index] = whole
            self._count(parts, piece.n * nbytes, write=False)
            pattern = launch.memory.new_pattern(piece, parts[0].addr, nbytes)
            done = self._load_times(
                parts, pattern, lanes.sm[piece.rows], None if t is None else t[piece.rows]
            )
            if ready is not None:
                ready[piece.rows] = np.maximum(ready[piece.rows], done)
        return values, ready

    @property
    def _links(self) -> Links:
        node = self.launch.memory.router.node
        assert node is not None, "there are mappings"
        return node.links

    # ---------------------------------------------------------------- addresses

    def _mappings(self, addr: Any, nbytes: int, name: str) -> Iterator[tuple[Any, Mapping]]:
        """Positions of lanes and the multicast mapping they go to."""
        left = np.arange(len(addr))
        while len(left):
            at = int(left[0])
            mapping = self._mapping(int(addr[at]), nbytes, name, at)
            inside = (addr[left] >= mapping.start) & (addr[left] <= mapping.end - nbytes)
            if not inside[0]:
                raise fault(
                    "memory.bounds", at,
                    f"{name} of {nbytes} bytes at {shown(int(addr[at]))} leaves {mapping}",
                    "check index and size; all devices must have bound memory there",
                )  # fmt: skip
            mine, left = left[inside], left[~inside]
            yield (slice(None) if len(mine) == len(addr) else mine), mapping

    def _mapping(self, address: int, nbytes: int, name: str, index: int) -> Mapping:
        context, ordinal = self.launch.context, self.launch.device.ordinal
        where = shown(address)
        found = None if context is None else context.process.space.find(address)
        if found is None or found.kind is not MappingKind.MULTICAST:
            raise fault(
                "multimem.address", index,
                f"{name} takes an address in a multicast mapping of its process (got {where}"
                f"{'' if found is None else f' in {found}'})",
                "map a multicast object (cuMulticastCreate, cuMemMap) and pass that address",
            )  # fmt: skip
        if found.users is not None and ordinal not in found.users:
            raise fault(
                "memory.no_access", index, f"{name}: device {ordinal} has no access to {found}",
                "give it access with cuMemSetAccess",
            )  # fmt: skip
        if all(device.ordinal != ordinal for _, _, device in found.members):
            bound = ", ".join(str(device.ordinal) for _, _, device in found.members) or "none"
            raise fault(
                "multimem.member", index,
                f"{name} by device {ordinal}, which has bound no memory to {found} (devices bound: {bound})",
                "add the device (cuMulticastAddDevice) and bind its memory (cuMulticastBindMem)",
            )  # fmt: skip
        if found.unbound:
            missing = ", ".join(map(str, found.unbound))
            raise fault(
                "multimem.member", index,
                f"{name} to {found}, in which these devices of the object have bound no memory: {missing}",
                "let every rank bind (cuMulticastBindMem) before any uses the address",
            )  # fmt: skip
        if address % nbytes:
            raise fault(
                "memory.misaligned", index, f"{name} of {nbytes} bytes must be aligned to them (got {where})",
                "offset the pointer by a multiple of the vector",
            )  # fmt: skip
        return found

    @staticmethod
    def _members(index: Any, mapping: Mapping, addr: Any) -> list[Part]:
        """The same lanes at each member's own address."""
        parts = []
        for memory, backing, device in mapping.members:
            shift = backing - mapping.start
            home = memory.allocation_of(backing)
            region = Region(mapping.start, mapping.end, memory, shift, device, home, mapping)
            parts.append(Part(index, region, addr[index] + shift))
        return parts

    def _check(self, at: Issue, parts: list[Part], size: int, access: Strong) -> None:
        """Strong accesses, elements of ``size`` bytes, reach other devices only with scope .sys."""
        here = self.launch.device.ordinal
        for part in parts:
            assert part.device is not None
            if access.scope != "sys" and part.device.ordinal != here:
                raise fault(
                    "scope.too_narrow", 0,
                    f"{access.what} with scope .{access.scope} by device {here} to {part.region.mapping}: "
                    f"the scope does not reach device {part.device.ordinal}",
                    "use .sys",
                )  # fmt: skip
            self.launch.memory.away.note(at, part, size, access)

    # ---------------------------------------------------------------- counting and time

    def _count(self, parts: list[Part], nbytes: int, *, write: bool) -> bool:
        """Once, however many members there are. Whether one of them is another device."""
        away = any(part.device is not self.launch.device for part in parts)
        if away:
            counters = self.launch.counters
            counters.peer_store_bytes += nbytes if write else 0
            counters.peer_load_bytes += 0 if write else nbytes
        return away

    def _missed(self, part: Part, pattern: Pattern, *, write: bool) -> Any:
        peer = self.launch.memory.router.peer_of(part.region)
        hits, whole = self.launch.memory.l2_hits(pattern, part.addr, write=write, owner=peer)
        return (whole - hits).astype(np.float64)

    def _send_times(self, parts: list[Part], pattern: Pattern, sm: Any, t: Any) -> list[Written | None]:
        launch, clock = self.launch, self.launch.clock
        links, here = self._links, launch.device.ordinal
        moved, packets = pattern.moved, pattern.packets
        members = [part.device.ordinal for part in parts if part.device is not None]
        if t is None or clock is None:
            links.replicate(here, members, np.zeros(len(moved)), moved, packets)
            return [None] * len(parts)
        one_way = links.profiles[here].link.latency_ns
        begin, done = clock.lsu_out(sm, t, moved, 2 * one_way * launch.cycles_per_ns, write=True)
        sent, arrivals = links.replicate(here, members, launch.node_ns(begin), moved, packets)
        accepted = np.maximum(done, launch.cycles_of(sent))
        times = []
        for part, arrival in zip(parts, arrivals, strict=True):
            assert part.device is not None
            missed, owner = self._missed(part, pattern, write=True), part.device.clock
            there = np.maximum(arrival, owner.memory_at(arrival, moved, missed, write=True))
            performed = launch.cycles_of(there + owner.memory_latency_ns(missed, write=True))
            performed = np.maximum(performed, accepted)
            times.append(Written(accepted, performed, performed + one_way * launch.cycles_per_ns))
        return list(times)

    def _load_times(self, parts: list[Part], pattern: Pattern, sm: Any, t: Any) -> Any:
        launch, clock = self.launch, self.launch.clock
        links, here = self._links, launch.device.ordinal
        moved, packets = pattern.moved, pattern.packets
        members = [part.device.ordinal for part in parts if part.device is not None]
        if t is None or clock is None:
            links.gather(members, here, [np.zeros(len(moved))] * len(members), moved, packets)
            return None
        one_way = links.profiles[here].link.latency_ns
        begin, done = clock.lsu_out(sm, t, moved, 2 * one_way * launch.cycles_per_ns, write=False)
        asked, ready = launch.node_ns(begin) + one_way, []
        for part in parts:
            assert part.device is not None
            missed, owner = self._missed(part, pattern, write=False), part.device.clock
            passed = owner.memory_at(asked, moved, missed, write=False)
            ready.append(passed + owner.memory_latency_ns(missed, write=False))
        return np.maximum(done, launch.cycles_of(links.gather(members, here, ready, moved, packets)))


def _combined(found: list[Any], reduction: Reduction, *, wide: bool) -> Any:
    """Member by member, in the order in which they were bound."""
    if wide:
        return sum_wide(found, reduction.kind)
    whole = found[0]
    for other in found[1:]:
        whole = reduction.combine(whole.view(np.uint8), other.view(np.uint8)).view(other.dtype)
    return whole
