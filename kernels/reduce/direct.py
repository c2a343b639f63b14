"""Direct reductions: every rank sends to every other (oneshot.cu, twoshot.cu).

Ways ``oneshot`` and ``twoshot`` of an AllReduce, and ``direct`` of a ReduceScatter, the first half of a
two-shot. All add in order of rank and round once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kernels.ipc.grid import LINE_BYTES
from kernels.ipc.pool import rounded
from kernels.reduce.config import KernelWay, PieceConfig, direct_reason
from kernels.reduce.message import AllReduceMessage, ReduceScatterMessage, pieces_of

if TYPE_CHECKING:
    from kernels.ipc.member import Member
    from kernels.reduce.workspace import Workspace

MAX_CTAS = 32
"""CTAs of a default configuration at most: modelled times of 256 KiB to 1 MiB are within 2% from 16 to 64."""
ONESHOT_BYTES_PER_CTA = 4096
TWOSHOT_BYTES_PER_CTA = 1024
"""What each of them has of a term in a turn, where it does not take more than MAX_CTAS: a vector for each
thread that loads it. Best modelled times from 8 bytes to 64 KiB, on 4 and 8 ranks; untested on GPUs."""


@dataclass(frozen=True, kw_only=True)
class DirectConfig(PieceConfig):
    """``ctas`` CTAs, each with a piece of ``piece_bytes`` in a turn. A thread has ``unroll`` loads of 16
    bytes of every rank's term under way. Raises ConfigError."""

    unroll: int = 1
    piece_bytes: int = ONESHOT_BYTES_PER_CTA


@dataclass(frozen=True, kw_only=True)
class OneshotConfig(DirectConfig):
    """Pieces of the message, of all CTAs at once in the workspace's one-shots' part."""

    file: ClassVar[str] = "oneshot.cu"

    @property
    def oneshot_bytes(self) -> int:
        """Room in the one-shots' part, per rank and side."""
        return self.ctas * self.piece_bytes


@dataclass(frozen=True, kw_only=True)
class TwoshotConfig(DirectConfig):
    """Pieces of chunks: in scratch memory, one from every rank on each of two sides."""

    file: ClassVar[str] = "twoshot.cu"

    def scratch_for(self, world_size: int) -> int:
        """Scratch memory per rank."""
        return self.ctas * 2 * world_size * self.piece_bytes


def oneshot_config(workspace: Workspace, nbytes: int) -> OneshotConfig:
    """For messages of ``nbytes``: in one turn, up to the workspace's ``oneshot_bytes``."""
    ctas, piece_bytes = _suitable(workspace, nbytes, ONESHOT_BYTES_PER_CTA, workspace.oneshot_bytes)
    return OneshotConfig(ctas=ctas, piece_bytes=piece_bytes, unroll=_unroll(workspace))


def twoshot_config(workspace: Workspace, nbytes: int) -> TwoshotConfig:
    """For messages of ``nbytes``: in one turn, if the scratch memory has room."""
    world_size = workspace.group.world_size
    skew = LINE_BYTES if nbytes % (world_size * LINE_BYTES) else 0  # chunks begin inside of lines
    room = workspace.scratch.nbytes // (2 * world_size)
    ctas, piece_bytes = _suitable(workspace, -(-nbytes // world_size) + skew, TWOSHOT_BYTES_PER_CTA, room)
    return TwoshotConfig(ctas=ctas, piece_bytes=piece_bytes, unroll=_unroll(workspace))


def _suitable(workspace: Workspace, nbytes: int, bytes_per_cta: int, room: int) -> tuple[int, int]:
    """CTAs, and the bytes of their pieces, for ``nbytes`` of every term and ``room`` for as many. Pieces are
    powers of two where there is room: few kernels serve all messages."""
    most = min(MAX_CTAS, workspace.channels, room // LINE_BYTES)
    ctas = max(1, min(most, -(-nbytes // bytes_per_cta)))
    piece = max(bytes_per_cta, 1 << (-(-nbytes // ctas) - 1).bit_length())
    return ctas, max(LINE_BYTES, min(piece, room // ctas // LINE_BYTES * LINE_BYTES))


def _unroll(workspace: Workspace) -> int:
    """A thread holds as many vectors of every term, in 4 registers each: 64 registers at most, or one."""
    return max(1, min(4, 16 // workspace.group.world_size))


def oneshot_arguments(member: Member, message: AllReduceMessage, config: OneshotConfig) -> Sequence[object]:
    """What ``oneshot`` gets."""
    rank, workspace = member.rank, message.workspace
    own = message.target(rank).ptr
    buffers = np.array(
        [message.src(rank).ptr, own, *workspace.oneshot.pointers(rank), message.count, message.origin],
        np.uint64,
    )
    turns = -(-pieces_of(message.origin, 0, message.nbytes, config.piece_bytes) // config.ctas)
    return buffers, workspace.control(member), np.uint32(turns), np.uint32(rank)


def twoshot_arguments(
    member: Member, message: AllReduceMessage | ReduceScatterMessage, config: TwoshotConfig
) -> Sequence[object]:
    """What both forms of ``twoshot`` get."""
    rank, workspace = member.rank, message.workspace
    if isinstance(message, AllReduceMessage):
        dst, origin = list(message.dst.pointers(rank)), message.origin
    else:
        dst, origin = [0] * workspace.group.world_size, 0
        dst[rank] = message.target(rank).ptr
    buffers = np.array(
        [message.src(rank).ptr, *dst, *workspace.scratch.pointers(rank), message.count, origin], np.uint64
    )
    pieces = message.num_pieces(config.piece_bytes, origin)
    return buffers, workspace.control(member), np.uint32(pieces), np.uint32(rank)


ONESHOT = KernelWay(
    "oneshot", OneshotConfig, oneshot_config, direct_reason, oneshot_arguments,
    lambda message: {"SHOT_BYTES": rounded(message.workspace.oneshot_bytes)},
)  # fmt: skip
TWOSHOT = KernelWay(
    "twoshot", TwoshotConfig, twoshot_config, direct_reason, twoshot_arguments,
    lambda message: {"SCATTER_ONLY": 0},
)  # fmt: skip
DIRECT = KernelWay(
    "direct", TwoshotConfig, twoshot_config, direct_reason, twoshot_arguments,
    lambda message: {"SCATTER_ONLY": 1},
)  # fmt: skip
