"""Enums of a tensor map, numbered as the driver API numbers them, and what follows from them."""

from __future__ import annotations

from enum import IntEnum


class DataType(IntEnum):
    """Values equal CUtensorMapDataType."""

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
    U4X16_ALIGN8B = 13
    U4X16_ALIGN16B = 14
    U6X16_ALIGN16B = 15


class Swizzle(IntEnum):
    """Values equal CUtensorMapSwizzle."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6


class Interleave(IntEnum):
    """Values equal CUtensorMapInterleave."""

    NONE = 0
    B16 = 1
    B32 = 2


class L2Promotion(IntEnum):
    """Values equal CUtensorMapL2promotion. Accepted and ignored."""

    NONE = 0
    L2_64B = 1
    L2_128B = 2
    L2_256B = 3


class OutOfBoundsFill(IntEnum):
    """Values equal CUtensorMapFloatOOBfill."""

    NONE = 0
    NAN_REQUEST_ZERO_FMA = 1


ELEMENT_BYTES = dict(zip(list(DataType)[:13], (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4), strict=True))
FLOATS = {t for t in ELEMENT_BYTES if "FLOAT" in t.name}
#: Elements that a copy rounds or flushes on the way (for tf32: NVIDIA/cutlass,
#: include/cutlass/gemm/collective/sm90_mma_tma_gmma_ss.hpp).
CONVERTED = (DataType.FLOAT32_FTZ, DataType.TFLOAT32, DataType.TFLOAT32_FTZ)
#: Which NaN hardware writes is not documented; these quiet ones stand for it.
NAN_WORD = {
    DataType.FLOAT16: b"\xff\x7f",
    DataType.BFLOAT16: b"\xff\x7f",
    DataType.FLOAT64: b"\xff" * 6 + b"\xff\x7f",
}
#: Widest inner box, and (shift, mask) of the XOR a ^= (a >> shift) & mask on shared byte addresses.
SWIZZLE_SPAN = {
    Swizzle.B32: 32,
    Swizzle.B64: 64,
    Swizzle.B128: 128,
    Swizzle.B128_ATOM_32B: 128,
    Swizzle.B128_ATOM_32B_FLIP_8B: 128,
    Swizzle.B128_ATOM_64B: 128,
}
SWIZZLE_XOR = {
    Swizzle.B32: (3, 0x10),
    Swizzle.B64: (3, 0x30),
    Swizzle.B128: (3, 0x70),
    Swizzle.B128_ATOM_32B: (2, 0x60),
    Swizzle.B128_ATOM_64B: (1, 0x40),
}
#: Shared addresses that are multiples of this start a fresh pattern (PTX ISA, "Swizzling Modes").
SWIZZLE_PERIOD = {
    Swizzle.NONE: 128,
    Swizzle.B32: 256,
    Swizzle.B64: 512,
    Swizzle.B128: 1024,
    Swizzle.B128_ATOM_32B: 1024,
    Swizzle.B128_ATOM_64B: 1024,
}
SHARED_ALIGNMENT = 128
#: ``new_val`` of tensormap.replace.elemtype -> type (PTX ISA, "Tensormap new_val validity").
PTX_TYPES = [DataType(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15)]
#: Swizzles as tensormap.replace sets them: (swizzle_mode, swizzle_atomicity).
SWIZZLE_FIELDS = {
    Swizzle.NONE: (0, 0),
    Swizzle.B32: (1, 0),
    Swizzle.B64: (2, 0),
    Swizzle.B128: (3, 0),
    Swizzle.B128_ATOM_32B: (3, 1),
    Swizzle.B128_ATOM_32B_FLIP_8B: (3, 2),
    Swizzle.B128_ATOM_64B: (3, 3),
}
