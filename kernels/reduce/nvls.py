"""AllReduce by the switch, which adds what one load asks of all GPUs (nvls.cu): way ``nvls``.

The switch chooses the order of its additions: all ranks get the same bits in one call, but not those of
another way, run or machine. Sums are made in float32; how often those of halves are rounded is not stated.

Terms are loaded from dst in place, or from a ``src`` in symmetric memory that lies like dst modulo 16: on all
ranks alike. Other terms are copied to dst first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from kernels.common import require
from kernels.ipc.grid import VECTOR_BYTES
from kernels.reduce.config import KernelWay, Operands, ReduceConfig, suitable_ctas
from kernels.reduce.message import AllReduceMessage
from smfree.cuda import Kernel

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.member import Member
    from kernels.ipc.symmetric import Symmetric
    from kernels.reduce.workspace import Workspace


MAX_CTAS = 16
"""CTAs of a default configuration at most: more are not faster on 4 and 8 H100, modelled up to 4 MiB."""


@dataclass(frozen=True, kw_only=True)
class NvlsConfig(ReduceConfig):
    """How ``nvls`` is compiled and launched. Raises ConfigError."""

    file: ClassVar[str] = "nvls.cu"

    @property
    def piece_bytes(self) -> int:
        """What a CTA takes at a time."""
        return self.bytes_in_flight_per_sm

    @property
    def defines(self) -> dict[str, object]:
        """What the kernel is compiled with, beside the workspace's and the element."""
        return {**super().defines, "PIECE_BYTES": self.piece_bytes}


def unavailable(group: Group) -> str | None:
    """Why the group's symmetric memory has no multicast address, None when it has: or needs none, alone."""
    return None if group.world_size == 1 else group.direct_reason or group.multicast_reason


def throughput_config(workspace: Workspace, nbytes: int) -> NvlsConfig:
    """For messages of ``nbytes``."""
    return NvlsConfig(ctas=min(MAX_CTAS, suitable_ctas(workspace, nbytes // workspace.group.world_size)))


def arguments(member: Member, message: AllReduceMessage, config: NvlsConfig) -> Sequence[object]:
    """Of the kernel."""
    rank, dst, terms = member.rank, message.dst, message.symmetric_src
    unplaced = 0
    if terms is None or not usable(terms, dst):
        terms = dst
        src = message.src(rank).ptr
        unplaced = 0 if src == dst.array(rank).ptr else src
    buffers = np.array(
        [*dst.pointers(rank), *terms.pointers(rank), dst.multicast(rank), terms.multicast(rank), unplaced,
         message.count, message.origin],
        np.uint64,
    )  # fmt: skip
    pieces = message.num_pieces(config.piece_bytes, message.origin)
    return buffers, message.workspace.control(member), np.uint32(pieces), np.uint32(rank)


def usable(terms: Symmetric, dst: Symmetric) -> bool:
    """Whether the switch can load terms from there, for dst: the same on every rank."""
    alike = (terms.offset_bytes - dst.offset_bytes) % VECTOR_BYTES == 0
    return terms.group is dst.group and alike and _has_multicast(terms)


def _has_multicast(memory: Symmetric) -> bool:
    return all(memory.multicast(member.rank) is not None for member in memory.group.members)


class NvlsWay(KernelWay):
    """Its dst needs a multicast address, which not every slab of a pool must have."""

    def prepare(self, member: Member, message: Operands, config: ReduceConfig) -> Kernel:
        """As :meth:`KernelWay.prepare`. Raises ConfigError also without a multicast address."""
        assert isinstance(message, AllReduceMessage)
        require(
            _has_multicast(message.dst), "dst needs a multicast address", repr(message.dst),
            "use memory of the group's first slab (a larger pool_bytes), or another way",
        )  # fmt: skip
        return super().prepare(member, message, config)


NVLS = NvlsWay("nvls", NvlsConfig, throughput_config, unavailable, arguments)
