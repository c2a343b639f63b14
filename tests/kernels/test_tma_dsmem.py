"""Tiles passed from CTA to CTA of a cluster by three engines: the same bytes, other costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.tma import dsmem
from kernels.tma.dsmem import DsmemConfig, Path
from smfree.cuda import Device
from tests.kernels.pairwise import Row, opened
from tests.kernels.tma_kit import faults, filled, mutated, random_array, same_bits, sweep

CONFIG = DsmemConfig(tile_bytes=1024, cluster=4, threads=64)
every_path = pytest.mark.parametrize("path", list(Path), ids=[path.name for path in Path])


def check(device: Device, config: DsmemConfig, num_groups: int, num_steps: int, seed: int = 0) -> None:
    shape = (num_groups, config.cluster, config.tile_bytes // 4)
    data = random_array(shape, np.uint32, seed)
    src, dst = device.asarray(data), filled(device, shape, np.uint32)
    dsmem.rotate(dst, src, config=config, num_steps=num_steps)
    device.synchronize()
    same_bits(dst.numpy(), np.roll(data, num_steps, axis=1))


@every_path
@pytest.mark.parametrize("tile_bytes", [128, 640, 2048])
@pytest.mark.parametrize("threads", [32, 96])
def test_tiles_smaller_and_larger_than_the_threads(
    path: Path, tile_bytes: int, threads: int, tma_device: Device
) -> None:
    check(tma_device, replace(CONFIG, path=path, tile_bytes=tile_bytes, threads=threads), 2, 3)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    axes: dict[str, Any] = {"path": list(Path), "cluster": (2, 3, 8)}
    sweep(metafunc, num_groups=(0, 1, 5), num_steps=(0, 1, 4), **axes)


def test_every_combination(row: Row) -> None:
    """One cluster takes all groups of tiles: the buffers and barriers are used again."""
    cluster = row["cluster"]
    config = replace(CONFIG, path=row["path"], cluster=cluster, max_ctas=cluster)
    with opened(row) as device:
        check(device, config, row["num_groups"], row["num_steps"])


def test_bytes_go_the_way_that_the_path_says() -> None:
    """Two steps of a tile in each of 4 CTAs; the first load and the last store are always bulk copies."""
    tiles, steps = 4, 2
    moved = tiles * steps * CONFIG.tile_bytes
    requests = moved // (32 * 16)
    for path in Path:
        with Device.open("emu:h100") as device:
            check(device, replace(CONFIG, path=path), 1, steps)
            seen = device.emulator.last_launch.counters
        pull, push, bulk = (path is one for one in (Path.PULL, Path.PUSH, Path.BULK))
        assert (seen.cluster_load_requests, seen.cluster_load_bytes) == (requests * pull, moved * pull)
        assert (seen.shared_load_bytes, seen.shared_store_bytes) == (moved * push, moved * pull)
        assert seen.cluster_async_bytes == moved * (push or bulk)
        assert seen.tma_requests == tiles * (2 + steps * bulk)
        assert seen.bytes_async == 2 * tiles * CONFIG.tile_bytes and seen.bytes_through_registers == 0


STEP = "      barrier_cluster();\n      if constexpr (PATH == PULL)"
WAIT = "wait_parity_cluster(landed_at(to), phases >> to & 1);"
BROKEN = {
    "PULL without the barrier of a step": (
        Path.PULL, STEP, "      if constexpr (PATH == PULL)",
        ("CTA 0 touches the shared memory of CTA 1 before", "it has started", "ld.shared::cluster"),
    ),
    "PUSH without the barrier of a step": (
        Path.PUSH, STEP, "      if constexpr (PATH == PULL)",
        ("CTA 0 touches the shared memory of CTA 1 before", "it has started", "st.async"),
    ),
    "PUSH without the wait for what was sent": (
        Path.PUSH, WAIT, "",
        ("the destination of the st.async of 16 bytes", "issued by CTA 1", "not complete"),
    ),
    "BULK without the wait for what was sent": (
        Path.BULK, WAIT, "",
        ("copy to another CTA reads", "destination of the cp.async.bulk copy to another CTA of 1024 bytes"),
    ),
    "BULK to the CTA itself": (
        Path.BULK, "next = (rank + 1) % CLUSTER", "next = rank",
        ("must go to another CTA", "the destination is in the executing one (CTA 0)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_mistake_between_the_ctas_is_reported(name: str) -> None:
    """The twin is the kernel as it is."""
    path, line, replacement, words = BROKEN[name]
    config = replace(CONFIG, path=path, cluster=2)
    with faults(*words, "dsmem.cu"), Device.open("emu:h100") as device:
        check(device, mutated(config, line, replacement), 2, 3)
    with Device.open("emu:h100") as device:
        check(device, config, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "st.async"}, "path is a Path"),
        ({"tile_bytes": 64}, "positive multiple of 128 .got 64"),
        ({"cluster": 1}, "cluster is 2 to 8 CTAs .got 1"),
        ({"cluster": 9}, "cluster is 2 to 8 CTAs .got 9"),
        ({"threads": 48}, "threads must be a multiple of 32"),
        ({"max_ctas": 3}, "max_ctas holds a whole cluster of 4 .got 3"),
    ],
)
def test_wrong_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def test_wrong_operands_are_refused(device: Device) -> None:
    shape = (2, 4, 256)
    src, dst = device.asarray(np.zeros(shape, np.uint32)), device.empty(shape, np.uint32)
    if not device.capabilities.has_tma:
        with pytest.raises(ConfigError, match="needs the TMA"):
            dsmem.rotate(dst, src, config=CONFIG, num_steps=1)
        return
    with pytest.raises(OperandError, match=r"src is \(groups, 4, n\) with n elements of 1024 bytes in all"):
        dsmem.rotate(dst.view(np.uint32), src.view(np.uint32), config=CONFIG, num_steps=1)
    with pytest.raises(OperandError, match="dst and src must have the same size"):
        dsmem.rotate(dst[:1], src, config=CONFIG, num_steps=1)
    with pytest.raises(OperandError, match="must not overlap"):
        dsmem.rotate(src, src, config=CONFIG, num_steps=1)
    with pytest.raises(ConfigError, match=r"num_steps is 0 to 2\^32 - 1 \(got -1\)"):
        dsmem.rotate(dst, src, config=CONFIG, num_steps=-1)
    with pytest.raises(ConfigError, match=r"shared memory .*use a smaller tile"):
        huge = DsmemConfig(tile_bytes=131072, cluster=2)
        wide = device.empty((1, 2, 131072)), device.empty((1, 2, 131072))
        dsmem.rotate(*wide, config=huge, num_steps=1)
