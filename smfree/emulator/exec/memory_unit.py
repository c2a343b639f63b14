"""The one place every load, store and atomic passes through: checked, counted, timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.bytespace import atomic_changes
from smfree.emulator.errors import MemoryFault, Unsupported
from smfree.emulator.exec.accesses import Issue, Pattern
from smfree.emulator.exec.away_unit import AwayUnit, Strong
from smfree.emulator.exec.lanes import Group, LaneSet
from smfree.emulator.exec.multimem_unit import MultimemUnit
from smfree.emulator.exec.routing import Part
from smfree.emulator.exec.values import CLUSTER_SHIFT
from smfree.emulator.memory import LocalMemory, SharedMemory
from smfree.emulator.specs import LINE_BYTES

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch
    from smfree.emulator.node import DeviceState

PATTERNS_KEPT = 4096
NEEDS_CLUSTER = "needs .shared::cluster"
Naming = Callable[[int], str]
"""What the lane at a position does to shared memory, for reports; None: an access of so many bytes."""
OWN_CTA_ONLY = "the operand must lie in the shared memory of the executing CTA"


class MemoryUnit:
    """Loads and stores of one launch."""

    def __init__(self, launch: Launch, pitch: int) -> None:
        self.launch = launch
        self.pitch = pitch
        self.device = launch.device
        self.global_memory = launch.device.memory
        self.away = AwayUnit(launch)
        self.router = self.away.router
        self.multimem = MultimemUnit(launch)
        self.shared = SharedMemory(launch.geometry.slots, pitch, launch.shared_bytes, report=launch.report)
        self.shared.name_slot = launch.name_cta
        self.local: SharedMemory | None = None
        self.performed = np.zeros(launch.geometry.num_warps)  # when each warp's stores are visible to all
        self._patterns: dict[tuple[int, int], Pattern] = {}
        self.ready: dict[int, Any] = {}  # per register: when each warp's pending load has filled it

    @staticmethod
    def new_pattern(lanes: Any, addr: Any, nbytes: int) -> Pattern:
        """Of an access that is not repeated; ``lanes`` may be a Piece."""
        first = int(addr[0])
        return Pattern(lanes, addr - first, first % LINE_BYTES, nbytes)

    def pattern(self, at: Issue, addr: Any, nbytes: int) -> Pattern:
        """The access pattern of the instruction at hand."""
        first = int(addr[0])
        rel, phase = addr - first, first % LINE_BYTES
        lanes = at.lanes
        key = (at.group.pc, id(lanes))
        known = self._patterns.get(key)
        if known is None or not known.fits(lanes, rel, phase, nbytes):
            if len(self._patterns) >= PATTERNS_KEPT:
                self._patterns.clear()
            known = self._patterns[key] = Pattern(lanes, rel, phase, nbytes)
        return known

    # ---------------------------------------------------------------- global

    def load_global(
        self, at: Issue, addr: Any, size: int, count: int, scope: str | None = None
    ) -> tuple[Any, Any]:
        """(uint[n, count] loaded, when each warp's registers are filled; None without a clock).

        ``scope``: of a strong access."""
        lanes, nbytes = at.lanes, size * count
        parts = self._parts(addr, nbytes, "load")
        if scope is not None and self.router.several:
            self.away.strong(at, addr, parts, size, Strong("load", scope, False, count))
        if parts is None:
            values = self.global_memory.load(addr, size, count)
        pattern = self.pattern(at, addr, nbytes)
        sectors, total = pattern.sectors
        counters = self.launch.counters
        counters.global_load_requests += len(lanes.warps)
        counters.global_load_sectors += total
        counters.global_load_bytes += lanes.n * nbytes
        counters.bytes_through_registers += lanes.n * nbytes
        if parts is not None:
            return self.away.load(at, parts, size, count)
        clock = self.launch.clock
        if clock is None:
            return values, None
        t = at.times(self.launch)
        hits, per_warp = self.l2_hits(pattern, addr, write=False)
        return values, clock.global_load(lanes.sm, t, per_warp, sectors, hits, path="lsu")

    def store_global(self, at: Issue, addr: Any, values: Any, scope: str | None = None) -> None:
        """Store uint[n, k]. ``scope``: of a strong access."""
        lanes, nbytes = at.lanes, values.shape[1] * values.itemsize
        parts = self._parts(addr, nbytes, "store")
        if scope is not None and self.router.several:
            self.away.strong(at, addr, parts, values.itemsize, Strong("store", scope, True, values.shape[1]))
        if parts is None:
            self.global_memory.store(addr, values)
        pattern = self.pattern(at, addr, nbytes)
        sectors, total = pattern.sectors
        counters = self.launch.counters
        counters.global_store_requests += len(lanes.warps)
        counters.global_store_sectors += total
        counters.global_store_bytes += lanes.n * nbytes
        counters.bytes_through_registers += lanes.n * nbytes
        clock = self.launch.clock
        if parts is not None:
            accepted, performed = self.away.store(at, parts, values)
        if clock is None:
            self.launch.did_something()
            return
        if parts is None:
            t = at.times(self.launch)
            hits, per_warp = self.l2_hits(pattern, addr, write=True)
            accepted, performed = clock.global_store(lanes.sm, t, per_warp, sectors, per_warp - hits)
        if at.delays is not None:
            accepted = accepted.reshape(len(at.delays), -1).max(axis=0)
            performed = performed.reshape(len(at.delays), -1).max(axis=0)
        w = at.group.lanes.warp_slice
        self.launch.time[w] = accepted
        self.performed[w] = np.maximum(self.performed[w], performed)
        self.launch.did_something(float(performed.max()))

    def _parts(self, addr: Any, nbytes: int, what: str) -> list[Part] | None:
        """Where an access goes, None when all of it stays in the device's own memory at these addresses."""
        return None if self.router.local(addr, nbytes) else self.router.parts(addr, nbytes, what)

    def l2_hits(
        self, pattern: Pattern, addr: Any, *, write: bool, owner: DeviceState | None = None
    ) -> tuple[Any, Any]:
        """(bytes that L2 holds, bytes) of each warp's access; the lines are there afterwards. ``owner``: the
        device whose memory and L2 it is, if not the launch's own."""
        lines, nbytes, first_runs, per_warp = pattern.runs
        device = owner or self.device
        start = (int(addr[0]) - device.memory.base) // LINE_BYTES
        hits = np.add.reduceat(device.l2.touch(lines + start, write) * nbytes, first_runs)
        self.count_l2(int(per_warp.sum()), int(hits.sum()), write=write, owner=owner)
        return hits, per_warp

    def range_hits(self, addr: Any, nbytes: Any, *, write: bool, owner: DeviceState | None = None) -> Any:
        """The same for contiguous ranges, one per bulk copy: bytes of each that L2 holds."""
        device = owner or self.device
        base = device.memory.base
        if len(addr) == 1:
            start = int(addr[0]) - base
            total = int(nbytes[0])
            lines = np.arange(start // LINE_BYTES, (start + max(total, 1) - 1) // LINE_BYTES + 1)
            hit = min(int(np.count_nonzero(device.l2.touch(lines, write))) * LINE_BYTES, total)
            self.count_l2(total, hit, write=write, owner=owner)
            return np.array([hit])
        first = (addr - base) // LINE_BYTES
        last = (addr - base + np.maximum(nbytes, 1) - 1) // LINE_BYTES
        counts = last - first + 1
        ends = np.cumsum(counts)
        lines = np.arange(int(ends[-1])) - np.repeat(ends - counts - first, counts)
        held = device.l2.touch(lines, write)
        hits = np.minimum(np.add.reduceat(held.astype(np.int64), ends - counts) * LINE_BYTES, nbytes)
        self.count_l2(int(np.sum(nbytes)), int(hits.sum()), write=write, owner=owner)
        return hits

    def count_l2(self, total: int, hit: int, *, write: bool, owner: DeviceState | None = None) -> None:
        """Bytes that an L2 was asked for and had; those of another device count there."""
        counters = self.launch.counters if owner is None else owner.counters
        counters.l2_hit_bytes += hit
        counters.l2_miss_bytes += total - hit
        if write:
            counters.dram_write_bytes += total - hit
        else:
            counters.dram_read_bytes += total - hit

    # ---------------------------------------------------------------- shared and local

    def flat_shared(
        self, lanes: LaneSet, addr: Any, nbytes: int, remedy: str = NEEDS_CLUSTER, what: Naming | None = None
    ) -> Any:
        """Window offsets -> flat addresses over all slots; outside the CTA's shared memory is a fault.

        ``remedy``: what to do instead of naming another CTA's address.
        """
        return self._flat(lanes, addr, nbytes, int(addr.min()), int(addr.max()) + nbytes, remedy, what)

    def _flat(
        self,
        lanes: LaneSet,
        addr: Any,
        nbytes: int,
        low: int,
        high: int,
        remedy: str = NEEDS_CLUSTER,
        what: Naming | None = None,
    ) -> Any:
        limit = self.launch.shared_bytes
        if low < 0 or high > limit:
            if int(addr.max()) >> CLUSTER_SHIFT:
                return self.launch.peers.flat_own(lanes, addr, nbytes, remedy, what)
            bad = int(np.flatnonzero((addr < 0) | (addr + nbytes > limit))[0])
            raise MemoryFault(
                f"{what(bad) if what else access(nbytes)} at offset {int(addr[bad]):#x} leaves the {limit} "
                "bytes this CTA has; check the index, or launch with more dynamic shared memory",
                rule="shared.bounds",
                index=bad,
            )
        slot = lanes.one_slot
        return addr + (slot * self.pitch if slot is not None else lanes.slot * self.pitch)

    def flat_cluster(self, lanes: LaneSet, addr: Any, nbytes: int) -> Any:
        """The same for addresses of any CTA of the cluster: own window offsets and what mapa made."""
        return self.launch.peers.flat(lanes, addr, nbytes)

    def _shared_pattern(self, at: Issue, addr: Any, nbytes: int) -> tuple[Pattern, Any]:
        pattern = self.pattern(at, addr, nbytes)
        first = int(addr[0])
        return pattern, self._flat(at.lanes, addr, nbytes, first + pattern.low, first + pattern.high)

    def load_shared(self, at: Issue, addr: Any, size: int, count: int) -> tuple[Any, Any]:
        """(uint[n, count] loaded from the CTA's shared memory, when each warp's registers are filled)."""
        pattern, flat = self._shared_pattern(at, addr, size * count)
        values = self.shared.load(flat, size, count)
        waves, total = pattern.waves
        lanes, counters = at.lanes, self.launch.counters
        counters.shared_load_requests += len(lanes.warps)
        counters.shared_load_wavefronts += total
        counters.shared_load_bytes += lanes.n * size * count
        clock = self.launch.clock
        if clock is None:
            return values, None
        return values, clock.shared(lanes.sm, at.times(self.launch), waves)

    def store_shared(self, at: Issue, addr: Any, values: Any) -> None:
        """Store uint[n, k] to the CTA's shared memory."""
        nbytes = values.shape[1] * values.itemsize
        pattern, flat = self._shared_pattern(at, addr, nbytes)
        self.shared.store(flat, values)
        waves, total = pattern.waves
        lanes, counters = at.lanes, self.launch.counters
        counters.shared_store_requests += len(lanes.warps)
        counters.shared_store_wavefronts += total
        counters.shared_store_bytes += lanes.n * nbytes
        self.launch.did_something()
        clock = self.launch.clock
        if clock is not None:
            clock.shared(lanes.sm, at.times(self.launch), waves)

    def _local_space(self) -> SharedMemory:
        if self.local is None:
            size = -(-max(self.launch.kernel.local_bytes, 1) // 1024) * 1024
            lanes = self.launch.geometry.slots * self.launch.geometry.threads
            self.local = LocalMemory(lanes, size, self.launch.kernel.local_bytes, report=self.launch.report)
        return self.local

    def _flat_local(self, g: Group, addr: Any, nbytes: int) -> Any:
        limit = self.launch.kernel.local_bytes
        if int(addr.min()) < 0 or int(addr.max()) + nbytes > limit:
            raise MemoryFault(
                f"local access of {nbytes} bytes leaves the {limit} bytes each thread has",
                rule="local.bounds",
                index=int(np.flatnonzero((addr < 0) | (addr + nbytes > limit))[0]),
            )  # fmt: skip
        counters = self.launch.counters
        counters.local_requests += len(g.lanes.warps)
        counters.local_bytes += g.lanes.n * nbytes
        return addr + g.lanes.ids * (-(-limit // 1024) * 1024)

    def load_local(self, g: Group, addr: Any, size: int, count: int) -> Any:
        return self._local_space().load(self._flat_local(g, addr, size * count), size, count)

    def store_local(self, g: Group, addr: Any, values: Any) -> None:
        self._local_space().store(self._flat_local(g, addr, values.shape[1] * values.itemsize), values)

    def param_bytes(self, offsets: Any, nbytes: int) -> Any:
        """uint8[n, nbytes] of the argument block."""
        block = np.frombuffer(self.launch.params, np.uint8)
        if int(offsets.min()) < 0 or int(offsets.max()) + nbytes > len(block):
            raise MemoryFault(
                f"a read of {nbytes} bytes leaves the {len(block)} bytes of kernel arguments",
                rule="memory.param",
            )
        return np.ascontiguousarray(block[offsets[:, None] + np.arange(nbytes)])

    # ---------------------------------------------------------------- atomics and ordering

    def atomic(
        self, g: Group, space: str, op: str, addr: Any, value: Any, compare: Any, *, waits: bool = True,
        scope: str = "gpu",
    ) -> Any:  # fmt: skip
        """``op`` lane by lane -> the old values; ``waits``: the warp goes on when it has them."""
        counters = self.launch.counters
        counters.atomics += g.lanes.n
        if space == "shared":
            old = self.shared.atomic(op, self.flat_shared(g.lanes, addr, value.itemsize), value, compare)
        elif space == "global":
            return self._global_atomic(g, op, addr, value, compare, waits=waits, scope=scope)
        elif space == "cluster":
            old = self.launch.peers.atomic(g, op, addr, value, compare, waits=waits)
        else:
            raise Unsupported(f"atomics on {space} memory are not modelled", rule="unsupported")
        if atomic_changes(op, old, value, compare):  # a lock that is polled in vain is no progress
            self.launch.did_something()
        return old

    def _global_atomic(
        self, g: Group, op: str, addr: Any, value: Any, compare: Any, *, waits: bool, scope: str
    ) -> Any:
        at, clock = Issue(g), self.launch.clock
        parts = self._parts(addr, value.itemsize, "atomic")
        if self.router.several:
            self.away.strong(at, addr, parts, value.itemsize, Strong("atom" if waits else "red", scope, True))
        if parts is not None:
            old, done = self.away.atomic(at, parts, op, value, compare, waits=waits)
        else:
            old = self.global_memory.atomic(op, addr, value, compare)
            if clock is not None:
                pattern = self.pattern(at, addr, value.itemsize)
                hits, per_warp = self.l2_hits(pattern, addr, write=True)
                t = self.launch.settle(g)
                done = clock.global_load(g.lanes.sm, t, per_warp, pattern.sectors[0], hits, path="lsu")
        if atomic_changes(op, old, value, compare):
            self.launch.did_something()
        if clock is not None:
            self.launch.time[g.lanes.warp_slice] = done
        return old

    def until(self, g: Group, registers: Sequence[int], ready: Any) -> None:
        """These registers are filled at ``ready`` (one time per warp); a later use waits for it."""
        if ready is None:
            return
        g.outstanding.update(registers)
        num_warps = self.launch.geometry.num_warps
        if len(ready) == num_warps:
            self.ready.update(dict.fromkeys(registers, ready))
            return
        w = g.lanes.warp_slice
        for r in registers:
            times = self.ready.get(r)
            self.ready[r] = times = np.zeros(num_warps) if times is None else times.copy()
            times[w] = ready

    def wait_registers(self, g: Group, registers: frozenset[int] | set[int]) -> None:
        """Stall each warp until the pending loads of these registers have returned."""
        needed = g.outstanding & registers
        g.outstanding -= needed
        if self.launch.clock is None:
            return
        t = self.launch.settle(g)
        w = g.lanes.warp_slice
        for r in needed:
            t = np.maximum(t, self.ready[r][w])
        self.launch.time[w] = t

    def settle_loads(self, g: Group) -> None:
        """An acquire: later accesses start after the loads before it have returned."""
        self.wait_registers(g, set(g.outstanding))

    def release(self, g: Group, scope: str) -> None:
        """A release of a store or atomic: ptxas makes it a fence of the same scope in front of it."""
        self.settle_stores(g, scope)
        if self.launch.clock is not None and scope in ("gpu", "sys"):
            self.launch.spend(g, self.launch.clock.fence_cycles[scope])

    def settle_stores(self, g: Group, scope: str) -> None:
        """A release or fence of this scope: wait until this warp's stores are visible there; and beyond the
        cluster, see to what its CTAs sent to other devices."""
        if scope in ("gpu", "sys"):
            self.launch.copy.flights.release(g, scope)
        if self.launch.clock is not None:
            t = self.launch.settle(g)
            w = g.lanes.warp_slice
            self.launch.time[w] = np.maximum(t, self.performed[w])


def access(nbytes: int) -> str:
    """What a plain load or store is called in reports."""
    return f"shared access of {nbytes} bytes"


def copied(name: str, side: str, sizes: Any) -> Naming:
    """ "cp.async.bulk destination of 6144 bytes": one size for all lanes, one each, or None (unknown)."""

    def of_lane(i: int) -> str:
        if sizes is None:
            return f"{name} {side}"
        return f"{name} {side} of {int(sizes if np.ndim(sizes) == 0 else sizes[i])} bytes"

    return of_lane
