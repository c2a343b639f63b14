"""Latency of one tile as a 2-D tensor copy, in a dependent chain (chain_tensor.cu)."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.chain import ChainConfig, Leg, check_chain, run_chain
from kernels.common import KERNELS, LaunchInfo, check_available, check_call, tma_unavailable
from kernels.tma.tensor2d import row_bytes_for, rows_map
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream


@dataclass(frozen=True)
class TensorChainConfig(ChainConfig):
    """How ``tma_chain_tensor`` is compiled; all three legs. The box is the one of tensor2d.py."""

    def __post_init__(self) -> None:
        super().__post_init__()
        row_bytes_for(self.tile_bytes)

    @property
    def row_bytes(self) -> int:
        """The box's width."""
        return row_bytes_for(self.tile_bytes)

    @property
    def box_rows(self) -> int:
        """The box's rows."""
        return self.tile_bytes // self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """A tensor copy's shared address is 128-byte aligned."""
        return -(-self.tile_bytes // 128) * 128

    @property
    def static_shared_bytes(self) -> int:
        """``full``, padded to the alignment of the slots."""
        return 128

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "tma" / "chain_tensor.cu",
            {
                "ROW_BYTES": self.row_bytes,
                "BOX_ROWS": self.box_rows,
                "THREADS": self.threads,
                "LEG": self.leg.name,
            },
        )


def latency_config(
    capabilities: Capabilities, tile_bytes: int, threads: int, leg: Leg = Leg.LOAD
) -> TensorChainConfig:
    """One CTA of ``threads`` threads moving tiles of ``tile_bytes``. Raises ConfigError."""
    check_available(tma_unavailable(capabilities))
    return TensorChainConfig(tile_bytes, threads, leg)


def chain(
    dst: DeviceArray | None,
    pool: DeviceArray,
    result: DeviceArray,
    *,
    config: TensorChainConfig,
    num_steps: int,
    stream: Stream | None = None,
) -> LaunchInfo:
    """Move ``num_steps`` tiles one after another; see :mod:`kernels.chain`. ``pool`` and ``dst``: uint8, same
    size, 16-byte aligned, not overlapping (``dst`` may be None for LOAD); ``result``: uint64 [3].

    Raises OperandError, ConfigError.
    """
    instruction = "cp.async.bulk.tensor"
    check_available(tma_unavailable(check_call(config, TensorChainConfig, pool=pool, result=result)))
    check_chain(dst, pool, result, instruction=instruction, config=config, num_steps=num_steps)
    pool_map = rows_map(pool, config.row_bytes, config.box_rows)
    dst_map = pool_map if dst is None else rows_map(dst, config.row_bytes, config.box_rows)
    return run_chain(
        dst,
        pool,
        result,
        (dst_map, pool_map, pool),
        instruction=instruction,
        config=config,
        num_steps=num_steps,
        stream=stream,
    )
