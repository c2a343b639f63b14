"""How a rule of the assembler is written down: a generator over one instruction, kept in a table by opcode.

A finding says the rule, the value that broke it and the remedy. Every rule is held against the real ptxas in
tests/emulator/test_ptx_check.py; where the ISA's text and ptxas differ, ptxas wins, since it is what stands
between a kernel and the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from smfree.emulator.ptx.ast import Function, Imm, Instr, Operand, Reg, Sink
from smfree.emulator.ptx.declarations import TYPE_BYTES


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule: a short stable name and a sentence."""

    rule: str
    message: str


@dataclass(frozen=True, slots=True)
class Target:
    """A ``.target``: "sm_90a" is (90, "a"); ``a`` means this architecture only, ``f`` its family."""

    number: int
    suffix: str = ""

    @classmethod
    def parse(cls, text: str) -> Target:
        """From the directive's text; something unknown counts as the newest."""
        match = re.fullmatch(r"sm_(\d+)([af]?)", text)
        return cls(int(match.group(1)), match.group(2)) if match else cls(999, "a")

    def __str__(self) -> str:
        return f"sm_{self.number}{self.suffix}"


@dataclass(frozen=True, slots=True)
class Site:
    """One instruction where a rule is tried."""

    instr: Instr
    function: Function
    target: Target

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The instruction's operands."""
        return self.instr.operands

    @property
    def modifiers(self) -> tuple[str, ...]:
        """The instruction's modifiers."""
        return self.instr.modifiers

    def has(self, *modifiers: str) -> bool:
        """Whether all of these modifiers are there."""
        return all(m in self.modifiers for m in modifiers)

    def integer(self, index: int) -> int | None:
        """The value of an integer immediate operand; None if it is no such thing."""
        if index >= len(self.operands):
            return None
        operand = self.operands[index]
        return operand.value if isinstance(operand, Imm) and isinstance(operand.value, int) else None

    def register_type(self, operand: Operand) -> str | None:
        """The declared type of a register operand."""
        return self.function.registers.get(operand.name) if isinstance(operand, Reg) else None

    def size(self, rule: str, operand: Operand | None, nbytes: int, what: str) -> Iterator[Finding]:
        """A finding if the operand is a register that has not ``nbytes`` bytes."""
        declared = None if operand is None else self.register_type(operand)
        if declared is not None and isinstance(operand, Reg) and TYPE_BYTES.get(declared) != nbytes:
            yield Finding(
                rule,
                f"{self.instr.name}: {what} has {8 * nbytes} bits, {operand.name} is .{declared}; use cvt",
            )

    def is_sink(self, index: int) -> bool:
        """Whether the operand is "_"."""
        return index < len(self.operands) and isinstance(self.operands[index], Sink)

    def count(self, rule: str, allowed: Sequence[int], form: str) -> Iterator[Finding]:
        """A finding unless the number of operands is one of ``allowed``; ``form`` shows what is right."""
        got = len(self.operands)
        if got not in allowed:
            wanted = " or ".join(str(n) for n in sorted(set(allowed)))
            yield Finding(rule, f"{self.instr.name} takes {wanted} operands, got {got}; write {form}")


Rule = Callable[[Site], Iterator[Finding]]
RuleTable = dict[str, tuple[Rule, ...]]


def table(*entries: tuple[str, Rule]) -> RuleTable:
    """The rules by opcode, in order; "*" is for every instruction."""
    out: RuleTable = {}
    for opcodes, rule in entries:
        for opcode in opcodes.split():
            out[opcode] = (*out.get(opcode, ()), rule)
    return out
