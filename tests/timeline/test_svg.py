"""The picture: well-formed, complete, the same each time, modelled in its title."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from smfree.cli import main
from smfree.timeline.lanes import timeline
from smfree.timeline.svg import draw
from tests.timeline import kit

SVG = "{http://www.w3.org/2000/svg}"


def picture(*launches: dict[str, object], **options: object) -> ET.Element:
    return ET.fromstring(draw(timeline(kit.trace(*launches)), **options))


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def bars(root: ET.Element) -> list[ET.Element]:
    return [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_title_axis_and_times_say_modelled() -> None:
    words = texts(picture())
    assert words[0] == "Timeline on A GPU (emulated), modelled"
    assert "SM cycles since the launch began, modelled" in words
    assert "220 cycles, 0.22 us modelled" in words
    assert texts(picture(title="A ring"))[0] == "A ring, modelled"


def test_bars_lie_where_their_times_say() -> None:
    found = {rect.find(f"{SVG}title").text: rect for rect in bars(picture())}
    load = found["cp.async.bulk load, 2 KiB, at ring.cu:2 (10 to 60)"]
    hold = found["the stage is full (60 to 105)"]
    left, width = float(load.get("x")), float(load.get("width"))
    assert float(hold.get("x")) == pytest.approx(left + width, abs=0.11)
    assert float(hold.get("width")) == pytest.approx(width * 45 / 50, abs=0.11)
    assert load.get("class") == "load"


def test_launches_share_one_scale() -> None:
    short = kit.launch(cycles=110.0, label="half")
    root = picture(kit.launch(), short)
    ends = [float(rect.get("x")) + float(rect.get("width")) for rect in bars(root)]
    assert max(ends) <= 1000 - 14 + 0.2
    assert [text for text in texts(root) if text.endswith("96 threads")] == [
        "ring: CTA 0 of 2, 96 threads", "half: CTA 0 of 2, 96 threads"
    ]  # fmt: skip


def test_a_window_leaves_out_what_lies_outside() -> None:
    details = [rect.find(f"{SVG}title").text for rect in bars(picture(start=100, end=150))]
    assert details
    assert not [text for text in details if text.endswith("(10 to 60)")]
    with pytest.raises(ValueError, match=r"begin before it ends \(got 300 to 220 of 220 cycles\)"):
        picture(start=300)


def test_two_drawings_are_the_same_bytes_and_know_light_and_dark() -> None:
    first, second = (draw(timeline(kit.trace())) for _ in range(2))
    assert first == second
    assert "prefers-color-scheme:dark" in first
    assert first.count(".paper{fill:") == 2


def test_names_are_escaped() -> None:
    assert "a<b & c: CTA 0 of 2, 96 threads" in texts(picture(kit.launch(label="a<b & c")))


def test_the_command_draws_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "trace.json", tmp_path / "picture.svg"
    source.write_text(json.dumps(kit.trace()))
    assert main(["timeline", str(source), "-o", str(target), "--title", "A ring", "--to", "100"]) == 0
    assert "picture.svg drawn, times modelled" in capsys.readouterr().out
    assert texts(ET.fromstring(target.read_text()))[0] == "A ring, modelled"


def test_the_command_says_where_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "trace.json"
    source.write_text(json.dumps(kit.trace()))
    assert main(["timeline", str(source), "-o", str(tmp_path / "none" / "picture.svg")]) == 2
    assert "cannot be written (No such file or directory); make its folder first" in capsys.readouterr().err


def test_the_command_says_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "trace.json"
    source.write_text("{}")
    assert main(["timeline", str(source), "-o", str(tmp_path / "picture.svg")]) == 2
    assert "is not a trace (ValueError: smfree_trace must be 1" in capsys.readouterr().err
    assert main(["timeline", str(tmp_path / "no.json"), "-o", str(tmp_path / "picture.svg")]) == 2
    assert "no.json: no such file\n" in capsys.readouterr().err
    assert not (tmp_path / "picture.svg").exists()


def test_letters_that_xml_cannot_hold_become_spaces() -> None:
    assert texts(picture(title="a\x01b\ud800c\n"))[0] == "a b c , modelled"


@pytest.mark.parametrize(
    ("field", "value"),
    [("sm_clock_mhz", 0), ("sm_clock_mhz", "fast"), ("grid", [1]), ("cycles", 10**400), ("copies", [{}])],
)
def test_the_command_says_that_a_trace_is_damaged(
    field: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "trace.json"
    source.write_text(json.dumps(kit.trace(kit.launch() | {field: value})))
    assert main(["timeline", str(source), "-o", str(tmp_path / "picture.svg")]) == 2
    said = capsys.readouterr().err
    assert "trace.json is damaged" in said or "trace.json is not a trace" in said
    assert not (tmp_path / "picture.svg").exists()
