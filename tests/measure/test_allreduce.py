"""The benchmarks of AllReduce and ReduceScatter: tables, answers, points, proof, and a run of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.reduce_axes import (
    ALL_BYTES,
    ALLREDUCE,
    ALLREDUCE_WAYS,
    REDUCE_SCATTER,
    SCATTER_WAYS,
    ReducePoint,
    reduce_points,
)
from bench.reductions import (
    ALL,
    SCATTER,
    Job,
    Reduction,
    channel_pieces,
    place,
    ring_sends,
    sum_of,
    terms,
    verify,
)
from kernels.ipc.group import Group
from kernels.reduce.allreduce import allreduce
from kernels.reduce.elements import Element
from kernels.reduce.ring import RingConfig
from kernels.reduce.workspace import Workspace
from smfree.cuda import Device
from smfree.measure.allreduce import SIZE, comparisons, fits, lines, meeting, reduction_answers, times
from smfree.measure.log import RunLog
from smfree.measure.nodes import Node
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Memory, Question, Record, Traffic
from smfree.measure.reduced_bytes import expected_mean, reduced_bytes, sent_bytes, steps_of
from smfree.measure.sizes import algorithm_gbps, bus_gbps, by_way, saturation
from smfree.measure.tables import summary
from smfree.results.compare import Verdict, compare_runs
from smfree.results.store import load_run
from tests.measure.test_allgather import cells
from tests.measure.test_bench import bench
from tests.measure.test_records import record

KIB, MIB = 1 << 10, 1 << 20


def reduced(
    way: str,
    size: int,
    us: float,
    ranks: int = 4,
    ctas: int | None = None,
    question: Question = Question.ALLREDUCE,
    per_rank: dict[str, list[float]] | None = None,
    **config: Any,
) -> Record:
    sent = (2 if question is Question.ALLREDUCE else 1) * (ranks - 1) * size // ranks
    return record(
        question=question,
        device="emu:h100",
        clock_source="modelled",
        key={"way": way, "ranks": ranks, "message_bytes": size, "dtype": "bfloat16", "ctas": ctas},
        traffic=Traffic(size, sent, sent),
        samples_s=[us * 1e-6],
        memory=Memory.PEER,
        cache=CacheState.REPEATED,
        peak_gbps=0.0,
        per_rank=per_rank or {},
        config={
            "path": "NVLink",
            "threads": 256,
            "bytes_in_flight_per_sm": 16384,
            "num_sms": 132,
            "backing": "peer access in one process: asked for",
            "element_bytes": 2,
            **config,
        },
    )


def on_line(way: str, alpha_us: float, gbps: float, ranks: int = 4) -> list[Record]:
    """Records on T = alpha + S / beta."""
    sizes = (KIB, 16 * KIB, 128 * KIB, MIB)
    return [reduced(way, size, alpha_us + size / gbps * 1e-3, ranks) for size in sizes]


# --- rates and tables ---------------------------------------------------------------------------------------


def test_bandwidths_follow_the_convention_of_nccls_tests() -> None:
    """busbw = algbw 2 (n - 1)/n, of a ReduceScatter (n - 1)/n: 8 ranks, 1 GB in 10 ms."""
    one = reduced("ring.sm", 1_000_000_000, 10_000.0, ranks=8)
    assert algorithm_gbps(one) == pytest.approx(100.0)
    assert bus_gbps(one) == pytest.approx(175.0)
    half = reduced("ring.sm", 1_000_000_000, 10_000.0, ranks=8, question=Question.REDUCE_SCATTER)
    assert (algorithm_gbps(half), bus_gbps(half)) == (pytest.approx(100.0), pytest.approx(87.5))


def test_the_fastest_way_of_each_size_is_starred() -> None:
    rows = [reduced("ring.sm", KIB, 8.0), reduced("oneshot", KIB, 4.0), reduced("ring.sm", MIB, 10.0)]
    text = times(rows)
    assert cells(text, "4 ") == [
        ["4", "1", "KiB", "8.0", "0.2", "4.0", "0.4*"],
        ["4", "1", "MiB", "10.0", "157.3*", "-"],
    ]
    assert "us (modelled) of a whole AllReduce" in text
    assert "2 (N - 1)/N messages / time" in text
    half = times([reduced("direct", MIB, 10.0, question=Question.REDUCE_SCATTER)])
    assert "of a whole ReduceScatter" in half and " (N - 1)/N messages / time" in half


def test_start_up_and_rate_are_those_of_the_message_and_a_step_has_its_share() -> None:
    rows = [*on_line("ring.sm", 12.0, 200.0), *on_line("oneshot", 4.0, 100.0), *on_line("nccl", 9.0, 200.0)]
    fit = fits(rows)[4, "ring.sm"]
    assert (fit.alpha, fit.beta) == (pytest.approx(12e-6), pytest.approx(200e9))
    ring, shot, other = cells(lines(rows), "4 ")
    assert ring[1:8] == ["ring.sm", "12.0", "12.0", "6", "2.00", "200", "300"]
    assert shot[1:8] == ["oneshot", "4.0", "4.0", "1", "4.00", "100", "150"]
    assert other[1:8] == ["nccl", "9.0", "9.0", "-", "-", "200", "300"]
    assert lines(rows[:2]) == ""


@pytest.mark.parametrize(
    ("way", "question", "steps"),
    [
        ("ring.tma", Question.ALLREDUCE, 14),
        ("tree", Question.ALLREDUCE, 6),
        ("oneshot", Question.ALLREDUCE, 1),
        ("nccl", Question.ALLREDUCE, None),
        ("ring.sm", Question.REDUCE_SCATTER, 7),
        ("direct", Question.REDUCE_SCATTER, 1),
        ("nccl", Question.REDUCE_SCATTER, None),
    ],
)
def test_steps_on_paper(way: str, question: Question, steps: int | None) -> None:
    assert steps_of(reduced(way, KIB, 1.0, 8, question=question)) == steps


# --- who should reduce --------------------------------------------------------------------------------------


def test_rivals_are_compared_each_with_each_and_their_lines_meet_where_they_should() -> None:
    """4 + S / 50 and 12 + S / 200 (us, GB/s): equal at S = 8 us / (1/50 - 1/200) = 533 KB."""
    rows = [*on_line("ring.sm", 12.0, 200.0), *on_line("oneshot", 4.0, 50.0), *on_line("twoshot", 7.0, 150.0)]
    pairs = {(one.base.name, one.challenger.name): one for one in comparisons(rows)}
    assert list(pairs) == [("oneshot", "twoshot"), ("oneshot", "ring.sm"), ("twoshot", "ring.sm")]
    result = pairs["oneshot", "ring.sm"].result
    assert result.size_bytes == pytest.approx(533_333, rel=0.1)
    found = by_way(rows, SIZE)
    assert meeting(found["oneshot"], found["ring.sm"]) == "from 521 KiB"
    assert meeting(found["ring.sm"], found["oneshot"]) == "below 521 KiB"
    slow = by_way(on_line("slow", 20.0, 40.0), SIZE)["slow"]
    far = by_way(on_line("far", 90.0, 60.0), SIZE)["far"]
    assert meeting(found["oneshot"], far) == "beyond what was run", "86 us / (1/50 - 1/60) = 24.6 MiB"
    assert meeting(far, found["oneshot"]) == "at all that was run"
    near = by_way(on_line("near", 4.005, 60.0), SIZE)["near"]
    assert meeting(found["oneshot"], near) == "from 1.46 KiB", "0.005 us / (1/50 - 1/60)"
    close = by_way(on_line("close", 4.001, 60.0), SIZE)["close"]
    assert meeting(found["oneshot"], close) == "at all that was run", "0.001 us / (1/50 - 1/60) = 300 B"
    assert meeting(close, found["oneshot"]) == "below what was run"
    assert meeting(found["oneshot"], slow) == "nowhere"
    assert meeting(slow, found["oneshot"]) == "everywhere"


def test_who_should_reduce_is_said_by_size() -> None:
    rows = [*on_line("ring.sm", 12.0, 200.0), *on_line("oneshot", 4.0, 50.0)]
    log = RunLog(records=rows)
    text = reduction_answers(log)
    said = (
        "emu:h100 (modelled), 4 ranks, AllReduce of bfloat16: oneshot at 1 KiB to 128 KiB, ring.sm at 1 MiB"
    )
    assert said in text
    (row,) = [line for line in text.splitlines() if line.startswith("emu:h100 (modelled)  4")]
    assert "from 521 KiB" in row and "parameters not varied" in row
    titles = [title for title, _ in summary(log)]
    assert titles[:2] == [
        "AllReduce of bfloat16 by size: emu:h100 (modelled)",
        "AllReduce of bfloat16, start-up and rate: emu:h100 (modelled)",
    ]
    assert titles[-2:] == ["Who should reduce?", "smfree run"]


def test_another_leader_is_compared_with_the_one_before_it() -> None:
    rows = [*on_line("oneshot", 4.0, 50.0), *on_line("nvls", 5.0, 400.0)]
    (pair,) = comparisons(rows)
    assert (pair.base.name, pair.challenger.name) == ("oneshot", "nvls")
    assert pair.regime == {"ranks": 4, "dtype": "bfloat16", "against": "oneshot"}


def test_one_way_or_a_sweep_is_no_answer() -> None:
    assert reduction_answers(RunLog(records=on_line("ring.sm", 4.0, 200.0))) == ""
    swept = [reduced(way, MIB, 4.0, ctas=4) for way in ("ring.sm", "twoshot")]
    assert reduction_answers(RunLog(records=swept)) == ""
    assert "of messages of 1 MiB" in saturation(swept, SIZE)


def test_what_was_proved_within_a_bound_is_not_called_bitwise() -> None:
    rows = [reduced("oneshot", KIB, 4.0, bitwise=True), reduced("nvls", KIB, 4.0, bitwise=False)]
    text = summary(RunLog(records=rows))[-1][1]
    assert "bitwise, 1 sums in an unknown order within the bound of their roundings" in text


# --- what moves ---------------------------------------------------------------------------------------------


def test_what_is_sent_has_no_signals_in_it() -> None:
    counted = {
        "nvlink_sent_bytes": [1536.0 + 36, 1536.0 + 36, 1536.0 + 36, 1500.0 + 36],
        "peer_signal_bytes": [36.0] * 4,
        "peer_signals": [9.0] * 4,
    }
    one = reduced("ring.sm", KIB, 9.0, per_rank=counted)
    one.config["ctas"] = 3
    one.counters = {"launches": 1}
    assert sent_bytes(one) == [1536, 1536, 1536, 1500]
    (row,) = cells(reduced_bytes([one]), "ring.sm")
    assert row[1:8] == ["-", "(6)", "3", "9", "1.49", "(1.50)", "1.50"]
    one.config = {**one.config, "steps": 7.0}
    (row,) = cells(reduced_bytes([one]), "ring.sm")
    assert row[1:3] == ["7", "(6)"], "what was counted is told, whatever the paper says"
    assert reduced_bytes([reduced("ring.sm", KIB, 9.0)]) == "", "a real GPU counts nothing"


RANKS, COUNT = 4, 1024
BF16 = Element.BF16


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    group = Group.local(Device.open_all(f"emu:h100x{RANKS}"), pool_bytes=1 << 20)
    return Workspace(group, scratch_bytes=1 << 17, oneshot_bytes=8 * KIB)


def job(workspace: Workspace, reduction: Reduction = ALL) -> Job:
    size = COUNT * BF16.bytes
    src = workspace.group.symmetric(size, "src")
    dst = workspace.group.symmetric(reduction.result_bytes(size, RANKS), "dst")
    return Job(reduction, workspace, src, dst, BF16)


@pytest.mark.parametrize("way", [way for way in ALLREDUCE_WAYS if way not in ("nccl", "ring.tma")])
def test_every_way_sends_what_it_does_on_paper(workspace: Workspace, way: str) -> None:
    """Data and signals together are what the link carries; nvls is proved within its bound."""
    one = job(workspace)
    node = Node([member.device for member in workspace.group.members])
    place(one)
    before = node.tally()
    allreduce(workspace, one.dst, one.src, dtype=BF16, way=way)
    workspace.group.wait()
    counted = before.since()
    verify(one, way)
    names = {name for rank in counted for name in rank}
    by_rank: dict[str, list[float]] = {name: [rank[name] for rank in counted] for name in names}
    found = reduced(way, one.src.nbytes, 1.0, per_rank=by_rank)
    assert sum(sent_bytes(found)) / RANKS == expected_mean(found)
    one.dst.free()
    one.src.free()


@pytest.mark.parametrize(("reduction", "steps"), [(ALL, 6), (SCATTER, 3)], ids=["allreduce", "scatter"])
@pytest.mark.parametrize(("ctas", "piece_bytes"), [(1, 512), (2, 128)])
def test_a_rings_steps_are_counted_per_piece(
    workspace: Workspace, reduction: Reduction, steps: int, ctas: int, piece_bytes: int
) -> None:
    """Chunks of 512 bytes in one piece, and in two of each of two channels."""
    one = job(workspace, reduction)
    place(one)
    before = ring_sends(one)
    config = RingConfig(ctas=ctas, threads=64, piece_bytes=piece_bytes)
    reduction.call(workspace, one.dst, one.src, dtype=BF16, way="ring.sm", config=config)
    workspace.group.wait()
    verify(one, "ring.sm")
    said = {"ctas": ctas, "piece_bytes": piece_bytes}
    assert ring_sends(one) - before == steps * channel_pieces(one, said)
    one.dst.free()
    one.src.free()


# --- proof --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "reduction"), [("ring.sm", ALL), ("direct", SCATTER), ("nvls", ALL)])
def test_a_wrong_sum_is_found_on_any_rank(workspace: Workspace, way: str, reduction: Reduction) -> None:
    one = job(workspace, reduction)
    total = sum_of("twoshot" if way != "ring.sm" else way, COUNT, RANKS, BF16)
    for member in workspace.group.members:
        mine = reduction.result(total, member.rank, RANKS)
        one.dst.array(member.rank).copy_from(mine.view(np.uint8))
    verify(one, way)
    wrong = reduction.result(total, 2, RANKS).copy()
    place_of = 7
    wrong[place_of] ^= 0x10  # a sixteenth to an eighth of the sum
    one.dst.array(2).copy_from(wrong.view(np.uint8))
    with pytest.raises(AssertionError, match=r"^rank 2 has 1 wrong sums, from element 7 on$"):
        verify(one, way)
    one.dst.free()
    one.src.free()


def test_terms_differ_from_rank_to_rank() -> None:
    given = terms(64, 3, BF16)
    assert all(len(term) == 64 for term in given)
    assert len({term.tobytes() for term in given}) == 3


# --- points -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", list(Axes))
@pytest.mark.parametrize(("all_axes", "ways"), [(ALLREDUCE, ALLREDUCE_WAYS), (REDUCE_SCATTER, SCATTER_WAYS)])
def test_every_way_is_gone_at_every_size_and_ids_are_unique(
    axes: Axes, all_axes: Any, ways: tuple[str, ...]
) -> None:
    chosen = all_axes[axes]
    found = list(reduce_points(chosen))
    main = {
        (p.way, p.message_bytes)
        for p in found
        if p.ranks == chosen.ranks and p.ctas is None and p.dtype == "bfloat16"
    }
    assert main == {(way, size) for way in ways for size in chosen.message_bytes}
    assert {p.way for p in found if p.counted} == set(ways)
    assert all(p.message_bytes <= p.largest_bytes for p in found)
    chunks = [p.message_bytes / p.ranks / Element.of(p.dtype).bytes for p in found]
    assert all_axes is ALLREDUCE or all(chunk == int(chunk) > 0 for chunk in chunks)
    ids = [point.id for point in found]
    assert len(ids) == len(set(ids))


def test_full_axes_are_those_of_a_node() -> None:
    found = list(reduce_points(ALLREDUCE[Axes.FULL]))
    assert {p.ranks for p in found} == {2, 4, 8}
    assert {p.dtype for p in found} == {"bfloat16", "float32"}
    assert (ALL_BYTES[0], ALL_BYTES[-1]) == (8, 256 * MIB)
    assert {p.ctas for p in found} == {None, 1, 2, 4, 8, 16, 32, 64, 128}


def test_ids_name_the_way_the_message_the_ranks_and_the_grid() -> None:
    point = ReducePoint("ring.sm", 2, MIB, "bfloat16", 4, False, MIB)
    assert point.id == "ring.sm-1MiB-bfloat16-2ranks-4ctas"
    assert ReducePoint("nvls", 8, 8, "float32", None, False, MIB).id == "nvls-8B-float32-8ranks"


# --- the whole way ------------------------------------------------------------------------------------------


def test_a_run_is_recorded_told_and_compared(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    only = "64KiB-bfloat16-4ranks and (oneshot or nvls or nccl or direct)"
    done = bench("--device=emu:a100", "-k", only, f"--benchmark-json={out}")
    assert done.returncode == 0, done.stdout
    data = json.loads(out.read_text())
    points = {entry["extra_info"]["key"]["way"]: entry["extra_info"] for entry in data["benchmarks"]}
    assert set(points) == {"oneshot", "direct"}
    shot = points["oneshot"]
    assert shot["question"] == "allreduce" and points["direct"]["question"] == "reduce scatter"
    assert shot["verified"] is True and shot["config"]["bitwise"] is True
    assert shot["seconds"] == max(shot["per_rank"]["seconds"]) > 0
    assert shot["payload_bytes"] == 64 * KIB and shot["written_bytes"] == 96 * KIB
    assert shot["cost"]["registers"] > 0 and shot["config"]["ctas"] > 1
    data_bytes = shot["per_rank"]["nvlink_sent_bytes"][0] - shot["per_rank"]["peer_signal_bytes"][0]
    assert data_bytes == 3 * 64 * KIB
    reasons = {row["name"].split("-")[1]: row["reason"] for row in data["smfree"]["skipped"]}
    assert reasons["nccl"] == "nccl: it needs real GPUs"
    assert "has no multicast" in reasons["nvls"]
    assert "AllReduce, what moves: emu:a100 (modelled)" in done.stdout
    assert "2 points, every one verified before it was timed: bitwise\n" in done.stdout
    compared = compare_runs(load_run(out), load_run(out)).points
    assert [point.verdict for point in compared] == [Verdict.SAME, Verdict.SAME]
