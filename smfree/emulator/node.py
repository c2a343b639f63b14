"""The emulated machine: one object holds all of its state.

A :class:`Node` owns devices, host memory the devices know of, streams, events, loaded modules and the modelled
host clock. Nothing lives in a module global, so several nodes can stand side by side in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from smfree.emulator.counters import Counters

if TYPE_CHECKING:
    from smfree.emulator.clock import L2, Clock
    from smfree.emulator.memory import GlobalMemory
    from smfree.emulator.profile import Profile


class Strict(StrEnum):
    """What happens to a finding of severity ``strict`` (the ISA forbids it, hardware usually forgives)."""

    ERROR = "error"
    RECORD = "record"
    OFF = "off"


class LaunchOutcome(Protocol):
    """What an executor returns: modelled cycles from start to end, counters and findings of one launch."""

    cycles: float
    counters: Counters
    findings: Sequence[Any]


class Executor(Protocol):
    """Runs one kernel to completion on ``device``; ``smfree.emulator.exec.launch.run`` is the real one."""

    def __call__(
        self,
        device: DeviceState,
        kernel: Any,
        params: bytes,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int],
        dynamic_shared_bytes: int,
        *,
        schedule: str,
        seed: int,
        start_cycle: float,
        module_symbols: Mapping[str, int],
    ) -> LaunchOutcome: ...


@dataclass(slots=True, eq=False)
class DeviceState:
    """One GPU of the node."""

    ordinal: int
    profile: Profile
    memory: GlobalMemory
    clock: Clock
    l2: L2
    strict: Strict
    counters: Counters = field(default_factory=Counters)
    """Totals over every launch on this device."""
    last_launch: Any = None
    """The outcome of the latest launch (``LaunchOutcome``)."""


class Node:
    """An emulated machine with one device per profile.

    ``schedule``: "timed" (the only one that has a clock) or another policy of smfree.emulator.exec.
    ``executor``: replaces the kernel executor (tests).
    """

    def __init__(
        self,
        profiles: Sequence[Profile | str],
        schedule: str = "timed",
        seed: int = 0,
        strict: Strict | str = Strict.ERROR,
        *,
        executor: Executor | None = None,
        host_wait_limit_s: float = 2.0,
        make_memory: Callable[[int, Profile], Any] | None = None,
    ) -> None:
        self.schedule = schedule
        self.seed = seed
        self.strict = Strict(strict)
        self.devices: list[DeviceState] = []
        self.findings: list[Any] = []
        self.host_time_s = 0.0
        raise NotImplementedError("under construction")
