"""Calls with wrong kinds of values: an error by name before the driver sees them, never a wrong result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smfree.cuda import (
    ArgumentError,
    ArrayError,
    CompileError,
    ContextFailedError,
    CudaSource,
    Device,
    DeviceSpecError,
    DriverError,
    KernelFaultError,
    KernelNotFoundError,
    LaunchError,
    Swizzle,
    TensorMapError,
)

INCLUDE = Path(__file__).parents[2] / "kernels" / "include"
FILL = 'extern "C" __global__ void fill(int *p) { p[threadIdx.x] = 1; }'
MAPPED = """struct alignas(64) Map { unsigned long long words[16]; };
extern "C" __global__ void mapped(const __grid_constant__ Map map, int *p) { p[0] = (int)map.words[0]; }"""


def _source(text: str = FILL) -> CudaSource:
    return CudaSource("misuse.cu", text=text)


def test_a_shape_whose_bytes_exceed_64_bits_is_no_small_array(h100: Device) -> None:
    with pytest.raises(DriverError, match=f"bytes={2**83}.*OUT_OF_MEMORY"):
        h100.empty((2**40, 2**40), np.float64)


@pytest.mark.parametrize("shape", [1.5, "ab", None, (2, 1.0), -1, (2, -1)])
@pytest.mark.parametrize("make", ["empty", "pinned", "pageable"])
def test_a_shape_is_whole_numbers_from_0_on(h100: Device, make: str, shape: Any) -> None:
    with pytest.raises(ArrayError, match="a shape"):
        getattr(h100, make)(shape)


def test_numpy_integers_are_shapes_grids_and_defines(h100: Device) -> None:
    array = h100.empty(np.int64(32), np.int32)  # type: ignore[arg-type]
    source = CudaSource("n.cu", {"N": np.int32(7)}, text=FILL.replace("1;", "N;"))
    h100.compile(source).kernel().launch(np.int64(1), np.array([32]), [array])  # type: ignore[arg-type]
    assert array.numpy().tolist() == [7] * 32


@pytest.mark.parametrize("dtype", [object, "V0", "no such type"])
@pytest.mark.parametrize("make", ["empty", "pinned", "pageable"])
def test_elements_are_plain_bytes(h100: Device, make: str, dtype: Any) -> None:
    """Bytes of a device as numpy objects would be stray pointers."""
    with pytest.raises(ArrayError, match=r"dtype|understood"):
        getattr(h100, make)(4, dtype)
    with pytest.raises(ArrayError, match=r"dtype|understood"):
        h100.empty(16).view(dtype)


def test_views_and_fills_take_whole_numbers(h100: Device) -> None:
    array = h100.empty(16)
    with pytest.raises(ArrayError, match=r"whole numbers of bytes \(got 1.5"):
        array.bytes_view(1.5)  # type: ignore[arg-type]
    with pytest.raises(ArrayError, match=r"fill byte .*\(got 1.5\)"):
        array.fill(1.5)  # type: ignore[arg-type]


def test_nothing_of_another_device_is_taken(h100: Device) -> None:
    """Two emulated devices hand out the same addresses, so a mix-up would be silent."""
    with Device.open("emu:h100") as other:
        here, there = h100.asarray(np.zeros(64, np.int32)), other.asarray(np.zeros(64, np.int32))
        foreign = other.stream()
        with pytest.raises(ArrayError, match="same device"):
            here.copy_from_device(there)
        for call in (
            lambda: here.fill(0, stream=foreign),
            lambda: here.numpy(stream=foreign),
            lambda: here.copy_from(np.zeros(64, np.int32), stream=foreign),
            lambda: here.copy_from_device(h100.empty(64, np.int32), stream=foreign),
        ):
            with pytest.raises(ArrayError, match="stream belongs to another device"):
                call()
        with pytest.raises(LaunchError, match="events of its own device"):
            h100.stream().record(other.event())
        with pytest.raises(LaunchError, match="event of its own machine"):
            h100.stream().wait(foreign.record())
        with pytest.raises(LaunchError, match="two events of one device"):
            h100.stream().record().elapsed_us(foreign.record())
        with pytest.raises(TensorMapError, match="same device"):
            h100.tensor_map(there.view(np.int32, (8, 8)), (8, 8))
        foreign_map = other.tensor_map(there.view(np.int32, (8, 8)), (8, 8))
        with pytest.raises(ArgumentError, match="tensor map of another device"):
            h100.compile(_source(MAPPED)).kernel().launch(1, 1, [foreign_map, here])


def test_a_map_of_freed_memory_is_no_argument(h100: Device) -> None:
    array, out = h100.empty((8, 8), np.int32), h100.empty(1, np.int32)
    tensor_map = h100.tensor_map(array, (8, 8))
    array.free()
    with pytest.raises(ArgumentError, match="was freed"):
        h100.compile(_source(MAPPED)).kernel().launch(1, 1, [tensor_map, out])


def test_overlapping_copies_are_refused(h100: Device) -> None:
    array = h100.asarray(np.arange(64, dtype=np.uint8))
    with pytest.raises(ArrayError, match="must not overlap"):
        array[0:32].copy_from_device(array[16:48])
    assert array[0:32].copy_from_device(array[32:64]).numpy()[0] == 32


@pytest.mark.parametrize("value", [-1, 2**32, 1.5])
def test_a_word_that_does_not_fit_is_not_written_short(h100: Device, value: Any) -> None:
    array = h100.asarray(np.zeros(1, np.uint32))
    with pytest.raises(LaunchError, match="0 to 2\\^32 - 1"):
        h100.stream().write_value(array.ptr, value)
    with pytest.raises(LaunchError, match="0 to 2\\^32 - 1"):
        h100.stream().wait_value(array.ptr, value)
    with pytest.raises(LaunchError, match=r"array\.ptr"):
        h100.stream().write_value(array, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"swizzle": "128B"}, "Swizzle is one of NONE, B32"),
        ({"swizzle": 9}, r"Swizzle is one of .*\(got 9\)"),
        ({"oob_fill": 7}, "OobFill is one of ZERO, NAN"),
        ({"l2_promotion": 9}, "L2Promotion is one of"),
        ({"data_type": "f4"}, "DataType is one of"),
        ({"strides_bytes": (256.0,)}, "strides_bytes is a sequence of whole numbers"),
        ({"element_strides": 1}, "element_strides is a sequence of whole numbers"),
    ],
)
def test_options_of_a_tensor_map_are_checked(h100: Device, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TensorMapError, match=message):
        h100.tensor_map(h100.empty((64, 64), np.float32), (8, 8), **options)


def test_enum_values_as_numbers_are_the_enum(h100: Device) -> None:
    spec = h100.tensor_map(h100.empty((64, 64), np.float32), (8, 32), swizzle=3).spec
    assert spec.swizzle is Swizzle.B128


@pytest.mark.parametrize("array", [np.zeros((64, 64), np.float32), None])
def test_a_tensor_map_needs_a_device_array(h100: Device, array: Any) -> None:
    with pytest.raises(TensorMapError, match="array of the same device"):
        h100.tensor_map(array, (8, 8))


def test_launches_name_what_has_the_wrong_kind(h100: Device) -> None:
    kernel, array = h100.compile(_source()).kernel(), h100.empty(32, np.int32)
    for grid in (1.0, None, "1", True, (1, 1.5)):
        with pytest.raises(LaunchError, match="grid is one to three integers"):
            kernel.launch(grid, 32, [array])  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"shared_bytes is a whole number of bytes \(got 1.5\)"):
        kernel.launch(1, 32, [array], shared_bytes=1.5)  # type: ignore[arg-type]
    for args in (None, array):
        with pytest.raises(ArgumentError, match="takes a list of arguments"):
            kernel.launch(1, 32, args)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="stream is a Stream"):
        kernel.launch(1, 32, [array], stream=5)  # type: ignore[arg-type]
    with pytest.raises(KernelNotFoundError, match="no entry point 3"):
        h100.compile(_source()).kernel(3)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="use CudaSource"):
        h100.compile("copy.cu")  # type: ignore[arg-type]
    kernel.launch(1, 32, iter([array]))  # type: ignore[arg-type]
    assert array.numpy().tolist() == [1] * 32


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "fifo"}, "schedule is one of timed, .*got 'fifo'"),
        ({"schedule": None}, "schedule is one of timed"),
        ({"seed": -1}, "seed .* from 0 on"),
        ({"seed": "x"}, "seed .* from 0 on"),
        ({"strict": "warn"}, "strict is one of error, record, off .*got 'warn'"),
        ({"strict": None}, "strict is one of error, record, off"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceSpecError, match=message):
        Device.open("emu:h100", **options)


_ODD_PARITY = """
#include "ptx.cuh"
extern "C" __global__ void odd(int* out, unsigned parity) {
  __shared__ u64 full;
  mbarrier_init(smem_addr(&full), 1);
  out[0] = mbarrier_test_wait_parity(smem_addr(&full), parity);
}"""


def test_what_becomes_of_a_strict_finding_is_said_when_a_device_is_opened() -> None:
    source = CudaSource("odd.cu", include_dirs=(INCLUDE,), text=_ODD_PARITY)

    def run(device: Device, parity: int) -> None:
        out = device.empty(1, np.int32)
        device.compile(source).kernel("odd").launch(1, 1, [out, np.uint32(parity)])
        assert out.numpy().tolist() == [1]

    for strict in ("record", "off"):
        with Device.open("emu:h100", strict=strict) as device:
            run(device, 1)
            assert not device.findings
            run(device, 3)
            found = device.findings
            assert [f.rule for f in found] == (["mbarrier.parity"] if strict == "record" else [])
            assert all("3 is outside {0, 1}" in str(f) and "odd.cu:" in str(f) for f in found)
    with Device.open("emu:h100") as device:
        run(device, 1)
        with pytest.raises(KernelFaultError, match="3 is outside"):
            run(device, 3)


@pytest.mark.parametrize("spec", [3, b"emu:h100", "cuda:\u0663"])
def test_a_device_is_named_by_an_ascii_string(spec: Any) -> None:
    with pytest.raises(DeviceSpecError):
        Device.open(spec)


def test_a_cluster_launch_that_is_refused_harms_nothing(h100: Device) -> None:
    kernel, array = h100.compile(_source()).kernel(), h100.empty(32, np.int32)
    with pytest.raises(LaunchError, match=r"grid \(3, 1, 1\) is not divisible by the cluster \(2, 1, 1\)"):
        kernel.launch(3, 32, [array], cluster=2)
    kernel.launch(1, 32, [array])
    assert array.numpy().tolist() == [1] * 32


def test_a_kernel_that_needs_what_is_not_modelled_ends_its_device_by_name() -> None:
    """The failure is the kernel's; what follows refers to it instead of looking like its own refusal."""
    text = """extern "C" __global__ void drop(int *p) { asm("discard.global.L2 [%0], 128;" ::"l"(p)); }"""
    device = Device.open("emu:h100")
    kernel, array = device.compile(_source(text)).kernel(), device.empty(32, np.int32)
    with pytest.raises(KernelFaultError, match=r"discard(.|\n)*is not modelled"):
        kernel.launch(1, 32, [array])
        device.synchronize()
    with pytest.raises(ContextFailedError, match=r"cuMemAlloc was not called.*First failure: \w+ returned"):
        device.empty(4)
    with Device.open("emu:h100") as again:
        assert again.asarray(np.arange(4)).numpy().tolist() == [0, 1, 2, 3]


def test_a_fault_that_nobody_waited_for_shows_at_the_end_of_the_block() -> None:
    text = 'extern "C" __global__ void stray(int *p) { p[1000000] = 1; }'
    outside = pytest.raises(KernelFaultError, match=r"outside every allocation(.|\n)*stray")
    with outside, Device.open("emu:h100") as device:
        device.compile(_source(text)).kernel().launch(1, 32, [device.empty(4, np.int32)])
    assert device.calls.closed


def test_an_error_of_the_block_itself_comes_first() -> None:
    text = 'extern "C" __global__ void stray(int *p) { p[1000000] = 1; }'
    with pytest.raises(ZeroDivisionError), Device.open("emu:h100") as device:
        device.compile(_source(text)).kernel().launch(1, 32, [device.empty(4, np.int32)])
        raise ZeroDivisionError
    assert device.calls.closed
