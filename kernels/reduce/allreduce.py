"""AllReduce, one interface over all ways its sums can be made.

Afterwards every rank's ``dst`` holds the sum of what all ranks gave. What differs is who adds, and how the
terms get there: around a ring, directly, up and down trees, in the switch, or by copy engines and a kernel
that adds.

Elements lie in memory and travel as their own type. Sums are made in float32, in an order that depends on the
ranks alone, so that all ranks get the same bits, each time; only the switch (``nvls``) chooses its own order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.common import ConfigError, LaunchInfo, require
from kernels.ipc.errors import GroupError
from kernels.ipc.group import Group
from kernels.ipc.shards import Sources
from kernels.ipc.symmetric import Symmetric
from kernels.reduce.config import KernelWay, ReduceConfig
from kernels.reduce.elements import Element
from kernels.reduce.message import AllReduceMessage, all_reduce_message
from kernels.reduce.ring import RING
from kernels.reduce.workspace import Workspace
from smfree.cuda import Path

_WAYS = {way.name: way for way in (RING,)}

WAYS = tuple(_WAYS)


@dataclass(frozen=True)
class ReduceInfo:
    """How a reduction went. ``path``: the slowest link it crossed; ``wire``: the type that travelled;
    ``launches``: the kernels, one per local rank."""

    way: str
    path: Path
    wire: Element
    launches: tuple[LaunchInfo, ...] = ()


def ways(group: Group, dtype: object = Element.F32) -> dict[str, str | None]:
    """Every way, and why the group cannot go it with such elements; None when it can."""
    element = Element.of(dtype)
    return {name: way.unavailable(group, element) for name, way in _WAYS.items()}


def throughput_config(workspace: Workspace, way: str, nbytes: int, *, dtype: object) -> ReduceConfig:
    """The way's configuration for messages of ``nbytes``."""
    element = Element.of(dtype)
    return _way(workspace.group, way, element).throughput_config(workspace, element, nbytes)


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
    ``group.members``, or symmetric memory; None: in place. ``dtype``: "float32", "float16" or "bfloat16",
    whatever the arrays call their bytes. Any count and any alignment to whole elements is right; kernels move
    16 bytes at a time where src and dst are alike modulo 16. ``config`` belongs to the way; None: its
    :func:`throughput_config`. src and dst are used in the order of ``workspace.stream(rank)``, with which the
    default stream is not ordered.

    Collective: every rank calls it with the same way, count and configuration, in the same order of calls of
    the workspace. Raises OperandError, ConfigError, GroupError before anything is queued.
    """
    message, found, chosen = _check(workspace, dst, src, dtype, way, config)
    info = ReduceInfo(way, workspace.group.path, message.element)
    if message.count == 0:
        return info
    if workspace.group.world_size == 1:
        _copy_own(message)
        return info
    what = f"allreduce '{dst.label}' ({way})"
    return ReduceInfo(way, info.path, info.wire, found.run(message, chosen, what))


def prepare(
    workspace: Workspace,
    dst: Symmetric,
    src: Sources = None,
    *,
    dtype: object,
    way: str,
    config: ReduceConfig | None = None,
) -> None:
    """Do what :func:`allreduce` with these arguments does only the first time: compile and load.

    Collective. For before a capture or a timed region. Reduces nothing; raises as :func:`allreduce`.
    """
    message, found, chosen = _check(workspace, dst, src, dtype, way, config)
    for member in workspace.group.members:
        found.prepare(member, message, chosen)


def _check(
    workspace: Workspace, dst: Symmetric, src: Sources, dtype: object, way: str, config: ReduceConfig | None
) -> tuple[AllReduceMessage, KernelWay, Any]:
    """The operands, the way, and the configuration that will be used."""
    workspace.group.check()
    element = Element.of(dtype)
    found = _way(workspace.group, way, element)
    message = all_reduce_message(workspace, dst, src, element)
    chosen = found.throughput_config(workspace, element, message.nbytes) if config is None else config
    require(
        type(chosen) is found.config,
        f"the config of way '{way}' is a {found.config.__name__}",
        type(chosen).__name__,
        "leave it out for the default",
    )
    return message, found, chosen


def _copy_own(message: AllReduceMessage) -> None:
    """What a group of one rank does."""
    (member,) = message.workspace.group.members
    dst, src = message.dst.array(member.rank), message.src(member.rank)
    if dst.ptr != src.ptr:
        dst.copy_from_device(src, stream=message.workspace.stream(member.rank))


def _way(group: Group, way: str, element: Element) -> KernelWay:
    """Raise GroupError for a way that there is not, ConfigError for one that the group cannot go."""
    if way not in _WAYS:
        raise GroupError(f"an AllReduce goes one of the ways {', '.join(WAYS)} (got {way!r})")
    reason = _WAYS[way].unavailable(group, element)
    if reason is not None:
        able = ", ".join(name for name, why in ways(group, element).items() if why is None)
        raise ConfigError(f"way '{way}' is not open to this group: {reason}; use one of {able}")
    return _WAYS[way]
