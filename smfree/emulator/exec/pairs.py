"""Pairs of float32 in one 64-bit register, .f32x2, sm_100 and later (PTX ISA, add, sub, mul, fma)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.exec.half import odd_sum
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Arithmetic
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder

PAIR = "f32x2"


def _fma(x: Any, y: Any, z: Any) -> Any:
    """The product is exact in float64, the sum is rounded to odd there and then to float32."""
    return odd_sum(x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)).astype(np.float32)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": _fma,
}


def computed(dec: Decoder, ins: ast.Instr) -> Arithmetic:
    """Both halves alike; only round-to-nearest-even without flushing."""
    dec.only("rn", PAIR)
    fn = _FUNCTIONS[ins.opcode]
    d, *operands = ins.operands
    di, sources = dec.dst(d), tuple(dec.src(x, "b64") for x in operands)

    def act(r: list[Any], g: Group) -> None:
        uniform = not any(type(r[s]) is np.ndarray for s in sources)
        columns = np.broadcast_arrays(*(np.atleast_1d(r[s]) for s in sources))
        out = fn(*(np.ascontiguousarray(column).view(np.float32) for column in columns)).view(np.uint64)
        r[di] = out[0] if uniform else out

    return act
