"""pytest-benchmark's timer, counting device seconds.

pytest-benchmark reads its timer before and after each round. This one stands still except for what
:meth:`DeviceTimer.batch` and :meth:`DeviceTimer.add` put in, so a round is as long as the device said, and
Python, verification and queueing cost nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from smfree.measure.errors import MeasureError
from smfree.measure.queue import MAX_QUEUED_LAUNCHES, Mark, Queue
from smfree.measure.records import Flag, Record

#: A batch should last this long, so that the 0.5 us resolution of events is far below it.
TARGET_BATCH_S = 200e-6

#: A launch shorter than this many empty launches is limited by launching, not by what it does.
LAUNCH_BOUND_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Device seconds of one launch in a batch of ``launches``; ``held`` = the batch was queued behind a
    blocker."""

    seconds: float
    launches: int
    held: bool


class DeviceTimer:
    """Callable timer returning accumulated device seconds.

    ``mode``: returns the mode of the benchmark fixture it serves ("benchmark(...)" or
    "benchmark.pedantic(...)").
    """

    def __init__(self, queue: Queue, mode: Callable[[], str | None] = lambda: None) -> None:
        self.queue = queue
        self._mode = mode
        self._seconds = 0.0
        self._last: Mark | None = None
        self._explicit = False

    def __call__(self) -> float:
        """Accumulated device seconds.

        Raises MeasureError for a plain ``benchmark(fn)``: its calibration would run ``fn`` up to 200,000
        times.
        """
        if self._mode() == "benchmark(...)":
            raise MeasureError(
                "benchmark(fn) calibrates itself by host time, which does not see asynchronous device "
                "work; use the "
                "`measure` fixture, or benchmark.pedantic(fn, rounds=N)"
            )
        if not self._explicit:
            # Somebody else's pedantic round: wait for the device on both sides, count what it did in between.
            mark = self.queue.mark()
            self.queue.synchronize()
            if self._last is not None:
                self._seconds += self.queue.elapsed_s(self._last, mark)
            self._last = mark
        return self._seconds

    def add(self, seconds: float) -> None:
        """Count device time that a kernel measured itself."""
        self._explicit = True
        self._seconds += seconds

    def explicit(self) -> None:
        """From now on only :meth:`add` and :meth:`batch` advance the timer."""
        self._explicit = True

    def batch(
        self,
        launch: Callable[[int, Any], object],
        launches: int,
        *,
        before_each: Callable[[int, Any], object] | None = None,
        count: bool = True,
    ) -> Sample:
        """Queue ``launch(i, stream)`` for i in range(launches) behind a blocker and return the time of one.

        ``before_each(i, stream)`` runs outside the timed windows (cache flush); then every launch has its own
        pair of events. ``count=False`` leaves the accumulated time alone. Everything that ``launch`` needs
        must be compiled and loaded before: loading a module behind a blocker can wait for the blocked stream.
        Raises MeasureError for a bad count or when the work was not on the timer's stream.
        """
        if not 1 <= launches <= MAX_QUEUED_LAUNCHES:
            raise MeasureError(
                f"a batch holds 1 to {MAX_QUEUED_LAUNCHES} launches (got {launches}); more could fill the "
                "launch queue "
                "while the stream is held"
            )
        queue = self.queue
        windows: list[tuple[Mark, Mark]] = []
        in_time = True
        with collector_paused():
            held = queue.hold()
            try:
                if before_each is None:
                    first = queue.mark()
                    for index in range(launches):
                        launch(index, queue.stream)
                    windows.append((first, queue.mark()))
                else:
                    for index in range(launches):
                        before_each(index, queue.stream)
                        first = queue.mark()
                        launch(index, queue.stream)
                        windows.append((first, queue.mark()))
            finally:
                in_time = queue.release()
        queue.synchronize()
        seconds = sum(queue.elapsed_s(first, second) for first, second in windows) / launches
        if count:
            self.add(seconds)
        return Sample(seconds, launches, held and in_time)


@contextmanager
def collector_paused() -> Iterator[None]:
    """No garbage collection within the block: it could free device memory, which waits for a held stream."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def launches_for(seconds: float, target_s: float = TARGET_BATCH_S) -> int:
    """How many launches of ``seconds`` each make a batch of about ``target_s``: 1 to 32."""
    if seconds <= 0.0:
        return MAX_QUEUED_LAUNCHES
    return max(1, min(MAX_QUEUED_LAUNCHES, round(target_s / seconds)))


@dataclass(frozen=True, slots=True)
class Floor:
    """What an empty launch takes, in seconds, measured like everything else. Stored with each point."""

    seconds: float

    def launch_bound(self, seconds: float) -> bool:
        return seconds < LAUNCH_BOUND_FACTOR * self.seconds

    def flag(self, record: Record) -> None:
        """Say of a record that its launches were as good as empty, if so."""
        if self.launch_bound(record.seconds):
            record.add_flag(
                Flag.LAUNCH_BOUND,
                f"{record.seconds * 1e6:.2f} us is less than twice an empty launch "
                f"({self.seconds * 1e6:.2f} us)",
            )

    def check(self, seconds: float) -> None:
        """Refuse a time that no launch can have: the work ran elsewhere or was not waited for."""
        if seconds < 0.5 * self.seconds:
            raise MeasureError(
                f"a launch cannot be faster than an empty one ({seconds * 1e6:.3f} us against "
                f"{self.seconds * 1e6:.3f} us); launch on the stream that the timer hands out"
            )
