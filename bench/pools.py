"""The tiles of the latency chains on a device. Kept for the size in use; the next size replaces them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bench.axes import L2_POOL_BYTES, LONG_STEPS, SHORT_STEPS
from kernels.chain import RESULT_WORDS, Leg, TilePool
from smfree.cuda import Device, DeviceArray
from smfree.measure.errors import MeasureError
from smfree.measure.records import Memory

CHAIN_TILES = LONG_STEPS - SHORT_STEPS
SEED = 2024


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

    def read_result(self, num_steps: int) -> tuple[float, float]:
        """(SM cycles, nanoseconds) of the walk that just ended. Raises MeasureError when it ended
        elsewhere."""
        cycles, nanoseconds, index = (int(word) for word in self.result.numpy())
        if index != self.host.final_index(num_steps):
            raise MeasureError(
                f"after {num_steps} tiles the kernel stood at {index}, the chain leads to "
                f"{self.host.final_index(num_steps)}; a tile's first word was wrong when it was read"
            )
        return float(cycles), float(nanoseconds)

    def verify(self, leg: Leg, num_steps: int) -> None:
        """Every byte of the destination against numpy. The load leg writes none: its proof is the index."""
        if leg is Leg.LOAD:
            return
        whole = leg is Leg.COPY and num_steps >= len(self.host.order)
        expected = (
            self.host.data if whole else self.host.expected(leg, num_steps, np.zeros_like(self.host.data))
        )
        check_bitwise(self.dst.numpy(), expected.reshape(-1))


def check_bitwise(found: np.ndarray, expected: np.ndarray) -> None:
    """Raise AssertionError with the first differences. The quick comparison comes first: the explaining one
    takes seconds for 256 MiB, and 300 points make that minutes.
    """
    if not np.array_equal(found.view(np.uint32), expected.view(np.uint32)):
        np.testing.assert_array_equal(found, expected)


@lru_cache(maxsize=4)
def host_pool(num_tiles: int, tile_bytes: int) -> TilePool:
    """Random tiles; the same for every engine and device."""
    return TilePool.random(num_tiles, tile_bytes, seed=SEED)


@lru_cache(maxsize=6)
def _buffers(device: Device, num_tiles: int, tile_bytes: int) -> ChainBuffers:
    host = host_pool(num_tiles, tile_bytes)
    pool = device.asarray(host.data.reshape(-1))
    dst = device.empty(pool.shape, np.uint8)
    return ChainBuffers(host, pool, dst, device.empty((RESULT_WORDS,), np.uint64))


def long_buffers(device: Device, tile_bytes: int, memory: Memory) -> ChainBuffers:
    """For the long walk: few enough tiles to stay in the L2, or one for every step."""
    if memory is Memory.L2:
        return _buffers(device, min(CHAIN_TILES, L2_POOL_BYTES // tile_bytes), tile_bytes)
    return _buffers(device, LONG_STEPS, tile_bytes)


def short_buffers(device: Device, tile_bytes: int) -> ChainBuffers:
    """For the short walk: tiles of its own, so that it does not warm those of the long one."""
    return _buffers(device, SHORT_STEPS, tile_bytes)
