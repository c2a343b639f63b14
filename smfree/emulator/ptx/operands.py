"""Operands of one instruction: registers, constants, addresses, vectors, pairs, argument lists."""

from __future__ import annotations

from collections.abc import Mapping

from smfree.emulator.ptx.ast import (
    Address,
    ArgList,
    Imm,
    LabelRef,
    Not,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Vector,
)
from smfree.emulator.ptx.declarations import SPECIAL_REGISTERS
from smfree.emulator.ptx.lexer import Cursor, literal

_SINK = Sink()


class Scope:
    """The names of one ``{ }`` block; lookups go outwards. The function's own scope has serial 0."""

    __slots__ = ("labels", "names", "parent", "serial")

    def __init__(self, parent: Scope | None, serial: int, names: Mapping[str, Operand] | None = None) -> None:
        self.parent = parent
        self.serial = serial
        self.names: dict[str, Operand] = dict(names or {})
        self.labels: dict[str, str] = {}

    def unique(self, name: str) -> str:
        """The name that no other scope of the function uses."""
        return f"{name}@{self.serial}" if self.serial else name

    def find(self, name: str) -> Operand | None:
        """What ``name`` means here."""
        scope: Scope | None = self
        while scope is not None:
            found = scope.names.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def find_label(self, name: str) -> str | None:
        """The unique name of a label seen from here, by the enclosing blocks up to the function."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


def resolve(cursor: Cursor, scope: Scope, name: str) -> Operand:
    """The operand a name stands for; the cursor stands behind it."""
    found = scope.find(name)
    if found is not None:
        return found
    if name in SPECIAL_REGISTERS:
        return Special(name)
    line = cursor.lines[cursor.pos - 1]
    if name.startswith("%"):
        cursor.fail(
            f"register {name} is not declared in this scope; declare it with .reg before its use",
            rule="ptx.undeclared",
            line=line,
        )
    cursor.fail(f"unknown symbol '{name}'; declare it before its use", rule="ptx.undeclared", line=line)


def parse_operand(cursor: Cursor, scope: Scope) -> Operand:
    """One operand with what belongs to it (offset, second half of a pair)."""
    text = cursor.texts[cursor.pos]
    first = text[:1]
    if first == "%" or first.isalpha() or first == "_" or first == "$":
        if text == "WARP_SZ":
            return cursor.constant("an operand")
        cursor.pos += 1
        operand: Operand = _SINK if text == "_" else resolve(cursor, scope, text)
        ahead = cursor.texts[cursor.pos]
        if ahead == "|":
            cursor.pos += 1
            return Pair(operand, parse_operand(cursor, scope))
        if ahead in ("+", "-") and isinstance(operand, Symbol):
            return Symbol(operand.name, operand.offset + _offset(cursor))
        return operand
    if first == "[":
        return _address(cursor, scope)
    if first == "{":
        cursor.pos += 1
        return Vector(_list(cursor, scope, "}"))
    if first == "!":
        if literal(cursor.texts[cursor.pos + 1]) is not None:
            return cursor.constant("an operand")
        cursor.pos += 1
        inner = parse_operand(cursor, scope)
        if not isinstance(inner, Reg):
            cursor.fail("'!' needs a predicate register behind it")
        return Not(inner)
    return cursor.constant("an operand")


def _list(cursor: Cursor, scope: Scope, close: str) -> tuple[Operand, ...]:
    elems: list[Operand] = []
    while not cursor.accept(close):
        if elems:
            cursor.expect(",", "between the elements of a list")
        elems.append(parse_operand(cursor, scope))
    return tuple(elems)


def _offset(cursor: Cursor) -> int:
    """The signed byte offset behind a base; '+' or '-' is ahead."""
    sign = cursor.next()
    value = cursor.integer("a byte offset")
    return value if sign == "+" else -value


def _address(cursor: Cursor, scope: Scope) -> Address | TensorAddress:
    line = cursor.line
    cursor.pos += 1
    text = cursor.peek()
    base: Reg | Symbol | Imm | None
    offset = 0
    if text and (text[0] in "%_$" or text[0].isalpha()):
        cursor.pos += 1
        found = resolve(cursor, scope, text)
        if not isinstance(found, Reg | Symbol):
            cursor.fail(f"{text} cannot be the base of an address; move it to a register first", line=line)
        base = found
        if cursor.peek() == "-" and isinstance(base, Reg):
            cursor.fail("an address takes '+' only; write [reg+-4] for a negative offset", line=line)
        if cursor.peek() in ("+", "-"):
            offset = _offset(cursor)
    else:
        base = Imm(cursor.integer("an address"))
    address = Address(base, offset)
    extra: list[Operand] = []
    while cursor.accept(","):
        extra.append(parse_operand(cursor, scope))
    cursor.expect("]", "after an address")
    if not extra:
        return address
    coords = extra[0]
    if not isinstance(coords, Vector):
        return TensorAddress(address, (), tuple(extra))
    return TensorAddress(address, coords.elems, tuple(extra[1:]))


def parse_call_operand(cursor: Cursor, scope: Scope) -> Operand:
    """An operand of ``call``: a list in parentheses, a function, a prototype's label, a register."""
    if cursor.accept("("):
        return ArgList(_list(cursor, scope, ")"))
    text = cursor.peek()
    label = scope.find_label(text)
    if label is not None and scope.find(text) is None:
        cursor.pos += 1
        return LabelRef(label)
    return parse_operand(cursor, scope)
