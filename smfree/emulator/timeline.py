"""The order in which queued work really happens, and the running work of a node side by side.

Work is queued when the host submits it and runs when somebody has to know: at a synchronisation, a query or a
blocking copy. Until then nothing has happened, as on a GPU that is late.

An operation starts when it was submitted, everything before it in its stream and everything it waits for has
ended, and what it needs (a copy engine, room on the SMs) is free. Kernels and copies then run side by side,
those of all devices: with a clock, what comes first goes first, in slices so short that nothing overlooks
what another does meanwhile; without one, the schedule and the seed of the node choose (:class:`Order`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from math import inf
from typing import TYPE_CHECKING

from smfree.emulator.errors import EmulationError
from smfree.emulator.order import Order
from smfree.emulator.streams import Operation, Progress, Stream

if TYPE_CHECKING:
    from smfree.emulator.process import Context

_LOOKAHEAD_S = 0.25e-6
_LOOK_AGAIN_S = 5e-6  # before a kernel that found no room asks again


class Timeline:
    """All queued work of a node."""

    def __init__(self, *, schedule: str, seed: int, clocked: bool) -> None:
        self.clocked = clocked
        self.lookahead_s = _LOOKAHEAD_S
        """How far activities may run ahead of each other."""
        self.running: list[Operation] = []
        """Operations whose activity goes on, in the order of their starts."""
        self.news = 0
        """Grows with every submission and every end."""
        self._order = Order(schedule, seed)
        self._streams: list[Stream] = []
        self._waits: list[Operation] = []
        self._serial = itertools.count(1)

    # ---------------------------------------------------------------------------------------- submission

    def add(self, stream: Stream) -> None:
        """Take a new stream into account."""
        self._streams.append(stream)

    def remove(self, stream: Stream) -> None:
        """Forget a destroyed stream once its queue has run empty; what it still holds runs first."""
        stream.destroyed = True
        self._forget(stream)

    def _forget(self, stream: Stream) -> None:
        if stream.destroyed and not stream.queue and stream in self._streams:
            self._streams.remove(stream)

    def streams_of(self, context: Context) -> list[Stream]:
        """The streams of one context, destroyed ones with queued work included."""
        return [stream for stream in self._streams if stream.context is context]

    def pending(self, context: Context) -> int:
        """How many operations of a context have not ended."""
        return sum(len(stream.queue) for stream in self.streams_of(context))

    def queued(self) -> list[Operation]:
        """Every operation that has not ended, in the order of submission."""
        return sorted((o for stream in self._streams for o in stream.queue), key=lambda o: o.serial)

    def submit(self, operation: Operation) -> Operation:
        """Queue an operation, ordered with the legacy default stream as CUDA orders it."""
        operation.serial = next(self._serial)
        operation.after += tuple(self._implicit(operation.stream))
        operation.stream.queue.append(operation)
        operation.stream.last = operation
        self.news += 1
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

    # -------------------------------------------------------------------------------------------- memory

    def look(self, now_s: float) -> None:
        """Read the memory that streams and kernels wait on; what changed did so by ``now_s``."""
        self._read_waits(now_s)
        for operation in self.running:
            if operation.activity is not None:
                operation.activity.look(now_s)

    def _read_waits(self, now_s: float) -> None:
        if not self._waits:
            return
        self._waits = [operation for operation in self._waits if not operation.done]
        for operation in self._waits:
            wait = operation.wait
            assert wait is not None
            if not wait.satisfied():
                wait.true_since_s = None
            elif wait.true_since_s is None:
                wait.true_since_s = now_s

    def polls(self) -> bool:
        """Whether a stream or a kernel waits for memory, which new work may write."""
        self._waits = [operation for operation in self._waits if not operation.done]
        return any(o.wait is not None and o.wait.true_since_s is None for o in self._waits) or any(
            o.activity is not None and o.activity.polls for o in self.running
        )

    def polled_by_host(self) -> bool:
        """Whether a stream or a kernel waits for memory that somebody outside may write."""
        self._waits = [operation for operation in self._waits if not operation.done]
        return any(o.wait is not None and o.wait.true_since_s is None for o in self._waits) or any(
            o.activity is not None and o.activity.polls_host for o in self.running
        )

    # ----------------------------------------------------------------------------------- what comes next

    def _start_of(self, operation: Operation) -> float | None:
        """When the operation would start, or None while it cannot."""
        start = operation.earliest_s
        for before in operation.after:
            if not before.done:
                return None
            start = max(start, before.end_s, before.follow_s if operation.gap_s else 0.0)
        if any(before.lost is not None for before in operation.after):
            return start if self.clocked else 0.0
        if operation.wait is not None:
            if operation.wait.true_since_s is None:
                return None
            start = max(start, operation.wait.true_since_s)
        if operation.unit is not None:
            if operation.unit.holder is not None:
                return None
            start = max(start, operation.unit.free_at_s)
        if operation.room is not None:
            if not operation.room.free():
                operation.room.lacked = True
                return None
            if operation.room.lacked:
                start = max(start, operation.room.since_s())
        return start if self.clocked else 0.0

    def _ready(self) -> list[tuple[float, int, Operation]]:
        """What can start or go on, with the time of it: the heads of all streams."""
        found = []
        for stream in self._streams:
            if stream.queue:
                operation = stream.queue[0]
                time = self._start_of(operation) if operation.activity is None else operation.activity.next_s
                if time is not None and time != inf:
                    found.append((time, operation.serial, operation))
        return found

    def _held_back(self) -> bool:
        """Whether some kernel could start as soon as there is room for it."""
        heads = (stream.queue[0] for stream in self._streams if stream.queue)
        return any(head.room is not None and head.room.lacked for head in heads)

    def step(self, now_s: float = inf) -> bool:
        """Do the next thing, if it comes at ``now_s`` or before; until then the rest may go on, too."""
        ready = self._ready()
        if not ready:
            return False
        if not self.clocked:
            operation = self._order.choose([each for _, _, each in ready])
            alone = len(ready) == 1 and len(self.running) < 2 and now_s == inf
            time, limit_s = 0.0, inf if alone and not self._held_back() else 0.0
        else:
            time, _, operation = min(ready)
            if time > now_s:
                return False
            ahead = [
                other if each.activity is None else other + self.lookahead_s
                for other, _, each in ready
                if each is not operation
            ]
            if self._held_back():
                ahead.append(time + _LOOK_AGAIN_S)
            if len(self.running) > 1:  # what polls has no next event: this slice may be what wakes it
                ahead.append(time + self.lookahead_s)
            limit_s = max(time, min([now_s, *ahead]))
        operation.slices += 1
        if operation.activity is None:
            self._start(time, operation)
        else:
            self._go_on(operation, limit_s)
        return True

    # -------------------------------------------------------------------------------------------- running

    def _start(self, start_s: float, operation: Operation) -> None:
        operation.start_s = start_s
        operation.lost = next((before.lost for before in operation.after if before.lost is not None), None)
        if operation.lost is not None:
            self._end(operation, start_s)
            return
        duration = 0.0
        try:
            if operation.begin is not None:
                if operation.unit is not None:
                    operation.unit.holder = operation
                operation.activity = operation.begin(start_s)
                self.running.append(operation)
                return
            if operation.action is not None:
                duration = operation.action(start_s)
        except EmulationError as error:
            self._failed(operation, error, start_s)
            return
        except BaseException:
            self._end(operation, start_s)
            raise
        self._end(operation, start_s + (duration if self.clocked else 0.0))

    def _go_on(self, operation: Operation, limit_s: float) -> None:
        activity = operation.activity
        assert activity is not None
        try:
            progress = activity.advance(limit_s)
        except EmulationError as error:
            self._failed(operation, error, max(operation.start_s, activity.end_s))
            return
        except BaseException:
            self._end(operation, operation.start_s)
            raise
        if progress is Progress.DONE:
            operation.end_s = activity.end_s
            if operation.ended is not None:
                operation.ended(operation)
            self._end(operation, activity.end_s)
        elif self._waits:
            self._read_waits(activity.end_s)

    def _failed(self, operation: Operation, error: EmulationError, now_s: float) -> None:
        failed = operation.failed
        self._end(operation, now_s)
        if failed is None:
            raise error
        failed(error, now_s)

    def _end(self, operation: Operation, end_s: float) -> None:
        if operation.done:  # dropped meanwhile
            return
        if operation in self.running:
            self.running.remove(operation)
        operation.stream.queue.popleft()
        self.news += 1
        changes_memory = operation.action is not None
        operation.finish(operation.start_s, end_s if self.clocked else 0.0)
        self._forget(operation.stream)
        if changes_memory:
            self.look(end_s)
        else:
            self._read_waits(end_s)

    def run_until(self, now_s: float) -> None:
        """Let happen what happens at ``now_s`` or before; without a clock, a turn for each that has one."""
        if self.clocked:
            while self.step(now_s):
                pass
            return
        for _ in self._ready():
            self.step(now_s)

    def last_resort(self) -> bool:
        """Nothing can happen: waits time out. False where that changes nothing anywhere."""
        return any([each.activity.last_resort() for each in self.running if each.activity is not None])

    def drop(self, context: Context, now_s: float) -> None:
        """Throw away the work of a context that failed or ended; what waits for it is lost in its turn."""
        for stream in self.streams_of(context):
            for operation in stream.queue:
                if operation.activity is not None:
                    operation.activity.drop()
                    self.running.remove(operation)
                operation.lost = context
                operation.finish(operation.start_s if operation.activity is not None else now_s, now_s)
            stream.queue.clear()
