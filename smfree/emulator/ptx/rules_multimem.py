"""Rules for multimem.st, multimem.red and multimem.ld_reduce (PTX ISA, "multimem")."""

from __future__ import annotations

from collections.abc import Iterator

from smfree.emulator.ptx.ast import Vector
from smfree.emulator.ptx.rules import Finding, Site, table

_ORDERS = {"st": ("weak", "relaxed", "release"), "red": ("relaxed", "release"),
           "ld_reduce": ("weak", "relaxed", "acquire")}  # fmt: skip
_ALL_ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_OPERATIONS = ("add", "min", "max", "and", "or", "xor")
_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_EIGHTS = ("e5m2", "e5m2x2", "e5m2x4", "e4m3", "e4m3x2", "e4m3x4")
_INTEGERS = ("b32", "b64", "u32", "u64", "s32", "s64")
VECTORS = {
    "": (*_INTEGERS, "f16x2", "bf16x2", "f32", "f64", "e5m2x4", "e4m3x4"),
    "v2": ("f16", "f16x2", "bf16", "bf16x2", "f32", "e5m2x2", "e5m2x4", "e4m3x2", "e4m3x4"),
    "v4": (*_HALVES, "f32", *_EIGHTS),
    "v8": ("f16", "bf16", "e5m2", "e4m3", "e5m2x2", "e4m3x2"),
}
"""Which types each vector may have; "" is none."""
_ADD = ("u32", "u64", "s32", *_HALVES, "f32", "f64")
_PICK = ("u32", "s32", "u64", "s64")
_TYPES = {
    "red": {"add": _ADD, "min": _PICK, "max": _PICK},
    "ld_reduce": {"add": (*_ADD, *_EIGHTS), **dict.fromkeys(("min", "max"), (*_PICK, *_HALVES, *_EIGHTS))},
}
_BITS = ("b32", "b64")


def _multimem(site: Site) -> Iterator[Finding]:
    kind = site.modifiers[0] if site.modifiers else ""
    if kind == "cp":
        return  # multimem.cp.async.bulk has no handler here; the executor refuses it
    if kind not in _ORDERS:
        yield Finding(
            "multimem.name", f"no instruction is called {site.instr.name}; there are st, red and ld_reduce"
        )
        return
    yield from _order(site, kind)
    yield from _kind(site, kind)
    if any(m.partition("::")[0] in ("shared", "local", "param", "const") for m in site.modifiers):
        yield Finding("multimem.space", f"{site.instr.name}: a multimem address is in .global memory")


def _order(site: Site, kind: str) -> Iterator[Finding]:
    order = next((m for m in site.modifiers if m in _ALL_ORDERS), None)
    scoped = any(m in _SCOPES for m in site.modifiers)
    if order is not None and order not in _ORDERS[kind]:
        allowed = ", ".join(f".{o}" for o in _ORDERS[kind])
        yield Finding("multimem.order", f"multimem.{kind} may be {allowed}, got .{order}")
    elif order not in (None, "weak") and not scoped:
        yield Finding("multimem.order", f"{site.instr.name}: .{order} needs a scope; write .{order}.sys")


def _kind(site: Site, kind: str) -> Iterator[Finding]:
    ptx_type = site.modifiers[-1]
    vector = next((m for m in site.modifiers if m in ("v2", "v4", "v8")), "")
    if ptx_type not in VECTORS[vector]:
        name = f".{vector}" if vector else "one element"
        yield Finding("multimem.type", f"{site.instr.name}: {name} cannot be of .{ptx_type}")
    if kind != "st":
        yield from _operation(site, kind, ptx_type)
    at = 0 if kind == "ld_reduce" else 1
    if len(site.operands) != 2:
        yield from site.count("multimem.operands", [2], f"multimem.{kind} with an address and a value;")
        return
    operand = site.operands[at]
    got = len(operand.elems) if isinstance(operand, Vector) else 1
    wanted = int(vector[1:]) if vector else 1
    if got != wanted:
        yield Finding("multimem.operands", f"{site.instr.name} has {wanted} elements, got {got}")


def _operation(site: Site, kind: str, ptx_type: str) -> Iterator[Finding]:
    op = next((m for m in site.modifiers if m in _OPERATIONS), None)
    if op is None:
        yield Finding("multimem.operation", f"{site.instr.name} needs one of {', '.join(_OPERATIONS)}")
    elif ptx_type not in _TYPES[kind].get(op, _BITS):
        yield Finding("multimem.type", f"multimem.{kind}.{op} does not exist for .{ptx_type}")
    if site.has("acc::f32") and ptx_type not in _HALVES:
        yield Finding("multimem.type", f"{site.instr.name}: .acc::f32 goes with 16-bit floats")


RULES = table(("multimem", _multimem))
