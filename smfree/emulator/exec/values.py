"""Register values: unsigned numpy columns reinterpreted by the type an instruction names; address windows."""

from __future__ import annotations

from typing import Any

import numpy as np

# Generic addresses of the windows that are no device memory; device memory lies in window 0.
WINDOW_BYTES = 1 << 48
SHARED_WINDOW = 1 * WINDOW_BYTES
LOCAL_WINDOW = 2 * WINDOW_BYTES
PARAM_WINDOW = 3 * WINDOW_BYTES
# A shared address that mapa made for the CTA of rank r of the cluster is (r + 1) << CLUSTER_SHIFT | offset.
# An offset without high bits is the executing CTA's own.
CLUSTER_SHIFT = 24
CLUSTER_OFFSET = (1 << CLUSTER_SHIFT) - 1
RANK_BEYOND = 254  # stands for every rank from here on, all beyond any cluster

UINT: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SINT: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT: dict[int, Any] = {16: np.float16, 32: np.float32, 64: np.float64}


def width(ptx_type: str) -> int:
    """Bits of "u32", "b64", "f16"... ("pred" has 1)."""
    return 1 if ptx_type == "pred" else int(ptx_type[1:])


def storage(ptx_type: str) -> Any:
    """The numpy scalar type a register of this type is kept in."""
    return np.bool_ if ptx_type == "pred" else UINT[width(ptx_type)]


def typed(ptx_type: str) -> Any:
    """The numpy scalar type in which an instruction of this type computes."""
    kind = ptx_type[0]
    if kind == "s":
        return SINT[width(ptx_type)]
    if kind == "f":
        return FLOAT[width(ptx_type)]
    return storage(ptx_type)


def is_type(modifier: str) -> bool:
    """Whether a modifier is a fundamental type."""
    return modifier == "pred" or (modifier[0] in "busf" and modifier[1:] in ("8", "16", "32", "64"))


def select(mask: Any, yes: Any, no: Any) -> Any:
    """``np.where`` that keeps scalars scalar."""
    if type(mask) is np.ndarray:
        return np.where(mask, yes, no)
    return yes if mask else no
