"""mbarriers: phases, bytes, parity, and every rule that a kernel can break, each with its correct twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smfree.emulator.barriers import MAX_COUNT, MBarriers
from smfree.emulator.errors import BarrierFault, EmulationError, MemoryFault, Severity
from smfree.emulator.memory import SharedMemory

PITCH = 4096
ONE = np.array([8], np.int64)  # key of the barrier at shared+0x40 of slot 0


def at(*times: float) -> np.ndarray:
    return np.array(times, np.float64)


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Rig:
    """Barriers with the memory below them; strict findings are collected."""

    def __init__(self) -> None:
        self.findings: list[EmulationError] = []
        self.memory = SharedMemory(2, PITCH, PITCH)
        self.barriers = MBarriers(2, PITCH, memory=self.memory, report=self.findings.append)

    def done(self, parity: int = 0) -> bool:
        return bool(self.barriers.test(ONE, parity)[0])


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def one(rig: Rig) -> MBarriers:
    """A barrier of count 1."""
    rig.barriers.init(ONE, 1, at(0))
    return rig.barriers


# --- phases and parity ---


def test_fresh_barrier_answers_parity_1_at_once_and_parity_0_after_its_phase(
    rig: Rig, one: MBarriers
) -> None:
    assert rig.done(1) and not rig.done(0)
    one.arrive(ONE, 1, at(5))
    assert rig.done(0) and not rig.done(1)
    one.arrive(ONE, 1, at(6))
    assert rig.done(1) and not rig.done(0)
    assert one.phase(ONE).tolist() == [2] and not rig.findings


def test_a_phase_completes_with_the_last_of_several_arrivals(rig: Rig) -> None:
    rig.barriers.init(ONE, 64, at(0))
    for start in range(0, 64, 32):
        assert not rig.done()
        rig.barriers.arrive(np.repeat(ONE, 32), 1, np.arange(start, start + 32.0))
    assert rig.done()
    assert rig.barriers.completion_time(ONE, 0).tolist() == [63.0]
    assert rig.barriers.drain_completed().tolist() == [8] and len(rig.barriers.drain_completed()) == 0


def test_states_are_the_ones_before_each_arrival(rig: Rig) -> None:
    rig.barriers.init(ONE, 5, at(0))
    states = rig.barriers.arrive(np.repeat(ONE, 4), np.array([1, 1, 1, 2]), at(0, 0, 0, 0))
    assert rig.barriers.pending_count(states).tolist() == [5, 4, 3, 2]
    assert rig.barriers.test_state(np.repeat(ONE, 4), states).all()
    later = rig.barriers.arrive(ONE, 5, at(1))
    assert rig.barriers.test_state(ONE, later).tolist() == [True]
    last = rig.barriers.arrive(ONE, 1, at(2))
    assert rig.barriers.test_state(ONE, last).tolist() == [False]


def test_wait_by_a_state_older_than_the_preceding_phase(rig: Rig, one: MBarriers) -> None:
    first = one.arrive(ONE, 1, at(0))
    assert one.test_state(ONE, first).all()
    one.arrive(ONE, 1, at(1))
    with pytest.raises(BarrierFault, match="state of phase 0 while phase 2 runs") as fault:
        one.test_state(ONE, first)
    assert fault.value.rule == "mbarrier.state"


@pytest.mark.parametrize("parity", [2, 3])
@pytest.mark.parametrize("as_array", [False, True])
def test_parity_outside_0_and_1_is_strict_and_uses_the_low_bit(
    rig: Rig, one: MBarriers, parity: int, as_array: bool
) -> None:
    one.arrive(ONE, 1, at(0))
    low = parity & 1
    answer = one.test(ONE, np.array([parity], np.uint32) if as_array else parity)
    assert rig.done(low) == bool(answer[0]) == (low == 0)
    (finding,) = rig.findings
    assert finding.severity is Severity.STRICT and finding.rule == "mbarrier.parity"
    assert f"operand {parity} is outside {{0, 1}}" in str(finding)


def test_arrive_drop_shrinks_the_following_phases(rig: Rig) -> None:
    rig.barriers.init(ONE, 3, at(0))
    rig.barriers.arrive(ONE, 1, at(0), drop=True)
    rig.barriers.arrive(ONE, 2, at(0))
    assert rig.done(0)
    rig.barriers.arrive(ONE, 1, at(0))
    assert not rig.done(1)
    rig.barriers.arrive(ONE, 1, at(0))
    assert rig.done(1)


def test_no_complete_must_not_complete(rig: Rig) -> None:
    rig.barriers.init(ONE, 2, at(0))
    rig.barriers.arrive(ONE, 1, at(0), no_complete=True)
    with pytest.raises(BarrierFault, match=r"noComplete is the last arrival of phase 0") as fault:
        rig.barriers.arrive(ONE, 1, at(0), no_complete=True)
    assert fault.value.rule == "mbarrier.no_complete"
    rig.barriers.arrive(ONE, 1, at(0))
    assert rig.done()


# --- bytes ---


def test_announced_bytes_hold_the_phase_until_they_land(rig: Rig, one: MBarriers) -> None:
    one.arrive(ONE, 1, at(0), expect_tx=3072)
    for piece in range(3):
        assert not rig.done()
        one.complete_tx(ONE, 1024, at(10.0 + piece))
    assert rig.done() and one.completion_time(ONE, 0).tolist() == [12.0]


def test_bytes_may_land_before_they_are_announced(rig: Rig, one: MBarriers) -> None:
    one.complete_tx(np.repeat(ONE, 3), np.array([1024, 1024, 1024]), at(1, 2, 3))
    assert not rig.done() and one.describe(8).tx_pending == -3072
    one.arrive(ONE, 1, at(4), expect_tx=3072)
    assert rig.done() and not rig.findings


def test_expect_tx_alone_never_completes_a_phase(rig: Rig) -> None:
    rig.barriers.init(ONE, 2, at(0))
    rig.barriers.complete_tx(ONE, 64, at(0))
    rig.barriers.arrive(ONE, 2, at(0))
    rig.barriers.expect_tx(ONE, 64, at(0))
    assert not rig.done()


def test_two_loads_announced_one_issued_is_described_in_bytes(rig: Rig, one: MBarriers) -> None:
    one.arrive(ONE, 1, at(0), expect_tx=2048)
    one.complete_tx(ONE, 1024, at(1))
    assert str(one.describe(8)) == "phase 0: 0 arrivals missing (1 arrived), 1024 of 2048 bytes missing"


def test_a_barrier_nobody_touched_reads_differently(rig: Rig) -> None:
    rig.barriers.init(ONE, 33, at(0))
    assert not rig.barriers.describe(8).ever_touched
    assert (
        str(rig.barriers.describe(8)) == "phase 0: never touched: all 33 arrivals missing, 0 bytes announced"
    )
    assert str(rig.barriers.describe(9)) == "never initialised"


def test_bytes_landing_for_two_phases_in_one_call(rig: Rig, one: MBarriers) -> None:
    one.arrive(ONE, 1, at(0), expect_tx=512)
    one.complete_tx(np.repeat(ONE, 3), 256, at(1, 2, 3))
    assert rig.done(0) and one.describe(8).tx_pending == -256
    one.arrive(ONE, 1, at(4), expect_tx=256)
    assert rig.done(1)


def test_more_bytes_than_announced_do_not_complete_the_phase(rig: Rig) -> None:
    both = keys(8, 9)
    rig.barriers.init(both, 1, at(0, 0))
    rig.barriers.arrive(both, 1, at(0, 0), expect_tx=64)
    rig.barriers.complete_tx(both, np.array([64, 128]), at(1, 1))
    assert rig.barriers.phase(both).tolist() == [1, 0]
    assert "64 bytes landed that nobody announced" in str(rig.barriers.describe(9))


def test_range_of_the_transaction_count(rig: Rig, one: MBarriers) -> None:
    with pytest.raises(BarrierFault, match=r"expect_tx bytes must be 0..1048575 \(got 1048576\)"):
        one.expect_tx(ONE, MAX_COUNT + 1, at(0))
    one.expect_tx(ONE, MAX_COUNT, at(0))
    with pytest.raises(BarrierFault, match="expect_tx 16 brings it to 1048591") as fault:
        one.expect_tx(ONE, 16, at(0))
    assert fault.value.rule == "mbarrier.tx_range"
    with pytest.raises(BarrierFault, match="expect_tx 1 brings it to 1048576"):
        one.arrive(ONE, 1, at(0), expect_tx=1)
    one.complete_tx(ONE, 2 * MAX_COUNT, at(0))
    with pytest.raises(BarrierFault, match="complete_tx 1 brings it to -1048576"):
        one.complete_tx(ONE, 1, at(0))


# --- counts ---


@pytest.mark.parametrize("count", [0, MAX_COUNT + 1])
def test_init_count_range(rig: Rig, count: int) -> None:
    with pytest.raises(BarrierFault, match=rf"must be 1..1048575 \(got {count}\)") as fault:
        rig.barriers.init(keys(8, 9), np.array([1, count]), at(0, 0))
    assert fault.value.index == 1
    rig.barriers.init(keys(8, 9), np.array([1, MAX_COUNT]), at(0, 0))


def test_all_lanes_of_a_warp_arrive_on_a_barrier_of_count_1(rig: Rig, one: MBarriers) -> None:
    with pytest.raises(BarrierFault, match="32 by 32 lanes at once, 1 of 1 pending") as fault:
        one.arrive(np.repeat(ONE, 32), 1, np.zeros(32))
    assert fault.value.rule == "mbarrier.overflow" and fault.value.index == 1
    assert fault.value.severity is Severity.ERROR


def test_more_arrivals_while_bytes_are_missing(rig: Rig, one: MBarriers) -> None:
    one.arrive(ONE, 1, at(0), expect_tx=64)
    with pytest.raises(BarrierFault, match="more arrivals than phase 0 expects: 1, 0 of 1 pending"):
        one.arrive(ONE, 1, at(0))


def test_overflow_on_one_of_several_barriers_names_the_lane(rig: Rig) -> None:
    rig.barriers.init(keys(8, 9), 2, at(0, 0))
    with pytest.raises(BarrierFault, match="more arrivals") as fault:
        rig.barriers.arrive(keys(8, 9, 8, 9, 9), 1, np.zeros(5))
    assert fault.value.index == 4


def test_arrival_before_any_wait_on_the_preceding_phase_is_strict(rig: Rig, one: MBarriers) -> None:
    one.arrive(ONE, 1, at(0))
    one.arrive(ONE, 1, at(0))
    (finding,) = rig.findings
    assert finding.rule == "mbarrier.early_arrive" and finding.severity is Severity.STRICT
    assert "arrival in phase 1 before any successful wait on phase 0" in str(finding)
    assert one.phase(ONE).tolist() == [2]


def test_a_phase_that_overruns_a_parked_waiter(rig: Rig, one: MBarriers) -> None:
    assert not rig.done(0)
    one.park(ONE)
    one.arrive(ONE, 1, at(0))
    assert rig.done(0)
    with pytest.raises(BarrierFault, match="phase 1 completes while 1 lanes still wait for phase 0"):
        one.arrive(ONE, 1, at(1))


def test_a_waiter_that_tests_again_in_time_is_not_overrun(rig: Rig, one: MBarriers) -> None:
    one.park(ONE)
    one.unpark(ONE)  # its time-out passed
    one.park(ONE)
    one.arrive(ONE, 1, at(0))
    one.unpark(ONE)
    assert rig.done(0)
    one.arrive(ONE, 1, at(1))
    assert one.phase(ONE).tolist() == [2]


def test_cp_async_arrive_raises_the_pending_count_first(rig: Rig) -> None:
    rig.barriers.init(ONE, 32, at(0))
    lanes = np.repeat(ONE, 32)
    rig.barriers.raise_pending(lanes, 1)
    rig.barriers.arrive(lanes, 1, np.zeros(32))  # the copies complete
    assert not rig.done()
    rig.barriers.arrive(lanes, 1, np.zeros(32))  # the threads arrive
    assert rig.done()
    with pytest.raises(BarrierFault, match="raises the pending count to 1048576"):
        rig.barriers.raise_pending(ONE, MAX_COUNT - 31)


# --- life ---


@pytest.mark.parametrize("content", [None, 0, 0xDEAD])
def test_use_without_init_says_what_lies_there(rig: Rig, content: int | None) -> None:
    said = {None: "bytes nobody has written", 0: "zeroed bytes", 0xDEAD: "the data 0x000000000000dead"}[
        content
    ]
    if content is not None:
        rig.memory.store(ONE * 8, np.array([content], np.uint64))
    uses = [
        lambda: rig.barriers.arrive(ONE, 1, at(0), expect_tx=64),
        lambda: rig.barriers.arrive(np.repeat(ONE, 2), 1, at(0, 0)),
        lambda: rig.barriers.test(ONE, 0),
        lambda: rig.barriers.expect_tx(ONE, 64, at(0)),
        lambda: rig.barriers.complete_tx(ONE, 64, at(0)),
        lambda: rig.barriers.raise_pending(ONE, 1),
        lambda: rig.barriers.inval(ONE),
        lambda: rig.barriers.test_state(ONE, np.zeros(1, np.uint64)),
    ]
    for use in uses:
        with pytest.raises(BarrierFault, match=f"no barrier has been initialised .* holds {said}") as fault:
            use()
        assert fault.value.rule == "mbarrier.uninitialised" and "shared+0x40 (CTA slot 0)" in str(fault.value)
    if content is not None:
        rig.memory.reset(np.array([0]))
    rig.barriers.init(ONE, 1, at(0))
    rig.barriers.arrive(ONE, 1, at(0), expect_tx=64)


def test_init_over_a_live_barrier_needs_inval(rig: Rig, one: MBarriers) -> None:
    with pytest.raises(BarrierFault, match="init over a live mbarrier") as fault:
        one.init(ONE, 1, at(0))
    assert fault.value.rule == "mbarrier.reinit"
    one.inval(ONE)
    with pytest.raises(BarrierFault, match=r"wait after mbarrier.inval"):
        one.test(ONE, 0)
    one.init(ONE, 2, at(0))
    assert one.describe(8).pending == 2


def test_two_lanes_that_both_init(rig: Rig) -> None:
    with pytest.raises(BarrierFault, match="init over a live") as fault:
        rig.barriers.init(np.repeat(ONE, 2), 1, at(0, 0))
    assert fault.value.index == 1


@pytest.mark.parametrize("offset", [64, 68])
def test_plain_access_to_a_live_barrier(rig: Rig, one: MBarriers, offset: int) -> None:
    word = np.array([offset], np.int64)
    for access in (lambda: rig.memory.store(word, np.zeros(1, np.uint32)), lambda: rig.memory.load(word, 4)):
        with pytest.raises(BarrierFault, match="touches a live mbarrier") as fault:
            access()
        assert fault.value.rule == "mbarrier.plain_access"
    rig.memory.store(np.array([56, 72], np.int64), np.zeros(2, np.uint64))  # its neighbours are free
    rig.memory.load(np.array([72], np.int64), 8)
    one.inval(ONE)
    with pytest.raises(MemoryFault, match="nobody has written"):
        rig.memory.load(word, 4)
    rig.memory.store(word, np.zeros(1, np.uint32))
    assert rig.memory.load(word, 4).item() == 0


def test_a_new_cta_finds_none_of_the_barriers_of_the_one_before(rig: Rig, one: MBarriers) -> None:
    other = PITCH // 8 + 8
    one.init(keys(other), 1, at(0))
    rig.memory.reset(np.array([0]))
    one.reset(np.array([0]))
    assert not one.describe(8).ever_initialised and one.describe(other).initialised
    one.init(ONE, 1, at(0))


def test_misplaced_barriers(rig: Rig) -> None:
    assert rig.barriers.keys(np.array([64, PITCH], np.int64)).tolist() == [8, PITCH // 8]
    for bad in (68, 2 * PITCH, -8):
        with pytest.raises(BarrierFault, match="8-byte aligned and lies in shared memory") as fault:
            rig.barriers.keys(np.array([64, bad], np.int64))
        assert fault.value.index == 1
    with pytest.raises(MemoryFault, match="the CTA has 64 bytes"):
        small = SharedMemory(1, 1024, 64)
        MBarriers(1, 1024, memory=small).init(ONE, 1, at(0))


# --- groups of lanes against one lane after another ---


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, list[int], list[int]]]:
    """Calls (name, keys, amounts) on barriers 0..2 of count 4."""
    calls = []
    for _ in range(draw(st.integers(1, 8))):
        name = draw(st.sampled_from(["arrive", "announce", "complete", "expect", "test"]))
        on = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        calls.append((name, on, [draw(st.integers(1, 2)) * 16 for _ in on]))
    return calls


def run(calls: list[tuple[str, list[int], list[int]]]) -> tuple[list[object], MBarriers]:
    barriers = MBarriers(1, 1024, report=lambda finding: None)
    barriers.init(keys(0, 1, 2), 4, at(0, 0, 0))
    log: list[object] = []
    for now, (name, on, amount) in enumerate(calls):
        key, time, nbytes = keys(*on), np.full(len(on), float(now)), np.array(amount)
        if name in ("arrive", "announce"):
            log += barriers.arrive(key, 1, time, expect_tx=nbytes if name == "announce" else None).tolist()
        elif name == "complete":
            barriers.complete_tx(key, nbytes, time)
        elif name == "expect":
            barriers.expect_tx(key, nbytes, time)
        else:
            log += barriers.test(key, 0).tolist()
    return log, barriers


@settings(max_examples=300)
@given(programs())
def test_a_group_of_lanes_equals_one_lane_after_another(
    calls: list[tuple[str, list[int], list[int]]],
) -> None:
    single = []
    for name, on, amount in calls:
        single += [(name, [k], [a]) for k, a in zip(on, amount, strict=True)]
    try:
        wanted, one = run(single)
    except BarrierFault as fault:
        with pytest.raises(BarrierFault) as same:
            run(calls)
        assert same.value.rule in (fault.rule, "mbarrier.overflow")
        return
    try:
        got, many = run(calls)
    except BarrierFault as fault:
        # Only arrivals beyond a phase that one and the same call completes are refused.
        assert fault.rule == "mbarrier.overflow"
        return
    assert got == wanted
    assert [many.describe(k) for k in range(3)] == [one.describe(k) for k in range(3)]
