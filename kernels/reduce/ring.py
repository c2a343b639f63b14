"""AllReduce and ReduceScatter around a ring, by threads (ring.cu): way ``ring.sm``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kernels.common import check_whole, require
from kernels.ipc.gather import LINE_BYTES
from kernels.reduce.config import KernelWay, ReduceConfig, direct_reason, suitable_ctas
from kernels.reduce.message import AllReduceMessage, Message, ReduceScatterMessage

if TYPE_CHECKING:
    from kernels.ipc.member import Member
    from kernels.reduce.elements import Element
    from kernels.reduce.workspace import Workspace


@dataclass(frozen=True, kw_only=True)
class RingConfig(ReduceConfig):
    """``ctas`` channels, with ``num_slots`` pieces of ``piece_bytes`` in scratch memory each. Raises
    ConfigError."""

    file: ClassVar[str] = "ring.cu"

    piece_bytes: int = 32768
    num_slots: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        size, slots = check_whole("piece_bytes", self.piece_bytes), check_whole("num_slots", self.num_slots)
        whole = size > 0 and size % LINE_BYTES == 0
        require(whole, "piece_bytes must be a positive multiple of 128", size, "use 32768")
        require(
            slots >= 2,
            "num_slots must be at least 2: a slot is freed by a step that sends into one",
            slots,
            "use 2",
        )

    @property
    def scratch_bytes(self) -> int:
        """Scratch memory per rank."""
        return self.ctas * self.num_slots * self.piece_bytes

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the workspace's and the element."""
        return {**super().defines, "PIECE_BYTES": self.piece_bytes, "NUM_SLOTS": self.num_slots}


def throughput_config(workspace: Workspace, element: Element, nbytes: int) -> RingConfig:
    """For messages of ``nbytes``: pieces as large as the scratch memory allows."""
    del element
    ctas = suitable_ctas(workspace, nbytes // workspace.group.world_size)
    return RingConfig(ctas=ctas, piece_bytes=suitable_piece(workspace, ctas, RingConfig.num_slots))


def suitable_piece(workspace: Workspace, ctas: int, num_slots: int) -> int:
    """Bytes of a piece: the default, or what the scratch memory has room for."""
    room = workspace.scratch.nbytes // (ctas * num_slots) // LINE_BYTES * LINE_BYTES
    return max(LINE_BYTES, min(RingConfig.piece_bytes, room))


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


RING = KernelWay("ring.sm", RingConfig, throughput_config, arguments, direct_reason, defines=defines)
