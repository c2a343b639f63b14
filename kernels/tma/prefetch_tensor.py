"""Copy a matrix with ``cp.async.bulk.tensor.2d``, boxes prefetched into the L2 (prefetch_tensor.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_available,
    check_call,
    check_operands,
    launch,
    tma_unavailable,
)
from kernels.tma.prefetch import Policy, check_ahead
from kernels.tma.ring import BoxConfig
from smfree.cuda import CudaSource, DeviceArray, Stream

unavailable = tma_unavailable


@dataclass(frozen=True, kw_only=True)
class PrefetchTensorConfig(BoxConfig):
    """How ``tma_prefetch_tensor`` is compiled and launched: each box is prefetched ``ahead`` tiles of its CTA
    before it is loaded (0: never). Raises ConfigError."""

    ahead: int = 8
    policy: Policy = Policy.NORMAL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ahead(self.ahead, self.num_stages, self.policy)

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        defines = self.box_defines | {"AHEAD": self.ahead, "POLICY": self.policy.name}
        return CudaSource(KERNELS / "tma" / "prefetch_tensor.cu", defines)


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: PrefetchTensorConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy the matrix ``src`` to ``dst``, both of one shape (rows, cols) and dtype; rows a multiple of 16
    bytes, both 16-byte aligned, not overlapping. Queues on ``stream`` and returns; nothing is launched for
    an empty matrix.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, PrefetchTensorConfig, src=src, dst=dst)
    check_available(unavailable(capabilities))
    check_operands("cp.async.bulk.tensor", dst, src)
    for name, array in (("src", src), ("dst", dst)):
        config.check_rows(name, array)
    if dst.shape != src.shape:
        raise OperandError(f"dst has src's shape {src.shape} (got {dst.shape}); reshape it")
    if src.nbytes == 0:
        return LaunchInfo(None)
    down, across = config.tiles(*src.shape)
    if down * across >= 2**32:
        raise OperandError(f"there are fewer than 2^32 tiles (got {down * across}); use a larger box")
    box = (config.box_rows, config.box_cols)
    return launch(
        config.source,
        config.grid_for(down * across, capabilities),
        32,
        (
            dst.device.tensor_map(dst, box),
            src.device.tensor_map(src, box),
            np.uint32(across),
            np.uint32(down),
        ),
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
