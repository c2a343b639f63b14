"""Roots, reciprocals, exponentials (PTX ISA, "Floating Point Instructions").

The ISA gives the approximations an error bound and leaves the bits open. Here they are the exact value,
rounded to nearest: inside every bound, but no hardware's own pattern.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.arith import instruction_type
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Arithmetic, arithmetic
from smfree.emulator.exec.values import storage, typed
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder

Regs = list[Any]
_TINY = float(np.finfo(np.float32).tiny)
_FUNCTIONS: dict[str, Any] = {
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}
_ROUNDED = ("rcp", "sqrt")  # those that exist with .rn


def flush(x: Any) -> Any:
    """float64 values with those that are subnormal in float32 as zeros of their sign."""
    return np.where(np.abs(x) < _TINY, np.copysign(0.0, x), x)


@arithmetic(*_FUNCTIONS)
def approximation(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    ptx_type = instruction_type(dec)
    exact = ins.opcode in _ROUNDED and "rn" in ins.modifiers
    dec.only("rn" if exact else "approx", "ftz", ptx_type)
    if ptx_type != "f32" and not (exact and ptx_type == "f64" and ins.opcode == "sqrt"):
        raise dec.refuse(f"{ins.opcode}.{ptx_type}")
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], ptx_type)
    fn, kind, bits, ftz = _FUNCTIONS[ins.opcode], typed(ptx_type), storage(ptx_type), "ftz" in ins.modifiers

    def act(r: Regs, g: Group) -> None:
        x = np.atleast_1d(r[a]).view(kind).astype(np.float64)
        y = flush(fn(flush(x))) if ftz else fn(x)
        out = y.astype(kind).view(bits)
        r[d] = out if type(r[a]) is np.ndarray else out[0]

    return act
