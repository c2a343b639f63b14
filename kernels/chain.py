"""The host side of the latency chains: the pool of linked tiles, the legs, and what all four wrappers check.

One CTA moves tile after tile. A pool tile's first word is the index of the next one, a random cycle through
all tiles, so no address is known before the step before it has ended. The time of a step is the slope over
the number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from kernels.common import (
    LaunchInfo,
    OperandError,
    check_aligned,
    check_operands,
    check_shared,
    check_threads,
    check_tile,
    check_whole,
    launch,
    plain_integers,
    require,
)
from smfree.cuda import CudaSource, DeviceArray, Stream

RESULT_WORDS = 3
"""result[0] SM cycles, result[1] nanoseconds of the global timer, result[2] the index after the last step."""
INDEX_BYTES = 4


class Leg(StrEnum):
    """What a step does with its tile: global to shared, shared to global, or one after the other."""

    LOAD = "load"
    STORE = "store"
    COPY = "copy"


@dataclass(frozen=True)
class TilePool:
    """Tiles of random bytes, linked in a random cycle that starts at tile 0.

    ``data`` is uint8 [num_tiles, tile_bytes]; ``order`` holds the indices as a chain visits them.
    """

    data: NDArray[np.uint8]
    order: NDArray[np.uint32]

    @classmethod
    def random(cls, num_tiles: int, tile_bytes: int, *, seed: int) -> TilePool:
        """A pool from a seed. Raises ConfigError for a tile that is no multiple of 16 bytes or no tiles."""
        check_tile(tile_bytes)
        require(1 <= num_tiles < 2**32, "a pool has 1 to 2^32 - 1 tiles", num_tiles, "use 1024")
        rng = np.random.default_rng(seed)
        data = (
            np.frombuffer(rng.bytes(num_tiles * tile_bytes), np.uint8).reshape(num_tiles, tile_bytes).copy()
        )
        order = np.zeros(num_tiles, np.uint32)
        order[1:] = rng.permutation(np.arange(1, num_tiles, dtype=np.uint32))
        data.view(np.uint32)[order, 0] = np.roll(order, -1)
        return cls(data, order)

    def visited(self, num_steps: int) -> NDArray[np.uint32]:
        """The tiles that ``num_steps`` steps move, in order."""
        return self.order[np.arange(num_steps) % len(self.order)]

    def final_index(self, num_steps: int) -> int:
        """The index after the last step, which the kernel reports."""
        return int(self.order[num_steps % len(self.order)])

    def expected(self, leg: Leg, num_steps: int, before: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What ``dst`` (uint8, the pool's size, ``before`` its content) holds afterwards, shaped as the pool.

        LOAD leaves it alone, STORE writes tile 0 to each visited place, COPY each visited tile to its own.
        """
        after = before.reshape(self.data.shape).copy()
        if leg is not Leg.LOAD:
            seen = self.visited(num_steps)
            after[seen] = self.data[0] if leg is Leg.STORE else self.data[seen]
        return after


@dataclass(frozen=True)
class ChainConfig:
    """What all chains share. ``unroll`` matters where threads move the bytes. Raises ConfigError."""

    tile_bytes: int
    threads: int = 128
    leg: Leg = Leg.LOAD
    unroll: int = 0

    def __post_init__(self) -> None:
        plain_integers(self)
        check_tile(self.tile_bytes)
        check_threads(self.threads)
        known = [leg.value for leg in Leg]
        require(self.leg in known, f"leg must be one of {', '.join(known)}", self.leg, "use Leg.COPY")
        object.__setattr__(self, "leg", Leg(self.leg))
        if self.unroll == 0:
            object.__setattr__(self, "unroll", _unroll_for(self.tile_bytes, self.threads))
        require(1 <= self.unroll <= 8, "unroll must be 1 to 8", self.unroll, "use 0 to have it chosen")

    @property
    def num_stages(self) -> int:
        """One tile at a time."""
        return 1

    @property
    def ctas_per_sm(self) -> int:
        """One CTA on the whole device."""
        return 1

    @property
    def bytes_in_flight_per_cta(self) -> int:
        """One tile (where threads move it, at most ``threads`` x ``unroll`` x 16 bytes of it at a time)."""
        return self.tile_bytes

    @property
    def slot_bytes(self) -> int:
        """Distance of the two slots in shared memory."""
        return self.tile_bytes

    @property
    def static_shared_bytes(self) -> int:
        """Static shared memory: a barrier, padded to the alignment of the slots, where there is one."""
        return 0

    @property
    def source(self) -> CudaSource:
        """What NVRTC gets."""
        raise NotImplementedError

    def shared_bytes_for(self, num_tiles: int) -> int:
        """Dynamic shared memory: two slots, and for LEG STORE the indices of all tiles."""
        table = num_tiles * INDEX_BYTES if self.leg is Leg.STORE else 0
        return 2 * self.slot_bytes + table

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory without the indices of LEG STORE."""
        return 2 * self.slot_bytes


def run_chain(
    dst: DeviceArray | None,
    pool: DeviceArray,
    result: DeviceArray,
    pointers: Sequence[object],
    *,
    instruction: str,
    config: ChainConfig,
    num_steps: int,
    stream: Stream | None,
) -> LaunchInfo:
    """Check the operands and launch one CTA with ``pointers``, then num_tiles, num_steps and the result."""
    num_tiles = check_chain(dst, pool, result, instruction=instruction, config=config, num_steps=num_steps)
    args = (*pointers, np.uint32(num_tiles), np.uint32(num_steps), result)
    return launch(
        config.source,
        1,
        config.threads,
        args,
        device_array=pool,
        shared_bytes=config.shared_bytes_for(num_tiles),
        stream=stream,
    )


def check_chain(
    dst: DeviceArray | None,
    pool: DeviceArray,
    result: DeviceArray,
    *,
    instruction: str,
    config: ChainConfig,
    num_steps: int,
) -> int:
    """The number of tiles of a valid call. Raises OperandError, ConfigError."""
    if dst is None and config.leg is not Leg.LOAD:
        raise OperandError(f"leg {config.leg} writes dst (got None); pass an array of the pool's size")
    check_aligned(instruction, "pool", pool, 16)
    num_tiles, rest = divmod(pool.nbytes, config.tile_bytes)
    if num_tiles == 0 or rest:
        raise OperandError(
            f"the pool must be whole tiles of {config.tile_bytes} bytes (got {pool.nbytes} bytes); "
            "make it with TilePool.random"
        )
    if dst is not None:
        check_operands(instruction, dst, pool)
    if result.nbytes != RESULT_WORDS * 8 or result.dtype != np.uint64 or result.device is not pool.device:
        raise OperandError(
            f"result must be {RESULT_WORDS} uint64 on the pool's device (got {result!r}); "
            f"use device.empty({RESULT_WORDS}, np.uint64)"
        )
    check_whole("num_steps", num_steps)
    require(1 <= num_steps < 2**32, "num_steps must be 1 to 2^32 - 1", num_steps, "use 1024")
    check_shared(config.shared_bytes_for(num_tiles) + config.static_shared_bytes, pool.device.capabilities)
    return num_tiles


def _unroll_for(tile_bytes: int, threads: int) -> int:
    return next(k for k in (8, 4, 2, 1) if k == 1 or tile_bytes % (threads * k * 16) == 0)
