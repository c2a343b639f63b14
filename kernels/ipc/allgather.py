"""AllGather, one interface over all ways its bytes can go.

Afterwards every rank's ``dst`` holds the shards of all ranks, in order of rank. What differs is who moves
them: copy engines (``ce``, ``staged``), threads (``sm.push``, ``sm.pull``), the TMA (``tma.push``,
``tma.pull``), or threads that store once and a switch that copies (``multicast``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kernels.common import ConfigError, LaunchInfo, require
from kernels.ipc import bulk, copy_engine, multicast, pull, push, staged
from kernels.ipc.copy_engine import CopyEngineConfig, place_own
from kernels.ipc.errors import GroupError
from kernels.ipc.gather import GatherConfig
from kernels.ipc.group import Group
from kernels.ipc.shards import Shards, Sources, make_shards
from kernels.ipc.symmetric import Symmetric
from smfree.cuda import Capabilities, CopyWay, Path

Config = CopyEngineConfig | GatherConfig


@dataclass(frozen=True)
class GatherInfo:
    """How an AllGather went.

    ``path``: the slowest link it crossed; ``copies``: how the driver got the copies, for ways that copy;
    ``launches``: the kernels, one per local rank. A record must keep ``way`` and ``path``: what was staged is
    no NVLink bandwidth (cases D15, D30).
    """

    way: str
    path: Path
    copies: CopyWay | None = None
    launches: tuple[LaunchInfo, ...] = ()


@dataclass(frozen=True)
class _Kernels:
    """A way whose kernels signal and move: the functions of its module."""

    module: Any
    config: type[GatherConfig]
    throughput_config: Callable[[Capabilities, int], GatherConfig]


_KERNELS = {
    "sm.pull": _Kernels(pull, pull.PullConfig, pull.throughput_config),
    "sm.push": _Kernels(push, push.PushConfig, push.throughput_config),
    "tma.pull": _Kernels(
        bulk, bulk.BulkPullConfig, partial(bulk.throughput_config, kind=bulk.BulkPullConfig)
    ),
    "tma.push": _Kernels(
        bulk, bulk.BulkPushConfig, partial(bulk.throughput_config, kind=bulk.BulkPushConfig)
    ),
    "multicast": _Kernels(multicast, multicast.MulticastConfig, multicast.throughput_config),
}

WAYS = ("ce", *_KERNELS, "staged")


def ways(group: Group) -> dict[str, str | None]:
    """Every way, and why the group cannot go it; None when it can."""
    reasons: dict[str, str | None] = {"ce": copy_engine.unavailable(group)}
    reasons.update((name, kernels.module.unavailable(group)) for name, kernels in _KERNELS.items())
    reasons["staged"] = None
    return reasons


def throughput_config(group: Group, way: str, largest_shard_bytes: int) -> Config | None:
    """The way's configuration for shards of at most so many bytes; None for ``staged``, which has none."""
    _check_way(group, way)
    if way in _KERNELS:
        return _KERNELS[way].throughput_config(group.capabilities, largest_shard_bytes)
    return CopyEngineConfig() if way == "ce" else None


def allgather(
    group: Group,
    dst: Symmetric,
    src: Sources = None,
    *,
    way: str,
    counts: Sequence[int] | None = None,
    config: Config | None = None,
) -> GatherInfo:
    """Queue an AllGather on the streams of ``group.members`` and return; ``group.wait`` waits for it.

    ``dst`` is symmetric memory with as many bytes as all shards have. ``src``: the shard of each local rank,
    in order of ``group.members`` (one array in a group of processes, or symmetric memory that holds the shard
    on every rank), of any dtype; None: in place, rank r's shard is its part of dst. ``counts``: bytes per
    rank, zeros too; None: equal ones. Any byte count and offset is right; kernels move 16 bytes at a time
    where source and destination are alike modulo 16. ``config`` belongs to the way; None: its
    :func:`throughput_config`. src and dst are used in the order of ``member.stream``, with which the default
    stream is not ordered: write them there, or wait for what writes them.

    Collective: every rank calls it with the same way, counts and configuration. Raises OperandError,
    ConfigError, GroupError before anything is queued.
    """
    shards, chosen = _check(group, dst, src, way, counts, config)
    if shards.offsets[-1] == 0:
        return GatherInfo(way, group.path)
    if group.world_size == 1:
        (member,) = group.members
        place_own(shards, member)
        return GatherInfo(way, group.path, CopyWay.ONE_BY_ONE)
    what = f"allgather '{dst.label}' ({way})"
    if way == "staged":
        staged.gather(group, shards, what)
        return GatherInfo(way, Path.STAGED, CopyWay.ONE_BY_ONE)
    if isinstance(chosen, CopyEngineConfig):
        return GatherInfo(way, group.path, copy_engine.gather(group, shards, chosen, what))
    return GatherInfo(way, group.path, launches=_launch(group, shards, way, chosen, what))


def prepare(
    group: Group,
    dst: Symmetric,
    src: Sources = None,
    *,
    way: str,
    counts: Sequence[int] | None = None,
    config: Config | None = None,
) -> None:
    """Do what :func:`allgather` with these arguments does only the first time: compile, load, page-lock.

    Collective. For before a capture or a timed region. Moves nothing; raises as :func:`allgather`.
    """
    shards, chosen = _check(group, dst, src, way, counts, config)
    if way == "staged":
        staged.reserve(group, shards.offsets[-1])
    if way in _KERNELS:
        for member in group.members:
            _KERNELS[way].module.prepare(member, shards, chosen)


def _check(
    group: Group,
    dst: Symmetric,
    src: Sources,
    way: str,
    counts: Sequence[int] | None,
    config: Config | None,
) -> tuple[Shards, Config | None]:
    """The shards, and the configuration that will be used. Raises OperandError, ConfigError, GroupError."""
    group.check()
    _check_way(group, way)
    shards = make_shards(group, dst, src, counts)
    chosen = throughput_config(group, way, max(shards.counts)) if config is None else config
    wanted = _KERNELS[way].config if way in _KERNELS else CopyEngineConfig if way == "ce" else type(None)
    require(
        isinstance(chosen, wanted),
        f"the config of way '{way}' is a {wanted.__name__}",
        type(chosen).__name__,
        "leave it out for the default",
    )
    return shards, chosen


def _launch(group: Group, shards: Shards, way: str, config: Any, what: str) -> tuple[LaunchInfo, ...]:
    """Load on every device before the first launch: a kernel that waits for its peers would keep a device
    from loading theirs."""
    module = _KERNELS[way].module
    kernels = [module.prepare(member, shards, config) for member in group.members]
    with group.queueing(what):
        return tuple(
            module.launch(member, shards, config, kernel)
            for member, kernel in zip(group.members, kernels, strict=True)
        )


def _check_way(group: Group, way: str) -> None:
    """Raise GroupError for a way that there is not, or that the group cannot go."""
    if way not in WAYS:
        raise GroupError(f"an AllGather goes one of the ways {', '.join(WAYS)} (got {way!r})")
    reason = ways(group)[way]
    if reason is not None:
        able = ", ".join(name for name, why in ways(group).items() if why is None)
        raise ConfigError(f"way '{way}' is not open to this group: {reason}; use one of {able}")
