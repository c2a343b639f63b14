"""Traces: what a timed launch did and when, and that looking changes nothing."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kernels.common import launch
from kernels.lsu.copy_async import AsyncCopyConfig
from kernels.mbarrier.registry import PIPELINES
from kernels.tma import multicast_bulk
from kernels.tma.bulk import BulkConfig
from kernels.tma.multicast_bulk import MulticastBulkConfig
from smfree.cuda import Device, TraceError
from smfree.emulator.trace import LaunchTrace

TILE_BYTES, TILES = 1024, 6


def bulk(device: Device, *, stages: int, grid: int = 1, tiles: int = TILES) -> None:
    """Copy ``tiles`` tiles with ``grid`` CTAs."""
    config = BulkConfig(tile_bytes=TILE_BYTES, num_stages=stages)
    src = device.asarray(np.arange(tiles * TILE_BYTES // 4, dtype=np.uint32))
    dst = device.empty(src.shape, src.dtype)
    args = (dst, src, np.uint64(src.nbytes))
    launch(
        config.source, grid, config.threads, args,
        device_array=src, shared_bytes=config.shared_bytes, stream=None,
    )  # fmt: skip
    device.synchronize()
    assert (dst.numpy() == src.numpy()).all()


def one(stages: int) -> LaunchTrace:
    with Device.open("emu:h100") as device, device.trace() as trace:
        bulk(device, stages=stages)
    (kept,) = trace.launches
    return kept


def test_every_copy_lands_in_the_phase_that_its_barrier_completes_then() -> None:
    kept = one(stages=2)
    loads = [copy for copy in kept.copies if copy.kind == "cp.async.bulk load"]
    stores = [copy for copy in kept.copies if copy.kind == "cp.async.bulk store"]
    assert [copy.barrier for copy in loads] == ["full[0]", "full[1]"] * (TILES // 2)
    assert {copy.num_bytes for copy in (*loads, *stores)} == {TILE_BYTES}
    assert [copy.shared for copy in loads] == [copy.shared for copy in stores]
    landed = sorted((copy.barrier, copy.end) for copy in loads)
    assert landed == sorted((phase.barrier, phase.time) for phase in kept.phases)
    for barrier in ("full[0]", "full[1]"):
        assert [p.phase for p in kept.phases if p.barrier == barrier] == list(range(TILES // 2))
    assert all(copy.start < copy.read <= copy.end for copy in kept.copies)


def test_a_warp_waits_for_the_phases_in_order_and_never_twice_at_once() -> None:
    kept = one(stages=2)
    (life,) = kept.warps
    assert (life.cta, life.warp, life.start, life.end) == (0, 0, 0.0, kept.cycles)
    assert all(a.end <= b.start for a, b in pairwise(kept.waits))
    seen = dict.fromkeys((wait.on, wait.phase) for wait in kept.waits if wait.on.startswith("full"))
    assert list(seen) == [(f"full[{tile % 2}]", tile // 2) for tile in range(TILES)]
    done = {(phase.barrier, phase.phase): phase.time for phase in kept.phases}
    for on, phase in seen:
        last = max(wait.end for wait in kept.waits if (wait.on, wait.phase) == (on, phase))
        assert last >= done[on, phase]
    assert kept.waits[-1].on == "cp.async.bulk.wait_group 0"
    assert "bulk.cu:" in kept.waits[0].at


def test_more_stages_wait_less() -> None:
    waited = [sum(wait.end - wait.start for wait in one(stages).waits) for stages in (1, 3)]
    assert waited[1] < 0.7 * waited[0]


def test_cp_async_is_told_per_warp_and_group_and_bar_sync_with_its_number() -> None:
    config = AsyncCopyConfig(tile_bytes=2048, num_stages=2, threads=64)
    with Device.open("emu:a100") as device:
        src = device.asarray(np.arange(4 * 512, dtype=np.uint32))
        dst = device.empty(src.shape, src.dtype)
        args = (dst, src, np.uint64(src.nbytes))
        with device.trace() as trace:
            launch(
                config.source, 1, config.threads, args,
                device_array=src, shared_bytes=config.shared_bytes, stream=None,
            )  # fmt: skip
    (kept,) = trace.launches
    assert {copy.kind for copy in kept.copies} == {"cp.async"}
    assert sum(copy.num_bytes for copy in kept.copies) == src.nbytes
    assert sorted((copy.warp, copy.group) for copy in kept.copies) == [
        (w, g) for w in (0, 1) for g in range(4)
    ]
    assert {wait.on for wait in kept.waits} == {"bar.sync 0", "cp.async.wait_group 1"}


def test_only_the_ctas_that_were_asked_for_are_kept() -> None:
    with Device.open("emu:h100") as device, device.trace(ctas=(1, 3)) as trace:
        bulk(device, stages=1, grid=4, tiles=8)
    (kept,) = trace.launches
    assert {life.cta for life in kept.warps} == {1, 3}
    assert {wait.cta for wait in kept.waits} == {copy.cta for copy in kept.copies} == {1, 3}
    assert {phase.cta for phase in kept.phases} == {1, 3}


def test_a_trace_changes_no_time_and_no_counter_and_ends_with_its_block(tmp_path: Path) -> None:
    seen = []
    for traced in (False, True):
        with Device.open("emu:h100") as device:
            if traced:
                with device.trace() as trace:
                    bulk(device, stages=2, grid=3)
            else:
                bulk(device, stages=2, grid=3)
            last = device.emulator.last_launch
            seen.append((last.cycles, last.counters.as_dict()))
            bulk(device, stages=1)
    assert seen[0] == seen[1]
    assert len(trace.launches) == 1
    data = json.loads(trace.save(tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert data["smfree_trace"] == 1
    assert data["launches"][0]["kernel"] == "tma_bulk"
    assert data["launches"][0]["clock"] == "modelled"
    assert len(data["launches"][0]["copies"]) == 4


def test_a_schedule_without_a_clock_has_no_trace() -> None:
    with (
        Device.open("emu:h100", schedule="min-pc") as device,
        pytest.raises(TraceError, match="needs a clock, which the schedule 'min-pc' has not"),
        device.trace(),
    ):
        pass


def test_a_real_gpu_has_no_trace() -> None:
    with Device.open("emu:h100") as device:
        device.is_emulated, device.spec = False, "cuda:0"  # as a real GPU says of itself
        with (
            pytest.raises(TraceError, match=r"only emulated GPUs record a trace \(this is cuda:0\)"),
            device.trace(),
        ):
            pass
        device.is_emulated = True


@pytest.mark.parametrize(("spec", "name"), [("emu:h100", "ring"), ("emu:a100", "ring_async")])
def test_a_wait_ends_when_its_phase_completes_slept_or_polled(spec: str, name: str) -> None:
    """test_wait in a loop (sm_80) may not wait for what others do later, their stores for instance."""
    pipeline = PIPELINES[name]
    with Device.open(spec) as device:
        x, y = (device.asarray(np.ones(8192, np.float32)) for _ in range(2))
        dst = device.empty(x.shape, x.dtype)
        with device.trace() as trace:
            pipeline.run(dst, x, y, alpha=1.0, config=pipeline.config(4096, 3, work=12, max_ctas=1))
    (kept,) = trace.launches
    completed = {(phase.barrier, phase.phase): phase.time for phase in kept.phases}
    late = [
        wait.end - completed[wait.on, wait.phase]
        for wait in kept.waits
        if wait.phase is not None and wait.phase >= 0 and completed[wait.on, wait.phase] > wait.start
    ]
    assert len(late) >= 8
    assert 0 < min(late) <= max(late) < 100


def test_what_cp_async_copied_belongs_to_the_barrier_that_it_arrives_on() -> None:
    pipeline = PIPELINES["ring_async"]
    with Device.open("emu:a100") as device:
        x, y = (device.asarray(np.ones(4096, np.float32)) for _ in range(2))
        with device.trace() as trace:
            pipeline.run(
                device.empty(4096, np.float32), x, y, alpha=1.0, config=pipeline.config(4096, 2, max_ctas=1)
            )
    (kept,) = trace.launches
    copies = [(copy.barrier, copy.num_bytes) for copy in kept.copies]
    assert copies == [("full[0]", 8192), ("full[1]", 8192)] * 2


def test_what_another_cta_multicasts_into_one_that_is_kept_is_kept() -> None:
    """Two CTAs ask for half of a tile each, on behalf of both: one that is kept gets two copies a tile."""
    config = MulticastBulkConfig(tile_bytes=TILE_BYTES, cluster=2, num_stages=2, max_ctas=2)
    with Device.open("emu:h100") as device:
        src = device.asarray(np.arange(TILES * TILE_BYTES // 4, dtype=np.uint32))
        with device.trace(ctas=(1,)) as trace:
            multicast_bulk.broadcast(device.empty((2, *src.shape), src.dtype), src, config=config)
    (kept,) = trace.launches
    loads = [copy for copy in kept.copies if copy.kind == "cp.async.bulk load"]
    landed = [copy for copy in loads if copy.into == 1]
    assert {life.cta for life in kept.warps} == {1} and {copy.cta for copy in landed} == {0, 1}
    assert sum(copy.num_bytes for copy in landed) == src.nbytes
    assert {(copy.cta, copy.into) for copy in kept.copies} == {(0, 1), (1, 0), (1, 1)}
