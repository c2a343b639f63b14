"""The parts of a profile: what each number of an emulated GPU means, and in which unit."""

from __future__ import annotations

from dataclasses import dataclass

WARP_SIZE = 32
LINE_BYTES = 128
SECTOR_BYTES = 32


@dataclass(frozen=True)
class DeviceSpec:
    """What ``cuDeviceGetAttribute`` and friends answer. Bytes, MHz, counts."""

    name: str
    compute_major: int
    compute_minor: int
    num_sms: int
    sm_clock_mhz: float
    memory_clock_mhz: float
    memory_bus_bits: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes_per_sm: int
    shared_bytes_per_block: int
    shared_bytes_per_block_optin: int
    reserved_shared_bytes_per_block: int
    registers_per_sm: int
    registers_per_block: int
    registers_per_thread: int
    max_threads_per_sm: int
    max_threads_per_block: int
    max_ctas_per_sm: int
    portable_cluster_ctas: int
    copy_engines: int

    @property
    def compute_capability(self) -> tuple[int, int]:
        return self.compute_major, self.compute_minor

    @property
    def max_warps_per_sm(self) -> int:
        return self.max_threads_per_sm // WARP_SIZE

    @property
    def peak_memory_gbps(self) -> float:
        """Nominal DRAM bandwidth in 1e9 bytes/s: two transfers per memory clock over the whole bus."""
        return 2 * self.memory_clock_mhz * 1e6 * self.memory_bus_bits / 8 / 1e9


@dataclass(frozen=True)
class IssueSpec:
    """Warp schedulers, each issuing a warp instruction per cycle; the matrix units behind ``mma.sync``."""

    schedulers_per_sm: int
    dependent_cycles: float
    mma_latency_cycles: float
    mma_fma_per_cycle: float


@dataclass(frozen=True)
class SharedSpec:
    """Shared memory: one wavefront of ``bytes_per_cycle`` per cycle and SM."""

    latency_cycles: float
    bytes_per_cycle: float


@dataclass(frozen=True)
class L2Spec:
    """L2: load-to-use latency of a hit seen by the LSU, bandwidth of the whole device, residency."""

    hit_latency_cycles: float
    write_latency_cycles: float
    bytes_per_cycle: float
    usable_fraction: float


@dataclass(frozen=True)
class DramSpec:
    """DRAM: load-to-use latency of an L2 miss seen by the LSU; reachable share of the nominal bandwidth.

    ``turnaround`` is the extra bus time of a read byte that is mixed with a written one, in bytes.
    """

    latency_cycles: float
    read_efficiency: float
    write_efficiency: float
    turnaround: float


@dataclass(frozen=True)
class EngineSpec:
    """One engine of an SM that moves global data: start-up, rate, and the most bytes it keeps in flight."""

    startup_cycles: float
    bytes_per_cycle: float
    max_bytes_in_flight: float


@dataclass(frozen=True)
class TmaSpec(EngineSpec):
    """The TMA unit of an SM. ``tensor_startup_cycles`` comes on top of ``startup_cycles``.

    ``bytes_per_cycle`` is the unit's rate, ``request_bytes_per_cycle`` that of one request alone.
    """

    tensor_startup_cycles: float
    request_bytes_per_cycle: float
    requests_per_cycle: float


@dataclass(frozen=True)
class ClusterSpec:
    """The network between the SMs of a cluster.

    ``latency_cycles`` of a load from another CTA's shared memory, ``store_latency_cycles`` until a store or
    arrival is there, ``bytes_per_cycle`` of an SM in each direction, ``barrier_cycles`` from the last arrival
    at a cluster barrier to the end of the waits.
    """

    latency_cycles: float
    store_latency_cycles: float
    bytes_per_cycle: float
    barrier_cycles: float


@dataclass(frozen=True)
class SyncSpec:
    """Cycles of synchronisation instructions, as seen by the warp that executes them."""

    bar_sync_cycles: float
    mbarrier_arrive_cycles: float
    mbarrier_wait_hit_cycles: float
    mbarrier_wait_wake_cycles: float
    fence_cta_cycles: float
    fence_gpu_cycles: float
    fence_sys_cycles: float
    fence_proxy_cycles: float


@dataclass(frozen=True)
class LinkSpec:
    """The GPU's links: NVLink to the other GPUs of the node, PCIe to the host.

    ``gbps`` of packets in each direction, 1e9 bytes/s. A packet has ``header_bytes`` and carries one 128-byte
    line for a thread or the TMA, ``copy_packet_bytes`` for a copy engine. ``latency_ns`` and
    ``pcie_latency_ns`` are one way, ``far_numa_fraction`` is what is left of the host's rate when its memory
    is on another socket.
    """

    gbps: float
    header_bytes: float
    copy_packet_bytes: float
    latency_ns: float
    pcie_latency_ns: float
    far_numa_fraction: float


@dataclass(frozen=True)
class HostSpec:
    """The host's side: launches and copies (1e9 bytes/s, microseconds)."""

    launch_us: float
    kernel_gap_us: float
    graph_gap_us: float
    pcie_pinned_gbps: float
    pcie_pageable_gbps: float
    copy_startup_us: float
    copy_device_efficiency: float
