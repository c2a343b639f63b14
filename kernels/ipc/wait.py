"""Where the host waits for collectives, and what it does when they do not end.

A kernel that polls for a peer also polls its own abort word. The host writes that word with a copy on another
stream, which runs while the kernel does; the kernel notes for whom it waited and returns. Waits in the stream
itself (the copy engines') are let go by writing what they wait for. Then the streams run empty, the notes are
read, and the error names them. The group is of no further use: its ranks are out of step.

Copies that waited for a peer start when they are let go, so the peer's dst may change while it still uses it.
The peers are told before that, and nothing is right until ``group.wait`` has returned: it looks for failed
peers once more after the last stream has run empty.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kernels.ipc.errors import GroupError
from kernels.ipc.signals import RECORD, behind, step_text
from smfree.cuda import CudaHostError, DeviceArray, KernelFaultError, Stream
from smfree.ranks.errors import PeerLost, RankError, named

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.lane import Lane
    from kernels.ipc.member import Member

GRACE_S = 5.0
"""How long the local ranks may take to give up: a kernel looks at its abort word every few microseconds."""
MOST_WAITS = 8
"""That an error tells of."""
NEWS_S = 0.5
"""How much later than a device's failure the news of a peer's death, its cause, may come."""


class CollectiveTimeout(RankError):
    """A collective that did not end in time. ``waits``: which local rank waited for which peer."""

    def __init__(self, message: str, waits: Iterable[PeerWait] = ()) -> None:
        super().__init__(message)
        self.waits = tuple(waits)


@dataclass(frozen=True)
class PeerWait:
    """Local rank ``rank`` waited for ``peer`` in vain, at ``step``: it wanted epoch ``wanted`` and saw
    ``seen``. ``ctas``: those of a kernel that did, with the numbers of the first; none for a wait in a
    stream. ``lane``: its label, where it is not the group's own."""

    rank: int
    peer: int
    step: str
    ctas: tuple[int, ...]
    wanted: int
    seen: int
    lane: str = ""

    def __str__(self) -> str:
        more = f" and {len(self.ctas) - 1} more" if len(self.ctas) > 1 else ""
        where = f"CTA {self.ctas[0]}{more}" if self.ctas else ""
        where += f" in '{self.lane}'" if self.lane else ""
        return (
            f"rank {self.rank} waits for rank {self.peer} at the {self.step}: "
            f"{where.strip()}{', ' if where else ''}epoch {self.wanted} wanted, {self.seen} seen"
        )


def wait(group: Group, timeout_s: float | None) -> None:
    """See :meth:`kernels.ipc.group.Group.wait`."""
    if timeout_s is not None and not timeout_s >= 0:
        raise GroupError(f"timeout_s is 0 or more seconds (got {timeout_s!r}); None waits for ever")
    streams = group.streams
    what = ", ".join(group.calls) or "queued work"
    try:
        if timeout_s is None and group.in_process:
            for stream in streams:
                stream.synchronize()
        elif not _drained(streams, timeout_s, lambda: group.exchange.check(f"group.wait: {what}")):
            raise CollectiveTimeout(f"{what} did not end within {timeout_s:g} s")
        group.exchange.check(f"group.wait: {what}")
    except Exception as error:
        failure = _failure(group, what, error)
        if failure is error:
            raise
        raise failure from (None if isinstance(error, CollectiveTimeout) else error)
    for stream in streams:
        stream.settled()
    group.calls.clear()


def give_up(group: Group, reason: str) -> _GivenUp:
    """Tell the peers that the local ranks have failed, and make these end what they do."""
    given_up = _GivenUp()
    able = given_up.each(group.members, lambda member: given_up.streams.extend(_stream_waits(group, member)))
    group.exchange.fail(reason)
    able = given_up.each(able, lambda member: _release(group, member))
    able = given_up.each(able, lambda member: given_up.drain(group, member))
    able = given_up.each(able, lambda member: given_up.kernels.extend(_kernel_waits(group, member)))
    given_up.asked.update(member.rank for member in able)
    return given_up


