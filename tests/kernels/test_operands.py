"""Operands beside the copied ones, scalars per row, scratch, indices: no thread may trip over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels.common import LaunchInfo, OperandError
from kernels.lsu.gather import GatherConfig, gather
from kernels.mbarrier.cluster import ClusterConfig, outer
from kernels.mbarrier.matmul import MatmulConfig, matmul
from kernels.mbarrier.reduction import ReductionConfig, total
from smfree.cuda import Device, DeviceArray

Call = tuple[Callable[..., LaunchInfo], Any, dict[str, tuple[tuple[int, ...], type]]]
CALLS: dict[str, Call] = {
    "outer": (
        outer,
        ClusterConfig(256),
        {"dst": ((2, 8), np.float32), "alpha": ((2,), np.float32), "x": ((8,), np.float32)},
    ),
    "total": (
        total,
        ReductionConfig(256),
        {"result": ((1,), np.float32), "partials": ((8,), np.float32), "x": ((8,), np.float32)},
    ),
    "matmul": (
        matmul,
        MatmulConfig(2),
        {"c": ((8, 8), np.float32), "a": ((8, 8), np.uint16), "b": ((8, 8), np.uint16)},
    ),
    "gather": (
        gather,
        GatherConfig(),
        {"dst": ((8,), np.uint32), "src": ((8,), np.uint32), "index": ((8,), np.uint32)},
    ),
}


def operands(device: Device, name: str) -> dict[str, DeviceArray]:
    """Zeros for every operand of a call."""
    return {arg: device.asarray(np.zeros(shape, kind)) for arg, (shape, kind) in CALLS[name][2].items()}


@pytest.mark.parametrize(
    ("name", "operand"),
    [("outer", "alpha"), ("total", "result"), ("total", "partials"), ("matmul", "c"), ("gather", "index")],
)
def test_words_that_threads_access_are_aligned(name: str, operand: str) -> None:
    call, config, _ = CALLS[name]
    with Device.open("emu:h100", schedule="min-pc") as device:
        args = operands(device, name)
        good = args[operand]
        for offset, said in ((2, f"{operand} must be 4-byte aligned for 4-byte .* ending in 0x2"), (4, None)):
            room = device.empty(good.nbytes + 16).fill(0)
            args[operand] = room[offset : offset + good.nbytes].view(good.dtype, good.shape)
            if said is None:
                call(*args.values(), config=config)
                continue
            with pytest.raises(OperandError, match=said):
                call(*args.values(), config=config)


@pytest.mark.parametrize("operand", ["a", "b"])
def test_a_product_overwrites_no_factor(operand: str) -> None:
    with Device.open("emu:h100") as device:
        args = operands(device, "matmul")
        args[operand] = args["c"].bytes_view()[128:].view(np.uint16, (8, 8))
        with pytest.raises(OperandError, match=rf"c and {operand} must not overlap \(they share 128 bytes\)"):
            matmul(*args.values(), config=MatmulConfig(2))
