"""The device timer against a fake clock (cases G01, G02, G04, G05, G12)."""

from __future__ import annotations

import time

import pytest

from smfree.measure.errors import MeasureError
from smfree.measure.queue import MAX_QUEUED_LAUNCHES, DeviceQueue, Mark, Watchdog
from smfree.measure.timer import DeviceTimer, Floor, launches_for
from tests.measure.fakes import FakeQueue, FakeStream

KERNEL_S = 4e-6


def test_flush_lies_outside_the_timed_window() -> None:
    plain, flushed = FakeQueue(), FakeQueue()
    without = DeviceTimer(plain).batch(lambda i, s: plain.submit(KERNEL_S, s), 4)
    with_flush = DeviceTimer(flushed).batch(
        lambda i, s: flushed.submit(KERNEL_S, s), 4, before_each=lambda i, s: flushed.submit(90e-6, s)
    )
    assert with_flush.seconds == pytest.approx(without.seconds)
    assert without.seconds == pytest.approx(KERNEL_S)


def test_queueing_behind_the_blocker_hides_the_host_and_syncs_once() -> None:
    queue = FakeQueue(submit_s=47e-6)  # a 4 us kernel that naive timing reports as 51 us
    sample = DeviceTimer(queue).batch(lambda i, s: queue.submit(KERNEL_S, s), 16)
    assert sample.held
    assert sample.seconds == pytest.approx(KERNEL_S)
    assert queue.syncs == 1


def test_without_a_blocker_the_gaps_show_and_the_sample_says_so() -> None:
    queue = FakeQueue(submit_s=47e-6, can_hold=False)
    sample = DeviceTimer(queue).batch(lambda i, s: queue.submit(KERNEL_S, s), 16)
    assert not sample.held
    assert sample.seconds > 10 * KERNEL_S


def test_a_blocker_that_timed_out_does_not_count_as_held() -> None:
    queue = FakeQueue(late=True)
    assert not DeviceTimer(queue).batch(lambda i, s: queue.submit(KERNEL_S, s), 2).held


def test_the_stream_is_released_when_a_launch_fails() -> None:
    queue = FakeQueue()

    def fails(index: int, stream: object) -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        DeviceTimer(queue).batch(fails, 1)
    assert not queue._held


@pytest.mark.parametrize("launches", [0, -1, MAX_QUEUED_LAUNCHES + 1])
def test_batch_size_outside_the_launch_queue_is_refused(launches: int) -> None:
    with pytest.raises(MeasureError, match=rf"1 to {MAX_QUEUED_LAUNCHES} launches \(got {launches}\)"):
        DeviceTimer(FakeQueue()).batch(lambda i, s: None, launches)


@pytest.mark.parametrize(("seconds", "launches"), [(0.0, 32), (1e-6, 32), (10e-6, 20), (150e-6, 1), (1.0, 1)])
def test_short_kernels_share_a_batch(seconds: float, launches: int) -> None:
    assert launches_for(seconds) == launches


def test_kernel_shorter_than_two_empty_launches_is_launch_bound() -> None:
    floor = Floor(2.5e-6)
    assert floor.launch_bound(3e-6)
    assert not floor.launch_bound(50e-6)


def test_events_of_another_stream_are_refused() -> None:
    class Device:
        pass

    queue = DeviceQueue(Device(), FakeStream("timed"))
    with pytest.raises(MeasureError, match="on the stream that runs the timed work"):
        queue.elapsed_s(Mark(None, FakeStream("timed")), Mark(None, FakeStream("default")))


def test_work_on_another_stream_is_faster_than_an_empty_launch_and_refused() -> None:
    queue, other = FakeQueue(), FakeStream("somewhere else")
    sample = DeviceTimer(queue).batch(lambda i, s: queue.submit(KERNEL_S, other), 4)
    with pytest.raises(MeasureError, match="launch on the stream that the timer hands out"):
        Floor(2.5e-6).check(sample.seconds)
    Floor(2.5e-6).check(KERNEL_S)


def test_plain_benchmark_call_is_refused_before_it_calibrates() -> None:
    timer = DeviceTimer(FakeQueue(), lambda: "benchmark(...)")
    with pytest.raises(MeasureError, match="use the `measure` fixture"):
        timer()


def test_foreign_pedantic_round_waits_for_the_device() -> None:
    queue = FakeQueue()
    timer = DeviceTimer(queue, lambda: "benchmark.pedantic(...)")
    start = timer()
    queue.submit(KERNEL_S)
    assert timer() - start >= KERNEL_S
    assert queue.syncs == 2


def test_only_device_time_advances_the_timer() -> None:
    queue = FakeQueue()
    timer = DeviceTimer(queue, lambda: "benchmark.pedantic(...)")
    timer.explicit()
    before = timer()
    queue.submit(KERNEL_S)  # verification, warm-up: not counted
    assert timer() == before
    timer.add(3e-6)
    assert timer() - before == pytest.approx(3e-6)


def test_watchdog_releases_once_and_says_that_it_was_late() -> None:
    calls: list[int] = []
    dog = Watchdog(lambda: calls.append(1), timeout_s=0.02)
    time.sleep(0.2)
    assert dog.fire() is False
    assert calls == [1]


def test_watchdog_told_in_time_runs_once() -> None:
    calls: list[int] = []
    dog = Watchdog(lambda: calls.append(1), timeout_s=30.0)
    assert dog.fire() is True
    assert dog.fire() is True
    assert calls == [1]