@dataclass
class _GivenUp:
    """What the local ranks did when they were made to give up."""

    kernels: list[PeerWait] = field(default_factory=list)
    streams: list[PeerWait] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)
    """The local ranks whose notes could be read."""
    rest: list[str] = field(default_factory=list)
    """What else there is to say, of ranks that did not end and of devices that failed."""

    def each(self, members: Iterable[Member], step: Callable[[Member], None]) -> list[Member]:
        """The members for which ``step`` worked; a device that has failed does nothing any more."""
        able = []
        for member in members:
            try:
                step(member)
                able.append(member)
            except CudaHostError as error:
                self.rest.append(f"rank {member.rank}'s device has failed: {str(error).splitlines()[0]}")
        return able

    def drain(self, group: Group, member: Member) -> None:
        """Wait until the member's streams are empty."""
        lanes = [lane.stream(member.rank) for lane in group.lanes]
        if not _drained([member.control_stream, *member.streams, *lanes], GRACE_S):
            self.rest.append(f"rank {member.rank} did not end {GRACE_S:g} s after it was told to")

    @property
    def waits(self) -> list[PeerWait]:
        """Those for ranks that wait for nobody first: the others may wait because of them."""
        idle = self.idle
        return sorted(self.kernels + self.streams, key=lambda each: each.peer not in idle)

    @property
    def idle(self) -> list[int]:
        """Local ranks that are waited for and wait for nobody."""
        found = self.kernels + self.streams
        return sorted({each.peer for each in found} & self.asked - {each.rank for each in found})

    def __str__(self) -> str:
        waits = self.waits
        told = [str(each) for each in waits[:MOST_WAITS]]
        if len(waits) > MOST_WAITS:
            told.append(f"{len(waits) - MOST_WAITS} more waits")
        return "; ".join([*told, *self._cause(), *self.rest]) or "no rank noted a wait"

    def _cause(self) -> list[str]:
        """What a chain of waits leads to, where all its ranks are known."""
        waits, idle = self.waits, self.idle
        if idle:
            return [_waits_for_nobody(idle)]
        if waits and {each.peer for each in waits} <= self.asked:
            return ["all wait for each other: their calls differ, or need more time"]
        return []


def _failure(group: Group, what: str, error: Exception) -> Exception:
    """Give up because of ``error``; what the caller is told."""
    cause = error
    if isinstance(error, CudaHostError) and not group.in_process:
        cause = _lost_peer(group, what) or error  # whose death took memory away
    given_up = give_up(group, f"{type(cause).__name__}: {cause}")
    failure = cause
    if isinstance(cause, PeerLost):
        failure = PeerLost(f"{cause}; {what} was given up: {given_up}", cause.ranks)
    elif isinstance(cause, CollectiveTimeout):
        failure = CollectiveTimeout(
            f"{cause}: {given_up}. Look at what the ranks that were waited for are doing: every rank makes "
            "the same calls in the same order",
            given_up.waits,
        )
    elif isinstance(cause, KernelFaultError):
        for line in _polled_words(group, str(cause)):
            cause.add_note(line)
    group.failed = failure
    return failure


