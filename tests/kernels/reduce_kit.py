"""What the tests of the reductions share: groups with a workspace, data whose sums show their order, operands
between canaries, and what must come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.ipc.group import Group
from kernels.reduce import allreduce
from kernels.reduce.elements import Element
from kernels.reduce.order import ORDERS, error_bound, expected, true_sum
from kernels.reduce.trees import two_trees
from kernels.reduce.workspace import Workspace
from smfree.cuda import DeviceArray, Stream
from smfree.emulator.counters import Counters
from smfree.model.collectives import expected_sent_bytes
from tests.kernels.group_kit import EMULATED, local_group

Bits = NDArray[np.unsignedinteger]

CHANNELS = 8
SMALL = {
    "ctas": 2,
    "threads": 64,
    "unroll": 2,
    "piece_bytes": 128,
    "num_slots": 2,
    "num_stages": 2,
    "tile_bytes": 48,
}
"""Of a configuration, those of its fields that are here: a few hundred elements take several pieces, rounds
and turns of every ring."""
CANARY, GUARD_BYTES = 0xA5, 64


@contextmanager
def reduce_group(
    num_ranks: int,
    schedule: str = "timed",
    seed: int = 0,
    *,
    node: str = EMULATED,
    pool_bytes: int = 1 << 18,
    **options: Any,
) -> Iterator[tuple[Group, Workspace]]:
    """A group and a small workspace; ``options`` are the workspace's."""
    sizes = {"scratch_bytes": 1 << 14, "oneshot_bytes": 1 << 10, "channels": CHANNELS, **options}
    with (
        local_group(num_ranks, node, schedule=schedule, seed=seed, pool_bytes=pool_bytes) as group,
        Workspace(group, **sizes) as workspace,
    ):
        yield group, workspace


def need(way: str, group: Group, element: Element, node: str) -> None:
    """Skip a way that is not open to these GPUs. To emulated H100s every way is: there it is an error."""
    reason = allreduce.ways(group)[way]
    if reason is not None and node != EMULATED:
        pytest.skip(f"{way}: {reason}")


def small_config(workspace: Workspace, way: str, element: Element, nbytes: int = 0, **values: Any) -> Any:
    """The way's configuration for such messages, but with ``values`` and those of SMALL that it has. Where
    others have a CTA, trees have four, and but one such channel unless ``values`` say so."""
    config = allreduce.throughput_config(workspace, way, nbytes)
    has = {field.name for field in fields(config)}
    if way == "tree":
        values["ctas"] = 4 * values.get("ctas", 1)
    return replace(config, **{name: value for name, value in {**SMALL, **values}.items() if name in has})


def inputs(num_ranks: int, count: int, element: Element, seed: int = 0) -> list[Bits]:
    """What each rank gives: finite, and such that another order of summation gives other bits. Often two
    ranks have a large number and its negative, between which float32 loses the small ones; here and there is
    a zero of either sign or a subnormal. No sum overflows."""
    rng = np.random.default_rng([seed, num_ranks, count])
    shape = (num_ranks, count)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 2, shape)
    if num_ranks > 1:
        for column in np.flatnonzero(rng.random(count) < 0.5):
            first, second = rng.choice(num_ranks, 2, replace=False)
            values[first, column] = 2.0**13 * rng.uniform(1, 2)
            values[second, column] = -values[first, column]
    bits = element.narrow(values.astype(np.float32))
    sign = rng.integers(0, 2, shape) << (8 * element.bytes - 1)
    tiny = (rng.integers(0, 4, shape) | sign).astype(element.bits)
    return list(np.where((rng.random(shape) < 0.1) & (np.abs(values) < 2.0**12), tiny, bits))


