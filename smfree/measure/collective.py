"""Times of collectives: every rank by events on its own stream, the slowest rank counts.

All ranks' streams are held by one word and let go together. An event is recorded in each when it goes on, and
one behind the rank's part. A sample is the maximum over the ranks, a result the median over samples: the
average over ranks would hide the one that everybody waits for. Where ranks end with a barrier they end
together, and the difference of their times is that of their starts.

Ranks of other processes are held by words of their own, which the processes release after a barrier.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from smfree.measure.nodes import Node
from smfree.measure.queue import Blocker
from smfree.measure.records import Flag, Record
from smfree.measure.timer import collector_paused, launches_for
from smfree.model.estimators import median

if TYPE_CHECKING:
    from smfree.measure.fixture import Measure
    from smfree.measure.points import Point

#: Collectives in a batch. A way that copies queues some six operations per peer for each, and a full launch
#: queue would block the host while it must release the streams.
MAX_QUEUED_COLLECTIVES = 8

METHOD = "events on each rank's stream, maximum over ranks; one word holds all streams"

Exchange = Callable[[bytes, str], Sequence[bytes]]
"""``all_gather`` of a rendezvous (smfree.ranks): every process's bytes, by rank."""


class Member(Protocol):
    """A rank of this process; its collectives queue on ``stream``."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> Any: ...
    @property
    def stream(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Seconds of one collective by rank, out of ``launches`` back to back. ``held``: no rank ran ahead while
    the others were still being queued."""

    ranks_s: tuple[float, ...]
    launches: int
    held: bool

    @property
    def seconds(self) -> float:
        return max(self.ranks_s)

    @property
    def skew_s(self) -> float:
        """Of the starts, where ranks end together; else of the ends, too."""
        return max(self.ranks_s) - min(self.ranks_s)


class Lineup:
    """Starts all ranks together. ``wait`` returns when the members' streams are idle; ``exchange`` is None
    where all ranks are in this process."""

    def __init__(
        self,
        members: Sequence[Member],
        blocker: Blocker,
        wait: Callable[[], None] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._members = tuple(members)
        self._blocker = blocker
        self._wait = wait or self._synchronize
        self._exchange = exchange

    def run(self, launch: Callable[[int], object], launches: int, *, hold: bool = True) -> Batch:
        """Queue ``launch(i)`` for i in range(launches) behind the blocker, let go, wait, read the events."""
        streams = [member.stream for member in self._members]
        held, in_time = False, True
        with collector_paused():
            try:
                held = hold and self._blocker.hold(*streams)
                first = [stream.record() for stream in streams]
                for index in range(launches):
                    launch(index)
                last = [stream.record() for stream in streams]
                if self._exchange is not None:
                    self._exchange(b"", "start of a sample")
            finally:
                in_time = self._blocker.release()
        self._wait()
        own = [end.elapsed_us(start) * 1e-6 / launches for start, end in zip(first, last, strict=True)]
        return Batch(*self._of_all(own, launches, held and in_time))

    def _of_all(self, own: list[float], launches: int, held: bool) -> tuple[tuple[float, ...], int, bool]:
        if self._exchange is None:
            return tuple(own), launches, held
        told = [json.loads(text) for text in self._exchange(json.dumps([own, held]).encode(), "times")]
        return tuple(time for times, _ in told for time in times), launches, all(held for _, held in told)

    def _synchronize(self) -> None:
        for member in self._members:
            member.stream.synchronize()


def timed(
    measure: Measure,
    point: Point,
    members: Sequence[Member],
    launch: Callable[[int], object],
    verify: Callable[[], None],
    *,
    wait: Callable[[], None] | None = None,
    cold_counters: bool = False,
) -> Record:
    """Verify, time and record a collective of all ranks.

    ``launch(i)`` queues the part of every local member, on its stream. The first one is verified: ``verify``
    compares the outcome on every rank and raises when it is wrong. It also warms up, and the samples follow;
    on a deterministic clock it is itself the sample. Everything that a first launch does must have been done.
    ``wait`` returns when all that was launched is done (default: synchronise the streams).

    Counters (emulator) are those of the first collective. With ``cold_counters`` it meets an L2 that has
    nothing of it, and another one is the sample. Those of the lowest local rank are the record's, all of them
    in ``per_rank``.
    """
    node = measure.node_of(members[0].device)
    lineup = Lineup(members, node.blocker, wait, measure.exchange)
    measure.timer.explicit()
    measure.instruments.prepare()
    if cold_counters:
        node.fill_l2()
    before = node.tally()
    first = measure.run(lambda: lineup.run(launch, 1, hold=measure.deterministic))
    counted = before.since()
    measure.verify(partial(agreed, verify, measure.exchange))
    if cold_counters or not measure.deterministic:
        first = measure.run(lambda: lineup.run(launch, 1))
    count = min(MAX_QUEUED_COLLECTIVES, launches_for(first.seconds))
    batches: list[Batch] = []
    clocks: list[float | None] = []

    def target() -> None:
        batches.append(first if measure.deterministic else lineup.run(launch, count))
        clocks.append(None if measure.deterministic else measure.instruments.sm_clock_mhz())
        measure.timer.add(batches[-1].seconds)

    measure.pedantic(target)
    record = measure.record(
        point, [batch.seconds for batch in batches], [], counted[0], point.traffic.payload_bytes
    )
    measure.note_clock(
        record, clocks, f"of {measure.spec}: delta clock64 / delta globaltimer after each sample"
    )
    if not measure.deterministic:
        record.flag_reduced(sum(measure.clock_watch.settle(mhz) for mhz in clocks), len(clocks))
    record.per_rank = _per_rank(batches, counted)
    _timing(record, measure, node, batches)
    return measure.finish(record)


def agreed(verify: Callable[[], None], exchange: Exchange | None) -> None:
    """Verify on every rank; all fail where one does, so that none waits for it."""
    problem: AssertionError | None = None
    try:
        verify()
    except AssertionError as error:
        problem = error
    if exchange is not None:
        said = exchange((str(problem) or "wrong" if problem else "").encode(), "what verifying found")
        wrong = [f"rank {rank} has found: {text.decode()}" for rank, text in enumerate(said) if text]
        problem = problem or (AssertionError(wrong[0]) if wrong else None)
    if problem is not None:
        raise problem


def _per_rank(batches: Sequence[Batch], counted: Sequence[Mapping[str, int]]) -> dict[str, list[float]]:
    """Median seconds of each rank, and what each counted, as far as it counted anything."""
    found: dict[str, list[float]] = {}
    if batches:
        found["seconds"] = [median(times) for times in zip(*(b.ranks_s for b in batches), strict=True)]
    for name in counted[0]:
        amounts: list[float] = [one.get(name, 0) for one in counted]
        if any(amounts) and not name.startswith("instructions["):
            found[name] = amounts
    return found


def _timing(record: Record, measure: Measure, node: Node, batches: Sequence[Batch]) -> None:
    floor = measure.instruments.floor
    record.timing = {
        "method": METHOD,
        "launches_per_sample": batches[0].launches if batches else 0,
        "empty_launch_s": floor.seconds,
        "samples_behind_blocker": sum(batch.held for batch in batches),
        "blocker": node.blocker.reason or "cuStreamWaitValue32",
        "ranks_s_per_sample": [list(batch.ranks_s) for batch in batches],
        "skew_s_per_sample": [batch.skew_s for batch in batches],
    }
    if not all(batch.held for batch in batches):
        reason = node.blocker.reason or "the host released the streams after its time-out"
        record.add_flag(Flag.NO_BLOCKER, f"ranks may have started one after the other: {reason}")
    floor.flag(record)
