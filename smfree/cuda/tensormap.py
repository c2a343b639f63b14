"""Tensor maps: what a tensor copy (``cp.async.bulk.tensor``) needs to know about an array.

Rules and limits are those of ``cuTensorMapEncodeTiled`` (CUDA driver API, "Tensor Map Object Management").
They are checked here first, so that an error names the rule and the value instead of
CUDA_ERROR_INVALID_VALUE.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import index
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from smfree.cuda.errors import DriverError, TensorMapError

if TYPE_CHECKING:
    from smfree.cuda.calls import Calls
    from smfree.cuda.memory import DeviceArray

MAP_BYTES = 128
MAP_ALIGN = 128
_PREFIX = "CU_TENSOR_MAP_"
_Enum = TypeVar("_Enum", bound=IntEnum)


class DataType(IntEnum):
    """Element types (``CUtensorMapDataType``) that numpy or a kernel's author can name."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12

    @property
    def is_float(self) -> bool:
        """Whether NaN fill is possible."""
        return self >= DataType.FLOAT16

    @property
    def bytes(self) -> int:
        """Size of an element in bytes."""
        return (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)[self]


class Swizzle(IntEnum):
    """How a box is stored in shared memory (``CUtensorMapSwizzle``)."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6

    @property
    def span_bytes(self) -> int | None:
        """Most bytes of the box's innermost row, None when not swizzled."""
        return {Swizzle.NONE: None, Swizzle.B32: 32, Swizzle.B64: 64}.get(self, 128)


class Interleave(IntEnum):
    """``CUtensorMapInterleave``."""

    NONE = 0
    B16 = 1
    B32 = 2


class L2Promotion(IntEnum):
    """``CUtensorMapL2promotion``."""

    NONE = 0
    B64 = 1
    B128 = 2
    B256 = 3


class OobFill(IntEnum):
    """What a load writes for elements outside the array (``CUtensorMapFloatOOBfill``)."""

    ZERO = 0
    NAN = 1


_TYPES = {
    "u1": DataType.UINT8,
    "i1": DataType.UINT8,
    "u2": DataType.UINT16,
    "i2": DataType.UINT16,
    "u4": DataType.UINT32,
    "i4": DataType.INT32,
    "u8": DataType.UINT64,
    "i8": DataType.INT64,
    "f2": DataType.FLOAT16,
    "f4": DataType.FLOAT32,
    "f8": DataType.FLOAT64,
}


def data_type_of(dtype: np.dtype) -> DataType:
    """The element type for a numpy dtype (bfloat16 arrays: name it yourself). Raises TensorMapError."""
    found = _TYPES.get(dtype.str[1:])
    if found is None or not dtype.isnative:
        raise TensorMapError(
            f"a tensor map has no element type for numpy's {dtype}; pass data_type or view the array"
        )
    return found


