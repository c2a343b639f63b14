"""The Triton twins: the path that their docstrings claim, and public failures that can be tried here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kernels.lsu import copy_triton
from kernels.tma import tensor2d_triton
from smfree.cuda import Device, TritonSource, compile_triton

CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize(("tile_bytes", "threads"), [(4096, 64), (4096, 256), (16384, 256), (1024, 32)])
def test_pointer_twin_is_vectorised_and_never_touches_shared_memory(
    tile_bytes: int, threads: int, capability: tuple[int, int]
) -> None:
    config = copy_triton.TritonCopyConfig(tile_bytes, threads)
    image = compile_triton(config.source, capability)
    counts = image.sass_counts()
    loads = [opcode for opcode in counts if opcode.startswith("LDG") and ".U8" not in opcode]
    assert config.vector_bytes == 16
    assert loads and all(".128" in opcode or ".256" in opcode for opcode in loads), counts
    assert not {"LDS", "STS", "LDL", "STL", "LDGSTS", "UBLKCP"} & image.sass().stems().keys()
    assert image.metadata["shared"] == 0


def test_pointer_twin_says_when_its_loads_are_narrow() -> None:
    config = copy_triton.TritonCopyConfig(tile_bytes=128, threads=32)
    counts = compile_triton(config.source, (9, 0)).sass_counts()
    assert config.vector_bytes == 4
    assert "LDG.E" in counts and not any(".128" in opcode for opcode in counts)


@pytest.mark.parametrize("capability", CAPABILITIES[1:], ids=str)
@pytest.mark.parametrize("tile_bytes", [128, 4096, 65536])
def test_descriptor_twin_copies_by_tensor_copies_alone(tile_bytes: int, capability: tuple[int, int]) -> None:
    config = tensor2d_triton.TritonTensorConfig(tile_bytes)
    image = compile_triton(config.source, capability)
    stems = image.sass().stems()
    assert {"UTMALDG", "UTMASTG"} <= stems.keys()
    assert not {"LDS", "STS", "LDL", "STL"} & stems.keys(), "the store reads the buffer that the load wrote"
    assert image.metadata["shared"] == config.shared_bytes


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("tile_bytes", [256, 1024])
def test_small_descriptor_tiles_are_right_at_every_pipeline_depth(tile_bytes: int, num_stages: int) -> None:
    """Triton issue 7386: wrong addresses at num_stages > 2 with small tiles."""
    config = tensor2d_triton.TritonTensorConfig(tile_bytes, 32)
    source = config.source

    class Deeper(tensor2d_triton.TritonTensorConfig):
        @property
        def source(self) -> TritonSource:
            options = dict(source.options) | {"num_stages": num_stages}
            return TritonSource(
                source.fn,
                dict(source.signature),
                dict(source.constexprs),
                source.divisible_by_16,
                **options,
            )

    with Device.open("emu:h100") as device:
        data = np.random.default_rng(1).integers(0, 256, 300 * tile_bytes + 200, dtype=np.uint8)
        src, dst = device.asarray(data), device.asarray(np.zeros_like(data))
        tensor2d_triton.copy(dst, src, config=Deeper(tile_bytes, 32))
        np.testing.assert_array_equal(dst.numpy(), data)


def test_descriptor_stores_never_mismatch_in_50_runs() -> None:
    """Triton issue 6638: descriptor stores of a persistent kernel differ now and then."""
    data = np.random.default_rng(6).integers(0, 256, 12 * 1024 + 96, dtype=np.uint8)
    config = replace(tensor2d_triton.TritonTensorConfig(1024), threads=64)
    mismatches = 0
    for seed in range(50):
        with Device.open("emu:h100", schedule="random", seed=seed) as device:
            src, dst = device.asarray(data), device.asarray(np.zeros_like(data))
            tensor2d_triton.copy(dst, src, config=config)
            mismatches += int((dst.numpy() != data).sum())
    assert mismatches == 0
