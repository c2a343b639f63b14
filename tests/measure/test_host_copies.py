"""Copies of host memory: what is measured, where it lies, what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.bench_host import buffers, node_for
from bench.host_axes import host_points
from smfree.cuda import Device, UnavailableError
from smfree.measure.host_costs import Direction, HostMemory, host_table
from smfree.measure.options import Axes
from smfree.measure.records import Question, Record, Traffic
from tests.measure.test_bench import bench
from tests.measure.test_records import record

MIB = 1 << 20


def test_axes_have_every_memory_and_direction() -> None:
    for axes, least, most in ((Axes.QUICK, 4096, 16 * MIB), (Axes.FULL, 4096, 256 * MIB)):
        points = list(host_points(axes))
        assert len({point.id for point in points}) == len(points)
        assert {(point.memory, point.direction) for point in points} == {
            (memory, direction) for memory in HostMemory for direction in Direction
        }
        sizes = [point.nbytes for point in points]
        assert (min(sizes), max(sizes)) == (least, most)


def test_both_ways_have_bytes_of_their_own_and_show_what_never_came() -> None:
    with Device.open("emu:h100") as device:
        up, down = buffers(device, HostMemory.PINNED, 4096)
        assert not np.array_equal(up.data, down.data)
        for way in (up, down):
            way.clear()
            assert not np.array_equal(way.arrived(), way.data)
            device.copy(way.dst, way.src, stream=way.stream)
            way.stream.synchronize()
            assert np.array_equal(way.arrived(), way.data)
        buffers.cache_clear()


def test_far_memory_is_on_another_node_or_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with Device.open("emu:h100") as device:
        near, far = (node_for(device, memory) for memory in (HostMemory.PINNED, HostMemory.FAR))
        assert (near, far) == (device.numa_node, 1)
        monkeypatch.setattr("bench.bench_host.node_numbers", lambda device: (0,))
        assert node_for(device, HostMemory.PAGEABLE) is None
        with pytest.raises(UnavailableError, match="this machine has one NUMA node"):
            node_for(device, HostMemory.FAR)
        monkeypatch.setattr("bench.bench_host.node_numbers", lambda device: (0, 1))
        monkeypatch.setattr(Device, "numa_node", None)
        with pytest.raises(UnavailableError, match="which NUMA node is near the GPU"):
            node_for(device, HostMemory.FAR)


def test_a_run_sets_all_memories_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = bench("--device=emu:h100", "-k", "bench_host and 16MiB", f"--benchmark-json={out}")
    assert done.returncode == 0, done.stdout
    found = {}
    for entry in json.loads(out.read_text())["benchmarks"]:
        point = entry["extra_info"]
        key = point["key"]
        assert (point["question"], point["verified"]) == ("host copy", True)
        ways = 2 if key["direction"] == "both" else 1
        assert point["payload_bytes"] == ways * key["nbytes"] == ways * 16 * MIB
        found[key["memory"], key["direction"]] = point["payload_bytes"] / point["seconds"]
    assert len(found) == 8, "all but pageable both ways"
    near, far = found["pinned", "to host"], found["pinned, far node", "to host"]
    assert found["pageable", "to host"] < far < near
    assert found["pinned", "both"] > 1.5 * near, "the two directions do not share a port"
    assert "a copy of pageable memory keeps its host thread" in done.stdout
    assert "Copies of host memory: emu:h100 (modelled)" in done.stdout


def row(nbytes: int, us: float, direction: Direction = Direction.TO_HOST) -> Record:
    key = {"memory": "pinned", "direction": direction.value, "nbytes": nbytes}
    moved = nbytes * (1 + (direction is Direction.BOTH))
    traffic = Traffic(moved, moved, moved)
    return record(question=Question.HOST_COPY, key=key, traffic=traffic, samples_s=[us / 1e6] * 5)


def test_the_table_has_payload_per_second_start_up_and_rate() -> None:
    rows = [row(MIB, 10.0 + 50.0), row(4 * MIB, 10.0 + 200.0), row(MIB, 60.0, Direction.BOTH)]
    ((_, text),) = host_table("GPU (measured)", rows)
    lines = [line.split() for line in text.splitlines()]
    assert ["1", "MiB", f"{MIB / 60e3:.2f}", f"{2 * MIB / 60e3:.2f}"] in lines
    assert ["4", "MiB", f"{4 * MIB / 210e3:.2f}", "-"] in lines
    assert ["start-up,", "us", "10.0", "-"] in lines
    assert ["rate,", "GB/s", f"{MIB / 50e3:.1f}", "-"] in lines
    assert host_table("GPU", [record()]) == []
