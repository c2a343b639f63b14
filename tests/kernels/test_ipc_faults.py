"""Mistakes in an exchange between GPUs: each shows under a named schedule, and the correct one under none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.ipc.faults import Fault, FaultConfig, exchange
from smfree.cuda import KernelFaultError
from tests.kernels.group_kit import EMULATED
from tests.kernels.ipc_kit import opened_group
from tests.kernels.pairwise import SCHEDULES

CALLS = 3
SLOW = 1
STALE = 0x5A5A5A5A


def exchanged(
    fault: Fault,
    num_ranks: int,
    schedule: str,
    seed: int = 0,
    ctas: int = 1,
    timeout_s: float | None = 60,
    node: str = EMULATED,
) -> tuple[Any, Any]:
    """What every rank saw, and what it should have: uint32[rank, call, from, word]."""
    config = FaultConfig(fault, ctas=ctas)
    sent = np.random.default_rng(seed).integers(0, 2**32, (num_ranks, CALLS, config.words), dtype=np.uint32)
    with opened_group(num_ranks, schedule, seed, node=node) as group:
        dst = group.symmetric(4 * num_ranks * config.words, "dst")
        src, out = {}, {}
        for member in group.members:
            dst.array(member.rank).fill(STALE & 0xFF, stream=member.stream)
            src[member.rank] = member.device.asarray(sent[member.rank])
            out[member.rank] = member.device.empty((CALLS, num_ranks, config.words), np.uint32)
        for member in group.members:
            member.device.synchronize()
        exchange(group, out, dst, src, config=config, slow=SLOW)
        group.wait(timeout_s)
        seen = np.stack([out[rank].numpy() for rank in range(num_ranks)])
    return seen, np.broadcast_to(sent.swapaxes(0, 1), seen.shape)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}-{s[1]}")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_correct_exchange_is_right_under_every_schedule(
    num_ranks: int, schedule: tuple[str, int], node: str
) -> None:
    seen, sent = exchanged(Fault.NONE, num_ranks, *schedule, ctas=2, node=node)
    np.testing.assert_array_equal(seen, sent)


def wrong_parts(seen: Any, sent: Any) -> set[tuple[int, int, int]]:
    """(rank, call, from) of every wrong word."""
    return {(int(rank), int(call), int(sender)) for rank, call, sender, _ in np.argwhere(seen != sent)}


def assert_of_another_call(seen: Any, sent: Any) -> None:
    """What is wrong was written by the same sender for another call, or is what dst held before."""
    for rank, call, sender, word in np.argwhere(seen != sent):
        assert seen[rank, call, sender, word] in {*sent[rank, :, sender, word], STALE}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_relaxed_flag_overtakes_the_data(seed: int) -> None:
    """Each sender's words arrive in pieces: some of a shard are there, some are not."""
    seen, sent = exchanged(Fault.RELEASE_MISSING, 2, "random", seed)
    assert_of_another_call(seen, sent)
    late = [(seen[part] != sent[part]).sum() for part in wrong_parts(seen, sent)]
    assert late and min(late) < 64


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_without_a_bar_sync_other_warps_data_come_after_the_flag(seed: int) -> None:
    """Words of both warps are late, but never that of the lane that signals this receiver."""
    seen, sent = exchanged(Fault.SYNC_MISSING, 2, "random", seed)
    assert_of_another_call(seen, sent)
    late = seen != sent
    assert late[..., :32].any() and late[..., 32:].any()
    assert not late[0, :, 1, 0].any() and not late[1, :, 0, 1].any()


def test_flags_that_are_reset_hang_the_rank_that_others_overtake() -> None:
    """D19: rank 1 sleeps between seeing a flag and resetting it. Meanwhile rank 0 has signalled again."""
    with pytest.raises(KernelFaultError) as caught:
        exchanged(Fault.FLAGS_RESET, 2, "timed", timeout_s=None)
    report = str(caught.value)
    assert "deadlock" in report
    assert "kernel ipc_faults" in report and "(device 1 of process 0)" in report
    assert "CTA 0 thread 0 polls 4 bytes" in report and "now 0x0" in report
    assert "device 0 of process 0: nothing runs; all 1 kernels launched there have ended" in report


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("schedule", ["timed", "min-pc", "async-latest"])
def test_bytes_of_one_word_that_is_read_whole_are_a_mixed_size_race(schedule: str) -> None:
    """D18."""
    with pytest.raises(KernelFaultError) as caught:
        exchanged(Fault.BYTE_FLAGS, 2, schedule)
    report = str(caught.value)
    assert "a mixed-size race" in report
    assert "store.sys of 1 bytes" in report and "load.sys of 8 bytes" in report
    assert "use one size for each word, best one 32-bit word per peer" in report


def test_an_epoch_for_two_barriers_lets_the_second_one_through() -> None:
    """The fast rank reads what lay there before; the slow one comes late enough to find everything."""
    seen, sent = exchanged(Fault.EPOCH_REUSED, 2, "timed")
    assert wrong_parts(seen, sent) == {(0, call, 1) for call in range(CALLS)}
    assert (seen[0, 0, 1] == STALE).all()
    np.testing.assert_array_equal(seen[0, 1:, 1], sent[0, :-1, 1])


def test_without_an_entry_barrier_a_fast_rank_overwrites_what_a_slow_one_reads() -> None:
    """Rank 1 sleeps before it copies a call: rank 0 has sent the next one by then."""
    seen, sent = exchanged(Fault.ENTRY_MISSING, 2, "timed")
    assert wrong_parts(seen, sent) == {(SLOW, call, 0) for call in range(CALLS - 1)}
    np.testing.assert_array_equal(seen[SLOW, :-1, 0], sent[SLOW, 1:, 0])
