"""What the AllGather kernels share on the host: configuration and launch (gather.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kernels.common import KERNELS, LaunchInfo, require
from kernels.ipc.grid import GridConfig, launch_grid, load
from kernels.ipc.signals import SignalLayout
from smfree.cuda import CudaSource, Kernel

if TYPE_CHECKING:
    from kernels.ipc.group import Group, Member
    from kernels.ipc.shards import Shards


@dataclass(frozen=True, kw_only=True)
class GatherConfig(GridConfig):
    """``ctas`` CTAs per rank, a slot of the group's signals each. Raises ConfigError."""

    def source(self, layout: SignalLayout) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(KERNELS / "ipc" / self.file, {**layout.defines, **self.defines})


def prepare(member: Member, shards: Shards, config: GatherConfig) -> Kernel:
    """As :func:`kernels.ipc.grid.load`. Raises ConfigError also when the CTAs have no slots."""
    layout = shards.dst.group.layout
    require(
        config.ctas <= layout.slots,
        f"every CTA has a slot of the group's signals ({layout.slots})",
        f"{config.ctas} CTAs",
        "use fewer, or make the group with more slots",
    )
    return load(member, shards.dst.group, config, config.source(layout))


def launch(
    member: Member, shards: Shards, config: GatherConfig, kernel: Kernel, *, extra: Sequence[object] = ()
) -> LaunchInfo:
    """Queue the member's part on its stream: ``kernel`` is what :func:`prepare` gave, ``extra`` arguments go
    in front of the rank."""
    group: Group = shards.dst.group
    table = np.array([*shards.dst.pointers(member.rank), *shards.offsets], np.uint64)
    args = (table, shards.src(member.rank), group.lane.control(member.rank), *extra, np.uint32(member.rank))
    return launch_grid(kernel, config, args, member.stream)
