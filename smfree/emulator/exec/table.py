"""The opcode table: one decorated function per instruction family.

A handler is called once per instruction of a kernel, at decode time. It reads the modifiers, resolves the
operands through the :class:`~smfree.emulator.exec.decode.Decoder`, and returns an *action*:

* arithmetic handlers (``@arithmetic``) return ``f(regs, group)``, which only reads and writes registers;
* visible handlers (``@visible``) return ``f(group) -> bool``: they touch memory, barriers or time, and return
  False when they parked the group instead of finishing.

An opcode or modifier that no handler knows is refused, never skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from smfree.emulator.exec.lanes import Group

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.ptx.ast import Instr

Arithmetic = Callable[[list[Any], Group], None]
Visible = Callable[[Group], bool]


class Kind(Enum):
    ARITHMETIC = auto()
    VISIBLE = auto()


Handler = Callable[["Decoder", "Instr"], Any]
HANDLERS: dict[str, tuple[Kind, Handler]] = {}


def _register(kind: Kind, opcodes: tuple[str, ...]) -> Callable[[Handler], Handler]:
    def add(handler: Handler) -> Handler:
        for opcode in opcodes:
            assert opcode not in HANDLERS, opcode
            HANDLERS[opcode] = (kind, handler)
        return handler

    return add


def arithmetic(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a handler of instructions that only compute on registers."""
    return _register(Kind.ARITHMETIC, opcodes)


def visible(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a handler of instructions that others can observe."""
    return _register(Kind.VISIBLE, opcodes)
