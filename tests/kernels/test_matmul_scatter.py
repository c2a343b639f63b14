"""The product whose rows are scattered as its tiles are made: the bits of the unfused pair, less traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.common import ConfigError, OperandError
from kernels.ipc.errors import GroupError
from kernels.ipc.wait import CollectiveTimeout
from kernels.mbarrier.matmul import MatmulConfig, from_bfloat16, matmul, to_bfloat16
from kernels.reduce import matmul_scatter as fused
from kernels.reduce.elements import Element
from kernels.reduce.matmul_scatter import MatmulScatterConfig, matmul_scatter, rows_of
from kernels.reduce.order import sum_in_order
from kernels.reduce.reduce_scatter import reduce_scatter
from kernels.reduce.workspace import Workspace
from smfree.cuda import DeviceArray
from smfree.emulator.counters import Counters
from tests.kernels.reduce_kit import Operands, counted, inputs, reduce_group

CANARY = np.float32(-123.25)
SCRATCH_BYTES = 1 << 19
ROOM: Any = {"scratch_bytes": SCRATCH_BYTES, "pool_bytes": 1 << 21, "channels": 16}


@dataclass
class Layer:
    """Random operands of all ranks, k of its own for each if ``ks`` says so, and a dst between canaries."""

    workspace: Workspace
    m: int
    n: int
    ks: Sequence[int]

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.m, self.n, *self.ks])
        self.values = [
            [to_bfloat16(rng.standard_normal((rows, k)).astype(np.float32)) for rows in (self.m, self.n)]
            for k in self.ks
        ]
        members = self.workspace.group.members
        self.a, self.b = (
            [self._give(rank, self.values[rank][which]) for rank in range(len(members))] for which in (0, 1)
        )
        self._memory = [
            self._give(rank, np.full(self._rows(rank) * self.n + 64, CANARY)) for rank in range(len(members))
        ]
        self.dst = [
            memory[32 : 32 + self._rows(rank) * self.n].view(np.float32, (self._rows(rank), self.n))
            for rank, memory in enumerate(self._memory)
        ]

    def _give(self, rank: int, data: NDArray[Any]) -> DeviceArray:
        member = self.workspace.group.member(rank)
        array = member.device.empty(data.shape, data.dtype)
        return array.copy_from(data, stream=self.workspace.stream(rank)) if data.size else array

    def _rows(self, rank: int) -> int:
        begin, end = rows_of(self.m, len(self.ks), rank)
        return end - begin

    def run(self, config: MatmulScatterConfig | None = None) -> None:
        """Queue it."""
        matmul_scatter(self.workspace, self.dst, self.a, self.b, config=config)

    def found(self) -> NDArray[np.float32]:
        """All rows; nothing around them is touched."""
        for memory in self._memory:
            whole = memory.numpy()
            assert (whole[:32] == CANARY).all() and (whole[-32:] == CANARY).all()
        return np.concatenate([part.numpy() for part in self.dst])

    def products(self) -> list[DeviceArray]:
        """Each rank's own C, by the kernel that does nothing else."""
        found = []
        for member in self.workspace.group.members:
            rank = member.rank
            found.append(member.device.empty((self.m, self.n), np.float32))
            stream = self.workspace.stream(rank)
            matmul(found[-1], self.a[rank], self.b[rank], config=MatmulConfig(2), stream=stream)
        return found

    def check(self) -> None:
        """The bits of the products' sum in order of rank. And near the true one: each of the k additions in a
        tensor core may cut off 2^-23 of the sum of |a b| (test_matmul.py), each of the N - 1 over the ranks
        rounds by 2^-24 of the terms so far; together less than (k + N) 2^-23 of it, to which (1 + 2^-23)^(k +
        N) adds nothing that half an addition would not cover."""
        products = self.products()
        self.workspace.group.wait(60)
        parts, found = [array.numpy().view(np.uint32) for array in products], self.found()
        np.testing.assert_array_equal(found.view(np.uint32), sum_in_order(parts, Element.F32))
        a, b = (
            np.concatenate([from_bfloat16(given[which]) for given in self.values], axis=1).astype(np.float64)
            for which in (0, 1)
        )
        bound = (sum(self.ks) + len(self.ks)) * 2.0**-23 * (np.abs(a) @ np.abs(b).T)
        assert (np.abs(found - a @ b.T) <= bound).all()


