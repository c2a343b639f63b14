"""Lanes: collectives of one lane run one after the other, those of different lanes at the same time.

A lane has signals of its own and a stream of its own on every rank. A group begins with one, on the members'
streams; :meth:`kernels.ipc.group.Group.open_lane` makes more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kernels.ipc.errors import GroupError
from kernels.ipc.signals import SignalLayout, Step, step_text
from smfree.cuda import DeviceArray, HostBuffer, Stream

if TYPE_CHECKING:
    from kernels.ipc.member import Member
    from kernels.ipc.symmetric import Symmetric


class Lane:
    """The signals and streams of one lane, which errors call ``label``. ``signals``: symmetric memory, a pad
    on every rank. Slot s belongs to CTA ``s % ctas``. It has nothing else before :meth:`open`."""

    def __init__(self, label: str, layout: SignalLayout, ctas: int, signals: Symmetric) -> None:
        self.label = label
        self.layout = layout
        self.ctas = ctas
        self.signals = signals
        self.last_words: dict[int, HostBuffer] = {}
        """What is written to the abort word and the host's signal words when a rank gives up: page-locked
        beforehand, because a stuck device may not lock memory."""
        self.host_epoch = 0
        """Barriers done with stream memory operations, modulo 2^32: the same on every rank."""
        self.host_steps = (step_text(Step.ENTRY), step_text(Step.EXIT))
        """What the two barriers of a pair are, in errors."""
        self._streams: dict[int, Stream] = {}
        self._own_streams: list[Stream] = []
        self._control: dict[int, DeviceArray] = {}
        self._closed = False

    def __repr__(self) -> str:
        return f"Lane('{self.label}', {self.ctas} CTAs)"

    def open(self, members: Iterable[Member], *, own_streams: bool) -> None:
        """Make what the local ranks need; on the members' streams, or on new ones. No rank may signal before
        all have done it. :meth:`close` takes back what there is after an error."""
        for member in members:
            stream = member.device.stream(non_blocking=True) if own_streams else member.stream
            if own_streams:
                self._own_streams.append(stream)
            self._streams[member.rank] = stream
            self.last_words[member.rank] = member.device.pinned(1 + self.layout.world_size, np.uint32)
            self._new_control(member, stream)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Of the local ranks."""
        return tuple(self._streams.values())

    def stream(self, rank: int) -> Stream:
        """The stream of a local rank."""
        self._check()
        return self._streams[rank]

    def control(self, rank: int) -> DeviceArray:
        """The control block of a local rank: what a kernel gets of the signals (:class:`SignalLayout`)."""
        self._check()
        return self._control[rank]

    def pad(self, rank: int) -> DeviceArray:
        """The signal pad of a local rank."""
        return self.signals.array(rank)

    def pads(self, rank: int) -> tuple[DeviceArray, ...]:
        """The pads of all ranks, as a local rank sees them; only its own where the peers are out of reach."""
        direct = self.signals.group.direct_reason is None
        owners = range(self.layout.world_size) if direct else [rank]
        return tuple(self.signals.peer(rank, owner) for owner in owners)

    def next_host_epoch(self) -> int:
        """Count one more barrier of the host's slot; every rank counts alike."""
        self.host_epoch = (self.host_epoch + 1) % 2**32
        return self.host_epoch

    def close(self) -> None:
        """Free the control blocks and destroy the own streams; no queued work may use them. The pads are the
        group's. Twice is fine."""
        self._closed = True
        for block in self._control.values():
            block.free()
        for stream in self._own_streams:
            stream.destroy()
        self.last_words.clear()

    def _check(self) -> None:
        if self._closed:
            raise GroupError(f"{self!r} was closed; open another")

    def _new_control(self, member: Member, stream: Stream) -> None:
        """Signals that nobody has given yet."""
        layout = self.layout
        self.signals.array(member.rank).fill(0, stream=stream)
        block = self._control[member.rank] = member.device.empty(layout.control_bytes)
        block.fill(0, stream=stream)
        pads = [pad.ptr for pad in self.pads(member.rank)]
        known = np.array(pads + [0] * (layout.world_size - len(pads)), np.uint64)
        target = block.bytes_view(layout.pads_offset, known.nbytes).view(np.uint64)
        target.copy_from(known, stream=stream)
        stream.synchronize()
