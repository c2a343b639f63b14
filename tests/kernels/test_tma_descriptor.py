"""Many matrices in one launch, through tensor maps in device memory: made there, or by the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.tma import descriptor
from kernels.tma.descriptor import DescriptorConfig, Maps
from smfree.cuda import Device
from tests.kernels.pairwise import Row, opened
from tests.kernels.tma_kit import CTAS, SIZES, extent, faults, filled, mutated, random_array, same_bits, sweep

CONFIG = DescriptorConfig(box_rows=8, box_cols=16, num_stages=2, max_ctas=2)
SHAPES = [(8, 16), (1, 4), (19, 40), (7, 16), (33, 4), (8, 36), (25, 64)]
every_maker = pytest.mark.parametrize("maps", list(Maps), ids=[maps.name for maps in Maps])


def check(device: Device, config: DescriptorConfig, shapes: Any = SHAPES, dtype: Any = np.uint32) -> None:
    data = [random_array(shape, dtype, seed) for seed, shape in enumerate(shapes)]
    pairs = [(filled(device, matrix.shape, dtype), device.asarray(matrix)) for matrix in data]
    groups = descriptor.prepare(pairs, config=config)
    descriptor.copy(groups)
    device.synchronize()
    for (dst, _), matrix in zip(pairs, data, strict=True):
        same_bits(dst.numpy(), matrix)


@every_maker
@pytest.mark.parametrize("dtype", [np.uint32, np.float32])
def test_matrices_of_different_shapes_in_one_launch(maps: Maps, dtype: Any, tma_device: Device) -> None:
    check(tma_device, replace(CONFIG, maps=maps), dtype=dtype)
    check(tma_device, replace(CONFIG, maps=maps, max_ctas=None), SHAPES[:3])


@every_maker
def test_groups_may_be_copied_again(maps: Maps, tma_device: Device) -> None:
    data = [random_array(shape, np.uint32, 1) for shape in SHAPES]
    pairs = [(filled(tma_device, m.shape, np.uint32), tma_device.asarray(m)) for m in data]
    groups = descriptor.prepare(pairs, config=replace(CONFIG, maps=maps))
    descriptor.copy(groups)
    for dst, src in pairs:
        dst.fill(0)
        src.copy_from(src.numpy() + 1)
    descriptor.copy(groups)
    tma_device.synchronize()
    for (dst, _), matrix in zip(pairs, data, strict=True):
        same_bits(dst.numpy(), matrix + 1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    sweep(metafunc, num_stages=range(1, 9), size=SIZES, maps=list(Maps), num_groups=(1, 4))


def test_every_combination(row: Row) -> None:
    """Two CTAs edit their maps again for every group; their rings wrap within and across groups."""
    stages = row["num_stages"]
    shapes = [(extent(row["size"], 8, stages), 12), *SHAPES][: row["num_groups"]]
    with opened(row) as device:
        check(device, replace(CONFIG, maps=row["maps"], num_stages=stages, max_ctas=CTAS), shapes)


@pytest.mark.parametrize("schedule", ["timed", "min-pc", "async-latest"])
def test_b17_b18_a_map_rebuilt_while_copies_use_it(schedule: str) -> None:
    """Without the wait after a group, the next group's map takes the place of one that stores still use."""
    config = replace(CONFIG, max_ctas=1)
    broken = mutated(
        config, "cp_async_bulk_wait_group_read<0>();\n    }\n    __syncwarp();", "}\n    __syncwarp();"
    )
    words = (
        "descriptor modified while 1 copies in flight still use it",
        "cp.async.bulk.tensor store of 512 bytes",
        "wait until they have read it",
        "tensormap.cp_fenceproxy",
        "descriptor.cu",
    )
    with faults(*words), Device.open("emu:h100", schedule=schedule) as device:
        check(device, broken)
    with Device.open("emu:h100", schedule=schedule) as device:
        check(device, config)


@pytest.mark.parametrize(
    ("maps", "line"),
    [
        (Maps.FROM_DEVICE, "if constexpr (MAPS == FROM_DEVICE) fence_proxy_tensormap_acquire(map);"),
        (Maps.FROM_HOST, "else fence_proxy_tensormap_acquire_sys(map);"),
    ],
)
def test_a_map_used_without_the_acquire_is_reported(maps: Maps, line: str) -> None:
    """The twins, with the fences, are the tests above."""
    broken = mutated(replace(CONFIG, maps=maps), line, f"{line.split('fence')[0]};")
    words = (
        "no thread of CTA 0 has acquired it yet",
        "fence.proxy.tensormap::generic.acquire",
        "descriptor.cu",
    )
    with faults(*words), Device.open("emu:h100") as device:
        check(device, broken)


def test_the_tiles_do_not_go_through_registers() -> None:
    """Threads load the table of groups and store the maps, as many bytes for larger matrices as for small."""
    through_registers = []
    for scale in (1, 4):
        shapes = [(rows * scale, cols) for rows, cols in SHAPES]
        with Device.open("emu:h100") as device:
            check(device, CONFIG, shapes)
            counters = device.emulator.last_launch.counters
        tiles = sum(-(-rows // 8) * -(-cols // 16) for rows, cols in shapes)
        assert counters.tma_requests == 2 * tiles
        through_registers.append(counters.bytes_through_registers)
    assert through_registers[0] == through_registers[1]


def test_no_matrices_launch_nothing(tma_device: Device) -> None:
    empty = tma_device.empty((0, 16), np.uint32), tma_device.empty((0, 16), np.uint32)
    assert descriptor.copy(descriptor.prepare([], config=CONFIG)).kernel is None
    assert descriptor.copy(descriptor.prepare([empty], config=CONFIG)).kernel is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"maps": "host"}, "maps is a Maps .got host"),
        ({"element_bytes": 8}, "element_bytes is 4 .got 8"),
        ({"box_cols": 2}, "a box's row is a multiple of 16 bytes .got 2 x 4 bytes"),
        ({"num_stages": 9}, "num_stages must be 1 to 8"),
    ],
)
def test_wrong_configurations_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def test_wrong_operands_are_refused(device: Device) -> None:
    good = device.empty((8, 16), np.uint32), device.asarray(np.zeros((8, 16), np.uint32))
    if not device.capabilities.has_tma:
        with pytest.raises(ConfigError, match="needs the TMA"):
            descriptor.prepare([good], config=CONFIG)
        return
    with pytest.raises(OperandError, match=r"src has 2 dimensions, .* rows of a multiple of 16 bytes"):
        descriptor.prepare(
            [good, (device.empty((8, 3), np.uint32), device.empty((8, 3), np.uint32))], config=CONFIG
        )
    with pytest.raises(OperandError, match=r"dst has src's shape \(8, 16\) \(got \(16, 8\)\)"):
        descriptor.prepare([(good[0].view(np.uint32, (16, 8)), good[1])], config=CONFIG)
    with pytest.raises(OperandError, match="must not overlap"):
        descriptor.prepare([(good[1], good[1])], config=CONFIG)
    with Device.open(device.spec) as other:
        elsewhere = other.empty((8, 16), np.uint32), other.asarray(np.zeros((8, 16), np.uint32))
        with pytest.raises(OperandError, match="all matrices of one launch are on one device"):
            descriptor.prepare([good, elsewhere], config=CONFIG)
