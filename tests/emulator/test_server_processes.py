"""Several real processes on one served node: what they share, and what is left when one of them dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.server import NodeLost, NodeProcess, RemoteDriver, start
from smfree.emulator.server.channel import Channel, ChannelClosed, connect
from smfree.emulator.server.link import Link
from tests.emulator.driver_kit import CUresult, load, ok, refused, word_at
from tests.emulator.server_kit import Servers, child, opened, told
from tests.emulator.test_driver_kernels import COPY, TYPES

LAZY = 1
LOST = CUresult.CUDA_ERROR_MPS_RPC_FAILURE


@pytest.fixture
def node(servers: Servers) -> NodeProcess:
    return servers.node("h100", "h100")


@pytest.fixture
def driver(servers: Servers) -> RemoteDriver:
    return servers.driver("h100", "h100")


def within(seconds: float, true: Callable[[], bool]) -> bool:
    """Whether something becomes true in time."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def handle_of(key: bytes) -> Any:
    made = cuda.CUipcMemHandle()
    ctypes.memmove(made.getPtr(), key, 64)
    return made


def key_of(handle: Any) -> bytes:
    return ctypes.string_at(handle.getPtr(), 64)


def words(driver: Any, pointer: Any, count: int) -> list[int]:
    found = (ctypes.c_uint32 * count)()
    ok(driver.cuMemcpyDtoH(found, pointer, 4 * count), driver)
    return list(found)


def memory_with(driver: Any, *values: int) -> Any:
    pointer = ok(driver.cuMemAlloc(4 * len(values)))
    ok(driver.cuMemcpyHtoD(pointer, (ctypes.c_uint32 * len(values))(*values), 4 * len(values)), driver)
    return pointer


# ------------------------------------------------------------------------------------------- what they share


def reads_and_answers(parent: Connection, address: str, key: bytes, raw: int) -> None:
    """On device 1: what a raw pointer is worth, then the handle: read two words, let a kernel copy them."""
    driver = opened(RemoteDriver(Link(address, "rank 1")), 1)
    into = (ctypes.c_uint32 * 2)()
    code = driver.cuMemcpyDtoH(into, raw, 8)[0]
    parent.send((code.name, driver.report()))
    opened_at = ok(driver.cuIpcOpenMemHandle(handle_of(key), LAZY), driver)
    parent.send((int(opened_at), words(driver, opened_at, 2)))
    params = ((int(opened_at) + 8, int(opened_at), 2), TYPES)
    ok(driver.cuLaunchKernel(load(driver, COPY, b"copy"), 1, 1, 1, 32, 1, 1, 0, 0, params, 0), driver)
    ok(driver.cuCtxSynchronize(), driver)
    parent.send("written")
    parent.recv()


def test_memory_is_shared_by_its_handle_not_by_its_pointer(node: NodeProcess, driver: RemoteDriver) -> None:
    memory = memory_with(driver, 11, 22, 0, 0)
    key = key_of(ok(driver.cuIpcGetMemHandle(memory), driver))
    with child(reads_and_answers, node.address, key, int(memory)) as (process, other):
        code, report = told(other)
        assert code == "CUDA_ERROR_INVALID_VALUE"
        assert f"rank 1 (pid {process.pid}) has not opened" in report and f"process {os.getpid()}" in report
        address, seen = told(other)
        assert address != int(memory) and seen == [11, 22]
        assert told(other) == "written"
        assert words(driver, memory, 4) == [11, 22, 11, 22]
        other.send("end")
        process.join(5)
        assert process.exitcode == 0


def test_virtual_memory_travels_as_a_descriptor(servers: Servers) -> None:
    """Two clients; the descriptor would go over a Unix socket between them."""
    first, second = servers.driver("h100", "h100"), servers.driver("h100", "h100")
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    properties.requestedHandleTypes = kind
    size, addresses = 2 << 20, []
    made = ok(first.cuMemCreate(size, properties, 0), first)
    descriptor = ok(first.cuMemExportToShareableHandle(made, kind, 0), first)
    imported = ok(second.cuMemImportFromShareableHandle(descriptor, kind), second)
    os.close(descriptor)
    refused(second, second.cuMemImportFromShareableHandle(descriptor, kind), "INVALID_VALUE", "SCM_RIGHTS")
    for driver, handle in ((first, made), (second, imported)):
        address = ok(driver.cuMemAddressReserve(size, 0, 0, 0), driver)
        ok(driver.cuMemMap(address, size, 0, handle, 0), driver)
        access = cuda.CUmemAccessDesc()
        access.location = properties.location
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        ok(driver.cuMemSetAccess(address, size, [access], 1), driver)
        addresses.append(address)
    ok(first.cuMemsetD32(addresses[0], 5, 1))
    assert words(first, addresses[0], 1) == words(second, addresses[1], 1) == [5]