@pytest.mark.parametrize(
    ("ranks", "m", "n", "ks", "ctas", "stages", "schedule"),
    [
        (2, 130, 67, (40, 136), 1, 2, ("async-latest", 0)),
        (3, 2, 1, (8, 72, 16), 2, 3, ("producer-ahead", 0)),
    ],
    ids=["2-four-turns", "3-a-rank-without-rows-and-a-cta-without-tiles"],
)
def test_every_rank_gets_its_rows_with_the_bits_of_the_products_sum(
    ranks: int, m: int, n: int, ks: Sequence[int], ctas: int, stages: int, schedule: tuple[str, int]
) -> None:
    """Twice, with a two-shot in between, on one scratch memory."""
    with reduce_group(ranks, *schedule, **ROOM) as (group, workspace):
        layer = Layer(workspace, m, n, ks)
        config = MatmulScatterConfig(ctas=ctas, num_stages=stages)
        between = Operands(workspace, inputs(ranks, 50, Element.F32), Element.F32)
        layer.run(config)
        between.reduce("twoshot")
        layer.run(config)
        group.wait(60)
        between.check("twoshot")
        layer.check()


def unfused(layer: Layer) -> tuple[list[NDArray[np.float32]], list[Counters]]:
    """C to own memory, then a ReduceScatter of it: what it gives, and counts of both kernels."""
    group = layer.workspace.group
    products: list[DeviceArray] = []
    first = counted(layer.workspace, lambda: products.extend(layer.products()))
    dst = [member.device.empty((one.shape[0] * layer.n,), np.float32) for member, one in zip(
        group.members, layer.dst, strict=True)]  # fmt: skip
    src = [array.bytes_view() for array in products]
    second = counted(
        layer.workspace,
        lambda: reduce_scatter(layer.workspace, dst, src, dtype="float32", way="direct"),
    )
    for total, more in zip(first, second, strict=True):
        total += more
    return [array.numpy() for array in dst], first


def test_a_rank_moves_less_of_its_own_memory_than_product_and_reduce_scatter_do() -> None:
    """Unfused, C is written to own memory and read once more. The same rows travel, with the same bits.
    Besides data, own stores are an epoch per CTA; own loads poll words of 4 bytes as long as they must."""
    m, n, ranks = 128, 64, 2
    with reduce_group(ranks, **ROOM) as (_, workspace):
        layer = Layer(workspace, m, n, (72, 72))
        found = counted(workspace, lambda: layer.run(MatmulScatterConfig(ctas=1, num_stages=2)))
        apart, both = unfused(layer)
        np.testing.assert_array_equal(layer.found(), np.concatenate(apart).reshape(m, n))
    c_bytes, own_bytes = 4 * m * n, 4 * m * n // ranks
    for fused_one, unfused_one in zip(found, both, strict=True):
        sent, stored, loaded = (
            [f(one) for one in (fused_one, unfused_one)]
            for f in (
                lambda one: one.peer_store_bytes - one.peer_signal_bytes,
                lambda one: one.global_store_bytes - one.peer_store_bytes,
                lambda one: one.global_load_bytes,
            )
        )
        assert sent == [(ranks - 1) * own_bytes] * 2
        assert stored[0] == own_bytes + 4
        assert c_bytes + own_bytes < stored[1] <= c_bytes + own_bytes + 4 * 32
        assert (ranks - 1) * own_bytes < loaded[0] < ranks * own_bytes
        assert loaded[1] >= c_bytes + (ranks - 1) * own_bytes


