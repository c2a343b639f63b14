"""What reductions refuse, in which words: nothing has been queued then, and the group goes on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.ipc.errors import GroupError, PoolError
from kernels.ipc.group import Group
from kernels.reduce import allreduce, reduce_scatter
from kernels.reduce.config import ReduceConfig
from kernels.reduce.copy_engine import AddConfig
from kernels.reduce.direct import OneshotConfig, TwoshotConfig
from kernels.reduce.elements import Element
from kernels.reduce.order import expected
from kernels.reduce.ring import RingConfig
from kernels.reduce.ring_bulk import RingBulkConfig
from kernels.reduce.tree import TreeConfig
from kernels.reduce.workspace import Workspace
from smfree.cuda import Device
from tests.kernels.reduce_kit import Operands, inputs, reduce_group, small_config

F32 = Element.F32
COUNT = 10
RING = RingConfig(ctas=1, threads=64, piece_bytes=128)


class Call:
    """An AllReduce of 10 float32, apart, by a ring, all right; a case changes something."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.group = workspace, workspace.group
        self.operands = Operands(workspace, inputs(2, COUNT, F32), F32)
        self.dst: Any = self.operands.dst
        self.src: Any = self.operands.src
        self.dtype: Any = "float32"
        self.way = "ring.sm"
        self.config: Any = RING

    def array(self, rank: int, nbytes: int = 4 * COUNT) -> Any:
        return self.group.member(rank).device.empty(nbytes, np.uint8)

    def reduce(self, run: Callable[..., Any] = allreduce.allreduce, **changed: Any) -> Any:
        keywords = {"dtype": self.dtype, "way": self.way, "config": self.config, **changed}
        dst, src = keywords.pop("dst", self.dst), keywords.pop("src", self.src)
        return run(self.workspace, dst, src, **keywords)

    def scatter(self, dst: Any, src: Any) -> Any:
        return self.reduce(reduce_scatter.reduce_scatter, dst=dst, src=src)


def of_another_group(call: Call) -> Any:
    """Made and left: its label does not matter."""
    with Group.local([member.device for member in call.group.members], pool_bytes=1 << 12, slots=1) as other:
        call.reduce(dst=other.symmetric(4 * COUNT, "dst"))


def captured(call: Call, way: str) -> None:
    call.reduce(allreduce.prepare, way=way, config=None)
    with call.workspace.stream(0).capture(), call.workspace.stream(1).capture():
        call.reduce(way=way, config=None)


def closed(call: Call) -> None:
    with Workspace(call.group, scratch_bytes=0, oneshot_bytes=0, channels=1, label="second") as second:
        pass
    allreduce.allreduce(second, call.dst, call.src, dtype=F32, way="ring.sm")


