"""From ``kernelParams`` and ``extra``, in every form cuda-python takes them, to the kernel's argument block.

Sizes and offsets come from the PTX ``.param`` list. The driver itself cannot check an argument's type; here a
tuple's types are compared with the list, and what would read past a value is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np

from smfree.emulator.driver.errors import invalid
from smfree.emulator.ptx.ast import Param

_POINTER_BYTES = 8
_END, _BUFFER_POINTER, _BUFFER_SIZE = 0, 1, 2
_SCALARS = frozenset(
    {
        ctypes.c_bool,
        ctypes.c_char,
        ctypes.c_wchar,
        ctypes.c_byte,
        ctypes.c_ubyte,
        ctypes.c_short,
        ctypes.c_ushort,
        ctypes.c_int,
        ctypes.c_uint,
        ctypes.c_long,
        ctypes.c_ulong,
        ctypes.c_longlong,
        ctypes.c_ulonglong,
        ctypes.c_size_t,
        ctypes.c_float,
        ctypes.c_double,
    }
)


class Signature(Protocol):
    """What packing needs to know of a kernel."""

    @property
    def name(self) -> str: ...
    @property
    def params(self) -> tuple[Param, ...]: ...
    @property
    def params_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Packed:
    """An argument block that a client of a served node has packed itself."""

    data: bytes


def pack(kernel: Signature, kernel_params: Any, extra: Any) -> bytes:
    """The argument block of a launch: every parameter at its offset.

    ``kernel_params``: None, the address of a ``void**`` array, a buffer of pointers, or
    ``((values), (ctypes))``. ``extra``: 0 or the address of a CU_LAUNCH_PARAM_* array. Raises Refusal when
    they do not fit the kernel and TypeError for what the real binding does not take.
    """
    if isinstance(kernel_params, Packed):
        if len(kernel_params.data) != kernel.params_bytes:
            raise invalid(
                f"kernel {kernel.name} takes {kernel.params_bytes} bytes of parameters, got "
                f"{len(kernel_params.data)}"
            )
        return kernel_params.data
    extra_address = 0 if extra is None else int(extra)
    by_params = not (kernel_params is None or (isinstance(kernel_params, int) and kernel_params == 0))
    if extra_address and by_params:
        raise invalid(f"kernel {kernel.name} got both kernelParams and extra; give one of them")
    if extra_address:
        return _from_extra(kernel, extra_address)
    if not by_params:
        if kernel.params:
            raise invalid(f"kernel {kernel.name} takes {len(kernel.params)} parameters, kernelParams is NULL")
        return b""
    block = bytearray(kernel.params_bytes)
    for param, data in zip(kernel.params, _values(kernel, kernel_params), strict=True):
        block[param.offset : param.offset + param.size_bytes] = data
    return bytes(block)


def _values(kernel: Signature, given: Any) -> list[bytes]:
    if isinstance(given, int):
        return _through_pointers(kernel, given, None)
    if isinstance(given, tuple):
        if len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], tuple):
            return _from_tuples(kernel, *given)
    else:
        try:
            view = memoryview(given)
        except TypeError:
            pass
        else:
            if not view.contiguous:
                raise TypeError("kernelParams must be a contiguous buffer")
            address = int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0
            return _through_pointers(kernel, address, view.nbytes)
    raise TypeError(
        "kernelParams must be ((values...), (ctypes types...)), a buffer of pointers, an address or None; "
        f"got {type(given).__name__}"
    )


def _through_pointers(kernel: Signature, address: int, nbytes: int | None) -> list[bytes]:
    """Follow one pointer per parameter, as the driver does."""
    count = len(kernel.params)
    if nbytes is not None and nbytes < count * _POINTER_BYTES:
        raise invalid(
            f"kernel {kernel.name} takes {count} parameters, got {nbytes // _POINTER_BYTES} pointers"
        )
    if count == 0:
        return []
    pointers = (ctypes.c_void_p * count).from_address(address)
    values = []
    for index, (param, pointer) in enumerate(zip(kernel.params, pointers, strict=True)):
        if not pointer:
            raise invalid(f"kernel {kernel.name}: the pointer to {_label(index, param)} is NULL")
        values.append(ctypes.string_at(pointer, param.size_bytes))
    return values


def _from_tuples(kernel: Signature, values: Sequence[Any], types: Sequence[Any]) -> list[bytes]:
    if len(values) != len(types):
        raise TypeError(f"kernelParams has {len(values)} values but {len(types)} types")
    if len(values) != len(kernel.params):
        names = ", ".join(param.name for param in kernel.params)
        raise invalid(
            f"kernel {kernel.name} takes {len(kernel.params)} parameters ({names}), got {len(values)}"
        )
    return [
        _one(kernel, index, param, value, kind)
        for index, (param, value, kind) in enumerate(zip(kernel.params, values, types, strict=True))
    ]


def _one(kernel: Signature, index: int, param: Param, value: Any, kind: Any) -> bytes:
    """The bytes of one value; a type that is not as wide as the parameter is refused."""
    if kind is None:
        if callable(getattr(value, "getPtr", None)):
            return ctypes.string_at(int(value.getPtr()), param.size_bytes)
        if isinstance(value, ctypes.Structure):
            data = ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value))
        elif isinstance(value, Enum) or (isinstance(value, int) and hasattr(value, "name")):
            # The binding's own enums are ints with a name, not Enums, in newer versions.
            data = bytes(ctypes.c_int(value.value))  # type: ignore[union-attr]
        else:
            raise TypeError(
                f"kernelParams[{index}]: type None goes with a ctypes.Structure, an enum or an object with "
                f"getPtr(), not {type(value).__name__}"
            )
    elif kind is ctypes.c_void_p:
        data = _pointer(index, value)
    elif kind in _SCALARS:
        if kind is ctypes.c_double and isinstance(value, ctypes.c_float):
            value = value.value
        data = bytes(value if isinstance(value, kind) else kind(value))
    else:
        raise TypeError(f"kernelParams[{index}]: unsupported type {kind!r}")
    if len(data) != param.size_bytes:
        raise invalid(
            f"kernel {kernel.name}: {_label(index, param)} has {param.size_bytes} bytes, "
            f"{getattr(kind, '__name__', type(value).__name__)} has {len(data)}"
        )
    return data


def _pointer(index: int, value: Any) -> bytes:
    if isinstance(value, ctypes.c_void_p):
        return bytes(value)
    if isinstance(value, int):
        return bytes(ctypes.c_void_p(value))
    if callable(getattr(value, "getPtr", None)):
        # As in the real binding: the address of the object, not the handle in it.
        return bytes(ctypes.c_void_p(int(value.getPtr())))
    raise TypeError(
        f"kernelParams[{index}]: c_void_p goes with an int, a c_void_p or an object with getPtr(), "
        f"not {type(value).__name__}"
    )


def _from_extra(kernel: Signature, address: int) -> bytes:
    """An argument block the host packed itself (CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE)."""
    words = ctypes.cast(address, ctypes.POINTER(ctypes.c_size_t))
    buffer = size = 0
    position = 0
    while words[position] != _END:
        key, value = words[position], words[position + 1]
        if key == _BUFFER_POINTER:
            buffer = value
        elif key == _BUFFER_SIZE:
            size = ctypes.c_size_t.from_address(value).value
        else:
            raise invalid(f"extra[{position}] is {key}; known are CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE")
        position += 2
    if size < kernel.params_bytes or not buffer:
        raise invalid(
            f"kernel {kernel.name} takes {kernel.params_bytes} bytes of parameters, extra's buffer has {size}"
        )
    return ctypes.string_at(buffer, kernel.params_bytes)


def _label(index: int, param: Param) -> str:
    return f"parameter {index} ({param.name}, .{param.type})"