def test_the_default_configuration_takes_what_scratch_memory_has_room_for() -> None:
    with reduce_group(2, **ROOM) as (_, workspace):
        one_cta = MatmulScatterConfig(ctas=1).scratch_for(2)
        assert one_cta == 2 * 2 * 64 * 64 * 4
        for nbytes, ctas in (
            (0, 1),
            (4 * 128 * 64, 1),
            (4 * 128 * 65, 2),
            (1 << 30, SCRATCH_BYTES // one_cta),
        ):
            assert fused.throughput_config(workspace, nbytes).ctas == ctas
        layer = Layer(workspace, 128, 70, (8, 8))
        layer.run()
        workspace.group.wait(60)
        layer.check()


def test_a_rank_whose_tiles_do_not_come_is_named_with_the_turn() -> None:
    with (
        pytest.raises(CollectiveTimeout, match=r"rank 0 waits for rank 1 at the terms of turn 1"),
        reduce_group(2, **ROOM) as (group, workspace),
    ):
        layer = Layer(workspace, 70, 8, (8, 8))
        member, config = group.members[0], MatmulScatterConfig(ctas=1)
        product, _ = fused._check(workspace, layer.dst, layer.a, layer.b, config)
        way = fused._KERNEL
        way.launch(member, product, config, way.prepare(member, product, config))
        group.wait(0.2)


def test_wrong_operands_and_configurations_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"num_stages must be 2 to 8 \(got 1\)"):
        MatmulScatterConfig(num_stages=1)
    with reduce_group(2, **ROOM) as (group, workspace):
        right = Layer(workspace, 5, 6, (8, 8))
        other_m, other_n = Layer(workspace, 7, 6, (8, 8)), Layer(workspace, 5, 4, (8, 8))
        odd_k = Layer(workspace, 5, 6, (12, 12))
        for dst, a, b, rule in (
            (right.dst[::-1], right.a, right.b, r"rank 0's dst must be an array of its device"),
            (right.dst[:1], right.a, right.b, r"dst has one array per rank of this process, 2 \(got 1\)"),
            ([right.dst[0], other_m.dst[1]], [right.a[0], other_m.a[1]], right.b,
             r"same m and n on every rank \(got 7 and 6 on rank 1, 5 and 6 on rank 0\)"),
            (other_m.dst, right.a, right.b,
             r"rank 0's a, b and dst .* \(got \(5, 8\), \(6, 8\) and \(4, 6\), 3 of 5 rows are its own\)"),
            (other_n.dst, right.a, right.b, r"rank 0's a, b and dst must have shapes"),
            (right.dst, right.a, [array.view(np.float16, array.shape) for array in right.b],
             r"rank 0's b must be a matrix of uint16 \(got float16"),
            (odd_k.dst, odd_k.a, odd_k.b, r"k must be a positive multiple of 8, .*\(got 12 on rank 0\); pad"),
        ):  # fmt: skip
            with pytest.raises(OperandError, match=rule):
                matmul_scatter(workspace, dst, a, b)
        with pytest.raises(ConfigError, match=r"524288 bytes of scratch memory \(got 589824 bytes needed by"):
            right.run(MatmulScatterConfig(ctas=9))
        inside = [
            workspace.scratch.array(rank).bytes_view(0, dst.nbytes).view(np.float32, dst.shape)
            for rank, dst in enumerate(right.dst)
        ]
        with pytest.raises(OperandError, match=r"rank 0's dst must lie outside the workspace's own memory"):
            matmul_scatter(workspace, inside, right.a, right.b)
        with Workspace(group, scratch_bytes=0, oneshot_bytes=0, channels=1, label="second") as second:
            pass
        with pytest.raises(GroupError, match="'second' was closed"):
            matmul_scatter(second, right.dst, right.a, right.b)
        right.run(MatmulScatterConfig(ctas=1, num_stages=2))
        group.wait(60)
        right.check()