class Operands:
    """``data`` of all ranks in their memory: src ``in place``, ``apart`` or ``symmetric``, src and dst so
    many elements off an aligned address, dst between canaries. What is written comes first in the streams of
    the workspace."""

    def __init__(
        self,
        workspace: Workspace,
        data: Sequence[Bits],
        element: Element,
        src: str = "apart",
        *,
        src_shift: int = 0,
        dst_shift: int = 0,
        label: str = "dst",
    ) -> None:
        self.workspace, self.data, self.element = workspace, data, element
        self.group = workspace.group
        self._nbytes = len(data[0]) * element.bytes
        self._begin = GUARD_BYTES + dst_shift * element.bytes
        self._whole = self.group.symmetric(self._begin + self._nbytes + GUARD_BYTES, label)
        self.dst = self._whole.bytes_view(self._begin, self._nbytes)
        for member in self.group.members:
            self._whole.array(member.rank).fill(CANARY, stream=workspace.stream(member.rank))
        self._given = self._place_src(src, src_shift * element.bytes)
        self.fill(data)

    @property
    def src(self) -> Any:
        """As a collective takes it."""
        return self._given

    def _place_src(self, src: str, shift_bytes: int) -> Any:
        if src == "in place":
            return None
        if src == "symmetric":
            block = self.group.symmetric(self._nbytes + shift_bytes, "src")
            return block.bytes_view(shift_bytes, self._nbytes)
        return [
            member.device.empty(self._nbytes + shift_bytes + 1, np.uint8).bytes_view(
                shift_bytes, self._nbytes
            )
            for member in self.group.members
        ]

    def source(self, rank: int) -> DeviceArray:
        """What a rank gives."""
        if self._given is None:
            return self.dst.array(rank)
        if isinstance(self._given, list):
            place = [member.rank for member in self.group.members].index(rank)
            return self._given[place]
        return self._given.array(rank)

    def fill(self, data: Sequence[Bits]) -> None:
        """Give other data."""
        self.data = data
        for member in self.group.members:
            if self._nbytes:
                bits = np.ascontiguousarray(data[member.rank]).view(np.uint8)
                self.source(member.rank).copy_from(bits, stream=self._stream(member.rank))

    def found(self, rank: int) -> Bits:
        """The bits in the dst of a rank; what lies around is untouched, and so is src."""
        whole = self._whole.array(rank).numpy()
        end = self._begin + self._nbytes
        assert (whole[: self._begin] == CANARY).all() and (whole[end:] == CANARY).all(), f"rank {rank}"
        if self._given is not None:
            np.testing.assert_array_equal(self.source(rank).numpy().view(self.element.bits), self.data[rank])
        return whole[self._begin : end].view(self.element.bits)

    def reduce(self, way: str, config: Any = None) -> allreduce.ReduceInfo:
        """Queue an AllReduce of them."""
        return allreduce.allreduce(
            self.workspace, self.dst, self.src, dtype=self.element, way=way, config=config
        )

    def free(self) -> None:
        """Give dst back to the pool."""
        self._whole.free()

    def check(self, way: str) -> None:
        """Every rank has the sum that ``way`` makes."""
        check_sums(way, [self.found(rank) for rank in range(len(self.data))], self.data, self.element)

    def _stream(self, rank: int) -> Stream:
        return self.workspace.stream(rank)


def canonical(bits: Bits, element: Element) -> Bits:
    """All NaNs alike."""
    return np.where(
        np.isnan(element.widen(bits)), element.bits.type(-1 & (1 << 8 * element.bytes - 1) - 1), bits
    )


def check_sums(way: str, found: Sequence[Bits], data: Sequence[Bits], element: Element) -> None:
    """What ranks found are the sums of ``data`` by ``way``: the bits that the order of the way gives, save
    for which NaN; where it states no order, the same on all ranks and within the error bound."""
    for rank, bits in enumerate(found):
        said = f"{way}, rank {rank} of {len(data)}"
        if way in ORDERS:
            want = canonical(expected(way, data, element), element)
            np.testing.assert_array_equal(canonical(bits, element), want, err_msg=said)
            continue
        np.testing.assert_array_equal(bits, found[0], err_msg=said)
        error = np.abs(element.widen(bits).astype(np.float64) - true_sum(data, element))
        assert (error <= error_bound(way, data, element)).all(), said


def set_epochs(workspace: Workspace, epoch: int) -> None:
    """As if every word of the workspace's signals had counted so far (modulo 2^32)."""
    lane, value = workspace.lane, epoch % 2**32
    layout = lane.layout
    lane.host_epoch = value
    for member in workspace.group.members:
        stream = workspace.stream(member.rank)
        pad = np.full(layout.pad_bytes // 4, value, np.uint32)
        lane.pad(member.rank).bytes_view(0, pad.nbytes).view(np.uint32).copy_from(pad, stream=stream)
        words = lane.control(member.rank).bytes_view(layout.epochs_offset, 4 * layout.slots)
        words.view(np.uint32).copy_from(np.full(layout.slots, value, np.uint32), stream=stream)
        stream.synchronize()


def epoch(workspace: Workspace, rank: int, slot: int) -> int:
    """Of a slot, as the rank's next call will find it."""
    layout = workspace.lane.layout
    words = workspace.lane.control(rank).bytes_view(layout.epochs_offset, 4 * layout.slots)
    return int(words.view(np.uint32).numpy()[slot])


def counted(workspace: Workspace, call: Callable[[], object]) -> list[Counters]:
    """What every rank's emulated device did in a call."""
    group = workspace.group
    group.wait(60)
    devices: list[Any] = [member.device.emulator for member in group.members]
    for device in devices:
        device.counters = Counters()
    call()
    group.wait(60)
    return [device.counters for device in devices]


def sent_bytes(way: str, counters: Counters) -> int:
    """Flags apart: what threads stored to peers, or copy engines read."""
    assert counters.peer_signal_bytes == 4 * counters.peer_signals
    stored = counters.peer_store_bytes - counters.peer_signal_bytes
    return counters.copy_engine_read_bytes if way == "ce" and stored == 0 else stored


def model_bytes(way: str, count: int, element: Element, ranks: int, rank: int) -> int:
    """What the model says that a rank sends."""
    links = tuple(tree.neighbours(rank) for tree in two_trees(ranks)) if way == "tree" else ()
    return expected_sent_bytes(way, count, element.bytes, ranks, rank, neighbours=links)
