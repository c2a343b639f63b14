"""ReduceScatter, one interface over all ways its sums can be made.

Afterwards rank r's ``dst`` holds chunk r of the sum of what all ranks gave
(:func:`kernels.reduce.message.chunk_of`). Elements and sums are those of an AllReduce
(kernels/reduce/allreduce.py); the chunk has the bits that an AllReduce the same way gives it.
"""

from __future__ import annotations

from kernels.ipc.shards import Sources
from kernels.reduce.config import ReduceConfig
from kernels.reduce.direct import DIRECT
from kernels.reduce.elements import Element
from kernels.reduce.message import reduce_scatter_message
from kernels.reduce.ring import RING
from kernels.reduce.ring_bulk import RING_BULK
from kernels.reduce.ways import ReduceInfo, Ways
from kernels.reduce.workspace import Workspace
from smfree.cuda import Kernel

__all__ = ["WAYS", "ReduceInfo", "prepare", "reduce_scatter", "throughput_config", "ways"]

_WAYS = Ways("a ReduceScatter", (RING, RING_BULK, DIRECT))

WAYS = _WAYS.names
ways = _WAYS.reasons
throughput_config = _WAYS.throughput_config


def reduce_scatter(
    workspace: Workspace,
    dst: Sources,
    src: Sources,
    *,
    dtype: object,
    way: str,
    config: ReduceConfig | None = None,
) -> ReduceInfo:
    """Queue a ReduceScatter on the workspace's streams and return; ``group.wait`` waits for it.

    ``src``: the whole message of each local rank, in order of ``group.members``, or symmetric memory;
    ``dst``: as many arrays, for the chunk of each. A dst may be its chunk of the rank's src. ``dtype``,
    ``config``, alignment and streams as :func:`kernels.reduce.allreduce.allreduce` has them.

    Collective: every rank calls it with the same way, count and configuration, in the same order of calls of
    the workspace. Raises OperandError, ConfigError, GroupError before anything is queued.
    """
    message = reduce_scatter_message(workspace, dst, src, Element.of(dtype))
    return _WAYS.run(message, way, config, f"reduce_scatter of {message.nbytes} bytes")


def prepare(
    workspace: Workspace,
    dst: Sources,
    src: Sources,
    *,
    dtype: object,
    way: str,
    config: ReduceConfig | None = None,
) -> tuple[Kernel, ...]:
    """Do what :func:`reduce_scatter` with these arguments does only the first time: compile and load.

    Collective. For before a capture or a timed region. Reduces nothing. Returns the kernel of each local
    rank. Raises as :func:`reduce_scatter`.
    """
    return _WAYS.prepare(reduce_scatter_message(workspace, dst, src, Element.of(dtype)), way, config)
