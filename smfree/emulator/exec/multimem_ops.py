"""multimem.st, .red and .ld_reduce: one address, memory of several devices (PTX ISA, "multimem")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.accesses import Issue
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import fill_columns, flat_addresses, strong_scope
from smfree.emulator.exec.table import Visible, visible
from smfree.emulator.exec.values import UINT
from smfree.emulator.ptx import ast
from smfree.emulator.reductions import Reduction

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch

_ORDERS = ("weak", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys", "global")
_OPERATIONS = ("add", "min", "max", "and", "or", "xor")
_VECTORS = ("v2", "v4", "v8")
_BITS = {"f16": 16, "bf16": 16, "f16x2": 32, "bf16x2": 32,
         **{f"{kind}{bits}": bits for kind in "bus" for bits in (32, 64)}, "f32": 32, "f64": 64}  # fmt: skip


def _bits(dec: Decoder, ptx_type: str) -> int:
    """Of one element's register. Raises where the type is not modelled (8-bit floats)."""
    if ptx_type not in _BITS:
        raise dec.refuse(f".{ptx_type}")
    return _BITS[ptx_type]


def _registers(operand: ast.Operand) -> tuple[ast.Operand, ...]:
    return operand.elems if isinstance(operand, ast.Vector) else (operand,)


def _element(ptx_type: str) -> str:
    """ "f16x2" is two of "f16"."""
    return ptx_type.partition("x")[0]


@visible("multimem.st", "multimem.red")
def send(dec: Decoder, ins: ast.Instr) -> Visible:
    ptx_type, reduces = ins.modifiers[-1], ins.modifiers[0] == "red"
    bits = _bits(dec, ptx_type)
    dec.only("st", "red", *_ORDERS, *_VECTORS, *(_OPERATIONS if reduces else ()), ptx_type)
    op = next((m for m in ins.modifiers if m in _OPERATIONS), None) if reduces else None
    reduction = None if op is None else Reduction(op, _element(ptx_type))
    base, offset = dec.address(ins.operands[0])
    sources = tuple(dec.src(e, f"b{bits}") for e in _registers(ins.operands[1]))
    scope = strong_scope(ins) or ("sys" if reduces else None)
    launch: Launch = dec.launch
    release = "release" in ins.modifiers

    def act(g: Group) -> bool:
        values: Any = np.empty((g.lanes.n, len(sources)), UINT[bits])
        fill_columns(values, g, sources)
        if release and scope is not None:
            launch.memory.release(g, scope)
        launch.memory.multimem.send(Issue(g), flat_addresses(g, base, offset), values, scope, reduction)
        return True

    return act


@visible("multimem.ld_reduce")
def load_reduce(dec: Decoder, ins: ast.Instr) -> Visible:
    ptx_type = ins.modifiers[-1]
    bits = _bits(dec, ptx_type)
    dec.only("ld_reduce", *_ORDERS, *_VECTORS, *_OPERATIONS, "acc::f32", ptx_type)
    op = next(m for m in ins.modifiers if m in _OPERATIONS)
    reduction = Reduction(op, _element(ptx_type))
    outs = [dec.dst(e) for e in _registers(ins.operands[0])]
    base, offset = dec.address(ins.operands[1])
    scope, wide = strong_scope(ins), "acc::f32" in ins.modifiers and op == "add"
    launch: Launch = dec.launch
    acquire = "acquire" in ins.modifiers

    def act(g: Group) -> bool:
        addr = flat_addresses(g, base, offset)
        values, ready = launch.memory.multimem.load(
            Issue(g), addr, bits // 8, len(outs), scope, reduction, wide=wide
        )
        launch.memory.until(g, outs, ready)
        for i, register in enumerate(outs):
            g.regs[register] = values[:, i]
        if acquire:
            launch.memory.settle_loads(g)
        return True

    return act
