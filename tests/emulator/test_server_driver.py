"""The client's driver has the shape and the answers of the stand-in, which has those of the real one."""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver, NotEmulated
from smfree.emulator.errors import BarrierFault
from smfree.emulator.server import RemoteDriver
from smfree.emulator.server.calls import NODE_ADDRESSES, PLAIN, REFUSED, SPECIAL
from smfree.emulator.server.shared import ARENA, ARENA_END
from tests.emulator import (
    test_driver_graphs,
    test_driver_kernels,
    test_driver_launch,
    test_driver_memory,
    test_driver_streams,
    test_driver_tensormap,
    test_driver_vmm,
)
from tests.emulator.driver_kit import load, ok, refused, word_at
from tests.emulator.server_kit import Servers
from tests.emulator.test_driver_kernels import COPY, TYPES

EMULATED = sorted(name for name in dir(Driver) if name.startswith("cu"))
SERVED = sorted(name for name in EMULATED if name not in REFUSED)
KITS = (
    test_driver_graphs, test_driver_kernels, test_driver_launch, test_driver_memory, test_driver_streams,
    test_driver_tensormap, test_driver_vmm,
)  # fmt: skip
INSIDE = (
    *("executor", "Executor", ".node", ".process", ".memory", "attach", "a100", "process 0"),
    *(
        "cuMemHostRegister",
        "elsewhere",
        " processes(",
        " used(driver",
        "second(driver",
        "test_copies_of_host_memory_read_it_when_they_run",
    ),
)
"""Words of tests that look into the emulator, want private memory seen or a second node; all others ask the
driver alone."""

