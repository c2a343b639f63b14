"""What cuTensorMapEncodeTiled asks of a tensor map, and tensormap.replace too once a copy uses the map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from smfree.emulator.errors import CopyFault, Unsupported
from smfree.emulator.tensor_types import (
    CONVERTED,
    ELEMENT_BYTES,
    FLOATS,
    SWIZZLE_PERIOD,
    SWIZZLE_SPAN,
    DataType,
    Interleave,
    OutOfBoundsFill,
    Swizzle,
)


def refuse(rule: str, value: str, remedy: str) -> CopyFault:
    """A broken rule: the value and the remedy."""
    return CopyFault(f"{value}; {remedy}", rule=f"tensormap.{rule}")


@contextmanager
def speaking(who: str) -> Iterator[None]:
    """Faults say who found them."""
    try:
        yield
    except (CopyFault, Unsupported) as fault:
        raise type(fault)(f"{who}: {fault.message}", rule=fault.rule) from None


def check(
    kind: DataType,
    inter: Interleave,
    swz: Swizzle,
    fill: OutOfBoundsFill,
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    steps: Sequence[int],
) -> None:
    """Every rule on the fields' values."""
    _check_memory(kind, inter, address, dims, strides)
    _check_box(kind, inter, swz, box, steps)
    if inter is not Interleave.NONE:
        if len(dims) < 3:
            raise refuse(
                "rank", f"interleaved layouts need rank 3 or more (got {len(dims)})", "use interleave NONE"
            )
        if inter is Interleave.B32 and swz is not Swizzle.B32:
            raise refuse("swizzle", f"interleave 32B needs swizzle 32B (got {swz.name})", "set swizzle 32B")
    if fill is OutOfBoundsFill.NAN_REQUEST_ZERO_FMA and kind not in FLOATS:
        raise refuse("fill", f"NaN fill is for floating-point types (got {kind.name})", "use oob fill NONE")
    if inter is not Interleave.NONE:
        raise Unsupported(
            f"tensor maps with interleave {inter.name} are not modelled; use NONE", rule="tensormap"
        )
    if kind not in ELEMENT_BYTES:
        raise Unsupported(f"packed tensor type {kind.name} is not modelled", rule="tensormap")
    if kind in CONVERTED:
        raise Unsupported(
            f"tensor maps of {kind.name} are not modelled: the TMA rounds or flushes their elements in a "
            "way that is not documented; use FLOAT32",
            rule="tensormap",
        )
    if swz not in SWIZZLE_PERIOD:
        raise Unsupported(f"swizzle {swz.name} is not modelled (its pattern is unverified)", rule="tensormap")


def _check_memory(
    kind: DataType, inter: Interleave, address: int, dims: Sequence[int], strides: Sequence[int]
) -> None:
    aligned = (
        32 if inter is Interleave.B32 or kind in (DataType.U4X16_ALIGN16B, DataType.U6X16_ALIGN16B) else 16
    )
    if address % aligned:
        raise refuse(
            "address",
            f"the global address must be {aligned}-byte aligned (got 0x{address:x})",
            f"start the view at a multiple of {aligned} bytes",
        )
    for d, dim in enumerate(dims):
        if not 1 <= dim <= 1 << 32:
            raise refuse("dims", f"dimension {d} must be 1..2^32 (got {dim})", "an empty tensor needs no map")
    for d, stride in enumerate(strides, start=1):
        if stride % aligned or not 0 <= stride < 1 << 40:
            raise refuse(
                "strides",
                f"the stride of dimension {d} must be a multiple of {aligned} and below 2^40 bytes (got "
                f"{stride})",
                f"pad the rows to {-(-stride // aligned) * aligned} bytes",
            )


def _check_box(
    kind: DataType, inter: Interleave, swz: Swizzle, box: Sequence[int], steps: Sequence[int]
) -> None:
    for d, (extent, step) in enumerate(zip(box, steps, strict=True)):
        if not 1 <= extent <= 256:
            raise refuse("box", f"box dimension {d} must be 1..256 elements (got {extent})", "split the box")
        if not 1 <= step <= 8:
            raise refuse(
                "element_strides", f"element stride {d} must be 1..8 (got {step})", "use strides up to 8"
            )
    element = ELEMENT_BYTES.get(kind)
    if element is None or inter is not Interleave.NONE:
        return
    inner = box[0] * element
    if inner % 16:
        raise refuse(
            "box",
            f"the inner box must be a multiple of 16 bytes (got {box[0]} x {element} = {inner})",
            f"use a multiple of {16 // element} elements",
        )
    span = SWIZZLE_SPAN.get(swz)
    if span is not None and inner > span:
        raise refuse(
            "swizzle_span",
            f"the inner box of {inner} bytes exceeds the {span}-byte span of swizzle {swz.name}",
            f"use at most {span // element} elements in dimension 0, or several boxes",
        )
