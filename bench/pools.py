"""The tiles of the latency chains on a device. Kept for the size in use; the next size replaces them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bench.axes import L2_POOL_BYTES, LONG_STEPS, SHORT_STEPS
from kernels.chain import RESULT_WORDS, TilePool
from smfree.cuda import Device, DeviceArray
from smfree.measure.records import Memory

CHAIN_TILES = LONG_STEPS - SHORT_STEPS
SEED = 2024


def check_bitwise(found: np.ndarray, expected: np.ndarray) -> None:
    """Raise AssertionError with the first differences. The quick comparison comes first: the explaining one
    takes seconds for 256 MiB, and 300 points make that minutes."""
    if not np.array_equal(found, expected):
        np.testing.assert_array_equal(found, expected)


@dataclass(frozen=True)
class ChainBuffers:
    """A pool of linked tiles on the host and on a device, a destination of its size, and the kernel's
    result words."""

    host: TilePool
    pool: DeviceArray
    dst: DeviceArray
    result: DeviceArray

    def clear(self) -> None:
        """Zero the destination, so that a tile that never arrived shows."""
        self.dst.fill(0)


@lru_cache(maxsize=2)
def host_pool(num_tiles: int, tile_bytes: int) -> TilePool:
    """Random tiles; the same for every engine and device."""
    return TilePool.random(num_tiles, tile_bytes, seed=SEED)


@lru_cache(maxsize=4)
def _buffers(device: Device, num_tiles: int, tile_bytes: int) -> ChainBuffers:
    host = host_pool(num_tiles, tile_bytes)
    pool = device.asarray(host.data.reshape(-1))
    dst = device.empty(pool.shape, np.uint8)
    return ChainBuffers(host, pool, dst, device.empty((RESULT_WORDS,), np.uint64))


def buffers_for(device: Device, tile_bytes: int, memory: Memory) -> ChainBuffers:
    """Buffers for chains over tiles of ``tile_bytes``: few enough tiles to stay in the L2, or one for every
    step."""
    if memory is Memory.L2:
        return _buffers(device, min(CHAIN_TILES, L2_POOL_BYTES // tile_bytes), tile_bytes)
    return _buffers(device, LONG_STEPS, tile_bytes)