ODD_PARITY = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry odd(.param .u32 parity)
{
  .reg .pred %p;
  .reg .b32 %r0;
  .shared .align 8 .b64 full;
  ld.param.u32 %r0, [parity];
  mbarrier.init.shared.b64 [full], 1;
  mbarrier.test_wait.parity.shared.b64 %p, [full], %r0;
  ret;
}
"""


@pytest.fixture
def driver(servers: Servers) -> RemoteDriver:
    return servers.driver()


# ---------------------------------------------------------------------------------------------- the shape


def test_every_emulated_call_is_served_or_refused_by_name() -> None:
    """A new call of the stand-in belongs into one of the tables of smfree.emulator.server.calls."""
    assert [name for name in EMULATED if name not in PLAIN | SPECIAL | REFUSED.keys()] == []
    assert [name for name in SERVED if name not in dir(RemoteDriver)] == []


@pytest.mark.parametrize("name", SERVED)
def test_served_call_has_the_same_parameters_and_values(name: str) -> None:
    ours, theirs = getattr(RemoteDriver, name), getattr(Driver, name)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert ours.emulated_outputs == theirs.emulated_outputs


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_call_that_is_not_served_says_why(driver: RemoteDriver, name: str) -> None:
    with pytest.raises(
        NotEmulated, match=f"{name} is not emulated on a node that another process serves; a "
    ):
        getattr(driver, name)()
    assert not hasattr(driver, name)
    assert hasattr(driver, "cuMemAlloc")


def test_what_the_emulator_adds_is_there_too() -> None:
    added = [name for name in vars(Driver) if not name.startswith(("_", "cu"))] + ["describe_function"]
    assert [name for name in added if name not in dir(RemoteDriver)] == []


# -------------------------------------------------------------------------- the stand-in's own tests, again


def asks_the_driver_alone(kit: ModuleType) -> dict[str, Callable[..., None]]:
    tests = {name: test for name, test in vars(kit).items() if name.startswith("test_")}
    return {
        f"{name}__served": test
        for name, test in tests.items()
        if not any(word in inspect.getsource(test) for word in INSIDE)
    }


for _kit in KITS:
    globals().update(asks_the_driver_alone(_kit))


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch, servers: Servers) -> None:
    """The tests taken over open a client of a served node instead of a node of their own."""
    for kit in KITS:
        for name in ("open_driver", "open_real"):
            monkeypatch.setattr(kit, name, servers.driver, raising=False)


def test_most_tests_of_the_stand_in_are_taken_over() -> None:
    assert sum(name.endswith("__served") for name in globals()) > 60


# --------------------------------------------------------------------------------------------- host memory


def run_copy(driver: Any, dst: Any, src: Any, count: int) -> None:
    """A kernel that copies ``count`` words."""
    params = ((int(dst), int(src), count), TYPES)
    ok(driver.cuLaunchKernel(load(driver, COPY, b"copy"), 1, 1, 1, 128, 1, 1, 0, 0, params, 0), driver)
    ok(driver.cuCtxSynchronize(), driver)


def test_page_locked_memory_has_one_address_and_kernels_write_what_the_client_reads(
    driver: RemoteDriver,
) -> None:
    here, there = ok(driver.cuMemHostAlloc(512, 2)), ok(driver.cuMemAllocHost(512))
    assert ARENA <= here < there < ARENA_END
    assert int(ok(driver.cuMemHostGetDevicePointer(here, 0))) == here
    word_at(here).value, word_at(here + 4).value = 0xDEAD, 0xBEEF
    run_copy(driver, there, here, 2)
    assert (word_at(there).value, word_at(there + 4).value) == (0xDEAD, 0xBEEF)
    for pointer in (here, there):
        ok(driver.cuMemFreeHost(pointer))
    refused(driver, driver.cuMemHostGetFlags(here), "INVALID_VALUE", "page-locked")


def test_asynchronous_copies_to_page_locked_memory_land_without_a_reply(driver: RemoteDriver) -> None:
    pinned, memory = ok(driver.cuMemHostAlloc(64, 0)), ok(driver.cuMemAlloc(64))
    word_at(pinned).value = 7
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuMemcpyHtoDAsync(memory, pinned, 64, stream), driver)
    word_at(pinned).value = 8  # the copy reads when it runs
    ok(driver.cuStreamSynchronize(stream))
    word_at(pinned).value = 9
    ok(driver.cuMemcpyDtoHAsync(pinned, memory, 64, stream), driver)
    assert word_at(pinned).value == 9
    ok(driver.cuStreamSynchronize(stream))
    assert word_at(pinned).value == 8


def test_shared_memory_is_registered_at_an_address_of_the_node(driver: RemoteDriver) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 3 * mmap.PAGESIZE)
    shared = mmap.mmap(fd, 2 * mmap.PAGESIZE, offset=mmap.PAGESIZE)
    here = ctypes.addressof(ctypes.c_char.from_buffer(shared)) + 256
    ok(driver.cuMemHostRegister(here, 1024, 2), driver)
    there = int(ok(driver.cuMemHostGetDevicePointer(here + 8, 0)))
    assert ARENA <= there < ARENA_END and there != here + 8
    attribute = cuda.CUpointer_attribute
    assert ok(driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER, here + 8)) == here + 8
    device_pointer = attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
    assert int(ok(driver.cuPointerGetAttribute(device_pointer, here + 8))) == there
    memory = ok(driver.cuMemAlloc(16))
    word_at(here + 8).value = 77
    run_copy(driver, memory, there, 1)
    ok(driver.cuMemcpyDtoH(here + 16, memory, 4), driver)
    assert word_at(here + 16).value == 77
    refused(driver, driver.cuMemHostRegister(here + 512, 16, 0), "HOST_MEMORY_ALREADY_REGISTERED", "overlaps")
    ok(driver.cuMemHostUnregister(here))
    refused(driver, driver.cuMemHostUnregister(here), "HOST_MEMORY_NOT_REGISTERED", "no registered range")
    refused(driver, driver.cuMemHostGetDevicePointer(here + 8, 0), "INVALID_VALUE", "page-locked")
    os.close(fd)


def test_private_memory_cannot_be_registered(driver: RemoteDriver) -> None:
    private = np.frombuffer(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    words = "private memory of this process", "cuMemHostAlloc", "memfd"
    refused(driver, driver.cuMemHostRegister(private, private.nbytes, 0), "NOT_SUPPORTED", *words)


def test_registered_memory_is_no_device_pointer_here(servers: Servers) -> None:
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
    assert ok(servers.driver().cuDeviceGetAttribute(attribute, 0)) == 0


def test_memory_of_no_node_is_refused_not_followed(driver: RemoteDriver) -> None:
    """An address in the node's part of the address space that holds nothing there."""
    memory = ok(driver.cuMemAlloc(16))
    for address in (ARENA_END - 4096, *(end - 4096 for _, end in NODE_ADDRESSES)):
        refused(driver, driver.cuMemcpyHtoD(memory, address, 16), "INVALID_VALUE", f"{address:#x}")
        refused(driver, driver.cuMemcpyAsync(address, memory, 16, 0), "INVALID_VALUE", f"{address:#x}")
    word = ctypes.c_uint32(5)
    ok(driver.cuMemcpyHtoD(memory, ctypes.addressof(word), 4), driver)


def test_freed_page_locked_memory_of_a_queued_copy_hurts_nobody(driver: RemoteDriver) -> None:
    pinned, flag = ok(driver.cuMemHostAlloc(64, 0)), ok(driver.cuMemAlloc(64))
    ok(driver.cuMemcpyHtoD(flag, bytes(64), 64))
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWaitValue32(stream, flag, 1, 1))
    ok(driver.cuMemcpyHtoDAsync(flag, pinned, 64, stream))
    other = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWriteValue32(other, flag, 1, 0))
    ok(driver.cuMemFreeHost(pinned), driver)
    ok(driver.cuCtxSynchronize(), driver)


def test_graph_keeps_page_locked_memory_and_refuses_what_it_could_not_keep(driver: RemoteDriver) -> None:
    stream, memory = ok(driver.cuStreamCreate(1)), ok(driver.cuMemAlloc(8))
    pinned, private = ok(driver.cuMemHostAlloc(8, 0)), ctypes.c_uint32(1)
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    ok(driver.cuStreamBeginCapture(stream, mode), driver)
    ok(driver.cuMemcpyHtoDAsync(memory, pinned, 8, stream), driver)
    answer = driver.cuMemcpyHtoDAsync(memory, ctypes.addressof(private), 4, stream)
    refused(driver, answer, "NOT_SUPPORTED", "pageable memory of another process", "page-locked")
    graph = ok(driver.cuGraphInstantiate(ok(driver.cuStreamEndCapture(stream), driver), 0), driver)
    for value in (5, 6):
        word_at(pinned).value = value
        ok(driver.cuGraphLaunch(graph, stream), driver)
        ok(driver.cuMemcpyDtoHAsync(pinned + 4, memory, 4, stream), driver)
        ok(driver.cuStreamSynchronize(stream), driver)
        assert word_at(pinned + 4).value == value


