"""Sensitivity of modelled AllGather crossovers: the node runs again with one parameter scaled."""

from __future__ import annotations

from functools import partial

import pytest

from bench.bench_gather_uncertainty import Ranks, machines, seconds
from bench.bench_reduce_uncertainty import machines as reduce_machines
from bench.bench_reduce_uncertainty import seconds as reduce_seconds
from bench.reruns import node_reruns
from kernels.ipc.group import Group
from kernels.reduce.workspace import Workspace
from smfree.measure.nodes import open_node
from smfree.measure.options import Axes
from smfree.measure.variants import gather_parameters, varied_node
from smfree.model.crossover import Curve, Outcome, crossover

KIB = 1024
SIZES = (32 * KIB, 256 * KIB)


def test_links_move_the_crossover_and_the_node_is_as_it_was_afterwards() -> None:
    """The switch sends a multicast back to its sender: two shards pass a port where a push has one."""
    node = open_node("emu:h100", 2)
    with Group.local(node.devices, pool_bytes=1024 * KIB) as group:
        run = partial(seconds, group)
        reruns = node_reruns(node, group, "multicast", "sm.push", run)
        times = {size: reruns.pair(None, 1.0, size) for size in SIZES}
        base, challenger = (
            Curve(name, {size: (pair[i],) for size, pair in times.items()})
            for i, name in enumerate(("multicast", "sm.push"))
        )
        result = crossover(base, challenger)
        assert result.outcome is Outcome.CROSSES
        before = node.devices[0].emulator.profile, node.devices[0].driver.node.links.profiles
        again = node_reruns(node, group, "multicast", "sm.push", run)
        row = again.sensitivity(result, SIZES, ["link.gbps", "shared.latency_cycles"], 1)
        assert (node.devices[0].emulator.profile, node.devices[0].driver.node.links.profiles) == before
        last = node_reruns(node, group, "multicast", "sm.push", run)
        assert last.pair(None, 1.0, SIZES[0]) == pytest.approx(times[SIZES[0]], rel=0.01)
    node.close()
    # The two are within 1 % below the crossover, where the links' calendars repeat to half a per cent.
    assert row["nominal_bytes"] == pytest.approx(result.size_bytes, rel=0.4)
    ((name, (slower, faster)),) = row["shifts"].items()
    assert name == "link.gbps" and slower < row["nominal_bytes"] < faster


def test_a_node_is_varied_with_its_links() -> None:
    node = open_node("emu:h100", 2)
    links = node.devices[0].driver.node.links
    usual = links.gbps(0, 1)
    with varied_node(node.devices, "link.gbps", 0.8):
        assert links.gbps(0, 1) == pytest.approx(0.8 * usual)
    assert links.gbps(0, 1) == usual
    node.close()


def test_what_no_way_uses_is_not_varied() -> None:
    node = open_node("emu:h100", 2)
    threads, bulk = (gather_parameters(node.devices[0], ("ce.batch", way)) for way in ("sm.push", "tma.push"))
    node.close()
    assert set(bulk) - set(threads) == {name for name in bulk if name.startswith("tma.")} != set()
    assert {"link.gbps", "host.copy_startup_us", "sync.fence_sys_cycles"} < set(threads)
    assert not any(name.startswith(("cluster.", "cp_async.", "issue.mma")) for name in bulk)


def test_an_allreduce_runs_again_on_another_node() -> None:
    """A one-shot sends a message to its peer, a two-shot half of one twice. On a link of half the rate both
    take as long again as the message took before, but for what other waits hide."""
    node = open_node("emu:h100", 2)
    with (
        Group.local(node.devices, pool_bytes=2048 * KIB) as group,
        Workspace(group, scratch_bytes=256 * KIB, oneshot_bytes=64 * KIB) as workspace,
    ):
        reruns = node_reruns(node, group, "oneshot", "twoshot", partial(reduce_seconds, workspace))
        size = 256 * KIB
        took_s = size / (node.devices[0].driver.node.links.gbps(0, 1) * 1e9)
        usual, slower = reruns.pair(None, 1.0, size), reruns.pair("link.gbps", 0.5, size)
        added = [more - less for more, less in zip(slower, usual, strict=True)]
        assert added == pytest.approx([took_s, took_s], rel=0.5)
        assert reruns.pair("tma.startup_cycles", 2.0, size) == usual, "no way here uses the TMA"
    node.close()


def test_only_full_axes_of_emulated_devices_vary() -> None:
    assert list(machines(Axes.QUICK, "emu:h100")) == list(machines(Axes.FULL, "cuda:0")) == []
    assert list(machines(Axes.FULL, "emu:h100")) == [Ranks(2), Ranks(4), Ranks(8)]
    assert list(reduce_machines(Axes.QUICK, "emu:h100")) == list(reduce_machines(Axes.FULL, "cuda:0")) == []
    assert list(reduce_machines(Axes.FULL, "emu:h100")) == [Ranks(4)]