def waits_for_a_word(parent: Connection, address: str, key: bytes) -> None:
    """A stream that waits for a word which only the other process writes."""
    driver = opened(RemoteDriver(Link(address, "rank 1")), 1)
    flag = ok(driver.cuIpcOpenMemHandle(handle_of(key), LAZY), driver)
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWaitValue32(stream, flag, 7, 1), driver)
    parent.send("waiting")
    parent.send((driver.cuStreamSynchronize(stream)[0].name, driver.report()))
    parent.recv()


@pytest.mark.parametrize("written", [7, 6])
def test_wait_for_another_process_ends_with_its_write_or_with_the_limit(
    node: NodeProcess, driver: RemoteDriver, written: int
) -> None:
    flag = memory_with(driver, 0)
    with child(waits_for_a_word, node.address, key_of(ok(driver.cuIpcGetMemHandle(flag)))) as (_, other):
        assert told(other) == "waiting"
        time.sleep(0.05)
        assert not other.poll()
        ok(driver.cuMemsetD32(flag, written, 1))
        ok(driver.cuCtxSynchronize(), driver)
        code, report = told(other)
        if written == 7:
            assert code == "CUDA_SUCCESS"
        else:
            assert code == "CUDA_ERROR_TIMEOUT" and "== 0x7, it holds 0x6" in report


# ------------------------------------------------------------------------------------- what death leaves


def holds_memory(parent: Connection, address: str) -> None:
    """Memory, page-locked memory, a handle for others, and a stream that will never go on."""
    driver = opened(RemoteDriver(Link(address, "rank 5")))
    memory = memory_with(driver, 1, 2)
    ok(driver.cuMemHostAlloc(1 << 20, 2))
    blocked = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWaitValue32(blocked, memory, 99, 1))
    parent.send(key_of(ok(driver.cuIpcGetMemHandle(memory), driver)))
    driver.cuStreamSynchronize(blocked)


def test_killed_client_leaves_nothing_on_the_node(node: NodeProcess, driver: RemoteDriver) -> None:
    before, _ = ok(driver.cuMemGetInfo())
    fds = len(os.listdir(f"/proc/{node.pid}/fd"))
    with child(holds_memory, node.address) as (process, other):
        memory = ok(driver.cuIpcOpenMemHandle(handle_of(told(other)), LAZY), driver)
        assert words(driver, memory, 2) == [1, 2]
        assert ok(driver.cuMemGetInfo())[0] < before
        os.kill(process.pid, signal.SIGKILL)
        assert within(1.0, lambda: len(os.listdir(f"/proc/{node.pid}/fd")) <= fds)
        assert words(driver, memory, 2) == [1, 2]
        ok(driver.cuIpcCloseMemHandle(memory))
        assert within(1.0, lambda: ok(driver.cuMemGetInfo())[0] >= before)  # earlier tests' may go meanwhile
    assert words(driver, memory_with(driver, 3), 1) == [3]


