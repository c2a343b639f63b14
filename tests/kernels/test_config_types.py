"""Numbers and flags that are none are told by name; narrow numpy integers are taken as what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.lsu.gather import GatherConfig, strided
from kernels.lsu.pad_async import PadConfig, pad
from kernels.mbarrier.axpy_triton import TritonAxpyConfig
from kernels.mbarrier.cluster import ClusterConfig
from kernels.mbarrier.pingpong import PingpongConfig
from kernels.mbarrier.ring import RingConfig, axpy
from kernels.mbarrier.specialised import SpecialisedConfig
from kernels.mbarrier.specialised import axpy as specialised_axpy
from kernels.tma.dsmem import DsmemConfig
from kernels.tma.multicast_bulk import MulticastBulkConfig
from kernels.tma.prefetch_tensor import PrefetchTensorConfig
from kernels.tma.prefetch_tensor import copy as copy_matrix
from kernels.tma.swizzle import SwizzleConfig
from kernels.tma.tensor_nd import TensorNdConfig
from smfree.cuda import Device, DeviceArray
from tests.kernels.cases import CASES

ODD = (None, 2.0, "2", np.float64(2), np.bool_(True), [2], object())


def _numbers() -> list[Any]:
    """Every whole-numbered field of every configuration that the tests compile, once per class."""
    configs = {type(case.config): case.config for case in CASES}
    return [
        pytest.param(config, item.name, id=f"{kind.__module__.removeprefix('kernels.')}-{item.name}")
        for kind, config in configs.items()
        for item in fields(config)
        if type(getattr(config, item.name)) is int
    ]


def _with(config: Any, name: str, value: object) -> Any:
    """A configuration like this one, made anew."""
    given = {item.name: getattr(config, item.name) for item in fields(config) if item.init}
    return type(config)(**given | {name: value})


@pytest.mark.parametrize(("config", "name"), _numbers())
def test_numpy_integers_become_python_integers(config: Any, name: str) -> None:
    """Products of narrow ones would wrap: a tile of 64 x 64 in uint8 has 0 bytes."""
    value = getattr(config, name)
    narrow = np.uint8 if value < 256 else np.uint32
    made = _with(config, name, narrow(value))
    assert made == config and type(getattr(made, name)) is int


@pytest.mark.parametrize("value", ODD[1:], ids=[type(odd).__name__ for odd in ODD[1:]])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (RingConfig, "min_shared_bytes"),
        (ClusterConfig, "cluster_size"),
        (GatherConfig, "element_bytes"),
        (PrefetchTensorConfig, "element_bytes"),
    ],
)
def test_a_number_that_is_none_is_told(make: Callable[..., object], name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a whole number .got .*; convert it with int"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RingConfig(min_shared_bytes=-1), r"min_shared_bytes is 0 or more \(got -1\)"),
        (lambda: ClusterConfig(multicast="no"), r"multicast must be a bool \(got 'no'\); use True"),
        (lambda: TritonAxpyConfig(descriptors=1), r"descriptors must be a bool \(got 1\)"),
        (lambda: SwizzleConfig(swizzle=3), r"swizzle is one of NONE, .* \(got 3\); use Swizzle.B128"),
        (lambda: TensorNdConfig((4, 8), fill="zero"), r"fill is an OobFill \(got 'zero'\); use OobFill.ZERO"),
        (lambda: TensorNdConfig(64), r"box is a sequence \(got 64\); use \(64, 64\)"),
        (lambda: TensorNdConfig("64"), r"box\[0\] must be a whole number \(got '6'\)"),
        (lambda: TensorNdConfig((4, 8), element_strides=2), r"element_strides is a sequence \(got 2\)"),
    ],
)
def test_what_is_of_another_kind_is_told(make: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_narrow_numpy_integers_do_what_they_mean() -> None:
    matrix = np.arange(64 * 64, dtype=np.uint32).reshape(64, 64)
    with Device.open("emu:h100", schedule="min-pc") as device:
        src, dst = device.asarray(matrix), device.empty(matrix.shape, np.uint32)
        copy_matrix(dst, src, config=PrefetchTensorConfig(box_rows=np.uint8(64), box_cols=np.int8(64)))
        assert np.array_equal(dst.numpy(), matrix)
        strided(few := device.empty(16, np.uint32), src, np.int8(127), config=GatherConfig())
        assert np.array_equal(few.numpy(), matrix.ravel()[: 16 * 127 : 127])
        rows = device.empty((64, 64), np.uint32)
        pad(rows, src, row_bytes=np.uint8(200), src_pitch_bytes=np.int16(256), config=PadConfig())
        assert np.array_equal(rows.numpy()[:, :50], matrix[:, :50]) and not rows.numpy()[:, 50:].any()
    assert TensorNdConfig((np.uint8(16), np.uint8(32))).tile_bytes == 2048
    assert MulticastBulkConfig(cluster=np.uint8(2)).share_bytes == 8192
    assert DsmemConfig(cluster=np.uint8(2)) == DsmemConfig(cluster=2)


def _operands(device: Device) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    x, y = device.asarray(np.arange(8, dtype=np.float32)), device.asarray(np.ones(8, np.float32))
    return device.empty(8, np.float32), x, y


@pytest.mark.parametrize(
    "alpha", [None, "2", True, 1j, [2.0], np.array([2.0]), object()], ids=lambda odd: type(odd).__name__
)
def test_a_factor_that_is_no_number_is_told(alpha: Any) -> None:
    with Device.open("emu:h100") as device:
        dst, x, y = _operands(device)
        with pytest.raises(
            OperandError, match=r"alpha must be a real number \(got .*\); convert it with float"
        ):
            axpy(dst, x, y, alpha=alpha, config=RingConfig(256, 2))
        assert device.emulator.last_launch is None


@pytest.mark.parametrize("alpha", [1e39, -(10**400), np.float64(1e300)], ids=["1e39", "-10^400", "numpy"])
def test_a_factor_above_float32_is_told(alpha: Any) -> None:
    with Device.open("emu:h100") as device:
        dst, x, y = _operands(device)
        with pytest.raises(
            OperandError, match=r"alpha must be at most 3.40282e\+38, as float32 is .*; scale"
        ):
            axpy(dst, x, y, alpha=alpha, config=RingConfig(256, 2))


@pytest.mark.parametrize(
    "alpha", [2, np.int16(2), np.float16(2), Fraction(2), 2.0, float("inf"), float("nan")]
)
def test_factors(alpha: Any) -> None:
    with Device.open("emu:h100", schedule="min-pc") as device:
        dst, x, y = _operands(device)
        axpy(dst, x, y, alpha=alpha, config=RingConfig(256, 2))
        with np.errstate(invalid="ignore"):
            expected = np.float32(float(alpha)) * np.arange(8, dtype=np.float32) + np.float32(1)
        assert np.array_equal(dst.numpy(), expected, equal_nan=True)


def test_more_ctas_than_an_sm_has_threads_for_have_no_registers_to_share() -> None:
    """ptxas ignores launch bounds that no SM can hold, and gives other registers than the plan's."""
    with Device.open("emu:h100", schedule="min-pc") as device:
        dst, x, y = _operands(device)
        said = r"an SM of .*H100.* holds 2048 threads \(got 3 CTAs of 768\); use fewer CTAs per SM"
        over = SpecialisedConfig(256, 2, threads=768, ctas_per_sm=3, producer_registers=24)
        with pytest.raises(ConfigError, match=said):
            specialised_axpy(dst, x, y, alpha=2.0, config=over)
        fits = SpecialisedConfig(256, 2, threads=512, ctas_per_sm=4, producer_registers=24)
        specialised_axpy(dst, x, y, alpha=2.0, config=fits)
        assert np.array_equal(dst.numpy(), 2 * np.arange(8) + 1)


def test_a_wider_stage_is_no_smaller() -> None:
    assert PingpongConfig(256, 2, min_shared_bytes=np.int64(4096)).shared_bytes == 4096
