"""``C = A @ B.T`` in bfloat16 with float32 sums: tensor copies, ldmatrix, mma (matmul.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_aligned,
    check_apart,
    check_available,
    check_call,
    check_ctas,
    check_shared,
    check_stages,
    launch,
    persistent_grid,
    plain_integers,
    tma_unavailable,
)
from kernels.staged import BarrierPlan
from smfree.cuda import CudaSource, DeviceArray, Stream, Swizzle, TensorMap
from smfree.cuda.tensormap import DataType

BLOCK = 64
"""Rows, columns and depth of what a stage is good for."""
BLOCK_BYTES = BLOCK * BLOCK * 2
CONSUMER_WARPS = 4
STATIC_SHARED_BYTES = 1024
"""full[] and empty[], padded to the alignment of the stages."""
unavailable = tma_unavailable


@dataclass(frozen=True)
class MatmulConfig:
    """How ``mbarrier_matmul`` is compiled and launched. Raises ConfigError."""

    num_stages: int = 4
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        plain_integers(self)
        check_stages(self.num_stages)
        check_ctas(self.ctas_per_sm)

    @property
    def threads(self) -> int:
        """Four consumer warps and the producer's."""
        return 32 * (CONSUMER_WARPS + 1)

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the producer arrives, both blocks complete on it; elements that are filled count.
        ``empty[s]``: each consumer warp arrives."""
        full = BarrierPlan("full", {"producer": 1}, {"block of A": BLOCK_BYTES, "block of B": BLOCK_BYTES})
        return full, BarrierPlan("empty", {"consumer warps": CONSUMER_WARPS})

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the stages. The barriers are static."""
        return self.num_stages * 2 * BLOCK_BYTES

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        defines = {"NUM_STAGES": self.num_stages}
        for plan in self.barriers:
            defines |= plan.defines
        return CudaSource(KERNELS / "mbarrier" / "matmul.cu", defines)


def matmul(
    c: DeviceArray, a: DeviceArray, b: DeviceArray, *, config: MatmulConfig, stream: Stream | None = None
) -> LaunchInfo:
    """``c = a @ b.T``: ``a`` (m, k) and ``b`` (n, k) are bfloat16, given as uint16 (:func:`to_bfloat16`),
    16-byte aligned, k a positive multiple of 8; ``c`` (m, n) is float32, overlapping neither. All row-major.

    The sum over k is rounded as the tensor cores do it. Queues on ``stream`` and returns; nothing is launched
    when m or n is 0. Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, MatmulConfig, a=a, b=b, c=c)
    check_available(unavailable(capabilities))
    check_shared(config.shared_bytes + STATIC_SHARED_BYTES, capabilities)
    m, n, k = _shapes(c, a, b)
    if m * n == 0:
        return LaunchInfo(None)
    tiles = -(-m // BLOCK) * -(-n // BLOCK)
    grid = persistent_grid(capabilities, tiles, config.ctas_per_sm)
    args = (block_map(a), block_map(b), c, np.uint32(m), np.uint32(n), np.uint32(k))
    return launch(
        config.source,
        grid,
        config.threads,
        args,
        device_array=c,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )


def block_map(matrix: DeviceArray) -> TensorMap:
    """The tensor map of a row-major bfloat16 matrix: box 64 x 64, 128-byte swizzle, zeros outside."""
    return matrix.device.tensor_map(matrix, (BLOCK, BLOCK), data_type=DataType.BFLOAT16, swizzle=Swizzle.B128)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, ties to even, as uint16 bits. Finite values only."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits to float32, exactly."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _shapes(c: DeviceArray, a: DeviceArray, b: DeviceArray) -> tuple[int, int, int]:
    """m, n and k. Raises OperandError unless devices, dtypes, shapes and alignment fit."""
    for name, array, dtype in (("a", a, np.uint16), ("b", b, np.uint16), ("c", c, np.float32)):
        if array.device is not c.device:
            raise OperandError(
                f"{name} and c must be on one device (got {array.device.spec} and {c.device.spec}); "
                "copy one over"
            )
        if array.dtype != dtype or len(array.shape) != 2:
            raise OperandError(
                f"{name} must be a matrix of {np.dtype(dtype)} (got {array.dtype} of shape {array.shape}); "
                "give bfloat16 as its bits, see to_bfloat16"
            )
    (m, k), (n, depth) = a.shape, b.shape
    if depth != k or c.shape != (m, n):
        raise OperandError(
            "a, b and c must have shapes (m, k), (n, k) and (m, n) "
            f"(got {a.shape}, {b.shape} and {c.shape}); b is given transposed"
        )
    if k == 0 or k % 8:
        raise OperandError(
            f"k must be a positive multiple of 8, so that rows start 16-byte aligned (got {k}); "
            f"pad a and b with zeros to {max(-(-k // 8) * 8, 8)} columns"
        )
    for name, array in (("a", a), ("b", b)):
        check_aligned("a tensor map", name, array, 16)
        check_apart(c, array, name, "c")
    check_aligned("4-byte stores", "c", c, 4)
    return m, n, k
