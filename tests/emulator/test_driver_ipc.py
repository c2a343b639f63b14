"""Memory and events of another process: two drivers on one node are two processes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from smfree.emulator.errors import MemoryFault
from tests.emulator.driver_kit import (
    FakeExecutor,
    array_of,
    attach,
    launch,
    load,
    ok,
    open_driver,
    open_node,
    ptx,
    refused,
    values_at,
)

WORDS = np.arange(1, 1025, dtype=np.uint32)
LAZY = 1
INTERPROCESS, DISABLE_TIMING = 4, 2
POINTER = cuda.CUpointer_attribute


def ranks(*, ordinal: int = 1, **settings: Any) -> tuple[Driver, Driver]:
    """An exporter on device 0 and an importer on device ``ordinal`` of a node with two."""
    first = open_driver("h100", "h100", **settings)
    return first, attach(first.node, ordinal, "rank 1")


def sent(handle: Any) -> Any:
    """A handle as another process sees it: the same bytes in another object."""
    made = type(handle)()
    ctypes.memmove(made.getPtr(), handle.getPtr(), 64)
    return made


def shared(exporter: Driver, importer: Driver, pointer: Any) -> int:
    """The importer's pointer to the exporter's memory."""
    handle = ok(exporter.cuIpcGetMemHandle(pointer), exporter)
    return int(ok(importer.cuIpcOpenMemHandle(sent(handle), LAZY), importer))


# --- memory


@pytest.mark.parametrize("ordinal", [0, 1], ids=["same-device", "other-device"])
def test_both_processes_see_the_same_bytes(ordinal: int) -> None:
    first, second = ranks(ordinal=ordinal)
    pointer = array_of(first, WORDS)
    opened = shared(first, second, pointer)
    assert opened != int(pointer)
    assert (values_at(second, opened, len(WORDS)) == WORDS).all()
    ok(second.cuMemsetD32(opened + 4, 7, 1))
    ok(second.cuCtxSynchronize())
    assert values_at(first, pointer, 3).tolist() == [1, 7, 3]
    ok(second.cuIpcCloseMemHandle(opened))
    assert values_at(first, pointer, 3).tolist() == [1, 7, 3]


def test_raw_pointer_of_another_process_means_nothing() -> None:
    first, second = ranks()
    pointer = array_of(first, WORDS)
    result = second.cuMemsetD8(pointer, 0, 4)
    refused(
        second, result, "INVALID_VALUE", "of process 0, which rank 1 has not opened", "exchange an IPC handle"
    )
    refused(second, second.cuMemFree(pointer), "INVALID_VALUE", "of process 0; only that process may free it")
    refused(
        second, second.cuPointerGetAttribute(POINTER.CU_POINTER_ATTRIBUTE_MAPPED, pointer), "INVALID_VALUE"
    )
    ok(first.cuMemFree(pointer))


def test_pointer_into_an_allocation_exports_its_base() -> None:
    """D31: the importer adds the offset."""
    first, second = ranks()
    pointer = int(array_of(first, WORDS))
    whole, inside = (ok(first.cuIpcGetMemHandle(at)) for at in (pointer, pointer + 2048))
    assert ctypes.string_at(whole.getPtr(), 64) == ctypes.string_at(inside.getPtr(), 64)
    opened = int(ok(second.cuIpcOpenMemHandle(sent(inside), LAZY)))
    assert values_at(second, opened, 1)[0] == 1
    assert values_at(second, opened + 2048, 1)[0] == 513
    start, nbytes = ok(second.cuMemGetAddressRange(opened + 2048))
    assert (int(start), nbytes) == (opened, WORDS.nbytes)


def test_opening_again_counts_and_returns_the_same_pointer() -> None:
    """D01."""
    first, second = ranks()
    handle = sent(ok(first.cuIpcGetMemHandle(array_of(first, WORDS))))
    opened = [int(ok(second.cuIpcOpenMemHandle(handle, LAZY))) for _ in range(3)]
    assert len(set(opened)) == 1
    for _ in range(3):
        assert values_at(second, opened[0], 1)[0] == 1
        ok(second.cuIpcCloseMemHandle(opened[0]))
    refused(second, second.cuIpcCloseMemHandle(opened[0]), "INVALID_VALUE", "still open")
    refused(second, second.cuMemsetD8(opened[0], 0, 4), "INVALID_VALUE", "neither a device address")
    again = int(ok(second.cuIpcOpenMemHandle(handle, LAZY)))
    assert again != opened[0]


def test_each_context_of_a_process_has_its_own_mapping() -> None:
    """D11: the current device counts, not the exporter's number."""
    first, second = ranks()
    handle = sent(ok(first.cuIpcGetMemHandle(array_of(first, WORDS))))
    contexts = open_node(second)
    by_device = []
    for context in contexts:
        ok(second.cuCtxSetCurrent(context))
        by_device.append(int(ok(second.cuIpcOpenMemHandle(handle, LAZY))))
        found = ok(second.cuPointerGetAttribute(POINTER.CU_POINTER_ATTRIBUTE_CONTEXT, by_device[-1]))
        assert int(found) == int(context)
    assert by_device[0] != by_device[1]
    refused(
        second,
        second.cuIpcCloseMemHandle(by_device[0]),
        "INVALID_CONTEXT",
        "opened by the context of device 0",
    )
    space, user = second.process.space, second.process.contexts[0]
    assert space.reach(by_device[0], 4, "load", user) is not None
    with pytest.raises(MemoryFault, match="while the context of device 0 is current"):
        space.reach(by_device[1], 4, "load", user)


