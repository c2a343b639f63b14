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
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.counters import Counters
from smfree.emulator.errors import EmulationError, Severity
from smfree.emulator.exec import families  # noqa: F401  (fills the opcode table)
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
from smfree.emulator.exec.schedule import make_schedule
from smfree.emulator.exec.stall_unit import StallUnit
from smfree.emulator.exec.sync_unit import SyncUnit
from smfree.emulator.exec.times import Times
from smfree.emulator.exec.warp_unit import WarpUnit
from smfree.emulator.ptx import ast
from smfree.emulator.streams import Progress

if TYPE_CHECKING:
    from smfree.emulator.host_memory import HostMemory
    from smfree.emulator.memory import GlobalMemory
    from smfree.emulator.node import DeviceState
    from smfree.emulator.process import Context
    from smfree.emulator.turns import Turns

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
    **settings: Any,
) -> LaunchResult:
    """Run a kernel, alone, until its last thread has exited. ``settings`` as for :class:`Launch`."""
    launch = Launch(device, kernel, params, grid, block, cluster, dynamic_shared_bytes, **settings)
    while (progress := launch.advance(inf)) is not Progress.DONE:
        if progress is Progress.BLOCKED and not launch.last_resort():
            launch.drop()
            raise deadlock(launch)
    return LaunchResult(launch.cycles, launch.counters, launch.findings, launch.ctas_per_sm)


class Launch(Times):
    """One running kernel; everything the opcode handlers act on. It runs when it is advanced.

    It begins ``start_s`` seconds after the node was made. ``cluster`` in CTAs; None: the launch does not
    speak of clusters. ``registers`` per thread limits how many CTAs an SM holds, where known. Raises
    EmulationError.
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
        *,
        schedule: str = "timed",
        seed: int = 0,
        start_s: float = 0.0,
        module_symbols: Mapping[str, int] | None = None,
        registers: int | None = None,
        context: Context | None = None,
    ) -> None:
        self.context = context
        self._lock: Turns | None = context.process.node.lock if context is not None else None
        self.device, self.kernel, self.params = device, kernel, params
        self.symbols = dict(module_symbols or {})
        self.dynamic_shared_bytes = dynamic_shared_bytes
        self.shared_bytes = kernel.static_shared_bytes
        if dynamic_shared_bytes:
            self.shared_bytes = kernel.dynamic_shared_offset + dynamic_shared_bytes
        chosen = make_schedule(schedule, seed, device.ordinal)
        super().__init__(device, grid, block, cluster, self.shared_bytes, registers, chosen, start_s)
        self.max_warps_per_sm = device.profile.device.max_warps_per_sm
        self.counters = Counters(launches=1)
        self.findings: list[EmulationError] = []
        self.progress = 0
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
        self.trace = device.trace.begin(self) if device.trace is not None and chosen.timed else None
        self.program: Program = Decoder(kernel, self, self.symbols).program()
        self.interpreter = Interpreter(self, self.program)
        self._lines: dict[int, str] = {}
        self.current: Group | None = None
        self.begin(device.residents.enter(self, self.start_cycle))
        self._admit()

    # ---------------------------------------------------------------- in slices

    def advance(self, limit_s: float) -> Progress:
        """Run until the next thing to do lies after ``limit_s`` (seconds of the node).

        Infinite: until it ends or blocks, because nothing else goes on. A schedule without a clock takes any
        other limit for one slice of its own choice.
        """
        earlier, self.crowded = self.limit, limit_s != inf
        self.limit = self.cycles_of(limit_s * 1e9) if self.crowded and self.clock is not None else inf
        if self.crowded and self.stalls.spinning:  # what changed in the latest slice did so by its end
            self.stalls.look(min(earlier, self.change_time))
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
        self.residents.look(self)
        return progress

    def _advance(self) -> Progress:
        while (progress := self._slice()) is Progress.BLOCKED and self.stalls.forlorn and not self.lacks_room:
            if not self.stalls.time_out():  # nobody else could help either
                raise deadlock(self)
        self._waits = progress is Progress.BLOCKED
        return progress

    def _slice(self) -> Progress:
        schedule, turns = self.schedule, self.schedule.slice_turns() if self.crowded else inf
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
        if self.live.any() or not self.dispatched:
            return Progress.BLOCKED
        self._finish()
        return Progress.DONE

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
    def polls(self) -> bool:
        """Whether a loop polls memory that somebody outside may write."""
        return not self.stalls.forlorn

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

    # ---------------------------------------------------------------- places and findings

    def here(self, g: Group) -> str:
        """Label of the instruction being executed, for later reports."""
        return self.line_of(g.pc)

    def line_of(self, pc: int) -> str:
        """ "copy.cu:41 (PTX line 120)". What the compiler gave no line, as at the head of a loop, has that of
        what follows."""
        if pc not in self._lines:
            place = f"PTX line {self.kernel.instrs[pc].line}"
            near = self.kernel.instrs[pc : pc + 4]
            source = next((instr.source for instr in near if instr.source), None)
            self._lines[pc] = f"{source} ({place})" if source else place
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
