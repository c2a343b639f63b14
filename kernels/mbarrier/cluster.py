"""Rows that all need x: each CTA of a cluster loads a part of every tile and multicasts it (cluster.cu)."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    check_flag,
    check_shared,
    check_tile,
    check_whole,
    launch,
    plain_integers,
    require,
)
from kernels.mbarrier.pipeline import PipelineConfig, check_roles
from kernels.staged import STAGE_ALIGN, BarrierPlan
from smfree.cuda import Capabilities, DeviceArray, Stream

CLUSTER_SIZES = (2, 4, 8)
"""Up to 8 CTAs every device with clusters has (CUDA C++ Programming Guide, "Thread Block Clusters")."""
MAX_ITEMS = 2**31


@dataclass(frozen=True)
class ClusterConfig(PipelineConfig):
    """How ``mbarrier_cluster`` is compiled and launched: warp 0 of ``threads`` produces, the others consume.

    ``cluster_size`` CTAs share the tiles; without ``multicast`` each loads them for itself, all else alike.
    """

    file: ClassVar[str] = "cluster.cu"

    num_stages: int = 4
    threads: int = 160
    cluster_size: int = field(default=2, kw_only=True)
    multicast: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        plain_integers(self)
        check_whole("cluster_size", self.cluster_size)
        check_flag("multicast", self.multicast)
        sizes = ", ".join(map(str, CLUSTER_SIZES))
        require(self.cluster_size in CLUSTER_SIZES, f"cluster_size is {sizes}", self.cluster_size, "use 2")
        check_tile(self.tile_bytes, multiple_of=16 * self.cluster_size)
        check_roles(self.threads)
        super().__post_init__()

    @property
    def barriers(self) -> tuple[BarrierPlan, ...]:
        """``full[s]``: the producer arrives, the whole tile completes on it, whoever asked for its slices.
        ``empty[s]``: everybody whose stage the next load overwrites."""
        readers = {"CTA of the cluster": self.cluster_size} if self.multicast else {"this CTA": 1}
        return BarrierPlan("full", {"producer": 1}, self.loads), BarrierPlan("empty", readers)

    @property
    def loads(self) -> dict[str, int]:
        """A stage holds x alone."""
        return {name: num_bytes for name, num_bytes in super().loads.items() if name == "x"}

    @property
    def stage_bytes(self) -> int:
        """Distance of two stages."""
        return -(-self.tile_bytes // STAGE_ALIGN) * STAGE_ALIGN

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with."""
        return super().defines | {"CLUSTER_SIZE": self.cluster_size, "MULTICAST": int(self.multicast)}

    def clusters_for(self, items: int, capabilities: Capabilities) -> int:
        """Clusters for so many pairs of a tile and a group of rows."""
        ctas = capabilities.num_sms * self.ctas_per_sm
        most = max(1, min(ctas, self.max_ctas or ctas) // self.cluster_size)
        return max(1, min(items, most))


def outer(
    dst: DeviceArray,
    alpha: DeviceArray,
    x: DeviceArray,
    *,
    config: ClusterConfig,
    stream: Stream | None = None,
) -> LaunchInfo:
    """``dst[r, :n] = 0``, then ``config.work`` times ``dst[r, i] = fmaf(alpha[r], x[i], dst[r, i])``.

    ``x`` (n,), ``alpha`` (rows,), ``dst`` (rows, pitch), all float32; rows a multiple of ``cluster_size``,
    pitch at least n and a multiple of 4: elements from n on stay as they are. ``x`` and ``dst`` 16-byte
    aligned; ``dst`` overlaps neither. With ``Part.COPY`` rows become copies of x. Queues on ``stream`` and
    returns; nothing is launched for zero elements. Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, ClusterConfig, x=x, alpha=alpha, dst=dst)
    check_available(config.unavailable(capabilities))
    check_shared(config.shared_bytes + config.static_shared_bytes, capabilities)
    rows, pitch, elements = _shapes(dst, alpha, x, config)
    if rows * elements == 0:
        return LaunchInfo(None)
    tiles = -(-elements // 4 * 16 // config.tile_bytes)
    items = rows // config.cluster_size * tiles
    if items > MAX_ITEMS:
        raise OperandError(
            f"rows / cluster_size x tiles of x is at most {MAX_ITEMS} (got {items}); use larger tiles"
        )
    return launch(
        config.source,
        config.clusters_for(items, capabilities) * config.cluster_size,
        config.threads,
        (dst, alpha, x, np.uint32(rows), np.uint64(elements), np.uint64(pitch)),
        device_array=dst,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )


def _shapes(
    dst: DeviceArray, alpha: DeviceArray, x: DeviceArray, config: ClusterConfig
) -> tuple[int, int, int]:
    """Rows, pitch and elements. Raises OperandError unless devices, dtypes, shapes and alignment fit."""
    for name, array in (("x", x), ("alpha", alpha)):
        check_alike(dst, array, name)
        check_apart(dst, array, name)
    shapes = f"dst {dst.shape}, alpha {alpha.shape}, x {x.shape}"
    if dst.dtype != np.float32:
        raise OperandError(f"rows are computed in float32 (got {dst.dtype}); convert the arrays")
    if (len(dst.shape), len(alpha.shape), len(x.shape)) != (2, 1, 1) or dst.shape[0] != alpha.shape[0]:
        raise OperandError(
            f"shapes must be dst (rows, pitch), alpha (rows,) and x (n,) (got {shapes}); reshape"
        )
    (rows, pitch), (elements,) = dst.shape, x.shape
    if rows % config.cluster_size:
        raise OperandError(
            f"rows must be a multiple of cluster_size {config.cluster_size} (got {rows}); pad dst and alpha"
        )
    if pitch % 4 or pitch < elements:
        raise OperandError(
            f"the pitch of dst must be a multiple of 4 elements, at least n (got {shapes}); use "
            f"{-(-max(pitch, elements) // 4) * 4}"
        )
    check_aligned("cp.async.bulk", "x", x, 16)
    check_aligned("cp.async.bulk", "dst", dst, 16)
    check_aligned("4-byte loads", "alpha", alpha, 4)
    return rows, pitch, elements