@pytest.mark.parametrize("ordinal", [0, 1], ids=["same-device", "other-device"])
def test_exporting_process_cannot_open_its_own_handle(ordinal: int) -> None:
    """D04."""
    first, second = ranks()
    contexts = open_node(first)
    pointer = array_of(first, WORDS)
    handle = sent(ok(first.cuIpcGetMemHandle(pointer)))
    ok(first.cuCtxSetCurrent(contexts[ordinal]))
    refused(
        first, first.cuIpcOpenMemHandle(handle, LAZY), "INVALID_CONTEXT", "of this very process (process 0)",
        "use the pointer itself",
    )  # fmt: skip
    ok(second.cuIpcOpenMemHandle(handle, LAZY))


def test_memory_that_cannot_be_exported_is_refused_with_the_ways_out() -> None:
    """D02, D03."""
    first, second = ranks()
    ordered = ok(first.cuMemAllocAsync(4096, 0))
    host = ok(first.cuMemHostAlloc(4096, 0))
    module = ok(first.cuModuleLoadData(ptx(variables=".visible .global .b32 table[4];")))
    variable, _ = ok(first.cuModuleGetGlobal(module, b"table"))
    for pointer, reason in (
        (ordered, "cuMemAllocAsync"),
        (host, "host memory"),
        (variable, "a module's variable"),
    ):
        refused(
            first, first.cuIpcGetMemHandle(pointer), "INVALID_VALUE", reason, "takes memory of cuMemAlloc",
            "expandable_segments", "cuMemExportToShareableHandle",
        )  # fmt: skip
        assert not ok(
            first.cuPointerGetAttribute(POINTER.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer)
        )
    refused(first, first.cuIpcGetMemHandle(64), "INVALID_VALUE", "no live allocation")
    plain = array_of(first, WORDS)
    assert ok(first.cuPointerGetAttribute(POINTER.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, plain))
    opened = shared(first, second, plain)
    refused(second, second.cuIpcGetMemHandle(opened), "INVALID_VALUE", "memory of another process")


def test_virtual_memory_is_refused_with_the_ways_out() -> None:
    """D02: what PyTorch's expandable segments are made of."""
    first, _ = ranks()
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    size = ok(first.cuMemGetAllocationGranularity(prop, 0))
    address = ok(first.cuMemAddressReserve(size, 0, 0, 0), first)
    ok(first.cuMemMap(address, size, 0, ok(first.cuMemCreate(size, prop, 0)), 0), first)
    result = first.cuIpcGetMemHandle(address)
    refused(first, result, "INVALID_VALUE", "virtual memory management", "without expandable_segments")
    assert int(ok(first.cuPointerGetAttribute(POINTER.CU_POINTER_ATTRIBUTE_CONTEXT, address))) == 0


