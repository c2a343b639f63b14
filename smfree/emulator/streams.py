"""Streams, events and the order in which queued device work really happens.

Work is queued when the host submits it and runs when somebody has to know: at a synchronisation, a query or a
blocking copy. Until then nothing has happened, as on a GPU that is late. Among the operations that could run,
the one with the earliest start runs first.

Times are seconds since the node was made. An operation starts when it was submitted, everything before it
in its stream and everything it waits for has ended, and the unit it needs (the SMs, a copy engine) is free;
it runs for as long as its action says. A device runs one kernel at a time. Without a clock
(``clocked=False``) every time is zero and the order is that of submission.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smfree.emulator.graphs import Capture, Captured
    from smfree.emulator.process import Context

LEGACY_STREAM = 1
PER_THREAD_STREAM = 2
NON_BLOCKING = 1


@dataclass(slots=True, eq=False)
class Unit:
    """A part of a device that does one thing at a time. ``gap_s`` passes between two operations on it."""

    name: str
    gap_s: float = 0.0
    free_at_s: float = 0.0


@dataclass(slots=True, eq=False)
class WaitValue:
    """Memory that a stream waits on: it goes on when ``satisfied()``. ``describe()`` says what is missing."""

    satisfied: Callable[[], bool]
    describe: Callable[[], str]
    true_since_s: float | None = None
    """When the condition was first seen true; None while it is false."""

    def again(self) -> WaitValue:
        """The same wait for another time."""
        return WaitValue(self.satisfied, self.describe)


@dataclass(slots=True, eq=False)
class Operation:
    """One piece of queued work. ``action(start_s)`` does it and returns its duration in seconds."""

    stream: Stream
    label: str
    earliest_s: float
    action: Callable[[float], float] | None = None
    unit: Unit | None = None
    after: tuple[Operation, ...] = ()
    wait: WaitValue | None = None
    serial: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    done: bool = False
    dropped: bool = False
    """True when the context failed before this operation ran."""

    def finish(self, start_s: float, end_s: float) -> None:
        """Mark as done and let go of everything the operation kept alive."""
        self.start_s, self.end_s, self.done = start_s, end_s, True
        self.after, self.action, self.wait = (), None, None


@dataclass(slots=True, eq=False)
class Stream:
    """A queue of operations that run in order.

    ``lanes`` hold the copies of its batches by the way they take; a lane has a ``title`` and no handle.
    """

    handle: int
    context: Context
    flags: int = 0
    priority: int = 0
    legacy: bool = False
    destroyed: bool = False
    queue: deque[Operation] = field(default_factory=deque)
    last: Operation | None = None
    """The operation submitted last, done or not."""
    capture: Capture | None = None
    """The capture that writes its work down."""
    title: str = ""
    lanes: dict[Any, Stream] = field(default_factory=dict)

    @property
    def blocking(self) -> bool:
        """Whether the stream is ordered with the legacy default stream of its context."""
        return not self.legacy and not self.flags & NON_BLOCKING

    @property
    def name(self) -> str:
        return self.title or ("the default stream" if self.legacy else f"stream {self.handle:#x}")


@dataclass(slots=True, eq=False)
class Event:
    """A mark in a stream. ``origin``: the event of another process that this one imports, and then is.

    ``key``: the bytes of its handle once it is exported.
    """

    handle: int
    context: Context
    timed: bool = True
    interprocess: bool = False
    origin: Event | None = None
    key: bytes = b""
    destroyed: bool = False
    captured: Captured | None = None
    """What it stands for when it was last recorded in a capture."""
    _operation: Operation | None = None

    @property
    def operation(self) -> Operation | None:
        """That of the latest record, None when there was none."""
        return (self.origin or self)._operation

    @operation.setter
    def operation(self, operation: Operation | None) -> None:
        (self.origin or self)._operation = operation


class Stalled(Exception):
    """The wanted operation cannot run now: some stream waits for memory that nothing queued will write."""


class Timeline:
    """All queued work of a node."""

    def __init__(self, *, clocked: bool) -> None:
        self.clocked = clocked
        self._streams: list[Stream] = []
        self._waits: list[Operation] = []
        self._serial = itertools.count(1)

    def add(self, stream: Stream) -> None:
        """Take a new stream into account."""
        self._streams.append(stream)

    def remove(self, stream: Stream) -> None:
        """Forget a destroyed stream once its queue has run empty; what it still holds runs first."""
        stream.destroyed = True
        if not stream.queue:
            self._streams.remove(stream)

    def streams_of(self, context: Context) -> list[Stream]:
        """The streams of one context, destroyed ones with queued work included."""
        return [stream for stream in self._streams if stream.context is context]

    def pending(self, context: Context) -> int:
        """How many operations of a context have not run."""
        return sum(len(stream.queue) for stream in self.streams_of(context))

    def submit(self, operation: Operation) -> Operation:
        """Queue an operation, ordered with the legacy default stream as CUDA orders it."""
        operation.serial = next(self._serial)
        operation.after += tuple(self._implicit(operation.stream))
        operation.stream.queue.append(operation)
        operation.stream.last = operation
        if operation.wait is not None:
            if operation.wait.satisfied():
                operation.wait.true_since_s = 0.0
            self._waits.append(operation)
        return operation

    def _implicit(self, stream: Stream) -> Iterable[Operation]:
        """What the legacy default stream's rule puts before new work on ``stream``."""
        if stream.last is not None:
            yield stream.last
        for other in self._streams:
            related = (stream.legacy and other.blocking) or (stream.blocking and other.legacy)
            if related and other.context is stream.context and other.last is not None:
                yield other.last

    def look(self, now_s: float) -> None:
        """Read the memory that streams wait on; what became true did so at ``now_s`` at the latest."""
        self._waits = [operation for operation in self._waits if not operation.done]
        for operation in self._waits:
            wait = operation.wait
            assert wait is not None
            if not wait.satisfied():
                wait.true_since_s = None
            elif wait.true_since_s is None:
                wait.true_since_s = now_s

    def _start_of(self, operation: Operation) -> float | None:
        """When the operation would start, or None while it cannot."""
        start = operation.earliest_s
        for before in operation.after:
            if not before.done:
                return None
            start = max(start, before.end_s)
        if operation.wait is not None:
            if operation.wait.true_since_s is None:
                return None
            start = max(start, operation.wait.true_since_s)
        if operation.unit is not None:
            start = max(start, operation.unit.free_at_s)
        return start if self.clocked else 0.0

    def _next(self) -> tuple[float, Operation] | None:
        """The operation that starts first among the heads of all streams."""
        best: tuple[float, int, Operation] | None = None
        for stream in self._streams:
            if stream.queue:
                operation = stream.queue[0]
                start = self._start_of(operation)
                if start is not None and (best is None or (start, operation.serial) < best[:2]):
                    best = start, operation.serial, operation
        return None if best is None else (best[0], best[2])

    def _run(self, start_s: float, operation: Operation) -> None:
        stream = operation.stream
        stream.queue.popleft()
        duration = 0.0
        try:
            if operation.action is not None:
                duration = operation.action(start_s)
        finally:
            end_s = start_s + (duration if self.clocked else 0.0)
            operation.finish(start_s, end_s)
            if operation.unit is not None and self.clocked:
                operation.unit.free_at_s = end_s + operation.unit.gap_s
            if stream.destroyed and not stream.queue:
                self._streams.remove(stream)
        if self._waits:
            self.look(end_s)

    def run_until(self, now_s: float) -> None:
        """Run everything that starts at ``now_s`` or before."""
        while (found := self._next()) is not None and found[0] <= now_s:
            self._run(*found)

    def run_through(self, target: Operation) -> None:
        """Run in order of start until ``target`` is done; :class:`Stalled` when it cannot be reached."""
        while not target.done:
            found = self._next()
            if found is None:
                raise Stalled
            self._run(*found)

    def drop(self, context: Context, now_s: float) -> None:
        """Throw away the queued work of a context that failed."""
        for stream in self.streams_of(context):
            for operation in stream.queue:
                operation.dropped = True
                operation.finish(now_s, now_s)
            stream.queue.clear()

    def blocked_on(self, context: Context) -> list[str]:
        """One line per stream of a context that waits for memory: for what, and how much is queued behind."""
        lines = []
        for stream in self.streams_of(context):
            head = stream.queue[0] if stream.queue else None
            if head is not None and head.wait is not None and head.wait.true_since_s is None:
                behind = len(stream.queue) - 1
                lines.append(f"{stream.name}: {head.wait.describe()}; {behind} operations queued behind it")
        return lines
