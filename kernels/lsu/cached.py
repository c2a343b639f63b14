"""Copy through registers with a cache operator of choice on loads and stores (cached.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    check_call,
    check_ctas,
    check_operands,
    check_threads,
    check_unroll,
    launch,
    persistent_grid,
    plain_integers,
    require,
)
from smfree.cuda import CudaSource, DeviceArray, Stream


class LoadCache(StrEnum):
    """Cache operators of loads (PTX ISA, "Cache Operators", and ``ld.global.nc``)."""

    CA = "ca"
    CG = "cg"
    CS = "cs"
    CV = "cv"
    NC = "nc"
    NC_NO_ALLOCATE = "nc_no_allocate"


class StoreCache(StrEnum):
    """Cache operators of stores."""

    WB = "wb"
    CS = "cs"
    WT = "wt"


@dataclass(frozen=True)
class CachedCopyConfig:
    """How ``lsu_cached`` is compiled and launched: 16 bytes per access, ``unroll`` loads per thread before
    its first store. ``LoadCache.NC`` and ``NC_NO_ALLOCATE`` ask that nobody writes ``src`` meanwhile.
    Raises ConfigError.
    """

    load: LoadCache = LoadCache.CA
    store: StoreCache = StoreCache.WB
    threads: int = 256
    unroll: int = 4
    ctas_per_sm: int = 1

    def __post_init__(self) -> None:
        plain_integers(self)
        for name, kind in (("load", LoadCache), ("store", StoreCache)):
            known = [operator.value for operator in kind]
            given = getattr(self, name)
            require(given in known, f"{name} must be one of {', '.join(known)}", given, f"use {known[0]}")
            object.__setattr__(self, name, kind(given))
        check_threads(self.threads)
        check_unroll(self.unroll)
        check_ctas(self.ctas_per_sm)

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """Bytes that the CTA has asked for before it uses the first."""
        return self.threads * self.unroll * 16

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "lsu" / "cached.cu",
            {
                "THREADS": self.threads,
                "UNROLL": self.unroll,
                "LOAD": self.load.name,
                "STORE": self.store.name,
            },
        )


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: CachedCopyConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy ``src`` to ``dst``: any shape, dtype and length, both alike, 16-byte aligned, not overlapping.
    Queues on ``stream`` and returns; nothing is launched for zero bytes.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, CachedCopyConfig, src=src, dst=dst)
    check_operands("16-byte loads and stores", dst, src)
    if src.nbytes == 0:
        return LaunchInfo(None)
    grid = persistent_grid(capabilities, -(-src.nbytes // config.bytes_in_flight_per_cta), config.ctas_per_sm)
    args = (dst, src, np.uint64(src.nbytes))
    return launch(config.source, grid, config.threads, args, device_array=src, shared_bytes=0, stream=stream)
