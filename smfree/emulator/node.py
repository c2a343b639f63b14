"""The emulated machine: one object holds all of its state.

A :class:`Node` owns devices, host memory the devices know of, all queued work and the processes that use
them. Nothing lives in a module global, so several nodes can stand side by side in one Python process.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from smfree.emulator.clock import L2, Clock
from smfree.emulator.counters import Counters
from smfree.emulator.errors import EmulationError, Severity
from smfree.emulator.exec.launch import Launch
from smfree.emulator.exec.residents import Residents
from smfree.emulator.host_memory import HostMemory
from smfree.emulator.interprocess import Export
from smfree.emulator.links import Links
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.process import Context, Count, Process
from smfree.emulator.profile import Profile
from smfree.emulator.profile import load as load_profile
from smfree.emulator.ptx.ast import Kernel
from smfree.emulator.specs import LINE_BYTES
from smfree.emulator.streams import Activity, Event, Unit
from smfree.emulator.timeline import Timeline
from smfree.emulator.trace import Trace
from smfree.emulator.turns import Turns
from smfree.emulator.virtual import Exports

TIMED = "timed"
_FIRST_HANDLE = 0x5AFE_0000_0000


class Strict(StrEnum):
    """What happens to a finding of severity ``strict`` (the ISA forbids it, hardware usually forgives)."""

    ERROR = "error"
    RECORD = "record"
    OFF = "off"


class LaunchOutcome(Activity, Protocol):
    """A running kernel, and what it will have done: modelled cycles, counters and findings of one launch."""

    @property
    def cycles(self) -> float: ...
    @property
    def counters(self) -> Counters: ...
    @property
    def findings(self) -> Sequence[Any]: ...
    @property
    def ctas_per_sm(self) -> int: ...


class Executor(Protocol):
    """Starts one kernel on ``device`` at ``start_s`` of the node; the real one is
    ``smfree.emulator.exec.launch.Launch``."""

    def __call__(
        self,
        device: DeviceState,
        kernel: Kernel,
        params: bytes,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int] | None,
        dynamic_shared_bytes: int,
        *,
        schedule: str,
        seed: int,
        start_s: float,
        module_symbols: Mapping[str, int],
        registers: int | None,
        context: Context | None,
    ) -> LaunchOutcome: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a context is dead: ``code`` is the CUresult that every later call returns, ``report`` the text."""

    code: int
    report: str


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One finished kernel: seconds on the node's modelled clock, cycles of the SM clock, counters."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    start_s: float
    end_s: float
    cycles: float
    counters: Counters
    ctas_per_sm: int
    findings: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class DeviceState:
    """One GPU of the node: hardware only; what a process has on it is a Context."""

    ordinal: int
    profile: Profile
    memory: GlobalMemory
    clock: Clock
    l2: L2
    strict: Strict
    residents: Residents
    copy_engines: tuple[Unit, ...]
    counters: Counters = field(default_factory=Counters)
    """Totals over every launch on this device."""
    last_launch: LaunchRecord | None = None
    trace: Trace | None = None
    """Records the events of each timed launch while it is set."""
    numa_node: int = 0
    """The NUMA node of the host that is near."""