def test_open_takes_only_the_documented_flag() -> None:
    first, second = ranks()
    handle = sent(ok(first.cuIpcGetMemHandle(array_of(first, WORDS))))
    refused(second, second.cuIpcOpenMemHandle(handle, 0), "INVALID_VALUE", "LAZY_ENABLE_PEER_ACCESS", "got 0")
    ok(second.cuIpcOpenMemHandle(handle, LAZY))


def test_handle_of_freed_memory_opens_nothing_even_at_the_same_address() -> None:
    """D08: the new allocation has a handle of its own."""
    first, second = ranks()
    pointer = array_of(first, WORDS)
    old = sent(ok(first.cuIpcGetMemHandle(pointer)))
    ok(first.cuMemFree(pointer))
    refused(second, second.cuIpcOpenMemHandle(old, LAZY), "INVALID_HANDLE", "freed", "another machine")
    new = sent(ok(first.cuIpcGetMemHandle(array_of(first, WORDS))))
    assert ctypes.string_at(old.getPtr(), 64) != ctypes.string_at(new.getPtr(), 64)
    ok(second.cuIpcOpenMemHandle(new, LAZY))


def test_handle_of_another_node_opens_nothing() -> None:
    first, _ = ranks()
    _, stranger = ranks()
    handle = sent(ok(first.cuIpcGetMemHandle(array_of(first, WORDS))))
    refused(stranger, stranger.cuIpcOpenMemHandle(handle, LAZY), "INVALID_HANDLE", "another machine")


def test_devices_that_cannot_reach_each_other_cannot_open() -> None:
    """D05: the probe is the opening itself."""
    first = open_driver("h100", "a100")
    second = attach(first.node, 1)
    handle = sent(ok(first.cuIpcGetMemHandle(array_of(first, WORDS))))
    refused(
        second, second.cuIpcOpenMemHandle(handle, LAZY), "MAP_FAILED", "device 1, the current one", "device 0"
    )


def test_freeing_memory_that_is_open_elsewhere_names_who_has_it() -> None:
    first, second = ranks()
    third = attach(first.node, 0, "rank 2")
    pointer = array_of(first, WORDS)
    mine, other = shared(first, second, pointer), shared(first, third, pointer)
    refused(
        first, first.cuMemFree(pointer), "INVALID_VALUE", "cuIpcCloseMemHandle first",
        "is open in device 1 of rank 1 and device 0 of rank 2",
    )  # fmt: skip
    assert (values_at(second, mine, len(WORDS)) == WORDS).all()
    ok(second.cuIpcCloseMemHandle(mine))
    ok(third.cuIpcCloseMemHandle(other))
    ok(first.cuMemFree(pointer))


def test_imported_memory_is_closed_not_freed() -> None:
    first, second = ranks()
    opened = shared(first, second, array_of(first, WORDS))
    refused(
        second, second.cuMemFree(opened), "INVALID_VALUE", "memory of another process", "cuIpcCloseMemHandle"
    )
    refused(
        second,
        second.cuIpcCloseMemHandle(opened + 512),
        "INVALID_VALUE",
        "no pointer that cuIpcOpenMemHandle",
    )
    result = second.cuMemsetD8(opened, 0, WORDS.nbytes + 1)
    refused(second, result, "INVALID_VALUE", f"{WORDS.nbytes + 1} bytes", "leave memory of another process")
    ok(second.cuIpcCloseMemHandle(opened))


@pytest.mark.parametrize("how", ["process", "context", "context-then-process"])
def test_memory_outlives_who_exported_it_until_the_last_import_is_closed(how: str) -> None:
    """Nobody else can open it then."""
    first, second = ranks()
    third = attach(first.node, 0, "rank 2")
    pointer, alone = array_of(first, WORDS), array_of(first, WORDS)
    handle, memory = ok(first.cuIpcGetMemHandle(pointer)), first.node.devices[0].memory
    ok(first.cuIpcGetMemHandle(alone))
    opened, again = shared(first, second, pointer), shared(first, third, pointer)
    before = memory.allocated_bytes
    if "context" in how:
        ok(first.cuDevicePrimaryCtxRelease(0))
    if "process" in how:
        first.end()
    assert memory.allocated_bytes == before - WORDS.nbytes
    assert (values_at(second, opened, len(WORDS)) == WORDS).all()
    refused(second, second.cuIpcOpenMemHandle(handle, 1), "INVALID_HANDLE", "its process has ended")
    ok(second.cuIpcCloseMemHandle(opened))
    ok(third.cuMemsetD8(again, 0, 4))
    third.end()
    assert memory.allocated_bytes == before - 2 * WORDS.nbytes