def test_killed_server_is_an_error_of_the_pending_call_and_of_every_later_one() -> None:
    with start("h100") as node:
        driver = opened(RemoteDriver(Link(node.address)))
        context, flag = ok(driver.cuCtxGetCurrent()), memory_with(driver, 0)
        pinned = ok(driver.cuMemHostAlloc(64, 0))
        stream = ok(driver.cuStreamCreate(1))
        ok(driver.cuStreamWaitValue32(stream, flag, 1, 1))
        answers: list[Any] = []

        def waits() -> None:
            driver.cuCtxSetCurrent(context)
            answers.append((driver.cuStreamSynchronize(stream), time.monotonic()))

        thread = threading.Thread(target=waits)
        thread.start()
        time.sleep(0.1)
        assert not answers and not driver.lost
        os.kill(node.pid, signal.SIGKILL)
        killed = time.monotonic()
        thread.join(5)
        (answer, when), words = answers[0], ("emulated node", f"pid {node.pid}) is gone", "Start the node")
        assert answer == (LOST,) and when - killed < 1.0
        assert driver.lost and all(word in driver.report() for word in words)
        assert driver.cuMemAlloc(16) == (LOST, None)
        assert driver.cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, None, 0) == (LOST,)
        assert "cuLaunchKernel: CUDA_ERROR_MPS_RPC_FAILURE" in driver.report()
        with pytest.raises(NodeLost, match="is gone"):
            _ = driver.node.findings
        word_at(pinned).value = 1  # what a program still holds stays its own
        with pytest.raises(NodeLost, match="no process serves an emulated node"):
            Link(node.address)


def starts_a_server(parent: Connection) -> None:
    with start("h100") as node:
        parent.send((node.pid, node.address))
        time.sleep(60)


def test_killed_parent_takes_the_server_with_it() -> None:
    with child(starts_a_server) as (process, other):
        pid, address = told(other)
        driver = opened(RemoteDriver(Link(address)))
        os.kill(process.pid, signal.SIGKILL)
        assert within(2.0, lambda: driver.cuMemGetInfo()[0] is LOST)
        assert within(2.0, lambda: not Path(f"/proc/{pid}").exists() or "Z" in state_of(pid))
        assert within(2.0, lambda: not listening(address))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def listening(address: str) -> bool:
    return f"@{address}" in Path("/proc/net/unix").read_text()


def attaches_until_told(parent: Connection, address: str) -> None:
    opened(RemoteDriver(Link(address)))
    parent.send("in")
    parent.recv()


@pytest.mark.parametrize("killed", [False, True], ids=["ends", "is_killed"])
def test_nothing_is_left_in_the_system(killed: bool) -> None:
    resource_tracker.ensure_running()  # of multiprocessing: one descriptor, once
    before = sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    with start("h100") as node:
        with child(attaches_until_told, node.address) as (process, other):
            assert told(other) == "in" and listening(node.address)
            if killed:
                os.kill(node.pid, signal.SIGKILL)
                os.kill(process.pid, signal.SIGKILL)
            else:
                other.send("end")
            process.join(5)
        driver = None if killed else opened(RemoteDriver(Link(node.address)))
        if driver is not None:
            ok(driver.cuMemHostAlloc(4096, 0))
        del driver
    assert not node.alive and not listening(node.address)
    assert (sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))) == before


def test_server_that_is_told_to_end_waits_for_its_last_client() -> None:
    with start("h100") as node:
        driver = opened(RemoteDriver(Link(node.address)))
        closing = threading.Thread(target=node.close)
        closing.start()
        time.sleep(0.1)
        assert node.alive and words(driver, memory_with(driver, 4), 1) == [4]
        driver.end()
        closing.join(5)
        assert not node.alive
        assert driver.cuMemAlloc(16) == (LOST, None) and "has left the node" in driver.report()


def forks(parent: Connection, address: str) -> None:
    driver = opened(RemoteDriver(Link(address)))
    reading, writing = os.pipe()
    if os.fork() == 0:
        code = driver.cuMemAlloc(16)[0]
        os.write(writing, f"{code.name} {driver.report()}".encode())
        os._exit(0)
    said = os.read(reading, 4096).decode()
    os.wait()
    parent.send((said, driver.cuMemAlloc(16)[0].name))
    parent.recv()


def test_forked_child_is_refused_and_harms_nobody(node: NodeProcess) -> None:
    with child(forks, node.address) as (_, other):
        said, still = told(other)
        assert said.startswith("CUDA_ERROR_NOT_INITIALIZED") and "does not survive a fork" in said
        assert still == "CUDA_SUCCESS"
        other.send("end")


# -------------------------------------------------------------------------------------------- hostile bytes

HEADER = struct.Struct("<4sIQ")


