"""How collectives are timed: who is held, which rank counts, what several processes tell each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.ipc.allgather import allgather, prepare
from kernels.ipc.group import Group
from smfree.cuda import Device, LaunchError
from smfree.measure.clocks import ClockWatch
from smfree.measure.collective import MAX_QUEUED_COLLECTIVES, Batch, Lineup, timed
from smfree.measure.errors import MeasureError
from smfree.measure.fixture import Measure
from smfree.measure.queue import Blocker
from smfree.measure.records import Flag, Memory, Record, Traffic
from smfree.measure.timer import DeviceTimer
from smfree.ranks import RankContext, spawn
from tests.measure.fakes import FakeDevice, FakeInstruments
from tests.measure.test_records import record

# --- fakes: a stream notes what it is told, an event knows its time -----------------------------------------


@dataclass
class FakeEvent:
    at_us: float

    def elapsed_us(self, since: FakeEvent) -> float:
        return self.at_us - since.at_us


@dataclass
class FakeStream:
    """Every collective takes ``takes_us`` on it, from 100 us on."""

    takes_us: float
    notes: list[str]
    name: str
    done: int = 0

    def record(self) -> FakeEvent:
        self.notes.append(f"mark {self.name}")
        return FakeEvent(100.0 + self.takes_us * self.done)

    def synchronize(self) -> None:
        self.notes.append(f"wait {self.name}")


@dataclass
class FakeBlocker:
    notes: list[str]
    can_hold: bool = True
    in_time: bool = True
    reason: str = ""

    def hold(self, *streams: FakeStream) -> bool:
        self.notes.append("hold " + " ".join(stream.name for stream in streams))
        return self.can_hold

    def release(self) -> bool:
        self.notes.append("release")
        return self.in_time


@dataclass
class FakeRanks:
    """Ranks whose collectives take so many microseconds each."""

    takes_us: tuple[float, ...]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.streams = [FakeStream(us, self.notes, f"s{i}") for i, us in enumerate(self.takes_us)]
        self.members = [SimpleNamespace(rank=i, device=None, stream=s) for i, s in enumerate(self.streams)]

    def launch(self, index: int) -> None:
        self.notes.append(f"launch {index}")
        for stream in self.streams:
            stream.done += 1

    def lineup(self, exchange: Any = None, **changes: Any) -> Lineup:
        blocker: Any = FakeBlocker(self.notes, **changes)
        return Lineup(self.members, blocker, exchange=exchange)


def test_the_slowest_rank_counts_and_one_collective_of_a_batch() -> None:
    batch = FakeRanks((3.0, 7.5, 5.0)).lineup().run(lambda _: None, 1)
    assert batch.ranks_s == (0.0, 0.0, 0.0)
    ranks = FakeRanks((3.0, 7.5, 5.0))
    batch = ranks.lineup().run(ranks.launch, 4)
    assert batch.ranks_s == pytest.approx((3e-6, 7.5e-6, 5e-6))
    assert batch.seconds == pytest.approx(7.5e-6)
    assert batch.skew_s == pytest.approx(4.5e-6)
    assert batch.launches == 4


def test_all_ranks_are_held_by_one_call_until_everything_is_queued() -> None:
    ranks = FakeRanks((1.0, 1.0))
    assert ranks.lineup().run(ranks.launch, 2).held
    assert ranks.notes == [
        "hold s0 s1", "mark s0", "mark s1", "launch 0", "launch 1", "mark s0", "mark s1", "release",
        "wait s0", "wait s1",
    ]  # fmt: skip


@pytest.mark.parametrize("changes", [{"can_hold": False}, {"in_time": False}])
def test_a_batch_without_a_blocker_or_released_too_early_says_so(changes: dict[str, bool]) -> None:
    ranks = FakeRanks((1.0,))
    assert not ranks.lineup(**changes).run(ranks.launch, 1).held


def test_streams_are_let_go_when_a_launch_fails() -> None:
    ranks = FakeRanks((1.0, 1.0))

    def fails(_: int) -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        ranks.lineup().run(fails, 1)
    assert ranks.notes[-1] == "release"


def test_ranks_of_other_processes_are_told_of_and_waited_for() -> None:
    """This process has rank 0, a slower one is elsewhere and was not held."""
    ranks = FakeRanks((2.0,))

    def exchange(data: bytes, what: str) -> list[bytes]:
        ranks.notes.append(what)
        return [data, json.dumps([[9e-6], False]).encode() if data else b""]

    batch = ranks.lineup(exchange).run(ranks.launch, 1)
    assert batch == Batch((pytest.approx(2e-6), 9e-6), 1, False)
    start, release = ranks.notes.index("start of a sample"), ranks.notes.index("release")
    assert ranks.notes.index("launch 0") < start < release < ranks.notes.index("times")


# --- a point: what is verified, sampled and recorded --------------------------------------------------------


class FakeMeasure:
    """A Measure over fake ranks, with a real clock unless ``deterministic``."""

    note_clock = Measure.note_clock
    exchange = None

    def __init__(
        self, ranks: FakeRanks, *, deterministic: bool = False, rounds: int = 3, **changes: Any
    ) -> None:
        self.ranks, self.deterministic, self._rounds = ranks, deterministic, rounds
        blocker = FakeBlocker(ranks.notes, **changes)
        tally = SimpleNamespace(since=lambda: [{"launches": 2}, {"launches": 2}])
        fill = lambda: ranks.notes.append("fill L2")  # noqa: E731
        self.node = SimpleNamespace(blocker=blocker, tally=lambda: tally, fill_l2=fill)
        self.device, self.spec = FakeDevice("emu:h100" if deterministic else "cuda:0"), "cuda:0"
        self.instruments = FakeInstruments(self.device)
        self.timer = DeviceTimer(self.instruments.queue)
        self.clock_watch = ClockWatch()

    def node_of(self, device: object) -> Any:
        return self.node

    def run(self, work: Callable[[], Any]) -> Any:
        return work()

    def verify(self, verify: Callable[[], None]) -> None:
        self.ranks.notes.append("verify")
        verify()

    def pedantic(self, target: Callable[[], None]) -> None:
        for _ in range(self._rounds):
            target()

    def record(self, point: Any, seconds: list[float], *rest: Any) -> Record:
        return record(samples_s=seconds, memory=Memory.PEER, counters=rest[1])

    def finish(self, done: Record) -> Record:
        return done


POINT: Any = SimpleNamespace(traffic=Traffic(8, 4, 4))


def launches_between(notes: list[str]) -> list[tuple[bool, int]]:
    """(held, launches) of each batch."""
    found: list[tuple[bool, int]] = []
    held = False
    for note in notes:
        held = note.startswith("hold") or (held and note != "release")
        if note == "launch 0":
            found.append((held, 0))
        if note.startswith("launch"):
            found[-1] = (found[-1][0], found[-1][1] + 1)
    return found


def test_a_point_is_verified_before_it_is_timed_and_every_sample_is_the_slowest_rank() -> None:
    """5 us: 40 would fill 200 us, 8 fit the queue."""
    ranks = FakeRanks((2.0, 5.0))
    measure: Any = FakeMeasure(ranks)
    done = timed(measure, POINT, ranks.members, ranks.launch, lambda: None)
    assert launches_between(ranks.notes) == [(False, 1), (True, 1), (True, 8), (True, 8), (True, 8)]
    assert ranks.notes.index("verify") < ranks.notes.index("hold s0 s1")
    assert done.samples_s == pytest.approx([5e-6] * 3)
    assert done.per_rank["seconds"] == pytest.approx([2e-6, 5e-6])
    assert done.per_rank["launches"] == [2, 2]
    assert done.timing["launches_per_sample"] == MAX_QUEUED_COLLECTIVES
    assert done.timing["skew_s_per_sample"] == pytest.approx([3e-6] * 3)
    assert measure.timer() == pytest.approx(15e-6)
    assert done.flags == []


def test_long_collectives_are_sampled_one_by_one() -> None:
    ranks = FakeRanks((900.0, 1000.0))
    measure: Any = FakeMeasure(ranks)
    timed(measure, POINT, ranks.members, ranks.launch, lambda: None)
    assert launches_between(ranks.notes)[2:] == [(True, 1)] * 3


def test_a_wrong_result_is_no_number() -> None:
    ranks = FakeRanks((2.0, 5.0))
    measure: Any = FakeMeasure(ranks)

    def wrong() -> None:
        raise AssertionError("rank 1 has 4 wrong bytes")

    with pytest.raises(AssertionError, match="rank 1 has 4 wrong bytes"):
        timed(measure, POINT, ranks.members, ranks.launch, wrong)
    assert launches_between(ranks.notes) == [(False, 1)]


def test_without_a_blocker_the_point_says_that_ranks_may_have_started_apart() -> None:
    ranks = FakeRanks((2.0, 5.0))
    measure: Any = FakeMeasure(ranks, can_hold=False)
    measure.node.blocker.reason = "no host-mapped memory"
    done = timed(measure, POINT, ranks.members, ranks.launch, lambda: None)
    assert done.flags == [Flag.NO_BLOCKER]
    assert "ranks may have started one after the other: no host-mapped memory" in done.notes[0]


def test_a_short_collective_is_launch_bound() -> None:
    """An empty launch takes 2 us."""
    ranks = FakeRanks((3.0, 3.9))
    measure: Any = FakeMeasure(ranks)
    assert Flag.LAUNCH_BOUND in timed(measure, POINT, ranks.members, ranks.launch, lambda: None).flags


@pytest.mark.parametrize("cold", [False, True])
def test_a_deterministic_clock_samples_the_first_collective_unless_its_caches_were_cold(cold: bool) -> None:
    ranks = FakeRanks((2.0, 5.0))
    measure: Any = FakeMeasure(ranks, deterministic=True, rounds=1)
    done = timed(measure, POINT, ranks.members, ranks.launch, lambda: None, cold_counters=cold)
    assert launches_between(ranks.notes) == [(True, 1)] * (2 if cold else 1)
    assert ("fill L2" in ranks.notes) is cold
    assert done.samples_s == pytest.approx([5e-6])


# --- the blocker on a node ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair() -> list[Device]:
    return Device.open_all("emu:a100x2")


def test_one_word_holds_streams_of_two_gpus_and_lets_them_go_together(pair: list[Device]) -> None:
    streams = [device.stream() for device in pair]
    blocker = Blocker(pair[0])
    assert blocker.hold(*streams)
    first = [stream.record() for stream in streams]
    assert not any(event.query() for event in first)
    assert blocker.release()
    for stream in streams:
        stream.synchronize()
    assert all(event.query() for event in first)
    assert blocker.hold(*streams), "the word counts on: it holds again"
    held = streams[1].record()
    assert not held.query()
    blocker.release()


def test_streams_that_wait_already_are_let_go_when_one_cannot_be_held(pair: list[Device]) -> None:
    good, blocker = pair[0].stream(), Blocker(pair[0])

    class Refuses:
        def wait_value(self, ptr: int, value: int) -> None:
            raise LaunchError("no stream memory operations on this device")

    assert not blocker.hold(good, Refuses())
    assert blocker.reason == "no stream memory operations on this device"
    good.synchronize()  # returns: nothing holds it
    assert not blocker.hold(good), "what was refused once is not tried again"


def test_held_streams_are_not_held_twice(pair: list[Device]) -> None:
    blocker = Blocker(pair[0])
    assert blocker.hold(pair[0].stream())
    with pytest.raises(MeasureError, match="already held"):
        blocker.hold(pair[1].stream())
    blocker.release()


# --- ranks of several processes -----------------------------------------------------------------------------


def timed_rank(context: RankContext) -> tuple[Batch, Batch]:
    """In a process of its own: two batches of gathers that are timed together with the other ranks."""
    group = Group.join(context.device, context.rendezvous, pool_bytes=1 << 16)
    with group, group.symmetric(8192, "timed") as dst:
        (member,) = group.members
        dst.array(member.rank).fill(member.rank, stream=member.stream)
        prepare(group, dst, way="sm.push")
        lineup = Lineup(
            group.members,
            Blocker(context.device),
            wait=lambda: group.wait(30.0),
            exchange=context.rendezvous.all_gather,
        )
        return tuple(lineup.run(lambda _: allgather(group, dst, way="sm.push"), count) for count in (1, 3))


def test_ranks_of_processes_time_themselves_and_agree_on_the_slowest() -> None:
    told = spawn(timed_rank, 2, device="emu:a100x2", timeout_s=60.0)
    assert told[0] == told[1], "every process knows the times of all"
    for batch, launches in zip(told[0], (1, 3), strict=True):
        assert (batch.launches, batch.held, len(batch.ranks_s)) == (launches, True, 2)
        assert 1e-6 < min(batch.ranks_s) <= batch.seconds < 1e-3
