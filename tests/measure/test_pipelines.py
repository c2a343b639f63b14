"""Tables and answers of the pipelines, from records whose overlap is known."""

from __future__ import annotations

import pytest

from bench.axes import PIPELINE, Half, pipeline_points
from bench.bench_pipeline import rounded
from kernels.mbarrier.registry import PIPELINES
from smfree.measure.options import Axes
from smfree.measure.pipelines import halves, pipeline_tables, ratio_text, stage_answers
from smfree.measure.records import CacheState, Cost, Memory, Question, Record
from tests.measure.test_records import record

TILES = 16
COPY_S, COMPUTE_S = 1e-6, 1e-6


def row(part: str, stages: int, seconds: float, ratio: float | None = None) -> Record:
    key = {
        "pipeline": "ring", "tile_bytes": 4096, "num_stages": stages, "part": part, "ratio": ratio, "work": 12
    }  # fmt: skip
    return record(
        question=Question.PIPELINE,
        device="emu:h100",
        clock_source="modelled",
        key=key,
        samples_s=[seconds],
        sm_clock_mhz=1000.0,
        memory=Memory.L2,
        cache=CacheState.HOT,
        config={"grid": 4, "tiles_per_cta": 1 if part.startswith("one") else TILES},
        cost=Cost(registers=27, ctas_per_sm=6, occupancy=0.47),
    )


def ring(stages: int, both: float) -> list[Record]:
    return [
        row("copy", stages, TILES * COPY_S),
        row("one copy", stages, COPY_S),
        row("compute", stages, TILES * COMPUTE_S, 1.0),
        row("one compute", stages, COMPUTE_S, 1.0),
        row("both", stages, both, 1.0),
    ]


SERIAL, IDEAL = 2 * TILES * COPY_S, (TILES + 1) * COPY_S


def test_the_table_tells_stages_overlap_and_what_it_costs() -> None:
    ((title, text),) = pipeline_tables("emu:h100 (modelled)", [*ring(1, SERIAL), *ring(2, IDEAL)])
    assert title == "Pipelines, copy and computation overlapped: emu:h100 (modelled)"
    one, two = (line.split() for line in text.splitlines() if line.startswith("ring"))
    #              name    tile        stages ratios       work  both    ideal   serial  overlap copies tile
    assert one == ["ring", "4", "KiB", "1", "1:1", "1.00", "12", "2000", "1062", "2000", "0%", "1000", "1000",
                   "27", "6", "47%"]  # fmt: skip
    assert two[7] == "1062"
    assert two[10] == "100%"
    assert "SM cycles per tile and CTA (modelled)" in text
    assert "4 CTAs, 16 tiles each" in text
    assert "overlap  (serial - both) / (serial - ideal)" in text


def test_a_whole_without_one_of_its_halves_is_left_out() -> None:
    records = ring(2, IDEAL)
    for missing in range(4):
        assert halves(records[:missing] + records[missing + 1 :]) == {}
    assert list(halves(records)) == [("ring", 4096, 2, 1.0)]


def test_the_answer_says_with_how_many_stages_the_copy_is_hidden() -> None:
    text = stage_answers([*ring(1, SERIAL), *ring(2, 1.2 * IDEAL), *ring(4, IDEAL)])
    (line,) = (line for line in text.splitlines() if line.startswith("emu:h100 (modelled)"))
    assert line.split()[2:] == [
        "ring",
        "4",
        "KiB",
        "1:1",
        "4",
        "stages",
        "4",
        "of",
        "1,",
        "2,",
        "4",
        "1.88",
        "x",
    ]


def test_a_copy_that_takes_longer_than_the_computation_is_never_hidden() -> None:
    def slow(stages: int) -> list[Record]:
        records = ring(stages, 3 * IDEAL)
        records[0] = row("copy", stages, 3 * TILES * COPY_S)
        records[1] = row("one copy", stages, 3 * COPY_S)
        return records

    assert "none: the copy takes 3.00 x the computation" in stage_answers([*slow(1), *slow(2)])


def test_one_stage_count_is_no_answer() -> None:
    assert stage_answers(ring(2, IDEAL)) == ""


def test_ratios_are_told_as_whole_numbers() -> None:
    assert [ratio_text(r) for r in (0.25, 0.5, 1.0, 2.0, 4.0)] == ["1:4", "1:2", "1:1", "2:1", "4:1"]


def test_work_is_rounded_to_what_a_later_run_finds_again() -> None:
    assert [rounded(w) for w in (-3.0, 0.2, 5.4, 13.2, 45.0, 101.0, 1e6)] == [1, 1, 5, 14, 48, 96, 4096]
    assert rounded(12.3) == rounded(12.4) == 12


@pytest.mark.parametrize("axes", list(Axes))
def test_every_whole_comes_with_its_halves_and_no_stage_that_is_impossible(axes: Axes) -> None:
    points = list(pipeline_points(axes))
    assert len({point.id for point in points}) == len(points)
    there = {(p.pipeline, p.tile_bytes, p.num_stages, p.half, p.ratio) for p in points}
    wholes = [p for p in points if p.half is Half.BOTH]
    assert {p.pipeline for p in wholes} == set(PIPELINE[axes].pipelines)
    for p in wholes:
        place = p.pipeline, p.tile_bytes, p.num_stages
        assert {(*place, half, None) for half in (Half.COPY, Half.ONE_COPY)} <= there
        assert {(*place, half, p.ratio) for half in (Half.COMPUTE, Half.ONE_COMPUTE)} <= there
        assert p.num_stages <= PIPELINES[p.pipeline].max_stages
    assert {p.num_stages for p in wholes if p.pipeline == "ring"} >= {1, 2, 4}


def test_full_axes_have_every_stage_and_every_ratio() -> None:
    wholes = [p for p in pipeline_points(Axes.FULL) if p.half is Half.BOTH and p.pipeline == "ring"]
    assert {p.num_stages for p in wholes} == set(range(1, 9))
    assert {p.ratio for p in wholes if p.num_stages == 2} == {0.25, 0.5, 1.0, 2.0, 4.0}
