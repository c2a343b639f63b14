"""Kernel text to executable steps.

Operands become indices into a group's register list, which ends in slots for the constants, so that an action
is plain indexing and one numpy call. Straight runs of arithmetic become one :class:`Segment`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from smfree.emulator.errors import PtxError, Unsupported
from smfree.emulator.exec.fusion import FusedAccess, Member, Plain, find_run
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.special import TIMED_REGISTERS, reader
from smfree.emulator.exec.table import HANDLERS, Access, Arithmetic, Kind, Visible
from smfree.emulator.exec.values import UINT, select, storage, width
from smfree.emulator.ptx import ast, effects
from smfree.emulator.ptx.flow import Flow, flow_of


@dataclass
class Segment:
    """A run of arithmetic from one program counter to the next visible step."""

    actions: tuple[Arithmetic, ...]
    sources: frozenset[int]
    end: int
    count: int


@dataclass
class Step:
    """A visible instruction or branch. ``guard`` is the register index of its predicate."""

    instr: ast.Instr
    action: Visible | None
    guard: int | None
    negated: bool
    sources: frozenset[int]
    target: int = -1  # of a branch
    join: int | None = None  # where its parts reconverge
    length: int = 1  # instructions it stands for


@dataclass
class Program:
    """A decoded kernel for one launch."""

    kernel: ast.Kernel
    flow: Flow
    steps: list[Segment | Step | None]
    register_names: dict[str, int]
    initial: list[Any]
    live_cache: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def live(self, pc: int) -> tuple[int, ...]:
        """Indices of the registers needed from ``pc`` on; the constants behind them always are."""
        found = self.live_cache.get(pc)
        if found is None:
            found = tuple(sorted(self.register_names[n] for n in self.flow.live_at(pc)))
            self.live_cache[pc] = found
        return found


class Decoder:
    """Resolves operands and builds the steps. ``launch`` is the running launch the visible actions act on."""

    def __init__(self, kernel: ast.Kernel, launch: Any, symbols: dict[str, int]) -> None:
        self.kernel = kernel
        self.launch = launch
        self.symbols = symbols
        self.types = kernel.registers
        self.index = {name: i for i, name in enumerate(kernel.registers)}
        self._num_registers = len(self.index)
        self.constants: list[Any] = []
        self._constant_slots: dict[tuple[str, bytes], int] = {}
        self.instr: ast.Instr = ast.Instr("", (), ())
        self._sources: set[int] = set()
        self._special_reads: list[Arithmetic] = []
        self._reads_time = False
        self._destinations: list[int] = []

    @cached_property
    def written(self) -> frozenset[str]:
        """Registers that some instruction of the kernel writes."""
        return frozenset().union(*map(effects.writes, self.kernel.instrs))

    # ---------------------------------------------------------------- operands

    def refuse(self, what: str) -> Unsupported:
        """The error for an instruction form the emulator does not model."""
        return Unsupported(
            f"PTX line {self.instr.line} ({self.instr.source or 'no source line'}): `{self.instr.text}`: "
            f"{what} "
            "is not modelled by the emulator; see docs/emulator.md, or add a handler (CONTRIBUTING.md)",
            rule="unsupported",
        )

    def wrong(self, message: str) -> PtxError:
        return PtxError(
            f"`{self.instr.text}`: {message}", line=self.instr.line, source=str(self.instr.source or "")
        )

    def only(self, *allowed: str) -> None:
        """Refuse the instruction if it has a modifier that is not in ``allowed``."""
        for modifier in self.instr.modifiers:
            if modifier not in allowed:
                raise self.refuse(f"modifier .{modifier}")

    def constant(self, value: Any) -> int:
        """The slot that holds this numpy scalar."""
        key = (value.dtype.str, value.tobytes())
        slot = self._constant_slots.get(key)
        if slot is None:
            slot = self._constant_slots[key] = self._num_registers + len(self.constants)
            self.constants.append(value)
        return slot

    def active(self) -> Callable[[list[Any]], Any]:
        """Function of the registers: which lanes the instruction's guard lets through (True: all)."""
        guard = self.instr.guard
        if guard is None:
            return lambda regs: np.bool_(True)
        i, negated = self.index[guard.reg.name], guard.negated
        return lambda regs: np.logical_not(regs[i]) if negated else regs[i]

    def dst(self, operand: ast.Operand) -> int:
        if not isinstance(operand, ast.Reg):
            raise self.wrong(f"the destination must be a register, not {operand}")
        i = self.index[operand.name]
        self._destinations.append(i)
        return i

    def dst_type(self, operand: ast.Operand) -> str:
        assert isinstance(operand, ast.Reg)
        return self.types[operand.name]

    def src(self, operand: ast.Operand, ptx_type: str) -> int:
        """Index of a source operand; immediates and symbols are constants of ``ptx_type``'s width."""
        match operand:
            case ast.Reg(name):
                i = self.index[name]
                self._sources.add(i)
                return i
            case ast.Imm():
                return self.constant(self.immediate(operand, ptx_type))
            case ast.Symbol():
                return self.constant(UINT[width(ptx_type)](self.symbol_address(operand)))
            case ast.Special(name):
                return self.special(name, ptx_type)
        raise self.wrong(f"operand {operand} cannot be a source here")

    def immediate(self, operand: ast.Imm, ptx_type: str) -> Any:
        if ptx_type == "pred":
            return np.bool_(bool(operand.value))
        bits = width(ptx_type)
        if ptx_type[0] == "f" and operand.bits is None:
            return np.dtype(f"f{bits // 8}").type(operand.value).view(UINT[bits])
        if operand.bits is not None:
            if operand.width == bits:
                return UINT[bits](operand.bits)
            return np.dtype(f"f{bits // 8}").type(operand.value).view(UINT[bits])
        return UINT[bits](int(operand.value) & ((1 << bits) - 1))

    def constant_value(self, operand: ast.Operand) -> int | None:
        """The value of an immediate operand, None for a register."""
        return int(operand.value) if isinstance(operand, ast.Imm) else None

    def special(self, name: str, ptx_type: str) -> int:
        """A slot that is filled with a special register just before this instruction."""
        read, kind = reader(self, name), storage(ptx_type)
        i = self._num_registers + len(self.constants)
        self.constants.append(kind(0))

        def fetch(regs: list[Any], group: Group) -> None:
            value = read(group)
            regs[i] = value.astype(kind) if type(value) is np.ndarray else kind(value)

        self._special_reads.append(fetch)
        self._reads_time |= name in TIMED_REGISTERS
        return i

    def symbol_address(self, symbol: ast.Symbol) -> int:
        """Shared variables: window offset. Parameters: offset in the argument block. Globals: address."""
        name = symbol.name
        if name in self.kernel.shared:
            return self.kernel.shared[name].offset + symbol.offset
        for param in self.kernel.params:
            if param.name == name:
                return param.offset + symbol.offset
        if name in self.kernel.local:
            return self.kernel.local[name].offset + symbol.offset
        if name in self.symbols:
            return self.symbols[name] + symbol.offset
        if name in self.kernel.call_params:
            raise self.refuse("a function call (here one of its parameters)")
        raise self.wrong(f"symbol {name} is not defined in this module")

    def address(self, operand: ast.Operand, bits: int = 64) -> tuple[int | None, int]:
        """(index of the base register or None, byte offset) of [base + offset]."""
        if isinstance(operand, ast.Address):
            match operand.base:
                case ast.Reg(name):
                    i = self.index[name]
                    self._sources.add(i)
                    return i, operand.offset
                case ast.Symbol():
                    return None, self.symbol_address(operand.base) + operand.offset
                case ast.Imm():
                    return None, int(operand.base.value) + operand.offset
                case None:
                    return None, operand.offset
        raise self.wrong(f"{operand} is not an address")

    # ---------------------------------------------------------------- instructions

    def program(self) -> Program:
        """Decode the whole kernel."""
        flow = flow_of(self.kernel)
        instrs = self.kernel.instrs
        decoded = [self._decode(pc, flow) for pc in range(len(instrs))]
        leaders = set(flow.leaders)
        if self.launch.schedule.fuses:
            self._fuse(decoded, leaders)
        steps: list[Segment | Step | None] = []
        for pc, item in enumerate(decoded):
            if isinstance(item, Step):
                steps.append(item)
            elif pc in leaders or pc == 0 or isinstance(decoded[pc - 1], Step):
                steps.append(_segment(decoded, pc, leaders))
            else:
                steps.append(None)  # inside a segment; control never enters here
        initial = [None] * self._num_registers + self.constants
        return Program(self.kernel, flow, steps, self.index, initial)

    def _fuse(self, decoded: list[Plain | Step], leaders: set[int]) -> None:
        """Replace the first step of each run of like accesses by one that does them all."""
        items: list[Any] = [
            Member(pc, item.action, item.sources)
            if isinstance(item, Step) and isinstance(item.action, Access) and item.guard is None
            else item
            for pc, item in enumerate(decoded)
        ]
        pc = 0
        while pc < len(items):
            if not isinstance(items[pc], Member):
                pc += 1
                continue
            arithmetic, members = find_run(items, pc, leaders)
            if len(members) > 1:
                first = decoded[pc]
                assert isinstance(first, Step)
                fused = FusedAccess(self.launch, arithmetic, members)
                sources = frozenset().union(*(i.sources for i in arithmetic), *(m.sources for m in members))
                decoded[pc] = Step(first.instr, fused, None, False, sources, length=fused.count)
            pc = members[-1].pc + 1

    def _decode(self, pc: int, flow: Flow) -> Plain | Step:
        instr = self.instr = self.kernel.instrs[pc]
        self._sources, self._special_reads, self._destinations = set(), [], []
        self._reads_time = False
        guard, negated = None, False
        if instr.guard is not None:
            guard, negated = self.index[instr.guard.reg.name], instr.guard.negated
            self._sources.add(guard)
        if instr.opcode == "bra":
            label = instr.operands[-1]
            if not isinstance(label, ast.LabelRef):
                raise self.wrong("bra needs a label")
            target = self.kernel.labels[label.name]
            sources = frozenset(self._sources)
            return Step(instr, None, guard, negated, sources, target, flow.ipdom_pc.get(pc))
        entry = HANDLERS.get(".".join((instr.opcode, *instr.modifiers[:1]))) or HANDLERS.get(instr.opcode)
        if entry is None:
            raise self.refuse(f"opcode {instr.opcode}")
        kind, handler = entry
        try:
            action = handler(self, instr)
        except (ValueError, IndexError, KeyError, StopIteration) as error:
            raise self.refuse("this form") from error
        sources = frozenset(self._sources)
        if kind is Kind.VISIBLE:
            for read in self._special_reads:
                action = _before(read, action)
            return Step(instr, action, guard, negated, sources)
        for read in self._special_reads:
            action = _sequence(read, action)
        if self._reads_time:
            return Step(instr, _as_visible(action), guard, negated, sources)
        if guard is not None:
            action = _guarded(
                action, guard, negated, tuple(self._destinations), self.launch.counters.not_executed
            )
        return Plain(action, sources, frozenset(self._destinations))