class Node:
    """An emulated machine with one device per profile.

    ``profiles``: profiles or their names. ``schedule``: "timed" (the only one that has a clock) or another
    policy of smfree.emulator.exec; ``seed`` reproduces a run. ``strict``: what becomes of findings that
    hardware usually forgives. ``executor`` replaces the kernel executor. ``host_wait_limit_s``: wall seconds
    that a synchronisation waits for the host to write what a stream waits for. ``host``: the memory that is
    page-locked.
    """

    def __init__(
        self,
        profiles: Sequence[Profile | str],
        schedule: str = TIMED,
        seed: int = 0,
        strict: Strict | str = Strict.ERROR,
        *,
        executor: Executor | None = None,
        host_wait_limit_s: float = 2.0,
        host: HostMemory | None = None,
    ) -> None:
        if not profiles:
            raise ValueError("a node needs at least one device; give one profile per device")
        self.schedule = schedule
        self.seed = seed
        self.strict = Strict(strict)
        self.executor = executor if executor is not None else Launch
        self.host_wait_limit_s = host_wait_limit_s
        self.findings: list[Any] = []
        """What ``strict="record"`` collected, oldest first."""
        self.timeline = Timeline(schedule=schedule, seed=seed, clocked=self.clocked)
        self.lock: Turns = Turns()
        """Held during a call. Whoever steps the node for long calls its ``give_way()`` in between."""
        self.open_to_others = False
        """Whether processes may still attach: then nothing is a deadlock."""
        self._callers: dict[int, Process] = {}  # host threads that have called, by ident
        self._waiting: set[int] = set()  # those of them that wait for work
        self.host = HostMemory() if host is None else host
        self._handles = itertools.count(_FIRST_HANDLE, 0x10)
        self.devices = [
            self._make_device(ordinal, load_profile(profile) if isinstance(profile, str) else profile)
            for ordinal, profile in enumerate(profiles)
        ]
        self.exports = Exports()
        self.links = Links([device.profile for device in self.devices], clocked=self.clocked)
        for device in self.devices:
            device.numa_node = self.links.numa_node[device.ordinal]
        if len(self.devices) > 1:
            self.timeline.lookahead_s = self.links.lookahead_ns * 1e-9
        self.processes: list[Process] = []
        """Those attached now."""
        self._numbers = itertools.count()
        self.ipc_handles: dict[bytes, Export | Event] = {}
        """Memory and events that processes share through CUDA IPC."""

    @property
    def clocked(self) -> bool:
        """Whether times mean anything: only under the timed schedule."""
        return self.schedule == TIMED

    def _make_device(self, ordinal: int, profile: Profile) -> DeviceState:
        spec = profile.device
        memory = GlobalMemory(ordinal, spec.memory_bytes, report=self.found, host=self.host)
        return DeviceState(
            ordinal=ordinal,
            profile=profile,
            memory=memory,
            clock=Clock(profile),
            l2=L2(profile, len(memory.data) // LINE_BYTES),
            strict=self.strict,
            residents=Residents(spec),
            copy_engines=tuple(Unit(f"copy engine {index}") for index in range(max(1, spec.copy_engines))),
        )

    def found(self, finding: EmulationError) -> None:
        """Take a finding that execution can survive: raise, record or ignore it."""
        if finding.severity is Severity.ERROR or self.strict is Strict.ERROR:
            raise finding
        if self.strict is Strict.RECORD:
            self.findings.append(finding)

    # ----------------------------------------------------------------------------------------- processes

    def attach(self, label: str = "") -> Process:
        """A new process on this node; ``label`` names it in reports."""
        process = Process(self, next(self._numbers), label)
        self.processes.append(process)
        return process

    def end(self, process: Process) -> None:
        """A process is gone, with everything it had on the node. Twice is fine."""
        with self.lock:
            process.end()
            if process in self.processes:
                self.processes.remove(process)
            self.lock.notify_all()

    def count_of(self, process: Process) -> Count:
        """What a process has now. ``handles``: streams, events, modules, functions and the like."""
        with self.lock:
            contexts = process.contexts.values()
            return Count(
                contexts=sum(context.active for context in contexts),
                allocations=sum(len(context.allocations) for context in contexts),
                mappings=sum(1 for _ in process.space),
                handles=len(process.objects),
                host_ranges=sum(found.process is process for found in self.host.ranges.values()),
                streams=sum(len(self.timeline.streams_of(context)) for context in contexts),
                queued=sum(self.timeline.pending(context) for context in contexts),
            )

    def called(self, process: Process) -> None:
        """The calling host thread acts for ``process``."""
        self._callers[threading.get_ident()] = process

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The calling host thread cannot act meanwhile."""
        me = threading.get_ident()
        self._waiting.add(me)
        try:
            yield
        finally:
            self._waiting.discard(me)

    def others(self, me: int) -> list[str]:
        """Who, besides thread ``me`` and threads that wait themselves, could still submit work."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        self._callers = {ident: process for ident, process in self._callers.items() if ident in names}
        found = [
            f"thread {names[ident]} of {process}"
            for ident, process in self._callers.items()
            if ident != me and ident not in self._waiting and process.alive
        ]
        for process in self.processes:
            calling = sum(each is process for each in self._callers.values())
            if calling == 0:
                found.append(f"{process}, which has not called yet")
            elif calling < process.host_threads:
                found.append(f"a thread of {process} that has not called yet")
        return found + (["processes that have not attached yet"] if self.open_to_others else [])

    # -------------------------------------------------------------------------------------------- memory

    def landed(self, device: DeviceState, lo: int, hi: int, time_ns: float) -> None:
        """[lo, hi) of a device's memory has been changed from elsewhere, visible from ``time_ns`` on: kernels
        that poll it go on then."""
        for other in self.devices:
            for launch in other.residents.launches:
                launch.changed(device.memory, lo, hi, time_ns)

    def new_handle(self) -> int:
        """A value that names nothing yet."""
        return next(self._handles)
