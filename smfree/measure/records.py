"""What is kept of every point: raw numbers first, derived ones with their denominator's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from smfree.model.estimators import Drift, drift, median, spread

SCHEMA_VERSION = 1


class Question(Enum):
    """Which table a point belongs to."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    BASELINE = "baseline"
    PIPELINE = "pipeline"
    CONTROL = "control"
    DSMEM = "dsmem"
    MULTICAST = "multicast"
    ALLGATHER = "allgather"
    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce scatter"
    PEER_FLAG = "peer flag"
    IPC_COST = "ipc cost"
    HOST_COPY = "host copy"


class Memory(Enum):
    """Where the data of a point is meant to come from; names the peak that a bandwidth is compared with."""

    DSMEM = "DSMEM"
    L2 = "L2"
    DRAM = "DRAM"
    PEER = "memory of peers"
    HOST = "host memory"


class CacheState(Enum):
    """State of the L2 when the timed work starts."""

    HOT = "hot: working set resident, read just before"
    FLUSHED = "cold: flushed by reading a buffer of twice the L2"
    ROTATED = "cold: buffers rotated over more than twice the L2"
    REPEATED = "as earlier work on the same buffers left it"


class Flag(Enum):
    """Something a reader must know before believing a number."""

    LAUNCH_BOUND = "launch-bound"
    ABOVE_PEAK = "above peak"
    FITS_IN_L2 = "working set fits in L2"
    DRIFT = "drift"
    THROTTLED = "clock reduced"
    NO_BLOCKER = "no blocker"
    FEW_SAMPLES = "few samples"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one timed unit of work (one launch, or one tile of a chain).

    ``payload_bytes`` is the size of what arrives; ``read_bytes`` and ``written_bytes`` are what the named
    memory has to deliver and take for it. A copy of S bytes has payload S, reads S, writes S, and counts 2 S
    against a peak.
    """

    payload_bytes: int
    read_bytes: int
    written_bytes: int

    @property
    def moved_bytes(self) -> int:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """What the engine needs from the SM. None = not known on this device.

    Instruction counts are per KiB of payload: ``ptx_per_kib`` warp instructions executed (emulator, exact),
    ``sass_per_kib`` warp instructions of the unrolled loop body (static, from the cubin).
    ``registers_per_byte``: global bytes that went through registers, per byte of payload (a copy: 2, 1 or 0).
    """

    registers: int | None = None
    local_bytes: int | None = None
    ctas_per_sm: int | None = None
    occupancy: float | None = None
    ptx_per_kib: float | None = None
    sass_per_kib: float | None = None
    registers_per_byte: float | None = None


@dataclass(slots=True)
class Record:
    """One finished point. Times in seconds, sizes in bytes, clocks in MHz.

    ``name`` is the benchmark's full name, by which runs are compared. ``key`` are the axes that name the
    point (engine, tile_bytes, threads, leg, memory, bytes_in_flight, ...). ``samples_s`` are the raw samples,
    one per round; ``samples_cycles`` the same in SM cycles where the kernel read its own clock. ``peak_gbps``
    is the bandwidth of the named memory, 0 when unknown. ``per_rank``: of a point of several ranks, numbers
    of each, in order of rank.
    """

    name: str
    question: Question
    device: str
    identity: Mapping[str, str]
    folder: str
    gpu: str
    clock_source: str
    key: Mapping[str, Any]
    traffic: Traffic
    samples_s: list[float]
    samples_cycles: list[float] = field(default_factory=list)
    memory: Memory = Memory.DRAM
    cache: CacheState = CacheState.HOT
    cache_bytes: int = 0
    working_set_bytes: int = 0
    peak_gbps: float = 0.0
    sm_clock_mhz: float | None = None
    clock_note: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    counters: Mapping[str, int] = field(default_factory=dict)
    per_rank: Mapping[str, Sequence[float]] = field(default_factory=dict)
    timing: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    flags: list[Flag] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verified: bool = False

    @property
    def modelled(self) -> bool:
        return self.clock_source == "modelled"

    @property
    def seconds(self) -> float:
        return median(self.samples_s)

    @property
    def cycles(self) -> float | None:
        """Median SM cycles of one unit of work, None when the kernel did not read its clock."""
        return median(self.samples_cycles) if self.samples_cycles else None

    @property
    def gbps(self) -> float:
        """Read plus written bytes per second in 1e9; the number that is compared with the peak."""
        return self.traffic.moved_bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def percent_of_peak(self) -> float | None:
        return 100.0 * self.gbps / self.peak_gbps if self.peak_gbps else None

    def judge(self) -> Drift:
        """Set the flags that follow from the numbers; returns the drift of the samples."""
        if self.question is not Question.LATENCY and self.memory is Memory.DRAM:
            percent = self.percent_of_peak
            if percent is not None and percent > 100.0:
                self._flag(
                    Flag.ABOVE_PEAK,
                    f"{self.gbps:.0f} GB/s is {percent:.0f} % of the DRAM peak {self.peak_gbps:.0f} GB/s: "
                    "part of it "
                    f"came from L2 (working set {self.working_set_bytes} bytes, L2 {self.cache_bytes} bytes)",
                )
            if self.cache is CacheState.HOT and 0 < self.working_set_bytes <= self.cache_bytes:
                self._flag(
                    Flag.FITS_IN_L2,
                    f"named DRAM, but the working set of {self.working_set_bytes} bytes fits in the L2 of "
                    f"{self.cache_bytes} bytes",
                )
        trend = drift(self.samples_s)
        if not self.modelled:
            if trend.significant:
                self._flag(Flag.DRIFT, f"samples moved by {trend.relative:+.1%} from first to last")
            if len(self.samples_s) < 5:
                self._flag(Flag.FEW_SAMPLES, f"{len(self.samples_s)} samples")
        return trend

    def _flag(self, flag: Flag, note: str) -> None:
        if flag not in self.flags:
            self.flags.append(flag)
            self.notes.append(f"{flag.value}: {note}")

    def add_flag(self, flag: Flag, note: str) -> None:
        """Mark the point; ``note`` gives the numbers."""
        self._flag(flag, note)

    def flag_reduced(self, reduced: int, samples: int) -> None:
        """Mark a point of which ``reduced`` samples ran on a low clock."""
        if reduced:
            self._flag(
                Flag.THROTTLED,
                f"{reduced} of {samples} samples on an SM clock that rests did not bring back",
            )

    def as_dict(self) -> dict[str, Any]:
        """JSON form (pytest-benchmark's ``extra_info``)."""
        cost = {name: getattr(self.cost, name) for name in Cost.__dataclass_fields__}
        return {
            "schema": SCHEMA_VERSION,
            "question": self.question.value,
            "device": self.device,
            "gpu": self.gpu,
            "folder": self.folder,
            "identity": dict(self.identity),
            "clock_source": self.clock_source,
            "verified": self.verified,
            "key": {name: plain(value) for name, value in self.key.items()},
            "payload_bytes": self.traffic.payload_bytes,
            "read_bytes": self.traffic.read_bytes,
            "written_bytes": self.traffic.written_bytes,
            "seconds": self.seconds,
            "seconds_spread": spread(self.samples_s),
            "samples_s": list(self.samples_s),
            "cycles": self.cycles,
            "samples_cycles": list(self.samples_cycles),
            "gbps_read_plus_written": self.gbps,
            "memory": self.memory.value,
            "peak_gbps": self.peak_gbps or None,
            "percent_of_peak": self.percent_of_peak,
            "l2_state": self.cache.value,
            "l2_bytes": self.cache_bytes,
            "working_set_bytes": self.working_set_bytes,
            "sm_clock_mhz": self.sm_clock_mhz,
            "clock_note": self.clock_note,
            "config": {name: plain(value) for name, value in self.config.items()},
            "cost": cost,
            "counters": dict(self.counters),
            "per_rank": {name: list(values) for name, values in self.per_rank.items()},
            "timing": {name: plain(value) for name, value in self.timing.items()},
            "versions": dict(self.versions),
            "flags": [flag.value for flag in self.flags],
            "notes": list(self.notes),
        }


def plain(value: Any) -> Any:
    """Enums, mappings and numpy scalars to what JSON knows."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item") and callable(value.item):
        return value.item()
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


@dataclass(frozen=True, slots=True)
class SkipRecord:
    """A point that is not possible here, with the reason. Kept in the run's JSON beside the points."""

    name: str
    device: str
    folder: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in SkipRecord.__dataclass_fields__}
