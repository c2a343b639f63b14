"""How many CTAs share an SM, and how to hold that number at a fixed number of bytes in flight.

Regimes of a throughput measurement: *matched*, where every engine keeps the same bytes in flight per SM, and
*at its best*, where each takes what serves it. In the matched regime exactly ``ctas_per_sm`` CTAs may be
resident, or the block scheduler could pile them up on some SMs: dynamic shared memory is requested until one
more would not fit. No more than that, because on real GPUs shared memory is taken from the L1 cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.common import ConfigError
from smfree.cuda import Capabilities

SHARED_GRANULE_BYTES = 128
PLACED_STAGES = 4
"""Stages of a copy, at most: more CTAs keep as many bytes in flight as more stages."""
BEST_BYTES_IN_FLIGHT_PER_SM = 128 * 1024
"""Enough for every GPU of published.csv: B200 reaches 7.2 of 7.7 TB/s with 64 KiB in flight per SM."""


@dataclass(frozen=True)
class Placement:
    """Stages per CTA, CTAs per SM, and the least dynamic shared memory to request (0: what is needed)."""

    num_stages: int
    ctas_per_sm: int
    min_shared_bytes: int = 0


def most_ctas(capabilities: Capabilities, threads: int, shared_bytes: int, registers: int = 32) -> int:
    """CTAs of ``threads`` threads and ``shared_bytes`` of shared memory that fit one SM; 0 when none does."""
    if shared_bytes > capabilities.max_shared_bytes_per_block:
        return 0
    return min(
        capabilities.max_ctas_per_sm,
        capabilities.max_threads_per_sm // threads,
        capabilities.registers_per_sm // (threads * registers),
        capabilities.shared_bytes_per_sm // _allocated(capabilities, shared_bytes),
    )


def limiting_shared_bytes(
    capabilities: Capabilities, threads: int, shared_bytes: int, ctas: int, *, static_bytes: int = 0
) -> int:
    """The least dynamic shared memory per CTA, at least ``shared_bytes``, of which no more than ``ctas`` fit.

    ``static_bytes`` is what the kernel has besides.

    Raises ConfigError when not even ``ctas`` fit.
    """
    fit = most_ctas(capabilities, threads, shared_bytes + static_bytes)
    if fit < ctas:
        raise ConfigError(
            f"{ctas} CTAs of {threads} threads and {shared_bytes} bytes of shared memory per SM do not fit "
            f"on {capabilities.name} (at most {fit} do); use fewer, larger or deeper CTAs"
        )
    if ctas + 1 > min(capabilities.max_ctas_per_sm, capabilities.max_threads_per_sm // threads):
        return shared_bytes
    too_small = capabilities.shared_bytes_per_sm // (ctas + 1)
    wanted = too_small // SHARED_GRANULE_BYTES * SHARED_GRANULE_BYTES + SHARED_GRANULE_BYTES
    return max(shared_bytes, wanted - capabilities.reserved_shared_bytes_per_cta - static_bytes)


def place_stages(
    capabilities: Capabilities,
    tile_bytes: int,
    threads: int,
    *,
    stage_bytes: int,
    static_bytes: int = 0,
    bytes_in_flight_per_sm: int | None,
) -> Placement:
    """Stages and CTAs for an engine that keeps whole tiles in flight, ``stage_bytes`` of shared memory each.

    With ``bytes_in_flight_per_sm`` exactly so many (deepest pipeline first), else up to
    ``BEST_BYTES_IN_FLIGHT_PER_SM``. Raises ConfigError with the reason when it cannot be done.
    """
    if bytes_in_flight_per_sm is None:
        return _best_stages(capabilities, tile_bytes, threads, stage_bytes, static_bytes)
    tiles, rest = divmod(bytes_in_flight_per_sm, tile_bytes)
    if tiles == 0 or rest:
        raise ConfigError(
            f"bytes in flight per SM must be a multiple of the tile, which is in flight as a whole (got "
            f"{bytes_in_flight_per_sm} and tiles of {tile_bytes}); use a tile that divides it"
        )
    for num_stages in _descending(stages for stages in range(1, PLACED_STAGES + 1) if tiles % stages == 0):
        shared_bytes = num_stages * stage_bytes
        ctas = tiles // num_stages
        if ctas <= most_ctas(capabilities, threads, shared_bytes + static_bytes):
            limit = limiting_shared_bytes(
                capabilities, threads, shared_bytes, ctas, static_bytes=static_bytes
            )
            if limit + static_bytes <= capabilities.max_shared_bytes_per_block:
                return Placement(num_stages, ctas, limit)
    reached = max(
        stages * most_ctas(capabilities, threads, stages * stage_bytes + static_bytes) * tile_bytes
        for stages in range(1, PLACED_STAGES + 1)
    )
    raise ConfigError(
        f"{bytes_in_flight_per_sm} bytes in flight per SM are out of reach with tiles of {tile_bytes}: at "
        f"most {PLACED_STAGES} stages and the CTAs of {threads} threads that fit on {capabilities.name} hold "
        f"{reached}; "
        "use larger tiles"
    )


def _best_stages(
    capabilities: Capabilities, tile_bytes: int, threads: int, stage_bytes: int, static_bytes: int
) -> Placement:
    for num_stages in range(PLACED_STAGES, 0, -1):
        fit = most_ctas(capabilities, threads, num_stages * stage_bytes + static_bytes)
        if fit:
            wanted = -(-BEST_BYTES_IN_FLIGHT_PER_SM // (num_stages * tile_bytes))
            return Placement(num_stages, max(1, min(fit, wanted)))
    raise ConfigError(
        f"a tile of {tile_bytes} bytes must fit a CTA's shared memory "
        f"({capabilities.max_shared_bytes_per_block} bytes on {capabilities.name}); use a smaller tile"
    )


def _allocated(capabilities: Capabilities, shared_bytes: int) -> int:
    granules = -(-shared_bytes // SHARED_GRANULE_BYTES)
    return max(granules * SHARED_GRANULE_BYTES + capabilities.reserved_shared_bytes_per_cta, 1)


def _descending(values: Iterable[int]) -> list[int]:
    return sorted(values, reverse=True)
