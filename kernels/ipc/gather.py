"""What the AllGather kernels share on the host: configuration and launch (gather.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kernels.common import (
    KERNELS,
    LaunchInfo,
    check_shared,
    check_threads,
    check_unroll,
    check_whole,
    plain_integers,
    require,
)
from kernels.ipc.signals import SignalLayout
from smfree.cuda import CudaSource, Kernel

if TYPE_CHECKING:
    from kernels.ipc.group import Group, Member
    from kernels.ipc.shards import Shards

VECTOR_BYTES = 16
LINE_BYTES = 128
"""A CTA's slice of a shard is whole lines (gather.cuh), so a shard feeds at most one CTA per line."""
BYTES_PER_CTA = 16384
"""What a CTA should have to move before another one is worth its start-up: assumed, until measured."""
MAX_CTAS = 64
"""CTAs of a default configuration at most: an eighth of a group's slots, half the SMs of an H100."""


@dataclass(frozen=True, kw_only=True)
class GatherConfig:
    """``ctas`` CTAs per rank, a slot each; up to the number of SMs every one has an SM to itself. A thread
    has ``unroll`` loads of 16 bytes under way. Raises ConfigError.
    """

    file: ClassVar[str]
    """The kernel's file."""

    ctas: int = 16
    threads: int = 256
    unroll: int = 4

    def __post_init__(self) -> None:
        plain_integers(self)
        check_whole("ctas", self.ctas)
        require(self.ctas >= 1, "ctas must be at least 1", self.ctas, "use 16")
        check_threads(self.threads)
        check_unroll(self.unroll)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA: none, the bytes go through registers."""
        return 0

    @property
    def bytes_in_flight_per_sm(self) -> int:
        """Bytes of loads that an SM with one CTA has asked for before it uses the first."""
        return self.threads * self.unroll * VECTOR_BYTES

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the layout of the signals."""
        return {"THREADS": self.threads, "UNROLL": self.unroll}

    def source(self, layout: SignalLayout) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(KERNELS / "ipc" / self.file, {**layout.defines, **self.defines})


def suitable_ctas(largest_shard_bytes: int) -> int:
    """CTAs that a default configuration gives to shards of so many bytes at most."""
    return max(1, min(MAX_CTAS, -(-largest_shard_bytes // BYTES_PER_CTA)))


def prepare(member: Member, shards: Shards, config: GatherConfig) -> Kernel:
    """Compile (cached) and load on the member's device: for all members before any launch, because loading
    may wait for the device.

    Raises ConfigError when the CTAs have no slots, or cannot be resident all at once (case D24: those that
    run would wait for those that cannot start).
    """
    layout = shards.dst.group.layout
    require(
        config.ctas <= layout.slots,
        f"every CTA has a slot of the group's signals ({layout.slots})",
        f"{config.ctas} CTAs",
        "use fewer, or make the group with more slots",
    )
    check_shared(config.shared_bytes, member.device.capabilities)
    kernel = member.device.compile(config.source(layout)).kernel()
    check_resident(member, kernel, shards.dst.group, config.ctas, config.threads, config.shared_bytes)
    return kernel


def check_resident(
    member: Member, kernel: Kernel, group: Group, ctas: int, threads: int, shared_bytes: int
) -> None:
    """All CTAs of all ranks on the member's GPU wait for each other, so they must fit at once. Raises
    ConfigError (case D24)."""
    sms = member.device.capabilities.num_sms
    ranks = group.uuids.count(member.device.uuid)
    resident = kernel.occupancy(threads, shared_bytes) * sms
    require(
        ctas * ranks <= resident,
        f"all CTAs must be resident at once, {resident} are on {sms} SMs with {threads} threads and "
        f"{shared_bytes} bytes of shared memory each",
        f"{ctas} of each of {ranks} ranks on this GPU" if ranks > 1 else ctas,
        "use fewer",
    )


def launch(
    member: Member, shards: Shards, config: GatherConfig, kernel: Kernel, *, extra: Sequence[object] = ()
) -> LaunchInfo:
    """Queue the member's part on its stream: ``kernel`` is what :func:`prepare` gave, ``extra`` arguments go
    in front of the rank."""
    group: Group = shards.dst.group
    table = np.array([*shards.dst.pointers(member.rank), *shards.offsets], np.uint64)
    args = (table, shards.src(member.rank), group.lane.control(member.rank), *extra, np.uint32(member.rank))
    kernel.launch(config.ctas, config.threads, args, stream=member.stream, shared_bytes=config.shared_bytes)
    return LaunchInfo(kernel, config.ctas, config.threads, config.shared_bytes)
