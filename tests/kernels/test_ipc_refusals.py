"""What the kernels between GPUs refuse before anything is compiled or queued."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.ipc import push
from kernels.ipc.allgather import allgather
from kernels.ipc.bulk import BulkPushConfig, unavailable
from kernels.ipc.faults import FaultConfig, exchange
from kernels.ipc.flag_latency import FlagLatencyConfig, ping_pong
from kernels.ipc.group import Group
from kernels.ipc.multicast import MulticastConfig
from kernels.ipc.pull import PullConfig
from kernels.ipc.push import PushConfig
from kernels.ipc.shards import make_shards
from kernels.lsu.copy_triton import triton_unavailable
from smfree.cuda import Device, Path
from tests.kernels.ipc_kit import SLOTS, filled, opened_group

WRONG: list[tuple[type, dict[str, Any], str]] = [
    (PullConfig, {"ctas": 0}, "ctas must be at least 1 (got 0)"),
    (PushConfig, {"ctas": 1.5}, "ctas must be a whole number (got 1.5)"),
    (PushConfig, {"threads": 48}, "threads must be a multiple of 32"),
    (MulticastConfig, {"unroll": 9}, "unroll must be 1 to 8 (got 9)"),
    (
        BulkPushConfig,
        {"tile_bytes": 40},
        "tile_bytes must be a positive multiple of 16 (got 40)",
    ),
    (BulkPushConfig, {"num_stages": 0}, "num_stages must be 1 to 8 (got 0)"),
    (FlagLatencyConfig, {"data_bytes": 24}, "data_bytes must be a multiple of 16, or 0 (got 24)"),
    (FlagLatencyConfig, {"data_bytes": 16, "release": False}, "data in front of the flag needs release=True"),
    (FlagLatencyConfig, {"release": 1}, "release must be a bool (got 1)"),
    (FaultConfig, {"threads": 32}, "threads must be at least 64 (got 32)"),
    (FaultConfig, {"fault": "NONE"}, "fault must be a Fault (got NONE)"),
]


@pytest.mark.parametrize(("kind", "values", "said"), WRONG, ids=[f"{k.__name__}-{v}" for k, v, _ in WRONG])
def test_a_config_that_cannot_be(kind: type, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        kind(**values)


def test_more_ctas_than_slots_or_than_are_resident() -> None:
    """Case D24: before the launch, with both numbers."""
    with opened_group(2) as group:
        dst = group.symmetric(64, "dst")
        shards, member = make_shards(group, dst, None, None), group.members[0]
        with pytest.raises(ConfigError, match=rf"the group's signals \({SLOTS}\) \(got {SLOTS + 1} CTAs"):
            push.prepare(member, shards, PushConfig(ctas=SLOTS + 1))
    with opened_group(2, slots=4096) as group:
        shards = make_shards(group, group.symmetric(64, "dst"), None, None)
        with pytest.raises(ConfigError, match=r"264 are on 132 SMs with 1024 threads .* \(got 300\)"):
            push.prepare(group.members[0], shards, PushConfig(ctas=300, threads=1024, unroll=1))


def test_ranks_that_share_a_gpu_share_its_room() -> None:
    """Case D24: each alone would fit."""
    device = Device.open("emu:h100")
    with device, Group.local([device] * 2, pool_bytes=1 << 16, slots=264, several_per_gpu=True) as group:
        shards = make_shards(group, group.symmetric(64, "dst"), None, None)
        with pytest.raises(ConfigError, match=r"264 are on 132 SMs .* \(got 133 of each of 2 ranks on"):
            push.prepare(group.members[0], shards, PushConfig(ctas=133, threads=1024, unroll=1))
        push.prepare(group.members[0], shards, PushConfig(ctas=132, threads=1024, unroll=1))


def test_a_ring_above_the_shared_memory_of_a_cta() -> None:
    with opened_group(2) as group:
        shards = make_shards(group, group.symmetric(64, "dst"), None, None)
        with pytest.raises(ConfigError, match=r"at most 232448 bytes of shared memory .* 524288"):
            push.prepare(group.members[0], shards, BulkPushConfig(ctas=1, tile_bytes=65536, num_stages=8))


def test_gpus_without_a_tma_or_multicast_say_so() -> None:
    with opened_group(2, node="emu:a100") as group:
        assert "needs the TMA" in str(unavailable(group))
        dst = group.symmetric(64, "dst")
        for way in ("tma.push", "tma.pull", "multicast"):
            with pytest.raises(ConfigError, match=f"way '{way}' is not open to this group"):
                allgather(group, dst, way=way)


def test_flag_latency_checks_its_ranks_and_arrays() -> None:
    with opened_group(2) as group:
        results = {m.rank: m.device.empty(2, np.uint64) for m in group.members}
        landing, config = group.symmetric(64, "landing"), FlagLatencyConfig(data_bytes=64)

        def play(first: int = 0, second: int = 1, num_rounds: int = 3, **other: Any) -> None:
            given = {"results": results, "landing": landing, "config": config, **other}
            ping_pong(group, first=first, second=second, num_rounds=num_rounds, **given)

        with pytest.raises(ConfigError, match=r"first and second are two ranks \(got 1\)"):
            play(1, 1)
        with pytest.raises(ConfigError, match=r"second is a rank, 0 to 1 \(got 2\)"):
            play(0, 2)
        with pytest.raises(ConfigError, match="num_rounds is 1 to 1048575"):
            play(num_rounds=0)
        with pytest.raises(OperandError, match=r"landing must hold .* 128 bytes \(got 64\)"):
            play(config=FlagLatencyConfig(data_bytes=128))
        with pytest.raises(OperandError, match=r"results\[0\] must be 2 uint64"):
            play(results={0: filled(group, 0, np.zeros(16, np.uint8)), 1: results[1]})
    with opened_group(2, "min-pc") as group, pytest.raises(ConfigError, match="reads the clock"):
        results = {m.rank: m.device.empty(2, np.uint64) for m in group.members}
        landing = group.symmetric(64, "landing")
        ping_pong(group, results, landing, first=0, second=1, config=FlagLatencyConfig(), num_rounds=1)


def test_the_exchange_checks_its_arrays() -> None:
    with opened_group(2) as group:
        src = {m.rank: m.device.empty((3, 64), np.uint32) for m in group.members}
        out = {m.rank: m.device.empty((3, 2, 64), np.uint32) for m in group.members}
        with pytest.raises(OperandError, match=r"dst must hold 512 bytes \(got 256\)"):
            exchange(group, out, group.symmetric(256, "dst"), src, config=FaultConfig())
        with pytest.raises(OperandError, match=r"out\[0\] must be \(3, 2, 64\) of uint32"):
            exchange(group, src, group.symmetric(512, "dst"), src, config=FaultConfig())


@pytest.mark.skipif(triton_unavailable() is not None, reason=str(triton_unavailable()))
def test_the_triton_twin_moves_whole_groups_of_64_bytes_over_links_that_carry_atomics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kernels.ipc import push_triton

    with opened_group(2) as group:
        dst = group.symmetric(192, "dst")
        config = push_triton.TritonPushConfig(ctas=1)
        shards = make_shards(group, dst, None, None)
        with pytest.raises(OperandError, match=r"multiples of 64 bytes.*offset: 96"):
            push_triton.prepare(group.members[0], shards, config)
        monkeypatch.setattr(group, "path", Path.PCIE)
        with pytest.raises(ConfigError, match=r"signals are atomics.*PCIe.*use sm.push"):
            push_triton.prepare(group.members[0], shards, config)
        with pytest.raises(ConfigError, match="tile_bytes must be a power of two"):
            push_triton.TritonPushConfig(tile_bytes=3000)