REFUSED: dict[str, tuple[type[Exception], str, Callable[[Call], Any]]] = {
    # dst and src
    "dst-plain": (
        OperandError, "dst must be symmetric memory of the group (got DeviceArray); use group.symmetric",
        lambda c: c.reduce(dst=c.array(0)),
    ),
    "dst-of-another-group": (
        OperandError, "dst must be symmetric memory of the group (got another group's); use group.symmetric",
        of_another_group,
    ),
    "src-one-array": (
        OperandError, "src has one array per rank of this process, 2 (got 1); give them in the order of",
        lambda c: c.reduce(src=c.src[:1]),
    ),
    "src-of-another-device": (
        OperandError, "rank 0's src must be an array of its device emu:h100x2:0 (got emu:h100x2:1); make it",
        lambda c: c.reduce(src=c.src[::-1]),
    ),
    "src-shorter": (
        OperandError, "rank 1's src must have as many bytes as dst (got 36 and 40); slice the longer",
        lambda c: c.reduce(src=[c.src[0], c.array(1, 36)]),
    ),
    "src-longer": (
        OperandError, "rank 0's src must have as many bytes as dst (got 40 and 32); slice the longer",
        lambda c: c.reduce(dst=c.dst.bytes_view(0, 32)),
    ),
    "src-overlaps-dst": (
        OperandError, "rank 0's src must be dst or share nothing with it (they share 28 bytes); copy it",
        lambda c: c.reduce(dst=c.dst.bytes_view(0, 32), src=c.dst.bytes_view(4, 32)),
    ),
    "dst-in-scratch-memory": (
        OperandError, "dst must lie outside the workspace's own memory (they share 40 bytes); use other",
        lambda c: c.reduce(dst=c.workspace.scratch.bytes_view(0, 40)),
    ),
    "src-in-scratch-memory": (
        OperandError, "rank 0's src must lie outside the workspace's own memory (they share 40 bytes)",
        lambda c: c.reduce(src=c.workspace.scratch.bytes_view(128, 40)),
    ),
    "dst-ends-inside-an-element": (
        OperandError, "of float32: its size in bytes must be a multiple of 4 (got 38); slice it",
        lambda c: c.reduce(dst=c.dst.bytes_view(0, 38), src=None),
    ),
    "dst-starts-inside-an-element": (
        OperandError, "dst must have whole elements of float32: its address must be a multiple of 4 (got ",
        lambda c: c.reduce(dst=c.dst.bytes_view(2, 36), src=None),
    ),
    "src-starts-inside-an-element": (
        OperandError, "rank 1's src must have whole elements of float32: its address must be a multiple of 4",
        lambda c: c.reduce(src=[c.src[0], c.array(1, 42).bytes_view(2, 40)]),
    ),
    # type, way, configuration
    "dtype-unknown": (
        ConfigError, "dtype is one of float32, float16, bfloat16 (got 'float64'); pass such a name, or",
        lambda c: c.reduce(dtype=np.float64),
    ),
    "dtype-no-type": (
        ConfigError, "dtype is one of float32, float16, bfloat16 (got 'no type'); pass such a name, or",
        lambda c: c.reduce(dtype="no type"),
    ),
    "way-unknown": (
        GroupError, f"an AllReduce goes one of the ways {', '.join(allreduce.WAYS)} (got 'star')",
        lambda c: c.reduce(way="star"),
    ),
    "config-of-another-way": (
        ConfigError, "the config of way 'oneshot' is a OneshotConfig (got RingConfig); leave it out",
        lambda c: c.reduce(way="oneshot"),
    ),
    "more-ctas-than-channels": (
        ConfigError, "every CTA has one of the workspace's 8 channels (got 9 CTAs); use fewer, or a",
        lambda c: c.reduce(config=replace(RING, ctas=9)),
    ),
    "pieces-without-room": (
        ConfigError, "the workspace has 16384 bytes of scratch memory (got 16640 bytes needed by",
        lambda c: c.reduce(config=replace(RING, piece_bytes=8320)),
    ),
    "captured-copies": (
        ConfigError, "way 'ce' cannot be captured in a graph: its epochs are the host's",
        lambda c: captured(c, "ce"),
    ),
    "workspace-closed": (GroupError, "'second' was closed; make a new Workspace", closed),
    "prepare-too": (
        ConfigError, "every CTA has one of the workspace's 8 channels (got 9 CTAs)",
        lambda c: c.reduce(allreduce.prepare, config=replace(RING, ctas=9)),
    ),
    # workspaces
    "scratch-negative": (
        ConfigError, "scratch_bytes must be 0 or more (got -1); use 1 MiB",
        lambda c: Workspace(c.group, scratch_bytes=-1),
    ),
    "oneshots-negative": (
        ConfigError, "oneshot_bytes must be 0 or more (got -128); use 1 MiB",
        lambda c: Workspace(c.group, oneshot_bytes=-128),
    ),
    "channels-none": (
        ConfigError, "channels must be 1 to 1024 (got 0); use 128", lambda c: Workspace(c.group, channels=0),
    ),
    "channels-not-whole": (
        ConfigError, "channels must be a whole number (got 2.0)", lambda c: Workspace(c.group, channels=2.0),
    ),
    "scratch-larger-than-the-pool": (
        PoolError, "scratch of big", lambda c: Workspace(c.group, scratch_bytes=1 << 20, label="big"),
    ),
    "signals-larger-than-the-pool": (
        PoolError, "signals of wide",
        lambda c: Workspace(
            c.group, scratch_bytes=c.group.pool.free_bytes - 4096, oneshot_bytes=0,
            channels=1024, label="wide",
        ),
    ),
    # ReduceScatter
    "scatter-in-place": (
        OperandError, "a ReduceScatter has a src and a dst on every rank (got None); give both",
        lambda c: c.scatter(c.src, None),
    ),
    "scatter-dst-of-another-size": (
        OperandError, "rank 1's dst must have the 20 bytes of its chunk of src (got 16); slice it",
        lambda c: c.scatter([c.array(0, 20), c.array(1, 16)], c.src),
    ),
    "scatter-src-of-two-sizes": (
        OperandError, "src has the same size on every rank (got [36, 40] bytes); slice it",
        lambda c: c.scatter([c.array(0, 20), c.array(1, 20)], [c.src[0], c.array(1, 36)]),
    ),
    "scatter-into-another-part": (
        OperandError, "rank 0's dst must be its chunk of src or share nothing with it (they share 20 bytes)",
        lambda c: c.scatter([array.bytes_view(4, 20) for array in c.src], c.src),
    ),
    "scatter-way-unknown": (
        GroupError, f"a ReduceScatter goes one of the ways {', '.join(reduce_scatter.WAYS)} (got 'tree')",
        lambda c: c.reduce(reduce_scatter.reduce_scatter, way="tree", src=c.src,
                           dst=[c.array(0, 20), c.array(1, 20)]),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def space() -> Iterator[Workspace]:
    """Of all refusals: nothing that one leaves behind may change the next."""
    with reduce_group(2, pool_bytes=1 << 17) as (_, workspace):
        yield workspace


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_nothing_behind(case: str, space: Workspace) -> None:
    error, said, make = REFUSED[case]
    group, call = space.group, Call(space)
    group.wait(60)
    before = len(group.lanes), group.pool.live, launches(group)
    with pytest.raises(error, match=re.escape(said)):
        make(call)
    assert not group.calls
    assert (len(group.lanes), group.pool.live, launches(group)) == before
    call.reduce()
    group.wait(60)
    call.operands.check("ring.sm")
    call.operands.free()


def launches(group: Group) -> int:
    """Kernels that the group's devices have run."""
    group.wait(60)
    devices: list[Any] = [member.device.emulator for member in group.members]
    return sum(device.counters.launches for device in devices)


WRONG: list[tuple[type[ReduceConfig], dict[str, Any], str]] = [
    (RingConfig, {"ctas": 0}, "ctas must be at least 1 (got 0); use 16"),
    (RingConfig, {"ctas": 2.5}, "ctas must be a whole number (got 2.5)"),
    (RingConfig, {"threads": 48}, "threads must be a multiple of 32, at most 1024 (got 48)"),
    (RingConfig, {"threads": 1056}, "threads must be a multiple of 32, at most 1024 (got 1056)"),
    (RingConfig, {"unroll": 9}, "unroll must be 1 to 8 (got 9); use 4"),
    (RingConfig, {"piece_bytes": 100}, "piece_bytes must be a positive multiple of 128 (got 100); use 32768"),
    (RingConfig, {"piece_bytes": 0}, "piece_bytes must be a positive multiple of 128 (got 0); use 32768"),
    (RingConfig, {"num_slots": 1}, "num_slots must be at least 2: a slot is freed by a step that sends into"),
    (RingBulkConfig, {"tile_bytes": 40}, "tile_bytes must be a positive multiple of 16 (got 40)"),
    (RingBulkConfig, {"num_stages": 9}, "num_stages must be 1 to 8 (got 9)"),
    (OneshotConfig, {"piece_bytes": 64}, "piece_bytes must be a positive multiple of 128 (got 64); use 4096"),
    (AddConfig, {"ctas": 2000}, "ctas must be at most 1024 (got 2000); use 16"),
    (TreeConfig, {"ctas": 6}, "ctas must be a multiple of 4: up and down in two trees (got 6); use 16"),
]


@pytest.mark.parametrize(("kind", "values", "said"), WRONG, ids=[f"{k.__name__}-{v}" for k, v, _ in WRONG])
def test_a_config_that_cannot_be(kind: type[ReduceConfig], values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        kind(**values)
    kind()


def test_numpy_integers_are_integers() -> None:
    """Their products would wrap: 255 CTAs x 2 slots x 128 bytes are no uint8."""
    config = RingConfig(ctas=np.uint8(255), num_slots=np.uint8(2), piece_bytes=128)  # type: ignore[arg-type]
    assert config.scratch_bytes == 255 * 2 * 128


def test_numpy_integers_are_integers_of_a_workspace() -> None:
    """Its slots must not wrap into each other: 2 x 200 channels are no uint8."""
    narrow: Any = {"channels": np.uint8(200), "oneshot_bytes": np.int16(32000)}
    with reduce_group(2, pool_bytes=1 << 18, **narrow) as (_, workspace):
        assert workspace.defines["SIGNAL_RING_ROOM"] == 400
        assert workspace.lane.layout.slots == 5 * 200
        assert workspace.oneshot.nbytes >= 2 * 2 * 32000


@pytest.mark.parametrize(
    ("way", "config", "said"),
    [
        ("oneshot", OneshotConfig(ctas=5, piece_bytes=256), "have 1024 bytes per turn (got 1280"),
        ("twoshot", TwoshotConfig(ctas=5, piece_bytes=1024), "16384 bytes of scratch memory (got 20480"),
    ],
    ids=["oneshot", "twoshot"],
)  # fmt: skip
def test_room_that_grows_with_the_ranks_or_is_the_one_shots(
    way: str, config: ReduceConfig, said: str
) -> None:
    with reduce_group(2) as (group, workspace):
        operands = Operands(workspace, inputs(2, COUNT, F32), F32)
        with pytest.raises(ConfigError, match=re.escape(said)):
            operands.reduce(way, config)
        assert not group.calls
        operands.reduce(way, small_config(workspace, way, F32))
        group.wait(60)
        operands.check(way)


def test_more_ctas_than_are_resident_would_wait_for_each_other() -> None:
    """Case D24: before the launch, with both numbers."""
    with reduce_group(2, pool_bytes=1 << 20, channels=140, scratch_bytes=1 << 18) as (group, workspace):
        operands = Operands(workspace, inputs(2, COUNT, F32), F32)
        with pytest.raises(
            ConfigError, match=r"132 are on 132 SMs with 1024 threads .* \(got 140\); use fewer"
        ):
            operands.reduce("ring.sm", RingConfig(ctas=140, threads=1024, unroll=1, piece_bytes=128))
        assert not group.calls


def test_a_src_in_the_dst_of_a_peer() -> None:
    """Ranks that share a GPU have their memory on it: a peer's dst is an array of the own device."""
    device = Device.open("emu:h100")
    with (
        device,
        Group.local([device] * 2, pool_bytes=1 << 16, slots=4, several_per_gpu=True) as group,
        Workspace(group, scratch_bytes=1 << 12, oneshot_bytes=128, channels=1) as workspace,
    ):
        dst = group.symmetric(4 * COUNT, "dst")
        with pytest.raises(OperandError, match=r"rank 0's src must be dst or share nothing .* 40 bytes"):
            allreduce.allreduce(workspace, dst, [dst.array(1), dst.array(1)], dtype=F32, way="ring.sm")
        assert not group.calls


def test_a_closed_group_makes_no_workspace_and_reduces_nothing() -> None:
    with reduce_group(2) as (group, workspace):
        dst = group.symmetric(64, "dst")
    for call in (
        lambda: Workspace(group),
        lambda: allreduce.allreduce(workspace, dst, dtype=F32, way="ring.sm"),
    ):
        with pytest.raises(GroupError, match="the group was closed; make a new one"):
            call()


def test_an_order_that_is_not_stated_has_no_expected_bits() -> None:
    with pytest.raises(ConfigError, match=r"stated for the ways ring.sm, .*\(got 'nvls'\); hold its sums"):
        expected("nvls", inputs(2, COUNT, F32), F32)
