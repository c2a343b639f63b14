"""ReduceScatter: rank r gets chunk r of the sum, with the bits of the way's order, and nothing else is
touched; scratch memory is free behind it; operands that do not fit are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.common import ConfigError, OperandError
from kernels.ipc.errors import GroupError
from kernels.ipc.group import Group
from kernels.reduce import reduce_scatter
from kernels.reduce.elements import Element
from kernels.reduce.message import share_of
from kernels.reduce.order import expected
from kernels.reduce.reduce_scatter import WAYS
from kernels.reduce.ring import RingConfig
from kernels.reduce.ring_bulk import RingBulkConfig
from kernels.reduce.workspace import Workspace
from smfree.cuda import DeviceArray
from tests.kernels.group_kit import EMULATED
from tests.kernels.pairwise import SCHEDULES, rows
from tests.kernels.reduce_kit import CANARY, SMALL, canonical, inputs, reduce_group

Bits = NDArray[np.unsignedinteger]

ORDER = {"direct": "twoshot"}
"""An AllReduce that adds as a ReduceScatter of another name."""
LENGTHS = {"0": lambda n: 0, "N-1": lambda n: n - 1, "rounds": lambda n: 100 * n + n // 2}
GUARD = 4
"""Elements on each side of dst that nobody writes."""
AXES = {
    "way": WAYS,
    "length": ("0", "N-1", "rounds"),
    "schedule": (("timed", 0), ("async-latest", 0), ("random", 1)),
    "ranks": (2, 3, 4),
    "dtype": tuple(element.value for element in Element),
    "dst": ("apart", "own chunk"),
    "shift": (0, 1),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "row" in metafunc.fixturenames:
        schedules = {"schedule": SCHEDULES} if metafunc.config.getoption("--full-product") else {}
        found = [*rows({**AXES, **schedules}, metafunc.config), *OTHERS]
        metafunc.parametrize("row", found, ids=["-".join(map(_name, row.values())) for row in found])


LAST = {name: axis[-1] for name, axis in AXES.items()}
OTHERS = [{**LAST, "ranks": 1, "dst": "apart"}, {**LAST, "way": "direct", "ranks": 5, "length": "N-1"}]
"""More and fewer ranks."""


def _name(value: object) -> str:
    return "".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(" ", "-")


def configured(workspace: Workspace, way: str, element: Element, **values: Any) -> Any:
    """The way's configuration, made small."""
    config = reduce_scatter.throughput_config(workspace, way, 0)
    has = {field.name for field in fields(config)}
    wanted = {**SMALL, "tile_bytes": 64, **values}
    return replace(config, **{name: value for name, value in wanted.items() if name in has})


class Operands:
    """``data`` in the memory of all ranks, ``shift`` elements off an aligned address; dst between canaries,
    shifted by another one, or the chunk of src."""

    def __init__(
        self, workspace: Workspace, data: list[Bits], element: Element, dst: str, shift: int
    ) -> None:
        self.workspace, self.data, self.element = workspace, data, element
        self.in_place = dst == "own chunk"
        count, self.src, self.dst = len(data[0]), [], []
        self._whole: list[DeviceArray] = []
        for member in workspace.group.members:
            rank, stream = member.rank, workspace.stream(member.rank)
            begin, end = share_of(count, len(data), rank)
            memory = member.device.empty(shift + count + 1, element.bits)
            src = memory[shift : shift + count]
            if count:
                src.copy_from(data[rank], stream=stream)
            whole = member.device.empty(2 * GUARD + 1 + end - begin, element.bits)
            whole.bytes_view().fill(CANARY, stream=stream)
            own = src[begin:end] if self.in_place else whole[GUARD + shift : GUARD + shift + end - begin]
            self.src.append(src), self.dst.append(own), self._whole.append(whole)

    def scatter(self, way: str, config: Any) -> reduce_scatter.ReduceInfo:
        """Queue it."""
        return reduce_scatter.reduce_scatter(
            self.workspace, self.dst, self.src, dtype=self.element, way=way, config=config
        )

    def check(self, way: str) -> None:
        """Every rank has its chunk, and what lies around is as it was."""
        total = expected(ORDER.get(way, way), self.data, self.element)
        for rank, dst in enumerate(self.dst):
            begin, end = share_of(len(total), len(self.data), rank)
            want, found = (canonical(bits, self.element) for bits in (total[begin:end], dst.numpy()))
            np.testing.assert_array_equal(found, want, err_msg=f"{way}, rank {rank}")
            rest, kept = self.src[rank].numpy(), self.data[rank].copy()
            if self.in_place:
                kept[begin:end] = dst.numpy()
            np.testing.assert_array_equal(rest, kept, err_msg=f"src of rank {rank}")
            if not self.in_place:
                whole = self._whole[rank].bytes_view().numpy()
                begin = dst.ptr - self._whole[rank].ptr
                around = np.delete(whole, slice(begin, begin + dst.nbytes))
                assert (around == CANARY).all(), f"around the dst of rank {rank}"


