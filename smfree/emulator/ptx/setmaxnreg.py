"""How many registers a kernel that uses setmaxnreg starts with.

setmaxnreg needs a kernel whose register count at entry is fixed by a directive (PTX ISA, "setmaxnreg").
ptxas takes it from .maxnreg, or from .maxntid or .reqntid together with .minnctapersm, and never more than
the largest count that a setmaxnreg.inc asks for. Without such a directive it drops every setmaxnreg and says
"unable to determine register count at entry". tests/emulator/test_setmaxnreg.py holds this against it.
"""

from __future__ import annotations

from math import prod

from smfree.emulator.ptx.ast import Function, Imm, Kernel

REGISTERS_PER_SM = 65536  # of every architecture that has setmaxnreg
MOST_PER_THREAD = 255
UNIT = 8  # registers per thread are given out in eights


def increases(function: Function) -> list[int]:
    """The counts of all setmaxnreg.inc of a function."""
    return [
        int(i.operands[0].value)
        for i in function.instrs
        if i.opcode == "setmaxnreg" and "inc" in i.modifiers and i.operands and isinstance(i.operands[0], Imm)
    ]


def entry_registers(function: Function) -> int | None:
    """Registers per thread at entry; None when no directive fixes them."""
    if not isinstance(function, Kernel):
        return None
    bound = function.maxnreg
    threads = function.reqntid or function.maxntid
    if function.minnctapersm and threads:
        share = REGISTERS_PER_SM // (function.minnctapersm * -(-prod(threads) // 32) * 32)
        bound = min(share // UNIT * UNIT, bound or MOST_PER_THREAD)
    if not bound:
        return None
    return min(bound, MOST_PER_THREAD, max(increases(function), default=MOST_PER_THREAD))
