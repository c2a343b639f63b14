"""Groups of ranks on a machine's GPUs: made once, kept for all points, made anew when one has failed."""

from __future__ import annotations

from functools import lru_cache

from kernels.ipc.group import Group
from kernels.reduce.workspace import Workspace
from smfree.cuda import Device
from smfree.measure.fixture import Measure
from smfree.ranks import RankContext

PATIENCE_S = 60.0
"""After this a collective on real GPUs has hung; an emulated one says so itself."""


def group_for(measure: Measure, ranks: int, pool_bytes: int) -> Group:
    """A group of the machine's first GPUs; skips where there are fewer than ``ranks``. ``pool_bytes``: of
    symmetric memory per rank."""
    devices = tuple(measure.node(ranks))
    group = _group(devices, pool_bytes, measure.ranks)
    if group.failed is not None:
        _group.cache_clear()
        group = _group(devices, pool_bytes, measure.ranks)
    return group


@lru_cache(maxsize=12)
def _group(devices: tuple[Device, ...], pool_bytes: int, context: RankContext | None) -> Group:
    if context is not None:
        return Group.join(context.device, context.rendezvous, pool_bytes=pool_bytes)
    return Group.local(devices, pool_bytes=pool_bytes)


@lru_cache(maxsize=12)
def workspace_for(group: Group, scratch_bytes: int, oneshot_bytes: int) -> Workspace:
    """What reductions of the group need, made once."""
    return Workspace(group, scratch_bytes=scratch_bytes, oneshot_bytes=oneshot_bytes)


def finish(group: Group) -> None:
    """Wait for what the ranks do. Raises CollectiveTimeout, which names who waits for whom."""
    emulated = group.members[0].device.is_emulated
    group.wait(None if emulated else PATIENCE_S)
