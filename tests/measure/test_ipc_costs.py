"""Costs of handles: what the ranks do, what is recorded, what the table says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.bench_ipc import costs
from bench.host_axes import ipc_points
from smfree.cuda import Device, IpcError
from smfree.cuda.memory import DeviceArray
from smfree.measure import handles
from smfree.measure.errors import MeasureError
from smfree.measure.handles import costs_of_ranks, handle_costs, on_emulated_node
from smfree.measure.host_costs import Backing, Operation, ipc_table
from smfree.measure.options import Axes
from smfree.measure.records import Question, Record
from smfree.ranks import RankFailed, spawn
from tests.measure.test_bench import bench
from tests.measure.test_records import record

NBYTES = 1 << 20


@pytest.fixture(scope="module")
def device() -> Device:
    return Device.open("emu:h100")


@pytest.mark.parametrize("backing", list(Backing))
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_opens_uses_and_closes_all_peers(device: Device, backing: Backing, ranks: int) -> None:
    found = costs_of_ranks(device, backing, NBYTES, ranks, 2)
    assert {operation: len(samples) for operation, samples in found.items()} == dict.fromkeys(Operation, 2)
    assert min(found[Operation.OPEN]) > min(found[Operation.GET]) > 0
    assert found[Operation.POOLED] == [0.0, 0.0], "an offset is no driver call"
    again = costs_of_ranks(device, backing, NBYTES, ranks, 2)
    for operation in Operation:  # whatever the threads do
        assert again[operation] == pytest.approx(found[operation])


def test_opening_is_what_a_pool_saves(device: Device) -> None:
    """D35, on the modelled clock: the public row is 1.33 ms, and 0.5 ms for closing."""
    found = costs_of_ranks(device, Backing.IPC, NBYTES, 2, 1)
    assert found[Operation.OPEN][0] == pytest.approx(1.33e-3, rel=0.01)
    assert found[Operation.CLOSE][0] == pytest.approx(0.5e-3, rel=0.01)
    assert found[Operation.USE][0] < 0.01 * found[Operation.OPEN][0]


@pytest.mark.parametrize("backing", list(Backing))
def test_nothing_is_left_open(device: Device, backing: Backing) -> None:
    assert on_emulated_node(device, 2, _count_left, backing) == [(0, 0), (0, 0)]


def _count_left(context: handles.RankContext, backing: Backing) -> tuple[int, int]:
    before = context.device.driver.node.count_of(context.device.driver.process)
    handle_costs(context, backing, NBYTES, 1)
    after = context.device.driver.node.count_of(context.device.driver.process)
    return len(context.device.imports), after.mappings - before.mappings


def test_wrong_bytes_are_a_failure_not_a_number(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceArray.copy_from_device

    def elsewhere(self: DeviceArray, source: DeviceArray, **options: object) -> DeviceArray:
        return real(self, self.device.asarray(np.zeros(source.nbytes, np.uint8)), **options)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceArray, "copy_from_device", elsewhere)
    with pytest.raises(MeasureError, match=r"use of CUDA IPC: rank [01] has not read what rank [01] wrote"):
        costs_of_ranks(device, Backing.IPC, NBYTES, 2, 1)


def test_real_processes_find_the_same() -> None:
    """The way of real GPUs, here with a served node."""
    work = (Backing.IPC, NBYTES, 1)
    found = spawn(handle_costs, 2, *work, device="emu:h100x2")
    with Device.open("emu:h100") as device:
        inside = on_emulated_node(device, 2, handle_costs, *work)
    for operation in (Operation.GET, Operation.OPEN, Operation.POOLED, Operation.CLOSE):
        for served, own in zip(found, inside, strict=True):
            assert served[operation] == pytest.approx(own[operation])


def test_a_driver_that_does_not_share_is_a_reason_on_real_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """D05: the refusal comes out of the ranks as it was; other failures stay failures."""
    refusal = IpcError("cuda:0 cannot open it\nin full")

    def spawn_fails(*args: object, **options: object) -> None:
        assert options["device"] == "cuda" and options["several_per_gpu"]
        raise RankFailed("rank 1 of 2 raised") from cause

    class RealDevice:
        is_emulated = False

    monkeypatch.setattr(handles, "spawn", spawn_fails)
    cause: Exception = refusal
    with pytest.raises(IpcError, match="cannot open it"):
        costs_of_ranks(RealDevice(), Backing.IPC, NBYTES, 2, 1)  # type: ignore[arg-type]
    assert costs(RealDevice(), Backing.IPC, NBYTES, 2, 1) == "cuda:0 cannot open it"  # type: ignore[arg-type]
    cause = MeasureError("wrong bytes")
    with pytest.raises(RankFailed):
        costs(RealDevice(), Backing.IPC, NBYTES, 2, 1)  # type: ignore[arg-type]


# --- the benchmark ----------------------------------------------------------------------------------------


def test_axes_have_both_backings_and_all_operations() -> None:
    for axes, peers in ((Axes.QUICK, {1, 3}), (Axes.FULL, {1, 3, 7})):
        points = list(ipc_points(axes))
        assert len({point.id for point in points}) == len(points)
        assert {point.backing for point in points} == set(Backing)
        assert {point.operation for point in points} == set(Operation)
        assert {point.peers for point in points} == peers


def test_a_run_has_records_a_table_and_reasons(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    done = bench("--device=emu:h100", "-k", "bench_ipc and 2MiB-3peers", f"--benchmark-json={out}")
    assert done.returncode == 0, done.stdout
    points = {
        entry["extra_info"]["key"]["operation"]: entry["extra_info"]
        for entry in json.loads(out.read_text())["benchmarks"]
    }
    assert list(points) == [operation.value for operation in Operation]
    opening = points["open"]
    assert (opening["clock_source"], opening["verified"], opening["question"]) == (
        "modelled",
        True,
        "ipc cost",
    )
    assert opening["seconds"] == pytest.approx(1.3306e-3)
    assert opening["config"] == {"gpus": 4}
    assert "host's clock" in opening["timing"]["method"]
    assert points["use"]["payload_bytes"] == 4096 and opening["payload_bytes"] == 0
    assert "What handles of other processes' memory cost: emu:h100 (modelled)" in done.stdout
    assert "skipped 6: emu:h100: what opening a file descriptor costs the host is not modelled" in done.stdout


def row(operation: Operation, us: float, **changes: object) -> Record:
    key = {"operation": operation.value, "backing": "CUDA IPC", "nbytes": NBYTES, "peers": 3}
    fields = {"clock_source": "measured", "config": {"gpus": 1}, "samples_s": [us / 1e6] * 5, **changes}
    return record(question=Question.IPC_COST, key=key, **fields)


def test_the_table_says_when_ranks_share_gpus_and_what_is_modelled() -> None:
    ((title, text),) = ipc_table("GPU (measured)", [row(Operation.OPEN, 812.34), row(Operation.USE, 9.0)])
    assert title.endswith("GPU (measured)")
    (line,) = (line for line in text.splitlines() if line.startswith("CUDA IPC"))
    assert line.split()[2:] == ["1", "MiB", "3", "-", "812.3", "-", "9.0", "-", "-"]
    assert "ranks share GPUs" in text and "one public row" not in text
    ((_, alone),) = ipc_table("GPU", [row(Operation.OPEN, 1.0, config={"gpus": 4})])
    assert "ranks share GPUs" not in alone
    ((_, modelled),) = ipc_table("emu", [row(Operation.OPEN, 1.0, clock_source="modelled")])
    assert "one public row (2019, GPU not named)" in modelled
    assert ipc_table("GPU", [record()]) == []
