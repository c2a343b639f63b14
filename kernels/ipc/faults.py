"""Mistakes in an exchange between GPUs, one by one: the correct kernel, and a switch that gets one wrong.

For reading and for tests. ``exchange`` sends words from every rank to every rank through ``faults.cu``, with
the mistake that the configuration names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kernels.common import KERNELS, OperandError, check_threads, check_whole, plain_integers, require
from kernels.ipc.signals import SignalLayout
from kernels.mbarrier.faults import Ending, Mistake
from smfree.cuda import CudaSource, DeviceArray

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.symmetric import Symmetric


class Fault(Mistake):
    """The mistakes of ``faults.cu``."""

    NONE = "nothing: the correct exchange", Ending.CORRECT
    RELEASE_MISSING = "the flag is stored relaxed: it may arrive before the data", Ending.BREAKS
    SYNC_MISSING = (
        "no bar.sync before the signal: other warps' data may not even be stored",
        Ending.BREAKS,
    )
    FLAGS_RESET = (
        "flags of 0 and 1, reset by who saw them: a slow rank resets the next signal",
        Ending.HANGS,
    )
    BYTE_FLAGS = "each peer writes a byte of one 8-byte word, which is read whole: a race", Ending.BREAKS
    EPOCH_REUSED = (
        "both barriers of a call have one epoch: the exit finds the entry's flags",
        Ending.BREAKS,
    )
    ENTRY_MISSING = (
        "no entry barrier: a fast rank overwrites what a slow one still reads",
        Ending.BREAKS,
    )


@dataclass(frozen=True)
class FaultConfig:
    """``threads`` per CTA (64 or more: one warp signals), a word each, and the fault. Raises ConfigError."""

    fault: Fault = Fault.NONE
    threads: int = 64
    ctas: int = 1

    def __post_init__(self) -> None:
        plain_integers(self)
        check_threads(self.threads)
        require(self.threads >= 64, "threads must be at least 64", self.threads, "use 64")
        check_whole("ctas", self.ctas)
        require(self.ctas >= 1, "ctas must be at least 1", self.ctas, "use 1")
        require(isinstance(self.fault, Fault), "fault must be a Fault", self.fault, "use Fault.NONE")

    @property
    def words(self) -> int:
        """Words that a rank sends to each rank in one call."""
        return self.ctas * self.threads

    def source(self, layout: SignalLayout) -> CudaSource:
        """What NVRTC gets."""
        own = {"THREADS": self.threads, "FAULT": self.fault.name}
        return CudaSource(KERNELS / "ipc" / "faults.cu", {**layout.defines, **own})


def exchange(
    group: Group,
    out: Mapping[int, DeviceArray],
    dst: Symmetric,
    src: Mapping[int, DeviceArray],
    *,
    config: FaultConfig,
    slow: int | None = None,
) -> None:
    """Queue calls of the exchange on all members' streams, as many as ``src`` has rows.

    ``src[rank]``: uint32 [calls, words]; ``dst``: [ranks, words] of uint32, used by every call;
    ``out[rank]``: [calls, ranks, words], what the rank saw. Rank ``slow`` sleeps after each wait, and
    its second warp before it sends. Raises OperandError.
    """
    group.check()
    group.check_direct()
    ranks, words = group.world_size, config.words
    calls = {member.rank: src[member.rank].shape[0] for member in group.members}
    for rank, count in calls.items():
        for name, array, shape in (
            ("src", src[rank], (count, words)),
            ("out", out[rank], (count, ranks, words)),
        ):
            if array.dtype != np.uint32 or array.shape != shape:
                raise OperandError(
                    f"{name}[{rank}] must be {shape} of uint32 (got {array.shape} {array.dtype}); reshape it"
                )
    if dst.nbytes < 4 * ranks * words:
        raise OperandError(f"dst must hold {4 * ranks * words} bytes (got {dst.nbytes}); allocate more")

    def args(rank: int) -> tuple[object, ...]:
        table = np.array(dst.pointers(rank), np.uint64)
        numbers = (np.uint32(n) for n in (rank, ranks if slow is None else slow, calls[rank]))
        return (out[rank], table, src[rank], group.lane.control(rank), *numbers)

    what = f"exchange with fault {config.fault.name}"
    group.launch(what, config.source(group.layout), config.ctas, config.threads, args)
