"""What a reduction needs besides its operands: signals, and scratch memory on every rank.

Reductions of one workspace run one after the other on every rank, those of two workspaces with streams of
their own at the same time. When a reduction ends on a rank, no rank reads scratch memory any more, but for
the part of the one-shots, which changes sides with every call: so any way may follow any other, without a
barrier between them.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kernels.common import check_whole, require
from kernels.ipc.errors import GroupError
from kernels.ipc.exchange import agree
from kernels.ipc.pool import rounded

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.member import Member
    from smfree.cuda import DeviceArray, Stream

SCRATCH_BYTES = 8 << 20
ONESHOT_BYTES = 256 << 10
MAX_CHANNELS = 128
"""CTAs of a reduction at most; nearly all SMs of an H100."""


class Workspace:
    """``scratch_bytes`` per rank for pieces under way, and room for one-shots of ``oneshot_bytes``; up to
    ``channels`` CTAs. A context manager.

    On the members' streams, or with ``own_streams`` on new ones: :meth:`stream`. Operands are used in the
    order of that stream, and symmetric memory that other streams used may be freed only after ``group.wait``.
    Kernels of several workspaces that run at the same time wait for each other's places on the SMs: all their
    CTAs together must be resident (case D24), which only their caller can know.

    With ``compare_calls`` the ranks' hosts compare every call before they queue it, so that ranks which
    differ are a GroupError on all: for tests, it makes the hosts wait for each other. Without it such calls
    end in a wait without end, or in wrong sums.

    Collective: every rank makes and closes it alike. Raises PoolError when the group's pool has no room,
    ConfigError, GroupError.
    """

    def __init__(
        self,
        group: Group,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
        oneshot_bytes: int = ONESHOT_BYTES,
        channels: int = MAX_CHANNELS,
        own_streams: bool = False,
        compare_calls: bool = False,
        label: str = "workspace",
    ) -> None:
        scratch_bytes = check_whole("scratch_bytes", scratch_bytes)
        oneshot_bytes = check_whole("oneshot_bytes", oneshot_bytes)
        channels = check_whole("channels", channels)
        for name, value in (("scratch_bytes", scratch_bytes), ("oneshot_bytes", oneshot_bytes)):
            require(value >= 0, f"{name} must be 0 or more", value, "use 1 MiB")
        require(1 <= channels <= 1024, "channels must be 1 to 1024", channels, "use 128")
        group.check()
        group.check_direct()
        self.group = group
        self.channels = channels
        self.label = label
        self.compare_calls = compare_calls
        self.oneshot_bytes = oneshot_bytes
        """The largest message of a one-shot that goes in one turn."""
        self._closed = False
        world_size = group.world_size
        sides = 2 * world_size * rounded(oneshot_bytes)
        shape = f"{scratch_bytes} bytes of scratch, one-shots of {oneshot_bytes}, {channels} channels"
        shape += ", calls compared" if compare_calls else ""
        agree(group.exchange, "making of a workspace", f"{shape} for '{label}'")
        self.memory = group.symmetric(rounded(scratch_bytes) + sides, f"scratch of {label}")
        self.scratch = self.memory.bytes_view(0, scratch_bytes)
        """Free between calls."""
        self.oneshot = self.memory.bytes_view(rounded(scratch_bytes), sides)
        """[2][rank] of ``rounded(oneshot_bytes)``: what the ranks gave in this call, and in the last one."""
        try:
            self.lane = group.open_lane(channels, label, slots_per_cta=5, own_streams=own_streams)
        except BaseException:
            self.memory.free()
            raise
        self.lane.host_steps = ("terms", "sums")  # of way ce

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error the ranks may not meet again; the group frees everything
            self.close()

    def __repr__(self) -> str:
        return f"Workspace('{self.label}', {self.scratch.nbytes} bytes of scratch, {self.group!r})"

    def check(self) -> None:
        """Raise GroupError when it was closed, or its group was or has failed."""
        self.group.check()
        if self._closed:
            raise GroupError(f"'{self.label}' was closed; make a new Workspace")

    def stream(self, rank: int) -> Stream:
        """On which the reductions of a local rank run."""
        return self.lane.stream(rank)

    def control(self, member: Member) -> DeviceArray:
        """What a kernel gets of the signals."""
        return self.lane.control(member.rank)

    @property
    def defines(self) -> dict[str, object]:
        """What every kernel is compiled with: the layout of the signals, and which slots are whose. First
        those of barriers over all ranks, then the two words of a ring's channels, then those of trees; the
        epochs of the last, without words, count the turns of one-shots."""
        return {
            **self.lane.layout.defines,
            "SIGNAL_RING_DATA": self.channels,
            "SIGNAL_RING_ROOM": 2 * self.channels,
            "SIGNAL_TREE": 3 * self.channels,
            "SIGNAL_ONESHOT": 4 * self.channels,
        }

    def close(self) -> None:
        """Wait for the group's work and give the memory back. Collective; twice is fine. A group that was
        closed or has failed gives it back itself."""
        if self._closed:
            return
        self._closed = True
        if self.group.alive:
            self.group.close_lane(self.lane)
            self.memory.free()
