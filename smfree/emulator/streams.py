"""Streams, events, and the operations that are queued in them; smfree.emulator.timeline runs them.

Times are seconds since the node was made; without a clock they are all zero.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from smfree.emulator.errors import EmulationError
    from smfree.emulator.graphs import Capture, Captured
    from smfree.emulator.process import Context

LEGACY_STREAM = 1
PER_THREAD_STREAM = 2
NON_BLOCKING = 1


class Progress(Enum):
    """How a slice of an activity ended."""

    RAN = auto()
    """Its next event lies beyond the limit, or it is the others' turn."""
    BLOCKED = auto()
    """It waits for something that only others can do."""
    DONE = auto()


class Activity(Protocol):
    """Work that goes on side by side with other work: a running kernel, a copy."""

    @property
    def next_s(self) -> float:
        """When its next event comes; infinite while it waits for others."""

    @property
    def end_s(self) -> float:
        """When it ended; of one that is not done, its latest effect so far."""

    @property
    def polls(self) -> bool:
        """Whether it polls anything; what only waits at barriers of its own is beyond everybody's help."""

    @property
    def polls_host(self) -> bool:
        """Whether it polls memory that somebody outside of the node may write."""

    def advance(self, limit_s: float) -> Progress:
        """Go on until the next event would come after ``limit_s``; infinite: nothing else goes on."""

    def look(self, now_s: float) -> None:
        """Somebody else may have changed memory by now."""

    def last_resort(self) -> bool:
        """Nothing else can happen anywhere: time-outs of its waits. False where they change nothing."""

    def stuck(self) -> list[str]:
        """What it waits for, in lines of a report."""

    def drop(self) -> None:
        """It is given up."""


@dataclass(slots=True, eq=False)
class Unit:
    """A part of a device that does one thing at a time, for ``holder`` now."""

    name: str
    free_at_s: float = 0.0
    holder: Operation | None = None


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
class Room:
    """What a kernel needs of its device before it may start. ``free()``: is it there? ``since_s()``: when it
    came free. ``describe()`` says who is in the way."""

    free: Callable[[], bool]
    since_s: Callable[[], float]
    describe: Callable[[], str]
    lacked: bool = False

    def again(self) -> Room:
        """The same need for another time."""
        return Room(self.free, self.since_s, self.describe)


@dataclass(slots=True, eq=False)
class Operation:
    """One piece of queued work: nothing (a mark), an ``action(start_s)`` that takes effect at its start and
    returns its duration, or an activity that ``begin(start_s)`` starts; ``ended`` hears when that is over.

    ``failed`` hears of the error that ended it; without it the error is raised. A kernel starts ``gap_s``
    after the one it follows.
    """

    stream: Stream
    label: str
    earliest_s: float
    action: Callable[[float], float] | None = None
    begin: Callable[[float], Activity] | None = None
    ended: Callable[[Operation], None] | None = None
    failed: Callable[[EmulationError, float], None] | None = None
    unit: Unit | None = None
    room: Room | None = None
    gap_s: float = 0.0
    after: tuple[Operation, ...] = ()
    wait: WaitValue | None = None
    serial: int = 0
    activity: Activity | None = None
    """It is running while this is set."""
    slices: int = 0
    start_s: float = 0.0
    end_s: float = 0.0
    follow_s: float = 0.0
    """Before this no kernel starts that comes after it."""
    done: bool = False
    lost: Context | None = None
    """The context whose failure or end came before this operation, or one that it waits for, could end."""

    def finish(self, start_s: float, end_s: float) -> None:
        """Mark as done and let go of everything the operation kept alive."""
        self.start_s, self.end_s, self.done = start_s, end_s, True
        before = max((each.follow_s for each in self.after), default=0.0)
        self.follow_s = max(before, end_s + self.gap_s if self.gap_s else 0.0)
        if self.unit is not None and self.unit.holder is self:
            self.unit.holder, self.unit.free_at_s = None, end_s
        self.after, self.action, self.begin, self.wait, self.room, self.activity = (
            (),
            None,
            None,
            None,
            None,
            None,
        )
        self.ended, self.failed = None, None


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
