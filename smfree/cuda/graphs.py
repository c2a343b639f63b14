"""CUDA graphs: work that a stream records once and replays with one call.

::

    with stream.capture() as graph:
        kernel.launch(grid, block, [dst, src], stream=stream)
        dst.copy_from_device(src, stream=stream)
    graph.launch(stream)
    graph.launch(stream)

Nothing runs inside the block. Other streams join the capture when they wait for an event that was recorded
in it, and the first stream must wait for them before the block ends. Arguments are frozen; the graph keeps
the arrays, host buffers and modules of its nodes alive.

The driver forbids some calls of the capturing thread inside the block: waiting for a capturing stream or its
events, the default stream, allocating and freeing, loading modules. Allocate and compile before. What Python
happens to free meanwhile is freed after the block.
"""

from __future__ import annotations

import contextlib
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any

from smfree.cuda.errors import GraphError
from smfree.cuda.memory import Allocation

if TYPE_CHECKING:
    from smfree.cuda.calls import Calls
    from smfree.cuda.streams import Stream


class Graph:
    """What :meth:`Stream.capture` makes: a context manager while it is captured, then ready to launch.

    One launch of a graph runs at a time; the next one waits for it.
    """

    def __init__(self, stream: Stream) -> None:
        if stream is stream.device.default_stream:
            raise GraphError("the default stream cannot be captured; use device.stream()")
        self.device = stream.device
        self._stream = stream
        self._members: list[Stream] = []
        self._kept: dict[int, Any] = {}
        self._executable: Any = None
        self._destroy: weakref.finalize | None = None

    def __repr__(self) -> str:
        state = "ready" if self.ready else "capturing" if self.capturing else "not captured"
        return f"Graph({state}, device={self.device.spec!r})"

    @property
    def capturing(self) -> bool:
        """Whether the ``with`` block is running."""
        return bool(self._members)

    # --- capture ------------------------------------------------------------------------------------

    def __enter__(self) -> Graph:
        if self._executable is not None or self.capturing:
            raise GraphError(f"a graph is captured once (got {self!r}); make another with stream.capture()")
        driver = self.device.driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.device.calls("cuStreamBeginCapture", self._stream.handle, mode)
        self.device.calls.hold_clean_up()
        self.join(self._stream)
        return self

    def join(self, stream: Stream) -> None:
        """``stream`` takes part in the capture."""
        if stream not in self._members:
            self._members.append(stream)
            stream.graph = self

    def keep(self, *objects: Any) -> None:
        """Keep what the nodes use as long as the graph."""
        self._kept.update((id(thing), thing) for thing in objects)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        calls = self.device.calls
        for stream in self._members:
            stream.graph = None
        self._members.clear()
        try:
            if kind is not None:  # that error matters, not what the driver says of the broken capture
                with contextlib.suppress(Exception):
                    _destroy_graph(calls, calls("cuStreamEndCapture", self._stream.handle))
                return
            graph = calls("cuStreamEndCapture", self._stream.handle)
            try:
                executable = calls("cuGraphInstantiate", graph, 0)
            finally:
                _destroy_graph(calls, graph)
        finally:
            calls.resume_clean_up()
        self._executable = executable
        self._destroy = weakref.finalize(self, calls.quiet, "cuGraphExecDestroy", executable)
        self.device.track(self)

    # --- replay -------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether it can be launched."""
        return self._destroy is not None and self._destroy.alive

    def launch(self, stream: Stream | None = None) -> None:
        """Run all of it in ``stream`` (default: the captured one), after the work queued there; asynchronous.

        Raises GraphError when the capture has not ended, the graph was closed or memory of it was freed.
        """
        used = self._usable("launch", stream)
        self.device.calls("cuGraphLaunch", self._executable, used.handle)
        used.keep(self)

    def upload(self, stream: Stream | None = None) -> None:
        """Make the first launch as fast as the others: bring the graph to the device, asynchronously."""
        used = self._usable("upload", stream)
        self.device.calls("cuGraphUpload", self._executable, used.handle)
        used.keep(self)

    def close(self) -> None:
        """Destroy the graph and let go of its memory; wait for its launches first."""
        if self._destroy is not None:
            self._destroy()
        self._kept.clear()

    def _usable(self, what: str, stream: Stream | None) -> Stream:
        if not self.ready:
            remedy = "leave the capturing block first" if self._destroy is None else "it was closed"
            raise GraphError(f"{what} of a graph that is not ready ({self!r}); {remedy}")
        freed = [thing for thing in self._kept.values() if isinstance(thing, Allocation) and thing.freed]
        if freed:
            where = ", ".join(f"{thing.nbytes} bytes at {thing.ptr:#x}" for thing in freed)
            raise GraphError(
                f"{what} of a graph whose memory was freed ({where}); keep the arrays, or capture it again"
            )
        used = self._stream if stream is None else stream
        if used.device is not self.device:
            raise GraphError(
                f"{what}: the stream belongs to {used.device.spec}, the graph to {self.device.spec}"
            )
        return used


def _destroy_graph(calls: Calls, graph: Any) -> None:
    calls.quiet("cuGraphDestroy", graph)
