"""AllReduce by copy engines and a kernel that adds: turns, traffic, waits. Its sums among those of other
ways: test_allreduce.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError
from kernels.ipc.group import Group
from kernels.ipc.wait import CollectiveTimeout
from kernels.reduce import copy_engine
from kernels.reduce.allreduce import allreduce, prepare, throughput_config
from kernels.reduce.copy_engine import COPY_ENGINE, AddConfig
from kernels.reduce.elements import Element
from kernels.reduce.order import sum_in_order
from kernels.reduce.workspace import Workspace
from smfree.cuda import Device
from smfree.measure.nodes import Tally
from smfree.ranks.errors import PeerLost
from tests.kernels.group_kit import joined
from tests.kernels.reduce_kit import Operands, inputs, reduce_group, set_epochs, small_config

CONFIG = AddConfig(ctas=2, threads=64, unroll=2)


# ---- right ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "schedule", "element", "src"),
    [
        (2, "async-latest", Element.F32, "in place"),
        (3, "random", Element.F16, "apart"),
        (4, "async-earliest", Element.BF16, "in place"),
    ],
    ids=["2-f32-in", "3-f16-out", "4-bf16-in"],
)
def test_chunks_go_in_turns_where_scratch_memory_is_small(
    ranks: int, schedule: str, element: Element, src: str
) -> None:
    """A line for each peer, two lines or more of every chunk. Two calls in a row, with the same words and
    scratch memory."""
    with reduce_group(ranks, schedule, 1, scratch_bytes=128 * (ranks - 1)) as (group, workspace):
        calls = [
            Operands(
                workspace,
                inputs(ranks, 90 * ranks + 1, element, seed),
                element,
                src,
                src_shift=1,
                dst_shift=3,
            )
            for seed in range(2)
        ]
        for operands in calls:
            operands.reduce("ce", CONFIG)
        group.wait(60)
        for operands in calls:
            operands.check("ce")
        assert workspace.lane.host_epoch >= 2 * 2 * 2


def test_the_count_of_barriers_wraps(node: str) -> None:
    with reduce_group(3, node=node) as (group, workspace):
        set_epochs(workspace, 2**32 - 3)
        for call in range(3):
            operands = Operands(workspace, inputs(3, 50, Element.F32, seed=call), Element.F32)
            operands.reduce("ce", CONFIG)
            group.wait(60)
            operands.check("ce")
        assert workspace.lane.host_epoch == 3


def test_without_batches_the_copies_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "driver_version", (12, 4))
    with reduce_group(3, "async-latest") as (group, workspace):
        operands = Operands(workspace, inputs(3, 50, Element.F16), Element.F16)
        operands.reduce("ce", CONFIG)
        group.wait(60)
        operands.check("ce")


def test_a_late_rank_holds_the_others_and_keeps_its_terms(node: str) -> None:
    """Rank 1 comes late: until then nobody changes its dst, which has its terms, and nobody ends."""
    with reduce_group(3, "async-earliest", node=node) as (group, workspace):
        operands = Operands(workspace, inputs(3, 300, Element.F32), Element.F32, "in place")
        prepare(workspace, operands.dst, dtype="float32", way="ce", config=CONFIG)
        late = group.member(1)
        gate = late.device.empty(1, np.uint32).fill(0)
        old = late.device.empty(operands.dst.nbytes)
        group.wait(60)
        late.device.synchronize()
        late.stream.wait_value(gate.ptr, 1)
        old.copy_from_device(operands.dst.array(1), stream=late.stream)
        operands.reduce("ce", CONFIG)
        for _ in range(100):
            assert not any(workspace.stream(rank).query() for rank in range(3))
        late.control_stream.write_value(gate.ptr, 1)
        group.wait(60)
        np.testing.assert_array_equal(old.numpy().view(np.uint32), operands.data[1])
        operands.check("ce")


# ---- traffic ----------------------------------------------------------------------------------------


def traffic(way: str, ranks: int, count: int) -> dict[str, float]:
    """Of a call of equal chunks, in messages of S bytes, summed over the ranks: bytes read and written in
    device memory, and what of it the copy engines did. Flags that are written are left out."""
    element = Element.F32
    nbytes = element.bytes * count
    with reduce_group(ranks, scratch_bytes=1 << 16) as (group, workspace):
        operands = Operands(workspace, inputs(ranks, count, element), element)
        group.wait(60)
        before = Tally([member.device for member in group.members])
        operands.reduce(way, small_config(workspace, way, element, piece_bytes=1024))
        group.wait(60)
        counted = before.since()
        operands.check(way)

    def total(*names: str) -> float:
        return sum(counters[name] for counters in counted for name in names) / nbytes

    return {
        "read": total("global_load_bytes", "copy_engine_read_bytes"),
        "written": total("global_store_bytes", "copy_engine_write_bytes") - total("peer_signal_bytes"),
        "copy engine read": total("copy_engine_read_bytes"),
        "copy engine written": total("copy_engine_write_bytes"),
        "sent": total("nvlink_sent_bytes") - total("peer_signal_bytes"),
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_come_back_to_memory_before_they_are_sent(ranks: int) -> None:
    """Of one rank, in chunks of S / N, for N ranks:

    - ce: copies read N - 1 chunks of src and the own sum N - 1 times; the kernel reads N terms and writes a
      sum; the peers' copies write N - 1 terms into scratch memory and N - 1 sums into dst.
    - twoshot: threads read N - 1 chunks of src, then N terms, whose sum goes from registers to every dst:
      N - 1 terms and N sums are written to the rank. So ce reads N - 1 chunks more.
    - ring.sm: threads read N own terms to send or add, N - 1 times what came into scratch memory, and N - 2
      complete chunks in dst to send them on.

    All ranks together do N times that: the chunks per rank are the messages of all. What is read besides are
    words that are polled, written the epochs; far less than one message.
    """
    n, count = ranks, ranks * 1024
    ce, twoshot, ring = (traffic(way, ranks, count) for way in ("ce", "twoshot", "ring.sm"))
    assert ce["copy engine read"] == ce["copy engine written"] == 2 * (n - 1)
    assert ce["written"] == 2 * (n - 1) + 1
    assert twoshot["copy engine read"] == ring["copy engine read"] == 0
    for each, read in ((ce, 2 * (n - 1) + n), (twoshot, (n - 1) + n), (ring, (n - 1) + n + (n - 2))):
        assert read <= each["read"] < read + 0.3
        assert 2 * n - 1 <= each["written"] < 2 * n - 1 + 0.05
        assert 2 * (n - 1) <= each["sent"] < 2 * (n - 1) + 0.05  # with words that the streams write


# ---- wrong ------------------------------------------------------------------------------------------


def late_sums(schedule: str) -> int:
    """Two calls into one dst without a wait between them: how many elements of what a rank copied away behind
    each were not its sums."""
    ranks, element, wrong = 3, Element.F32, 0
    with reduce_group(ranks, schedule, 1) as (group, workspace):
        for member in group.members:
            workspace.scratch.array(member.rank).fill(0x3C, stream=member.stream)
        operands = Operands(workspace, inputs(ranks, 200, element), element)
        want, kept = [], []
        for call in range(2):
            operands.fill(inputs(ranks, 200, element, seed=call))
            want.append(sum_in_order(operands.data, element))
            operands.reduce("ce", CONFIG)
            for member in group.members:
                copy = member.device.empty(operands.dst.nbytes)
                copy.copy_from_device(operands.dst.array(member.rank), stream=workspace.stream(member.rank))
                kept.append((call, copy))
        group.wait(60)
        for call, copy in kept:
            wrong += int((copy.numpy().view(element.bits) != want[call]).sum())
    return wrong


@pytest.mark.parametrize(
    ("barrier", "schedule"), [(1, "async-latest"), (0, "async-latest")], ids=["terms", "sums"]
)
def test_without_one_of_its_barriers_sums_are_wrong(
    barrier: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Terms that have not come are not added, sums that have not come are not there."""
    wait: Callable[..., None] = copy_engine.await_peers
    assert late_sums(schedule) == 0

    def but_one(lane: Any, member: Any, stream: Any, peers: Any, epoch: int) -> None:
        if epoch % 2 != barrier:
            wait(lane, member, stream, peers, epoch)

    monkeypatch.setattr(copy_engine, "await_peers", but_one)
    assert late_sums(schedule) > 0


