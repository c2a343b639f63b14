"""The sum of an array, the same bits on every run (reduction.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kernels.common import (
    LaunchInfo,
    OperandError,
    check_aligned,
    check_alike,
    check_apart,
    check_available,
    check_call,
    check_shared,
    launch,
    require,
)
from kernels.mbarrier.counter import counter_of
from kernels.mbarrier.pipeline import PipelineConfig, check_roles
from kernels.staged import MBARRIER_BYTES, STAGE_ALIGN, BarrierPlan
from smfree.cuda import DeviceArray, Stream

WARP_SUM_BYTES = 4


@dataclass(frozen=True)
class ReductionConfig(PipelineConfig):
    """How ``mbarrier_reduction`` is compiled and launched: warp 0 of ``threads`` produces, the others
    consume.

    ``work`` stays 1: one addition per element. Raises ConfigError.
    """

    file: ClassVar[str] = "reduction.cu"

    threads: int = 160

    def __post_init__(self) -> None:
        check_roles(self.threads)
        super().__post_init__()
        require(self.work == 1, "a sum has one addition per element", f"work={self.work}", "leave it out")

    @property
    def consumers(self) -> int:
        """Threads that add."""
        return self.threads - 32

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the producer arrives, the tile completes on it. ``empty[s]``: the consumer warps
        arrive."""
        return (
            BarrierPlan("full", {"producer": 1}, self.loads),
            BarrierPlan("empty", {"consumer warp": self.consumers // 32}),
        )

    @property
    def loads(self) -> dict[str, int]:
        """A stage holds x alone."""
        return {name: num_bytes for name, num_bytes in super().loads.items() if name == "x"}

    @property
    def stage_bytes(self) -> int:
        """Distance of two stages."""
        return -(-self.tile_bytes // STAGE_ALIGN) * STAGE_ALIGN

    @property
    def static_shared_bytes(self) -> int:
        """Barriers and the warps' sums, padded to the alignment of the stages."""
        used = len(self.barriers) * self.num_stages * MBARRIER_BYTES + self.consumers // 32 * WARP_SUM_BYTES
        return -(-used // STAGE_ALIGN) * STAGE_ALIGN


def total(
    result: DeviceArray,
    partials: DeviceArray,
    x: DeviceArray,
    *,
    config: ReductionConfig,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``result[0]`` becomes the sum of ``x``, as :func:`sum_in_order` does it with the LaunchInfo's grid.

    All float32; ``x`` of any shape, 16-byte aligned; ``partials`` scratch of at least one element per CTA
    (``config.grid_for``). The sum of nothing is 0. Queues on ``stream`` and returns. Raises OperandError,
    ConfigError.
    """
    capabilities = check_call(config, ReductionConfig, x=x, partials=partials, result=result)
    check_available(config.unavailable(capabilities))
    check_shared(config.shared_bytes + config.static_shared_bytes, capabilities)
    for name, array in (("x", x), ("partials", partials)):
        check_alike(result, array, name, "result")
        check_apart(result, array, name, "result")
    check_apart(partials, x, "x", "partials")
    if x.dtype != np.float32:
        raise OperandError(f"sums are made in float32 (got {x.dtype}); convert the array")
    check_aligned(config.instruction, "x", x, 16)
    for name, array in (("result", result), ("partials", partials)):
        check_aligned("4-byte stores", name, array, 4)
    grid = config.grid_for(x.nbytes, capabilities)
    for name, array, least in (("result", result, 1), ("partials", partials, grid)):
        if array.nbytes < 4 * least:
            raise OperandError(
                f"{name} must have at least {least} elements (got {array.nbytes // 4}); make it longer"
            )
    return launch(
        config.source,
        grid,
        config.threads,
        (result, partials, counter_of(x.device, stream), x, np.uint64(x.nbytes // 4)),
        device_array=x,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )


def sum_in_order(x: np.ndarray, *, config: ReductionConfig, grid: int) -> np.float32:
    """The sum of float32 values in the kernel's order (reduction.cu), bit by bit."""
    values = np.asarray(x, np.float32).ravel()
    bulk = len(values) // 4 * 4
    per_tile = config.tile_bytes // 4
    sums = np.zeros((grid, config.consumers, 4), np.float32)
    for begin in range(0, bulk, per_tile):
        vectors = values[begin : min(begin + per_tile, bulk)].reshape(-1, 4)
        cta = begin // per_tile % grid
        for first in range(0, len(vectors), config.consumers):
            turn = vectors[first : first + config.consumers]
            sums[cta, : len(turn)] += turn
    sums[-1, : len(values) - bulk, 0] += values[bulk:]
    threads = (sums[..., 0] + sums[..., 1]) + (sums[..., 2] + sums[..., 3])
    warps = _tree(threads.reshape(grid, -1, 32))
    return _strided(_tree(_padded(warps)))


def _tree(lanes: np.ndarray) -> np.ndarray:
    """Sums over the last axis of 32 lanes: each adds lane ^ 16, then ^ 8, 4, 2, 1."""
    for mask in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., np.arange(32) ^ mask]
    return lanes[..., 0]


def _padded(warps: np.ndarray) -> np.ndarray:
    """The sums of a CTA's warps, zeros up to 32."""
    return np.pad(warps, ((0, 0), (0, 32 - warps.shape[-1])))


def _strided(partials: np.ndarray) -> np.float32:
    """Lane l adds partials l, l + 32, ...; then the tree."""
    lanes = np.zeros(32, np.float32)
    for first in range(0, len(partials), 32):
        turn = partials[first : first + 32]
        lanes[: len(turn)] += turn
    return np.float32(_tree(lanes))
