"""What the kernels of all reductions share on the host: configuration, checks, launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

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
from kernels.ipc.gather import VECTOR_BYTES, check_resident
from smfree.cuda import CudaSource, Kernel

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.member import Member
    from kernels.reduce.elements import Element
    from kernels.reduce.workspace import Workspace

MAX_CTAS = 64
"""CTAs of a default configuration at most: half the SMs of an H100."""
BYTES_PER_CTA = 16384
"""What a CTA should have to send before another one is worth its start-up: assumed, until measured."""


@dataclass(frozen=True, kw_only=True)
class ReduceConfig:
    """``ctas`` CTAs per rank, a channel each; a thread has ``unroll`` loads of 16 bytes from every source
    under way. Raises ConfigError."""

    file: ClassVar[str]
    """The kernel's file; the kernel has its name."""

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
        """Dynamic shared memory per CTA."""
        return 0

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory per rank, where the number of ranks does not matter."""
        return 0

    def scratch_for(self, world_size: int) -> int:
        """Scratch memory per rank, in a group of so many."""
        del world_size
        return self.scratch_bytes

    @property
    def oneshot_bytes(self) -> int:
        """Room in the one-shots' part, per rank and side."""
        return 0

    @property
    def bytes_in_flight_per_sm(self) -> int:
        """Bytes of one source that an SM with one CTA has asked for before it uses the first."""
        return self.threads * self.unroll * VECTOR_BYTES

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the workspace's and the element."""
        return {"THREADS": self.threads, "UNROLL": self.unroll}

    def source(
        self, workspace: Workspace, element: Element, more: Mapping[str, object] | None = None
    ) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "reduce" / self.file,
            {"ELEMENT": element.define, **workspace.defines, **self.defines, **(more or {})},
        )


class Operands(Protocol):
    """What is reduced, checked: a :class:`kernels.reduce.message.Message` or a product."""

    @property
    def workspace(self) -> Workspace: ...

    @property
    def element(self) -> Element: ...


@dataclass(frozen=True)
class Way(ABC):
    """How a reduction is done. ``throughput_config(workspace, nbytes)``: the configuration for such messages.
    ``unavailable(group)``: why the group cannot go it, or None."""

    name: str
    config: type[ReduceConfig]
    throughput_config: Callable[[Workspace, int], ReduceConfig]
    unavailable: Callable[[Group], str | None]

    @abstractmethod
    def prepare(self, member: Member, message: Any, config: Any) -> Kernel:
        """Compile (cached) and load the kernel on the member's device."""

    @abstractmethod
    def run(self, message: Any, config: Any, what: str) -> tuple[LaunchInfo, ...]:
        """Queue it for all local ranks. ``what``: for errors."""


@dataclass(frozen=True)
class KernelWay(Way):
    """A way whose kernel does everything: one launch per rank. ``arguments(member, message, config)``: what
    the kernel gets; ``defines(message)``: what it is compiled with besides."""

    arguments: Callable[[Member, Any, Any], Sequence[object]]
    defines: Callable[[Any], Mapping[str, object]] = lambda message: {}

    def prepare(self, member: Member, message: Operands, config: ReduceConfig) -> Kernel:
        """Compile (cached) and load on the member's device: for all members before any launch, because
        loading may wait for the device.

        Raises ConfigError when the CTAs have no channels, the pieces no scratch memory, or when the CTAs
        cannot be resident all at once (case D24: those that run would wait for those that cannot start).
        """
        workspace = message.workspace
        require(
            config.ctas <= workspace.channels,
            f"every CTA has one of the workspace's {workspace.channels} channels",
            f"{config.ctas} CTAs",
            "use fewer, or a Workspace with more channels",
        )
        scratch_bytes = config.scratch_for(workspace.group.world_size)
        require(
            scratch_bytes <= workspace.scratch.nbytes,
            f"the workspace has {workspace.scratch.nbytes} bytes of scratch memory",
            f"{scratch_bytes} bytes needed by {config}",
            "use smaller pieces or fewer CTAs, or a Workspace with more scratch_bytes",
        )
        require(
            config.oneshot_bytes <= workspace.oneshot_bytes,
            f"the workspace's one-shots have {workspace.oneshot_bytes} bytes per turn",
            f"{config.oneshot_bytes} bytes needed by {config}",
            "use smaller pieces or fewer CTAs, or a Workspace with more oneshot_bytes",
        )
        check_shared(config.shared_bytes, member.device.capabilities)
        kernel = member.device.compile(
            config.source(workspace, message.element, self.defines(message))
        ).kernel()
        check_resident(member, kernel, workspace.group, config.ctas, config.threads, config.shared_bytes)
        return kernel

    def launch(self, member: Member, message: Operands, config: ReduceConfig, kernel: Kernel) -> LaunchInfo:
        """Queue the member's part on its stream; ``kernel`` is what :meth:`prepare` gave."""
        kernel.launch(
            config.ctas, config.threads, self.arguments(member, message, config),
            stream=message.workspace.stream(member.rank), shared_bytes=config.shared_bytes,
        )  # fmt: skip
        return LaunchInfo(kernel, config.ctas, config.threads, config.shared_bytes)

    def run(self, message: Operands, config: ReduceConfig, what: str) -> tuple[LaunchInfo, ...]:
        """Prepare on every member's device, then launch on all."""
        group = message.workspace.group
        kernels = [self.prepare(member, message, config) for member in group.members]
        with group.queueing(what):
            return tuple(
                self.launch(member, message, config, kernel)
                for member, kernel in zip(group.members, kernels, strict=True)
            )


def suitable_ctas(workspace: Workspace, nbytes: int) -> int:
    """CTAs that a default configuration gives to so many bytes that a rank sends at a time."""
    return max(1, min(MAX_CTAS, workspace.channels, -(-nbytes // BYTES_PER_CTA)))


def direct_reason(group: Group) -> str | None:
    """Why the ranks' kernels cannot store to each other, None when they can."""
    return group.direct_reason