@dataclass(frozen=True)
class TensorMapSpec:
    """The fields of a tiled tensor map, innermost dimension first; sizes in elements, strides in bytes.

    ``strides_bytes`` leaves out dimension 0, whose stride is the element.
    """

    address: int
    data_type: DataType
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: Interleave = Interleave.NONE
    swizzle: Swizzle = Swizzle.NONE
    l2_promotion: L2Promotion = L2Promotion.NONE
    oob_fill: OobFill = OobFill.ZERO

    @property
    def box_bytes(self) -> int:
        """Bytes that one load of the whole box writes to shared memory and reports to its mbarrier."""
        counts = [
            self.box[0] if self.interleave is Interleave.NONE else -(-self.box[0] // self.element_strides[0])
        ]
        counts += [-(-b // s) for b, s in zip(self.box[1:], self.element_strides[1:], strict=True)]
        return math.prod(counts) * self.data_type.bytes

    def validate(self) -> None:
        """Check every documented rule; raises TensorMapError with rule, value and remedy."""
        rank, size = len(self.dims), self.data_type.bytes
        interleaved = self.interleave is not Interleave.NONE
        wide = self.interleave is Interleave.B32
        _require(1 <= rank <= 5, "a tensor map has 1 to 5 dimensions", rank, "reshape the array")
        lengths = (len(self.box), len(self.element_strides), len(self.strides_bytes) + 1)
        _require(
            lengths == (rank, rank, rank),
            "box, element strides and strides (plus one) have one entry per dimension",
            lengths,
            f"give {rank} of each",
        )
        align = 32 if wide else 16
        _require(
            self.address % align == 0 and self.address != 0,
            f"the array's address must be {align}-byte aligned",
            f"address ending in {self.address % align:#x}",
            f"offset the view to a multiple of {align} bytes",
        )
        for i, dim in enumerate(self.dims):
            _require(1 <= dim <= 2**32, f"dimension {i} has 1 to 2^32 elements", dim, "split the array")
        for i, stride in enumerate(self.strides_bytes, start=1):
            _require(
                stride % align == 0 and 0 < stride < 2**40,
                f"the stride of dimension {i} is a multiple of {align} bytes below 2^40",
                f"{stride} bytes",
                f"pad the rows to a multiple of {align} bytes",
            )
        for i, edge in enumerate(self.box):
            _require(1 <= edge <= 256, f"box dimension {i} has 1 to 256 elements", edge, "use a smaller box")
        for i, step in enumerate(self.element_strides):
            _require(
                1 <= step <= 8,
                f"element stride {i} is 1 to 8",
                step,
                "load with stride 1 and skip in the kernel",
            )
        inner = self.box[0] * size
        if not interleaved:
            _require(
                inner % 16 == 0,
                "the box's innermost row is a multiple of 16 bytes",
                f"{inner} bytes",
                "widen the box",
            )
        span = self.swizzle.span_bytes
        if span is not None and not interleaved:
            _require(
                inner <= span,
                f"under swizzle {self.swizzle.name} the box's innermost row has at most {span} bytes",
                f"{inner} bytes",
                "narrow the box or take a wider swizzle",
            )
        if interleaved:
            _require(rank >= 3, "interleaved arrays have at least 3 dimensions", rank, "do not interleave")
        if wide:
            _require(
                self.swizzle is Swizzle.B32,
                "interleave B32 goes with swizzle B32",
                self.swizzle.name,
                "use Swizzle.B32",
            )
        if self.oob_fill is OobFill.NAN:
            _require(
                self.data_type.is_float, "NaN fill needs a float type", self.data_type.name, "fill with zeros"
            )


def _require(holds: bool, rule: str, value: object, remedy: str) -> None:
    if not holds:
        raise TensorMapError(f"{rule} (got {value}); {remedy}")


@dataclass
class TensorMap:
    """An encoded map: 128 bytes at an address aligned to 128, passed to kernels by value.

    Keeps the array's memory alive. A kernel takes it as ``const __grid_constant__``.
    """

    spec: TensorMapSpec
    address: int
    buffer: Any = field(repr=False)
    allocation: Any = field(repr=False, default=None)
    calls: Calls | None = field(repr=False, default=None)

    @property
    def box_bytes(self) -> int:
        """Bytes per full box, what ``expect_tx`` announces."""
        return self.spec.box_bytes

    def tobytes(self) -> bytes:
        """The 128 bytes."""
        return ctypes.string_at(self.address, MAP_BYTES)


def aligned_buffer(nbytes: int, align: int = MAP_ALIGN) -> tuple[Any, int]:
    """A zeroed ctypes buffer and an address in it that is a multiple of ``align`` with ``nbytes`` behind
    it."""
    buffer = (ctypes.c_uint8 * (nbytes + align))()
    return buffer, -(-ctypes.addressof(buffer) // align) * align


def spec_for(
    array: DeviceArray,
    box: Sequence[int],
    *,
    element_strides: Sequence[int] | None = None,
    strides_bytes: Sequence[int] | None = None,
    data_type: DataType | None = None,
    interleave: Interleave = Interleave.NONE,
    swizzle: Swizzle = Swizzle.NONE,
    l2_promotion: L2Promotion = L2Promotion.NONE,
    oob_fill: OobFill = OobFill.ZERO,
) -> TensorMapSpec:
    """The map of a device array. All sequences are in the array's order (innermost last), as numpy prints
    shapes.

    ``strides_bytes`` overrides the dense strides (one per dimension but the last).
    """
    shape = array.shape
    dense = [math.prod(shape[i + 1 :]) * array.dtype.itemsize for i in range(len(shape) - 1)]
    strides = dense if strides_bytes is None else strides_bytes
    steps = [1] * len(shape) if element_strides is None else element_strides
    spec = TensorMapSpec(
        address=array.ptr,
        data_type=data_type_of(array.dtype) if data_type is None else _member(DataType, data_type),
        dims=tuple(reversed(shape)),
        strides_bytes=_whole("strides_bytes", strides),
        box=_whole("box", box),
        element_strides=_whole("element_strides", steps),
        interleave=_member(Interleave, interleave),
        swizzle=_member(Swizzle, swizzle),
        l2_promotion=_member(L2Promotion, l2_promotion),
        oob_fill=_member(OobFill, oob_fill),
    )
    _require(
        spec.data_type.bytes == array.dtype.itemsize,
        "the map's element is as wide as the array's",
        f"{spec.data_type.name} for {array.dtype}",
        "view the array as another dtype",
    )
    return spec


def _whole(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers in the map's order, innermost first."""
    try:
        return tuple(index(value) for value in values)[::-1]
    except TypeError:
        raise TensorMapError(f"{name} is a sequence of whole numbers (got {values!r})") from None


def _member(kind: type[_Enum], value: Any) -> _Enum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(kind.__members__)
        raise TensorMapError(f"{kind.__name__} is one of {known} (got {value!r})") from None


def encode(calls: Calls, spec: TensorMapSpec, allocation: Any = None) -> TensorMap:
    """Validate and encode. Raises TensorMapError when refused, KernelFaultError when the context had
    failed."""
    spec.validate()
    buffer, address = aligned_buffer(MAP_BYTES)
    shown = {"rank": len(spec.dims), "address": hex(spec.address), "dims": spec.dims, "box": spec.box}
    shown |= {"strides": spec.strides_bytes, "swizzle": spec.swizzle.name, "type": spec.data_type.name}
    try:
        _encode_into(calls, spec, address, shown)
    except DriverError as error:
        if error.code_name == "CUDA_ERROR_INVALID_VALUE":
            raise TensorMapError(f"the driver refused the map: {error}") from error
        raise
    return TensorMap(spec, address, buffer, allocation, calls)


def _encode_into(calls: Calls, spec: TensorMapSpec, address: int, shown: dict[str, Any]) -> None:
    if calls.emulated:
        driver = calls.driver
        made = calls(
            "cuTensorMapEncodeTiled",
            driver.CUtensorMapDataType(spec.data_type),
            len(spec.dims),
            spec.address,
            [driver.cuuint64_t(dim) for dim in spec.dims],
            [driver.cuuint64_t(stride) for stride in spec.strides_bytes],
            [driver.cuuint32_t(edge) for edge in spec.box],
            [driver.cuuint32_t(step) for step in spec.element_strides],
            driver.CUtensorMapInterleave(spec.interleave),
            driver.CUtensorMapSwizzle(spec.swizzle),
            driver.CUtensorMapL2promotion(spec.l2_promotion),
            driver.CUtensorMapFloatOOBfill(spec.oob_fill),
            **shown,
        )
        ctypes.memmove(address, made.getPtr(), MAP_BYTES)
        return
    # The binding would encode into a CUtensorMap inside a Python object. That is aligned to 16 bytes only,
    # and code compiled for the struct's 64 crashes on it (cuda-python issue 1692). So call the function
    # itself.
    pointer, *_ = calls("cuGetProcAddress", b"cuTensorMapEncodeTiled", 12000, 0)
    if not int(pointer or 0):
        raise TensorMapError("the driver has no cuTensorMapEncodeTiled, which came with CUDA 12.0; update it")
    rank = len(spec.dims)
    function = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
    )(int(pointer))
    code = function(
        address,
        int(spec.data_type),
        rank,
        spec.address,
        (ctypes.c_uint64 * rank)(*spec.dims),
        (ctypes.c_uint64 * rank)(*spec.strides_bytes),
        (ctypes.c_uint32 * rank)(*spec.box),
        (ctypes.c_uint32 * rank)(*spec.element_strides),
        int(spec.interleave),
        int(spec.swizzle),
        int(spec.l2_promotion),
        int(spec.oob_fill),
    )
    calls.check("cuTensorMapEncodeTiled", (calls.driver.CUresult(code),), **shown)