def test_attributes_of_imported_memory() -> None:
    first, second = ranks(ordinal=0)
    opened = shared(first, second, array_of(first, WORDS))
    asked = [
        POINTER.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        POINTER.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        POINTER.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        POINTER.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        POINTER.CU_POINTER_ATTRIBUTE_MAPPED,
        POINTER.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    ]
    found = ok(second.cuPointerGetAttributes(len(asked), asked, opened + 8))
    assert [int(value) for value in found] == [2, 0, opened, WORDS.nbytes, 1, 0]


def test_copies_and_waits_take_imported_memory() -> None:
    first, second = ranks()
    flag, data = array_of(first, np.zeros(2, np.uint32)), array_of(first, WORDS)
    their_flag, their_data = shared(first, second, flag), shared(first, second, data)
    mine, stream = ok(second.cuMemAlloc(WORDS.nbytes)), ok(second.cuStreamCreate(1))
    context = ok(second.cuCtxGetCurrent())
    ok(second.cuStreamWaitValue32(stream, their_flag, 1, 0))
    ok(second.cuMemcpyPeerAsync(mine, context, their_data, context, WORDS.nbytes, stream), second)
    ok(second.cuStreamWriteValue64(stream, their_flag, 2, 0))
    assert second.cuStreamQuery(stream)[0] == cuda.CUresult.CUDA_ERROR_NOT_READY
    ok(first.cuStreamWriteValue32(0, flag, 1, 0))
    ok(second.cuStreamSynchronize(stream), second)
    assert (values_at(second, mine, len(WORDS)) == WORDS).all()
    assert values_at(first, flag, 2).tolist() == [2, 0]


def test_opening_is_slow_and_opening_again_is_not() -> None:
    """D35: what a pool saves, on the modelled clock."""
    first, second = ranks()
    handle = sent(ok(first.cuIpcGetMemHandle(array_of(first, WORDS))))
    clock, seconds = second.process, []
    for _ in range(2):
        start = clock.host_time_s
        opened = ok(second.cuIpcOpenMemHandle(handle, LAZY))
        seconds.append(clock.host_time_s - start)
    assert seconds[0] > 1e-3 and seconds[1] < 1e-6
    for _ in range(2):
        start = clock.host_time_s
        ok(second.cuIpcCloseMemHandle(opened))
        seconds.append(clock.host_time_s - start)
    assert seconds[2] < 1e-6 and seconds[3] > 4e-4


# --- events


def events(first: Driver, second: Driver) -> tuple[Any, Any]:
    event = ok(first.cuEventCreate(INTERPROCESS | DISABLE_TIMING), first)
    return event, ok(second.cuIpcOpenEventHandle(sent(ok(first.cuIpcGetEventHandle(event)))), second)


def test_stream_waits_for_an_event_of_another_process() -> None:
    first, second = ranks(executor=FakeExecutor(100_000))
    event, imported = events(first, second)
    ok(second.cuEventQuery(imported))
    ok(launch(first, load(first, ptx())))
    ok(first.cuEventRecord(event, 0))
    ok(second.cuStreamWaitEvent(0, imported, 0))
    ok(launch(second, load(second, ptx())))
    ok(second.cuCtxSynchronize())
    launched = [device.last_launch for device in first.node.devices]
    assert launched[1].start_s >= launched[0].end_s
    ok(second.cuEventRecord(imported, 0))  # and the other way round
    ok(first.cuEventSynchronize(event))
    ok(second.cuEventDestroy(imported))
    ok(first.cuEventQuery(event))


