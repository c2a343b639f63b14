"""Latency of one tile through registers, in a dependent chain (chain.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.chain import ChainConfig, Leg, run_chain
from kernels.common import KERNELS, LaunchInfo, check_call
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream


@dataclass(frozen=True)
class LsuChainConfig(ChainConfig):
    """How ``lsu_chain`` is compiled; all three legs."""

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "lsu" / "chain.cu",
            {
                "TILE_BYTES": self.tile_bytes,
                "THREADS": self.threads,
                "UNROLL": self.unroll,
                "LEG": self.leg.name,
            },
        )


def latency_config(
    capabilities: Capabilities, tile_bytes: int, threads: int, leg: Leg = Leg.LOAD
) -> LsuChainConfig:
    """One CTA of ``threads`` threads moving tiles of ``tile_bytes``. Raises ConfigError."""
    del capabilities
    return LsuChainConfig(tile_bytes, threads, leg)


def chain(
    dst: DeviceArray | None,
    pool: DeviceArray,
    result: DeviceArray,
    *,
    config: LsuChainConfig,
    num_steps: int,
    stream: Stream | None = None,
) -> LaunchInfo:
    """Move ``num_steps`` tiles one after another; see :mod:`kernels.chain`. ``pool`` and ``dst``: uint8, same
    size, 16-byte aligned, not overlapping (``dst`` may be None for LOAD); ``result``: uint64 [3].

    Raises OperandError, ConfigError.
    """
    check_call(config, LsuChainConfig, pool=pool, result=result)
    return run_chain(
        dst,
        pool,
        result,
        (dst or 0, pool),
        instruction="16-byte loads and stores",
        config=config,
        num_steps=num_steps,
        stream=stream,
    )