def test_a_rank_that_never_calls_is_named_with_the_barrier() -> None:
    """The others' streams are let go: nothing is added to what never came."""
    told = threading.Event()

    def body(group: Group) -> Exception:
        (member,) = group.members
        with (
            pytest.raises((CollectiveTimeout, PeerLost)) as caught,
            Workspace(group, scratch_bytes=4096, oneshot_bytes=0, channels=4, label="sums") as workspace,
        ):
            dst = group.symmetric(96, "gradients")
            dst.array(member.rank).fill(0, stream=member.stream)
            if member.rank == 0:
                allreduce(workspace, dst, dtype="float32", way="ce", config=CONFIG)
                group.wait(0.3)
            assert told.wait(20)
            group.wait(20)
        told.set()
        return caught.value

    late, lost = joined(["h100"] * 2, body)
    assert str(late).startswith(
        "allreduce 'gradients' (ce) did not end within 0.3 s: rank 0 waits for rank 1 at the copies' terms: "
        "in 'sums', epoch 2 wanted, 0 seen"
    )
    assert isinstance(lost, PeerLost)


# ---- what it refuses --------------------------------------------------------------------------------


def test_it_cannot_be_captured(node: str) -> None:
    with reduce_group(2, node=node) as (group, workspace):
        operands = Operands(workspace, inputs(2, 60, Element.F32), Element.F32)
        words = r"way 'ce' cannot be captured .* use a way whose kernels count \(ring.sm, twoshot\)"
        with workspace.stream(0).capture(), pytest.raises(ConfigError, match=words):
            operands.reduce("ce")
        assert workspace.lane.host_epoch == 0
        operands.reduce("ce")
        group.wait(60)
        operands.check("ce")


def test_it_needs_a_line_of_scratch_memory_for_each_peer() -> None:
    with reduce_group(3, scratch_bytes=255) as (group, workspace):
        dst = group.symmetric(64, "dst")
        words = (
            r"needs 128 bytes of scratch memory for each of 2 peers \(got 255\); use a Workspace with more"
        )
        for call in (allreduce, prepare):
            with pytest.raises(ConfigError, match=words):
                call(workspace, dst, dtype="float32", way="ce")
        assert not group.calls and group.failed is None


def test_its_configuration_is_the_adders() -> None:
    with reduce_group(2) as (group, workspace):
        assert COPY_ENGINE.unavailable(group) is None
        config = throughput_config(workspace, "ce", 1 << 20)
        assert isinstance(config, AddConfig) and config.ctas == workspace.channels
