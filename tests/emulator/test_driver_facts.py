"""The questions to a real driver run, here against the emulator alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import driver_facts


def test_every_question_has_an_answer_of_the_emulator() -> None:
    answers = driver_facts.emulated_answers()
    assert len(answers) > 90
    assert answers["cuMemAllocAsync memory: export"] == "INVALID_VALUE"
    assert not [question for question in answers if question.endswith(": all asked")]
    assert answers["import of a small allocation: its own bytes are first"] == "True"
    assert answers["capture: query the stream"] == "STREAM_CAPTURE_UNSUPPORTED"
    assert answers["open a handle where it was exported"] == "INVALID_CONTEXT"
    assert answers["import: again, the same"] == "True"
    assert answers["import: handle of memory that was freed"] == "INVALID_HANDLE"


def test_differing_answers_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver_facts, "has_gpu", lambda: True)
    monkeypatch.setattr(driver_facts, "emulated_answers", lambda: {"a": "1", "b": "2"})
    monkeypatch.setattr(driver_facts, "real_answers", lambda: {"a": "1", "b": "MAP_FAILED"})
    file = tmp_path / "facts.json"
    assert driver_facts.main(["--json", str(file)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["a", "1", "1"], ["b", "2", "MAP_FAILED", "differs"]]
    assert last == "1 of 2 answers differ"
    assert json.loads(file.read_text())[1] == {"question": "b", "emulated": "2", "real": "MAP_FAILED"}


def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(driver_facts, "has_gpu", lambda: False)
    assert driver_facts.main([]) == 1
    assert "--emulated" in capsys.readouterr().err
