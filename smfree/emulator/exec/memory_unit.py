"""The one place every load, store and atomic passes through: checked, counted, timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.coalescing import sectors_per_warp, wavefronts_per_warp
from smfree.emulator.errors import MemoryFault, Unsupported
from smfree.emulator.exec.lanes import Group, LaneSet
from smfree.emulator.memory import SharedMemory

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch

LINE_BYTES = 128
SECTOR_BYTES = 32


class MemoryUnit:
    """Loads and stores of one launch."""

    def __init__(self, launch: Launch, pitch: int) -> None:
        self.launch = launch
        self.pitch = pitch
        self.device = launch.device
        self.global_memory = launch.device.memory
        self.shared = SharedMemory(launch.geometry.slots, pitch, launch.shared_bytes, report=launch.report)
        self.local: SharedMemory | None = None
        self.performed = np.zeros(launch.geometry.num_warps)  # when each warp's stores are visible to all
        self.ready: dict[int, Any] = {}  # per register: when each warp's pending load has filled it

    # ---------------------------------------------------------------- global

    def load_global(self, g: Group, addr: Any, size: int, count: int, registers: list[int]) -> Any:
        """uint[n, count] loaded; the registers named become ready when the modelled load returns."""
        values = self.global_memory.load(addr, size, count)
        lanes, nbytes = g.lanes, size * count
        sectors = sectors_per_warp(addr, nbytes, lanes.warp_starts)
        counters = self.launch.counters
        counters.global_load_requests += len(lanes.warps)
        counters.global_load_sectors += int(sectors.sum())
        counters.global_load_bytes += lanes.n * nbytes
        counters.bytes_through_registers += lanes.n * nbytes
        clock = self.launch.clock
        if clock is not None:
            t = self.launch.settle(g)
            per_warp = lanes.warp_counts * nbytes
            hits = self.l2_hits(lanes, addr, nbytes, write=False)
            self.until(g, registers, clock.global_load(lanes.sm, t, per_warp, sectors, hits, path="lsu"))
        return values

    def store_global(self, g: Group, addr: Any, values: Any) -> None:
        """Store uint[n, k]."""
        self.global_memory.store(addr, values)
        lanes, nbytes = g.lanes, values.shape[1] * values.itemsize
        sectors = sectors_per_warp(addr, nbytes, lanes.warp_starts)
        counters = self.launch.counters
        counters.global_store_requests += len(lanes.warps)
        counters.global_store_sectors += int(sectors.sum())
        counters.global_store_bytes += lanes.n * nbytes
        counters.bytes_through_registers += lanes.n * nbytes
        clock = self.launch.clock
        if clock is None:
            self.launch.did_something()
        else:
            t = self.launch.settle(g)
            per_warp = lanes.warp_counts * nbytes
            misses = per_warp - self.l2_hits(lanes, addr, nbytes, write=True)
            accepted, performed = clock.global_store(lanes.sm, t, per_warp, sectors, misses)
            w = lanes.warp_slice
            self.launch.time[w] = accepted
            self.performed[w] = np.maximum(self.performed[w], performed)
            self.launch.did_something(float(performed.max()))

    def l2_hits(self, lanes: LaneSet, addr: Any, nbytes: int, *, write: bool) -> Any:
        """Bytes of each warp's access that L2 holds; the lines are there afterwards."""
        lines = (addr - self.global_memory.base) // LINE_BYTES
        new = np.empty(lanes.n, np.bool_)
        new[0] = True
        np.not_equal(lines[1:], lines[:-1], out=new[1:])
        new[lanes.warp_starts] = True
        runs = np.flatnonzero(new)
        run_bytes = np.diff(np.append(runs, lanes.n)) * nbytes
        held = self.device.l2.touch(lines[runs], write) * run_bytes
        hits = np.add.reduceat(held, np.searchsorted(runs, lanes.warp_starts))
        self.count_l2(int(run_bytes.sum()), int(hits.sum()), write=write)
        return hits

    def range_hits(self, addr: Any, nbytes: Any, *, write: bool) -> Any:
        """The same for contiguous ranges, one per bulk copy: bytes of each that L2 holds."""
        first = (addr - self.global_memory.base) // LINE_BYTES
        last = (addr - self.global_memory.base + np.maximum(nbytes, 1) - 1) // LINE_BYTES
        counts = last - first + 1
        ends = np.cumsum(counts)
        lines = np.arange(int(ends[-1])) - np.repeat(ends - counts - first, counts)
        held = self.device.l2.touch(lines, write)
        hits = np.minimum(np.add.reduceat(held.astype(np.int64), ends - counts) * LINE_BYTES, nbytes)
        self.count_l2(int(np.sum(nbytes)), int(hits.sum()), write=write)
        return hits

    def count_l2(self, total: int, hit: int, *, write: bool) -> None:
        counters = self.launch.counters
        counters.l2_hit_bytes += hit
        counters.l2_miss_bytes += total - hit
        if write:
            counters.dram_write_bytes += total - hit
        else:
            counters.dram_read_bytes += total - hit

    # ---------------------------------------------------------------- shared and local

    def flat_shared(self, g: Group, addr: Any, nbytes: int) -> Any:
        """Window offsets -> flat addresses over all slots; outside the CTA's shared memory is a fault."""
        limit = self.launch.shared_bytes
        if int(addr.min()) < 0 or int(addr.max()) + nbytes > limit:
            bad = int(np.flatnonzero((addr < 0) | (addr + nbytes > limit))[0])
            raise MemoryFault(
                f"shared access of {nbytes} bytes at offset 0x{int(addr[bad]):x} leaves the {limit} bytes "
                "this CTA has; "
                "check the index, or launch with more dynamic shared memory",
                rule="shared.bounds",
                index=bad,
            )
        slot = g.lanes.one_slot
        return addr + (slot * self.pitch if slot is not None else g.lanes.slot * self.pitch)

    def load_shared(self, g: Group, addr: Any, size: int, count: int, registers: list[int]) -> Any:
        values = self.shared.load(self.flat_shared(g, addr, size * count), size, count)
        waves = self._wavefronts(g, addr, size * count)
        counters = self.launch.counters
        counters.shared_load_requests += len(g.lanes.warps)
        counters.shared_load_wavefronts += int(waves.sum())
        counters.shared_load_bytes += g.lanes.n * size * count
        clock = self.launch.clock
        if clock is not None:
            self.until(g, registers, clock.shared(g.lanes.sm, self.launch.settle(g), waves))
        return values

    def store_shared(self, g: Group, addr: Any, values: Any) -> None:
        nbytes = values.shape[1] * values.itemsize
        self.shared.store(self.flat_shared(g, addr, nbytes), values)
        waves = self._wavefronts(g, addr, nbytes)
        counters = self.launch.counters
        counters.shared_store_requests += len(g.lanes.warps)
        counters.shared_store_wavefronts += int(waves.sum())
        counters.shared_store_bytes += g.lanes.n * nbytes
        self.launch.did_something()
        clock = self.launch.clock
        if clock is not None:
            clock.shared(g.lanes.sm, self.launch.settle(g), waves)

    def _wavefronts(self, g: Group, addr: Any, nbytes: int) -> Any:
        lanes = g.lanes
        return wavefronts_per_warp(
            addr, nbytes, lanes.warp_starts, None if lanes.full_warps else lanes.laneid
        )

    def _local_space(self) -> SharedMemory:
        if self.local is None:
            size = -(-self.launch.kernel.local_bytes // 1024) * 1024
            lanes = self.launch.geometry.slots * self.launch.geometry.threads
            self.local = SharedMemory(lanes, size, self.launch.kernel.local_bytes, report=self.launch.report)
        return self.local

    def _flat_local(self, g: Group, addr: Any, nbytes: int) -> Any:
        limit = self.launch.kernel.local_bytes
        if int(addr.min()) < 0 or int(addr.max()) + nbytes > limit:
            raise MemoryFault(
                f"local access of {nbytes} bytes leaves the {limit} bytes each thread has", rule="local.bounds",
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

    def atomic(self, g: Group, space: str, op: str, addr: Any, value: Any, compare: Any) -> Any:
        counters = self.launch.counters
        counters.atomics += g.lanes.n
        self.launch.did_something()
        if space == "shared":
            return self.shared.atomic(op, self.flat_shared(g, addr, value.itemsize), value, compare)
        if space != "global":
            raise Unsupported(f"atomics on {space} memory are not modelled", rule="unsupported")
        old = self.global_memory.atomic(op, addr, value, compare)
        clock = self.launch.clock
        if clock is not None:
            lanes = g.lanes
            per_warp = lanes.warp_counts * value.itemsize
            hits = self.l2_hits(lanes, addr, value.itemsize, write=True)
            sectors = sectors_per_warp(addr, value.itemsize, lanes.warp_starts)
            done = clock.global_load(lanes.sm, self.launch.settle(g), per_warp, sectors, hits, path="lsu")
            self.launch.time[lanes.warp_slice] = done
        return old

    def until(self, g: Group, registers: list[int], ready: Any) -> None:
        """These registers are filled at ``ready`` (one time per warp); a later use waits for it."""
        for r in registers:
            times = self.ready.get(r)
            if times is None:
                times = self.ready[r] = np.zeros(self.launch.geometry.num_warps)
            times[g.lanes.warp_slice] = ready
        g.outstanding.update(registers)

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

    def settle_stores(self, g: Group) -> None:
        """A release or fence: wait until this warp's stores are visible."""
        if self.launch.clock is not None:
            t = self.launch.settle(g)
            w = g.lanes.warp_slice
            self.launch.time[w] = np.maximum(t, self.performed[w])
