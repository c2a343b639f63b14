"""AllReduce, one interface over all ways its sums can be made.

Afterwards every rank's ``dst`` holds the sum of what all ranks gave. What differs is who adds, and how the
terms get there: around a ring, directly, up and down trees, in the switch, or by copy engines and a kernel
that adds.

Elements lie in memory and travel as their own type. Sums are made in float32, in an order that depends on the
ranks alone, so that all ranks get the same bits, each time; only the switch (``nvls``) chooses its own order.
"""

from __future__ import annotations

from kernels.ipc.shards import Sources
from kernels.ipc.symmetric import Symmetric
from kernels.reduce.config import ReduceConfig
from kernels.reduce.copy_engine import COPY_ENGINE
from kernels.reduce.direct import ONESHOT, TWOSHOT
from kernels.reduce.elements import Element
from kernels.reduce.message import all_reduce_message
from kernels.reduce.nvls import NVLS
from kernels.reduce.ring import RING
from kernels.reduce.ring_bulk import RING_BULK
from kernels.reduce.tree import TREE
from kernels.reduce.ways import ReduceInfo, Ways
from kernels.reduce.workspace import Workspace
from smfree.cuda import Kernel

__all__ = ["WAYS", "ReduceInfo", "allreduce", "prepare", "throughput_config", "ways"]

_WAYS = Ways("an AllReduce", (RING, RING_BULK, TREE, ONESHOT, TWOSHOT, NVLS, COPY_ENGINE))

WAYS = _WAYS.names
ways = _WAYS.reasons
throughput_config = _WAYS.throughput_config


def allreduce(
    workspace: Workspace,
    dst: Symmetric,
    src: Sources = None,
    *,
    dtype: object,
    way: str,
    config: ReduceConfig | None = None,
) -> ReduceInfo:
    """Queue an AllReduce on the workspace's streams and return; ``group.wait`` waits for it.

    ``dst`` is symmetric memory, ``src`` an array of as many bytes for each local rank, in order of
    ``group.members``, or symmetric memory, then on all ranks; None: in place. ``dtype``: "float32", "float16"
    or "bfloat16", whatever the arrays call their bytes. Any count and any alignment to whole elements is
    right; kernels move 16 bytes at a time where src and dst are alike modulo 16. ``config`` belongs to the
    way; None: its :func:`throughput_config`. src and dst are used in the order of ``workspace.stream(rank)``,
    with which the default stream is not ordered.

    Collective: every rank calls it with the same way, count and configuration, in the same order of calls of
    the workspace. Raises OperandError, ConfigError, GroupError before anything is queued.
    """
    message = all_reduce_message(workspace, dst, src, Element.of(dtype))
    return _WAYS.run(message, way, config, f"allreduce '{dst.label}'")


def prepare(
    workspace: Workspace,
    dst: Symmetric,
    src: Sources = None,
    *,
    dtype: object,
    way: str,
    config: ReduceConfig | None = None,
) -> tuple[Kernel, ...]:
    """Do what :func:`allreduce` with these arguments does only the first time: compile and load.

    Collective. For before a capture or a timed region. Reduces nothing. Returns the kernel of each local
    rank. Raises as :func:`allreduce`.
    """
    return _WAYS.prepare(all_reduce_message(workspace, dst, src, Element.of(dtype)), way, config)
