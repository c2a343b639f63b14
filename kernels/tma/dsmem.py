"""Pass tiles from CTA to CTA through distributed shared memory, by one of three engines (dsmem.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    OperandError,
    check_available,
    check_call,
    check_operands,
    check_shared,
    check_threads,
    check_tile,
    check_whole,
    launch,
    persistent_grid,
    plain_integers,
    require,
    tma_unavailable,
)
from kernels.staged import STAGE_ALIGN, BarrierPlan
from smfree.cuda import CudaSource, DeviceArray, Stream

unavailable = tma_unavailable


class Path(Enum):
    """Which engine carries a tile to the next CTA."""

    PULL = "ld.shared::cluster"
    PUSH = "st.async"
    BULK = "cp.async.bulk"


@dataclass(frozen=True, kw_only=True)
class DsmemConfig:
    """How ``tma_dsmem`` is compiled and launched: ``cluster`` CTAs in a ring, each with a tile of
    ``tile_bytes`` (a multiple of 128) and room for another. At most ``max_ctas`` CTAs (None: one per SM).
    Raises ConfigError."""

    path: Path = Path.BULK
    tile_bytes: int = 16384
    cluster: int = 4
    threads: int = 128
    max_ctas: int | None = None

    def __post_init__(self) -> None:
        plain_integers(self)
        require(isinstance(self.path, Path), "path is a Path", self.path, "use Path.BULK")
        check_tile(self.tile_bytes, multiple_of=STAGE_ALIGN)
        check_whole("cluster", self.cluster)
        require(2 <= self.cluster <= 8, "cluster is 2 to 8 CTAs", self.cluster, "use 4")
        check_threads(self.threads)
        if self.max_ctas is not None:
            check_whole("max_ctas", self.max_ctas)
            require(
                self.max_ctas >= self.cluster,
                f"max_ctas holds a whole cluster of {self.cluster}",
                self.max_ctas,
                "leave it out",
            )

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``landed[b]``, one per buffer: thread 0, and a tile."""
        return (BarrierPlan("landed", {"thread 0": 1}, {"tile": self.tile_bytes}),)

    @property
    def static_shared_bytes(self) -> int:
        """The barriers, padded to the alignment of the buffers."""
        return STAGE_ALIGN

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: the two buffers. The barriers are static."""
        return 2 * self.tile_bytes

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "tma" / "dsmem.cu",
            {
                "PATH": self.path.name,
                "TILE_BYTES": self.tile_bytes,
                "CLUSTER": self.cluster,
                "THREADS": self.threads,
            },
        )


def rotate(
    dst: DeviceArray,
    src: DeviceArray,
    *,
    config: DsmemConfig,
    num_steps: int,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst[g, (r + num_steps) % cluster] = src[g, r]``: both (groups, cluster, n) of one dtype, a tile being
    n elements, ``tile_bytes``. 16-byte aligned, not overlapping. Queues on ``stream`` and returns; nothing is
    launched for no groups.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, DsmemConfig, src=src, dst=dst)
    check_available(unavailable(capabilities))
    check_shared(config.shared_bytes + config.static_shared_bytes, capabilities)
    num_steps = check_whole("num_steps", num_steps)
    require(0 <= num_steps < 2**32, "num_steps is 0 to 2^32 - 1", num_steps, "use the number modulo cluster")
    check_operands("cp.async.bulk", dst, src)
    for name, array in (("src", src), ("dst", dst)):
        shape = array.shape
        if (
            len(shape) != 3
            or shape[1] != config.cluster
            or shape[2] * array.dtype.itemsize != config.tile_bytes
        ):
            raise OperandError(
                f"{name} is (groups, {config.cluster}, n) with n elements of {config.tile_bytes} bytes in "
                f"all (got {shape} {array.dtype}); reshape it or use another config"
            )
    num_groups = src.shape[0]
    if num_groups == 0:
        return LaunchInfo(None)
    ctas = persistent_grid(capabilities, min(num_groups * config.cluster, config.max_ctas or 2**31), 1)
    return launch(
        config.source,
        max(ctas // config.cluster, 1) * config.cluster,
        config.threads,
        (dst, src, np.uint32(num_groups), np.uint32(num_steps)),
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )
