"""What travels between a node's server and its clients: values of a driver call, typed one by one.

A closed set of types: None, booleans, integers, floats, bytes, text, lists, tuples, dictionaries, and from
the binding handles, enums and a few structures. Nothing is executed or looked up by a name that is not in
these tables, so a message can be wrong but not harmful. Big blocks stay outside: :class:`Bulk` says where.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import index
from typing import Any

from cuda.bindings import driver as cuda

MAX_DEPTH = 16
_INLINE_BYTES = 1 << 20


class WireError(ValueError):
    """A message that breaks the rules of this module."""


@dataclass(frozen=True, slots=True)
class Bulk:
    """A block of bytes sent beside the message. ``data``: a contiguous buffer."""

    data: Any


def _present(*names: str) -> dict[str, Any]:
    return {name: getattr(cuda, name) for name in names if hasattr(cuda, name)}


HANDLES = _present(
    "CUdevice", "CUdeviceptr", "CUcontext", "CUmodule", "CUfunction", "CUlibrary", "CUkernel", "CUstream",
    "CUevent", "CUgraph", "CUgraphNode", "CUgraphExec", "CUmemoryPool", "CUmemGenericAllocationHandle",
    "cuuint32_t", "cuuint64_t",
)  # fmt: skip
"""Wrappers of one integer."""

ENUMS: dict[str, Any] = {
    name: kind
    for name, kind in vars(cuda).items()
    if isinstance(kind, type) and hasattr(kind, "__members__") and name.startswith(("CU", "cu"))
}

_RAW_BYTES = {
    "CUuuid": 16,
    "CUipcMemHandle": 64,
    "CUipcEventHandle": 64,
    "CUmemFabricHandle": 64,
    "CUgraphEdgeData": 8,
    "CUtensorMap": 128,
    "CUlaunchAttributeValue": 64,
    "CUmemLocation": 8,
    "CUmemAccessDesc": 12,
    "CUmemAllocationProp": 32,
    "CUmulticastObjectProp": 32,
    "CUmemcpyAttributes": 24,
}
RAW = _present(*_RAW_BYTES)
"""Structures that travel as their bytes (sizes: CUDA driver API, data structures). What could be a pointer in
them, nobody follows."""

FIELDS: dict[str, tuple[str, ...]] = {
    "CUlaunchAttribute": ("id", "value"),
    "CUlaunchConfig": (
        "gridDimX", "gridDimY", "gridDimZ", "blockDimX", "blockDimY", "blockDimZ",
        "sharedMemBytes", "hStream", "attrs", "numAttrs",
    ),
}  # fmt: skip
STRUCTS = _present(*FIELDS)
"""Structures that travel field by field."""


# ------------------------------------------------------------------------------------------------- encode


@dataclass(slots=True)
class Encoded:
    """A message: its control bytes and the blocks that follow them."""

    control: bytearray = field(default_factory=bytearray)
    blocks: list[memoryview] = field(default_factory=list)

    @property
    def bulk_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


def encode(value: Any) -> Encoded:
    """A value as a message. Raises TypeError for what does not travel."""
    message = Encoded()
    _put(value, message, 0)
    return message


def _put(value: Any, to: Encoded, depth: int) -> None:
    out = to.control
    if depth > MAX_DEPTH:
        raise TypeError("a value nests too deeply to travel")
    kind = type(value)
    if kind is int:
        _put_int(value, out)
    elif value is None:
        out += b"N"
    elif kind is bool:
        out += b"T" if value else b"F"
    elif kind is str:
        _put_bytes(b"s", value.encode(), out)
    elif kind is bytes and len(value) <= _INLINE_BYTES:
        _put_bytes(b"b", value, out)
    elif kind is Bulk or kind is bytes:
        block = memoryview(value.data if kind is Bulk else value).cast("B")
        out += b"B" + struct.pack("<Q", block.nbytes)
        to.blocks.append(block)
    elif kind is tuple or kind is list:
        out += (b"t" if kind is tuple else b"l") + struct.pack("<I", len(value))
        for item in value:
            _put(item, to, depth + 1)
    elif kind is float:
        out += b"d" + struct.pack("<d", value)
    elif kind is dict:
        out += b"m" + struct.pack("<I", len(value))
        for key, item in value.items():
            _put(key, to, depth + 1)
            _put(item, to, depth + 1)
    else:
        _put_binding(value, kind.__name__, to, depth)


def _put_binding(value: Any, name: str, to: Encoded, depth: int) -> None:
    """A handle, an enum or a structure of the binding; any other integer as an integer."""
    out = to.control
    if HANDLES.get(name) is type(value):
        _put_name(b"h", name, out)
        _put_int(int(value), out)
    elif ENUMS.get(name) is type(value):
        _put_name(b"e", name, out)
        _put_name(b"", value.name, out)  # by name: some values have two
    elif RAW.get(name) is type(value):
        _put_name(b"r", name, out)
        out += ctypes.string_at(int(value.getPtr()), _RAW_BYTES[name])
    elif STRUCTS.get(name) is type(value):
        _put_name(b"f", name, out)
        for each in FIELDS[name]:
            item = getattr(value, each)
            _put([] if each == "attrs" and item is None else item, to, depth + 1)
    elif isinstance(value, (bytearray, memoryview)):
        _put(Bulk(value), to, depth)
    elif isinstance(value, Enum):
        _put(value.value, to, depth)
    else:
        try:
            number = index(value)
        except TypeError:
            raise TypeError(f"a {name} cannot be sent to the process that serves the emulated node") from None
        _put_int(number, out)


def _put_int(value: int, out: bytearray) -> None:
    if -(1 << 63) <= value < 1 << 63:
        out += b"i" + struct.pack("<q", value)
    elif 0 <= value < 1 << 64:
        out += b"u" + struct.pack("<Q", value)
    else:
        raise OverflowError(f"{value} does not fit in 64 bits")


def _put_bytes(tag: bytes, data: bytes, out: bytearray) -> None:
    out += tag + struct.pack("<I", len(data)) + data


def _put_name(tag: bytes, name: str, out: bytearray) -> None:
    out += tag + bytes((len(name),)) + name.encode()


# ------------------------------------------------------------------------------------------------- decode


def decode(control: bytes | bytearray, bulk: memoryview) -> Any:
    """The value of a message; a :class:`Bulk` becomes a memoryview into ``bulk``. Raises WireError."""
    reader = _Reader(control, bulk)
    try:
        value = reader.value(0)
    except WireError:
        raise
    except (struct.error, IndexError, ValueError, TypeError, OverflowError, AttributeError) as error:
        raise WireError(f"the message is malformed: {error}") from None
    if reader.at != len(control) or reader.bulk_at != bulk.nbytes:
        raise WireError("the message is longer than its value")
    return value


class _Reader:
    def __init__(self, control: bytes | bytearray, bulk: memoryview) -> None:
        self.control = bytes(control)
        self.bulk = bulk
        self.at = 0
        self.bulk_at = 0

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise WireError("the message nests too deeply")
        tag = self.take(1)
        read = _READERS.get(tag)
        if read is None:
            raise WireError(f"the message has an unknown tag {tag!r}")
        return read(self, depth)

    def take(self, count: int) -> bytes:
        found = self.control[self.at : self.at + count]
        if len(found) != count:
            raise WireError("the message ends within a value")
        self.at += count
        return found

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def block(self) -> bytes:
        return self.take(self.number("<I"))

    def items(self, depth: int, per_item: int = 1) -> Iterator[Any]:
        count = self.number("<I") * per_item
        if count > len(self.control) - self.at:
            raise WireError("the message counts more values than it holds")
        return (self.value(depth + 1) for _ in range(count))

    def from_table(self, table: Mapping[str, Any]) -> tuple[str, Any]:
        name = self.take(self.number("<B")).decode("ascii")
        if name not in table:
            raise WireError(f"the message names {name!r}, which does not travel")
        return name, table[name]

    def outside(self) -> memoryview:
        size = self.number("<Q")
        found = self.bulk[self.bulk_at : self.bulk_at + size]
        if found.nbytes != size:
            raise WireError("the message ends within a block")
        self.bulk_at += size
        return found

    def mapping(self, depth: int) -> dict[Any, Any]:
        flat = list(self.items(depth, 2))
        return dict(zip(flat[::2], flat[1::2], strict=True))

    def member(self) -> Any:
        _, kind = self.from_table(ENUMS)
        return self.from_table(kind.__members__)[1]

    def handle(self, depth: int) -> Any:
        kind, value = self.from_table(HANDLES)[1], self.value(depth + 1)
        if type(value) is not int:
            raise WireError(f"a {kind.__name__} holds an integer")
        return kind(value)

    def raw(self) -> Any:
        name, kind = self.from_table(RAW)
        data, made = self.take(_RAW_BYTES[name]), kind()
        ctypes.memmove(int(made.getPtr()), data, len(data))
        return made

    def fields(self, depth: int) -> Any:
        name, kind = self.from_table(STRUCTS)
        made = kind()
        for each in FIELDS[name]:
            setattr(made, each, self.value(depth + 1))
        return made


_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda reader, depth: None,
    b"T": lambda reader, depth: True,
    b"F": lambda reader, depth: False,
    b"i": lambda reader, depth: reader.number("<q"),
    b"u": lambda reader, depth: reader.number("<Q"),
    b"d": lambda reader, depth: reader.number("<d"),
    b"s": lambda reader, depth: reader.block().decode(),
    b"b": lambda reader, depth: reader.block(),
    b"B": lambda reader, depth: reader.outside(),
    b"t": lambda reader, depth: tuple(reader.items(depth)),
    b"l": lambda reader, depth: list(reader.items(depth)),
    b"m": lambda reader, depth: reader.mapping(depth),
    b"h": lambda reader, depth: reader.handle(depth),
    b"e": lambda reader, depth: reader.member(),
    b"r": lambda reader, depth: reader.raw(),
    b"f": lambda reader, depth: reader.fields(depth),
}
