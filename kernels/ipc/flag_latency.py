"""One-way latency of a signal between two GPUs, by ping-pong on the device (flag_latency.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kernels.common import (
    KERNELS,
    OperandError,
    check_aligned,
    check_clock,
    check_flag,
    check_threads,
    check_whole,
    plain_integers,
    require,
)
from kernels.ipc.signals import SignalLayout
from smfree.cuda import CudaSource, DeviceArray

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.symmetric import Symmetric

RESULT_WORDS = 2
"""SM cycles and nanoseconds of all rounds."""


@dataclass(frozen=True, kw_only=True)
class FlagLatencyConfig:
    """``data_bytes`` that go in front of each flag, in whole 16-byte vectors by ``threads`` threads, and
    whether the flag is stored with ``release`` (data needs it). Raises ConfigError."""

    data_bytes: int = 0
    release: bool = True
    threads: int = 128

    def __post_init__(self) -> None:
        plain_integers(self)
        check_threads(self.threads)
        check_flag("release", self.release)
        check_whole("data_bytes", self.data_bytes)
        require(
            self.data_bytes >= 0 and self.data_bytes % 16 == 0,
            "data_bytes must be a multiple of 16, or 0",
            self.data_bytes,
            "round it up",
        )
        require(
            self.release or self.data_bytes == 0,
            "data in front of the flag needs release=True",
            f"{self.data_bytes} bytes",
            "send none, or release them",
        )

    def source(self, layout: SignalLayout) -> CudaSource:
        """What NVRTC gets."""
        own = {"THREADS": self.threads, "DATA_BYTES": self.data_bytes, "RELEASE": self.release}
        return CudaSource(KERNELS / "ipc" / "flag_latency.cu", {**layout.defines, **own})


def ping_pong(
    group: Group,
    results: dict[int, DeviceArray],
    landing: Symmetric,
    *,
    first: int,
    second: int,
    config: FlagLatencyConfig,
    num_rounds: int,
) -> None:
    """Queue ``num_rounds`` messages from rank ``first`` to ``second`` and back on all members' streams.

    ``results``: per local rank 2 uint64, of which a player's get SM cycles and nanoseconds of all rounds;
    halved and divided by the rounds that is one way (:func:`one_way_ns`). ``landing``: where the data go, at
    least ``data_bytes``. Raises OperandError, ConfigError; GroupError when the ranks' kernels cannot reach
    each other.
    """
    group.check()
    group.check_direct()
    check_whole("num_rounds", num_rounds)
    require(1 <= num_rounds < 2**20, "num_rounds is 1 to 1048575", num_rounds, "call it several times")
    for name, rank in (("first", first), ("second", second)):
        check_whole(name, rank)
        last = group.world_size - 1
        require(0 <= rank <= last, f"{name} is a rank, 0 to {last}", rank, "use another")
    require(first != second, "first and second are two ranks", first, "choose two")
    if landing.nbytes < config.data_bytes:
        raise OperandError(
            f"landing must hold the data of a message, {config.data_bytes} bytes (got {landing.nbytes}); "
            "allocate more"
        )
    for member in group.members:
        result = results[member.rank]
        if result.dtype != np.uint64 or result.nbytes != 8 * RESULT_WORDS:
            raise OperandError(
                f"results[{member.rank}] must be {RESULT_WORDS} uint64 (got {result.shape} {result.dtype}); "
                "use device.empty(2, np.uint64)"
            )
        check_aligned("16-byte stores", "landing", landing.array(member.rank), 16)
        check_clock(member.device)
    other = {first: second, second: first}

    def args(rank: int) -> tuple[object, ...]:
        target = landing.pointers(rank)[other.get(rank, rank)]
        numbers = (np.uint32(n) for n in (rank, first, second, num_rounds))
        return (results[rank], np.uint64(target), group.lane.control(rank), *numbers)

    what = f"flag latency of ranks {first} and {second}"
    group.launch(what, config.source(group.layout), 1, config.threads, args)


def one_way_ns(result: DeviceArray, num_rounds: int) -> float:
    """Half a round trip in nanoseconds, from a player's result. Copies it to the host."""
    return int(result.numpy()[1]) / (2 * num_rounds)
