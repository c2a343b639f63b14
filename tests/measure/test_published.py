"""docs/published.md: public numbers, and what kernels and copies give on emulated nodes now."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.published import ROWS, Row, fixed_by, main
from scripts.published_runs import MIB, copy_us, one_way_gbps, reduce_gbps, spread, threads, tiles
from smfree.emulator.profile import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")
KERNELS = ("`tma.push`", "`sm.push`", "`ring.sm`", "`nvls`")
CHEAP = [row for row in ROWS if not row.how.startswith(KERNELS) and row.gpu != "b200"]
CLOSE = 0.05
ONE_SM = [row for row in ROWS if row.id in ("h20-sm-reg", "h20-sm-tma")]


def cells_of(text: str) -> list[list[str]]:
    """The rows of all tables of a page."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines]


@pytest.mark.parametrize("row", CHEAP, ids=lambda row: row.id)
def test_a_copy_in_the_page_is_what_a_run_gives_now(row: Row) -> None:
    assert row.cells() in cells_of(PAGE), "run `make docs`"


@pytest.mark.parametrize("row", ONE_SM, ids=lambda row: row.id)
def test_a_kernel_in_the_page_is_about_what_a_run_gives_now(row: Row) -> None:
    """An instruction more in a kernel's loop moves its rate a little, and need not rewrite the page."""
    (found,) = (cells for cells in cells_of(PAGE) if cells[0] == row.id)
    assert found[:5] == row.cells()[:5]
    assert row.modelled() == pytest.approx(float(found[5]), rel=CLOSE), "run `make docs`"


def test_every_row_is_there_with_its_public_value() -> None:
    written = [(cells[0], cells[2], cells[4]) for cells in cells_of(PAGE) if len(cells) == 7]
    assert written[2:] == [(row.id, row.how, f"{row.public:g}") for row in ROWS]


def test_what_is_public_is_what_the_profiles_say() -> None:
    """The values of profiles, where they have the row, too."""
    said = {(gpu, test.id): test.value for gpu in ("a100", "h100", "h20", "b200") for test in load(gpu).tests}
    both = [(said[row.gpu, row.id], row.public) for row in ROWS if (row.gpu, row.id) in said]
    assert len(both) >= 10
    assert all(one == other for one, other in both)


def test_rows_that_fixed_a_parameter_say_so_and_hit() -> None:
    fixed = [row for row in CHEAP if fixed_by(row)]
    assert {row.id for row in fixed} >= {"h20-ce-alpha", "h20-p2p-1g-ce", "a100-ce-p2p", "ipc-open"}
    assert all(row.modelled() == pytest.approx(row.public, rel=0.01) for row in fixed)
    assert not any(fixed_by(row) for row in ONE_SM)


def test_another_parameter_gives_another_page() -> None:
    """The twin of the rows above: the numbers come from runs."""
    slower = load("h20").replace("dram.latency_cycles", factor=1.2)
    assert one_way_gbps(slower, threads(1024), 1) < 0.9 * one_way_gbps("h20", threads(1024), 1)


def test_fewer_bytes_in_flight_need_more_sms() -> None:
    """The page's main table, two rows of it."""
    (few,), (many,) = spread("h20", [tiles(16384, 4)]), spread("h20", [threads(256)])
    rows = [cells for cells in cells_of(PAGE) if cells[0] == "h20" and len(cells) == 6]
    for one, engine in ((few, "`tma.push`, 32 threads, 4 tiles of 16 KiB"), (many, "`sm.push`, 256 threads")):
        (found,) = (cells for cells in rows if cells[1].startswith(engine))
        gbps, held_ns, sms = map(float, found[3:])
        assert one.gbps == pytest.approx(gbps, rel=CLOSE)
        assert one.held_ns == pytest.approx(held_ns, rel=CLOSE)
        assert one.sms == pytest.approx(sms, abs=CLOSE * sms + 1)
    assert many.sms > 3 * few.sms


def test_a_start_up_is_that_of_every_copy() -> None:
    assert copy_us("h20", 1, 4) == pytest.approx(copy_us("h20", 1))


def test_a_rate_of_an_allreduce_is_its_links() -> None:
    """Two ranks, which send half of the message in each of two steps; a slower link is a lower rate."""
    usual, slower = (
        reduce_gbps(load("h100").replace("link.gbps", factor=factor), "twoshot", 2, (2 * MIB, 4 * MIB))
        for factor in (1.0, 0.5)
    )
    assert slower < 0.6 * usual
    assert 0.4 * 450 < usual < 450


def test_the_script_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "docs/published.md" in capsys.readouterr().out
