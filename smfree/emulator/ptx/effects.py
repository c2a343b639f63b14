"""Which registers an instruction reads and writes.

In PTX the destination comes first, except for instructions without a result: stores, reductions, barriers,
copies, fences, branches. The tables below say which are which; an opcode in neither counts its first operand
as read and written, so liveness may be too large but never too small.
"""

from __future__ import annotations

from collections.abc import Iterator

from smfree.emulator.ptx.ast import (
    Address,
    ArgList,
    Instr,
    Not,
    Operand,
    Pair,
    Reg,
    TensorAddress,
    Vector,
)

CARRY = "%cc"
"""The carry flag: a hidden register that add.cc, sub.cc, mad.cc write and addc, subc, madc read."""

_NO_RESULT = frozenset({
    "st", "red", "cp", "prefetch", "prefetchu", "applypriority", "discard", "fence", "membar", "bra",
    "brx", "ret", "exit", "trap", "brkpt", "nanosleep", "pmevent", "setmaxnreg", "griddepcontrol",
    "stmatrix", "sust", "sured", "stackrestore", "bar", "barrier", "mbarrier", "tensormap", "multimem",
    "wgmma", "tcgen05", "clusterlaunchcontrol",
})  # fmt: skip
_RESULT = frozenset({
    "abs", "activemask", "add", "addc", "alloca", "and", "atom", "bfe", "bfi", "bfind", "bmsk", "brev",
    "clz", "cnot", "copysign", "cos", "createpolicy", "cvt", "cvta", "div", "dp2a", "dp4a", "elect",
    "ex2", "fma", "fns", "getctarank", "isspacep", "istypep", "ld", "ldmatrix", "ldu", "lg2", "lop3",
    "mad", "mad24", "madc", "mapa", "match", "max", "min", "mma", "mov", "movmatrix", "mul", "mul24",
    "neg", "not", "or", "popc", "prmt", "rcp", "redux", "rem", "rsqrt", "sad", "selp", "set", "setp",
    "shf", "shfl", "shl", "shr", "sin", "slct", "sqrt", "stacksave", "sub", "subc", "suld", "suq",
    "szext", "tanh", "testp", "tex", "tld4", "txq", "vote", "xor",
})  # fmt: skip
_CARRY_OPCODES = frozenset({"add", "addc", "sub", "subc", "mad", "madc"})


def has_result(instr: Instr) -> bool | None:
    """Whether operand 0 is a destination that is only written; None for an opcode nobody knows."""
    opcode, modifiers = instr.opcode, instr.modifiers
    first = modifiers[0] if modifiers else ""
    if opcode in _RESULT:
        return True
    if opcode not in _NO_RESULT:
        return True if opcode == "wmma" and first in ("load", "mma") else _unknown(opcode, first)
    if opcode in ("bar", "barrier"):
        return "red" in modifiers
    if opcode == "mbarrier":
        return first in ("arrive", "arrive_drop", "test_wait", "try_wait", "pending_count")
    if opcode == "multimem":
        return first == "ld_reduce"
    if opcode == "tcgen05":
        return None if first == "ld" and "red" in modifiers else first == "ld"
    if opcode == "clusterlaunchcontrol":
        return first == "query_cancel"
    if opcode == "wgmma":
        return None if first == "mma_async" else False
    return False


def _unknown(opcode: str, first: str) -> bool | None:
    if opcode == "wmma" and first == "store":
        return False
    return None


def _written(operand: Operand) -> Iterator[str]:
    if isinstance(operand, Reg):
        yield operand.name
    elif isinstance(operand, Pair):
        yield from _written(operand.first)
        yield from _written(operand.second)
    elif isinstance(operand, Vector | ArgList):
        for elem in operand.elems:
            yield from _written(elem)


def _read(operand: Operand | None) -> Iterator[str]:
    if isinstance(operand, Reg):
        yield operand.name
    elif isinstance(operand, Not):
        yield operand.reg.name
    elif isinstance(operand, Address):
        yield from _read(operand.base)
    elif isinstance(operand, Vector | ArgList):
        for elem in operand.elems:
            yield from _read(elem)
    elif isinstance(operand, Pair):
        yield from _read(operand.first)
        yield from _read(operand.second)
    elif isinstance(operand, TensorAddress):
        for part in (operand.map, *operand.coords, *operand.extra):
            yield from _read(part)


def writes(instr: Instr) -> frozenset[str]:
    """Registers the instruction may write, the carry flag included."""
    found: set[str] = set()
    operands = instr.operands
    if operands:
        if instr.opcode == "call":
            if isinstance(operands[0], ArgList):
                found.update(_written(operands[0]))
        elif has_result(instr) is not False:
            found.update(_written(operands[0]))
    if instr.opcode in _CARRY_OPCODES and "cc" in instr.modifiers:
        found.add(CARRY)
    return frozenset(found)


def reads(instr: Instr) -> frozenset[str]:
    """Registers the instruction may read, its guard included."""
    found: set[str] = set()
    operands = instr.operands
    skip_first = False
    if operands:
        is_destination = not isinstance(operands[0], Address | TensorAddress)
        if instr.opcode == "call":
            skip_first = isinstance(operands[0], ArgList)
        else:
            skip_first = is_destination and has_result(instr) is True
    for operand in operands[1:] if skip_first else operands:
        found.update(_read(operand))
    if instr.guard is not None:
        found.add(instr.guard.reg.name)
    if instr.opcode in ("addc", "subc", "madc"):
        found.add(CARRY)
    return frozenset(found)


def kills(instr: Instr) -> frozenset[str]:
    """Registers whose old value is gone in every lane: written, not under a guard, by a known instruction."""
    if instr.guard is not None:
        return frozenset()
    if instr.opcode != "call" and has_result(instr) is None:
        return frozenset()
    return writes(instr)
