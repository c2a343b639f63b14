"""A stream with a fake clock: the host queues, the device runs, both in seconds that the test chooses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from smfree.cuda.errors import NoDeviceError
from smfree.measure.errors import MeasureError
from smfree.measure.queue import Mark
from smfree.measure.timer import Floor


@dataclass
class FakeStream:
    name: str


@dataclass
class FakeQueue:
    """Host-side submission costs ``submit_s``; the device runs in order, not before it was told to.

    ``can_hold``: whether the device has a blocker. ``late``: the time-out lets the stream go before the
    host does.
    """

    submit_s: float = 5e-6
    can_hold: bool = True
    late: bool = False
    stream: Any = field(default_factory=lambda: FakeStream("timed"))
    host_s: float = 0.0
    device_s: float = 0.0
    syncs: int = 0
    _held: bool = False
    _pending: list[tuple[str, float, Any]] = field(default_factory=list)

    def submit(self, seconds: float, stream: Any = None) -> None:
        """Queue device work of ``seconds``; on another stream it never shows on this one."""
        self.host_s += self.submit_s
        if stream is None or stream is self.stream:
            self._put(("work", seconds, None))

    def mark(self) -> Mark:
        event = {"at": None}
        self._put(("mark", 0.0, event))
        return Mark(event, self.stream)

    def elapsed_s(self, first: Mark, second: Mark) -> float:
        if first.stream is not second.stream:
            raise MeasureError("both events of a time must lie on the stream that runs the timed work")
        return second.event["at"] - first.event["at"]

    def hold(self) -> bool:
        self._held = self.can_hold
        return self.can_hold

    def release(self) -> bool:
        self._held = False
        if self._pending:
            self.device_s = max(self.device_s, self.host_s)
        for item in self._pending:
            self._run(item)
        self._pending.clear()
        return not self.late

    def synchronize(self) -> None:
        self.syncs += 1
        self.host_s = max(self.host_s, self.device_s)

    def _put(self, item: tuple[str, float, Any]) -> None:
        if self._held:
            self._pending.append(item)
        else:
            if item[0] == "work":
                self.device_s = max(self.device_s, self.host_s)
            self._run(item)

    def _run(self, item: tuple[str, float, Any]) -> None:
        kind, seconds, event = item
        if kind == "mark":
            event["at"] = self.device_s
        else:
            self.device_s += seconds


@dataclass
class FakeCapabilities:
    generation: str = "hopper"
    l2_bytes: int = 50 << 20
    num_sms: int = 4
    sm_clock_mhz: float = 1000.0
    peak_memory_gbps: float = 3350.0
    has_tma: bool = True


@dataclass
class FakeParameter:
    path: str
    value: float


@dataclass
class FakeProfile:
    key: str

    def parameters(self, clock_only: bool = False) -> list[FakeParameter]:
        return [FakeParameter("tma.startup_cycles", 170.0)]


@dataclass
class FakeEmulator:
    profile: FakeProfile
    last_launch: Any = None


@dataclass
class FakeDevice:
    """Looks like a smfree.cuda Device to the plugin. ``dead`` makes synchronize() fail, as after a kernel
    fault."""

    spec: str
    dead: bool = False
    closed: bool = False
    driver_version: tuple[int, int] = (13, 0)

    def __post_init__(self) -> None:
        self.is_emulated = self.spec.startswith("emu:")
        self.clock_source = "modelled" if self.is_emulated else "measured"
        short = self.spec.removeprefix("emu:")
        self.name = short.upper() if self.is_emulated else "NVIDIA H100 80GB HBM3"
        self.uuid = "0123"
        self.capabilities = FakeCapabilities(
            generation="ampere" if short == "a100" else "hopper", has_tma=short != "a100"
        )
        self.emulator = FakeEmulator(FakeProfile(short)) if self.is_emulated else None

    def synchronize(self) -> None:
        if self.dead:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    def close(self) -> None:
        self.closed = True


class FakeInstruments:
    """Instruments over a :class:`FakeQueue`."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.queue = FakeQueue()
        self.queue.blocker_reason = ""  # type: ignore[attr-defined]
        self.stream = self.queue.stream
        self.floor = Floor(2e-6)
        self.flushes = 0

    def prepare(self) -> None: ...

    def flush_l2(self, stream: Any = None) -> None:
        self.flushes += 1
        self.queue.submit(90e-6, stream)

    def sm_clock_mhz(self) -> float | None:
        return 1000.0


def open_fake(spec: str) -> FakeDevice:
    """Stands in for smfree.measure.devices.open_device: a machine without a GPU unless told otherwise."""
    if spec.startswith("cuda"):
        raise NoDeviceError(
            f"{spec} was asked for, but this machine has no NVIDIA GPU; use --device emu:h100"
        )
    return FakeDevice(spec)
