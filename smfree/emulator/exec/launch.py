"""One kernel launch: what it consists of, and when it may go on.

A launch is advanced in slices, side by side with other launches and copies (smfree.emulator.streams). The
loop is event-driven. Runnable groups are run one at a time, the schedule choosing which; a group that must
wait is parked by what it waits for and resumed by whoever satisfies it. When nothing can run, what was held
back by courtesy (joins) goes on, then pending copies complete; after that the launch is blocked, until
somebody else changes what it waits for or, at last, its sleeping waits time out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor, inf
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.counters import Counters
from smfree.emulator.errors import EmulationError, Severity, Unsupported
from smfree.emulator.exec import (
    approx,
    arith,
    async_ops,
    bits,
    cluster_ops,
    convert,
    matrix,
    memory_ops,
    multimem_ops,
    sync_ops,
    warp,
)
from smfree.emulator.exec.barrier_unit import BarrierUnit
from smfree.emulator.exec.cluster_barrier import ClusterBarrier
from smfree.emulator.exec.cluster_unit import ClusterUnit
from smfree.emulator.exec.copy_unit import CopyUnit
from smfree.emulator.exec.decode import Decoder, Program, Step
from smfree.emulator.exec.flow_unit import FlowUnit
from smfree.emulator.exec.interpreter import Interpreter
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_unit import MemoryUnit
from smfree.emulator.exec.register_unit import RegisterUnit
from smfree.emulator.exec.report import barrier_name, deadlock, place, stuck
from smfree.emulator.exec.residency import Residency
from smfree.emulator.exec.schedule import Schedule, make_schedule
from smfree.emulator.exec.stall_unit import StallUnit
from smfree.emulator.exec.sync_unit import SyncUnit
from smfree.emulator.exec.warp_unit import WarpUnit
from smfree.emulator.ptx import ast
from smfree.emulator.streams import Progress

if TYPE_CHECKING:
    from smfree.emulator.host_memory import HostMemory
    from smfree.emulator.memory import GlobalMemory
    from smfree.emulator.node import DeviceState
    from smfree.emulator.process import Context
    from smfree.emulator.turns import Turns

OPCODE_FAMILIES = (
    approx,
    arith,
    async_ops,
    bits,
    cluster_ops,
    convert,
    matrix,
    memory_ops,
    multimem_ops,
    sync_ops,
    warp,
)  # importing them fills the opcode table
SHARED_GRANULE = 1024


@dataclass
class LaunchResult:
    """What one launch did. ``cycles`` is modelled time from its start to its last visible effect."""

    cycles: float
    counters: Counters
    findings: list[EmulationError] = field(default_factory=list)
    ctas_per_sm: int = 0


def start(
    device: DeviceState,
    kernel: ast.Kernel,
    params: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int] | None,
    dynamic_shared_bytes: int,
    *,
    schedule: str = "timed",
    seed: int = 0,
    start_s: float = 0.0,
    module_symbols: Mapping[str, int] | None = None,
    registers: int | None = None,
    context: Context | None = None,
) -> Launch:
    """A launch that begins ``start_s`` seconds after the node was made; it runs when it is advanced.

    ``cluster`` in CTAs; None: the launch does not speak of clusters. ``registers`` per thread limits how many
    CTAs an SM holds, where known. Raises EmulationError.
    """
    chosen = make_schedule(schedule, seed, device.ordinal)
    return Launch(
        device, kernel, params, grid, block, cluster, dynamic_shared_bytes, chosen, start_s,
        dict(module_symbols or {}), registers, context,
    )  # fmt: skip


def run(
    device: DeviceState,
    kernel: ast.Kernel,
    params: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int] | None,
    dynamic_shared_bytes: int,
    **settings: Any,
) -> LaunchResult:
    """:func:`start` a kernel and run it, alone, until its last thread has exited. Raises EmulationError."""
    launch = start(device, kernel, params, grid, block, cluster, dynamic_shared_bytes, **settings)
    while (progress := launch.advance(inf)) is not Progress.DONE:
        if progress is Progress.BLOCKED and not launch.last_resort():
            launch.drop()
            raise deadlock(launch)
    return LaunchResult(launch.cycles, launch.counters, launch.findings, launch.ctas_per_sm)


class Launch(Residency):
    """State of one running kernel; everything the opcode handlers act on.

    Times in cycles count from when the clock of the device was last reset, which a launch on an idle device
    does; ``origin`` is the launch's start among them.
    """

    def __init__(
        self,
        device: DeviceState,
        kernel: ast.Kernel,
        params: bytes,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int] | None,
        dynamic_shared_bytes: int,
        schedule: Schedule,
        start_s: float,
        symbols: dict[str, int],
        registers: int | None,
        context: Context | None = None,
    ) -> None:
        self.context, self.start_s = context, start_s
        self._lock: Turns | None = context.process.node.lock if context is not None else None
        self.device, self.kernel, self.params = device, kernel, params
        self.schedule, self.symbols = schedule, symbols
        self.dynamic_shared_bytes = dynamic_shared_bytes
        self.shared_bytes = kernel.static_shared_bytes
        if dynamic_shared_bytes:
            self.shared_bytes = kernel.dynamic_shared_offset + dynamic_shared_bytes
        super().__init__(device, grid, block, cluster, self.shared_bytes, registers)
        spec = device.profile.device
        self.max_warps_per_sm = spec.max_warps_per_sm
        self.cycles_per_ns = spec.sm_clock_mhz / 1000.0
        self.counters = Counters(launches=1)
        self.findings: list[EmulationError] = []
        self.clock = device.clock if schedule.timed else None
        # Fewer warps than this, each issuing every dependent_cycles, never wait for a scheduler.
        issue = device.profile.issue
        warps = -(-self.geometry.slots // spec.num_sms) * self.geometry.warps_per_cta
        self.issue_contended = warps > issue.schedulers_per_sm * issue.dependent_cycles

        self.time: Any = np.zeros(self.geometry.num_warps)
        self.end_time = 0.0
        self.progress = 0
        self.change_time = 0.0
        self.clock_reads = 0
        self.runnable: list[Group] = []
        self.crowded = False
        """Whether other work goes on beside this launch."""
        self.limit = inf
        """The cycle beyond which the present slice must not run."""
        self.gave = False
        """Whether something of it has landed on another device, which has its turn before more does."""
        self._waits = False  # blocked: only somebody else can make it go on

        pitch = max(-(-self.shared_bytes // SHARED_GRANULE) * SHARED_GRANULE, SHARED_GRANULE)
        self.memory = MemoryUnit(self, pitch)
        self.sync = SyncUnit(self, pitch)
        self.barriers = BarrierUnit(self)
        self.warps = WarpUnit(self)
        self.peers = ClusterUnit(self)
        self.cluster_barrier = ClusterBarrier(self)
        self.copy = CopyUnit(self)
        self.flow = FlowUnit(self)
        self.stalls = StallUnit(self)
        self.registers = RegisterUnit(self, registers)
        self.trace = device.trace.begin(self) if device.trace is not None and schedule.timed else None
        self.program: Program = Decoder(kernel, self, symbols).program()
        self.interpreter = Interpreter(self, self.program)
        self._lines: dict[int, str] = {}
        self.current: Group | None = None
        # Whole cycles, so that no fraction shows in what a kernel reads.
        self.origin = device.residents.enter(self, float(floor(start_s * self.cycles_per_ns * 1e9)))
        self.time += self.origin
        self.end_time = self.change_time = self.origin

    # ---------------------------------------------------------------- in slices

    def advance(self, limit_s: float) -> Progress:
        """Run until the next thing to do lies after ``limit_s`` (seconds of the node).

        Infinite: until it ends or blocks, because nothing else goes on. A schedule without a clock takes any
        other limit for one slice of its own choice.
        """
        self.crowded = limit_s != inf
        self.limit = self.cycles_of(limit_s * 1e9) if self.crowded and self.clock is not None else inf
        memory = self.device.memory
        elsewhere = memory.report
        memory.report = self.report  # findings of global memory get CTA, thread and line too
        try:
            with np.errstate(all="ignore"):
                progress = self._advance()
        except BaseException:
            self.drop()
            raise
        finally:
            memory.report = elsewhere
        if self.residents.shared:
            self.residents.looked(self)
        return progress

    def _advance(self) -> Progress:
        schedule, turns = self.schedule, self.schedule.slice_turns() if self.crowded else inf
        self._waits = False
        while True:
            self._admit()
            schedule.before_pick(self)
            if self.runnable:
                if self.crowded and schedule.slice_ends(self, turns):
                    return Progress.RAN
                turns -= 1
                self.interpreter.run(schedule.pick(self))
                if self.asked_for:
                    return Progress.RAN
            elif self.crowded and self.stalls.next_turn():
                return Progress.RAN
            elif not self._unblock():
                break
            elif self.crowded and self.gave and self.clock is None:
                self.gave = False
                return Progress.RAN
        if self.copy.pending:
            return Progress.RAN
        if not self.live.any() and self.dispatched:
            self._finish()
            return Progress.DONE
        self._waits = True
        return Progress.BLOCKED

    def _unblock(self) -> bool:
        """Nothing is runnable: make something happen that the launch can do by itself, within the limit."""
        if self.stalls.next_turn():
            return True
        if self.flow.at_join:
            self.flow.release(self.flow.at_join)
            return True
        if self.stalls.wake():
            return True
        if self.copy.pending:
            if self.copy.next_time() > self.limit:
                return False
            self.schedule.complete_some(self)
            return True
        return self.stalls.next_turn(tired=True)

    @property
    def asked_for(self) -> bool:
        """Whether another host thread wants to call: it has its turn before this launch goes on."""
        return self._lock is not None and self._lock.asked_for

    @property
    def next_s(self) -> float:
        """When the next thing happens that it does by itself; infinite while it waits for others."""
        if self._waits:
            return inf
        if self.clock is None:
            return 0.0
        t = self.schedule.least_time(self)
        return self.node_ns(self.origin if t == inf else t) * 1e-9

    @property
    def end_s(self) -> float:
        """When its latest effect was visible."""
        return self.start_s + self.cycles / (self.device.profile.device.sm_clock_mhz * 1e6)

    @property
    def polls(self) -> bool:
        """Whether a loop polls anything."""
        return self.stalls.polls

    @property
    def polls_host(self) -> bool:
        """Whether one of its loops polls host memory."""
        return self.stalls.polls_host

    def last_resort(self) -> bool:
        """Nothing else can happen anywhere: sleeping waits time out. False where that changes nothing."""
        with np.errstate(all="ignore"):
            self._waits = not self.stalls.time_out()
        return not self._waits

    def changed(self, home: GlobalMemory | HostMemory, lo: int, hi: int, time_ns: float) -> None:
        """Somebody else has changed [lo, hi) of ``home``, visible from ``time_ns`` of the node on."""
        self.progress += 1
        if self.stalls.changed(home, lo, hi, self._visible(time_ns)):
            self._waits = False

    def look(self, now_s: float) -> None:
        """Somebody else may have changed memory by now: loops that poll it look again."""
        self.progress += 1
        if self.stalls.look(self._visible(now_s * 1e9)):
            self._waits = False

    def _visible(self, time_ns: float) -> float:
        return 0.0 if self.clock is None else self.cycles_of(time_ns)

    def wait_no_more(self) -> None:
        """There is room for CTAs that have not started."""
        self._waits = False

    def stuck(self) -> list[str]:
        """What its threads wait for, in lines: its share of a deadlock report."""
        return stuck(self)

    def drop(self) -> None:
        """The launch is over, or given up: its room is free."""
        self.memory.away.finish()
        self.residents.leave(self)

    # ---------------------------------------------------------------- services for the units

    def leave(self, g: Group) -> bool:
        """Threads exit. Their CTA retires with its last one."""
        lanes = g.lanes
        if self.clock is not None:
            t = self.settle(g)
            self.end_time = max(
                self.end_time, float(t.max()), float(self.memory.performed[lanes.warp_slice].max())
            )
        if self.trace is not None:
            self.trace.left(g)
        retired = self.exit(lanes)
        self.did_something()
        self.flow.leave_joins(g)
        if len(retired):
            self.copy.retire(retired)
            self.registers.retire(retired)
            self.vacate(retired)
            if self.dispatched and self.residents.shared:
                self.residents.give_back(self)
        self.barriers.lanes_left(lanes.slots)
        self.warps.lanes_left()
        self.cluster_barrier.lanes_left(g)
        return False

    def _admit(self) -> None:
        """CTAs start in free slots."""
        waited = self.lacks_room
        slots = self.enter()
        if slots is None:
            return
        self.memory.shared.reset(slots)
        self.sync.mbarriers.reset(slots)
        self.barriers.reset(slots)
        self.peers.reset(slots)
        self.cluster_barrier.reset(slots)
        self.registers.reset(slots)
        lanes = self.geometry.of_slots(slots)
        if self.clock is not None:
            per_slot = self.time.reshape(self.geometry.slots, -1)
            since = self.residents.freed - self.residents.epoch if waited else self.origin
            per_slot[slots] = np.maximum(per_slot[slots].max(axis=1, keepdims=True), since)
        if self.trace is not None:
            self.trace.entered(lanes)
        self.did_something()
        for part in self.schedule.initial(lanes):
            group = Group(part, 0, list(self.program.initial))
            group.num_registers = len(self.program.register_names)
            self.runnable.append(group)

    def did_something(self, time: float = 0.0) -> None:
        """Shared state changed at ``time``: a spinning thread might see something new."""
        self.progress += 1
        if time > self.change_time:
            self.change_time = time

    # ---------------------------------------------------------------- time

    def settle(self, g: Group) -> Any:
        """Charge the instructions since the last time this was asked; times of the group's warps."""
        w = g.lanes.warp_slice
        t = self.time[w]
        if g.pending and self.clock is not None:
            if self.issue_contended:
                t = self.clock.issue(g.lanes.sm, t, g.pending)
            else:
                t = t + g.pending * self.clock.alu_latency
            self.time[w] = t
        g.pending = 0.0
        return t

    def now(self, g: Group) -> Any:
        """Cycles since the node was made, one per warp; refused under schedules without a clock."""
        if self.clock is None:
            raise Unsupported(
                f"the '{self.schedule.name}' schedule has no clock; read %clock64 and %globaltimer under "
                "'timed'",
                rule="clock.none",
            )
        self.clock_reads += 1
        return self.settle(g) + self.residents.epoch

    def node_ns(self, cycles: Any) -> Any:
        """Nanoseconds since the node was made of the launch's own times."""
        return (cycles + self.residents.epoch) / self.cycles_per_ns

    def cycles_of(self, ns: Any) -> Any:
        """The launch's own times of nanoseconds since the node was made."""
        return ns * self.cycles_per_ns - self.residents.epoch

    def nanoseconds(self, cycles: Any) -> Any:
        return cycles / self.cycles_per_ns

    def spend(self, g: Group, cycles: Any) -> None:
        """The group's warps are busy for so long, all the same or each its own time."""
        if self.clock is not None:
            self.time[g.lanes.warp_slice] = self.settle(g) + cycles

    def lane_times(self, g: Group) -> Any:
        """One time per lane; zeros under schedules without a clock."""
        if self.clock is None:
            return np.zeros(g.lanes.n)
        return self.settle(g)[g.lanes.warp_index]

    @property
    def cycles(self) -> float:
        """Modelled time from the start to the last visible effect so far."""
        return self.end_time - self.origin

    # ---------------------------------------------------------------- places and findings

    def here(self, g: Group) -> str:
        """Label of the instruction being executed, for later reports."""
        return self.line_of(g.pc)

    def line_of(self, pc: int) -> str:
        """ "copy.cu:41 (PTX line 120)" """
        if pc not in self._lines:
            instr = self.kernel.instrs[pc]
            place = f"PTX line {instr.line}"
            self._lines[pc] = f"{instr.source} ({place})" if instr.source else place
        return self._lines[pc]

    def name_barrier(self, key: int) -> str:
        """ "full[1] of CTA 3" """
        return barrier_name(self, key)

    def report(self, finding: EmulationError) -> None:
        """A strict finding: raise it, keep it or drop it, as the node was told."""
        mode = str(self.device.strict)
        if finding.severity is Severity.ERROR or mode == "error":
            raise finding
        if mode == "record":
            if self.current is not None:
                step = self.program.steps[self.current.pc]
                if isinstance(step, Step):
                    finding.locate(place(self, self.current, step.instr, finding.index))
            self.findings.append(finding)

    def _finish(self) -> None:
        """The last thread has exited: totals."""
        self.interpreter.count_instructions()
        self.end_time = max(self.end_time, float(self.time.max(initial=self.origin)))
        if self.trace is not None:
            self.trace.finish(self.cycles)
        self.drop()
