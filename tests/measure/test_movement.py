"""What every way of an AllGather moves, against its formulas; what is verified before anything is timed."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from bench import nccl
from bench.bench_allgather import COPY_ENGINES, place, shard_of, verify
from bench.bench_flag import verify as verify_flag
from bench.peer_axes import GATHER_WAYS
from kernels.ipc.allgather import allgather, prepare, throughput_config
from kernels.ipc.flag_latency import RESULT_WORDS, FlagLatencyConfig, ping_pong
from kernels.ipc.gather import GatherConfig
from kernels.ipc.group import Group
from smfree.cuda import Device
from smfree.measure.movement import EXPECTED, Formula, movement
from smfree.measure.nodes import Node
from tests.measure.test_allgather import KIB, cells, gathered
from tests.measure.test_bench import ROOT


@pytest.mark.parametrize(
    ("formula", "text", "at_4"),
    [
        (Formula(), "0", 0),
        (Formula(own=2), "2", 2),
        (Formula(1), "N - 1", 3),
        (Formula(1, 1), "N", 4),
        (Formula(2), "2 (N - 1)", 6),
    ],
)
def test_formulas_say_what_they_count(formula: Formula, text: str, at_4: int) -> None:
    assert str(formula) == text
    assert formula.shards(4) == at_4


RANKS, SHARD = 4, 8 * KIB


@pytest.fixture(scope="module")
def group() -> Group:
    return Group.local(Device.open_all(f"emu:h100x{RANKS}"), pool_bytes=1 << 18)


@lru_cache
def moved(group: Group, way: str) -> tuple[list[dict[str, int]], int]:
    """What a gather on cold caches counts by rank, and the CTAs of its kernels."""
    node = Node([member.device for member in group.members])
    ours = "ce" if way in COPY_ENGINES else way
    config = COPY_ENGINES.get(way) or throughput_config(group, ours, SHARD)
    with group.symmetric(RANKS * SHARD, way) as dst:
        prepare(group, dst, way=ours, config=config)
        place(group, dst, SHARD)
        node.fill_l2()
        before = node.tally()
        allgather(group, dst, way=ours, config=config)
        group.wait()
        counted = before.since()
        verify(group, dst, SHARD)
    return counted, config.ctas if isinstance(config, GatherConfig) else 0


@pytest.mark.parametrize("way", GATHER_WAYS)
def test_links_carry_the_expected_shards_and_the_signals_to_the_byte(group: Group, way: str) -> None:
    """A kernel's two barriers send a word of 4 bytes to each peer per CTA; copy engines' words go beside."""
    counted, ctas = moved(group, way)
    signals = 2 * 4 * (RANKS - 1) * ctas
    link = "pcie" if way == "staged" else "nvlink"
    for rank in counted:
        assert rank[f"{link}_sent_bytes"] == EXPECTED[way].sent.shards(RANKS) * SHARD + signals
        assert rank[f"{link}_received_bytes"] == EXPECTED[way].received.shards(RANKS) * SHARD + signals
        other = "nvlink" if link == "pcie" else "pcie"
        assert rank[f"{other}_sent_bytes"] == rank[f"{other}_received_bytes"] == 0


@pytest.mark.parametrize("way", GATHER_WAYS)
def test_the_tma_moves_the_expected_shards_to_the_byte_and_registers_those_and_signals(
    group: Group, way: str
) -> None:
    counted, ctas = moved(group, way)
    for rank in counted:
        assert rank["bytes_async"] == EXPECTED[way].shared.shards(RANKS) * SHARD
        beside = rank["bytes_through_registers"] - EXPECTED[way].registers.shards(RANKS) * SHARD
        if ctas == 0:
            assert beside == 0, "no byte of a copy engine goes through an SM"
        else:
            assert 0 < beside < SHARD, "signals and polling; no shard hides among them"


@pytest.mark.parametrize("way", GATHER_WAYS)
def test_memory_reads_and_takes_the_expected_shards(group: Group, way: str) -> None:
    """On cold caches; a copy engine counts each of its reads. A CTA's control words are read and written,
    too: some lines of 128 bytes."""
    counted, ctas = moved(group, way)
    for rank in counted:
        read = rank["dram_read_bytes"] + rank["copy_engine_read_bytes"]
        written = rank["dram_write_bytes"] + rank["copy_engine_write_bytes"]
        for found, formula in ((read, EXPECTED[way].read), (written, EXPECTED[way].written)):
            assert 0 <= found - formula.shards(RANKS) * SHARD <= 256 * ctas


def test_the_page_has_the_same_formulas() -> None:
    page = (ROOT / "docs" / "ipc.md").read_text()
    table = page.split("## What an AllGather moves")[1].split("##")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    for way, *said in rows:
        moves = EXPECTED[way.strip("`")]
        columns = (moves.read, moves.written, moves.sent, moves.received, moves.registers, moves.shared)
        assert said == [str(formula) for formula in columns], way
    assert [way.strip("`") for way, *_ in rows] == list(EXPECTED)


def test_the_switch_copies_what_push_sends_three_times(group: Group) -> None:
    push, _ = moved(group, "sm.push")
    cast, _ = moved(group, "multicast")
    signals = 2 * 4 * (RANKS - 1)
    assert push[0]["nvlink_sent_bytes"] - signals == (RANKS - 1) * (cast[0]["nvlink_sent_bytes"] - signals)


def test_the_movement_table_shows_count_and_formula() -> None:
    one = gathered("sm.push", 16 * KIB, 5.0)
    one.counters = {"launches": 1}
    one.per_rank = {
        "nvlink_sent_bytes": [49176, 49152, 49152, 49152],
        "nvlink_sent_wire_bytes": [62604] * 4,
        "nvlink_received_bytes": [49176] * 4,
        "bytes_through_registers": [66812, 66804, 66772, 66756],
        "dram_read_bytes": [16384] * 4,
        "dram_write_bytes": [49152] * 4,
    }
    (row,) = cells(movement([one]), "sm.push")
    assert " ".join(row) == (
        "sm.push 1.00 (1) 3.00 (N - 1) 3.00 (N - 1) 3.82 3.00 (N - 1) 4.08 (N) 0.00 (0) NVLink"
    )
    assert movement([gathered("sm.push", 16 * KIB, 5.0)]) == "", "a real GPU counts nothing"


# --- what is verified ---------------------------------------------------------------------------------------


def test_a_wrong_byte_is_a_failure_that_names_its_place(group: Group) -> None:
    with group.symmetric(RANKS * SHARD, "verified") as dst:
        place(group, dst, SHARD)
        with pytest.raises(AssertionError, match=r"rank 0 has \d+ wrong bytes of rank 1's shard, from 0 on"):
            verify(group, dst, SHARD)  # nothing has been gathered
        allgather(group, dst, way="ce")
        group.wait()
        verify(group, dst, SHARD)
        wrong = dst.array(2).bytes_view(3 * SHARD + 17, 1)
        wrong.copy_from(wrong.numpy() ^ np.uint8(1))
        with pytest.raises(AssertionError, match=r"rank 2 has 1 wrong bytes of rank 3's shard, from 17 on"):
            verify(group, dst, SHARD)


def test_no_two_shards_are_alike(group: Group) -> None:
    shards = [shard_of(group, rank, SHARD) for rank in range(RANKS)]
    for one in range(RANKS):
        for other in range(one):
            assert np.count_nonzero(shards[one] == shards[other]) < SHARD / 16


def test_a_message_that_did_not_arrive_whole_is_a_failure(group: Group) -> None:
    config = FlagLatencyConfig(data_bytes=64)
    results = {m.rank: m.device.empty(RESULT_WORDS, np.uint64) for m in group.members}
    with group.symmetric(64, "landing") as landing:
        ping_pong(group, results, landing, first=0, second=1, config=config, num_rounds=2)
        group.wait()
        verify_flag(group, results, landing, 64)
        late = landing.array(1).bytes_view(48, 16)
        late.fill(0)
        with pytest.raises(AssertionError, match="the last message to rank 1"):
            verify_flag(group, results, landing, 64)
        results[1].fill(0)
        with pytest.raises(AssertionError, match="rank 1 has not played to the end"):
            verify_flag(group, results, landing, 0)


def test_nccl_is_absent_with_a_reason_on_an_emulated_node(group: Group) -> None:
    assert nccl.unavailable(group) == "it needs real GPUs"
