"""Wrong input is refused by name before anything is compiled or launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kernels.chain import Leg, TilePool
from kernels.engine import ENGINES, ConfigError, OperandError, engine
from kernels.lsu.chain_async import AsyncChainConfig
from kernels.lsu.copy import LsuCopyConfig
from kernels.lsu.copy_async import AsyncCopyConfig, CacheOperator
from kernels.lsu.copy_triton import TritonCopyConfig
from kernels.tma.bulk import BulkConfig
from kernels.tma.tensor2d import Tensor2dConfig
from kernels.tma.tensor2d_triton import TritonTensorConfig
from smfree.cuda import Device, Swizzle

ALL_CONFIGS: dict[str, Callable[..., Any]] = {
    "lsu": LsuCopyConfig,
    "cp.async": AsyncCopyConfig,
    "tma.bulk": BulkConfig,
    "tma.tensor": Tensor2dConfig,
    "triton.pointer": TritonCopyConfig,
    "triton.descriptor": TritonTensorConfig,
}
STAGED = ["cp.async", "tma.bulk", "tma.tensor"]
WRONG_CONFIGS = [
    (LsuCopyConfig, {"vector_bytes": 12}, r"vector_bytes must be 4, 8, 16 or 32 \(got 12\)"),
    (LsuCopyConfig, {"vector_bytes": 32, "tile_bytes": 4112}, r"multiple of 32 \(got 4112\)"),
    (LsuCopyConfig, {"unroll": 0}, r"unroll must be 1 to 8 \(got 0\)"),
    (LsuCopyConfig, {"ctas_per_sm": 0}, r"ctas_per_sm must be at least 1 \(got 0\)"),
    (AsyncCopyConfig, {"vector_bytes": 8}, r"cp.async.cg copies 16 bytes \(got 8\); use CacheOperator.CA"),
    (AsyncCopyConfig, {"vector_bytes": 2, "cache": CacheOperator.CA}, r"4, 8 or 16 \(got 2\)"),
    (Tensor2dConfig, {"row_bytes": 24}, r"row_bytes must be a multiple of 16, at most 1024 .*\(got 24\)"),
    (Tensor2dConfig, {"row_bytes": 128, "swizzle": Swizzle.B64}, r"at most 64 under swizzle B64 \(got 128\)"),
    (Tensor2dConfig, {"row_bytes": 16, "tile_bytes": 8192}, r"at most 256 rows \(got 512 of 16 bytes\)"),
    (Tensor2dConfig, {"tile_bytes": 65536, "swizzle": Swizzle.B128}, r"at most 256 rows .*65536"),
    (Tensor2dConfig, {"swizzle": Swizzle.B128_ATOM_64B}, r"swizzle must be one of NONE, B32, B64, B128"),
    (TritonCopyConfig, {"tile_bytes": 3072}, r"tile_bytes must be a power of two for Triton \(got 3072\)"),
    (TritonCopyConfig, {"tile_bytes": 65536, "threads": 32}, r"at most 128 words .*\(got 512\)"),
    (TritonTensorConfig, {"tile_bytes": 64}, r"multiple of 128 \(got 64\)"),
    (AsyncChainConfig, {"tile_bytes": 4096, "leg": Leg.STORE}, r"cp.async only loads"),
]


@pytest.mark.parametrize("tile_bytes", [0, -16, 8, 1000, 4097])
@pytest.mark.parametrize("name", list(ALL_CONFIGS))
def test_a_tile_that_is_no_multiple_of_16_is_refused(name: str, tile_bytes: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"tile_bytes must be a positive multiple of .*\(got {tile_bytes}\); use"
    ):
        ALL_CONFIGS[name](tile_bytes=tile_bytes)


@pytest.mark.parametrize("stages", [0, 9, -1])
@pytest.mark.parametrize("name", STAGED)
def test_stage_counts_outside_1_to_8_are_refused(name: str, stages: int) -> None:
    with pytest.raises(ConfigError, match=rf"num_stages must be 1 to 8 \(got {stages}\)"):
        ALL_CONFIGS[name](num_stages=stages)


@pytest.mark.parametrize("threads", [0, 33, 2048])
@pytest.mark.parametrize("name", list(ALL_CONFIGS))
def test_threads_that_are_no_whole_warps_are_refused(name: str, threads: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"threads must be a multiple of 32, at most 1024 \(got {threads}\)"
    ):
        ALL_CONFIGS[name](threads=threads)


@pytest.mark.parametrize(("config", "fields", "message"), WRONG_CONFIGS)
def test_wrong_combinations_are_refused(config: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**fields)


def usable(name: str, device: Device) -> tuple[Any, Any]:
    reason = ENGINES[name].unavailable(device.capabilities)
    if reason is not None:
        pytest.skip(reason)
    return ENGINES[name], ALL_CONFIGS[name](tile_bytes=2048)


@pytest.mark.parametrize("name", STAGED)
def test_stages_above_the_shared_memory_are_refused(name: str, device: Device) -> None:
    found, _ = usable(name, device)
    config = ALL_CONFIGS[name](tile_bytes=65536, num_stages=4)
    array = device.empty(1 << 20)
    with pytest.raises(
        ConfigError, match=r"at most \d+ bytes of shared memory .*use a smaller tile or fewer stages"
    ):
        found.copy(array, device.empty(1 << 20), config=config)


def test_a_tile_above_the_shared_memory_is_refused(device: Device) -> None:
    array = device.empty(1 << 20)
    with pytest.raises(
        ConfigError, match=r"at most \d+ bytes of shared memory on .*\(got 262144 for all stages\)"
    ):
        ENGINES["lsu"].copy(array, device.empty(1 << 20), config=LsuCopyConfig(tile_bytes=262144))
    with pytest.raises(ConfigError, match=r"must fit a CTA's shared memory"):
        ENGINES["cp.async"].throughput_config(device.capabilities, 262144)


@pytest.mark.parametrize("offset", [1, 4, 8])
@pytest.mark.parametrize("name", list(ALL_CONFIGS))
def test_a_misaligned_view_is_refused_with_its_address_and_a_remedy(
    name: str, offset: int, device: Device
) -> None:
    found, config = usable(name, device)
    whole, other = device.empty(4096), device.empty(4096)
    view, straight = whole.bytes_view(offset, 1024), other.bytes_view(0, 1024)
    message = rf"must be 16-byte aligned for .* \(got address ending in {offset:#x}\); offset the view by"
    with pytest.raises(OperandError, match="src " + message):
        found.copy(straight, view, config=config)
    with pytest.raises(OperandError, match="dst " + message):
        found.copy(view, straight, config=config)


def test_the_remedy_for_a_misaligned_view_counts_elements(device: Device) -> None:
    floats = device.empty(1024, np.float32)
    with pytest.raises(
        OperandError, match=r"got address ending in 0x4\); offset the view by a multiple of 4 elements"
    ):
        ENGINES["lsu"].copy(device.empty(1023, np.float32), floats[1:], config=LsuCopyConfig())


@pytest.mark.parametrize("name", list(ALL_CONFIGS))
def test_arrays_that_do_not_match_are_refused(name: str, device: Device) -> None:
    found, config = usable(name, device)
    src = device.empty(512, np.float32)
    with pytest.raises(OperandError, match=r"one dtype \(got int32 and float32\)"):
        found.copy(device.empty(512, np.int32), src, config=config)
    with pytest.raises(OperandError, match=r"same size \(got 2044 and 2048 bytes\)"):
        found.copy(device.empty(511, np.float32), src, config=config)
    with pytest.raises(OperandError, match=r"dst must be a DeviceArray \(got ndarray\)"):
        found.copy(np.empty(512, np.float32), src, config=config)
    with pytest.raises(OperandError, match=r"must not overlap \(they share 1984 bytes\)"):
        found.copy(src.bytes_view(0, 2000), src.bytes_view(16, 2000), config=config)


@pytest.mark.parametrize("name", list(ALL_CONFIGS))
def test_arrays_of_two_devices_are_refused(name: str, device: Device) -> None:
    found, config = usable(name, device)
    with Device.open("emu:h100") as other, pytest.raises(OperandError, match=r"must be on one device"):
        found.copy(other.empty(64), device.empty(64), config=config)


@pytest.mark.parametrize("name", ["tma.bulk", "tma.tensor", "triton.descriptor"])
def test_the_tma_is_refused_where_there_is_none(name: str) -> None:
    with Device.open("emu:a100") as device:
        reason = r"needs the TMA \(compute capability 9.0 or higher\); .*A100.* has 8.0"
        with pytest.raises(ConfigError, match=reason):
            ENGINES[name].throughput_config(device.capabilities, 4096)
        with pytest.raises(ConfigError, match=reason):
            ENGINES[name].copy(device.empty(64), device.empty(64), config=ALL_CONFIGS[name]())
        for leg in ENGINES[name].legs:
            with pytest.raises(ConfigError, match=reason):
                ENGINES[name].latency_config(device.capabilities, 4096, 128, leg)


def test_wide_vectors_are_refused_before_compute_capability_10() -> None:
    with Device.open("emu:h100") as device:
        array, other = device.empty(4096), device.empty(4096)
        with pytest.raises(ConfigError, match=r"32-byte vectors need compute capability 10.0 \(got 9.0\)"):
            ENGINES["lsu"].copy(array, other, config=LsuCopyConfig(vector_bytes=32))


def test_a_descriptor_needs_a_row() -> None:
    with (
        Device.open("emu:h100") as device,
        pytest.raises(OperandError, match=r"one row of 128 bytes \(got 100"),
    ):
        ENGINES["triton.descriptor"].copy(device.empty(100), device.empty(100), config=TritonTensorConfig())


def test_chains_refuse_what_they_cannot_walk(device: Device) -> None:
    lsu = ENGINES["lsu"]
    config = lsu.latency_config(device.capabilities, 1024, 64, Leg.COPY)
    data = TilePool.random(4, 1024, seed=0).data.reshape(-1)
    pool, dst, result = device.asarray(data), device.empty(data.size), device.empty(3, np.uint64)
    with pytest.raises(OperandError, match=r"leg copy writes dst \(got None\)"):
        lsu.chain(None, pool, result, config=config, num_steps=8)
    with pytest.raises(OperandError, match=r"whole tiles of 1024 bytes \(got 1000 bytes\)"):
        lsu.chain(dst, pool[:1000], result, config=config, num_steps=8)
    with pytest.raises(OperandError, match=r"result must be 3 uint64"):
        lsu.chain(dst, pool, device.empty(3, np.float32), config=config, num_steps=8)
    with pytest.raises(ConfigError, match=r"num_steps must be 1 to .*\(got 0\)"):
        lsu.chain(dst, pool, result, config=config, num_steps=0)
    with pytest.raises(ConfigError, match=r"shared memory .*use a smaller tile"):
        huge = replace(config, tile_bytes=131072)
        lsu.chain(device.empty(131072), device.empty(131072), result, config=huge, num_steps=8)


def test_engines_say_which_legs_and_names_they_know() -> None:
    with Device.open("emu:h100") as device:
        with pytest.raises(ConfigError, match=r"cp.async has latency legs: load, copy \(got store\)"):
            ENGINES["cp.async"].latency_config(device.capabilities, 1024, 64, Leg.STORE)
        with pytest.raises(ConfigError, match=r"triton.pointer has latency legs: none"):
            ENGINES["triton.pointer"].latency_config(device.capabilities, 1024, 64, Leg.LOAD)
    with pytest.raises(KeyError, match=r"no engine 'dma'; there are lsu, cp.async"):
        engine("dma")


@pytest.mark.parametrize("value", [1024.0, "1024", None, True])
@pytest.mark.parametrize(
    ("name", "field"),
    [(name, field) for name in ALL_CONFIGS for field in ("tile_bytes", "threads", "ctas_per_sm")]
    + [(name, "num_stages") for name in STAGED],
)
def test_a_count_that_is_no_whole_number_is_refused(name: str, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{field} must be a whole number \(got {value!r}\)"):
        ALL_CONFIGS[name](**{field: value})


@pytest.mark.parametrize("name", ["lsu", "cp.async", "tma.bulk", "tma.tensor"])
def test_numpy_integers_are_whole_numbers(name: str, device: Device) -> None:
    config = ALL_CONFIGS[name](tile_bytes=np.int64(1024), threads=np.int32(32))
    src = device.asarray(np.arange(3000, dtype=np.uint8))
    dst = device.empty(3000)
    _needs(name, device)
    engine(name).copy(dst, src, config=config)
    assert np.array_equal(dst.numpy(), src.numpy())


@pytest.mark.parametrize("wrong", [np.zeros(4096, np.uint8), None, 5])
@pytest.mark.parametrize("name", list(ALL_CONFIGS))
def test_an_operand_that_is_no_device_array_is_refused(name: str, wrong: object, device: Device) -> None:
    good, config = device.empty(4096), ALL_CONFIGS[name]()
    with pytest.raises(OperandError, match=rf"src must be a DeviceArray \(got {type(wrong).__name__}\)"):
        engine(name).copy(good, wrong, config=config)  # type: ignore[arg-type]
    with pytest.raises(OperandError, match=rf"dst must be a DeviceArray \(got {type(wrong).__name__}\)"):
        engine(name).copy(wrong, good, config=config)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list(ALL_CONFIGS))
def test_the_configuration_of_another_engine_is_refused(name: str, device: Device) -> None:
    """A configuration names its kernel, so another engine would be measured under this one's name."""
    other = "lsu" if name != "lsu" else "tma.bulk"
    dst, src = device.empty(4096), device.asarray(np.zeros(4096, np.uint8))
    with pytest.raises(
        ConfigError, match=rf"{ALL_CONFIGS[name].__name__} \(got {ALL_CONFIGS[other].__name__}"
    ):
        engine(name).copy(dst, src, config=ALL_CONFIGS[other]())


