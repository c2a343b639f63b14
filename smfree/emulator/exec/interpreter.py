"""Running one group: step after step, until it parks, leaves, meets its join or others should go first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import EmulationError
from smfree.emulator.exec.classes import instruction_class
from smfree.emulator.exec.decode import Program, Segment, Step
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.report import place
from smfree.emulator.ptx import effects

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch


class Interpreter:
    """Executes the program of one launch and counts how often each step ran."""

    def __init__(self, launch: Launch, program: Program) -> None:
        self.launch, self.program = launch, program
        self._visits = [[0, 0] for _ in program.steps]  # warps and lanes that executed each step

    def run(self, g: Group) -> None:
        """Run until the group parks, leaves, meets its join or the schedule wants another one."""
        launch = self.launch
        steps, visits = self.program.steps, self._visits
        while True:
            pc = g.pc
            step = steps[pc]
            count = visits[pc]
            count[0] += len(g.lanes.warps)
            if type(step) is Segment:
                count[1] += g.lanes.n
                if g.outstanding and not g.outstanding.isdisjoint(step.sources):
                    launch.memory.wait_registers(g, step.sources)
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
                    launch.memory.wait_registers(g, step.sources)
                g.pending += 1
                launch.current = g
                try:
                    after = self._branch(g, step) if step.action is None else self._act(g, step)
                except EmulationError as error:
                    now = launch.current
                    raise error.locate(
                        place(launch, now, launch.kernel.instrs[now.pc], error.index)
                    ) from None
                except (AttributeError, TypeError) as error:
                    raise self._explain(launch.current, pc, error) from error
                if after is None:
                    return
                g = after
            join = g.join
            if join is not None and join.pc == g.pc:
                met = launch.flow.meet(g)
                if met is None:
                    return
                g = met
            if type(step) is not Segment and (
                launch.schedule.switch(launch, g)
                if launch.runnable or launch.copy.pending or launch.crowded
                else g.pc <= pc and launch.asked_for
            ):
                launch.runnable.append(g)
                return

    def _explain(self, g: Group, pc: int, error: Exception) -> Exception:
        """A located finding of a failure in one instruction; an unwritten register shows as None in numpy."""
        instr = self.launch.kernel.instrs[pc]
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
        return error.locate(place(self.launch, g, instr, error.index))

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
            flow = self.launch.flow
            g, others = flow.split(g, passing, pc + 1, pc, pc + 1)
            flow.enqueue(others)
            self.launch.current = g
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
            flow = self.launch.flow
            taken, others = flow.split(g, passing, step.join, step.target, pc + 1)
            self._visits[pc][1] += taken.lanes.n
            flow.enqueue(others)
            flow.enqueue(taken)
            return None
        self._visits[pc][1] += g.lanes.n
        g.pc = step.target
        if step.target <= pc and self.launch.stalls.is_spinning(g, pc):
            return None
        return g

    def count_instructions(self) -> None:
        """Totals: instructions by class from how often each step ran."""
        counters = self.launch.counters
        for pc, step in enumerate(self.program.steps):
            warps, lanes = self._visits[pc]
            if not warps or step is None:
                continue
            last = step.end if isinstance(step, Segment) else pc + step.length
            for instr in self.launch.kernel.instrs[pc:last]:
                counters.warp_instructions += warps
                counters.thread_instructions += lanes
                counters.count_class(instruction_class(instr), warps)
