"""What the kernels of all reductions share on the host: configuration, checks, launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kernels.common import KERNELS, LaunchInfo, check_whole, require
from kernels.ipc import grid
from kernels.ipc.grid import LINE_BYTES, GridConfig, launch_grid, load
from smfree.cuda import CudaSource, Kernel

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.member import Member
    from kernels.reduce.elements import Element
    from kernels.reduce.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class ReduceConfig(GridConfig):
    """``ctas`` CTAs per rank, a channel each. Raises ConfigError."""

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

    def source(
        self, workspace: Workspace, element: Element, more: Mapping[str, object] | None = None
    ) -> CudaSource:
        """What NVRTC gets."""
        return CudaSource(
            KERNELS / "reduce" / self.file,
            {"ELEMENT": element.define, **workspace.defines, **self.defines, **(more or {})},
        )


@dataclass(frozen=True, kw_only=True)
class PieceConfig(ReduceConfig):
    """A CTA takes pieces of ``piece_bytes``, whole lines, one at a time. Raises ConfigError."""

    piece_bytes: int = 32768

    def __post_init__(self) -> None:
        super().__post_init__()
        size = check_whole("piece_bytes", self.piece_bytes)
        whole = size > 0 and size % LINE_BYTES == 0
        default = type(self).piece_bytes
        require(whole, f"piece_bytes must be a positive multiple of {LINE_BYTES}", size, f"use {default}")

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the workspace's and the element."""
        return {**super().defines, "PIECE_BYTES": self.piece_bytes}


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
        """As :func:`kernels.ipc.grid.load`. Raises ConfigError also when the CTAs have no channels, or the
        pieces no scratch memory."""
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
        source = config.source(workspace, message.element, self.defines(message))
        return load(member, workspace.group, config, source)

    def launch(self, member: Member, message: Operands, config: ReduceConfig, kernel: Kernel) -> LaunchInfo:
        """Queue the member's part on its stream; ``kernel`` is what :meth:`prepare` gave."""
        args = self.arguments(member, message, config)
        return launch_grid(kernel, config, args, message.workspace.stream(member.rank))

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
    return min(workspace.channels, grid.suitable_ctas(nbytes))


def direct_reason(group: Group) -> str | None:
    """Why the ranks' kernels cannot store to each other, None when they can."""
    return group.direct_reason
