"""AllReduce by the switch: what its sums may be, what passes the links, where terms are loaded from. Its sums
among those of other ways: test_allreduce.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError
from kernels.ipc.symmetric import Symmetric
from kernels.reduce import allreduce
from kernels.reduce.elements import Element
from kernels.reduce.nvls import NVLS, NvlsConfig
from kernels.reduce.order import FLOAT32_SMALLEST_NORMAL, error_bound, sum_in_order, true_sum
from smfree.measure.nodes import Tally
from tests.kernels.group_kit import local_group
from tests.kernels.reduce_kit import CHANNELS, Operands, inputs, need, reduce_group

CONFIG = NvlsConfig(ctas=2, threads=64, unroll=2)


def normal(ranks: int, count: int, element: Element) -> list[Any]:
    """What ranks give, without subnormals and zeros: about those the ISA says nothing."""
    values = np.random.default_rng([ranks, count]).standard_normal((ranks, count)).astype(np.float32)
    return list(element.narrow(np.where(np.abs(values) < 1e-2, np.float32(1), values)))


@pytest.mark.parametrize(
    ("ranks", "schedule", "element"),
    [
        (2, "async-latest", Element.F32),
        (3, "random", Element.F16),
        (3, "min-pc", Element.BF16),
        (8, "timed", Element.BF16),
    ],
    ids=["2-f32", "3-f16", "3-bf16", "8-bf16"],
)
def test_the_emulated_switch_adds_in_order_of_rank_and_rounds_halves_once(
    ranks: int, schedule: str, element: Element
) -> None:
    """docs/emulator.md: members are added in the order in which they were bound. What is left and right of
    the vectors of 16 bytes is added by threads, in the same order."""
    with reduce_group(ranks, schedule, 1) as (group, workspace):
        operands = Operands(workspace, normal(ranks, 301, element), element, "in place", dst_shift=1)
        operands.reduce("nvls", CONFIG)
        group.wait(60)
        for rank in range(ranks):
            np.testing.assert_array_equal(operands.found(rank), sum_in_order(operands.data, element))


@pytest.mark.parametrize("element", Element)
def test_sums_are_those_of_float32_rounded_once_in_whatever_order(element: Element, node: str) -> None:
    """The bound of N - 1 additions in float32 and one rounding holds for every order of summation; ptxas
    makes LDGMC.E.ADD.F32x4.RN and LDGMC.E.F32ADD.BF16x8.RN of the loads, so they round to the nearest.
    Float32 subnormals may be flushed: 2^-126 for each term and each sum."""
    ranks = 3
    with reduce_group(ranks, node=node) as (group, workspace):
        need("nvls", group, element, node)
        data = inputs(ranks, 1000, element)
        operands = Operands(workspace, data, element, "in place")
        operands.reduce("nvls")
        group.wait(60)
        found = [operands.found(rank) for rank in range(ranks)]
    for bits in found:
        np.testing.assert_array_equal(bits, found[0])
    error = np.abs(element.widen(found[0]).astype(np.float64) - true_sum(data, element))
    flushed = (2 * ranks - 1) * FLOAT32_SMALLEST_NORMAL
    assert (error <= error_bound("twoshot", data, element) + flushed).all()


@pytest.mark.parametrize(
    ("src", "src_shift", "copied"),
    [("in place", 0, 0), ("symmetric", 0, 0), ("symmetric", 1, 1), ("apart", 0, 1)],
    ids=["in-place", "symmetric", "symmetric-but-not-alike", "apart"],
)
def test_terms_are_copied_only_if_the_switch_cannot_load_them(src: str, src_shift: int, copied: int) -> None:
    """Chunks are whole vectors, so that threads move nothing of their own but such copies, S per rank. The
    links carry S of terms out of each rank, and S / N of sums; the loads' answers and all sums come in."""
    element, ranks, count = Element.F32, 4, 4 * 48
    nbytes = 4 * count
    with reduce_group(ranks) as (group, workspace):
        operands = Operands(workspace, inputs(ranks, count, element), element, src, src_shift=src_shift)
        group.wait(60)
        before = Tally([member.device for member in group.members])
        operands.reduce("nvls", CONFIG)
        group.wait(60)
        counted = before.since()
    for counters in counted:
        flags = counters["peer_signal_bytes"]
        epochs = 4 * CONFIG.ctas
        stored = counters["global_store_bytes"] - flags - epochs
        assert stored == copied * nbytes
        assert counters["peer_load_bytes"] == counters["peer_store_bytes"] - flags == nbytes // ranks
        assert counters["nvlink_sent_bytes"] - flags == nbytes + nbytes // ranks
        assert counters["nvlink_received_bytes"] - flags == nbytes // ranks + nbytes
        assert counters["peer_signals"] == 2 * CONFIG.ctas * (ranks - 1)


def test_without_a_multicast_address_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_group(2, "emu:a100") as group:
        assert "has no multicast" in str(NVLS.unavailable(group))
    with local_group(1) as group:
        assert NVLS.unavailable(group) is None  # nothing is added
    with reduce_group(2) as (group, workspace):
        assert NVLS.unavailable(group) is None
        dst = group.symmetric(64, "late")
        monkeypatch.setattr(Symmetric, "multicast", lambda memory, rank: None)
        words = (
            r"dst needs a multicast address \(got Symmetric\('late', 64 bytes, 2 ranks\)\); use memory of the"
        )
        with pytest.raises(ConfigError, match=words):
            allreduce.allreduce(workspace, dst, dtype="float32", way="nvls")
        assert group.failed is None and not group.calls


def test_its_default_has_few_ctas() -> None:
    with reduce_group(2, channels=CHANNELS) as (_, workspace):
        found = [allreduce.throughput_config(workspace, "nvls", n).ctas for n in (0, 1 << 16, 1 << 26)]
        assert found == [1, 2, CHANNELS]
    with reduce_group(2, channels=64, scratch_bytes=0) as (_, workspace):
        assert allreduce.throughput_config(workspace, "nvls", 1 << 26).ctas == 16
