"""The Triton twin of the push: right under several schedules, and made of the instructions that it says."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernels.ipc.shards import make_shards
from kernels.ipc.signals import SignalLayout
from smfree.cuda import triton_unavailable
from smfree.cuda.compile_triton import compile_triton
from tests.kernels.ipc_kit import epochs, filled, opened_group, set_epochs, shard_bytes

pytestmark = pytest.mark.skipif(triton_unavailable() is not None, reason=str(triton_unavailable()))


@pytest.mark.parametrize("schedule", ["timed", "async-latest", "random"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_rank_has_every_shard(num_ranks: int, schedule: str, node: str) -> None:
    from kernels.ipc import push_triton

    counts = [64 * n for n in (20, 0, 3)][:num_ranks]
    config = push_triton.TritonPushConfig(ctas=2, threads=64, tile_bytes=512)
    with opened_group(num_ranks, schedule, 1, node=node) as group:
        set_epochs(group, -1)
        dst = group.symmetric(sum(counts), "dst")
        src = [filled(group, rank, shard_bytes(rank, count)) for rank, count in enumerate(counts)]
        shards = make_shards(group, dst, src, counts)
        kernels = [push_triton.prepare(member, shards, config) for member in group.members]
        for member, kernel in zip(group.members, kernels, strict=True):
            push_triton.launch(member, shards, config, kernel)
        group.wait(60)
        want = np.concatenate([shard_bytes(rank, count) for rank, count in enumerate(counts)])
        for member in group.members:
            np.testing.assert_array_equal(dst.array(member.rank).numpy(), want)
            assert epochs(group, member.rank)[:3] == [1, 1, 2**32 - 1]


def test_a_signal_is_an_atomic_and_a_wait_is_inline_ptx() -> None:
    """One release per peer and barrier; the shard is loaded once, in 16-byte vectors."""
    from kernels.ipc.push_triton import TritonPushConfig

    source = TritonPushConfig(threads=128, tile_bytes=2048).source(SignalLayout(4))
    ptx = compile_triton(source, (9, 0)).ptx
    barriers, peers, loops = 2, 3, 2  # a wait looks once before its loop
    assert len(re.findall(r"atom\.global\.sys\.release\.exch\.b32", ptx)) == barriers * peers
    assert len(re.findall(r"ld\.acquire\.sys\.global\.u32", ptx)) == barriers * peers * loops * 2
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 1
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 1 + peers
