"""AllGather by copy engines: no SM works, each rank pushes its shard to all others (way ``ce``).

A kernel cannot start a copy engine, so the host queues everything, and streams wait for each other through
memory: stream memory operations on the words of a slot that is the host's. Two epochs per call. *Entry*: the
rank's dst may be written. *Exit*: its shard has arrived at a peer; the write of the word comes after all
earlier work of its stream (CUDA driver API, cuStreamWriteValue32).

What is queued is in the order of its dependences on every rank: entry words, waits for them and copies, exit
words, waits for those. So even streams that share one hardware queue cannot wait in a circle.

The epochs are the host's and go into the operations as numbers, so a replayed graph would wait for the past:
capturing is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.common import ConfigError
from smfree.cuda import CopyWay, Stream
from smfree.cuda.peers import takes_batches

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.lane import Lane
    from kernels.ipc.member import Member
    from kernels.ipc.shards import Shards


@dataclass(frozen=True)
class CopyEngineConfig:
    """``batched``: all copies of a rank in one call (cuMemcpyBatchAsync), which waits for all peers. Else a
    stream per peer, whose copy waits for that peer alone. None: batched where the driver can."""

    batched: bool | None = None


def unavailable(group: Group) -> str | None:
    """Why copy engines cannot reach the peers, None when they can."""
    return group.direct_reason


def gather(group: Group, shards: Shards, config: CopyEngineConfig, what: str) -> CopyWay:
    """Queue the copies of the local ranks, ``what`` in errors; returns how the driver got them. Raises
    ConfigError."""
    lane = group.lane
    for member in group.members:
        refuse_capture(member.stream, "ce")
        if not _batched(member, config):
            for peer in peers_of(group, member):
                member.stream_to(peer)  # while nothing waits yet: making a stream may wait for the device
    with group.queueing(what):
        entry, leave = lane.next_host_epoch(), lane.next_host_epoch()
        for member in group.members:
            signal_peers(lane, member, member.stream, peers_of(group, member), entry)
        used = {_push(group, shards, member, config, entry, leave) for member in group.members}
        for member in group.members:
            await_peers(lane, member, member.stream, peers_of(group, member), leave)
    return CopyWay.BATCH if used == {CopyWay.BATCH} else CopyWay.ONE_BY_ONE


def peers_of(group: Group, member: Member) -> list[int]:
    """The other ranks, the next one first: at any time each rank is written by about one peer."""
    return [(member.rank + turn) % group.world_size for turn in range(1, group.world_size)]


def place_own(shards: Shards, member: Member) -> None:
    """Copy a shard that is not in place to its own dst."""
    if not shards.in_place(member.rank):
        place = shards.place(member.rank, member.rank, member.rank)
        place.copy_from_device(shards.src(member.rank), stream=member.stream)


def refuse_capture(stream: Stream, way: str, others: str = "sm.push, tma.push") -> None:
    """Raise ConfigError while the stream is captured. ``others``: ways that can be."""
    if stream.graph is not None:
        raise ConfigError(
            f"way '{way}' cannot be captured in a graph: its epochs are the host's, a replay would wait for "
            f"those of the capture; use a way whose kernels count ({others})"
        )


def _batched(member: Member, config: CopyEngineConfig) -> bool:
    return takes_batches(member.device, member.stream) if config.batched is None else config.batched


def _push(
    group: Group, shards: Shards, member: Member, config: CopyEngineConfig, entry: int, leave: int
) -> CopyWay:
    """Copy the shard to every peer that has entered, and say so there; the member's stream waits for it."""
    lane, peers, src = group.lane, peers_of(group, member), shards.src(member.rank)
    if _batched(member, config):
        await_peers(lane, member, member.stream, peers, entry)
        pairs = [(shards.place(member.rank, peer, member.rank), src) for peer in peers]
        way = member.device.copy_batch(pairs, stream=member.stream)
        signal_peers(lane, member, member.stream, peers, leave)
        place_own(shards, member)
        return way
    ready = member.stream.record()  # what came before the call: src is written, dst is free
    place_own(shards, member)
    for peer in peers:
        stream = member.stream_to(peer)
        stream.wait(ready)
        await_peers(lane, member, stream, [peer], entry)
        member.device.copy(shards.place(member.rank, peer, member.rank), src, stream=stream)
        signal_peers(lane, member, stream, [peer], leave)
    for peer in peers:
        member.stream.wait(member.stream_to(peer).record())
    return CopyWay.ONE_BY_ONE


def signal_peers(lane: Lane, member: Member, stream: Stream, peers: list[int], epoch: int) -> None:
    """Write the member's words at ``peers``, in the lane's slot of the host, after all earlier work of
    ``stream``."""
    word = lane.layout.word(lane.layout.host_slot, member.rank)
    pads = lane.pads(member.rank)
    for peer in peers:
        stream.write_value(pads[peer].ptr + word, epoch)


def await_peers(lane: Lane, member: Member, stream: Stream, peers: list[int], epoch: int) -> None:
    """Let ``stream`` wait for the words of ``peers`` here, and for what they did before them."""
    pad, layout = lane.pad(member.rank), lane.layout
    for peer in peers:
        word = layout.word(layout.host_slot, peer)
        stream.wait_value(pad.ptr + word, epoch, flush=member.flushes)
