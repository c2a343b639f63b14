"""AllReduce and ReduceScatter around a ring, by threads (ring.cu): way ``ring.sm``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kernels.common import check_whole, require
from kernels.ipc.grid import LINE_BYTES, MAX_CTAS
from kernels.reduce.config import KernelWay, PieceConfig, direct_reason
from kernels.reduce.message import AllReduceMessage, Message, ReduceScatterMessage

if TYPE_CHECKING:
    from kernels.ipc.member import Member
    from kernels.reduce.workspace import Workspace

# A step costs 2.2 to 2.4 us besides its bytes (modelled on emu:h100x4 and x8): loads, the arrival of the
# stores and the membar that waits for it, the way of the signal, the poll. The steps of a channel follow each
# other, so rounds are what costs: 4 MiB on 4 ranks take 27 us in 64 x 16 KiB, 28 us in 32 x 32 KiB, 32 us in
# 16 x 64 KiB, but 48 us in two rounds of 32 x 16 KiB. At 256 KiB, pieces of 2, 4 and 8 KiB take the same.
MIN_PIECE_BYTES = 8192
MAX_PIECE_BYTES = 65536
"""Of default configurations."""


@dataclass(frozen=True, kw_only=True)
class RingConfig(PieceConfig):
    """``ctas`` channels, with ``num_slots`` pieces of ``piece_bytes`` in scratch memory each. Raises
    ConfigError."""

    file: ClassVar[str] = "ring.cu"

    num_slots: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_slots(self.num_slots)

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory per rank."""
        return self.ctas * self.num_slots * self.piece_bytes

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the workspace's and the element."""
        return {**super().defines, "NUM_SLOTS": self.num_slots}


def check_slots(num_slots: int) -> None:
    """Raise ConfigError for too few slots of a channel."""
    rule = "num_slots must be at least 2: a slot is freed by a step that sends into one"
    require(check_whole("num_slots", num_slots) >= 2, rule, num_slots, "use 2")


def throughput_config(workspace: Workspace, nbytes: int) -> RingConfig:
    """For messages of ``nbytes``: one piece of a chunk per channel, of as many channels as get
    MIN_PIECE_BYTES. What is more than all channels can hold goes in several rounds of the largest pieces."""
    chunk = -(-nbytes // workspace.group.world_size)
    if chunk % LINE_BYTES:
        chunk += LINE_BYTES  # it may begin inside a line, and pieces are cut at lines
    channels = min(MAX_CTAS, workspace.channels)
    wanted = max(MIN_PIECE_BYTES, _one_of_few(-(-chunk // channels)))
    piece = suitable_piece(workspace, channels, RingConfig.num_slots, min(wanted, MAX_PIECE_BYTES))
    return RingConfig(ctas=max(1, min(channels, -(-chunk // piece))), piece_bytes=piece)


def suitable_piece(
    workspace: Workspace, ctas: int, num_slots: int, at_most: int = RingConfig.piece_bytes
) -> int:
    """Bytes of a piece: the largest for which the scratch memory has room."""
    room = workspace.scratch.nbytes // (ctas * num_slots) // LINE_BYTES * LINE_BYTES
    return max(LINE_BYTES, min(at_most, room))


def _one_of_few(nbytes: int) -> int:
    """So many bytes or up to a quarter more: four sizes up to each power of two, for each is a kernel."""
    step = max(LINE_BYTES, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


def arguments(
    member: Member, message: AllReduceMessage | ReduceScatterMessage, config: RingConfig
) -> Sequence[object]:
    """Of both forms of the kernel."""
    group, rank = message.workspace.group, member.rank
    following = (rank + 1) % group.world_size
    scratch = message.workspace.scratch.pointers(rank)
    if isinstance(message, AllReduceMessage):
        dst = message.dst.pointers(rank)
        own, next_dst, origin = dst[rank], dst[following], message.origin
    else:
        own, next_dst, origin = message.target(rank).ptr, 0, 0
    buffers = np.array(
        [message.src(rank).ptr, own, next_dst, scratch[rank], scratch[following], message.count, origin],
        np.uint64,
    )
    pieces = message.num_pieces(config.piece_bytes, origin)
    return buffers, message.workspace.control(member), np.uint32(pieces), np.uint32(rank)


def defines(message: Message) -> dict[str, object]:
    """Which form of the kernel."""
    return {"SCATTER_ONLY": int(not isinstance(message, AllReduceMessage))}


RING = KernelWay("ring.sm", RingConfig, throughput_config, direct_reason, arguments, defines)
