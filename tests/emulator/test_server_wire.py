"""What travels between a node's server and its clients: values there and back, and what nobody sends."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda
from hypothesis import given, settings
from hypothesis import strategies as st

from smfree.emulator.server.channel import Channel, ChannelClosed
from smfree.emulator.server.wire import (
    ENUMS,
    FIELDS,
    HANDLES,
    MAX_DEPTH,
    RAW,
    Bulk,
    WireError,
    decode,
    encode,
)
from tests.emulator.driver_kit import cluster_attribute, config

NOTHING = memoryview(b"")


def there_and_back(value: Any) -> Any:
    message = encode(value)
    bulk = b"".join(bytes(block) for block in message.blocks)
    return decode(message.control, memoryview(bulk))


PLAIN_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.binary(max_size=40)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(PLAIN_VALUES)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("name", sorted(HANDLES))
def test_handle_comes_back_as_what_it_was(name: str) -> None:
    found = there_and_back(HANDLES[name](7))
    assert type(found) is HANDLES[name] and int(found) == 7


@pytest.mark.parametrize("name", ["CUresult", "CUdevice_attribute", "CUmemAllocationHandleType"])
def test_every_member_of_an_enum_comes_back_under_its_name(name: str) -> None:
    for member_name, member in ENUMS[name].__members__.items():
        found = there_and_back(member)
        assert type(found) is ENUMS[name] and (found.name, int(found)) == (member.name, int(member)), (
            member_name
        )


@pytest.mark.parametrize("name", sorted(RAW))
def test_raw_structure_comes_back_byte_by_byte(name: str) -> None:
    made, size = RAW[name](), len(encode(RAW[name]()).control) - 2 - len(name)
    ctypes.memmove(int(made.getPtr()), bytes(range(size)), size)
    found = there_and_back(made)
    assert type(found) is RAW[name] and ctypes.string_at(int(found.getPtr()), size) == bytes(range(size))


def test_launch_configuration_comes_back_with_its_attributes() -> None:
    found = there_and_back(config((4, 2, 1), (64, 1, 1), 100, [cluster_attribute(2)], stream=5))
    assert (found.gridDimX, found.gridDimY, found.blockDimX, found.sharedMemBytes) == (4, 2, 64, 100)
    assert int(found.hStream) == 5 and found.numAttrs == 1
    assert found.attrs[0].id.name == "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION"
    assert found.attrs[0].value.clusterDim.x == 2


def test_last_field_of_a_structure_comes_along() -> None:
    access = cuda.CUmemAccessDesc()
    access.location.id, access.flags = 3, cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    properties = cuda.CUmemAllocationProp()
    properties.location.id, properties.allocFlags.usage = 4, 0x1234
    team = cuda.CUmulticastObjectProp()
    team.numDevices, team.size, team.flags = 8, 1 << 40, 1 << 63
    found = there_and_back([access, properties, team])
    assert (found[0].location.id, found[0].flags) == (3, access.flags)
    assert (found[1].location.id, found[1].allocFlags.usage) == (4, 0x1234)
    assert (found[2].numDevices, found[2].size, found[2].flags) == (8, 1 << 40, 1 << 63)
    if hasattr(cuda, "CUmemcpyAttributes"):
        attributes = cuda.CUmemcpyAttributes()
        attributes.srcLocHint.id, attributes.dstLocHint.id, attributes.flags = 1, 2, 3
        (copy,) = there_and_back([attributes])
        assert (copy.srcLocHint.id, copy.dstLocHint.id, copy.flags) == (1, 2, 3)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_structure_has_the_fields_that_travel(name: str) -> None:
    made = getattr(cuda, name)()
    assert [field for field in FIELDS[name] if not hasattr(made, field)] == []


def test_numbers_of_numpy_travel_as_integers_and_blocks_beside_the_message() -> None:
    assert there_and_back(np.int64(-5)) == -5
    message = encode(("x", Bulk(np.arange(4, dtype=np.uint32).data), b"y"))
    assert message.bulk_bytes == 16 and len(message.control) < 40
    name, block, rest = there_and_back(("x", Bulk(np.arange(4, dtype=np.uint32).data), b"y"))
    assert (name, bytes(block), rest) == ("x", np.arange(4, dtype=np.uint32).tobytes(), b"y")


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, ctypes.c_int(3)], ids=type)
def test_what_does_not_travel_is_refused_by_type(value: Any) -> None:
    with pytest.raises(TypeError, match=f"a {type(value).__name__} cannot be sent"):
        encode([value])


def test_integer_above_64_bits_is_refused() -> None:
    with pytest.raises(OverflowError, match="does not fit in 64 bits"):
        encode(1 << 64)


# ------------------------------------------------------------------------------------------ hostile messages


@settings(max_examples=400)
@given(st.binary(max_size=60))
def test_random_bytes_are_a_value_or_a_wire_error(data: bytes) -> None:
    try:
        decode(data, NOTHING)
    except WireError:
        return
    decode(encode(decode(data, NOTHING)).control, NOTHING)  # what is a value is one both ways


@settings(max_examples=200)
@given(PLAIN_VALUES, st.data())
def test_message_cut_short_is_a_wire_error(value: Any, data: st.DataObject) -> None:
    control = bytes(encode(value).control)
    with pytest.raises(WireError, match=r"ends within|more values than it holds|malformed"):
        decode(control[: data.draw(st.integers(0, len(control) - 1))], NOTHING)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"Z", "unknown tag"),
        (b"NN", "longer than its value"),
        (b"l\xff\xff\xff\xff", "more values than it holds"),
        (b"B" + struct.pack("<Q", 1 << 50), "ends within a block"),
        (b"l\x01\0\0\0" * (MAX_DEPTH + 2) + b"N", "nests too deeply"),
        (b"h\x06system" + b"i" + bytes(8), "'system', which does not travel"),
        (b"h\x08CUstream" + b"N", "holds an integer"),
        (b"e\x08CUresult\x07NO_SUCH", "'NO_SUCH', which does not travel"),
        (b"f\x09CUcontext", "does not travel"),
        (b"r\x0dCUmemLocation" + bytes(7), "ends within"),
        (b"f\x11CUlaunchAttribute" + b"s\x01\0\0\0x" + b"N", "malformed"),
        (b"f\x0eCUlaunchConfig" + b"N" * 10, "malformed"),
        (b"s\x01\0\0\0\xff", "malformed"),
        (b"m\x01\0\0\0l\0\0\0\0N", "malformed"),
    ],
    ids=[
        "tag",
        "rest",
        "list",
        "block",
        "depth",
        "name",
        "handle",
        "member",
        "struct",
        "field",
        "kind",
        "config",
        "text",
        "key",
    ],
)
def test_wrong_message_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode(data, NOTHING)


# ------------------------------------------------------------------------------------------------- channels


def pair() -> tuple[Channel, Channel]:
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Channel(first), Channel(second)


def test_blocks_go_where_the_receiver_wants_them() -> None:
    here, there = pair()
    data = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8)
    into = np.zeros_like(data)
    sender = threading.Thread(target=here.send, args=(("bytes", Bulk(data.data)),))
    sender.start()
    (name, block), fds = there.receive(into.data)
    sender.join()
    assert (name, fds, block.nbytes) == ("bytes", [], data.nbytes)
    np.testing.assert_array_equal(into, data)


def test_descriptors_come_with_their_message_and_no_other() -> None:
    here, there = pair()
    memory = os.memfd_create("test")
    os.write(memory, b"shared")
    here.send("first")
    here.send("second", [memory])
    os.close(memory)
    assert there.receive() == ("first", [])
    value, (fd,) = there.receive()
    assert value == "second" and os.pread(fd, 6, 0) == b"shared"
    os.close(fd)


def test_value_that_does_not_travel_leaves_the_channel_as_it_was() -> None:
    here, there = pair()
    with pytest.raises(TypeError):
        here.send(("good", object()))
    here.send("next")
    assert there.receive()[0] == "next"


@pytest.mark.parametrize("cut", [1, 15, 16, 20])
def test_channel_that_closes_within_a_message_is_closed(cut: int) -> None:
    here, there = pair()
    head = struct.pack("<4sIQ", b"SMF4", 9, 0) + bytes(encode(5).control)
    here.socket.sendall(head[:cut])
    here.close()
    with pytest.raises(ChannelClosed, match="closed the connection"):
        there.receive()
