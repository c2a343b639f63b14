"""What every call of the stand-in driver does first and last."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from cuda.bindings import driver as cuda

from smfree.emulator.driver.errors import CUresult, Refusal, invalid_handle
from smfree.emulator.driver.queueing import Queueing
from smfree.emulator.node import DeviceState, Node
from smfree.emulator.process import Context
from smfree.emulator.streams import LEGACY_STREAM, PER_THREAD_STREAM, Stream

CALL_S = 0.3e-6
"""Modelled host time of a call that queues nothing (assumed; no public figure decides it)."""

_PACKAGE = str(Path(__file__).resolve().parents[2])
_Thing = TypeVar("_Thing")
_Method = TypeVar("_Method", bound=Callable[..., Any])


class Needs(Enum):
    """What must hold before a call may do anything."""

    NOTHING = 0
    INIT = 1
    CONTEXT = 2
    """An initialised driver, a current context, and no earlier fault in it."""


def entry(outputs: int = 0, needs: Needs = Needs.CONTEXT) -> Callable[[_Method], _Method]:
    """Make a method a driver call: it returns ``(CUresult, ...)`` with ``outputs`` values, None on failure.

    The method itself returns its value (a tuple when there are several) or raises :class:`Refusal`.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: DriverBase, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            with self.node.lock:
                try:
                    self._begin(needs)
                    if self.process.captures:
                        self._check_captures(method.__name__)
                    value = method(self, *args, **kwargs)
                except Refusal as refusal:
                    if refusal.code is not CUresult.CUDA_ERROR_NOT_READY:
                        self.process.report = f"{method.__name__}: {refusal.code.name}: {refusal.message}"
                    return (refusal.code, *(None,) * outputs)
            if outputs == 0:
                return (CUresult.CUDA_SUCCESS,)
            return (CUresult.CUDA_SUCCESS, value) if outputs == 1 else (CUresult.CUDA_SUCCESS, *value)

        call.emulated_outputs = outputs  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


class DriverBase(Queueing):
    """The node and the process behind the calls, and what the call groups share."""

    def __init__(self, node: Node, label: str = "") -> None:
        self.node = node
        self.process = node.attach(label)

    def _begin(self, needs: Needs) -> None:
        node, process = self.node, self.process
        if not process.alive:
            raise Refusal(CUresult.CUDA_ERROR_DEINITIALIZED, f"{process} has ended")
        if process.in_host_function:
            raise Refusal(
                CUresult.CUDA_ERROR_NOT_PERMITTED,
                "a function of cuLaunchHostFunc must not call the driver; set a flag and return",
            )
        if needs is Needs.NOTHING:
            return
        if not process.initialised:
            raise Refusal(CUresult.CUDA_ERROR_NOT_INITIALIZED, "call cuInit(0) first")
        if node.clocked:
            process.host_time_s += CALL_S
        node.called(process)
        node.timeline.look(process.host_time_s)
        if needs is Needs.CONTEXT:
            self._check_fault(self._context())

    def _check_fault(self, context: Context) -> None:
        """Refuse everything in a context that a kernel's fault has killed."""
        if context.fault is not None and context.process is not self.process:
            raise Refusal(
                CUresult.CUDA_ERROR_EXTERNAL_DEVICE,
                f"what this waits for never ran: the context of {context} failed.\n{context.fault.report}",
            )
        if context.fault is not None:
            raise Refusal(
                CUresult(context.fault.code), f"an earlier fault is sticky.\n{context.fault.report}"
            )

    def _caller(self) -> str:
        """``file:line`` of the program's call, for reports; a served process sends it with the call."""
        return getattr(self.process.threads, "caller", "") or calling_line()

    # ------------------------------------------------------------------------------------------ contexts

    def _context(self) -> Context:
        """The current context."""
        stack = self.process.context_stack
        if not stack or not stack[-1].active:
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_CONTEXT,
                "no context is current in this thread; call cuDevicePrimaryCtxRetain and cuCtxSetCurrent",
            )
        return stack[-1]

    def _device(self) -> DeviceState:
        """The device of the current context."""
        return self._context().device

    def _device_at(self, dev: Any) -> DeviceState:
        ordinal = int(dev)
        if not 0 <= ordinal < len(self.node.devices):
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_DEVICE,
                f"there is no device {ordinal}; the node has {len(self.node.devices)}",
            )
        return self.node.devices[ordinal]

    def _context_of(self, ctx: Any) -> Context:
        """The live context that the handle names."""
        value = int(ctx)
        for context in self.process.contexts.values():
            if value == context.handle and context.active:
                return context
        raise Refusal(CUresult.CUDA_ERROR_INVALID_CONTEXT, f"{value:#x} is no live context")

    # ------------------------------------------------------------------------------------------- handles

    def _find(self, handle: Any, kind: type[_Thing], what: str) -> _Thing:
        """The object of ``kind`` behind a handle (wrapper or int)."""
        value = 0 if handle is None else int(handle)
        thing = self.process.objects.get(value)
        if not isinstance(thing, kind):
            was = "was destroyed or never made" if thing is None else f"names a {type(thing).__name__}"
            raise invalid_handle(f"{value:#x} is no {what}: it {was}")
        return thing

    def _stream(self, handle: Any) -> Stream:
        """The stream behind a handle; 0, legacy and per-thread ones belong to the current context."""
        value = 0 if handle is None else int(handle)
        if value in (0, LEGACY_STREAM):
            context = self._context()
            if context.default_stream is None:
                context.default_stream = context.new_stream(legacy=True)
            return context.default_stream
        if value == PER_THREAD_STREAM:
            context, thread = self._context(), threading.get_ident()
            if thread not in context.per_thread_streams:
                context.per_thread_streams[thread] = context.new_stream()
            return context.per_thread_streams[thread]
        stream = self._find(value, Stream, "stream")
        if stream.destroyed:
            raise invalid_handle(f"stream {value:#x} was destroyed")
        self._check_fault(stream.context)
        return stream


def as_context(context: Context | None) -> Any:
    """The CUcontext of a context; a null one for None."""
    return cuda.CUcontext(0 if context is None else context.handle)


def calling_line() -> str:
    """``file:line`` of the innermost caller outside this package, for reports. Helpers that launch for others
    have a local ``__tracebackhide__``, as pytest's, and are passed over."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE) and "__tracebackhide__" not in code.co_varnames:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "unknown"
