"""The plugin end to end on fake devices: options, records, tables, filing, comparison."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.measure import fakes
from tests.measure.conftest import BENCH, Run


def test_one_run_on_two_devices_answers_each_question(run_bench: Run) -> None:
    result = run_bench("--device", "emu:a100,emu:h100")
    assert result.ret == 0
    result.assert_outcomes(passed=34, skipped=10)
    text = result.stdout.str()
    assert "Latency: copy, 128 threads: emu:h100 (modelled)" in text
    assert "Throughput at 16 KiB in flight per SM: emu:a100 (modelled)" in text
    # 600 + S/8 = 800 + S/64: S = 1829 bytes
    result.stdout.re_match_lines(
        [r"emu:h100 \(modelled\) +latency, copy, L2, 128 threads +tma\.bulk +from 1\.7\d KiB.*agrees"]
    )
    result.stdout.fnmatch_lines(["34 points, every one verified*", "34 of them are modelled*"])
    result.stdout.fnmatch_lines(["skipped 10: emu:a100: tma.bulk needs the TMA, compute capability 9.0"])
    result.stdout.fnmatch_lines(["compile * s, run * s, verify * s", "results were not kept*"])


def test_every_header_says_modelled(run_bench: Run) -> None:
    text = run_bench("--device", "emu:h100").stdout.str()
    titles = [line for line in text.splitlines() if line.startswith("=") and "h100" in line]
    assert titles
    assert all("modelled" in title for title in titles)


def test_without_a_gpu_auto_is_the_fallback(run_bench: Run) -> None:
    run_bench("-k", "throughput").assert_outcomes(passed=2)
    run_bench("-k", "throughput", "--fallback", "emu:a100,emu:h100").assert_outcomes(passed=4)


def test_device_may_be_repeated_and_comes_from_the_environment(
    run_bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_bench("-k", "throughput", "--device", "emu:a100", "--device", "emu:h100,emu:a100").assert_outcomes(
        passed=4
    )
    monkeypatch.setenv("SMFREE_DEVICE", "emu:a100")
    result = run_bench("-k", "throughput", "-v")
    result.stdout.fnmatch_lines(["*bench_throughput?emu:a100-2048? PASSED*"])


def test_a_gpu_that_is_not_there_ends_in_one_sentence(run_bench: Run) -> None:
    result = run_bench("--device", "cuda:0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.stderr.lines if line.strip()]
    assert errors == [
        "ERROR: cuda:0 was asked for, but this machine has no NVIDIA GPU; use --device emu:h100"
    ]


@pytest.mark.parametrize(
    "option",
    [
        "--benchmark-min-time=1",
        "--benchmark-max-time=1",
        "--benchmark-timer=time.time",
        "--benchmark-warmup=on",
    ],
)
def test_calibration_options_are_refused(run_bench: Run, option: str) -> None:
    result = run_bench(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {option.split('=')[0]} does not apply to device benchmarks: *"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--device=", "*name at least one device each*"),
        ("--fallback=,", "*name at least one device each*"),
        ("--benchmark-json=no/such/folder/x.json", "*there is no folder no/such/folder; make it first*"),
        ("--rounds=0", "*a whole number from 1 on is needed (got '0')*"),
        ("--rounds=many", "*a whole number from 1 on is needed (got 'many')*"),
    ],
)
def test_options_that_cannot_work_are_refused_before_the_first_point(
    run_bench: Run, option: str, message: str
) -> None:
    result = run_bench(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_point(
    run_bench: Run, pytester: pytest.Pytester
) -> None:
    (pytester.path / "file").touch()
    result = run_bench("--benchmark-autosave", "--benchmark-storage=file/below")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*runs cannot be saved in */file/below; name a writable folder*"])


def test_device_benchmarks_without_pytest_benchmark_end_in_one_sentence(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_point(measure):\n    pass\n")
    result = pytester.runpytest_inprocess("-p", "no:benchmark", "-p", "smfree.measure.plugin")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*need pytest-benchmark; leave -p no:benchmark out*"])


def test_calibration_options_stay_free_for_other_benchmarks(run_bench: Run) -> None:
    plain = "def bench_plain(benchmark):\n    benchmark(lambda: None)\n"
    run_bench("--benchmark-max-time=0.01", source=plain).assert_outcomes(passed=1)


@pytest.mark.parametrize("options", [("--rounds=7",), ("--benchmark-min-rounds=7",)])
def test_rounds_are_samples(run_bench: Run, pytester: pytest.Pytester, options: tuple[str, ...]) -> None:
    run_bench(*options, "-k", "throughput", "--benchmark-json=out.json").assert_outcomes(passed=2)
    data = json.loads((pytester.path / "out.json").read_text())
    assert [len(entry["extra_info"]["samples_s"]) for entry in data["benchmarks"]] == [7, 7]
    assert [entry["stats"]["rounds"] for entry in data["benchmarks"]] == [7, 7]


def test_json_holds_points_and_skips_with_reasons(run_bench: Run, pytester: pytest.Pytester) -> None:
    result = run_bench("--device", "emu:a100", "--benchmark-json=out.json")
    data = json.loads((pytester.path / "out.json").read_text())
    assert len(data["benchmarks"]) == 12
    assert all(entry["extra_info"]["verified"] for entry in data["benchmarks"])
    point = data["benchmarks"][0]["extra_info"]
    assert point["cycles"] == 616.0
    assert point["seconds"] == pytest.approx(616e-9)
    assert point["clock_source"] == "modelled"
    reasons = {row["reason"] for row in data["smfree"]["skipped"]}
    assert reasons == {"tma.bulk needs the TMA, compute capability 9.0"}
    assert set(data["smfree"]["host_seconds"]) == {"compile", "run", "verify"}
    assert "hz_actual" not in data["machine_info"]["cpu"]
    result.stdout.fnmatch_lines(["results: out.json"])


def test_stats_are_device_seconds_of_one_launch_without_the_flush(
    run_bench: Run, pytester: pytest.Pytester
) -> None:
    run_bench("-k", "throughput", "--benchmark-json=out.json")
    data = json.loads((pytester.path / "out.json").read_text())
    assert data["benchmarks"][0]["stats"]["median"] == pytest.approx(10e-6)


def test_saved_runs_are_filed_per_device_and_compared_per_device(
    run_bench: Run, pytester: pytest.Pytester
) -> None:
    both = ("--device", "emu:a100,emu:h100", "--benchmark-storage=file://store")
    result = run_bench(*both, "--benchmark-autosave")
    folders = sorted(path.parent.name for path in (pytester.path / "store").rglob("*.json"))
    assert folders == ["ampere-a100-modelled", "hopper-h100-modelled"]
    result.stdout.fnmatch_lines(["results: *ampere-a100-modelled*", "results: *hopper-h100-modelled*"])
    slower = BENCH.replace("START[engine] + tile_bytes", "2 * START[engine] + tile_bytes")
    same = run_bench(*both, "--benchmark-compare", "--benchmark-compare-fail=median:5%")
    assert "regressed" not in same.stderr.str() + same.stdout.str()
    same.stdout.fnmatch_lines(["*22 points in both runs: 22 SAME, 0 FASTER, 0 SLOWER, 0 UNSURE"])
    assert same.ret == 0
    worse = run_bench(*both, "--benchmark-compare", "--benchmark-compare-fail=median:5%", source=slower)
    assert worse.ret != 0
    text = worse.stderr.str() + worse.stdout.str()
    assert "Performance has regressed" in text
    assert "bench_latency[emu:a100-lsu-128]" in text
    assert "bench_latency[emu:h100-lsu-128]" in text
    worse.stdout.re_match_lines(
        [r"bench_fake.py::bench_latency\[emu:h100-lsu-128\] +SLOWER +616 ns +1.216 us"]
    )
    worse.stdout.fnmatch_lines(
        ["baseline ampere-a100-modelled/0001_*, commit *, 0.0 days old; new run this run"]
    )


def test_comparing_with_an_empty_history_says_so(run_bench: Run) -> None:
    result = run_bench("-k", "throughput", "--benchmark-compare", "--benchmark-storage=file://store")
    assert result.ret == 0
    text = result.stdout.str() + result.stderr.str()
    assert "nothing saved for emu:h100" in text


def test_benchmark_table_appears_when_asked_for(run_bench: Run) -> None:
    assert "Rounds" not in run_bench("-k", "throughput").stdout.str()
    text = run_bench(
        "-k", "throughput", "--benchmark-columns=min,rounds", "--benchmark-sort=name"
    ).stdout.str()
    assert "Rounds" in text


def test_disabled_benchmarks_run_and_verify_but_give_no_number(run_bench: Run) -> None:
    result = run_bench("--benchmark-disable")
    result.assert_outcomes(passed=22)
    assert "Latency:" not in result.stdout.str()


def test_a_wrong_result_fails_and_gives_no_number(run_bench: Run, pytester: pytest.Pytester) -> None:
    wrong = BENCH.replace("stream), lambda: None)", "stream), lambda: 1 / 0)")
    result = run_bench("-k", "throughput", "--benchmark-json=out.json", source=wrong)
    result.assert_outcomes(failed=2)
    assert not (pytester.path / "out.json").exists() or not (pytester.path / "out.json").read_text()
    assert "Throughput" not in result.stdout.str().split("short test summary")[0].split("FAILURES")[0]


def test_plain_benchmark_on_a_device_is_refused(run_bench: Run) -> None:
    plain = "def bench_plain(measure, benchmark):\n    benchmark(lambda: None)\n"
    result = run_bench(source=plain)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*MeasureError: benchmark(fn) calibrates itself by host time*"])


def test_an_emulated_device_killed_by_a_test_is_replaced(run_bench: Run) -> None:
    source = (
        "def bench_kill(device):\n    device.dead = True\n\n"
        "def bench_next(device):\n    assert not device.dead\n"
    )
    run_bench(source=source).assert_outcomes(passed=2)


def test_a_real_device_killed_by_a_test_ends_the_session(
    run_bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smfree.measure.devices.open_device", fakes.FakeDevice)
    source = "def bench_kill(device):\n    device.dead = True\n\ndef bench_next(device):\n    pass\n"
    result = run_bench("--device", "cuda:0", source=source)
    assert result.ret == 3
    result.stdout.fnmatch_lines(["*cuda:0 is unusable after *bench_kill*CUDA_ERROR_ILLEGAL_ADDRESS*"])


def test_measured_points_have_rounds_blocker_and_uncertainty(
    run_bench: Run, monkeypatch: pytest.MonkeyPatch, pytester: pytest.Pytester
) -> None:
    monkeypatch.setattr("smfree.measure.devices.open_device", fakes.FakeDevice)
    monkeypatch.setattr("smfree.measure.devices.real_gpu", lambda: True)
    result = run_bench("--benchmark-json=out.json")
    assert result.ret == 0
    text = result.stdout.str()
    assert "(measured)" in text
    assert "(modelled)" not in text
    result.stdout.re_match_lines(
        [r"cuda:0 \(measured\).*tma\.bulk.*95 % of resamples 1\.7\d KiB to 1\.7\d KiB"]
    )
    data = json.loads((pytester.path / "out.json").read_text())
    throughput = data["benchmarks"][-1]["extra_info"]
    assert len(throughput["samples_s"]) == 20
    assert throughput["timing"]["samples_behind_blocker"] == 20
    assert throughput["timing"]["empty_launch_s"] == 2e-6
    assert throughput["sm_clock_mhz"] == 1000.0


def test_a_test_with_its_own_device_is_left_alone(run_bench: Run) -> None:
    source = (
        "import pytest\n\n@pytest.mark.parametrize('device', ['mine'])\ndef bench_own(device):\n"
        "    assert device == 'mine'\n"
    )
    run_bench("--device", "emu:a100,emu:h100", source=source).assert_outcomes(passed=1)


def test_plugin_loads_once_from_conftest_and_entry_point_name(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("pytest_plugins = ['smfree.measure.plugin']")
    pytester.makepyfile("def test_nothing():\n    pass\n")
    result = pytester.runpytest_inprocess("-p", "smfree.measure.plugin")
    result.assert_outcomes(passed=1)


def test_the_entry_point_bears_the_module_name() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {
        "smfree.measure.plugin": "smfree.measure.plugin"
    }


def test_without_pytest_benchmark_other_tests_still_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing():\n    pass\n")
    result = pytester.runpytest_inprocess("-p", "no:benchmark", "-p", "smfree.measure.plugin")
    result.assert_outcomes(passed=1)
