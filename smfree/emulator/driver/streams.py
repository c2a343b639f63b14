"""Streams, events, and waits and writes of memory values in a stream."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver as cuda

from smfree.emulator.driver.base import as_context, entry
from smfree.emulator.driver.device import GREATEST_PRIORITY
from smfree.emulator.driver.errors import CUresult, Refusal, fault_code, invalid, invalid_handle, unsupported
from smfree.emulator.driver.memory import MemoryCalls, Place, address_of, host_bytes
from smfree.emulator.errors import EmulationError, MemoryFault
from smfree.emulator.process import Context
from smfree.emulator.streams import Event, Operation, Stream, WaitValue

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DISABLE_TIMING, _INTERPROCESS = 2, 4
_GEQ, _EQ, _AND, _NOR = range(4)
_FLUSH = 1 << 30
_CONDITIONS = (">= (cyclic)", "==", "& ... != 0 with", "nor ... != 0 with")


class StreamCalls(MemoryCalls):
    """cuStream* and cuEvent*."""

    @entry(1)
    def cuStreamCreate(self, Flags: int) -> Any:
        return self._new_stream(Flags, 0)

    @entry(1)
    def cuStreamCreateWithPriority(self, flags: int, priority: int) -> Any:
        return self._new_stream(flags, priority)

    def _new_stream(self, flags: int, priority: int) -> Any:
        if int(flags) not in (0, 1):
            raise invalid(f"flags must be CU_STREAM_DEFAULT or CU_STREAM_NON_BLOCKING, got {flags}")
        clamped = min(0, max(GREATEST_PRIORITY, int(priority)))
        return cuda.CUstream(self._context().new_stream(int(flags), clamped).handle)

    @entry(0)
    def cuStreamDestroy(self, hStream: Any) -> None:
        stream = self._find(hStream, Stream, "stream")
        self._refuse_waiting(stream)
        del self.process.objects[stream.handle]
        for each in (stream, *stream.lanes.values()):
            self.node.timeline.remove(each)

    @entry(0)
    def cuStreamQuery(self, hStream: Any) -> None:
        stream = self._stream(hStream)
        self._refuse_waiting(stream)
        self._catch_up()
        self._check_fault(stream.context)
        for operation in self._tail(stream):
            self._require_ended(operation)

    @entry(0)
    def cuStreamSynchronize(self, hStream: Any) -> None:
        stream = self._stream(hStream)
        self._refuse_waiting(stream)
        self._finish(*self._tail(stream))

    def _tail(self, stream: Stream) -> list[Operation]:
        """What must end before the stream is idle; the default stream stands for all blocking ones."""
        streams = [stream]
        if stream.legacy:
            streams += [other for other in self.node.timeline.streams_of(stream.context) if other.blocking]
        return [each.last for each in streams if each.last is not None]

    def _require_ended(self, operation: Operation) -> None:
        if not operation.done or operation.end_s > self.process.host_time_s:
            raise Refusal(CUresult.CUDA_ERROR_NOT_READY, f"{operation.label} has not ended")
        self._check_lost(operation)

    @entry(0)
    def cuStreamWaitEvent(self, hStream: Any, hEvent: Any, Flags: int) -> None:
        stream, event = self._stream(hStream), self._event(hEvent)
        if int(Flags) not in (0, 1):
            raise invalid(f"Flags must be CU_EVENT_WAIT_DEFAULT or _EXTERNAL, got {Flags}")
        if self._capture_wait(stream, event):
            return
        if event.operation is not None:
            self._submit(stream, f"wait for event {event.handle:#x}", after=(event.operation,))

    @entry(1)
    def cuStreamGetPriority(self, hStream: Any) -> int:
        return self._stream(hStream).priority

    @entry(1)
    def cuStreamGetFlags(self, hStream: Any) -> int:
        return self._stream(hStream).flags

    @entry(1)
    def cuStreamGetCtx(self, hStream: Any) -> Any:
        return as_context(self._stream(hStream).context)

    @entry(1)
    def cuStreamGetId(self, hStream: Any) -> int:
        return self._stream(hStream).handle

    # -------------------------------------------------------------------------------------------- events

    def _event(self, handle: Any) -> Event:
        event = self._find(handle, Event, "event")
        if event.origin is not None and event.origin.destroyed:
            raise invalid_handle(
                f"event {event.handle:#x} is one of {event.origin.context.process}, which has destroyed it "
                "or ended; what an import does then is undefined: destroy it after its last user"
            )
        return event

    @entry(1)
    def cuEventCreate(self, Flags: int) -> Any:
        flags = int(Flags)
        if flags & ~7:
            raise invalid(
                f"Flags may hold CU_EVENT_BLOCKING_SYNC, _DISABLE_TIMING and _INTERPROCESS, got {flags:#x}"
            )
        if flags & _INTERPROCESS and not flags & _DISABLE_TIMING:
            raise invalid("CU_EVENT_INTERPROCESS must be given along with CU_EVENT_DISABLE_TIMING")
        event = Event(
            0,
            self._context(),
            timed=not flags & _DISABLE_TIMING,
            interprocess=bool(flags & _INTERPROCESS),
        )
        event.handle = self.process.name(event)
        return cuda.CUevent(event.handle)

    @entry(0)
    def cuEventDestroy(self, hEvent: Any) -> None:
        event = self._find(hEvent, Event, "event")
        del self.process.objects[event.handle]
        self.process.destroy(event)

    @entry(0)
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        self._record(hEvent, hStream)

    @entry(0)
    def cuEventRecordWithFlags(self, hEvent: Any, hStream: Any, flags: int) -> None:
        if int(flags) != 0:
            raise invalid(f"flags must be CU_EVENT_RECORD_DEFAULT outside of a capture, got {flags}")
        self._record(hEvent, hStream)

    def _record(self, hEvent: Any, hStream: Any) -> None:
        event, stream = self._event(hEvent), self._stream(hStream)
        if event.context is not stream.context:
            raise invalid_handle(
                f"event {event.handle:#x} belongs to {event.context}, {stream.name} to {stream.context}; "
                "record an event in a stream of its own context (cuStreamWaitEvent may cross contexts)"
            )
        if not self._capture_record(event, stream):
            event.operation = self._submit(stream, f"record of event {event.handle:#x}")

    @entry(0)
    def cuEventQuery(self, hEvent: Any) -> None:
        event = self._event(hEvent)
        self._refuse_captured(event)
        self._catch_up()
        self._check_fault(event.context)
        if event.operation is not None:
            self._require_ended(event.operation)

    @entry(0)
    def cuEventSynchronize(self, hEvent: Any) -> None:
        event = self._event(hEvent)
        self._refuse_captured(event)
        self._finish(event.operation)

    @entry(1)
    def cuEventElapsedTime(self, hStart: Any, hEnd: Any) -> float:
        """Milliseconds, rounded to single precision as the driver's are. Exact, unlike a GPU's 0.5 us."""
        times = []
        self._catch_up()
        for name, handle in (("hStart", hStart), ("hEnd", hEnd)):
            event = self._event(handle)
            self._refuse_captured(event)
            if not event.timed:
                raise invalid_handle(f"{name} was created with CU_EVENT_DISABLE_TIMING")
            if event.operation is None:
                raise invalid_handle(f"{name} was never recorded; call cuEventRecord first")
            if not self.node.clocked:
                raise unsupported(
                    f"schedule {self.node.schedule!r} has no clock; only the timed schedule gives times"
                )
            self._require_ended(event.operation)
            times.append(event.operation.end_s)
        return float(np.float32((times[1] - times[0]) * 1e3))

    # ------------------------------------------------------------------------------------ host functions

    @entry(0)
    def cuLaunchHostFunc(self, hStream: Any, fn: Any, userData: Any) -> None:
        """The function runs in the host thread that finds its turn has come, and may not call the driver."""
        stream, address = self._stream(hStream), int(fn or 0)
        if not address:
            raise invalid("fn is NULL")
        function, argument = _HOST_FUNCTION(address), address_of(userData)

        def call(start_s: float) -> float:
            self.process.in_host_function = True
            try:
                function(argument)
            finally:
                self.process.in_host_function = False
            return 0.0

        self._submit(stream, f"host function {address:#x}", call)

    # ------------------------------------------------------------------------------- values in the stream

    @entry(0)
    def cuStreamWaitValue32(self, stream: Any, addr: Any, value: Any, flags: int) -> None:
        self._wait_value(stream, addr, value, flags, 4)

    @entry(0)
    def cuStreamWaitValue64(self, stream: Any, addr: Any, value: Any, flags: int) -> None:
        self._wait_value(stream, addr, value, flags, 8)

    def _wait_value(self, hStream: Any, addr: Any, value: Any, flags: int, width: int) -> None:
        stream = self._stream(hStream)
        place = self._word(stream.context, addr, width)
        condition, wanted = int(flags), int(value) & (1 << 8 * width) - 1
        if condition & _FLUSH:
            raise unsupported(
                "CU_STREAM_WAIT_VALUE_FLUSH needs CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 0 here; order "
                "the writer's data before its flag instead"
            )
        if condition not in (_GEQ, _EQ, _AND, _NOR):
            raise invalid(f"flags must be one of CU_STREAM_WAIT_VALUE_*, got {flags:#x}")

        def satisfied() -> bool:
            return _compare(condition, _read(place, width), wanted, width)

        def describe() -> str:
            return (
                f"waits for the {8 * width}-bit value at {place.address:#x} {_CONDITIONS[condition]} "
                f"{wanted:#x}, it holds {_read(place, width):#x}"
            )

        label = f"wait for the value at {place.address:#x}"
        self._submit(stream, label, wait=WaitValue(satisfied, describe))

    @entry(0)
    def cuStreamWriteValue32(self, stream: Any, addr: Any, value: Any, flags: int) -> None:
        self._write_value(stream, addr, value, flags, 4)

    @entry(0)
    def cuStreamWriteValue64(self, stream: Any, addr: Any, value: Any, flags: int) -> None:
        self._write_value(stream, addr, value, flags, 8)

    def _write_value(self, hStream: Any, addr: Any, value: Any, flags: int, width: int) -> None:
        stream = self._stream(hStream)
        place = self._word(stream.context, addr, width)
        if int(flags) not in (0, 1):
            raise invalid(f"flags must be one of CU_STREAM_WRITE_VALUE_*, got {flags:#x}")
        data = (int(value) & (1 << 8 * width) - 1).to_bytes(width, "little")
        label = f"write of the value at {place.address:#x}"

        def write(start_s: float) -> float:
            try:
                if place.memory is None:
                    host_bytes(place.address, width)[:] = np.frombuffer(data, np.uint8)
                else:
                    place.memory.write(place.at, data)
            except EmulationError as error:
                self._fail(
                    stream.context, fault_code(error), f"{error}\n  in {label} on {stream.name}", start_s
                )
            return 0.0

        self._submit(stream, label, write)

    def _word(self, context: Context, addr: Any, width: int) -> Place:
        """A word that the device of ``context`` waits for or writes: it must be allowed to use the memory."""
        address = int(addr)
        if address % width:
            raise invalid(f"addr must be {width}-byte aligned, got {address:#x}")
        place = self._place(address, width, "addr", on_device=True)
        try:
            self.process.space.reach(address, width, "a stream's operation on addr", context)
        except MemoryFault as fault:
            raise invalid(str(fault)) from None
        return place


def _read(place: Place, width: int) -> int:
    if place.memory is None:
        return int.from_bytes(host_bytes(place.address, width).tobytes(), "little")
    if place.memory.allocation_of(place.at) is None:
        return 0
    return int.from_bytes(place.memory.span(place.at, width)[0].tobytes(), "little")


def _compare(condition: int, value: int, wanted: int, width: int) -> bool:
    """CUstreamWaitValue_flags; GEQ is cyclic: the difference as a signed word is not negative."""
    mask = (1 << 8 * width) - 1
    if condition == _GEQ:
        return (value - wanted) & mask < 1 << (8 * width - 1)
    if condition == _EQ:
        return value == wanted
    if condition == _AND:
        return value & wanted != 0
    return ~(value | wanted) & mask != 0
