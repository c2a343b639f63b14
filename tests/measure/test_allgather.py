"""The AllGather benchmark: tables and answers from known records, its points, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.peer_axes import (
    ALLGATHER,
    GATHER_WAYS,
    NCCL,
    AllgatherPoint,
    allgather_points,
    peer_flag_points,
)
from smfree.measure.allgather import SIZE, comparisons, curves, gather_answers, lines, times
from smfree.measure.log import RunLog
from smfree.measure.options import Axes
from smfree.measure.peer_flags import peer_flag_table
from smfree.measure.records import CacheState, Memory, Question, Record, Traffic
from smfree.measure.sizes import algorithm_gbps, bus_gbps, saturating, saturation, sentence
from smfree.measure.tables import summary
from smfree.model.hockney import hockney
from tests.measure.test_bench import bench
from tests.measure.test_records import record

KIB = 1024


def gathered(
    way: str, shard: int, us: float, ranks: int = 4, ctas: int | None = None, **config: Any
) -> Record:
    total = ranks * shard
    return record(
        question=Question.ALLGATHER,
        device="emu:h100",
        clock_source="modelled",
        key={"way": way, "ranks": ranks, "shard_bytes": shard, "ctas": ctas},
        traffic=Traffic(total, total - shard, total - shard),
        samples_s=[us * 1e-6],
        memory=Memory.PEER,
        cache=CacheState.REPEATED,
        peak_gbps=0.0,
        config={
            "path": "NVLink",
            "threads": 256,
            "bytes_in_flight_per_sm": 16384,
            "num_sms": 132,
            "backing": "peer access in one process: asked for",
            **config,
        },
    )


def cells(text: str, start: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip().startswith(start)]


# --- rates --------------------------------------------------------------------------------------------------


def test_bandwidths_follow_the_convention_of_nccls_tests() -> None:
    """algbw = output / t, busbw = algbw (n - 1) / n: 8 ranks, 1 GB of output in 10 ms."""
    one = gathered("sm.push", 125_000_000, 10_000.0, ranks=8)
    assert algorithm_gbps(one) == pytest.approx(100.0)
    assert bus_gbps(one) == pytest.approx(100.0 * 7 / 8)


# --- tables -------------------------------------------------------------------------------------------------


def test_the_fastest_way_of_each_size_is_starred_and_ties_are_too() -> None:
    rows = [gathered("ce.batch", KIB, 8.0), gathered("sm.push", KIB, 4.0), gathered("multicast", KIB, 4.05)]
    rows += [gathered("ce.batch", 1024 * KIB, 10.0), gathered("sm.push", 1024 * KIB, 12.0)]
    text = times(rows)
    assert cells(text, "4 ") == [
        ["4", "1", "KiB", "8.0", "0.4", "4.0", "0.8*", "4.0", "0.8*"],
        ["4", "1", "MiB", "10.0", "314.6*", "12.0", "262.1", "-"],
    ]
    assert "us (modelled) of a whole AllGather" in text
    assert "(N - 1) shards / time" in text


def test_path_copies_and_memory_of_each_way_are_told() -> None:
    """Cases D15, D30: what was staged, or copied one by one, shows."""
    rows = [
        gathered("ce.batch", KIB, 8.0, copies="cuMemcpyBatchAsync"),
        gathered("ce.streams", KIB, 8.0, copies="cuMemcpyAsync, one by one"),
        gathered("sm.push", KIB, 4.0),
        gathered("staged", KIB, 9.0, path="staged through the host"),
    ]
    text = times(rows).splitlines()
    assert "ce.batch: over NVLink, by cuMemcpyBatchAsync" in text
    assert "ce.streams: over NVLink, by cuMemcpyAsync, one by one" in text
    assert "sm.push: over NVLink" in text
    assert "staged: staged through the host" in text
    assert "memory: peer access in one process: asked for" in text


def on_line(way: str, alpha_us: float, gbps: float, ranks: int = 4) -> list[Record]:
    """Records on T = alpha + S / beta, S the bytes that a rank gets."""
    return [
        gathered(way, shard, alpha_us + (ranks - 1) * shard / gbps * 1e-3, ranks)
        for shard in (KIB, 16 * KIB, 128 * KIB, 1024 * KIB)
    ]


def test_start_up_and_rate_are_those_of_what_a_rank_gets() -> None:
    rows = [*on_line("ce.batch", 8.0, 400.0), *on_line("sm.push", 4.0, 350.0)]
    fit = hockney(curves(rows)[4, "ce.batch"])
    assert (fit.alpha, fit.beta) == (pytest.approx(8e-6), pytest.approx(400e9))
    table = cells(lines(rows), "4 ")
    assert [row[1] for row in table] == ["ce.batch", "sm.push"]
    assert table[0][2:] == ["8.0", "8.0", "400", "3.05", "MiB", "0%", "3", "KiB", "to", "3", "MiB"]
    assert table[1][2:] == ["4.0", "4.0", "350", "1.34", "MiB", "0%", "3", "KiB", "to", "3", "MiB"]


def test_two_sizes_make_no_line() -> None:
    assert lines([gathered("sm.push", KIB, 4.0), gathered("sm.push", 2 * KIB, 4.1)]) == ""


def test_the_fewest_ctas_within_5_percent_of_the_best_saturate() -> None:
    """3 MiB at 100, 190, 191 and 200 GB/s: 190 is the first that has 95 %."""
    moved = 3 * 1024 * KIB
    by_ctas = {
        ctas: gathered("sm.push", 1024 * KIB, moved / gbps * 1e-3, ctas=ctas)
        for ctas, gbps in ((1, 100.0), (4, 190.1), (16, 191.0), (64, 200.0))
    }
    assert saturating(by_ctas) == 4
    (row,) = cells(saturation([*by_ctas.values()], SIZE), "sm.push")
    assert row == ["sm.push", "256", "16", "KiB", "100", "190", "191", "200", "4"]
    by_ctas[4] = gathered("sm.push", 1024 * KIB, moved / 189.0 * 1e-3, ctas=4)
    assert saturating(by_ctas) == 16


def test_who_should_gather_is_said_by_size_with_crossovers_against_the_copy_engines() -> None:
    """8 + S / 400 and 4 + S / 200 (us, GB/s): equal at S = 1.6 MB got, a shard of 521 KiB."""
    rows = [*on_line("ce.batch", 8.0, 400.0), *on_line("sm.push", 4.0, 200.0)]
    text = gather_answers(RunLog(records=rows))
    assert "emu:h100 (modelled), 4 ranks: sm.push at 1 KiB to 128 KiB, ce.batch at 1 MiB" in text
    (row,) = [line for line in text.splitlines() if line.startswith("emu:h100 (modelled)  4")]
    found = float(row.split("only below")[1].split("KiB")[0])
    assert found == pytest.approx(521, rel=0.1)


def test_one_way_alone_is_no_answer() -> None:
    assert gather_answers(RunLog(records=on_line("sm.push", 4.0, 200.0))) == ""
    swept = [gathered("sm.push", KIB, 4.0, ctas=4), gathered("tma.push", KIB, 4.0, ctas=4)]
    assert gather_answers(RunLog(records=swept)) == ""


def test_a_leader_that_another_one_overtakes_is_compared_with_it() -> None:
    """Copy engines never lead; multicast leads below, push above."""
    rows = [
        *on_line("ce.batch", 9.0, 100.0),
        *on_line("multicast", 4.0, 200.0),
        *on_line("sm.push", 5.0, 400.0),
    ]
    (pair,) = [one for one in comparisons(rows) if one.base.name != "ce.batch"]
    assert (pair.base.name, pair.challenger.name) == ("multicast", "sm.push")
    # 4 + S / 200 = 5 + S / 400 at S = 400 KB got, a third of it a shard
    assert pair.result.size_bytes == pytest.approx(400_000 / 3, rel=0.15)
    assert "against" in gather_answers(RunLog(records=rows))


def test_a_modelled_crossover_says_what_moves_it() -> None:
    rows = [*on_line("ce.batch", 8.0, 400.0), *on_line("sm.push", 4.0, 200.0)]
    log = RunLog(records=rows)
    assert "parameters not varied" in gather_answers(log)
    log.sensitivities.append(
        {
            "device": "emu:h100", "question": "allgather", "challenger": "sm.push",
            "key": {"ranks": 4, "against": "ce.batch"}, "crossover_bytes": 512 * KIB,
            "nominal_bytes": 512 * KIB, "shifts": {"host.copy_startup_us": [256 * KIB, None]},
        }
    )  # fmt: skip
    text = gather_answers(log)
    assert "256 KiB to 256 KiB, or none (1 parameter)" in text
    (row,) = [line for line in text.splitlines() if "host.copy_startup_us" in line]
    assert row.split()[-5:] == ["256", "KiB", "none", "in", "range"]


def test_neighbours_with_the_same_leaders_are_joined() -> None:
    leads = {KIB: {"a", "b"}, 2 * KIB: {"a"}, 4 * KIB: {"a"}, 8 * KIB: {"b"}}
    assert sentence(leads) == "a or b at 1 KiB, a at 2 KiB to 4 KiB, b at 8 KiB"


def test_the_summary_has_the_tables_and_ends_with_the_answer() -> None:
    log = RunLog(records=[*on_line("ce.batch", 8.0, 400.0), *on_line("sm.push", 4.0, 200.0)])
    titles = [title for title, _ in summary(log)]
    assert titles == [
        "AllGather by size: emu:h100 (modelled)",
        "AllGather, start-up and rate: emu:h100 (modelled)",
        "Who should gather?",
        "smfree run",
    ]


def test_flags_are_told_in_nanoseconds_beside_the_flag_alone() -> None:
    def flag(data_bytes: int, release: bool, ns: float) -> Record:
        return record(
            question=Question.PEER_FLAG,
            key={"data_bytes": data_bytes, "release": release, "ranks": 2},
            samples_s=[ns * 1e-9] * 5,
            samples_cycles=[2 * ns] * 5,
            config={"path": "NVLink", "threads": 128},
        )

    rows = [flag(0, False, 640.0), flag(0, True, 1140.0), flag(4096, True, 2040.0)]
    ((title, text),) = peer_flag_table("H100 (measured)", rows)
    assert title == "A flag from GPU to GPU: H100 (measured)"
    assert [row[-3:] for row in cells(text, "2 ")] == [
        ["640", "-", "1280"], ["1140", "+500", "2280"], ["2040", "+1400", "4080"]
    ]  # fmt: skip
    assert "ns (measured)" in text


# --- points -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", list(Axes))
def test_every_way_is_gone_at_every_size_and_ids_are_unique(axes: Axes) -> None:
    chosen, found = ALLGATHER[axes], list(allgather_points(axes))
    main = {(p.way, p.shard_bytes) for p in found if p.ranks == chosen.ranks and p.ctas is None}
    assert main == {(way, size) for way in (*GATHER_WAYS, NCCL) for size in chosen.shard_bytes}
    assert {p.way for p in found if p.counted} == {*GATHER_WAYS, NCCL}
    ids = [point.id for point in [*found, *peer_flag_points(axes)]]
    assert len(ids) == len(set(ids))


def test_full_axes_are_those_of_a_node() -> None:
    found = list(allgather_points(Axes.FULL))
    assert {p.ranks for p in found} == {2, 4, 8}
    assert (min(p.shard_bytes for p in found), max(p.shard_bytes for p in found)) == (KIB, 256 << 20)


def test_ids_name_the_way_the_shard_the_ranks_and_the_grid() -> None:
    assert AllgatherPoint("tma.push", 2, 1 << 20, 4, False, 1 << 20).id == "tma.push-1MiB-2ranks-4ctas"
    assert AllgatherPoint("ce.batch", 8, 1 << 10, None, False, 1 << 20).id == "ce.batch-1KiB-8ranks"


# --- the whole way ------------------------------------------------------------------------------------------


def test_a_run_records_every_rank_the_path_and_the_skips(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    only = "32KiB-4ranks and (sm.push or ce.batch or multicast or nccl) or 128B-released"
    done = bench("--device=emu:a100", "-k", only, f"--benchmark-json={out}")
    assert done.returncode == 0, done.stdout
    data = json.loads(out.read_text())
    points = {
        entry["extra_info"]["key"].get("way", "flag"): entry["extra_info"] for entry in data["benchmarks"]
    }
    assert set(points) == {"ce.batch", "sm.push", "flag"}
    push = points["sm.push"]
    assert push["question"] == "allgather"
    assert push["verified"] is True
    assert push["seconds"] == max(push["per_rank"]["seconds"]) > 0
    assert len(push["per_rank"]["seconds"]) == 4
    assert push["timing"]["samples_behind_blocker"] == 1
    assert push["payload_bytes"] == 4 * 32 * KIB
    assert push["config"]["path"] == "NVLink"
    assert push["config"]["backing"].startswith("peer access in one process")
    assert push["config"]["bytes_in_flight_per_sm"] == 16 * KIB
    assert push["per_rank"]["nvlink_sent_bytes"][0] >= 3 * 32 * KIB
    assert points["ce.batch"]["config"]["copies"] == "cuMemcpyBatchAsync"
    assert points["ce.batch"]["cost"]["registers_per_byte"] == 0
    assert 300 < points["flag"]["seconds"] * 1e9 < 10_000
    reasons = {row["name"].split("-")[1]: row["reason"] for row in data["smfree"]["skipped"]}
    assert reasons["nccl"] == "nccl: it needs real GPUs"
    assert "has no multicast" in reasons["multicast"]
    assert "Who should gather?" in done.stdout
    assert "emu:a100 (modelled), 4 ranks: sm.push at 32 KiB" in done.stdout
