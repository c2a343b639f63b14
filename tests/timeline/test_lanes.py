"""From events to lanes: which row, which colour, from when to when."""

from __future__ import annotations

import pytest

from smfree.timeline.lanes import Bar, Kind, Lane, size_text, timeline
from tests.timeline import kit


def lanes(**changes: object) -> dict[str, Lane]:
    (panel,) = timeline(kit.trace(kit.launch(**changes))).panels
    return {lane.name: lane for lane in panel.lanes}


def spans(bars: tuple[Bar, ...]) -> list[tuple[float, float, Kind]]:
    return [(bar.start, bar.end, bar.kind) for bar in bars]


def test_one_lane_per_role_and_stage_and_a_thin_one_per_barrier() -> None:
    found = lanes()
    assert list(found) == ["warp 0: copies", "warp 1: stores", "warp 2", "stage 0", "full[0]", "empty[0]"]
    assert [lane.thin for lane in found.values()] == [False] * 4 + [True] * 2


def test_warps_that_wait_for_the_same_share_a_lane() -> None:
    copies = [copy for copy in kit.launch()["copies"] if copy["warp"] == 0]
    assert list(lanes(copies=copies))[:2] == ["warp 0: copies", "warps 1-2"]


def test_a_warp_works_after_it_has_waited_for_a_tile_and_only_then() -> None:
    found = lanes()
    assert spans(found["warp 2"].bars) == [
        (0.0, 5, Kind.RUN),
        (5, 70, Kind.WAIT),
        (70, 90, Kind.WORK),
        (90, 170, Kind.WAIT),
        (170, 200.0, Kind.WORK),
    ]
    assert found["warp 2"].bars[1].texts == ("full[0] phase 0", "full[0]")
    assert found["warp 2"].bars[2].texts == ("stage 0", "0")
    producer = found["warp 0: copies"].bars
    assert spans(producer) == [(0.0, 20, Kind.RUN), (20, 100, Kind.WAIT), (100, 200.0, Kind.RUN)]


def test_looking_at_a_copy_or_a_block_barrier_ends_no_work_but_waiting_for_a_free_stage_does() -> None:
    waits = [
        kit.wait(0, "full[0]", 0, 10, 20),
        kit.wait(0, "bar.sync 0", None, 30, 40),
        kit.wait(0, "cp.async.bulk.wait_group.read 0", None, 50, 50),
        kit.wait(0, "empty[0]", 0, 60, 70),
    ]
    bars = lanes(waits=waits)["warp 0: copies"].bars
    kinds = [(bar.start, bar.kind) for bar in bars if bar.kind is not Kind.WAIT]
    assert kinds == [(0.0, Kind.RUN), (20, Kind.WORK), (40, Kind.WORK), (50, Kind.WORK), (70, Kind.RUN)]


def test_copies_of_one_stage_in_flight_together_are_one_filling() -> None:
    bars = lanes()["stage 0"].bars
    assert spans(bars) == [
        (10, 60, Kind.LOAD),
        (60, 105, Kind.HOLD),  # until its store has read it
        (110, 160, Kind.LOAD),
        (160, 220.0, Kind.HOLD),
        (90, 105, Kind.STORE),
    ]
    assert bars[0].texts == ("2 KiB in", "2 KiB")
    assert bars[-1].texts == ("1 KiB out", "1 KiB")
    assert "written at 130" in bars[-1].detail


def test_the_colour_of_a_phase_is_its_parity() -> None:
    found = lanes()
    assert spans(found["full[0]"].bars) == [
        (0.0, 60.0, Kind.EVEN), (60.0, 160.0, Kind.ODD), (160.0, 220.0, Kind.EVEN)
    ]  # fmt: skip
    assert found["full[0]"].bars[1].texts == ("phase 1", "1")
    assert "phase 2 (parity 0), not completed" in found["full[0]"].bars[2].detail


def test_copies_without_a_barrier_find_their_stage_by_the_place_of_their_group() -> None:
    copies = [
        kit.copy(
            "cp.async", 10 * g, 10 * g + 5, barrier=None, group=g, warp=w, shared=4096 * (g % 2) + 512 * w
        )
        for g in range(4)
        for w in (0, 1)
    ]
    found = lanes(copies=copies, phases=[], waits=[kit.wait(0, "cp.async.wait_group 1", None, 20, 30)])
    assert [name for name in found if name.startswith("stage")] == ["stage 0", "stage 1"]
    loads = [bar for bar in found["stage 1"].bars if bar.kind is Kind.LOAD]
    assert [(bar.start, bar.texts[0]) for bar in loads] == [(10, "2 KiB in"), (30, "2 KiB in")]
    assert spans(found["warp 0: copies"].bars)[-1] == (30, 200.0, Kind.WORK)


def test_several_ctas_are_told_apart() -> None:
    life = {"cta": 1, "warp": 0, "start": 0.0, "end": 50.0}
    found = lanes(warps=[*kit.launch()["warps"], life])
    assert "CTA 0 stage 0" in found
    assert "CTA 1 warp 0" in found


def test_a_label_names_the_panel() -> None:
    (panel,) = timeline(kit.trace(kit.launch(label="one stage"))).panels
    assert panel.title == "one stage: CTA 0 of 2, 96 threads"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"launches": []}, r"smfree_trace must be 1 \(got None\)"),
        ({"smfree_trace": 2, "launches": []}, r"smfree_trace must be 1 \(got 2\)"),
        ({"smfree_trace": 1, "launches": []}, "no launch was traced"),
    ],
)
def test_what_is_no_trace_is_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timeline(data)


def test_sizes_are_told_in_the_unit_that_fits() -> None:
    assert [size_text(n) for n in (0, 48, 1024, 1280, 1000, 16384)] == [
        "0 B", "48 B", "1 KiB", "1.25 KiB", "1000 B", "16 KiB"
    ]  # fmt: skip
