"""The node's lock: a thread that steps for long lets the others in, one that does not keeps them out."""

from __future__ import annotations

import threading
import time

import pytest

from smfree.emulator.turns import Turns

SLICES = 40


def hold(turns: Turns, giving_way: bool, started: threading.Event, finished: threading.Event) -> None:
    """Step for a while in slices of a millisecond, as a call does that waits for kernels."""
    with turns, turns:
        started.set()
        for _ in range(SLICES):
            time.sleep(0.001)
            if giving_way:
                turns.give_way()
        finished.set()


@pytest.mark.parametrize("giving_way", [True, False], ids=["gives_way", "keeps_it"])
def test_call_gets_in_between_slices_only_when_the_holder_gives_way(giving_way: bool) -> None:
    turns, started, finished = Turns(), threading.Event(), threading.Event()
    holder = threading.Thread(target=hold, args=(turns, giving_way, started, finished))
    holder.start()
    started.wait()
    with turns:
        got_in_between = not finished.is_set()
    holder.join()
    assert got_in_between is giving_way
    assert not turns.asked_for


def test_nobody_asks_nobody_stands_aside() -> None:
    turns = Turns()
    with turns:
        before = time.monotonic()
        for _ in range(100):
            turns.give_way()
        assert time.monotonic() - before < 0.05


def test_wait_ends_with_notice_and_with_time() -> None:
    turns, noticed = Turns(), []
    entered = threading.Event()

    def waiter() -> None:
        with turns:
            entered.set()
            noticed.append(turns.wait(5.0))

    thread = threading.Thread(target=waiter)
    thread.start()
    entered.wait()
    with turns:
        turns.notify_all()
    thread.join()
    assert noticed == [True]
    with turns:
        assert not turns.wait(0.001)