def need(way: str, group: Group, element: Element, node: str) -> None:
    """Skip a way that is not open to these GPUs. To emulated H100s every way is."""
    reason = reduce_scatter.ways(group)[way]
    if reason is not None and node != EMULATED:
        pytest.skip(f"{way}: {reason}")


def test_every_rank_has_its_chunk_and_nothing_else_is_touched(row: dict[str, Any], node: str) -> None:
    element, ranks, way = Element.of(row["dtype"]), row["ranks"], row["way"]
    data = inputs(ranks, LENGTHS[row["length"]](ranks), element, seed=1)
    with reduce_group(ranks, *row["schedule"], node=node) as (group, workspace):
        need(way, group, element, node)
        operands = Operands(workspace, data, element, row["dst"], row["shift"])
        info = operands.scatter(way, configured(workspace, way, element))
        group.wait(60)
        operands.check(way)
        assert (info.way, info.wire) == (way, element)
        assert len(info.launches) == (ranks if ranks > 1 and len(data[0]) else 0)


def test_calls_in_a_row_of_any_ways_and_grids_share_scratch_memory(node: str) -> None:
    """No wait in between: when a call ends on one rank, scratch memory is free on all."""
    element, ranks = Element.F32, 3
    with reduce_group(ranks, "random", 2, node=node) as (group, workspace):
        reasons = reduce_scatter.ways(group)
        open_ways = [way for way in WAYS if node == EMULATED or reasons[way] is None]
        calls = []
        for call, way in enumerate([*open_ways, *open_ways[::-1]]):
            data = inputs(ranks, (100, 7, 200, 50)[call % 4], element, seed=call)
            operands = Operands(workspace, data, element, ("apart", "own chunk")[call % 2], call % 2)
            operands.scatter(way, configured(workspace, way, element, ctas=1 + call % 2))
            calls.append((operands, way))
        group.wait(60)
        for operands, way in calls:
            operands.check(way)


def test_operands_that_do_not_fit_are_refused() -> None:
    with reduce_group(2) as (group, workspace):
        devices = [member.device for member in group.members]
        src = [device.asarray(np.ones(10, np.float32)) for device in devices]
        dst = [device.empty(5, np.float32) for device in devices]

        def refused(said: str, new_dst: Any, new_src: Any, kind: type[Exception] = OperandError) -> None:
            with pytest.raises(kind, match=said):
                reduce_scatter.reduce_scatter(workspace, new_dst, new_src, dtype="float32", way="ring.sm")

        refused(r"a ReduceScatter has a src and a dst on every rank \(got None\)", None, src)
        refused(r"a ReduceScatter has a src and a dst on every rank \(got None\)", dst, None)
        refused(r"dst has one array per rank of this process, 2 \(got 1\)", dst[:1], src)
        refused(
            r"rank 1's dst must have the 20 bytes of its chunk of src \(got 16\)", [dst[0], dst[1][:4]], src
        )
        refused(r"src has the same size on every rank \(got \[36, 40\] bytes\)", dst, [src[0], src[1][:9]])
        shared = [src[0][1:6], dst[1]]
        refused(
            r"rank 0's dst must be its chunk of src or share nothing with it \(they share 20", shared, src
        )
        halves = [array.bytes_view(2, 20) for array in src]
        refused(r"rank 0's src must have whole elements of float32: its address", dst, halves)
        reduce_scatter.reduce_scatter(workspace, dst, src, dtype="float32", way="ring.sm")
        group.wait(60)
        assert [array.numpy().tolist() for array in dst] == [[2.0] * 5] * 2


def test_a_way_or_configuration_of_another_is_refused() -> None:
    with reduce_group(2) as (group, workspace):
        src = [member.device.empty(10, np.float32) for member in group.members]
        dst = [member.device.empty(5, np.float32) for member in group.members]

        def call(way: str, config: Any = None) -> None:
            reduce_scatter.prepare(workspace, dst, src, dtype="float32", way=way, config=config)

        with pytest.raises(GroupError, match=r"a ReduceScatter goes one of the ways ring.sm, .*'oneshot'"):
            call("oneshot")
        with pytest.raises(ConfigError, match=r"way 'ring.tma' is a RingBulkConfig \(got RingConfig\)"):
            call("ring.tma", RingConfig())
        with pytest.raises(ConfigError, match=r"way 'ring.sm' is a RingConfig \(got RingBulkConfig\)"):
            call("ring.sm", RingBulkConfig())
