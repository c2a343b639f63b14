"""AllReduce by copy engines, and a kernel that adds (add.cu), since no copy engine can: way ``ce``.

Rank r copies its part of every chunk to the rank that owns it, into scratch memory; the owner adds the N
terms, in order of rank, and copies the sum to all. Chunks for which scratch memory is too small go in turns.

A turn has two barriers of the host's slot, by stream memory operations (kernels/ipc/copy_engine.py). *Terms*:
those of all ranks have arrived, so each has begun, and has read what this turn's sums overwrite. *Sums*: they
have arrived, so every rank has added, and scratch memory is free.

What is queued is in the order of its dependences on every rank, and on one stream of each.

A rank sends 2 (N - 1)/N S, as around a ring. Its memory is read (3 N - 2)/N times S and written (2 N - 1)/N
times: sums come back to memory and are read again to be sent, for which a two-shot, whose threads add and
send, reads (N - 1)/N S less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kernels.common import LaunchInfo, require
from kernels.ipc.copy_engine import await_peers, peers_of, refuse_capture, signal_peers
from kernels.ipc.grid import LINE_BYTES
from kernels.reduce.config import ReduceConfig, Way, direct_reason, suitable_ctas
from kernels.reduce.message import AllReduceMessage, piece_of
from smfree.cuda import Kernel

if TYPE_CHECKING:
    from kernels.ipc.member import Member
    from kernels.reduce.workspace import Workspace
    from smfree.cuda import DeviceArray

NAME = "ce"
MAX_CTAS = 1024
"""Of a configuration: as many as a workspace may have channels."""


@dataclass(frozen=True, kw_only=True)
class AddConfig(ReduceConfig):
    """How ``add`` is compiled and launched. Its CTAs wait for nobody. Raises ConfigError."""

    file: ClassVar[str] = "add.cu"

    unroll: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.ctas <= MAX_CTAS, f"ctas must be at most {MAX_CTAS}", self.ctas, "use 16")

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the workspace's and the element."""
        return {**super().defines, "PIECE_BYTES": self.bytes_in_flight_per_sm}


def throughput_config(workspace: Workspace, nbytes: int) -> AddConfig:
    """For messages of ``nbytes``, as many as an ``add`` reads."""
    return AddConfig(ctas=suitable_ctas(workspace, nbytes))


def slot_bytes(workspace: Workspace) -> int:
    """Scratch memory for the terms of one peer; a turn moves as much of every chunk. Raises ConfigError."""
    peers = max(1, workspace.group.world_size - 1)
    size = workspace.scratch.nbytes // peers // LINE_BYTES * LINE_BYTES
    require(
        size > 0,
        f"way '{NAME}' needs {LINE_BYTES} bytes of scratch memory for each of {peers} peers",
        workspace.scratch.nbytes,
        "use a Workspace with more scratch_bytes",
    )
    return size


@dataclass(frozen=True)
class _Turn:
    """Piece ``number`` of every chunk of a message."""

    message: AllReduceMessage
    number: int
    slot_bytes: int

    def piece(self, owner: int) -> tuple[int, int, int]:
        """Its bytes of the owner's chunk, and where they lie in a slot."""
        return piece_of(self.message.origin, *self.message.chunk(owner), self.slot_bytes, self.number)

    def slot(self, rank: int, owner: int, writer: int) -> DeviceArray:
        """Where ``writer``'s terms are in the owner's scratch memory, as local rank ``rank`` sees it."""
        begin, end, place = self.piece(owner)
        scratch = self.message.workspace.scratch
        turn = (writer - owner - 1) % scratch.group.world_size
        return scratch.peer(rank, owner).bytes_view(turn * self.slot_bytes + place, end - begin)


class CopyEngineWay(Way):
    """Copies, and a launch per rank and turn."""

    def prepare(self, member: Member, message: AllReduceMessage, config: AddConfig) -> Kernel:
        """Compile (cached) and load on the member's device. Raises ConfigError without scratch memory."""
        slot_bytes(message.workspace)
        return member.device.compile(config.source(message.workspace, message.element)).kernel()

    def run(self, message: AllReduceMessage, config: AddConfig, what: str) -> tuple[LaunchInfo, ...]:
        """Queue the copies and kernels of the local ranks. Raises ConfigError while one is captured."""
        workspace = message.workspace
        group, size = workspace.group, slot_bytes(workspace)
        for member in group.members:
            refuse_capture(workspace.stream(member.rank), NAME, "ring.sm, twoshot")
        kernels = [self.prepare(member, message, config) for member in group.members]
        with group.queueing(what):
            for number in range(message.num_pieces(size, message.origin)):
                _queue(_Turn(message, number, size), config, kernels)
        return tuple(LaunchInfo(kernel, config.ctas, config.threads, 0) for kernel in kernels)


def _queue(turn: _Turn, config: AddConfig, kernels: list[Kernel]) -> None:
    workspace = turn.message.workspace
    group, lane = workspace.group, workspace.lane
    terms, sums = lane.next_host_epoch(), lane.next_host_epoch()
    for member in group.members:
        _send_terms(turn, member)
        signal_peers(lane, member, lane.stream(member.rank), peers_of(group, member), terms)
    for member, kernel in zip(group.members, kernels, strict=True):
        await_peers(lane, member, lane.stream(member.rank), peers_of(group, member), terms)
        _add(turn, member, config, kernel)
        _send_sums(turn, member)
        signal_peers(lane, member, lane.stream(member.rank), peers_of(group, member), sums)
    for member in group.members:
        await_peers(lane, member, lane.stream(member.rank), peers_of(group, member), sums)


def _send_terms(turn: _Turn, member: Member) -> None:
    rank, message = member.rank, turn.message
    pairs = []
    for owner in peers_of(message.workspace.group, member):
        begin, end, _ = turn.piece(owner)
        pairs.append((turn.slot(rank, owner, rank), message.src(rank).bytes_view(begin, end - begin)))
    member.device.copy_batch(pairs, stream=message.workspace.stream(rank))


def _add(turn: _Turn, member: Member, config: AddConfig, kernel: Kernel) -> None:
    rank, message = member.rank, turn.message
    begin, end, _ = turn.piece(rank)
    terms = [
        message.src(rank).ptr + begin if writer == rank else turn.slot(rank, rank, writer).ptr
        for writer in range(message.workspace.group.world_size)
    ]
    buffers = np.array([*terms, message.dst.array(rank).ptr + begin, end - begin], np.uint64)
    args = (buffers, message.workspace.control(member))
    kernel.launch(config.ctas, config.threads, args, stream=message.workspace.stream(rank))


def _send_sums(turn: _Turn, member: Member) -> None:
    rank, message = member.rank, turn.message
    begin, end, _ = turn.piece(rank)
    own = message.dst.array(rank).bytes_view(begin, end - begin)
    pairs = [
        (message.dst.peer(rank, peer).bytes_view(begin, end - begin), own)
        for peer in peers_of(message.workspace.group, member)
    ]
    member.device.copy_batch(pairs, stream=message.workspace.stream(rank))


COPY_ENGINE = CopyEngineWay(NAME, AddConfig, throughput_config, direct_reason)
