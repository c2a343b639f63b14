"""A small pytest run inside the test, on fake devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.measure import fakes

BENCH = '''
import pytest
from smfree.measure.fixture import ChainReading, Point
from smfree.measure.records import CacheState, Memory, Question, Traffic

SIZES = [128 << i for i in range(10)]
START = {"lsu": 600.0, "tma.bulk": 800.0}
RATE = {"lsu": 8.0, "tma.bulk": 64.0}


@pytest.mark.parametrize("tile_bytes", SIZES)
@pytest.mark.parametrize("engine", ["lsu", "tma.bulk"])
def bench_latency(measure, engine, tile_bytes):
    """One tile."""
    if engine == "tma.bulk" and not measure.device.capabilities.has_tma:
        measure.skip("tma.bulk needs the TMA, compute capability 9.0")
    cycles = START[engine] + tile_bytes / RATE[engine]
    key = {"engine": engine, "tile_bytes": tile_bytes, "threads": 128, "leg": "copy", "memory": "L2"}
    traffic = Traffic(tile_bytes, tile_bytes, tile_bytes)
    point = Point(Question.LATENCY, key, traffic, Memory.L2, CacheState.HOT, 1 << 20)
    measure.chain(point, lambda: ChainReading(cycles, 1024 * cycles, 1024 * cycles, 1024), lambda: None)


@pytest.mark.parametrize("tile_bytes", SIZES[4:6])
def bench_throughput(measure, tile_bytes):
    """All SMs."""
    key = {"engine": "lsu", "tile_bytes": tile_bytes, "bytes_in_flight": 16384, "memory": "DRAM"}
    traffic = Traffic(1 << 20, 1 << 20, 1 << 20)
    point = Point(Question.THROUGHPUT, key, traffic, Memory.DRAM, CacheState.FLUSHED, 1 << 28)
    queue = measure.instruments.queue
    measure.launches(point, lambda i, stream: queue.submit(10e-6, stream), lambda: None)
'''

XDIST = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID")

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run_bench(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run bench_fake.py (or ``source``) with options; returns pytester's result."""
    monkeypatch.setattr("smfree.measure.devices.open_device", fakes.open_fake)
    monkeypatch.setattr("smfree.measure.devices.real_gpu", lambda: False)
    monkeypatch.setattr("smfree.measure.plugin.Instruments", fakes.FakeInstruments)
    monkeypatch.delenv("SMFREE_DEVICE", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in XDIST:  # pytest-benchmark times nothing inside a worker, and the inner run is none
        monkeypatch.delenv(name, raising=False)
    pytester.makeini("[pytest]\npython_files = bench_*.py\npython_functions = bench_*\n")

    def run(*options: str, source: str = BENCH) -> pytest.RunResult:
        pytester.makepyfile(bench_fake=source)
        jobs = () if any(option.startswith("--jobs") for option in options) else ("--jobs=1",)
        plugins = ("-p", "pytest_benchmark.plugin", "-p", "smfree.measure.plugin")
        return pytester.runpytest_inprocess(*plugins, *jobs, *options)

    return run
