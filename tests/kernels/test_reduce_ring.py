"""Rings: what the TMA adds to ring.sm, tiles and stages; configurations; what the compiler made of the steps.
Lengths, schedules and the rest: test_allreduce.py, test_reduce_scatter.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kernels.common import ConfigError
from kernels.reduce import allreduce, ring
from kernels.reduce.elements import Element
from kernels.reduce.ring import RingConfig
from kernels.reduce.ring_bulk import RING_BULK, RingBulkConfig
from kernels.reduce.workspace import Workspace
from smfree.cuda import compile_cuda
from tests.kernels.group_kit import local_group
from tests.kernels.reduce_kit import Operands, counted, inputs, need, reduce_group, small_config


@pytest.mark.parametrize(
    ("ranks", "dtype", "tile_bytes", "num_stages", "num_slots", "schedule", "shifts"),
    [
        (2, "float32", 128, 1, 2, ("async-latest", 0), (1,)),  # with one stage
        (
            3,
            "float16",
            48,
            2,
            3,
            ("random", 1),
            (0, 1),
        ),  # stages wrap inside a piece; some ranks are not alike
        (
            4,
            "bfloat16",
            4096,
            3,
            2,
            ("producer-ahead", 0),
            (0,),
        ),  # a tile is more than a piece; none is alike
    ],
    ids=["one-stage", "several-tiles", "tile-above-piece"],
)
def test_tiles_of_any_size_in_any_stages_have_the_bits_of_ring_sm(
    ranks: int, dtype: str, tile_bytes: int, num_stages: int, num_slots: int, schedule: tuple[str, int],
    shifts: tuple[int, ...], node: str,
) -> None:  # fmt: skip
    """Those of one oracle. Every rank's src lies at a shift of its own, so that threads and the TMA hand
    pieces to each other."""
    element = Element.of(dtype)
    data = inputs(ranks, 100 * ranks + 1, element)
    with reduce_group(ranks, *schedule, node=node) as (group, workspace):
        need("ring.tma", group, element, node)
        operands = Operands(workspace, data, element, dst_shift=1)
        src = []
        for member in group.members:
            shift = shifts[member.rank % len(shifts)]
            whole = member.device.empty(len(data[0]) + shift, element.bits)
            part = whole.bytes_view(shift * element.bytes, data[0].nbytes).view(element.bits)
            src.append(part.copy_from(data[member.rank], stream=workspace.stream(member.rank)))
        config = small_config(
            workspace, "ring.tma", element, piece_bytes=256, tile_bytes=tile_bytes, num_stages=num_stages,
            num_slots=num_slots,
        )  # fmt: skip
        allreduce.allreduce(workspace, operands.dst, src, dtype=element, way="ring.tma", config=config)
        group.wait(60)
        operands.check("ring.tma")


def test_the_tma_moves_every_byte_of_operands_that_are_alike_and_else_none() -> None:
    """Of 2 ranks, counted: a chunk from src to scratch memory; one from there and one from src; their sum to
    both dst."""
    element, chunk_bytes = Element.F32, 512
    data = inputs(2, 2 * chunk_bytes // element.bytes, element)
    with reduce_group(2) as (_, workspace):
        config = small_config(workspace, "ring.tma", element, piece_bytes=256, tile_bytes=128)
        for src_shift, copied in ((0, 6 * chunk_bytes), (1, 0)):
            operands = Operands(workspace, data, element, src_shift=src_shift, label=f"shift {src_shift}")
            for counters in counted(workspace, partial(operands.reduce, "ring.tma", config)):
                assert counters.bytes_async == copied
            operands.check("ring.tma")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RingConfig(num_slots=1), r"num_slots must be at least 2: .* \(got 1\); use 2"),
        (lambda: RingConfig(piece_bytes=100), r"piece_bytes must be a positive multiple of 128 \(got 100\)"),
        (lambda: RingConfig(piece_bytes=0), r"piece_bytes must be a positive multiple of 128 \(got 0\)"),
        (lambda: RingConfig(ctas=0), r"ctas must be at least 1 \(got 0\)"),
        (lambda: RingConfig(threads=48), r"threads must be a multiple of 32.* \(got 48\)"),
        (lambda: RingBulkConfig(tile_bytes=24), r"tile_bytes must be a positive multiple of 16 \(got 24\)"),
        (lambda: RingBulkConfig(num_stages=0), r"num_stages must be 1 to 8 \(got 0\)"),
        (lambda: RingBulkConfig(num_stages=2.5), r"num_stages must be a whole number \(got 2.5\)"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("way", "config", "said"),
    [
        ("ring.sm", RingConfig(ctas=9, piece_bytes=128), r"one of the workspace's 8 channels \(got 9 CTAs\)"),
        ("ring.sm", RingConfig(ctas=8, piece_bytes=2048), r"has 16384 bytes .* \(got 32768 bytes needed by"),
        ("ring.sm", RingBulkConfig(), r"config of way 'ring.sm' is a RingConfig \(got RingBulkConfig\)"),
        ("ring.tma", RingConfig(), r"config of way 'ring.tma' is a RingBulkConfig \(got RingConfig\)"),
        (
            "ring.tma",
            RingBulkConfig(ctas=1, piece_bytes=128, tile_bytes=16384, num_stages=8),
            r"a CTA has at most 232448 bytes of shared memory .* \(got 262144 for all stages\)",
        ),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_fit_is_refused(way: str, config: RingConfig, said: str) -> None:
    with reduce_group(2) as (group, workspace):
        dst = group.symmetric(64, "dst")
        with pytest.raises(ConfigError, match=said):
            allreduce.allreduce(workspace, dst, dtype="float32", way=way, config=config)


def test_without_a_tma_ring_tma_is_refused_and_ring_sm_is_not() -> None:
    with (
        local_group(2, "emu:a100") as group,
        Workspace(group, scratch_bytes=1 << 14, oneshot_bytes=0, channels=8) as workspace,
    ):
        reasons = allreduce.ways(group)
        assert reasons["ring.sm"] is None and "needs the TMA" in str(reasons["ring.tma"])
        dst = group.symmetric(64, "dst")
        with pytest.raises(ConfigError, match=r"way 'ring.tma' is not open to this group: needs the TMA"):
            allreduce.allreduce(workspace, dst, dtype="float32", way="ring.tma")


def test_what_a_configuration_says_of_its_barriers_and_memory() -> None:
    config = RingBulkConfig(ctas=4, piece_bytes=1024, num_slots=3, tile_bytes=512, num_stages=2)
    (full,) = config.barriers
    assert (full.name, full.arrivals, full.tx_bytes) == ("full", 1, 1024)
    assert (config.scratch_bytes, config.shared_bytes) == (4 * 3 * 1024, 2 * 2 * 512)
    assert config.bytes_in_flight_per_sm == 1024


def test_default_pieces_take_one_round_until_scratch_memory_is_full() -> None:
    """And are of few sizes, for each is a kernel."""
    with local_group(2, pool_bytes=10 << 20) as group, Workspace(group, channels=64) as workspace:
        sizes = set()
        for chunk in (0, 1, 127, 8192, 8193, 100_001, 64 * 8192, 64 * 8192 + 1, 3_000_000, 64 * 65536):
            config = ring.throughput_config(workspace, 2 * chunk)
            held = config.ctas * config.piece_bytes
            assert config.scratch_bytes <= workspace.scratch.nbytes and config.ctas <= 64
            assert chunk <= held or (config.ctas, config.piece_bytes) == (64, 65536)
            assert held - config.piece_bytes <= max(chunk + 128, 1)
            sizes.add(config.piece_bytes)
        assert len(sizes) <= 13
        many = ring.throughput_config(workspace, 1 << 30)
        assert (many.ctas, many.piece_bytes) == (64, 65536)
        bulk = RING_BULK.throughput_config(workspace, 1 << 20)
        same = ring.throughput_config(workspace, 1 << 20)
        assert (bulk.ctas, bulk.piece_bytes) == (same.ctas, same.piece_bytes)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [RingConfig, RingBulkConfig])
def test_a_step_has_one_membar_one_poll_and_the_fences_of_its_proxies(kind: type[RingConfig]) -> None:
    """The membar is for both words of a channel, and so is the poll. No register is spilled. Of 3 ranks a
    step has four forms, two of which add in shared memory; no emulated sum shows that a fence is missing."""
    with reduce_group(3) as (_, workspace):
        source = kind().source(workspace, Element.BF16, {"SCATTER_ONLY": 0})
    image = compile_cuda(source, "sm_90a")
    names = [one.opcode for one in image.sass().instructions]
    forms, adds = (0, 0) if kind is RingConfig else (4, 2)
    assert image.ptx.count("fence.proxy.async.global;") == forms
    assert image.ptx.count("fence.proxy.async.shared::cta;") == adds
    assert sum(name.startswith("MEMBAR") and "SYS" in name for name in names) == 1
    assert names.count("CCTL.IVALL") == 1 + forms  # the poll; a fence drops the L1, too
    assert not [name for name in names if name.startswith(("LDL", "STL"))]
