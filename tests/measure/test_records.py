"""Flags that follow from a record's numbers (cases G06, G08, G09) and its JSON form."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from smfree.measure.records import CacheState, Flag, Memory, Question, Record, Traffic


def record(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "name": "bench.py::bench[lsu-4096]",
        "question": Question.THROUGHPUT,
        "device": "cuda:0",
        "identity": {"gpu": "NVIDIA H100"},
        "folder": "hopper-h100",
        "gpu": "NVIDIA H100",
        "clock_source": "measured",
        "key": {"engine": "lsu", "tile_bytes": 4096},
        "traffic": Traffic(1 << 20, 1 << 20, 1 << 20),
        "samples_s": [1e-6] * 10,
        "memory": Memory.DRAM,
        "cache": CacheState.ROTATED,
        "cache_bytes": 50 << 20,
        "working_set_bytes": 200 << 20,
        "peak_gbps": 3350.0,
        "verified": True,
    }
    return Record(**{**values, **changes})


def test_a_copy_counts_read_and_written_bytes_once_each() -> None:
    assert record(samples_s=[1e-6]).gbps == pytest.approx(2 * (1 << 20) / 1e-6 / 1e9)


def test_above_the_peak_is_flagged_with_working_set_and_l2_size() -> None:
    fast = record(traffic=Traffic(1000, 0, 3_819_000), samples_s=[1e-6] * 10, working_set_bytes=4_000_000)
    fast.judge()
    assert Flag.ABOVE_PEAK in fast.flags
    note = next(note for note in fast.notes if note.startswith("above peak"))
    assert "114 %" in note
    assert "working set 4000000 bytes" in note
    assert f"L2 {50 << 20} bytes" in note


def test_below_the_peak_is_not_flagged() -> None:
    slow = record()
    slow.judge()
    assert slow.flags == []


def test_a_hot_working_set_named_dram_that_fits_in_l2_is_flagged() -> None:
    small = record(cache=CacheState.HOT, working_set_bytes=4 << 20, samples_s=[1e-3] * 10)
    small.judge()
    assert small.flags == [Flag.FITS_IN_L2]
    honest = record(cache=CacheState.HOT, memory=Memory.L2, working_set_bytes=4 << 20, peak_gbps=0.0)
    honest.judge()
    assert honest.flags == []


def test_throttled_series_is_flagged_as_drift_and_keeps_its_samples() -> None:
    samples = list(1e-3 * np.linspace(1.0, 1.15, 20))
    throttled = record(samples_s=samples)
    throttled.judge()
    assert Flag.DRIFT in throttled.flags
    assert throttled.as_dict()["samples_s"] == samples


def test_modelled_times_have_no_drift_and_need_one_sample() -> None:
    modelled = record(clock_source="modelled", samples_s=[1e-3])
    modelled.judge()
    assert modelled.flags == []


def test_few_measured_samples_are_flagged() -> None:
    few = record(samples_s=[1e-3] * 3)
    few.judge()
    assert few.flags == [Flag.FEW_SAMPLES]


def test_json_form_names_clock_memory_and_cache_state() -> None:
    plain = json.loads(json.dumps(record(config={"dtype": np.dtype("u4"), "n": np.int64(3)}).as_dict()))
    assert plain["clock_source"] == "measured"
    assert plain["memory"] == "DRAM"
    assert plain["l2_state"].startswith("cold")
    assert plain["config"] == {"dtype": "uint32", "n": 3}
    assert plain["payload_bytes"] == 1 << 20
    assert plain["verified"] is True