def raw(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    connection.connect("\0" + address)
    return connection


def said_until_closed(connection: socket.socket) -> bytes:
    said = b""
    with contextlib.suppress(ConnectionResetError):  # what was not read is thrown back
        while data := connection.recv(4096):
            said += data
    return said


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        HEADER.pack(b"SMF4", 0xFFFF_FFFF, 0),
        HEADER.pack(b"SMF4", 16, 1 << 60),
        HEADER.pack(b"SMF4", 1 << 20, 0),
        HEADER.pack(b"SMF4", 8, 0) + b"\x80\x04K\x01.\0\0\0",
        HEADER.pack(b"SMF4", 1, 0) + b"N",
        HEADER.pack(b"SMF4", 5, 0) + b"l\xff\xff\xff\xff",
    ],
    ids=["http", "huge_control", "huge_blocks", "truncated", "pickle", "no_greeting", "huge_list"],
)
def test_garbage_is_sent_away_and_the_node_lives(
    node: NodeProcess, driver: RemoteDriver, data: bytes
) -> None:
    with raw(node.address) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = said_until_closed(connection)
    assert answer == b"" or b"refused" in answer
    assert words(driver, memory_with(driver, 8), 1) == [8]


def greeted(node: NodeProcess) -> tuple[Channel, Channel]:
    """A lifeline and a connection for calls, made by hand."""
    lifeline = connect(node.address)
    lifeline.send({"protocol": 1, "token": None, "label": ""})
    token = lifeline.receive()[0]["token"]
    calls = connect(node.address)
    calls.send({"protocol": 1, "token": token})
    assert calls.receive()[0] == {}
    return lifeline, calls


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (7, "a request is"),
        (("cuInit", "x", 1, [0]), "a request is"),
        (("cuMemcpyHtoD", "x", 1, (1 << 40, 0x5555_5555_0000, 16)), "no address of the node"),
        (("cuMemcpyHtoD", "x", 1, (1 << 40, b"123", 16)), "3 bytes came for a copy of 16"),
        (("cuMemcpy", "x", 1, (0x5555_5555_0000, 1 << 40, 16)), "no address of the node"),
        (("cuModuleLoadData", "x", 1, (0x5555_5555_0000,)), "comes as its bytes"),
        (("cuLaunchKernel", "x", 1, (1, 1, 1, 1, 1, 1, 1, 0, 0, 0x5555_5555_0000, 0)), "packed parameters"),
        (("cuMemHostRegister", "x", 1, (0, 16, 0)), "comes as a descriptor"),
    ],
    ids=["number", "list", "read", "short", "write", "image", "params", "no_descriptor"],
)
def test_forged_request_is_refused_by_name(
    node: NodeProcess, driver: RemoteDriver, request_: Any, reason: str
) -> None:
    lifeline, calls = greeted(node)
    calls.send(request_)
    assert reason in calls.receive()[0]["refused"]
    with pytest.raises(ChannelClosed):
        calls.receive()
    assert words(driver, memory_with(driver, 9), 1) == [9]
    lifeline.close()


@pytest.mark.parametrize("name", ["cuGraphCreate", "end", "__init__", "process", "_find", "cuLaunchHostFunc"])
def test_only_what_is_served_can_be_called(node: NodeProcess, name: str) -> None:
    lifeline, calls = greeted(node)
    calls.send((name, "x", 1, ()))
    assert calls.receive()[0] == ("error", "NotEmulated", f"{name} is not served to other processes")
    calls.send(("cuDriverGetVersion", "x", 1, ()))
    assert calls.receive()[0][1] == (CUresult.CUDA_SUCCESS, cuda.CUDA_VERSION)
    lifeline.close()


def test_unknown_token_and_another_version_are_sent_away(node: NodeProcess) -> None:
    for greeting, reason in (
        ({"protocol": 1, "token": "0" * 32}, "not known here"),
        ({"protocol": 99, "token": None}, "another version"),
    ):
        stranger = connect(node.address)
        stranger.send(greeting)
        assert reason in stranger.receive()[0]["refused"]


def test_descriptors_nobody_asked_for_are_closed(node: NodeProcess) -> None:
    lifeline, calls = greeted(node)
    fds = len(os.listdir(f"/proc/{node.pid}/fd"))
    for _ in range(5):
        calls.send(("cuDriverGetVersion", "x", 1, ()), [0, 1, 2])
        assert calls.receive()[0][0] == "result"
    assert len(os.listdir(f"/proc/{node.pid}/fd")) <= fds
    lifeline.close()
