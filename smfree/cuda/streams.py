"""Streams and events."""

from __future__ import annotations

import weakref
from enum import IntEnum
from numbers import Integral
from typing import TYPE_CHECKING, Any

from smfree.cuda.errors import DeviceClosedError, LaunchError
from smfree.cuda.graphs import Graph

if TYPE_CHECKING:
    from smfree.cuda.device import Device


_FLUSH = 1 << 30  # CU_STREAM_WAIT_VALUE_FLUSH


class WaitCondition(IntEnum):
    """What :meth:`Stream.wait_value` waits for; the values of CUstreamWaitValue_flags."""

    GEQ = 0
    """``word - value`` as a signed number is not negative."""
    EQ = 1
    AND = 2
    """``word & value`` is not 0."""
    NOR = 3
    """``~(word | value)`` is not 0."""


class Stream:
    """A queue of device work, ordered with the default stream unless made ``non_blocking``.

    What queued work uses (arrays, host data) is kept alive until the host knows that the work is done.
    """

    def __init__(self, device: Device, handle: Any, *, owned: bool = True) -> None:
        self.device = device
        self._handle = handle
        self.graph: Graph | None = None
        """The graph that is being captured from this stream."""
        self._kept: dict[int, tuple[int, Any]] = {}
        self._queued = 0
        self._destroy = (
            weakref.finalize(self, device.calls.quiet, "cuStreamDestroy", handle) if owned else None
        )

    @property
    def handle(self) -> Any:
        """The driver's CUstream. Raises DeviceClosedError once it is destroyed: what a driver does with the
        handle then is undefined."""
        if self._destroy is not None and not self._destroy.alive:
            raise DeviceClosedError(f"a stream of {self.device.spec} was destroyed; make a new one")
        return self._handle

    def keep(self, *objects: Any) -> None:
        """Keep objects alive until the work queued so far is known to be done, or as long as the graph that
        is being captured."""
        if self.graph is not None:
            self.graph.keep(*objects)
            return
        self._queued += 1
        for thing in objects:
            self._kept[id(thing)] = (self._queued, thing)

    def settled(self, queued: int | None = None) -> None:
        """Everything queued (up to a mark of :attr:`queued`) is known to be done: let go of what it used."""
        if queued is None:
            self._kept.clear()
        else:
            self._kept = {key: kept for key, kept in self._kept.items() if kept[0] > queued}

    @property
    def queued(self) -> int:
        """A mark that grows with each piece of work that keeps something alive."""
        return self._queued

    def synchronize(self) -> None:
        """Wait for everything queued. Raises KernelFaultError when a kernel failed."""
        self.device.calls("cuStreamSynchronize", self.handle)
        self.settled()

    def query(self) -> bool:
        """True when nothing queued is left to do."""
        return self.device.calls.is_ready("cuStreamQuery", self.handle)

    def record(self, event: Event | None = None) -> Event:
        """Record an event (a new one with timing unless given) after the work queued so far."""
        event = self._own(event or self.device.event())
        self.device.calls("cuEventRecord", event.handle, self.handle)
        event.mark = (self, self._queued)
        event.graph = self.graph
        return event

    def wait(self, event: Event) -> None:
        """Later work of this stream waits for the event, which may be of another device of the machine."""
        if not isinstance(event, Event) or event.device.driver is not self.device.driver:
            raise LaunchError(f"a stream waits for an event of its own machine (got {event!r})")
        self.device.calls("cuStreamWaitEvent", self.handle, event.handle, 0)
        if event.graph is not None and event.graph.capturing:
            event.graph.join(self)

    def capture(self) -> Graph:
        """Record the work of a ``with`` block instead of running it; see :mod:`smfree.cuda.graphs`."""
        return Graph(self)

    def wait_value(
        self,
        ptr: int,
        value: int,
        *,
        bits: int = 32,
        condition: WaitCondition | None = None,
        flush: bool = False,
    ) -> None:
        """Later work waits until the word of ``bits`` bits at device address ``ptr`` meets ``condition`` with
        ``value`` (default: GEQ, word >= value cyclically).

        ``flush``: later work also sees every remote write that reached the device before the word's; only for
        devices with CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES.
        """
        _check_word(ptr, value, bits)
        flags = int(WaitCondition.GEQ if condition is None else WaitCondition(condition))
        flags |= _FLUSH if flush else 0
        self.device.calls(
            f"cuStreamWaitValue{bits}", self.handle, ptr, value, flags, ptr=hex(ptr), value=value, flags=flags
        )

    def write_value(self, ptr: int, value: int, *, bits: int = 32) -> None:
        """Write a word of ``bits`` bits at device address ``ptr`` after the work queued so far."""
        _check_word(ptr, value, bits)
        self.device.calls(f"cuStreamWriteValue{bits}", self.handle, ptr, value, 0, ptr=hex(ptr), value=value)

    def _own(self, event: Event) -> Event:
        if not isinstance(event, Event) or event.device is not self.device:
            raise LaunchError(
                f"a stream records events of its own device (got {event!r}); use device.event()"
            )
        return event

    def destroy(self) -> None:
        """Destroy the stream now; its queued work still completes."""
        if self._destroy is not None:
            self._destroy()


class Event:
    """A mark in a stream; with ``timing`` two of them measure device time."""

    def __init__(self, device: Device, handle: Any, *, timing: bool, interprocess: bool = False) -> None:
        self.device = device
        self.handle = handle
        self.timing = timing
        self.interprocess = interprocess
        self.mark: tuple[Stream, int] | None = None
        self.graph: Graph | None = None
        """The graph in whose capture it was last recorded."""
        weakref.finalize(self, device.calls.quiet, "cuEventDestroy", handle)

    def synchronize(self) -> None:
        """Wait until the event has happened; what its stream kept for the work before it is let go."""
        self.device.calls("cuEventSynchronize", self.handle)
        if self.mark is not None:
            stream, queued = self.mark
            stream.settled(queued)

    def query(self) -> bool:
        """True when the event has happened."""
        return self.device.calls.is_ready("cuEventQuery", self.handle)

    def elapsed_us(self, since: Event) -> float:
        """Device time from ``since`` to this event in microseconds. A GPU resolves about 0.5 us."""
        if not (self.timing and since.timing):
            raise LaunchError(
                "elapsed_us needs two events with timing; make them with device.event(timing=True)"
            )
        if self.device is not since.device:
            raise LaunchError("elapsed_us needs two events of one device; time each device by its own")
        return float(self.device.calls("cuEventElapsedTime", since.handle, self.handle)) * 1e3


def _check_word(ptr: int, value: int, bits: int) -> None:
    if bits not in (32, 64):
        raise LaunchError(f"a word has 32 or 64 bits (got {bits!r})")
    if not isinstance(ptr, Integral):
        raise LaunchError(f"ptr is a device address (got {ptr!r}); for an array pass array.ptr")
    if not isinstance(value, Integral) or not 0 <= value < 1 << bits:
        raise LaunchError(f"the value of a {bits}-bit word is 0 to 2^{bits} - 1 (got {value!r})")
