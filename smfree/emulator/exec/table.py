"""The opcode table: one decorated function per instruction family.

A handler is called once per instruction of a kernel, at decode time. It reads the modifiers, resolves the
operands through the :class:`~smfree.emulator.exec.decode.Decoder`, and returns an *action*:

* arithmetic handlers (``@arithmetic``) return ``f(regs, group)``, which only reads and writes registers;
* visible handlers (``@visible``) return ``f(group) -> bool``: they touch memory, barriers or time, and return
  False when they parked the group instead of finishing.

An opcode names its handler, or opcode and first modifier together do ("st.async"), which goes before.
An opcode or modifier that no handler knows is refused, never skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from smfree.emulator.exec.lanes import Group

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.ptx.ast import Instr

Arithmetic = Callable[[list[Any], Group], None]
Visible = Callable[[Group], bool]


class AccessKind(Enum):
    """Accesses that may be issued several at a time."""

    LOAD = auto()
    STORE = auto()
    CP_ASYNC = auto()


@dataclass(eq=False)
class Access:
    """A memory instruction that neighbours of its shape can be fused with (smfree.emulator.exec.fusion).

    ``addresses`` are (base register or None, offset) of the address operands, ``registers`` those loaded or
    stored, element by element. Called, it acts alone.
    """

    kind: AccessKind
    space: str
    size: int
    count: int
    addresses: tuple[tuple[int | None, int], ...]
    registers: tuple[int, ...]
    act: Visible
    cache: str = ""

    def __call__(self, group: Group) -> bool:
        return self.act(group)

    @property
    def shape(self) -> tuple[Any, ...]:
        """What two accesses must share to be fused."""
        return self.kind, self.space, self.size, self.count, self.cache


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
