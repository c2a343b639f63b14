"""Benchmarks of clusters: their tables and answers from known records, the slope, and what is verified."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path as File
from types import SimpleNamespace
from typing import Any

import pytest

from bench import bench_cluster
from bench.axes import CLUSTER, MULTICAST_FORMS, DsmemPoint, MulticastPoint, dsmem_points, multicast_points
from kernels.tma.dsmem import Path
from smfree.cuda import Device
from smfree.measure.clusters import (
    dsmem_table,
    l2_read,
    leaders,
    multicast_answers,
    multicast_table,
    pairs,
    path_answers,
)
from smfree.measure.instruments import Instruments
from smfree.measure.log import RunLog
from smfree.measure.options import Axes
from smfree.measure.records import CacheState, Cost, Memory, Question, Record, Traffic
from smfree.measure.slope import slope
from smfree.measure.tables import summary
from smfree.measure.timer import DeviceTimer
from tests.measure.fakes import FakeQueue
from tests.measure.test_bench import bench
from tests.measure.test_records import record

CTAS, STEPS = 4, 10
KIB = 1024


def row(question: Question, key: dict[str, Any], cycles: float, read: int = 0, **changes: Any) -> Record:
    moved = CTAS * key["tile_bytes"]
    return record(
        question=question,
        device="emu:h100",
        clock_source="modelled",
        key=key,
        traffic=Traffic(moved, read, moved),
        samples_s=[cycles / 1e9],
        samples_cycles=[cycles],
        memory=Memory.L2,
        cache=CacheState.HOT,
        config={"ctas": CTAS, "threads": 128, "num_stages": 4, "turns": STEPS},
        cost=Cost(registers=32, ptx_per_kib=16.25),
        **changes,
    )


def ring(path: str, tile_bytes: int, cycles: float, **changes: Any) -> Record:
    key = {"path": path, "tile_bytes": tile_bytes, "cluster": 2, "filled": False}
    return row(Question.DSMEM, key, cycles, **changes)


def cast(multicast: bool, cycles: float, per_sm: int = 1, **changes: Any) -> Record:
    key = {
        "form": "bulk", "multicast": multicast, "tile_bytes": 4 * KIB, "cluster": 2, "ctas_per_sm": per_sm
    }  # fmt: skip
    return row(Question.MULTICAST, key, cycles, **changes)


def lines_of(text: str, start: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip().startswith(start)]


# --- tables and answers -------------------------------------------------------------------------------------


def test_the_table_of_a_ring_counts_what_went_through_registers() -> None:
    moved = CTAS * 4 * KIB * STEPS
    names = ("cluster_load_bytes", "shared_load_bytes", "shared_store_bytes", "cluster_async_bytes")
    none = dict.fromkeys(names, 0)
    pull = none | {"cluster_load_bytes": moved, "shared_store_bytes": moved}
    bulk = none | {"cluster_async_bytes": moved}
    push = bulk | {"shared_load_bytes": moved}
    rows = [
        ring("ld.shared::cluster", 4 * KIB, 512.0, counters=pull),
        ring("st.async", 4 * KIB, 640.0, counters=push),
        ring("cp.async.bulk", 4 * KIB, 1024.0, counters=bulk),
    ]
    ((title, text),) = dsmem_table("emu:h100 (modelled)", rows)
    assert title == "Tiles from CTA to CTA, distributed shared memory: emu:h100 (modelled)"
    assert lines_of(text, "2 ") == [
        ["2", "2", "4", "KiB", "ld.shared::cluster", "512", "8.0", "2", "16.2", "32"],
        ["2", "2", "4", "KiB", "st.async", "640", "6.4", "2", "16.2", "32"],
        ["2", "2", "4", "KiB", "cp.async.bulk", "1024", "4.0", "0", "16.2", "32"],
    ]
    assert "SM cycles (modelled) of a step" in text


def test_a_real_gpu_counts_no_bytes() -> None:
    ((_, text),) = dsmem_table("H100 (measured)", [ring("st.async", 4 * KIB, 640.0)])
    assert lines_of(text, "2 ")[0][7] == "-"
    assert l2_read(cast(True, 100.0)) is None


LINES = {"ld.shared::cluster": (500.0, 8.0), "cp.async.bulk": (756.0, 16.0)}


def test_the_leading_path_and_its_line_follow_from_the_times() -> None:
    """The two lines cross at 4 KiB."""
    rows = [
        ring(path, size, start + size / rate)
        for path, (start, rate) in LINES.items()
        for size in (KIB, 2 * KIB, 4 * KIB, 8 * KIB)
    ]
    loads, bulk = lines_of(path_answers(rows), "emu:h100")
    assert loads[2:] == [
        "2",
        "one",
        "alone",
        "ld.shared::cluster",
        "1",
        "KiB",
        "to",
        "4",
        "KiB",
        "500",
        "8.0",
    ]
    assert bulk[2:] == ["2", "one", "alone", "cp.async.bulk", "4", "KiB", "to", "8", "KiB", "756", "16.0"]


def test_one_path_alone_leads_nowhere() -> None:
    assert leaders({"st.async": {KIB: 1.0}, "cp.async.bulk": {2 * KIB: 1.0}}) == {}
    assert path_answers([ring("st.async", KIB, 700.0)]) == ""


def test_sizes_that_do_not_adjoin_are_told_one_by_one() -> None:
    times = {"st.async": (1.0, 2.0, 1.0), "cp.async.bulk": (2.0, 1.0, 2.0)}
    rows = [
        ring(path, size, time)
        for path, three in times.items()
        for size, time in zip((KIB, 2 * KIB, 4 * KIB), three, strict=True)
    ]
    push, bulk = (line[6:-2] for line in lines_of(path_answers(rows), "emu:h100"))
    assert push == ["1", "KiB,", "4", "KiB"]
    assert bulk == ["2", "KiB"]


def counted(read: int) -> dict[str, int]:
    """What the L2 counts in all steps when it is read ``read`` bytes in each."""
    written = CTAS * 4 * KIB
    return {"l2_hit_bytes": STEPS * (read + written) - 7, "l2_miss_bytes": 7}


def test_l2_bytes_are_told_per_byte_that_arrives() -> None:
    got = CTAS * 4 * KIB
    pair = [cast(False, 400.0, counters=counted(got)), cast(True, 800.0, counters=counted(got // 2))]
    ((title, text),) = multicast_table("emu:h100 (modelled)", pair)
    assert title == "One copy for all CTAs of a cluster: emu:h100 (modelled)"
    (line,) = lines_of(text, "bulk")
    assert line == ["bulk", "4", "KiB", "2", "1", "1.000", "0.500", "400", "800", "10.2", "5.1"]


def test_a_multicast_pays_where_it_is_faster_by_more_than_a_tie() -> None:
    rows = [cast(False, 400.0), cast(True, 500.0)]
    rows += [cast(False, 400.0, 2), cast(True, 404.0, 2)]
    rows += [cast(False, 900.0, 4), cast(True, 600.0, 4)]
    text = multicast_answers(rows)
    (line,) = lines_of(text, "emu:h100")
    assert " ".join(line[4:]) == "4 KiB x 4 per SM: 1.50 x 4 KiB x 2 per SM 4 KiB x 1 per SM: 0.80 x"


def test_a_multicast_without_its_counterpart_is_left_out() -> None:
    assert pairs([cast(True, 500.0), cast(False, 400.0, 2)]) == {}
    assert multicast_answers([cast(True, 500.0)]) == ""
    assert multicast_table("", [cast(False, 400.0)]) == []


def test_the_summary_has_the_tables_and_ends_with_the_answers() -> None:
    rings = [ring("st.async", KIB, 700.0), ring("cp.async.bulk", KIB, 800.0)]
    titles = [title for title, _ in summary(RunLog(records=[*rings, cast(False, 4.0), cast(True, 5.0)]))]
    assert titles == [
        "Tiles from CTA to CTA, distributed shared memory: emu:h100 (modelled)",
        "One copy for all CTAs of a cluster: emu:h100 (modelled)",
        "Which path carries a tile to the next CTA of a cluster?",
        "Where does one copy for all CTAs of a cluster pay?",
        "smfree run",
    ]


# --- axes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", list(Axes))
def test_every_path_at_every_size_and_every_multicast_with_its_counterpart(axes: Axes) -> None:
    rings, casts = list(dsmem_points(axes)), list(multicast_points(axes))
    ids = [point.id for point in rings] + [point.id for point in casts]
    assert len(set(ids)) == len(ids)
    chosen = CLUSTER[axes]
    assert {(p.path, p.tile_bytes, p.cluster) for p in rings} == {
        (path, tile, cluster)
        for path in Path
        for tile in chosen.dsmem_tile_bytes
        for cluster in chosen.dsmem_clusters
    }
    places = {
        multicast: {
            (p.form, p.tile_bytes, p.cluster, p.ctas_per_sm) for p in casts if p.multicast is multicast
        }
        for multicast in (False, True)
    }
    assert places[False] == places[True]
    assert {form for form, *_ in places[True]} == set(MULTICAST_FORMS)


def test_full_axes_have_every_cluster_size_and_quick_ones_the_small() -> None:
    full, quick = CLUSTER[Axes.FULL], CLUSTER[Axes.QUICK]
    assert full.dsmem_clusters == full.multicast_clusters == (2, 4, 8)
    assert (full.dsmem_tile_bytes[0], full.dsmem_tile_bytes[-1]) == (128, 32 * KIB)
    assert (quick.dsmem_tile_bytes, quick.dsmem_clusters) == ((KIB, 4 * KIB, 16 * KIB), (2,))
    assert quick.multicast_clusters == (2, 4)


# --- slope and verification ---------------------------------------------------------------------------------


def test_the_slope_leaves_out_what_a_launch_takes() -> None:
    """3 us for a launch, 0.5 us a step; both lengths count what a launch counts, too."""
    queue = FakeQueue()
    done = {"steps": 0}

    def launch(steps: int, stream: Any) -> None:
        done["steps"] = steps
        queue.submit(3e-6 + steps * 0.5e-6, stream)

    measure: Any = SimpleNamespace(
        timer=DeviceTimer(queue),
        deterministic=False,
        counters=lambda: {"warp_instructions": 100 + 7 * done["steps"]},
        device=SimpleNamespace(capabilities=SimpleNamespace(sm_clock_mhz=1980.0)),
        instruments=SimpleNamespace(sm_clock_mhz=lambda: 1000.0),
    )
    reading = slope(measure, launch, 3, 12)
    assert reading.cycles_per_tile == pytest.approx(500.0)
    assert reading.cycles / reading.nanoseconds == pytest.approx(1.0), "the measured clock, not the nominal"
    assert (reading.tiles, reading.counters, reading.held) == (9, {"warp_instructions": 63}, True)
    queue.can_hold = False
    assert not slope(measure, launch, 3, 12).held


class Verified:
    """Stands for a Measure: runs and verifies, keeps the reading, records nothing."""

    deterministic = True

    def __init__(self, device: Device) -> None:
        self.device = device
        self.instruments = Instruments(device)
        self.stream = self.instruments.stream
        self.timer = DeviceTimer(self.instruments.queue)
        self.readings: list[Any] = []

    def compiling(self) -> Any:
        return nullcontext()

    def counters(self) -> dict[str, int]:
        return self.device.emulator.last_launch.counters.as_dict()

    def chain(self, point: Any, run: Any, verify: Any) -> None:
        self.instruments.prepare()
        self.readings.append(run())
        verify()


RING = DsmemPoint(Path.BULK, 256, 2, filled=False)
CAST = MulticastPoint("bulk", True, 512, 2, 1, max_tiles=6, num_stages=2)


def test_a_ring_that_stops_one_step_early_has_no_time(
    tma_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure: Any = Verified(tma_device)
    bench_cluster.bench_dsmem(measure, RING)
    assert measure.readings[0].cycles_per_tile > 0
    rotate = bench_cluster.dsmem.rotate

    def early(dst: Any, src: Any, *, num_steps: int, **options: Any) -> Any:
        return rotate(dst, src, num_steps=num_steps - 1, **options)

    monkeypatch.setattr(bench_cluster.dsmem, "rotate", early)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        bench_cluster.bench_dsmem(measure, RING)


def test_a_long_launch_that_does_nothing_is_not_saved_by_the_short_one(
    tma_device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure: Any = Verified(tma_device)
    bench_cluster.bench_multicast(measure, CAST)
    assert measure.readings[0].cycles_per_tile > 0
    broadcast, most = bench_cluster.multicast_bulk.broadcast, []

    def once(dst: Any, src: Any, **options: Any) -> Any:
        most.append(dst.nbytes)
        return broadcast(dst, src, **options) if len(most) == 1 else None

    monkeypatch.setattr(bench_cluster.multicast_bulk, "broadcast", once)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        bench_cluster.bench_multicast(measure, CAST)
    assert most[0] < most[1]


@pytest.fixture
def tma_device() -> Any:
    with Device.open("emu:h100") as device:
        yield device


# --- the benchmark itself -----------------------------------------------------------------------------------


def test_a_device_without_clusters_skips_with_the_reason_in_the_record(tmp_path: File) -> None:
    out = tmp_path / "run.json"
    chosen = "dsmem and 1KiB or each and 2ctas or lsu and 128B and L2"  # with no point at all, no file
    done = bench("--device=emu:a100", "-k", chosen, f"--benchmark-json={out}")
    assert done.returncode == 0, done.stdout
    reason = "clusters need compute capability 9.0 or higher; NVIDIA A100-SXM4-80GB (emulated) has 8.0"
    skipped = json.loads(out.read_text())["smfree"]["skipped"]
    assert {row["reason"] for row in skipped} == {reason}
    assert {row["name"].split("::")[1].split("[")[0] for row in skipped} == {"bench_dsmem", "bench_multicast"}
    assert f"emu:a100: {reason}" in done.stdout


def test_a_run_is_verified_saved_and_compared(tmp_path: File) -> None:
    """Counts are exact: a multicast reads the L2 once per cluster, a bulk path needs no register."""
    chosen = "dsmem and 4KiB or bulk and 2ctas and 4KiB and 1perSM"
    place = (f"--benchmark-storage={tmp_path}", "--benchmark-autosave")
    done = bench("--device=emu:h100", "-k", chosen, *place)
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("*/*.json")
    points = [entry["extra_info"] for entry in json.loads(file.read_text())["benchmarks"]]
    assert len(points) == 5
    assert all(point["verified"] and point["clock_source"] == "modelled" for point in points)
    assert all("slope" in point["timing"]["method"] for point in points)
    rings = lines_of(done.stdout, "2 ")
    assert [line[7] for line in rings] == ["2", "2", "0"]
    (casts,) = lines_of(done.stdout, "bulk ")
    assert casts[5:7] == ["1.000", "0.500"]
    again = bench("--device=emu:h100", "-k", chosen, *place[:1], "--benchmark-compare")
    assert again.returncode == 0, again.stdout
    assert "5 points in both runs: 5 SAME, 0 FASTER, 0 SLOWER, 0 UNSURE" in again.stdout