@pytest.mark.parametrize("name", ["lsu", "cp.async", "tma.bulk", "tma.tensor"])
def test_a_chain_over_no_device_array_is_refused(name: str, device: Device) -> None:
    _needs(name, device)
    config = engine(name).latency_config(device.capabilities, 1024, 32)
    result = device.empty(3, np.uint64)
    with pytest.raises(OperandError, match=r"pool must be a DeviceArray \(got NoneType\)"):
        engine(name).chain(None, None, result, config=config, num_steps=8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_steps must be a whole number"):
        engine(name).chain(
            None,
            device.asarray(np.zeros(4096, np.uint8)),
            result,
            config=config,
            num_steps=1.5,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize("wanted", [0, -4096])
@pytest.mark.parametrize("name", list(ALL_CONFIGS))
def test_bytes_in_flight_are_positive(name: str, wanted: int, device: Device) -> None:
    with pytest.raises(ConfigError, match=rf"bytes_in_flight_per_sm must be positive \(got {wanted}\)"):
        engine(name).throughput_config(device.capabilities, 4096, bytes_in_flight_per_sm=wanted)


@pytest.mark.parametrize("name", ["lsu", "cp.async", "tma.bulk", "tma.tensor"])
def test_a_leg_may_be_named_by_its_string(name: str, device: Device) -> None:
    """And is the enum afterwards, whose name the kernel is compiled with."""
    _needs(name, device)
    chains = ENGINES[name].chains
    config = chains.latency_config(device.capabilities, 1024, 32, "copy")
    assert config.leg is Leg.COPY and dict(config.source.defines)["LEG"] == "COPY"
    with pytest.raises(ConfigError, match=r"leg must be one of load, store, copy \(got walk\)"):
        chains.latency_config(device.capabilities, 1024, 32, "walk")


def test_the_pointer_twin_names_the_tile_that_is_no_power_of_two(device: Device) -> None:
    with pytest.raises(ConfigError, match=r"tile_bytes must be a power of two for Triton \(got 3072\)"):
        engine("triton.pointer").throughput_config(device.capabilities, 3072)


def _needs(name: str, device: Device) -> None:
    reason = engine(name).unavailable(device.capabilities)
    if reason is not None:
        pytest.skip(reason)
