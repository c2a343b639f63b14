"""Copy through registers: ``ld.global``, ``st.shared``, barrier, ``ld.shared``, ``st.global`` (copy.cu)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernels.common import (
    KERNELS,
    ConfigError,
    LaunchInfo,
    check_call,
    check_ctas,
    check_operands,
    check_shared,
    check_threads,
    check_tile,
    check_unroll,
    launch,
    persistent_grid,
    plain_integers,
    require,
)
from kernels.occupancy import BEST_BYTES_IN_FLIGHT_PER_SM, limiting_shared_bytes, most_ctas
from smfree.cuda import Capabilities, CudaSource, DeviceArray, Stream

VECTOR_BYTES = (4, 8, 16, 32)
BEST_UNROLL = 4
BASE_REGISTERS = 24
"""Registers beside the data, rounded up from what ptxas 13.5 uses; tests hold it to that."""


@dataclass(frozen=True)
class LsuCopyConfig:
    """How ``lsu_copy`` is compiled and launched.

    ``vector_bytes`` per load (32 needs 256-bit accesses: sm_100), ``unroll`` loads per thread before the
    first use, ``read_only`` loads through ``ld.global.nc``. ``min_shared_bytes`` limits the CTAs per SM.
    Raises ConfigError.
    """

    tile_bytes: int = 16384
    threads: int = 256
    vector_bytes: int = 16
    unroll: int = 4
    read_only: bool = False
    ctas_per_sm: int = 1
    min_shared_bytes: int = 0

    def __post_init__(self) -> None:
        plain_integers(self)
        check_tile(self.tile_bytes)
        check_threads(self.threads)
        require(
            self.vector_bytes in VECTOR_BYTES,
            "vector_bytes must be 4, 8, 16 or 32",
            self.vector_bytes,
            "use 16",
        )
        check_tile(self.tile_bytes, multiple_of=max(16, self.vector_bytes))
        check_unroll(self.unroll)
        check_ctas(self.ctas_per_sm)

    @property
    def num_stages(self) -> int:
        """One tile at a time."""
        return 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA."""
        return max(self.tile_bytes, self.min_shared_bytes)

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """Bytes that the CTA has asked for before it uses the first: ``unroll`` vectors per thread,
        or one vector per thread where the tile is smaller than a batch.
        """
        one = self.threads * self.vector_bytes
        return one * self.unroll if one * self.unroll <= self.tile_bytes else min(one, self.tile_bytes)

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "lsu" / "copy.cu",
            {
                "TILE_BYTES": self.tile_bytes,
                "THREADS": self.threads,
                "VECTOR_BYTES": self.vector_bytes,
                "UNROLL": self.unroll,
                "READ_ONLY": self.read_only,
                "CTAS_PER_SM": self.ctas_per_sm,
            },
        )


def unavailable(capabilities: Capabilities) -> str | None:
    """Loads and stores work everywhere."""
    del capabilities
    return None


def throughput_config(
    capabilities: Capabilities,
    tile_bytes: int,
    *,
    bytes_in_flight_per_sm: int | None = None,
    threads: int | None = None,
) -> LsuCopyConfig:
    """The configuration with exactly so many bytes in flight per SM, or the engine at its best when None.

    At its best: 32-byte vectors where the device has them, four loads per thread, as many CTAs as fit up to
    ``BEST_BYTES_IN_FLIGHT_PER_SM``. Raises ConfigError with the reason when it cannot be done.
    """
    check_tile(tile_bytes)
    if bytes_in_flight_per_sm is None:
        return _best(capabilities, tile_bytes, threads)
    used = threads or _natural_threads(tile_bytes, 16)
    for unroll in (8, 4, 2, 1):
        batch = used * unroll * 16
        in_flight = min(batch, tile_bytes)
        if (unroll > 1 and tile_bytes % batch) or bytes_in_flight_per_sm % in_flight:
            continue
        ctas = bytes_in_flight_per_sm // in_flight
        if ctas <= most_ctas(capabilities, used, tile_bytes, _registers(unroll, 16)):
            limit = limiting_shared_bytes(capabilities, used, tile_bytes, ctas)
            return LsuCopyConfig(tile_bytes, used, 16, unroll, False, ctas, limit)
    reached = max(
        min(used * unroll * 16, tile_bytes)
        * most_ctas(capabilities, used, tile_bytes, _registers(unroll, 16))
        for unroll in (8, 4, 2, 1)
    )
    raise ConfigError(
        f"{bytes_in_flight_per_sm} bytes in flight per SM cannot be had from {used} threads per CTA, 16 "
        f"bytes per load and tiles of {tile_bytes}: a CTA has at most its tile in flight, "
        f"{capabilities.name} holds at most {reached}, and the CTAs must divide it; use another tile or "
        "thread count"
    )


def copy(
    dst: DeviceArray, src: DeviceArray, *, config: LsuCopyConfig, stream: Stream | None = None
) -> LaunchInfo:
    """Copy ``src`` to ``dst``: any shape, dtype and length, both alike, aligned to ``config.vector_bytes``
    and at least 16, not overlapping. Queues on ``stream`` and returns; nothing is launched for zero bytes.

    Raises OperandError, ConfigError.
    """
    capabilities = check_call(config, LsuCopyConfig, src=src, dst=dst)
    require(
        config.vector_bytes <= 16 or capabilities.has_wide_access,
        "32-byte vectors need compute capability 10.0",
        "{}.{}".format(*capabilities.compute_capability),
        "use vector_bytes=16",
    )
    check_shared(config.shared_bytes, capabilities)
    wanted = max(16, config.vector_bytes)
    check_operands(f"{config.vector_bytes}-byte loads and stores", dst, src, align=wanted)
    if src.nbytes == 0:
        return LaunchInfo(None)
    grid = persistent_grid(capabilities, -(-src.nbytes // config.tile_bytes), config.ctas_per_sm)
    args = (dst, src, np.uint64(src.nbytes))
    return launch(
        config.source,
        grid,
        config.threads,
        args,
        device_array=src,
        shared_bytes=config.shared_bytes,
        stream=stream,
    )


def _best(capabilities: Capabilities, tile_bytes: int, threads: int | None) -> LsuCopyConfig:
    wide = capabilities.has_wide_access and tile_bytes % 32 == 0
    vector_bytes = 32 if wide else 16
    used = threads or _natural_threads(tile_bytes, vector_bytes)
    unroll = next(k for k in (BEST_UNROLL, 2, 1) if k == 1 or tile_bytes % (used * k * vector_bytes) == 0)
    fit = most_ctas(capabilities, used, tile_bytes, _registers(unroll, vector_bytes))
    require(
        fit > 0,
        f"a tile must fit a CTA's shared memory ({capabilities.max_shared_bytes_per_block} bytes on "
        f"{capabilities.name})",
        tile_bytes,
        "use a smaller tile",
    )
    in_flight = min(tile_bytes, used * unroll * vector_bytes)
    ctas = min(fit, -(-BEST_BYTES_IN_FLIGHT_PER_SM // in_flight))
    return LsuCopyConfig(tile_bytes, used, vector_bytes, unroll, False, ctas)


def _natural_threads(tile_bytes: int, vector_bytes: int) -> int:
    """As many warps as have ``BEST_UNROLL`` vectors of the tile for each thread, at least 1, at most 8."""
    return 32 * max(1, min(8, tile_bytes // (32 * vector_bytes * BEST_UNROLL)))


def _registers(unroll: int, vector_bytes: int) -> int:
    return max(32, -(-(BASE_REGISTERS + unroll * vector_bytes // 4) // 8) * 8)
