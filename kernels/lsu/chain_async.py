"""Latency of one tile brought by ``cp.async``, in a dependent chain (chain_async.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.chain import ChainConfig, Leg, run_chain
from kernels.common import KERNELS, LaunchInfo, check_available, check_call, require
from kernels.lsu.copy_async import unavailable
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream


@dataclass(frozen=True)
class AsyncChainConfig(ChainConfig):
    """How ``lsu_chain_async`` is compiled; legs LOAD and COPY. Raises ConfigError."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.leg is not Leg.STORE,
            "cp.async only loads: legs are load and copy",
            self.leg,
            "use the LSU chain, whose stores are the same",
        )

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "lsu" / "chain_async.cu",
            {
                "TILE_BYTES": self.tile_bytes,
                "THREADS": self.threads,
                "UNROLL": self.unroll,
                "LEG": self.leg.name,
            },
        )


def latency_config(
    capabilities: Capabilities, tile_bytes: int, threads: int, leg: Leg = Leg.LOAD
) -> AsyncChainConfig:
    """One CTA of ``threads`` threads moving tiles of ``tile_bytes``. Raises ConfigError."""
    check_available(unavailable(capabilities))
    return AsyncChainConfig(tile_bytes, threads, leg)


def chain(
    dst: DeviceArray | None,
    pool: DeviceArray,
    result: DeviceArray,
    *,
    config: AsyncChainConfig,
    num_steps: int,
    stream: Stream | None = None,
) -> LaunchInfo:
    """Move ``num_steps`` tiles one after another; see :mod:`kernels.chain`. ``pool`` and ``dst``: uint8, same
    size, 16-byte aligned, not overlapping (``dst`` may be None for LOAD); ``result``: uint64 [3].

    Raises OperandError, ConfigError.
    """
    check_available(unavailable(check_call(config, AsyncChainConfig, pool=pool, result=result)))
    return run_chain(
        dst,
        pool,
        result,
        (dst or 0, pool),
        instruction="cp.async and 16-byte stores",
        config=config,
        num_steps=num_steps,
        stream=stream,
    )
