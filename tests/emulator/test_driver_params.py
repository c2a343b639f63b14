"""Kernel parameters in every form that cuda-python takes, packed as the PTX .param list says (case E13)."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver.errors import Refusal
from smfree.emulator.driver.params import pack
from smfree.emulator.ptx.ast import Kernel
from smfree.emulator.ptx.parser import parse
from tests.emulator.driver_kit import ptx

MIXED = """.param .u8 mixed_0, .param .u64 mixed_1, .param .align 64 .b8 mixed_2[128],
 .param .u16 mixed_3, .param .align 16 .b8 mixed_4[16]"""


def kernel(params: str) -> Kernel:
    return parse(ptx(params=params).decode()).kernels["work"]


class Float4(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in "xyzw"]


class Map(ctypes.Structure):
    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


def test_tuple_is_packed_at_the_offsets_of_the_param_list() -> None:
    work, tensor_map = kernel(MIXED), Map((ctypes.c_uint64 * 16)(*range(16)))
    values = (7, 1 << 40, tensor_map, 9, Float4(1, 2, 3, 4))
    block = pack(work, (values, (ctypes.c_ubyte, ctypes.c_uint64, None, ctypes.c_ushort, None)), 0)
    assert [param.offset for param in work.params] == [0, 8, 64, 192, 208]
    assert len(block) == 224 and block[0] == 7
    assert struct.unpack_from("<Q", block, 8)[0] == 1 << 40
    assert block[64:192] == bytes(tensor_map)
    assert struct.unpack_from("<H", block, 192)[0] == 9
    assert struct.unpack_from("<4f", block, 208) == (1, 2, 3, 4)


def test_address_buffer_and_tuple_give_the_same_block() -> None:
    work = kernel(".param .u64 a, .param .u32 b, .param .f32 c")
    cells = [ctypes.c_uint64(1 << 50), ctypes.c_uint32(3), ctypes.c_float(1.5)]
    pointers = np.array([ctypes.addressof(cell) for cell in cells], np.uint64)
    by_tuple = pack(work, ((1 << 50, 3, 1.5), (ctypes.c_uint64, ctypes.c_uint32, ctypes.c_float)), 0)
    assert by_tuple == struct.pack("<QIf", 1 << 50, 3, 1.5)
    assert pack(work, pointers, 0) == by_tuple
    assert pack(work, int(pointers.ctypes.data), 0) == by_tuple
    assert pack(work, memoryview(pointers.tobytes()), 0) == by_tuple


def test_pointer_wrappers_are_read_through_getptr() -> None:
    work = kernel(".param .u64 a, .param .u64 b")
    wrapper = cuda.CUdeviceptr(0x1234)
    block = pack(work, ((wrapper, 0x5678), (None, ctypes.c_void_p)), 0)
    assert struct.unpack("<2Q", block) == (0x1234, 0x5678)


def test_wrapper_with_void_pointer_type_passes_the_objects_address_as_the_real_binding_does() -> None:
    work, wrapper = kernel(".param .u64 a"), cuda.CUdeviceptr(0x1234)
    assert struct.unpack("<Q", pack(work, ((wrapper,), (ctypes.c_void_p,)), 0))[0] == wrapper.getPtr()


def test_enum_passes_as_an_int() -> None:
    value = cuda.CUresult.CUDA_ERROR_NOT_READY
    assert pack(kernel(".param .u32 a"), ((value,), (None,)), 0) == struct.pack("<i", 600)


def test_extra_gives_the_callers_own_block() -> None:
    work = kernel(".param .u64 a, .param .u32 b")
    data = (ctypes.c_ubyte * 12)(*range(12))
    size = ctypes.c_size_t(12)
    extra = (ctypes.c_size_t * 5)(1, ctypes.addressof(data), 2, ctypes.addressof(size), 0)
    assert pack(work, None, ctypes.addressof(extra)) == bytes(range(12))
    size.value = 8
    with pytest.raises(Refusal, match=r"takes 12 bytes.*has 8"):
        pack(work, None, ctypes.addressof(extra))


def test_kernel_without_parameters_takes_none_zero_or_empty_tuples() -> None:
    work = kernel("")
    for given in (None, 0, ((), ())):
        assert pack(work, given, 0) == b""


def test_missing_parameters_are_refused() -> None:
    with pytest.raises(Refusal, match="takes 1 parameters, kernelParams is NULL"):
        pack(kernel(".param .u64 a"), None, 0)


def test_wrong_count_names_the_parameters() -> None:
    with pytest.raises(Refusal, match=r"takes 2 parameters \(a, b\), got 1"):
        pack(kernel(".param .u64 a, .param .u32 b"), ((1,), (ctypes.c_uint64,)), 0)


def test_type_narrower_than_the_parameter_is_refused() -> None:
    with pytest.raises(Refusal, match=r"parameter 1 \(b, .u64\) has 8 bytes, c_(u?int|uint32) has 4"):
        pack(kernel(".param .u32 a, .param .u64 b"), ((1, 2), (ctypes.c_int, ctypes.c_int)), 0)


def test_short_pointer_buffer_is_refused() -> None:
    with pytest.raises(Refusal, match="takes 2 parameters, got 1 pointers"):
        pack(kernel(".param .u64 a, .param .u64 b"), np.zeros(1, np.uint64), 0)


def test_null_pointer_in_the_array_names_its_parameter() -> None:
    with pytest.raises(Refusal, match=r"the pointer to parameter 0 \(a, .u64\) is NULL"):
        pack(kernel(".param .u64 a"), np.zeros(1, np.uint64), 0)


def test_what_the_real_binding_does_not_take_is_a_type_error() -> None:
    work = kernel(".param .u64 a")
    for given in ([1], ((1,), (str,)), ((1,), (ctypes.c_uint64, ctypes.c_uint64)), ((object(),), (None,))):
        with pytest.raises(TypeError):
            pack(work, given, 0)
