"""One kernel launch: residency, the run loop, divergence, time.

The loop is event-driven. Runnable groups are run one at a time, the schedule choosing which; a group that
must wait is parked by what it waits for and resumed by whoever satisfies it. When nothing can run, what was
held back by courtesy (joins) goes on, then pending copies complete, then sleeping waits time out; what still
waits after that is a deadlock, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    sync_ops,
    warp,
)
from smfree.emulator.exec.barrier_unit import BarrierUnit
from smfree.emulator.exec.classes import instruction_class
from smfree.emulator.exec.cluster_barrier import ClusterBarrier
from smfree.emulator.exec.cluster_unit import ClusterUnit
from smfree.emulator.exec.copy_unit import CopyUnit
from smfree.emulator.exec.decode import Decoder, Program, Segment, Step
from smfree.emulator.exec.flow_unit import FlowUnit
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_unit import MemoryUnit
from smfree.emulator.exec.register_unit import RegisterUnit
from smfree.emulator.exec.report import barrier_name, place
from smfree.emulator.exec.residency import Residency
from smfree.emulator.exec.schedule import Schedule, make_schedule
from smfree.emulator.exec.stall_unit import StallUnit
from smfree.emulator.exec.sync_unit import SyncUnit
from smfree.emulator.exec.warp_unit import WarpUnit
from smfree.emulator.ptx import ast, effects

if TYPE_CHECKING:
    from smfree.emulator.node import DeviceState
    from smfree.emulator.process import Context

OPCODE_FAMILIES = (
    approx,
    arith,
    async_ops,
    bits,
    cluster_ops,
    convert,
    matrix,
    memory_ops,
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


def run(
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
    start_cycle: float = 0.0,
    module_symbols: Mapping[str, int] | None = None,
    registers: int | None = None,
    context: Context | None = None,
) -> LaunchResult:
    """Execute a kernel on an emulated device until its last thread has exited.

    ``cluster`` in CTAs; None: the launch does not speak of clusters. ``registers`` per thread limits how many
    CTAs an SM holds, where known. Raises EmulationError.
    """
    launch = Launch(
        device, kernel, params, grid, block, cluster, dynamic_shared_bytes, make_schedule(schedule, seed),
        start_cycle, dict(module_symbols or {}), registers, context,
    )  # fmt: skip
    elsewhere = device.memory.report
    device.memory.report = launch.report  # findings of global memory get CTA, thread and line too
    try:
        with np.errstate(all="ignore"):
            return launch.run()
    finally:
        device.memory.report = elsewhere


class Launch(Residency):
    """State of one running kernel; everything the opcode handlers act on."""

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
        start_cycle: float,
        symbols: dict[str, int],
        registers: int | None,
        context: Context | None = None,
    ) -> None:
        self.context = context
        self.device, self.kernel, self.params = device, kernel, params
        self.schedule = schedule
        self.start_cycle = float(np.floor(start_cycle))  # whole: no fraction shows in what a kernel reads
        self.dynamic_shared_bytes = dynamic_shared_bytes
        self.shared_bytes = kernel.static_shared_bytes
        if dynamic_shared_bytes:
            self.shared_bytes = kernel.dynamic_shared_offset + dynamic_shared_bytes
        super().__init__(device.profile, grid, block, cluster, self.shared_bytes, registers)
        spec = device.profile.device
        self.max_warps_per_sm = spec.max_warps_per_sm
        self.cycles_per_ns = spec.sm_clock_mhz / 1000.0
        self.counters = Counters(launches=1)
        self.findings: list[EmulationError] = []
        self.clock = device.clock if schedule.timed else None
        if self.clock is not None:
            self.clock.reset(self.node_ns(0.0))
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
        self._visits = [[0, 0] for _ in self.program.steps]  # warps and lanes that executed each step
        self._lines: dict[int, str] = {}
        self.current: Group | None = None

    # ---------------------------------------------------------------- run loop

    def run(self) -> LaunchResult:
        """Run to the end."""
        while True:
            self._admit()
            self.schedule.before_pick(self)
            if self.runnable:
                self._run_group(self.schedule.pick(self))
            elif not self._unblock():
                break
        self._finish()
        return LaunchResult(self.end_time, self.counters, self.findings, self.ctas_per_sm)

    def _unblock(self) -> bool:
        """Nothing is runnable: make something happen. False when the launch is over."""
        if self.stalls.next_turn():
            return True
        if self.flow.at_join:
            self.flow.release(self.flow.at_join)
            return True
        if self.stalls.wake():
            return True
        if self.copy.pending:
            self.schedule.complete_some(self)
            return True
        if self.stalls.next_turn(tired=True):
            return True
        if not self.live.any() and self.next_cta == self.num_ctas:
            return False
        self.stalls.time_out()
        return True

    def _run_group(self, g: Group) -> None:
        """Run until the group parks, leaves, meets its join or the schedule wants another one."""
        steps, visits = self.program.steps, self._visits
        while True:
            pc = g.pc
            step = steps[pc]
            count = visits[pc]
            count[0] += len(g.lanes.warps)
            if type(step) is Segment:
                count[1] += g.lanes.n
                if g.outstanding and not g.outstanding.isdisjoint(step.sources):
                    self.memory.wait_registers(g, step.sources)
                regs = g.regs
                try:
                    for action in step.actions:
                        action(regs, g)
                except (EmulationError, AttributeError, TypeError) as error:
                    raise self._explain(g, pc + step.actions.index(action), error) from error
                g.pending += step.count
                g.pc = step.end
            else:
                assert isinstance(step, Step)
                if g.outstanding and not g.outstanding.isdisjoint(step.sources):
                    self.memory.wait_registers(g, step.sources)
                g.pending += 1
                self.current = g
                try:
                    after = self._branch(g, step) if step.action is None else self._act(g, step)
                except EmulationError as error:
                    instr = self.kernel.instrs[self.current.pc]
                    raise error.locate(place(self, self.current, instr, error.index)) from None
                except (AttributeError, TypeError) as error:
                    raise self._explain(self.current, pc, error) from error
                if after is None:
                    return
                g = after
            join = g.join
            if join is not None and join.pc == g.pc:
                met = self.flow.meet(g)
                if met is None:
                    return
                g = met
            if (
                type(step) is not Segment
                and (self.runnable or self.copy.pending)
                and self.schedule.switch(self, g)
            ):
                self.runnable.append(g)
                return

    def _explain(self, g: Group, pc: int, error: Exception) -> Exception:
        """A located finding of a failure in one instruction; an unwritten register shows as None in numpy."""
        instr = self.kernel.instrs[pc]
        if not isinstance(error, EmulationError):
            index = self.program.register_names
            names = [n for n in sorted(effects.reads(instr)) if g.regs[index[n]] is None]
            if not names:
                return error
            error = EmulationError(
                f"{', '.join(names)} was never written; its value is undefined, initialise it first",
                rule="register.undefined",
                index=0,
            )
        return error.locate(place(self, g, instr, error.index))

    @staticmethod
    def _passing(g: Group, step: Step) -> Any:
        """Which lanes the guard lets through: True, False, or a mask when it is mixed."""
        if step.guard is None:
            return True
        guard = g.regs[step.guard]
        if type(guard) is not np.ndarray:
            return bool(guard) is not step.negated
        hits = int(np.count_nonzero(guard))
        if hits in (0, g.lanes.n):
            return (hits > 0) is not step.negated
        return ~guard if step.negated else guard

    def _act(self, g: Group, step: Step) -> Group | None:
        """A visible instruction, for the lanes its guard lets through; the others wait behind it."""
        assert step.action is not None
        pc = g.pc
        passing = self._passing(g, step)
        if passing is False:
            g.pc = pc + 1
            return g
        if passing is not True:
            g, others = self.flow.split(g, passing, pc + 1, pc, pc + 1)
            self.flow.enqueue(others)
            self.current = g
        self._visits[pc][1] += g.lanes.n
        if not step.action(g):
            return None
        g.pc = pc + step.length
        return g

    def _branch(self, g: Group, step: Step) -> Group | None:
        pc = g.pc
        passing = self._passing(g, step)
        if passing is False:
            g.pc = pc + 1
            return g
        if passing is not True:
            taken, others = self.flow.split(g, passing, step.join, step.target, pc + 1)
            self._visits[pc][1] += taken.lanes.n
            self.flow.enqueue(others)
            self.flow.enqueue(taken)
            return None
        self._visits[pc][1] += g.lanes.n
        g.pc = step.target
        if step.target <= pc and self.stalls.is_spinning(g):
            return None
        return g

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
        self.barriers.lanes_left(lanes.slots)
        self.warps.lanes_left()
        self.cluster_barrier.lanes_left(g)
        return False

    def _admit(self) -> None:
        """CTAs start in free slots."""
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
            per_slot[slots] = per_slot[slots].max(axis=1, keepdims=True)
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
        """Cycles since the device's start, one per warp; refused under schedules without a clock."""
        if self.clock is None:
            raise Unsupported(
                f"the '{self.schedule.name}' schedule has no clock; read %clock64 and %globaltimer under "
                "'timed'",
                rule="clock.none",
            )
        self.clock_reads += 1
        return self.settle(g) + self.start_cycle

    def node_ns(self, cycles: Any) -> Any:
        """Nanoseconds of the node's clock at times of this launch."""
        return (cycles + self.start_cycle) / self.cycles_per_ns

    def cycles_of(self, ns: Any) -> Any:
        """Times of this launch at nanoseconds of the node's clock."""
        return ns * self.cycles_per_ns - self.start_cycle

    def nanoseconds(self, cycles: Any) -> Any:
        return cycles / self.cycles_per_ns

    def advance(self, g: Group, cycles: Any) -> None:
        """The group's warps are busy for so long, all the same or each its own time."""
        if self.clock is not None:
            self.time[g.lanes.warp_slice] = self.settle(g) + cycles

    def lane_times(self, g: Group) -> Any:
        """One time per lane; zeros under schedules without a clock."""
        if self.clock is None:
            return np.zeros(g.lanes.n)
        return self.settle(g)[g.lanes.warp_index]

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
        """Totals: instructions by class from how often each step ran."""
        for pc, step in enumerate(self.program.steps):
            warps, lanes = self._visits[pc]
            if not warps or step is None:
                continue
            last = step.end if isinstance(step, Segment) else pc + step.length
            for instr in self.kernel.instrs[pc:last]:
                self.counters.warp_instructions += warps
                self.counters.thread_instructions += lanes
                self.counters.count_class(instruction_class(instr), warps)
        self.end_time = max(self.end_time, float(self.time.max(initial=0.0)))
        self.memory.away.finish()
        if self.trace is not None:
            self.trace.finish(self.end_time)
