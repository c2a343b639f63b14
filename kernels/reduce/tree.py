"""AllReduce up and down two binary trees (tree.cu): way ``tree``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kernels.common import require
from kernels.ipc.grid import MAX_CTAS
from kernels.reduce.config import KernelWay, direct_reason
from kernels.reduce.message import AllReduceMessage, pieces_of
from kernels.reduce.ring import RingConfig, suitable_piece
from kernels.reduce.trees import two_trees

if TYPE_CHECKING:
    from kernels.ipc.member import Member
    from kernels.reduce.workspace import Workspace

ROLES = 4
"""CTAs of a channel: up and down in two trees."""
NOBODY = 0xFFFFFFFF

# A step costs 2.5 us besides its bytes (modelled on emu:h100x4 and x8), so few pieces should follow each
# other: 64 KiB on 4 ranks take 11 us with a piece of 8 KiB for each of 4 channels, 28 us with eight of 4 KiB
# for one. At 1 MiB all CTAs that a collective should take are busy: 19 us with two pieces of 16 KiB for each
# channel, 22 us with four of 8 KiB.
MIN_PIECE_BYTES = 8192
MAX_PIECE_BYTES = 32768
"""Of default configurations."""

_BRANCH = np.dtype(
    [("parent", "<u4"), ("side", "<u4"), ("children", "<u4", 2), ("parent_scratch", "<u8"),
     ("child_dst", "<u8", 2), ("num_pieces", "<u8")]
)  # fmt: skip
_BUFFERS = np.dtype(
    [("src", "<u8"), ("dst", "<u8"), ("scratch", "<u8"), ("count", "<u8"), ("origin", "<u8"),
     ("branches", _BRANCH, 2)]
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TreeConfig(RingConfig):
    """``ctas`` / 4 channels; pieces and slots, of each child, as in a ring. Raises ConfigError."""

    file: ClassVar[str] = "tree.cu"

    unroll: int = 2
    """With 4, seven sums in one kernel spill on sm_100 and sm_120."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.ctas % ROLES == 0,
            "ctas must be a multiple of 4: up and down in two trees",
            self.ctas,
            "use 16",
        )


def throughput_config(workspace: Workspace, nbytes: int) -> TreeConfig:
    """For messages of ``nbytes``: a channel for every piece of each half as long as there are channels, then
    larger pieces, but two of them: while one comes down, the other goes up."""
    half = -(-nbytes // 2)
    channels = max(1, min(MAX_CTAS, workspace.channels) // ROLES)
    channels = max(1, min(channels, -(-half // MIN_PIECE_BYTES)))
    piece = MIN_PIECE_BYTES
    while piece < MAX_PIECE_BYTES and half > 2 * channels * piece:
        piece *= 2
    ctas = ROLES * channels
    return TreeConfig(ctas=ctas, piece_bytes=suitable_piece(workspace, ctas, TreeConfig.num_slots, piece))


def arguments(member: Member, message: AllReduceMessage, config: TreeConfig) -> Sequence[object]:
    """Of the kernel."""
    rank, workspace = member.rank, message.workspace
    scratch, dst = workspace.scratch.pointers(rank), message.dst.pointers(rank)
    middle = (message.count + 1) // 2 * message.element.bytes
    halves = (0, middle), (middle, message.nbytes)
    buffers = np.zeros((), _BUFFERS)
    buffers["src"], buffers["dst"], buffers["scratch"] = message.src(rank).ptr, dst[rank], scratch[rank]
    buffers["count"], buffers["origin"] = message.count, message.origin
    trees = two_trees(workspace.group.world_size)
    for branch, tree, (begin, end) in zip(buffers["branches"], trees, halves, strict=True):
        parent, children = tree.parents[rank], tree.children(rank)
        branch["parent"] = NOBODY
        if parent is not None:
            branch["parent"], branch["parent_scratch"] = parent, scratch[parent]
            branch["side"] = tree.children(parent).index(rank)
        branch["children"] = [*children, NOBODY, NOBODY][:2]
        branch["child_dst"] = [*(dst[child] for child in children), 0, 0][:2]
        branch["num_pieces"] = pieces_of(message.origin, begin, end, config.piece_bytes)
    return buffers, workspace.control(member), np.uint32(rank)


TREE = KernelWay("tree", TreeConfig, throughput_config, direct_reason, arguments)
