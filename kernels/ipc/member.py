"""A rank of this process: its device and its streams."""

from __future__ import annotations

from typing import Protocol

from smfree.cuda import Device, Stream
from smfree.cuda.vmm import attribute


class Seat(Protocol):
    """A local rank and its device: what memory is made for."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> Device: ...


class Member:
    """Rank ``rank`` on ``device``. Its collectives queue on ``stream``.

    ``control_stream`` takes what must run while the others are stuck. All streams are non-blocking: the
    default stream orders nothing (case D30). Few are made: streams that share one of the device's work queues
    (CUDA_DEVICE_MAX_CONNECTIONS, 8 unless set) can wait for each other.
    """

    def __init__(self, rank: int, device: Device) -> None:
        self.rank = rank
        self.device = device
        self.control_stream: Stream = device.stream(non_blocking=True)
        self.stream: Stream = device.stream(non_blocking=True)
        self._to_peers: dict[int, Stream] = {}
        self.flushes = bool(attribute(device, "CAN_FLUSH_REMOTE_WRITES"))
        """Whether waits in a stream can make sure that the remote writes before the awaited one are visible.
        Where they cannot, the order of the writer's stream is all there is (CUstreamWaitValue_flags)."""

    def __repr__(self) -> str:
        return f"Member({self.rank}, {self.device!r})"

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams that carry collectives."""
        return (self.stream, *self._to_peers.values())

    def stream_to(self, peer: int) -> Stream:
        """The stream of the copies to a peer, made at the first call."""
        if peer not in self._to_peers:
            self._to_peers[peer] = self.device.stream(non_blocking=True)
        return self._to_peers[peer]

    def close(self) -> None:
        """Destroy the streams."""
        for stream in (*self.streams, self.control_stream):
            stream.destroy()
