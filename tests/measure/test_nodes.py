"""The GPUs of one machine: which, kept how long, what they count."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from smfree.cuda import Device
from smfree.measure.devices import DevicePool
from smfree.measure.instruments import Instruments
from smfree.measure.nodes import Node, NodeUnavailableError, node_spec, open_node


@pytest.fixture(scope="module")
def pair() -> list[Device]:
    return Device.open_all("emu:a100x2")


@pytest.mark.parametrize(
    ("spec", "ranks", "gpus", "opened"),
    [
        ("emu:h100", 4, 0, "emu:h100x4"),
        ("emu:h100x8:3", 2, 0, "emu:h100x2"),
        ("emu:a100", 1, 0, "emu:a100x1"),
        ("cuda:0", 2, 8, "cuda:0,1"),
        ("cuda:5", 3, 8, "cuda:0,1,2"),
    ],
)
def test_a_node_is_the_first_gpus_of_the_machine(spec: str, ranks: int, gpus: int, opened: str) -> None:
    assert node_spec(spec, ranks, gpus) == opened


def test_too_few_gpus_are_a_reason() -> None:
    with pytest.raises(NodeUnavailableError, match=r"^4 GPUs are needed, this machine has 2$"):
        node_spec("cuda:0", 4, 2)


def test_a_rank_of_several_processes_has_its_own_gpu_if_there_are_as_many_as_ranks() -> None:
    context = SimpleNamespace(world_size=2, device=object())
    assert open_node("emu:a100", 2, context).devices == [context.device]
    with pytest.raises(NodeUnavailableError, match=r"^4 ranks are needed, these are 2 processes$"):
        open_node("emu:a100", 4, context)


def test_a_pool_keeps_nodes_and_gives_up_the_dead_ones() -> None:
    pool = DevicePool(["emu:a100"])
    node = pool.node("emu:a100", 2)
    assert pool.node("emu:a100", 2) is node
    assert pool.node_of(node.devices[1]) is node
    assert pool.drop_dead_nodes("emu:a100") == ""
    assert pool.node("emu:a100", 2) is node
    node.devices[1].close()
    assert pool.drop_dead_nodes("emu:a100") != ""
    fresh = pool.node("emu:a100", 2)
    assert fresh is not node
    assert fresh.devices[1].asarray(np.arange(3)).numpy().tolist() == [0, 1, 2]
    pool.close()


def test_a_tally_counts_what_each_gpu_did_since(pair: list[Device]) -> None:
    node, (here, there) = Node(pair), pair
    here.enable_peer_access(there)
    src, dst = here.asarray(np.arange(1024, dtype=np.uint8)), there.empty(1024, np.uint8)

    def copied() -> list[dict[str, int]]:
        before = node.tally()
        here.copy(dst, src)
        here.synchronize()
        return before.since()

    copied()
    sender, receiver = copied()
    assert (sender["nvlink_sent_bytes"], sender["nvlink_received_bytes"]) == (1024, 0)
    assert (receiver["nvlink_sent_bytes"], receiver["nvlink_received_bytes"]) == (0, 1024)
    assert (sender["copy_engine_read_bytes"], receiver["copy_engine_write_bytes"]) == (1024, 1024)
    assert sender["nvlink_sent_wire_bytes"] > 1024
    assert sender["launches"] == 0


def test_filled_caches_make_the_next_reads_miss(pair: list[Device]) -> None:
    node, instruments = Node(pair), Instruments(pair[0])
    array = pair[0].asarray(np.zeros(1 << 16, np.uint8))

    def missed(prepare: Callable[[], None]) -> int:
        prepare()
        before = node.tally()
        instruments.read(array)
        instruments.stream.synchronize()
        return before.since()[0]["dram_read_bytes"]

    missed(lambda: None)
    warm = missed(lambda: None)
    assert missed(node.fill_l2) - warm == array.nbytes // 128 * 4, "a word of every line"