# ------------------------------------------------------------------------- what the emulator adds to a driver


def test_settings_findings_and_records_are_seen_from_here(servers: Servers) -> None:
    driver = servers.driver()
    assert driver.node.clocked and [device.profile.key for device in driver.node.devices] == ["h100"]
    memory = ok(driver.cuMemAlloc(8))
    ok(driver.cuMemsetD8(memory, 0, 8))
    ok(driver.cuCtxSynchronize())
    state = driver.node.devices[0]
    state.l2.flush()
    run_copy(driver, int(memory) + 4, memory, 1)
    last = state.last_launch
    assert last is not None
    assert (last.kernel, last.block, last.counters.global_load_bytes) == ("copy", (128, 1, 1), 4)
    assert last.end_s > last.start_s and last.counters.dram_read_bytes >= 4
    assert state.counters.launches >= 1
    assert driver.node.findings == []
    with pytest.raises(AttributeError, match="'memory' of a device of a served node"):
        _ = state.memory
    with pytest.raises(NotImplementedError, match="records no trace"):
        state.trace = object()


def test_schedule_without_a_clock_has_none_here_either(servers: Servers) -> None:
    assert not servers.driver(schedule="random", seed=3).node.clocked


def test_recorded_finding_comes_with_rule_and_report(servers: Servers) -> None:
    driver = servers.driver(strict="record")
    function = load(driver, ODD_PARITY, b"odd")

    def run(parity: int) -> None:
        params = ((parity,), (ctypes.c_uint32,))
        ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, params, 0))
        ok(driver.cuCtxSynchronize(), driver)

    run(1)
    assert driver.node.findings == []
    run(3)
    (found,) = driver.node.findings
    assert isinstance(found, BarrierFault) and (found.rule, found.severity) == ("mbarrier.parity", "strict")
    assert "3 is outside {0, 1}" in str(found) and "CTA 0" in str(found)
    last = driver.node.devices[0].last_launch
    assert last is not None and [str(each) for each in last.findings] == [str(found)]


def test_report_names_the_clients_line_not_the_servers(driver: RemoteDriver) -> None:
    memory = ok(driver.cuMemAlloc(16))
    function = load(driver, COPY, b"copy")
    ok(driver.cuMemcpyHtoD(memory, bytes(16), 16))
    params = ((int(memory), int(memory) + 1, 1), TYPES)
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, params, 0))
    refused(
        driver, driver.cuCtxSynchronize(), "MISALIGNED_ADDRESS", f"launched at test_server_driver.py:{line}"
    )
    assert driver.context_failed(ok(driver.cuDevicePrimaryCtxRetain(0)))


def test_described_function_answers_occupancy(driver: RemoteDriver) -> None:
    function = load(driver, COPY, b"copy")
    refused(driver, driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 128, 0), "NOT_SUPPORTED")
    driver.describe_function(function, registers=255)
    assert ok(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, 128, 0)) == 2


def test_wrong_argument_raises_what_the_stand_in_raises(driver: RemoteDriver) -> None:
    module = ok(driver.cuModuleLoadData(COPY))
    with pytest.raises(TypeError, match="expected bytes, str found"):
        driver.cuModuleGetFunction(module, "copy")
    with pytest.raises(TypeError, match="a object cannot be sent"):
        driver.cuMemAlloc(object())
    assert ok(driver.cuModuleGetFunction(module, b"copy")), "the connection is still good"


# -------------------------------------------------------------------------------------------------- threads


def test_call_that_waits_in_one_thread_blocks_no_other(driver: RemoteDriver) -> None:
    flag = ok(driver.cuMemHostAlloc(64, 2))
    context = ok(driver.cuCtxGetCurrent())
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWaitValue32(stream, flag, 1, 0), driver)
    answers: list[Any] = []

    def waits() -> None:
        driver.cuCtxSetCurrent(context)
        answers.append(driver.cuStreamSynchronize(stream))

    thread = threading.Thread(target=waits)
    thread.start()
    for _ in range(20):
        ok(driver.cuMemGetInfo())
    assert not answers
    word_at(flag).value = 1
    thread.join(WAITED_S)
    assert ok(answers[0]) is None


def test_every_thread_has_its_own_current_context(driver: RemoteDriver) -> None:
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(driver.cuCtxGetDevice()))
    thread.start()
    thread.join()
    assert seen == [(cuda.CUresult.CUDA_ERROR_INVALID_CONTEXT, None)]
    assert ok(driver.cuCtxGetDevice()) is not None


WAITED_S = 5.0