def _polled_words(group: Group, report: str) -> Iterable[str]:
    """What an emulated deadlock's report calls addresses, where they are signals of ranks in this process."""
    found = {int(text, 16) for text in re.findall(r"polls 4 bytes at (0x[0-9a-f]+)", report)}
    waits = {}
    for lane in group.lanes:
        for member in group.members:
            start = lane.pad(member.rank).ptr
            for address in found & set(range(start, start + lane.layout.pad_bytes, 4)):
                slot, peer = divmod((address - start) // 4, lane.layout.world_size)
                waits[address] = (member.rank, peer, slot, lane)
    for address, (rank, peer, slot, lane) in sorted(waits.items(), key=lambda item: item[1][:3]):
        where = f"CTA {slot % lane.ctas}, slot {slot} of '{lane.label}'"
        yield f"{address:#x}: rank {rank} waits for rank {peer}, {where}"
    idle = {peer for _, peer, _, _ in waits.values()} - {rank for rank, _, _, _ in waits.values()}
    if group.in_process and idle:
        yield _waits_for_nobody(idle)


def _waits_for_nobody(ranks: Collection[int]) -> str:
    verb = "waits" if len(ranks) == 1 else "wait"
    return f"{named(ranks)} {verb} for nobody: not called yet, late, or failed"


def _lost_peer(group: Group, what: str) -> PeerLost | None:
    """The peer that is gone, if one is: news of it may come a moment later than what its end does."""
    deadline = time.monotonic() + NEWS_S
    try:
        while time.monotonic() < deadline:
            group.exchange.check(f"group.wait: {what}")
            time.sleep(0.01)
    except PeerLost as lost:
        return lost
    except RankError:
        pass
    return None


def _drained(
    streams: Iterable[Stream], timeout_s: float | None, check: Callable[[], None] | None = None
) -> bool:
    """Poll until all streams are idle; False when ``timeout_s`` is over before."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = 20e-6
    left = list(streams)
    while True:
        left = [stream for stream in left if not stream.query()]
        if not left:
            return True
        if check is not None:
            check()
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 1e-3)


def _release(group: Group, member: Member) -> None:
    """Set the abort words, and the host's signal words to what the streams wait for."""
    stream = member.control_stream
    for lane in group.lanes:
        words = lane.last_words[member.rank].array
        words[0] = 1
        words[1:] = lane.host_epoch
        abort = lane.control(member.rank).bytes_view(lane.layout.abort_offset, 4)
        member.device.copy(abort, words[:1].view(np.uint8), stream=stream)
        member.device.copy(_host_words(lane, member), words[1:].view(np.uint8), stream=stream)
    if group.staging is not None:
        group.staging.words[member.rank] = group.staging.last_wanted


def _host_words(lane: Lane, member: Member) -> DeviceArray:
    """The words of the host's slot in the member's pad."""
    layout = lane.layout
    return lane.pad(member.rank).bytes_view(layout.word(layout.host_slot, 0), 4 * layout.world_size)


def _stream_waits(group: Group, member: Member) -> Iterable[PeerWait]:
    """What the host's slots lack: a stream waits for the peers that are furthest behind. Barriers come in
    pairs."""
    for lane in group.lanes:
        wanted = lane.host_epoch
        seen = _host_words(lane, member).numpy(stream=member.control_stream).view(np.uint32)
        late = {peer: int(value) for peer, value in enumerate(seen) if peer != member.rank}
        late = {peer: value for peer, value in late.items() if behind(wanted, value)}
        most = max(((wanted - value) % 2**32 for value in late.values()), default=0)
        for peer, value in late.items():
            if (wanted - value) % 2**32 == most:
                text = f"copies' {lane.host_steps[most % 2]}"
                yield PeerWait(member.rank, peer, text, (), wanted, value, _name(group, lane))
    if group.staging is not None:
        wanted = group.staging.last_wanted
        for peer, value in enumerate(map(int, group.staging.words[member.rank])):
            if peer != member.rank and behind(wanted, value):
                yield PeerWait(member.rank, peer, "host buffer", (), wanted, value)


def _kernel_waits(group: Group, member: Member) -> Iterable[PeerWait]:
    """What the aborted kernels noted, one entry per lane, peer and step."""
    for lane in group.lanes:
        layout = lane.layout
        block = lane.control(member.rank).bytes_view(layout.records_offset)
        records = block.numpy(stream=member.control_stream).view(RECORD)
        records = records.reshape(layout.slots, layout.world_size)
        for peer in range(layout.world_size):
            column = records[:, peer]
            for step, number in sorted({(int(r["step"]), int(r["number"])) for r in column if r["step"]}):
                slots = np.flatnonzero((column["step"] == step) & (column["number"] == number))
                first, ctas = column[slots[0]], np.unique(slots % lane.ctas).tolist()
                yield PeerWait(
                    member.rank, peer, step_text(step, number), tuple(ctas),
                    int(first["wanted"]), int(first["seen"]), _name(group, lane),
                )  # fmt: skip


def _name(group: Group, lane: Lane) -> str:
    return "" if lane is group.lane else lane.label
