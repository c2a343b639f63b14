"""Typed kernel arguments, packed as the kernel's ``.param`` list lays them out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smfree.cuda.errors import ArgumentError
from smfree.cuda.image import ParamInfo
from smfree.cuda.memory import DeviceArray, HostBuffer
from smfree.cuda.tensormap import MAP_BYTES, TensorMap, aligned_buffer

_FLOAT_CTYPES = (ctypes.c_float, ctypes.c_double)


@dataclass
class PackedArguments:
    """One buffer with every argument at its offset, and the array of pointers that cuLaunchKernel takes.

    ``kept`` are the objects whose memory the kernel uses.
    """

    data_address: int
    nbytes: int
    pointers: Any
    kept: tuple[Any, ...]
    _buffer: Any

    @property
    def pointers_address(self) -> int:
        """What goes in as ``kernelParams``; 0 for a kernel without parameters."""
        return ctypes.addressof(self.pointers) if len(self.pointers) else 0

    def tobytes(self) -> bytes:
        """The packed bytes, padding included."""
        return ctypes.string_at(self.data_address, self.nbytes)


def pack(
    kernel: str, params: Sequence[ParamInfo], args: Sequence[object], device: object = None
) -> PackedArguments:
    """Pack ``args`` for ``kernel``; arrays must belong to ``device`` unless it is None. Raises
    ArgumentError."""
    if len(args) != len(params):
        expected = ", ".join(f"{p.size_bytes} bytes" for p in params) or "none"
        raise ArgumentError(f"{kernel} takes {len(params)} arguments ({expected}), got {len(args)}")
    nbytes = max((p.offset + p.size_bytes for p in params), default=0)
    buffer, base = aligned_buffer(max(nbytes, 1))
    pointers = (ctypes.c_void_p * len(params))()
    kept: list[Any] = []
    for index, (param, argument) in enumerate(zip(params, args, strict=True)):
        data = _bytes_of(f"argument {index} of {kernel}", param, argument, device, kept)
        ctypes.memmove(base + param.offset, data, param.size_bytes)
        pointers[index] = base + param.offset
    return PackedArguments(base, nbytes, pointers, tuple(kept), buffer)


def _bytes_of(where: str, param: ParamInfo, argument: object, device: object, kept: list[Any]) -> bytes:
    if isinstance(argument, (DeviceArray, HostBuffer)):
        return _pointer(where, param, argument, device, kept)
    if isinstance(argument, TensorMap):
        _check_map(where, argument, device)
        kept.extend((argument, argument.allocation))
        return _sized(where, param, argument.tobytes(), f"a tensor map of {MAP_BYTES} bytes", "b")
    if isinstance(argument, np.generic):
        kind = "f" if argument.dtype.kind == "f" else "b" if argument.dtype.kind == "V" else "i"
        return _sized(where, param, argument.tobytes(), f"numpy {argument.dtype}", kind)
    if isinstance(argument, np.ndarray) and param.kind == "b":
        return _sized(
            where, param, argument.tobytes(), f"a numpy array {argument.shape} {argument.dtype}", "b"
        )
    if isinstance(argument, (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)):
        kind = "f" if isinstance(argument, _FLOAT_CTYPES) else "i"
        kind = kind if isinstance(argument, ctypes._SimpleCData) else "b"
        return _sized(where, param, bytes(argument), f"ctypes {type(argument).__name__}", kind)
    if (
        isinstance(argument, int)
        and not isinstance(argument, bool)
        and param.size_bytes == 8
        and param.kind != "f"
    ):
        if not -(2**63) <= argument < 2**64:
            raise ArgumentError(f"{where} does not fit 8 bytes (got {argument})")
        return (argument % 2**64).to_bytes(8, "little")
    raise ArgumentError(
        f"{where} ({param.size_bytes} bytes) is typed: pass a DeviceArray, a numpy scalar, a "
        "ctypes value or a "
        f"TensorMap (got {type(argument).__name__} {argument!r}); for example np.uint32(n), np.float32(x)"
    )


def _check_map(where: str, argument: TensorMap, device: Any) -> None:
    if device is not None and argument.calls is not None and argument.calls is not device.calls:
        raise ArgumentError(
            f"{where} is a tensor map of another device; make it with this device's tensor_map"
        )
    if argument.allocation is not None and argument.allocation.freed:
        raise ArgumentError(
            f"{where} is a tensor map of an array that was freed; keep the array until the launch"
        )


def _pointer(
    where: str, param: ParamInfo, argument: DeviceArray | HostBuffer, device: object, kept: list[Any]
) -> bytes:
    if device is not None and argument.device is not device:
        raise ArgumentError(f"{where} is {argument!r}, which belongs to another device; copy it there first")
    if isinstance(argument, HostBuffer):
        kept.append(argument)
        address = argument.device_ptr
    else:
        kept.append(argument.allocation)
        address = argument.ptr
    return _sized(where, param, address.to_bytes(8, "little"), f"a pointer ({argument!r})", "i")


def _sized(where: str, param: ParamInfo, data: bytes, what: str, kind: str) -> bytes:
    if len(data) != param.size_bytes:
        raise ArgumentError(
            f"{where} has {param.size_bytes} bytes in the kernel, got {what}, {len(data)} bytes"
        )
    if (param.kind == "f" and kind == "i") or (param.kind in "su" and kind == "f"):
        wanted = "a float" if param.kind == "f" else "an integer or pointer"
        raise ArgumentError(
            f"{where} is {wanted} of {param.size_bytes} bytes in the kernel, got {what}; convert it"
        )
    return data
