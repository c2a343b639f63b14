"""What kernels between GPUs share on the host, whose CTAs wait for those of other ranks: how many, how they
are loaded and launched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kernels.common import (
    LaunchInfo,
    check_shared,
    check_threads,
    check_unroll,
    check_whole,
    plain_integers,
    require,
)
from smfree.cuda import CudaSource, Kernel, Stream, TritonSource

if TYPE_CHECKING:
    from kernels.ipc.group import Group, Member

VECTOR_BYTES = 16
LINE_BYTES = 128
BYTES_PER_CTA = 16384
"""What a CTA should have to move before another one is worth its start-up: assumed, until measured."""
MAX_CTAS = 64
"""CTAs of a default configuration at most: an eighth of a group's slots, half the SMs of an H100."""


@dataclass(frozen=True, kw_only=True)
class GridConfig:
    """``ctas`` CTAs per rank; up to the number of SMs every one has an SM to itself. A thread has ``unroll``
    loads of 16 bytes from every source under way. Raises ConfigError."""

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
        """Bytes of one source that an SM with one CTA has asked for before it uses the first."""
        return self.threads * self.unroll * VECTOR_BYTES

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the layout of the signals."""
        return {"THREADS": self.threads, "UNROLL": self.unroll}


def suitable_ctas(nbytes: int) -> int:
    """CTAs that a default configuration gives to so many bytes that a rank moves at a time."""
    return max(1, min(MAX_CTAS, -(-nbytes // BYTES_PER_CTA)))


def load(member: Member, group: Group, config: GridConfig, source: CudaSource | TritonSource) -> Kernel:
    """Compile (cached) and load on the member's device: for all members before any launch, because loading
    may wait for the device.

    All CTAs of all ranks on the member's GPU wait for each other: raises ConfigError when they cannot be
    resident at once (case D24: those that run would wait for those that cannot start).
    """
    check_shared(config.shared_bytes, member.device.capabilities)
    kernel = member.device.compile(source).kernel()
    check_resident(member, kernel, group, config.ctas, config.threads, config.shared_bytes)
    return kernel


def check_resident(
    member: Member, kernel: Kernel, group: Group, ctas: int, threads: int, shared_bytes: int
) -> None:
    """Raise ConfigError unless so many CTAs of every rank on the member's GPU fit at once (case D24)."""
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


def launch_grid(kernel: Kernel, config: GridConfig, args: Sequence[object], stream: Stream) -> LaunchInfo:
    """Queue the kernel."""
    kernel.launch(config.ctas, config.threads, args, stream=stream, shared_bytes=config.shared_bytes)
    return LaunchInfo(kernel, config.ctas, config.threads, config.shared_bytes)
