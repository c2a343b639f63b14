"""A barrier over all ranks in their streams (barrier.cu): the host does not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels.common import KERNELS
from kernels.ipc.signals import SignalLayout
from smfree.cuda import CudaSource

if TYPE_CHECKING:
    from kernels.ipc.group import Group

THREADS = 32


def source(layout: SignalLayout) -> CudaSource:
    """What NVRTC gets."""
    return CudaSource(KERNELS / "ipc" / "barrier.cu", {**layout.defines, "THREADS": THREADS})


def stream_barrier(group: Group) -> None:
    """What follows in any member's stream sees what came before in every rank's. Queues and returns.

    Raises GroupError when the ranks' kernels cannot reach each other.
    """
    group.check()
    group.check_direct()
    group.launch(
        "barrier", source(group.layout), 1, THREADS, lambda rank: (group.lane.control(rank), np.uint32(rank))
    )
