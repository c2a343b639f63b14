"""Launching a Triton kernel through :meth:`Kernel.launch`: what Triton's own launcher would add.

A host tensor descriptor becomes a 128-byte tensor map followed by its shape and strides (without TMA: base
pointer, shape, strides, flags, then shape and strides); two scratch pointers come last; the block is
``num_warps`` warps, the shared memory what Triton asked for, and ``num_ctas`` above 1 makes clusters along
x.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.cuda.compile_triton import TritonDescriptor, type_name
from smfree.cuda.errors import ArgumentError, LaunchError
from smfree.cuda.launch import LaunchShape
from smfree.cuda.memory import DeviceArray
from smfree.cuda.tensormap import DataType, L2Promotion, OobFill, Swizzle, TensorMap, encode, spec_for

if TYPE_CHECKING:
    from smfree.cuda.device import Device
    from smfree.cuda.module import Kernel

_SCALARS = {
    "i1": np.uint8,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
    "fp16": np.float16,
    "fp32": np.float32,
    "f32": np.float32,
    "fp64": np.float64,
}
# tensordesc_meta numbers element types as the device-side descriptor does; three of them differ on the host.
_ELEMENT_TYPES = {8: DataType.FLOAT32_FTZ, 9: DataType.FLOAT64, 10: DataType.BFLOAT16}


def expand(kernel: Kernel, shape: LaunchShape, args: Sequence[object]) -> tuple[LaunchShape, list[object]]:
    """The launch shape and the full argument list of a Triton kernel; ``args`` are those of its signature.

    Raises ArgumentError for a wrong kind of argument or one that breaks the compiled specialisation,
    LaunchError for shared memory or clusters given by hand.
    """
    meta: dict[str, Any] = kernel.module.image.metadata
    shape = _shape(kernel.name, meta, shape)
    signature = meta["signature"]
    if len(args) != len(signature):
        wanted = ", ".join(f"{name}: {kind}" for name, kind in signature)
        raise ArgumentError(f"{kernel.name} takes {len(signature)} arguments ({wanted}), got {len(args)}")
    device = kernel.module.device
    descriptors = iter(meta["tensordesc_meta"] or ())
    out: list[object] = []
    for (name, kind), argument in zip(signature, args, strict=True):
        where = f"argument {name} of {kernel.name}"
        if kind.startswith("tensordesc"):
            descriptor = _descriptor(where, kind, argument)
            layout = next(descriptors, None)
            out += _with_map(device, descriptor, layout) if layout else _decomposed(kernel, descriptor)
        else:
            if name in meta["divisible_by_16"]:
                _check_divisible(where, argument)
            out.append(_plain(where, kind, argument))
    out += [_scratch(device, meta, shape), np.uint64(0)]
    return shape, out


def _shape(name: str, meta: dict[str, Any], shape: LaunchShape) -> LaunchShape:
    if shape.shared_bytes or shape.cluster is not None:
        raise LaunchError(f"{name}: Triton decides shared memory and clusters (num_ctas); leave them out")
    if meta["profile_scratch_size"]:
        raise LaunchError(f"{name} was compiled for Triton's profiler; compile it without instrumentation")
    ctas = int(meta["num_ctas"] or 1)
    x, y, z = shape.grid
    return replace(
        shape,
        grid=(x * ctas, y, z),
        shared_bytes=int(meta["shared"]),
        cluster=(ctas, 1, 1) if ctas > 1 else None,
        cooperative=shape.cooperative or bool(meta["launch_cooperative_grid"]),
        programmatic=shape.programmatic or bool(meta["launch_pdl"]),
    )


def _plain(where: str, kind: str, argument: object) -> object:
    if isinstance(argument, TritonDescriptor):
        raise ArgumentError(f"{where} is {kind}, a device-side value; pass the array, not a host descriptor")
    if kind.startswith("*"):
        if isinstance(argument, DeviceArray) and type_name(argument.dtype) != kind[1:]:
            raise ArgumentError(
                f"{where} is {kind}, got an array of {argument.dtype}; view it as another dtype"
            )
        return argument
    scalar = _SCALARS.get(kind)
    if scalar is None:
        raise ArgumentError(f"{where} has type {kind}, which cannot be passed from here; use fp32")
    if isinstance(argument, (int, float, np.generic)) and not (
        isinstance(argument, (float, np.floating)) and np.dtype(scalar).kind != "f"
    ):
        try:
            return scalar(argument)  # type: ignore[arg-type]
        except OverflowError as error:
            raise ArgumentError(f"{where} is {kind}: {argument} does not fit") from error
    raise ArgumentError(f"{where} is {kind} (got {type(argument).__name__} {argument!r}); convert it")


def _check_divisible(where: str, argument: object) -> None:
    value = argument.ptr if isinstance(argument, DeviceArray) else argument
    if isinstance(value, (int, np.integer)) and int(value) % 16:
        shown = f"address ending in {int(value) % 16:#x}" if isinstance(argument, DeviceArray) else value
        raise ArgumentError(
            f"{where} was compiled as a multiple of 16 (got {shown}); align it, or compile "
            "without that promise"
        )


def _descriptor(where: str, kind: str, argument: object) -> TritonDescriptor:
    if not isinstance(argument, TritonDescriptor):
        raise ArgumentError(
            f"{where} is a host tensor descriptor ({kind}), got {argument!r}; pass a TritonDescriptor"
        )
    spaceless = re.sub(r"\s+", "", kind)
    if not spaceless.startswith(re.sub(r"\s+", "", argument.type_name)[:-1]):
        raise ArgumentError(
            f"{where} is {kind}, got {argument.type_name}; compile for it or change the descriptor"
        )
    return argument


def _with_map(device: Device, descriptor: TritonDescriptor, layout: dict[str, Any]) -> list[object]:
    if layout.get("fp4_padded") or layout.get("is_im2col"):
        raise LaunchError("padded fp4 and im2col descriptors are not supported; use a plain tiled descriptor")
    return [_encode(device, descriptor, layout), *_shape_and_strides(descriptor)]


def _encode(device: Device, descriptor: TritonDescriptor, layout: dict[str, Any]) -> TensorMap:
    array = descriptor.array
    number = int(layout["elem_type"])
    spec = spec_for(
        array,
        layout["block_size"],
        strides_bytes=[stride * array.dtype.itemsize for stride in descriptor.element_strides[:-1]],
        data_type=_ELEMENT_TYPES.get(number) or DataType(number),
        swizzle=Swizzle(int(layout["swizzle"])),
        l2_promotion=L2Promotion.B128,
        oob_fill=OobFill.NAN if descriptor.padding == "nan" else OobFill.ZERO,
    )
    return encode(device.calls, spec, array.allocation)


def _shape_and_strides(descriptor: TritonDescriptor) -> list[object]:
    return [*map(np.int32, descriptor.array.shape), *map(np.int64, descriptor.element_strides)]


def _decomposed(kernel: Kernel, descriptor: TritonDescriptor) -> list[object]:
    """Without TMA: pointer, shape and strides as i64, the padding flag (and from some version on the tf32
    flag)."""
    flags: list[object] = [np.uint8(descriptor.padding == "nan")]
    signature: Any = kernel.module.image.metadata["signature"]
    plain = sum(not kind.startswith("tensordesc") for _, kind in signature)
    ranks = [kind.count(",") + 1 for _, kind in signature if kind.startswith("tensordesc")]
    with_two = plain + sum(3 + 4 * rank for rank in ranks) + 2
    if len(kernel.facts.params) == with_two:
        flags.append(np.uint8(0))
    shape = map(np.int64, descriptor.array.shape)
    strides = map(np.int64, descriptor.element_strides)
    return [descriptor.array, *shape, *strides, *flags, *_shape_and_strides(descriptor)]


def _scratch(device: Device, meta: dict[str, Any], shape: LaunchShape) -> object:
    size = int(meta["global_scratch_size"] or 0)
    if not size:
        return np.uint64(0)
    if int(meta["global_scratch_align"] or 1) > 256:
        raise LaunchError("Triton's scratch memory wants more than 256-byte alignment; report the kernel")
    return device.empty(shape.ctas * size, np.uint8)
