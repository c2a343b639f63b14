"""Overlap of a pipeline from its halves: pipelines whose schedule is known give the number that they must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smfree.model.overlap import Halves, enough_stages

LAUNCH, FILL, DRAIN, TILES = 2.0, 3.0, 1.0, 10


def halves(copy: float, compute: float, both: float = 0.0) -> Halves:
    """Tiles of so many seconds each; the copies stream, the first and the last cost their latency besides."""
    return Halves(
        tiles=TILES,
        both=both,
        copy=LAUNCH + FILL + DRAIN + TILES * copy,
        one_copy=LAUNCH + FILL + DRAIN + copy,
        compute=LAUNCH + TILES * compute,
        one_compute=LAUNCH + compute,
    )


def test_launch_fill_and_drain_cancel_in_the_time_of_a_tile() -> None:
    part = halves(copy=2.0, compute=5.0)
    assert part.tile_copy == pytest.approx(2.0)
    assert part.tile_compute == pytest.approx(5.0)
    assert part.ratio == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("copy", "compute", "ideal"),
    [
        (2.0, 5.0, LAUNCH + FILL + DRAIN + 2.0 + TILES * 5.0),  # computation is longer: one copy shows
        (5.0, 2.0, LAUNCH + FILL + DRAIN + TILES * 5.0 + 2.0),  # copies are longer: one computation shows
        (3.0, 3.0, LAUNCH + FILL + DRAIN + 3.0 + TILES * 3.0),
    ],
)
def test_ideal_is_the_longer_half_with_one_tile_of_the_other(
    copy: float, compute: float, ideal: float
) -> None:
    assert halves(copy, compute).ideal == pytest.approx(ideal)


def test_serial_is_the_sum_with_one_launch() -> None:
    assert halves(2.0, 5.0).serial == pytest.approx(LAUNCH + FILL + DRAIN + TILES * 7.0)


def test_overlap_is_0_when_serial_and_1_when_ideal() -> None:
    part = halves(2.0, 5.0)
    assert replace(part, both=part.serial).overlap == pytest.approx(0.0)
    assert replace(part, both=part.ideal).overlap == pytest.approx(1.0)
    assert replace(part, both=(part.ideal + part.serial) / 2).overlap == pytest.approx(0.5)


def test_where_nothing_can_be_hidden_there_is_no_overlap_to_tell() -> None:
    assert halves(2.0, 0.01, both=30.0).overlap is None


def test_hidden_means_that_only_fill_and_drain_show() -> None:
    part = halves(2.0, 5.0)
    assert replace(part, both=1.04 * part.ideal).hidden
    assert not replace(part, both=1.06 * part.ideal).hidden
    slow = halves(5.0, 2.0)
    assert not replace(slow, both=slow.ideal).hidden  # ideal, but the computation waits for its copies


def test_enough_stages_is_the_fewest_near_the_fastest() -> None:
    assert enough_stages({1: 20.0, 2: 10.4, 4: 10.0, 8: 10.1}) == 2
    assert enough_stages({1: 20.0, 2: 11.0, 4: 10.0, 8: 10.1}) == 4
