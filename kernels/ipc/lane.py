"""Lanes: collectives of one lane run one after the other, those of different lanes at the same time.

A lane has signals of its own and a stream of its own on every rank. A group begins with one, on the members'
streams; :meth:`kernels.ipc.group.Group.open_lane` makes more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kernels.ipc.signals import SignalLayout
from smfree.cuda import DeviceArray, HostBuffer, Stream

if TYPE_CHECKING:
    from kernels.ipc.member import Member
    from kernels.ipc.symmetric import Symmetric


class Lane:
    """The signals and streams of one lane. ``signals``: symmetric memory, a pad on every rank.
    ``reachable``: the ranks whose pads a local rank's GPU can use, by local rank."""

    def __init__(
        self,
        members: Sequence[Member],
        layout: SignalLayout,
        signals: Symmetric,
        streams: Mapping[int, Stream],
        reachable: Mapping[int, Sequence[int]],
    ) -> None:
        self.layout = layout
        self.signals = signals
        self._streams = dict(streams)
        self._reachable = dict(reachable)
        self._control = {member.rank: self._new_control(member) for member in members}
        self.last_words: dict[int, HostBuffer] = {
            member.rank: member.device.pinned(1 + layout.world_size, np.uint32) for member in members
        }
        """What is written to the abort word and the host's signal words when a rank gives up: page-locked
        beforehand, because a stuck device may not lock memory."""
        self.host_epoch = 0
        """Barriers done with stream memory operations, modulo 2^32: the same on every rank."""

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Of the local ranks."""
        return tuple(self._streams.values())

    def stream(self, rank: int) -> Stream:
        """The stream of a local rank."""
        return self._streams[rank]

    def control(self, rank: int) -> DeviceArray:
        """The control block of a local rank: what a kernel gets of the signals (:class:`SignalLayout`)."""
        return self._control[rank]

    def pad(self, rank: int) -> DeviceArray:
        """The signal pad of a local rank."""
        return self.signals.array(rank)

    def pads(self, rank: int) -> tuple[DeviceArray, ...]:
        """The pads of all ranks, as a local rank sees them; only its own where the peers are out of reach."""
        return tuple(self.signals.peer(rank, owner) for owner in self._reachable[rank])

    def next_host_epoch(self) -> int:
        """Count one more barrier of the host's slot; every rank counts alike."""
        self.host_epoch = (self.host_epoch + 1) % 2**32
        return self.host_epoch

    def free(self) -> None:
        """Free the control blocks; no queued work may use them. The pads are the group's."""
        for block in self._control.values():
            block.free()

    def _new_control(self, member: Member) -> DeviceArray:
        """Signals that nobody has given yet."""
        layout, stream = self.layout, self._streams[member.rank]
        self.signals.array(member.rank).fill(0, stream=stream)
        block = member.device.empty(layout.control_bytes).fill(0, stream=stream)
        pads = [pad.ptr for pad in self.pads(member.rank)]
        known = np.array(pads + [0] * (layout.world_size - len(pads)), np.uint64)
        target = block.bytes_view(layout.pads_offset, known.nbytes).view(np.uint64)
        target.copy_from(known, stream=stream)
        stream.synchronize()
        return block
