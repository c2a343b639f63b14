"""What an emulated kernel did, counted exactly.

Instruction counts are counts of PTX instructions, not of SASS: they gate regressions within one compiler
version and say nothing about another. Memory counts follow the hardware's units (32-byte sectors, 128-byte
lines, shared-memory wavefronts) and are defined in docs/counting.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Counters:
    """Totals of one launch, or of many after ``+=``.

    A *request* is one warp-wide instruction (or one TMA instruction); bytes are those the program asked for,
    sectors what the memory system moves for them (32 bytes each).
    """

    launches: int = 0
    warp_instructions: int = 0
    """PTX instructions issued, once per warp and per group of its lanes that run together."""
    thread_instructions: int = 0
    """PTX instructions executed, once per lane whose guard predicate holds."""
    instructions_by_class: dict[str, int] = field(default_factory=dict)
    """Warp instructions by class, e.g. "alu", "global load", "shared store", "barrier", "tma"."""

    global_load_requests: int = 0
    global_load_sectors: int = 0
    global_load_bytes: int = 0
    global_store_requests: int = 0
    global_store_sectors: int = 0
    global_store_bytes: int = 0

    peer_load_bytes: int = 0
    """Of all global bytes, by threads or copies: those read from the memory of other devices."""
    peer_store_bytes: int = 0
    """Those written to the memory of other devices; of a multicast, what was sent once."""
    peer_signals: int = 0
    """Strong stores and atomics of lanes to the memory of other devices."""
    peer_signal_bytes: int = 0
    """Their part of ``peer_store_bytes``; the rest is data."""
    host_load_bytes: int = 0
    """Those read from host memory."""
    host_store_bytes: int = 0

    shared_load_requests: int = 0
    shared_load_wavefronts: int = 0
    shared_load_bytes: int = 0
    shared_store_requests: int = 0
    shared_store_wavefronts: int = 0
    shared_store_bytes: int = 0

    cluster_load_requests: int = 0
    """Loads from the shared memory of another CTA of the cluster (DSMEM), and their bytes."""
    cluster_load_bytes: int = 0
    cluster_store_requests: int = 0
    cluster_store_bytes: int = 0

    local_requests: int = 0
    local_bytes: int = 0

    bytes_through_registers: int = 0
    """Global bytes that thread loads and stores moved through registers."""
    bytes_async: int = 0
    """Global bytes that cp.async and copies of the TMA moved without registers."""
    cp_async_requests: int = 0
    cp_async_sectors: int = 0
    """Sectors of the source addresses, apart from those of ``ld`` as in Nsight Compute."""
    tma_requests: int = 0
    """Bulk and tensor copies, reductions and prefetches, one per thread that issues."""
    bytes_reduced: int = 0
    """Bytes of elements that bulk and tensor reductions combined with their destination."""
    bytes_prefetched: int = 0
    """Bytes that bulk prefetches asked into L2."""
    bytes_multicast: int = 0
    """Bytes that multicast copies delivered, over all their destination CTAs."""
    cluster_async_bytes: int = 0
    """Bytes that bulk copies, st.async and red.async sent to the shared memory of another CTA."""

    mbarrier_arrivals: int = 0
    mbarrier_wait_hits: int = 0
    """Waits (test_wait, try_wait) that found their phase complete."""
    mbarrier_wait_misses: int = 0
    barriers: int = 0
    """Warps that arrived at a bar.sync, bar.arrive or barrier.cluster."""
    fences: int = 0
    atomics: int = 0

    copy_engine_read_bytes: int = 0
    """Bytes that copies of the driver read from the device's memory; only in a device's totals."""
    copy_engine_write_bytes: int = 0
    """Bytes that copies and memsets of the driver wrote to it."""

    l2_hit_bytes: int = 0
    l2_miss_bytes: int = 0
    dram_read_bytes: int = 0
    dram_write_bytes: int = 0

    def count_class(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` warp instructions of class ``name`` (the total is not touched)."""
        self.instructions_by_class[name] = self.instructions_by_class.get(name, 0) + amount

    def not_executed(self, lanes: int) -> None:
        """Take back thread instructions whose guard predicate did not hold."""
        self.thread_instructions -= lanes

    def __iadd__(self, other: Counters) -> Counters:
        for item in fields(self):
            theirs = getattr(other, item.name)
            if isinstance(theirs, Mapping):
                mine = getattr(self, item.name)
                for name, amount in theirs.items():
                    mine[name] = mine.get(name, 0) + amount
            else:
                setattr(self, item.name, getattr(self, item.name) + theirs)
        return self

    def __add__(self, other: Counters) -> Counters:
        total = Counters()
        total += self
        total += other
        return total

    def copy(self) -> Counters:
        """An independent copy."""
        return Counters() + self

    def as_dict(self) -> dict[str, int]:
        """Flat name -> count; classes appear as ``instructions[CLASS]``. Ready for a JSON record."""
        flat: dict[str, int] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                flat.update({f"instructions[{name}]": amount for name, amount in sorted(value.items())})
            else:
                flat[item.name] = int(value)
        return flat