def test_event_rules() -> None:
    first, second = ranks()
    refused(first, first.cuEventCreate(INTERPROCESS), "INVALID_VALUE", "along with CU_EVENT_DISABLE_TIMING")
    refused(first, first.cuEventCreate(16), "INVALID_VALUE", "got 0x10")
    plain = ok(first.cuEventCreate(DISABLE_TIMING))
    refused(first, first.cuIpcGetEventHandle(plain), "INVALID_VALUE", "CU_EVENT_INTERPROCESS")
    event, imported = events(first, second)
    handle = sent(ok(first.cuIpcGetEventHandle(event)))
    refused(first, first.cuIpcOpenEventHandle(handle), "INVALID_CONTEXT", "of this very process")
    refused(second, second.cuIpcGetEventHandle(imported), "INVALID_VALUE", "in this process")
    refused(
        second, second.cuEventElapsedTime(imported, imported), "INVALID_HANDLE", "CU_EVENT_DISABLE_TIMING"
    )
    memory = cuda.CUipcMemHandle()
    ctypes.memmove(memory.getPtr(), handle.getPtr(), 64)
    refused(second, second.cuIpcOpenMemHandle(memory, LAZY), "INVALID_HANDLE", "names an event, not memory")
    refused(second, second.cuIpcOpenEventHandle(cuda.CUipcEventHandle()), "INVALID_HANDLE", "another machine")


@pytest.mark.parametrize("how", ["destroyed", "process-ended"])
def test_import_of_an_event_that_is_gone(how: str) -> None:
    first, second = ranks()
    event, imported = events(first, second)
    handle = sent(ok(first.cuIpcGetEventHandle(event)))
    if how == "destroyed":
        ok(first.cuEventDestroy(event))
    else:
        first.end()
    refused(second, second.cuStreamWaitEvent(0, imported, 0), "INVALID_HANDLE", "process 0", "is undefined")
    refused(second, second.cuIpcOpenEventHandle(handle), "INVALID_HANDLE", "no event that is exported now")
    ok(second.cuEventDestroy(imported))


def test_waiting_for_work_of_a_process_that_failed_names_it() -> None:
    def fail(device: Any, params: bytes) -> None:
        raise MemoryFault("the kernel's fault", rule="memory.bounds")

    first, second = ranks(executor=FakeExecutor(effect=fail))
    event, imported = events(first, second)
    ok(launch(first, load(first, ptx())))
    ok(first.cuEventRecord(event, 0))
    refused(
        second,
        second.cuEventSynchronize(imported),
        "EXTERNAL_DEVICE",
        "device 0 of process 0",
        "the kernel's fault",
    )
    ok(second.cuCtxSynchronize())


@pytest.mark.parametrize("how", ["fails", "ends"])
def test_work_behind_an_event_that_never_comes_is_lost_and_says_why(how: str) -> None:
    """Nothing behind it runs, the wait for memory included; other streams of the process go on."""

    def fail(device: Any, params: bytes) -> None:
        raise MemoryFault("the kernel's fault", rule="memory.bounds")

    first, second = ranks(executor=FakeExecutor(effect=fail))
    event, imported = events(first, second)
    flag, out = array_of(second, np.zeros(1, np.uint32)), array_of(second, np.zeros(1, np.uint32))
    waiting, free = ok(second.cuStreamCreate(1)), ok(second.cuStreamCreate(1))
    ok(launch(first, load(first, ptx())))
    ok(first.cuEventRecord(event, 0))
    ok(second.cuStreamWaitEvent(waiting, imported, 0))
    ok(second.cuStreamWaitValue32(waiting, flag, 1, 0))
    ok(second.cuMemsetD32Async(out, 9, 1, waiting))
    if how == "ends":
        first.end()
    reason = "the kernel's fault" if how == "fails" else "device 0 of process 0 ended before the work"
    refused(second, second.cuStreamSynchronize(waiting), "EXTERNAL_DEVICE", reason)
    refused(second, second.cuStreamQuery(waiting), "EXTERNAL_DEVICE", reason)
    ok(second.cuMemcpyDtoDAsync(flag, out, 4, free))
    ok(second.cuStreamSynchronize(free))
    assert values_at(second, out, 1)[0] == 0
