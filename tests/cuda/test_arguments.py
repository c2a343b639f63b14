"""Typed arguments, packed by the kernel's own parameter list."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np
import pytest

from smfree.cuda import ArgumentError, Device, ParamInfo, compile_cuda
from smfree.cuda.arguments import pack
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.sources import ABI, source

U1 = ParamInfo("p", "u", 1, 1, 0)
U4 = ParamInfo("p", "u", 4, 4, 0)
U8 = ParamInfo("p", "u", 8, 8, 0)
F4 = ParamInfo("p", "f", 4, 4, 0)
B16 = ParamInfo("p", "b", 16, 16, 0)


def test_packed_bytes_lie_at_the_offsets_of_the_param_list(device: Device) -> None:
    """E13: vector and by-value struct arguments between small ones, compiled by the real NVRTC."""
    params = compile_cuda(source(ABI), "sm_90a").functions["abi"].params
    array = device.empty((64, 64), np.float32)
    tensor_map = device.tensor_map(array, (32, 32))
    vector = np.array([1, 2, 3, 4], np.float32)
    packed = pack(
        "abi", params, [np.uint8(7), array, tensor_map, np.uint16(513), vector, np.uint8(9), np.float64(0.5)]
    )
    data = packed.tobytes()
    assert packed.nbytes == 240 and packed.data_address % 128 == 0
    assert data[0] == 7
    assert struct.unpack_from("<Q", data, 8)[0] == array.ptr
    assert data[64:192] == tensor_map.tobytes()
    assert struct.unpack_from("<H", data, 192)[0] == 513
    assert struct.unpack_from("<4f", data, 208) == (1, 2, 3, 4)
    assert data[224] == 9 and struct.unpack_from("<d", data, 232)[0] == 0.5
    assert [p - packed.data_address for p in packed.pointers] == [p.offset for p in params]


class _Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_uint64), ("b", ctypes.c_float), ("c", ctypes.c_uint32)]


@pytest.mark.parametrize(
    ("param", "argument", "expected"),
    [
        (U8, 2**64 - 1, b"\xff" * 8),
        (U8, -1, b"\xff" * 8),
        (U8, np.int64(-2), b"\xfe" + b"\xff" * 7),
        (U4, np.int32(-1), b"\xff" * 4),
        (U4, ctypes.c_uint32(5), b"\x05\0\0\0"),
        (U1, np.bool_(True), b"\x01"),
        (F4, np.float32(1), b"\0\0\x80\x3f"),
        (F4, ctypes.c_float(1), b"\0\0\x80\x3f"),
        (B16, _Pair(1, 1.0, 2), struct.pack("<QfI", 1, 1.0, 2)),
        (B16, np.arange(4, dtype=np.uint32), struct.pack("<4I", 0, 1, 2, 3)),
        (B16, np.array([(1, 2)], dtype=[("a", "<u8"), ("b", "<u8")])[0], struct.pack("<QQ", 1, 2)),
    ],
)
def test_typed_values_are_packed(param: ParamInfo, argument: Any, expected: bytes) -> None:
    assert pack("k", [param], [argument]).tobytes() == expected


@pytest.mark.parametrize(
    ("param", "argument", "message"),
    [
        (U4, 5, r"argument 0 of k \(4 bytes\) is typed.*got int 5.*np\.uint32\(n\)"),
        (U8, True, "is typed"),
        (U8, 2**64, "does not fit 8 bytes"),
        (F4, 1.5, "is typed.*got float 1.5"),
        (U8, None, "is typed.*NoneType"),
        (U4, np.int64(1), "has 4 bytes in the kernel, got numpy int64, 8 bytes"),
        (U4, np.float32(1), "is an integer or pointer of 4 bytes in the kernel, got numpy float32"),
        (F4, np.int32(1), "is a float of 4 bytes in the kernel, got numpy int32"),
        (U4, ctypes.c_float(1), "is an integer or pointer"),
        (B16, np.arange(3, dtype=np.uint32), "has 16 bytes in the kernel, got a numpy array"),
        (U8, np.arange(1, dtype=np.uint64), "is typed"),
        (U8, "text", "is typed"),
    ],
)
def test_wrong_values_are_refused_by_position_and_kernel(
    param: ParamInfo, argument: Any, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        pack("k", [param], [argument])


def test_pointer_in_a_small_parameter_is_refused(device: Device) -> None:
    with pytest.raises(ArgumentError, match=r"has 4 bytes in the kernel, got a pointer \(DeviceArray"):
        pack("k", [U4], [device.empty(4)])


def test_number_of_arguments_must_fit() -> None:
    with pytest.raises(ArgumentError, match=r"k takes 2 arguments \(8 bytes, 4 bytes\), got 1"):
        pack("k", [U8, U4], [1])
    assert pack("k", [], []).pointers_address == 0


def test_array_of_another_device_is_refused(device: Device) -> None:
    other = Device(FakeDriver(), 0, spec="cuda:1", is_emulated=False)
    with pytest.raises(ArgumentError, match="belongs to another device"):
        pack("k", [U8], [other.empty(4)], device)


def test_mapped_host_buffer_passes_its_device_address(device: Device) -> None:
    buffer = device.pinned(4, np.uint32, mapped=True)
    assert pack("k", [U8], [buffer], device).tobytes() == struct.pack("<Q", buffer.device_ptr)
