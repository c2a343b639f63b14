"""The clock: queues against a plain reference, latencies, bandwidths, and the L2's residency."""

from __future__ import annotations

import numpy as np
import pytest

from smfree.emulator.clock import L2, Clock
from smfree.emulator.errors import Unsupported
from smfree.emulator.profile import Profile, load
from smfree.emulator.servers import ServerBank

BIN = 32


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def first_come_first_served(server: np.ndarray, t: np.ndarray, work: np.ndarray) -> np.ndarray:
    free: dict[int, float] = {}
    out = np.zeros(len(t))
    for i in np.lexsort((t, server)):
        out[i] = free[server[i]] = max(free.get(server[i], 0.0), t[i]) + work[i]
    return out


@pytest.fixture
def h100() -> Profile:
    return load("h100")


# Queues.


@pytest.mark.parametrize("seed", range(40))
def test_one_large_batch_is_an_exact_queue(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(30, 300))
    server, t = rng.integers(0, 5, n), rng.random(n) * 500
    work = rng.exponential(rng.choice([1.0, 20.0, 300.0]), n)
    finish = ServerBank(5, bins=64).serve(server, t, work)
    np.testing.assert_allclose(finish, first_come_first_served(server, t, work), rtol=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_small_batches_follow_the_queue_to_within_two_bins(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 12
    server, t = rng.integers(0, 3, n), rng.random(n) * 300
    work = rng.exponential(rng.choice([1.0, 20.0, 200.0]), n)
    finish = ServerBank(3).serve(server, t, work)
    assert (finish >= t + work - 1e-9).all()
    assert np.abs(finish - first_come_first_served(server, t, work)).max() < 2 * BIN


@pytest.mark.parametrize("size", [6, 40])
def test_batches_in_order_of_time_agree_with_one_queue(size: int) -> None:
    rng = np.random.default_rng(size)
    n = 240
    server, t = rng.integers(0, 3, n), np.sort(rng.random(n) * 3000)
    work = rng.exponential(20, n)
    bank = ServerBank(3)
    parts = [bank.serve(server[i : i + size], t[i : i + size], work[i : i + size]) for i in range(0, n, size)]
    assert np.abs(np.concatenate(parts) - first_come_first_served(server, t, work)).max() < 4 * BIN


@pytest.mark.parametrize("n", [1, 40])
def test_a_late_request_presented_first_does_not_block_an_early_one(n: int) -> None:
    bank = ServerBank(1)
    zeros = np.zeros(n, dtype=np.int64)
    bank.serve(zeros, np.full(n, 10_000.0), np.full(n, 10.0))
    early = bank.serve(zeros, np.zeros(n), np.full(n, 10.0))
    assert early.max() == pytest.approx(10.0 * n)


@pytest.mark.parametrize("n", [1, 40])
def test_work_already_promised_delays_what_follows(n: int) -> None:
    bank = ServerBank(1)
    zeros = np.zeros(n, dtype=np.int64)
    bank.serve(zeros, np.zeros(n), np.full(n, 100.0))
    second = bank.serve(zeros, np.zeros(n), np.full(n, 100.0))
    assert second.min() == pytest.approx(100.0 * n + 100.0, abs=BIN)
    assert second.max() == pytest.approx(200.0 * n, abs=BIN)


@pytest.mark.parametrize("seed", range(10))
def test_a_server_never_does_more_than_one_cycle_of_work_per_cycle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bank, total, last = ServerBank(1, bins=64), 0.0, 0.0
    for _ in range(60):
        n = int(rng.integers(1, 60))
        work = rng.exponential(15, n)
        finish = bank.serve(np.zeros(n, dtype=np.int64), rng.random(n) * 1000, work)
        total, last = total + work.sum(), max(last, finish.max())
    assert last >= total * (1 - 1e-9)  # everything arrived after cycle 0


def test_a_calendar_follows_a_run_much_longer_than_its_window() -> None:
    bank = ServerBank(2, bins=64)
    t = 0.0
    for _ in range(2000):
        done = float(bank.serve(ints(1), np.array([t]), np.array([40.0]))[0])
        assert done == pytest.approx(t + 40.0)
        t = done + 700.0
    many = bank.serve(np.ones(50, dtype=np.int64), np.full(50, t), np.full(50, 400.0))
    assert many.max() == pytest.approx(t + 20_000.0)


def test_idle_time_between_the_requests_of_a_batch_stays_free() -> None:
    bank = ServerBank(1)
    zeros = np.zeros(40, dtype=np.int64)
    bank.serve(zeros, np.arange(40) * 1000.0, np.full(40, 100.0))
    between = np.arange(40) * 1000.0 + 500.0
    np.testing.assert_allclose(bank.serve(zeros, between, np.full(40, 100.0)), between + 100.0)


@pytest.mark.parametrize("seed", range(20))
def test_large_and_small_batches_find_the_same_free_time(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one_by_one, at_once = ServerBank(2), ServerBank(2)
    for _ in range(6):  # long gaps and long work, so that many bins are full and many are free
        n = 40
        server, t = rng.integers(0, 2, n), np.sort(rng.random(n) * 20_000)
        work = rng.exponential(60, n)
        small = [one_by_one.serve(server[i : i + 1], t[i : i + 1], work[i : i + 1])[0] for i in range(n)]
        large = at_once.serve(server, t, work)
        # The last sliver of a request can fit before a full stretch in one and only behind it in the other.
        assert np.quantile(np.abs(large - small), 0.9) < 2 * BIN
        assert abs(float(np.mean(large - small))) < BIN


def test_servers_do_not_disturb_each_other() -> None:
    bank = ServerBank(2)
    bank.serve(np.zeros(50, dtype=np.int64), np.zeros(50), np.full(50, 100.0))
    assert bank.serve(ints(1), np.zeros(1), np.array([5.0]))[0] == pytest.approx(5.0)


def test_reset_forgets_all_work(h100: Profile) -> None:
    clock = Clock(h100)
    first = clock.bulk_load(ints(0), np.zeros(1), ints(65536), ints(0), ints(1))
    for _ in range(30):
        clock.bulk_load(ints(0), np.zeros(1), ints(65536), ints(0), ints(1))
    clock.reset()
    np.testing.assert_allclose(clock.bulk_load(ints(0), np.zeros(1), ints(65536), ints(0), ints(1)), first)


# Instructions and shared memory.


def test_a_lone_warp_issues_at_the_dependent_rate(h100: Profile) -> None:
    assert Clock(h100).issue(ints(3), np.array([100.0]), 10)[0] == pytest.approx(130.0)


def test_many_warps_of_one_sm_share_four_schedulers(h100: Profile) -> None:
    done = Clock(h100).issue(np.zeros(64, dtype=np.int64), np.zeros(64), 10)
    assert done.max() == pytest.approx(64 * 10 / 4)


def test_warps_on_different_sms_do_not_share_schedulers(h100: Profile) -> None:
    assert Clock(h100).issue(np.arange(64), np.zeros(64), 10).max() == pytest.approx(30.0)


def test_bank_conflicts_cost_one_cycle_per_wavefront(h100: Profile) -> None:
    free, conflict = (float(Clock(h100).shared(ints(0), np.zeros(1), ints(k))[0]) for k in (1, 32))
    assert free == pytest.approx(33.0)
    assert conflict - free == pytest.approx(31.0)


# Global memory.


def load_once(profile: Profile, nbytes: int, hit: int, **options: str) -> float:
    sectors = ints(-(-nbytes // 32))
    return float(
        Clock(profile).global_load(ints(0), np.zeros(1), ints(nbytes), sectors, ints(hit), **options)[0]
    )


def test_a_hit_takes_the_l2_latency_and_a_miss_the_dram_latency(h100: Profile) -> None:
    assert load_once(h100, 32, 32) == pytest.approx(280, abs=2)
    assert load_once(h100, 32, 0) == pytest.approx(642, abs=2)


def test_a_partly_missing_request_pays_the_dram_latency(h100: Profile) -> None:
    assert load_once(h100, 512, 480) == pytest.approx(load_once(h100, 512, 0), abs=2)


def test_cp_async_adds_its_start_up(h100: Profile) -> None:
    assert load_once(h100, 512, 512, path="cp.async") - load_once(h100, 512, 512) == pytest.approx(20)


def test_uncoalesced_lanes_cost_sectors_not_bytes(h100: Profile) -> None:
    n = 64
    sm, t, nbytes = np.zeros(n, dtype=np.int64), np.zeros(n), np.full(n, 128)
    packed = Clock(h100).global_load(sm, t, nbytes, np.full(n, 4), nbytes)
    spread = Clock(h100).global_load(sm, t, nbytes, np.full(n, 32), np.full(n, 32 * 32))
    assert spread.max() - 280 == pytest.approx(8 * (packed.max() - 280), rel=0.05)


def streamed_gbps(profile: Profile, *, reads: int, writes: int) -> float:
    """Useful GB/s of all SMs streaming through DRAM."""
    clock = Clock(profile)
    n = profile.device.num_sms * 32
    sm, t = np.arange(n) % profile.device.num_sms, np.zeros(n)
    nbytes, sectors, none = np.full(n, 512), np.full(n, 16), np.zeros(n, dtype=np.int64)
    end = 0.0
    for _ in range(8):
        for _ in range(reads):
            end = max(end, float(clock.global_load(sm, t, nbytes, sectors, none).max()))
        for _ in range(writes):
            end = max(end, float(clock.global_store(sm, t, nbytes, sectors, nbytes)[1].max()))
    return 8 * (reads + writes) * n * 512 / clock.seconds(end - profile.dram.latency_cycles) / 1e9


def test_streams_reach_but_never_exceed_the_nominal_bandwidth(h100: Profile) -> None:
    assert 0.93 < streamed_gbps(h100, reads=1, writes=0) / h100.device.peak_memory_gbps < 1.0


def test_mixing_reads_and_writes_is_slower_than_either_alone(h100: Profile) -> None:
    mixed = streamed_gbps(h100, reads=1, writes=1)
    assert mixed < 0.92 * streamed_gbps(h100, reads=1, writes=0)
    assert mixed < 0.92 * streamed_gbps(h100, reads=0, writes=1)


def test_a_store_is_accepted_long_before_it_is_performed(h100: Profile) -> None:
    accepted, performed = Clock(h100).global_store(ints(0), np.zeros(1), ints(512), ints(16), ints(512))
    assert accepted[0] < 20 < 280 <= performed[0]


def test_resident_stores_leave_dram_alone(h100: Profile) -> None:
    clock = Clock(h100)
    n = 132 * 64
    sm, t, full = np.arange(n) % 132, np.zeros(n), np.full(n, 512)
    for _ in range(4):
        clock.global_store(sm, t, full, np.full(n, 16), np.zeros(n, dtype=np.int64))
    read = clock.global_load(ints(0), np.zeros(1), ints(32), ints(1), ints(0))
    missed = Clock(h100)
    for _ in range(4):
        missed.global_store(sm, t, full, np.full(n, 16), full)
    assert missed.global_load(ints(0), np.zeros(1), ints(32), ints(1), ints(0))[0] > read[0] + 1000


# Bulk copies.


def bulk_once(profile: Profile, nbytes: int, hit: int, *, requests: int = 1, tensor: bool = False) -> float:
    clock = Clock(profile)
    return float(
        clock.bulk_load(ints(0), np.zeros(1), ints(nbytes), ints(hit), ints(requests), tensor=tensor)[0]
    )


def test_a_bulk_copy_takes_start_up_latency_and_transfer(h100: Profile) -> None:
    assert bulk_once(h100, 16, 16) == pytest.approx(280 + 105, abs=2)
    assert bulk_once(h100, 16, 0) == pytest.approx(642 + 105, abs=2)
    assert bulk_once(h100, 16384, 0) - bulk_once(h100, 16, 0) == pytest.approx(16368 / 20.7, rel=0.02)


def test_a_tensor_copy_adds_its_own_start_up(h100: Profile) -> None:
    assert bulk_once(h100, 4096, 4096, tensor=True) - bulk_once(h100, 4096, 4096) == pytest.approx(204)


def test_small_copies_are_bound_by_requests_per_cycle(h100: Profile) -> None:
    n = 100
    sm, t, one = np.zeros(n, dtype=np.int64), np.zeros(n), np.ones(n, dtype=np.int64)
    done = Clock(h100).bulk_load(sm, t, np.full(n, 16), np.full(n, 16), one)
    assert done.max() - done.min() == pytest.approx(99 * 16, rel=0.01)


def test_a_copy_of_many_requests_waits_for_the_last(h100: Profile) -> None:
    assert bulk_once(h100, 256, 256, requests=8) - bulk_once(h100, 256, 256) == pytest.approx(7 * 16, abs=15)


def test_bytes_in_flight_limit_an_engine_when_they_are_few(h100: Profile) -> None:
    few = h100.replace("tma.max_bytes_in_flight", 4096)
    n = 64
    sm, t, one = np.zeros(n, dtype=np.int64), np.zeros(n), np.ones(n, dtype=np.int64)
    done = Clock(few).bulk_load(sm, t, np.full(n, 4096), np.full(n, 4096), one)
    latency = 280 + 105
    assert done.max() == pytest.approx(latency * (n + 1), rel=0.02)


def test_a_bulk_store_frees_its_source_before_it_is_performed(h100: Profile) -> None:
    read, performed = Clock(h100).bulk_store(ints(0), np.zeros(1), ints(4096), ints(4096), ints(1))
    assert read[0] == pytest.approx(105 + 4096 / 20.7, rel=0.02)
    assert performed[0] == pytest.approx(read[0] + 280, abs=5)


def test_without_a_tma_bulk_copies_are_refused_by_name() -> None:
    clock = Clock(load("a100"))
    with pytest.raises(Unsupported, match=r"A100.* has no TMA"):
        clock.bulk_load(ints(0), np.zeros(1), ints(16), ints(0), ints(1))
    with pytest.raises(Unsupported, match=r"compute capability 9\.0"):
        clock.bulk_store(ints(0), np.zeros(1), ints(16), ints(0), ints(1))


def test_an_empty_call_returns_nothing(h100: Profile) -> None:
    clock, none, t = Clock(h100), ints(), np.zeros(0)
    assert len(clock.issue(none, t, 3)) == 0
    assert len(clock.shared(none, t, none)) == 0
    assert len(clock.global_load(none, t, none, none, none)) == 0
    assert len(clock.bulk_store(none, t, none, none, none)[1]) == 0


# L2.


def small_l2(profile: Profile, lines: int) -> L2:
    profile = profile.replace("device.l2_bytes", lines * 128).replace("l2.usable_fraction", 1.0)
    return L2(profile, 1 << 16)


def test_a_line_misses_once_and_then_hits(h100: Profile) -> None:
    l2 = small_l2(h100, 1000)
    assert not l2.touch(np.arange(100), write=False).any()
    assert l2.touch(np.arange(100), write=False).all()


def test_the_oldest_lines_leave_first_even_when_they_were_used_again(h100: Profile) -> None:
    l2 = small_l2(h100, 100)
    l2.touch(np.arange(100), write=False)
    assert l2.touch(np.arange(10), write=False).all()
    l2.touch(np.arange(200, 250), write=False)
    assert not l2.touch(np.arange(10), write=False).any()


def test_exactly_the_capacity_stays(h100: Profile) -> None:
    l2 = small_l2(h100, 100)
    l2.touch(np.arange(100), write=False)
    assert l2.touch(np.arange(100), write=False).all()
    l2.touch(ints(500), write=False)
    assert l2.touch(np.arange(1, 100), write=False).all()
    assert not l2.touch(ints(0), write=False).any()


def test_a_buffer_larger_than_the_l2_never_hits_on_a_second_pass(h100: Profile) -> None:
    l2 = small_l2(h100, 1000)
    l2.touch(np.arange(2000), write=False)
    assert not l2.touch(np.arange(2000), write=False).any()


def test_of_repeated_accesses_in_one_call_only_the_first_misses(h100: Profile) -> None:
    l2 = small_l2(h100, 1000)
    hit = l2.touch(ints(7, 7, 3, 7, 3, 9), write=False)
    assert hit.tolist() == [False, True, False, True, True, False]
    l2.touch(np.arange(100, 1097), write=False)  # three lines were filled, so 997 more just fit
    assert l2.touch(ints(7, 3, 9), write=False).all()


@pytest.mark.parametrize("seed", range(5))
def test_any_access_pattern_follows_a_plain_fifo(h100: Profile, seed: int) -> None:
    rng = np.random.default_rng(seed)
    l2, queue = small_l2(h100, 300), dict[int, None]()
    for _ in range(200):
        if rng.random() < 0.5:
            start = int(rng.integers(0, 800))
            lines = np.arange(start, start + int(rng.integers(1, 60)))
        else:
            lines = rng.integers(0, 800, int(rng.integers(1, 60)))
        expected = []
        for line in lines.tolist():
            expected.append(line in queue)
            queue.setdefault(line)
        while len(queue) > 300:
            del queue[next(iter(queue))]
        assert l2.touch(lines, write=bool(rng.random() < 0.5)).tolist() == expected


def test_a_written_line_is_resident_afterwards(h100: Profile) -> None:
    l2 = small_l2(h100, 1000)
    assert not l2.touch(np.arange(50), write=True).any()
    assert l2.touch(np.arange(50), write=False).all()


@pytest.mark.parametrize("spec", ["h100", "b200"])
def test_a_bulk_copy_to_another_sm_streams_at_the_pace_of_its_port(spec: str) -> None:
    """One copy has the port for itself, and still no more bytes per cycle than the port passes."""
    profile = load(spec)
    assert profile.cluster is not None
    ends = [Clock(profile).bulk_cluster(ints(0), ints(1), np.zeros(1), ints(n))[1] for n in (4096, 16384)]
    pace = (16384 - 4096) / (ends[1] - ends[0])
    slower = profile.cluster.bytes_per_cycle, profile.tma.request_bytes_per_cycle if profile.tma else 0.0
    assert pace == pytest.approx(min(slower))


def test_flush_empties_the_l2(h100: Profile) -> None:
    l2 = small_l2(h100, 1000)
    l2.touch(np.arange(50), write=False)
    l2.flush()
    assert not l2.touch(np.arange(50), write=False).any()


def test_a_large_arena_costs_memory_only_where_it_is_touched(h100: Profile) -> None:
    l2 = L2(h100, 1 << 40)
    l2.touch(np.arange(10), write=False)
    l2.touch(ints(200_000, 100_000), write=False)
    assert l2.touch(ints(3, 100_000, 200_000), write=False).all()


def test_a_line_outside_the_arena_is_refused(h100: Profile) -> None:
    with pytest.raises(IndexError, match="line 70000 is outside the arena of 65536 lines"):
        small_l2(h100, 10).touch(ints(70_000), write=False)


def test_touching_nothing_is_fine(h100: Profile) -> None:
    assert len(small_l2(h100, 10).touch(ints(), write=False)) == 0


# Sensitivity: every parameter of a path moves the time of that path, in the right direction.


@pytest.mark.parametrize(
    ("path", "slower"),
    [
        ("dram.latency_cycles", 1.2),
        ("tma.startup_cycles", 1.2),
        ("tma.request_bytes_per_cycle", 0.8),
        ("device.sm_clock_mhz", 0.8),
    ],
)
def test_a_parameter_moves_the_time_of_a_bulk_copy(h100: Profile, path: str, slower: float) -> None:
    changed = h100.replace(path, factor=slower)
    before, after = (Clock(p).seconds(bulk_once(p, 4096, 0)) for p in (h100, changed))
    assert after > before * 1.01
