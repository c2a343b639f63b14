"""Rules for 16-bit floats, alone and in pairs, their conversions, and reductions over a warp."""

from __future__ import annotations

from collections.abc import Iterator

from smfree.emulator.ptx.ast import Imm, Reg
from smfree.emulator.ptx.declarations import TYPE_BYTES
from smfree.emulator.ptx.rules import Finding, Site, table

_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_OPERANDS = {"add": 3, "sub": 3, "mul": 3, "fma": 4, "min": 3, "max": 3, "neg": 2, "abs": 2}
_FLOATS = ("f32", "f64")
_ROUNDINGS = ("rn", "rz", "rm", "rp")
_REDUX = {"add": ("u32", "s32"), "min": ("u32", "s32"), "max": ("u32", "s32"),
          "and": ("b32",), "or": ("b32",), "xor": ("b32",)}  # fmt: skip


def _least_target(opcode: str, kind: str) -> int:
    """The first architecture that has the operation."""
    brain = kind.startswith("b")
    if opcode in ("add", "sub", "mul"):
        return 90 if brain else 53
    return 80 if brain or opcode in ("min", "max") else 53


def _half(site: Site) -> Iterator[Finding]:
    kind = site.modifiers[-1] if site.modifiers else ""
    opcode, name = site.instr.opcode, site.instr.name
    if kind not in _HALVES:
        return
    if any(m in TYPE_BYTES for m in site.modifiers[:-1]):
        return  # mixed precision
    least = _least_target(opcode, kind)
    if site.target.number < least:
        yield Finding("half.target", f"{name} needs sm_{least}, the target is {site.target}; compute in .f32")
    roundings = [m for m in site.modifiers if m in _ROUNDINGS]
    if roundings not in (["rn"], []) or (opcode == "fma" and not roundings):
        yield Finding("half.rounding", f"{name}: 16-bit floats round with .rn only; write {opcode}.rn.{kind}")
    if kind.endswith("x2"):
        yield from site.count(
            "half.operands", [_OPERANDS[opcode]], f"{opcode}.{kind} with pairs in .b32 registers"
        )
        yield from _registers(site, 4, "half.register")


def _registers(site: Site, size: int, rule: str) -> Iterator[Finding]:
    for operand in site.operands:
        declared = site.register_type(operand) if isinstance(operand, Reg) else None
        if declared is not None and TYPE_BYTES.get(declared) != size:
            yield Finding(rule, f"{site.instr.name} has {8 * size}-bit registers, {operand} is .{declared}")


def _cvt(site: Site) -> Iterator[Finding]:
    name, mods = site.instr.name, site.modifiers
    if len(mods) < 2 or mods[-1] not in ("f16", "bf16", *_FLOATS) or mods[-2] not in (*_HALVES, *_FLOATS):
        return
    to, source = mods[-2:]
    if to not in _HALVES and source not in _HALVES:
        return
    rounded = [m for m in mods if m in (*_ROUNDINGS, "rna", "rs")]
    if source == "bf16":
        yield from _sixteen_bits(site, 1)
    if to in _FLOATS:
        if rounded:
            yield Finding("cvt.rounding", f"{name} is exact and takes no rounding; write cvt.{to}.{source}")
        return
    if to == "bf16":
        yield from _sixteen_bits(site, 0)
    if to != source and not rounded:
        yield Finding("cvt.rounding", f"{name} rounds and has to say how; write cvt.rn.{to}.{source}")
    if "sat" in mods and to.startswith("b"):
        yield Finding("cvt.saturation", f"{name}: .sat does not exist for .{to}; use min and max")
    if (to.startswith("b") or to.endswith("x2")) and site.target.number < 80:
        yield Finding("cvt.target", f"{name} needs sm_80, the target is {site.target}")
    if "rs" in mods or "satfinite" in mods:
        return
    pair = to.endswith("x2")
    yield from site.count(
        "cvt.operands", [3 if pair else 2], f"cvt.rn.{to}.{source} d, a{', b' if pair else ''};"
    )
    declared = site.register_type(site.operands[0]) if site.operands else None
    if pair and declared is not None and TYPE_BYTES.get(declared) != 4:
        yield Finding("cvt.register", f"{name} writes a 32-bit register, {site.operands[0]} is .{declared}")


def _sixteen_bits(site: Site, index: int) -> Iterator[Finding]:
    """A .bf16 operand of cvt has a register of its size; those of other types may be wider."""
    operand = site.operands[index] if index < len(site.operands) else None
    declared = site.register_type(operand) if operand is not None else None
    if declared is not None and TYPE_BYTES.get(declared) != 2:
        yield Finding(
            "cvt.register", f"{site.instr.name}: .bf16 is a 16-bit register, {operand} is .{declared}"
        )


def _redux(site: Site) -> Iterator[Finding]:
    name = site.instr.name
    operation = next((m for m in site.modifiers if m in _REDUX), "")
    if not site.has("sync") or not operation:
        yield Finding("redux.name", f"{name} does not exist; write redux.sync.add.u32 d, a, mask;")
        return
    kind = site.modifiers[-1]
    if kind not in _REDUX[operation] and not (kind == "f32" and operation in ("min", "max")):
        yield Finding("redux.name", f"{name}: .{operation} is for .{' and .'.join(_REDUX[operation])}")
    yield from site.count("redux.operands", [3], f"redux.sync.{operation}.{kind} d, a, mask;")
    if site.operands and isinstance(site.operands[0], Imm):
        yield Finding("redux.operands", f"{name} needs a register as destination")


RULES = table((" ".join(_OPERANDS), _half), ("cvt", _cvt), ("redux", _redux))
