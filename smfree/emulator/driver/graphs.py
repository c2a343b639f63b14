"""Stream capture and CUDA graphs. What ends or breaks a capture is refused with the documented code."""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver.base import entry
from smfree.emulator.driver.errors import CUresult, Refusal, invalid, unsupported
from smfree.emulator.driver.streams import StreamCalls
from smfree.emulator.graphs import Capture, CaptureMode, Executable, Graph
from smfree.emulator.streams import NON_BLOCKING, Operation, Stream

_STATUS = cuda.CUstreamCaptureStatus
_AUTO_FREE, _UPLOAD, _NODE_PRIORITY = 1, 2, 8
_EDGE_DATA = "edgeData_out" in (cuda.cuStreamGetCaptureInfo.__doc__ or "")
"""CUDA 13's cuStreamGetCaptureInfo also returns the edges' data."""


class GraphCalls(StreamCalls):
    """cuStream*Capture*, cuGraphInstantiate, cuGraphLaunch and theirs."""

    # ------------------------------------------------------------------------------------------- capture

    @entry(0)
    def cuStreamBeginCapture(self, hStream: Any, mode: Any) -> None:
        stream = self._stream(hStream)
        if stream.legacy:
            raise Refusal(
                CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                "the legacy default stream cannot be captured; create a stream",
            )
        if stream.capture is not None:
            raise invalid(f"{stream.name} is capturing already; end that with cuStreamEndCapture")
        kind = _mode_of(mode)
        graph = Graph(stream.context)
        handle, number = self.process.name(graph), self.node.new_handle()
        capture = Capture(number, stream, kind, threading.get_ident(), graph, handle)
        capture.join(stream, frozenset())
        self.process.captures.append(capture)

    @entry(1)
    def cuStreamEndCapture(self, hStream: Any) -> Any:
        stream = self._stream(hStream)
        capture = stream.capture
        if capture is None:
            raise invalid(f"{stream.name} is not capturing; call cuStreamBeginCapture first")
        if stream is not capture.origin:
            raise self._break(
                capture,
                CUresult.CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
                f"the capture began in {capture.origin.name}, not in {stream.name}; end it there",
            )
        if capture.mode is not CaptureMode.RELAXED and capture.thread != threading.get_ident():
            raise Refusal(
                CUresult.CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
                f"the capture of {stream.name} must be ended by the thread that began it, unless its mode is "
                "CU_STREAM_CAPTURE_MODE_RELAXED",
            )
        unjoined = capture.unjoined()
        self._end(capture)
        if capture.broken:
            code, why = CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, f"by {capture.broken}"
            raise self._discard(capture, code, f"the capture of {stream.name} was invalidated {why}")
        if unjoined:
            lines = "".join(f"\n  {other.name}: {node.label}" for other, node in unjoined)
            raise self._discard(
                capture,
                CUresult.CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
                f"{stream.name} did not wait for all that joined its capture; record an event after it and "
                f"let {stream.name} wait for that. Left over:{lines}",
            )
        return cuda.CUgraph(capture.handle)

    def _end(self, capture: Capture) -> None:
        capture.end()
        self.process.captures.remove(capture)

    def _discard(self, capture: Capture, code: Any, message: str) -> Refusal:
        del self.process.objects[capture.handle]
        return Refusal(code, message)

    @entry(1)
    def cuStreamIsCapturing(self, hStream: Any) -> Any:
        return self._status(self._stream(hStream))

    def _status(self, stream: Stream) -> Any:
        if stream.legacy:
            self._refuse_implicit(stream, breaks=False)
        if stream.capture is None:
            return _STATUS.CU_STREAM_CAPTURE_STATUS_NONE
        if stream.capture.broken:
            return _STATUS.CU_STREAM_CAPTURE_STATUS_INVALIDATED
        return _STATUS.CU_STREAM_CAPTURE_STATUS_ACTIVE

    @entry(6 if _EDGE_DATA else 5)
    def cuStreamGetCaptureInfo(self, hStream: Any) -> tuple[Any, ...]:
        """All edges are plain: their data is zero."""
        stream = self._stream(hStream)
        status, capture = self._status(stream), stream.capture
        tips = sorted(capture.tips[stream]) if capture is not None and not capture.broken else []
        nodes = [] if capture is None else [cuda.CUgraphNode(capture.graph.nodes[tip].handle) for tip in tips]
        number, graph = (0, 0) if capture is None else (capture.number, capture.handle)
        edges = ([cuda.CUgraphEdgeData() for _ in tips],) if _EDGE_DATA else ()
        return (status, cuda.cuuint64_t(number), cuda.CUgraph(graph), nodes, *edges, len(tips))

    @entry(1)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        wanted = _mode_of(mode)
        before = getattr(self.process.threads, "capture_mode", CaptureMode.GLOBAL)
        self.process.threads.capture_mode = wanted
        return cuda.CUstreamCaptureMode(int(before))

    # -------------------------------------------------------------------------------------------- graphs

    @entry(1)
    def cuGraphInstantiate(self, hGraph: Any, flags: int) -> Any:
        graph = self._graph(hGraph)
        if int(flags) & ~(_AUTO_FREE | _NODE_PRIORITY):
            raise unsupported(
                f"flags {int(flags):#x}: graphs that the device launches, or that are uploaded when they are "
                "instantiated, are not emulated; use 0"
            )
        streams = [context.new_stream(NON_BLOCKING) for context in graph.contexts]
        for number, stream in enumerate(streams):
            stream.title = f"branch {number} of a graph"
        return cuda.CUgraphExec(self.process.name(Executable(graph.context, graph, streams)))

    def _graph(self, handle: Any) -> Graph:
        value = int(handle)
        found = self.process.objects.get(value)
        if not isinstance(found, Graph):
            raise invalid(f"{value:#x} is no graph: it was destroyed or never made")
        if any(capture.graph is found for capture in self.process.captures):
            raise invalid(f"graph {value:#x} is still being captured; end that with cuStreamEndCapture")
        return found

    def _executable(self, handle: Any) -> Executable:
        found = self.process.objects.get(int(handle))
        if not isinstance(found, Executable):
            raise invalid(f"{int(handle):#x} is no executable graph: it was destroyed or never made")
        return found

    def _launchable(self, handle: Any) -> Executable:
        found = self._executable(handle)
        for stream in found.streams:
            self._check_fault(stream.context)
            if stream.destroyed:
                raise invalid(
                    f"executable graph {int(handle):#x} uses {stream.context}, whose context has ended"
                )
        return found

    @entry(0)
    def cuGraphLaunch(self, hGraphExec: Any, hStream: Any) -> None:
        """Queue the nodes in streams of their own; ``hStream`` holds the launch's begin and end."""
        found, stream = self._launchable(hGraphExec), self._stream(hStream)
        self._no_child(stream, "the launch of a graph")
        begin = self._begin_launch(found, stream, "begin of a graph's launch")
        done: list[Operation] = []
        for node in found.graph.nodes:
            after = tuple(done[index] for index in sorted(node.after)) or (begin,)
            done.append(node.submit(found.streams[node.branch], after))
        ends = tuple(done[index] for index in found.graph.leaves())
        found.last = self._submit(stream, "end of a graph's launch", after=ends)

    @entry(0)
    def cuGraphUpload(self, hGraphExec: Any, hStream: Any) -> None:
        """Takes its place in the stream; that the first launch is faster then is not modelled."""
        found, stream = self._launchable(hGraphExec), self._stream(hStream)
        self._no_child(stream, "the upload of a graph")
        found.last = self._begin_launch(found, stream, "upload of a graph")

    def _begin_launch(self, found: Executable, stream: Stream, label: str) -> Operation:
        after = () if found.last is None else (found.last,)
        cost_s = self._launch_cost_s(stream.context.device)
        return self._submit(stream, label, after=after, host_cost_s=cost_s)

    def _no_child(self, stream: Stream, what: str) -> None:
        if stream.capture is not None:
            raise unsupported(f"{what} in a stream that captures (a child graph) is not emulated")

    @entry(0)
    def cuGraphExecDestroy(self, hGraphExec: Any) -> None:
        """A launch that is under way ends as it would have."""
        found = self._executable(hGraphExec)
        del self.process.objects[int(hGraphExec)]
        for stream in found.streams:
            if not stream.destroyed:
                del self.process.objects[stream.handle]
                self.node.timeline.remove(stream)

    @entry(0)
    def cuGraphDestroy(self, hGraph: Any) -> None:
        """Executable graphs made of it stay."""
        self._graph(hGraph)
        del self.process.objects[int(hGraph)]


def _mode_of(mode: Any) -> CaptureMode:
    try:
        return CaptureMode(int(mode))
    except ValueError:
        raise invalid(f"mode must be a CUstreamCaptureMode, got {mode}") from None
