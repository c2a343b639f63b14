"""What AllReduce and ReduceScatter share: the ways there are, and what a call gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernels.common import ConfigError, LaunchInfo, check_whole, require
from kernels.ipc.errors import GroupError
from kernels.ipc.exchange import agree
from kernels.reduce.elements import Element
from smfree.cuda import Kernel, Path

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.reduce.config import ReduceConfig, Way
    from kernels.reduce.message import Message
    from kernels.reduce.workspace import Workspace


@dataclass(frozen=True)
class ReduceInfo:
    """How a reduction went. ``path``: the slowest link it crossed; ``wire``: the type that travelled;
    ``launches``: the kernels, one per local rank."""

    way: str
    path: Path
    wire: Element
    launches: tuple[LaunchInfo, ...] = ()


class Ways:
    """The ways of one collective, which errors call ``collective``."""

    def __init__(self, collective: str, ways: Sequence[Way]) -> None:
        self._collective = collective
        self._ways = {way.name: way for way in ways}
        self.names = tuple(self._ways)

    def reasons(self, group: Group) -> dict[str, str | None]:
        """Every way, and why the group cannot go it; None when it can."""
        return {name: way.unavailable(group) for name, way in self._ways.items()}

    def find(self, group: Group, name: str) -> Way:
        """Raise GroupError for a way that there is not, ConfigError for one that the group cannot go."""
        if name not in self.names:
            raise GroupError(
                f"{self._collective} goes one of the ways {', '.join(self.names)} (got {name!r})"
            )
        reasons = self.reasons(group)
        if reasons[name] is not None:
            able = ", ".join(other for other, why in reasons.items() if why is None)
            raise ConfigError(
                f"way '{name}' is not open to this group: {reasons[name]}; use one of {able or 'none'}"
            )
        return self._ways[name]

    def throughput_config(self, workspace: Workspace, name: str, nbytes: int) -> ReduceConfig:
        """The way's configuration for messages of ``nbytes``, which is what every rank gives."""
        require(check_whole("nbytes", nbytes) >= 0, "nbytes must be 0 or more", nbytes, "pass the message's")
        return self.find(workspace.group, name).throughput_config(workspace, int(nbytes))

    def choose(self, message: Message, name: str, config: ReduceConfig | None) -> tuple[Way, Any]:
        """The way, and the configuration that will be used. Raises GroupError, ConfigError."""
        workspace = message.workspace
        way = self.find(workspace.group, name)
        chosen = way.throughput_config(workspace, message.nbytes) if config is None else config
        require(
            type(chosen) is way.config,
            f"the config of way '{name}' is a {way.config.__name__}",
            type(chosen).__name__,
            "leave it out for the default",
        )
        return way, chosen

    def prepare(self, message: Message, name: str, config: ReduceConfig | None) -> tuple[Kernel, ...]:
        """Compile and load on every member's device."""
        way, chosen = self.choose(message, name, config)
        return tuple(way.prepare(member, message, chosen) for member in message.workspace.group.members)

    def run(self, message: Message, name: str, config: ReduceConfig | None, what: str) -> ReduceInfo:
        """Queue it: nothing for no element, a copy in a group of one. ``what``: for errors."""
        way, chosen = self.choose(message, name, config)
        group = message.workspace.group
        if message.workspace.compare_calls:
            agree(group.exchange, self._collective, f"{message}, {name}, {chosen}")
        launches: tuple[LaunchInfo, ...] = ()
        if message.count and group.world_size > 1:
            launches = way.run(message, chosen, f"{what} ({name})")
        elif message.count:
            (member,) = group.members
            dst, src = message.target(member.rank), message.src(member.rank)
            if dst.ptr != src.ptr:
                dst.copy_from_device(src, stream=message.workspace.stream(member.rank))
        return ReduceInfo(name, group.path, message.element, launches)