def _segment(decoded: list[Plain | Step], start: int, leaders: set[int]) -> Segment:
    """The arithmetic from ``start`` up to the next visible step or block."""
    run: list[Plain] = []
    for end in range(start, len(decoded)):
        item = decoded[end]
        if isinstance(item, Step) or (end in leaders and end > start):
            break
        run.append(item)
    sources = frozenset().union(*(item.sources for item in run))
    return Segment(tuple(item.action for item in run), sources, start + len(run), len(run))


def _sequence(first: Arithmetic, second: Arithmetic) -> Arithmetic:
    def both(regs: list[Any], group: Group) -> None:
        first(regs, group)
        second(regs, group)

    return both


def _before(first: Arithmetic, second: Visible) -> Visible:
    def both(group: Group) -> bool:
        first(group.regs, group)
        return second(group)

    return both


def _as_visible(action: Arithmetic) -> Visible:
    def act(group: Group) -> bool:
        action(group.regs, group)
        return True

    return act


def _guarded(
    action: Arithmetic,
    guard: int,
    negated: bool,
    destinations: tuple[int, ...],
    not_executed: Callable[[int], None],
) -> Arithmetic:
    """Arithmetic has no side effects, so a mixed guard computes everywhere and keeps the old value
    elsewhere. ``not_executed`` is told for how many lanes that was."""

    def guarded(regs: list[Any], group: Group) -> None:
        mask = regs[guard]
        if type(mask) is not np.ndarray:
            if bool(mask) is not negated:
                action(regs, group)
            else:
                not_executed(group.lanes.n)
            return
        hits = int(np.count_nonzero(mask))
        not_executed(hits if negated else group.lanes.n - hits)
        old = [regs[d] for d in destinations]
        action(regs, group)
        for d, before in zip(destinations, old, strict=True):
            now = regs[d]
            keep = before if before is not None else now.dtype.type(0)
            regs[d] = select(mask, keep, now) if negated else select(mask, now, keep)

    return guarded
