"""Rules for warp-level matrices: shapes, types, number of registers."""

from __future__ import annotations

from collections.abc import Iterator

from smfree.emulator.ptx.ast import Address, Operand, Reg, Vector
from smfree.emulator.ptx.declarations import TYPE_BYTES
from smfree.emulator.ptx.rules import Finding, Site, table

_COUNTS = {"x1": 1, "x2": 2, "x4": 4}
_BYTE_SHAPES = frozenset({"m16n16", "m8n16", "m16n8"})

# Shapes of mma.sync by type of A, the registers of A, B, and the least target; others are left to ptxas.
_MMA = {
    ("m16n8k8", "f16"): (2, 1, 75), ("m16n8k16", "f16"): (4, 2, 80),
    ("m16n8k8", "bf16"): (2, 1, 80), ("m16n8k16", "bf16"): (4, 2, 80),
    ("m16n8k4", "tf32"): (2, 1, 80), ("m16n8k8", "tf32"): (4, 2, 80),
}  # fmt: skip
_OWN_SHAPES = {kind: [s for s, k in _MMA if k == kind] for kind in ("f16", "bf16", "tf32")}
_OTHER_SHAPES = frozenset({"m8n8k4"})  # of .f16, not modelled
_ACCUMULATOR_REGISTERS = {"f16": 2, "f32": 4}


def _registers(site: Site, operand: Operand, count: int, what: str) -> Iterator[Finding]:
    elems = operand.elems if isinstance(operand, Vector) else (operand,)
    if len(elems) != count or not isinstance(operand, Vector):
        yield Finding(
            "matrix.registers",
            f"{site.instr.name}: {what} is a vector of {count} registers, got '{site.instr.text}'",
        )
        return
    for elem in elems:
        kind = site.register_type(elem)
        if kind is not None and TYPE_BYTES.get(kind) != 4:
            yield Finding("matrix.registers", f"{site.instr.name}: {what} has 32-bit registers, got .{kind}")


def _transfer(site: Site) -> Iterator[Finding]:
    """ldmatrix and stmatrix."""
    name, load = site.instr.name, site.instr.opcode == "ldmatrix"
    for needed in ("sync", "aligned"):
        if not site.has(needed):
            yield Finding("matrix.name", f"{name} needs .{needed}")
    if not _BYTE_SHAPES.isdisjoint(site.modifiers) or site.has("b8"):
        return
    if not site.has("m8n8") or not site.has("b16"):
        yield Finding("matrix.name", f"{name} needs a shape and a type; write .m8n8 and .b16")
        return
    counts = [m for m in site.modifiers if m in _COUNTS]
    if len(counts) != 1:
        yield Finding("matrix.name", f"{name} needs one of .x1, .x2 and .x4")
        return
    spaces = [
        m for m in site.modifiers if m.partition("::")[0] in ("shared", "global", "local", "param", "const")
    ]
    if spaces and spaces[0] not in ("shared", "shared::cta"):
        yield Finding("matrix.space", f"{name}: matrices lie in .shared or .shared::cta, not .{spaces[0]}")
    form = f"{site.instr.opcode}.sync.aligned.m8n8.x4.shared.b16 " + ("{..}, [p];" if load else "[p], {..};")
    yield from site.count("matrix.operands", [2], form)
    if len(site.operands) != 2:
        return
    registers, address = site.operands if load else site.operands[::-1]
    if not isinstance(address, Address):
        yield Finding("matrix.operands", f"{name} needs an address; write {form}")
        return
    yield from _registers(site, registers, _COUNTS[counts[0]], "the matrix")


def _mma(site: Site) -> Iterator[Finding]:
    name, mods = site.instr.name, site.modifiers
    if not site.has("sync") or not site.has("aligned"):
        yield Finding("mma.name", f"{name} needs .sync and .aligned")
        return
    if len(mods) != 9 or mods[6] not in _OWN_SHAPES:
        return
    _, _, shape, row, col, d, a, b, c = mods
    if (shape, a) not in _MMA:
        if shape not in _OTHER_SHAPES or a != "f16":
            yield Finding(
                "mma.shape", f"{name}: .{a} has the shapes {', '.join(_OWN_SHAPES[a])}, not {shape}"
            )
        return
    if a != b:
        yield Finding("mma.type", f"{name}: A and B are of one type, got .{a} and .{b}")
        return
    kinds = ("f16", "f32") if a == "f16" else ("f32",)
    if c not in kinds or d != c:
        yield Finding("mma.type", f"{name}: C and D are both .{' or both .'.join(kinds)}, got .{c} and .{d}")
        return
    if (row, col) != ("row", "col"):
        yield Finding("mma.layout", f"{name}: A is .row and B .col, got .{row} and .{col}")
        return
    a_regs, b_regs, least = _MMA[shape, a]
    if site.target.number < least:
        yield Finding("ptx.target", f"{name} needs sm_{least}, the target is {site.target}")
    yield from site.count("mma.operands", [4], "mma.sync... d, a, b, c;")
    if len(site.operands) == 4:
        accumulators = _ACCUMULATOR_REGISTERS[c]
        for operand, count, what in zip(
            site.operands, (accumulators, a_regs, b_regs, accumulators), "DABC", strict=True
        ):
            yield from _registers(site, operand, count, what)


def _movmatrix(site: Site) -> Iterator[Finding]:
    if site.modifiers != ("sync", "aligned", "m8n8", "trans", "b16"):
        yield Finding(
            "matrix.name", f"{site.instr.name} does not exist; write movmatrix.sync.aligned.m8n8.trans.b16"
        )
    yield from site.count("matrix.operands", [2], "movmatrix.sync.aligned.m8n8.trans.b16 d, a;")
    for operand in site.operands:
        if not isinstance(operand, Reg) or TYPE_BYTES.get(site.register_type(operand) or "") != 4:
            yield Finding(
                "matrix.registers", f"{site.instr.name} moves 32-bit registers; got '{site.instr.text}'"
            )


RULES = table(("ldmatrix stmatrix", _transfer), ("mma", _mma), ("movmatrix", _movmatrix))
