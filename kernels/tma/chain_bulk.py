"""Latency of one tile as a 1-D bulk copy, in a dependent chain (chain_bulk.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.chain import ChainConfig, Leg, run_chain
from kernels.common import KERNELS, LaunchInfo, check_available, check_call, tma_unavailable
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream


@dataclass(frozen=True)
class BulkChainConfig(ChainConfig):
    """How ``tma_chain_bulk`` is compiled; all three legs."""

    @property
    def static_shared_bytes(self) -> int:
        """``full``, padded to the alignment of the slots."""
        return 128

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "tma" / "chain_bulk.cu",
            {"TILE_BYTES": self.tile_bytes, "THREADS": self.threads, "LEG": self.leg.name},
        )


def latency_config(
    capabilities: Capabilities, tile_bytes: int, threads: int, leg: Leg = Leg.LOAD
) -> BulkChainConfig:
    """One CTA of ``threads`` threads moving tiles of ``tile_bytes``. Raises ConfigError."""
    check_available(tma_unavailable(capabilities))
    return BulkChainConfig(tile_bytes, threads, leg)


def chain(
    dst: DeviceArray | None,
    pool: DeviceArray,
    result: DeviceArray,
    *,
    config: BulkChainConfig,
    num_steps: int,
    stream: Stream | None = None,
) -> LaunchInfo:
    """Move ``num_steps`` tiles one after another; see :mod:`kernels.chain`. ``pool`` and ``dst``: uint8, same
    size, 16-byte aligned, not overlapping (``dst`` may be None for LOAD); ``result``: uint64 [3].

    Raises OperandError, ConfigError.
    """
    check_available(tma_unavailable(check_call(config, BulkChainConfig, pool=pool, result=result)))
    return run_chain(
        dst,
        pool,
        result,
        (dst or 0, pool),
        instruction="cp.async.bulk",
        config=config,
        num_steps=num_steps,
        stream=stream,
    )
