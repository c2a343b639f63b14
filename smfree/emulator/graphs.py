"""Stream capture and CUDA graphs: work that is written down instead of queued, and replayed from there.

A node is one piece of work with the nodes it comes after. While a stream captures, ``tips[stream]`` are the
nodes that its next one comes after; an event recorded then stands for the tips of that moment, and a stream
that waits for it joins the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from smfree.emulator.process import Context
    from smfree.emulator.streams import Operation, Stream


class CaptureMode(IntEnum):
    """CUstreamCaptureMode: whom potentially unsafe calls of other threads and of this one disturb."""

    GLOBAL = 0
    THREAD_LOCAL = 1
    RELAXED = 2


@dataclass(slots=True, eq=False)
class Node:
    """Work of a graph. ``submit(stream, after)`` queues it; ``branch``: the number of the captured stream."""

    handle: int
    label: str
    branch: int
    after: frozenset[int]
    submit: Callable[[Stream, tuple[Operation, ...]], Operation]


@dataclass(slots=True, eq=False)
class Graph:
    """Nodes in the order of their capture, which no dependency contradicts. ``contexts``: per branch."""

    context: Context
    nodes: list[Node] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)

    def before(self, tips: Iterable[int]) -> set[int]:
        """All nodes that come before ``tips``, and these."""
        found: set[int] = set()
        todo = list(tips)
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo.extend(self.nodes[index].after)
        return found

    def leaves(self) -> list[int]:
        """The nodes that no other comes after."""
        inner = frozenset[int]().union(*(node.after for node in self.nodes))
        return [index for index in range(len(self.nodes)) if index not in inner]


@dataclass(slots=True, eq=False)
class Capture:
    """A capture sequence from its first stream's beginning to its end."""

    number: int
    origin: Stream
    mode: CaptureMode
    thread: int
    graph: Graph
    handle: int
    """Of the graph."""
    tips: dict[Stream, frozenset[int]] = field(default_factory=dict)
    broken: str = ""
    """What invalidated it."""

    def join(self, stream: Stream, tips: frozenset[int]) -> None:
        """A stream takes part, or waits for more of the same capture."""
        if stream not in self.tips:
            self.graph.contexts.append(stream.context)
            stream.capture = self
        self.tips[stream] = self.tips.get(stream, frozenset()) | tips

    def add(
        self,
        stream: Stream,
        handle: int,
        label: str,
        submit: Callable[[Stream, tuple[Operation, ...]], Operation],
    ) -> None:
        """Write down work of a stream that takes part."""
        branch = list(self.tips).index(stream)
        self.graph.nodes.append(Node(handle, label, branch, self.tips[stream], submit))
        self.tips[stream] = frozenset({len(self.graph.nodes) - 1})

    def unjoined(self) -> list[tuple[Stream, Node]]:
        """The last nodes of streams that the first one did not wait for."""
        joined = self.graph.before(self.tips[self.origin])
        return [
            (stream, self.graph.nodes[index])
            for stream, tips in self.tips.items()
            for index in sorted(tips - joined)
        ]

    def end(self) -> None:
        """Its streams capture no longer."""
        for stream in self.tips:
            stream.capture = None


@dataclass(slots=True, eq=False)
class Executable:
    """An instantiated graph: its nodes, one hidden stream per branch, and the last launch's end."""

    context: Context
    graph: Graph
    streams: list[Stream]
    last: Operation | None = None


Captured = tuple[Capture, frozenset[int]]
"""What an event recorded in a capture stands for."""
