"""What stream capture changes for every other call: work is written down, and much is forbidden.

The rules are those of the driver API (cuStreamBeginCapture, cuThreadExchangeStreamCaptureMode, the texts of
CUDA_ERROR_STREAM_CAPTURE_*). A forbidden call is refused and breaks the captures that it disturbs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smfree.emulator.driver.errors import CUresult, Refusal, unsupported
from smfree.emulator.graphs import Capture, CaptureMode
from smfree.emulator.streams import Event, Operation, Stream

if TYPE_CHECKING:
    from smfree.emulator.node import Node
    from smfree.emulator.process import Context, Process

UNSAFE = frozenset(
    {
        "cuMemAlloc", "cuMemFree", "cuMemAllocHost", "cuMemHostAlloc", "cuMemFreeHost",
        "cuMemHostRegister", "cuMemHostUnregister",
        "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleUnload", "cuLibraryLoadData", "cuLibraryUnload",
        "cuMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cuMemcpyPeer",
        "cuMemsetD8", "cuMemsetD16", "cuMemsetD32",
        "cuEventQuery",
    }
)  # fmt: skip
"""Calls that a capture does not see although its work may depend on them. The driver documents cudaMalloc as
one of them and gives no list; these are known to be refused (or to run in the default stream)."""


class CaptureRules:
    """Mixed into every call group."""

    node: Node
    process: Process
    _context: Callable[[], Context]

    def _check_captures(self, call: str) -> None:
        """Refuse a call that some capture of the process forbids whatever its arguments."""
        if call in UNSAFE:
            disturbed = [capture for capture in self.process.captures if self._disturbs(capture)]
        elif call == "cuCtxSynchronize":
            context = self._context()
            disturbed = [
                capture
                for capture in self.process.captures
                if any(stream.context is context for stream in capture.tips)
            ]
        else:
            return
        for capture in disturbed:
            raise self._break(
                capture,
                CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                f"{call} while {capture.origin.name} captures ({capture.mode.name}); do it before "
                "cuStreamBeginCapture or after cuStreamEndCapture",
            )

    def _disturbs(self, capture: Capture) -> bool:
        """Whether an unsafe call of this thread is forbidden for the sake of a capture."""
        mine = capture.thread == threading.get_ident()
        mode = getattr(self.process.threads, "capture_mode", CaptureMode.GLOBAL)
        if mode is CaptureMode.RELAXED:
            return False
        if mine:
            return capture.mode is not CaptureMode.RELAXED
        return mode is CaptureMode.GLOBAL and capture.mode is CaptureMode.GLOBAL

    def _break(self, capture: Capture, code: Any, message: str) -> Refusal:
        """A capture is invalid from now on; gives the refusal to raise."""
        if not capture.broken:
            capture.broken = message
        return Refusal(code, f"{message}. This invalidates the capture")

    # ------------------------------------------------------------------------------------------- streams

    def _refuse_implicit(self, stream: Stream, *, breaks: bool = True) -> None:
        """The legacy default stream may not be used while a blocking stream of its context captures."""
        for capture in self.process.captures:
            for other in capture.tips:
                if other.context is stream.context and other.blocking:
                    code = CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                    message = (
                        f"{stream.name} waits for {other.name}, which captures; use another stream, or make "
                        "the capturing one with CU_STREAM_NON_BLOCKING"
                    )
                    raise self._break(capture, code, message) if breaks else Refusal(code, message)

    def _refuse_waiting(self, stream: Stream) -> None:
        """The host may neither wait for a capturing stream nor ask how far it is: nothing runs."""
        if stream.legacy:
            self._refuse_implicit(stream)
        if stream.capture is not None:
            raise self._break(
                stream.capture,
                CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                f"{stream.name} captures, so there is nothing to wait for; end the capture first",
            )

    def _no_capture(self, stream: Stream, what: str) -> None:
        """Refuse what could be captured on a GPU, but not here."""
        if stream.capture is not None:
            raise unsupported(f"{what} in a stream that captures is not emulated; do it before the capture")

    def _write_down(
        self,
        stream: Stream,
        label: str,
        after: tuple[Operation, ...],
        submit: Callable[[Stream, tuple[Operation, ...]], Operation],
    ) -> Operation:
        """Make work of a capturing stream a node. The operation returned has no work and is done."""
        capture = stream.capture
        assert capture is not None
        self._check_intact(capture)
        if any(not operation.done for operation in after):
            raise self._isolated(capture, label)
        capture.add(stream, self.node.new_handle(), label, submit)
        nothing = Operation(stream, label, 0.0)
        nothing.finish(0.0, 0.0)
        return nothing

    def _check_intact(self, capture: Capture) -> None:
        if capture.broken:
            raise Refusal(
                CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                f"the capture of {capture.origin.name} is invalid since {capture.broken}; end it with "
                "cuStreamEndCapture",
            )

    def _isolated(self, capture: Capture, what: str) -> Refusal:
        return self._break(
            capture,
            CUresult.CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
            f"{what} would come after work outside of the capture of {capture.origin.name}; only the "
            "stream's own earlier work may: record the event in the capture, or wait before it",
        )

    # -------------------------------------------------------------------------------------------- events

    def _refuse_captured(self, event: Event) -> None:
        """An event that was last recorded in a capture marks nothing that runs."""
        if event.captured is None:
            return
        message = f"event {event.handle:#x} was last recorded in a capturing stream; use another event"
        code = CUresult.CUDA_ERROR_CAPTURED_EVENT
        capture, _ = event.captured
        raise self._break(capture, code, message) if self._active(capture) else Refusal(code, message)

    def _active(self, capture: Capture) -> bool:
        return capture in self.process.captures

    def _capture_record(self, event: Event, stream: Stream) -> bool:
        """Let an event stand for the end of a capturing stream; False: the stream does not capture."""
        capture = stream.capture
        if capture is None:
            event.captured = None
            return False
        self._check_intact(capture)
        event.captured = capture, capture.tips[stream]
        return True

    def _capture_wait(self, stream: Stream, event: Event) -> bool:
        """Let a stream wait for an event in a capture; False: neither has to do with one."""
        capture = stream.capture
        if event.captured is None:
            if capture is None or event.operation is None:
                return False
            self._check_intact(capture)
            raise self._isolated(capture, f"{stream.name}, by event {event.handle:#x},")
        theirs, tips = event.captured
        if not self._active(theirs):
            self._refuse_captured(event)
        self._check_intact(theirs)
        if stream.legacy:
            self._refuse_implicit(stream)
            raise self._break(
                theirs,
                CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                "the legacy default stream cannot join a capture; use another stream",
            )
        if capture is not None and capture is not theirs:
            self._break(capture, CUresult.CUDA_ERROR_STREAM_CAPTURE_MERGE, "a merge with another capture")
            raise self._break(
                theirs,
                CUresult.CUDA_ERROR_STREAM_CAPTURE_MERGE,
                f"{stream.name} belongs to the capture of {capture.origin.name}, event {event.handle:#x} to "
                f"that of {theirs.origin.name}; captures cannot be merged",
            )
        theirs.join(stream, tips)
        return True
