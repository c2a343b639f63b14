"""Virtual memory management of the stand-in driver: every documented rule, and what processes share."""

from __future__ import annotations

import ctypes
import os
import socket
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from smfree.emulator.errors import MemoryFault
from smfree.emulator.node import Node
from smfree.emulator.virtual import GRANULARITY_BYTES
from tests.emulator.driver_kit import ok, open_driver, refused

PAGE = GRANULARITY_BYTES
DESCRIPTOR = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
READ_WRITE = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def properties(device: int = 0, *, shareable: bool = True) -> Any:
    made = cuda.CUmemAllocationProp()
    made.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    if shareable:
        made.requestedHandleTypes = DESCRIPTOR
    return made


def access(device: int, flags: Any = READ_WRITE) -> Any:
    made = cuda.CUmemAccessDesc()
    made.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device
    made.flags = flags
    return made


def create(driver: Driver, pages: int = 1, **options: Any) -> Any:
    return ok(driver.cuMemCreate(pages * PAGE, properties(**options), 0), driver)


def mapped(driver: Driver, handle: Any, pages: int = 1, devices: tuple[int, ...] = (0,)) -> int:
    """``handle`` at a new address that ``devices`` may use."""
    start = int(ok(driver.cuMemAddressReserve(pages * PAGE, 0, 0, 0), driver))
    ok(driver.cuMemMap(start, pages * PAGE, 0, handle, 0), driver)
    if devices:
        descriptions = [access(device) for device in devices]
        ok(driver.cuMemSetAccess(start, pages * PAGE, descriptions, len(descriptions)), driver)
    return start


def used(driver: Driver, device: int = 0) -> int:
    return driver.node.devices[device].memory.allocated_bytes


def second(driver: Driver) -> Driver:
    """Another process on the same node."""
    other = Driver(driver.node, "the other process")
    ok(other.cuInit(0))
    ok(other.cuCtxSetCurrent(ok(other.cuDevicePrimaryCtxRetain(0))))
    return other


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ------------------------------------------------------------------------------------ memory, address, access


def test_memory_is_mapped_used_and_given_back() -> None:
    driver = open_driver()
    handle = create(driver, pages=2)
    start = mapped(driver, handle, pages=2)
    data = np.arange(2 * PAGE // 8, dtype=np.uint64)
    ok(driver.cuMemcpyHtoD(start, data.ctypes.data, data.nbytes), driver)
    back = np.empty_like(data)
    ok(driver.cuMemcpyDtoH(back.ctypes.data, start, data.nbytes), driver)
    assert (back == data).all()
    assert used(driver) == 2 * PAGE
    ok(driver.cuMemRelease(handle))
    assert used(driver) == 2 * PAGE, "the mapping keeps it"
    ok(driver.cuMemUnmap(start, 2 * PAGE), driver)
    assert used(driver) == 0
    ok(driver.cuMemAddressFree(start, 2 * PAGE), driver)


def test_memory_without_a_mapping_goes_with_its_handle() -> None:
    driver = open_driver()
    handle = create(driver)
    ok(driver.cuMemRelease(handle))
    assert used(driver) == 0
    refused(
        driver, driver.cuMemRelease(handle), "INVALID_VALUE", "no memory handle", "released or never made"
    )


def test_two_mappings_of_one_memory_show_the_same_bytes() -> None:
    driver = open_driver()
    handle = create(driver)
    first, other = mapped(driver, handle), mapped(driver, handle)
    ok(driver.cuMemsetD32(first, 7, PAGE // 4))
    back = np.empty(4, np.uint32)
    ok(driver.cuMemcpyDtoH(back.ctypes.data, other + PAGE - 16, 16), driver)
    assert back.tolist() == [7] * 4


def test_neighbouring_mappings_get_access_and_are_unmapped_together() -> None:
    driver = open_driver()
    start = int(ok(driver.cuMemAddressReserve(2 * PAGE, 0, 0, 0)))
    for offset in (0, PAGE):
        ok(driver.cuMemMap(start + offset, PAGE, 0, create(driver), 0), driver)
    ok(driver.cuMemSetAccess(start, 2 * PAGE, [access(0)], 1), driver)
    ok(driver.cuMemsetD8(start + PAGE, 1, PAGE), driver)
    ok(driver.cuMemUnmap(start, 2 * PAGE), driver)
    ok(driver.cuMemAddressFree(start, 2 * PAGE), driver)


def test_granularity_and_attributes() -> None:
    driver = open_driver()
    for option in cuda.CUmemAllocationGranularity_flags:
        assert ok(driver.cuMemGetAllocationGranularity(properties(), option)) == PAGE
    names = cuda.CUdevice_attribute
    for attribute in (
        names.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        names.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ):
        assert ok(driver.cuDeviceGetAttribute(attribute, 0)) == 1


def test_properties_come_back_from_a_handle() -> None:
    driver = open_driver("h100", "h100")
    found = ok(driver.cuMemGetAllocationPropertiesFromHandle(create(driver, device=1)))
    assert found.location.id == 1
    assert found.requestedHandleTypes == DESCRIPTOR


@pytest.mark.parametrize("what", ["size", "ptr", "offset", "beyond"])
def test_what_is_mapped_is_a_multiple_inside_the_memory(what: str) -> None:
    driver = open_driver()
    handle = create(driver)
    start = int(ok(driver.cuMemAddressReserve(4 * PAGE, 0, 0, 0)))
    size, at, offset = {
        "size": (PAGE // 2, start, 0),
        "ptr": (PAGE, start + 4096, 0),
        "offset": (PAGE, start, PAGE),
        "beyond": (2 * PAGE, start, 0),
    }[what]
    word = {"offset": "offset must be 0", "beyond": f"at most the memory's {PAGE} bytes"}.get(
        what, f"{what} must be a multiple of {PAGE}"
    )
    refused(driver, driver.cuMemMap(at, size, offset, handle, 0), "INVALID_VALUE", word)
    ok(driver.cuMemMap(start, PAGE, 0, handle, 0), driver)


def test_size_of_memory_is_a_multiple_of_the_granularity() -> None:
    driver = open_driver()
    refused(
        driver, driver.cuMemCreate(PAGE + 1, properties(), 0), "INVALID_VALUE",
        f"size must be a multiple of {PAGE}",
    )  # fmt: skip
    refused(driver, driver.cuMemCreate(PAGE, properties(), 1), "INVALID_VALUE", "flags must be 0")


def test_full_device_is_out_of_memory() -> None:
    driver = open_driver()
    total = ok(driver.cuDeviceTotalMem(0)) // PAGE * PAGE
    refused(driver, driver.cuMemCreate(total + PAGE, properties(), 0), "OUT_OF_MEMORY", "is full")


def test_host_memory_and_other_kinds_are_refused_by_name() -> None:
    driver = open_driver()
    host = properties()
    host.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
    refused(driver, driver.cuMemCreate(PAGE, host, 0), "NOT_SUPPORTED", "CU_MEM_LOCATION_TYPE_HOST_NUMA")
    compressed = properties()
    compressed.allocFlags.compressionType = 1
    refused(driver, driver.cuMemCreate(PAGE, compressed, 0), "NOT_SUPPORTED", "compressible")
    refused(driver, driver.cuMemCreate(PAGE, properties(device=3), 0), "INVALID_DEVICE", "no device 3")
    nothing = cuda.CUmemAllocationProp()
    refused(driver, driver.cuMemCreate(PAGE, nothing, 0), "INVALID_VALUE", "CU_MEM_ALLOCATION_TYPE_PINNED")


def test_addresses_are_mapped_once_at_a_time() -> None:
    driver = open_driver()
    handle = create(driver)
    start = mapped(driver, handle)
    again = driver.cuMemMap(start, PAGE, 0, handle, 0)
    refused(driver, again, "INVALID_VALUE", "is mapped already", "unmap it first")
    ok(driver.cuMemUnmap(start, PAGE))
    ok(driver.cuMemMap(start, PAGE, 0, handle, 0), driver)


def test_only_reserved_addresses_are_mapped() -> None:
    driver = open_driver()
    answer = driver.cuMemMap(0x4800_0000_0000, PAGE, 0, create(driver), 0)
    refused(driver, answer, "INVALID_VALUE", "is in no reservation", "cuMemAddressReserve")


def test_part_of_a_mapping_is_neither_unmapped_nor_opened() -> None:
    driver = open_driver()
    start = mapped(driver, create(driver, pages=2), pages=2)
    refused(
        driver, driver.cuMemUnmap(start, PAGE), "INVALID_VALUE", "part of the mapping", "cuMemUnmap takes"
    )
    part = driver.cuMemSetAccess(start + PAGE, PAGE, [access(0)], 1)
    refused(driver, part, "INVALID_VALUE", "part of the mapping", "cuMemSetAccess takes whole mappings")


def test_reservation_is_freed_whole_and_empty() -> None:
    driver = open_driver()
    start = mapped(driver, create(driver, pages=2), pages=2)
    refused(driver, driver.cuMemAddressFree(start, 2 * PAGE), "INVALID_VALUE", "mapped; unmap it first")
    ok(driver.cuMemUnmap(start, 2 * PAGE))
    refused(driver, driver.cuMemAddressFree(start, PAGE), "INVALID_VALUE", "is no reservation")
    ok(driver.cuMemAddressFree(start, 2 * PAGE), driver)
    refused(driver, driver.cuMemUnmap(start, 2 * PAGE), "INVALID_VALUE", "in no reservation")


def test_reservation_takes_pages_and_a_power_of_two() -> None:
    driver = open_driver()
    refused(driver, driver.cuMemAddressReserve(100, 0, 0, 0), "INVALID_VALUE", "multiples of 4096")
    refused(driver, driver.cuMemAddressReserve(PAGE, 3 * PAGE, 0, 0), "INVALID_VALUE", "power of two")
    assert int(ok(driver.cuMemAddressReserve(PAGE, 1 << 30, 0, 0))) % (1 << 30) == 0


def test_nothing_may_use_a_mapping_before_it_has_access() -> None:
    """Neither a copy nor a kernel's access; both are named."""
    driver = open_driver("h100", "h100")
    start = mapped(driver, create(driver), devices=())
    answer = driver.cuMemsetD8(start, 0, 16)
    refused(driver, answer, "INVALID_VALUE", "no device has access", "cuMemSetAccess", "cuMemCreate at test_")
    context = driver.process.contexts[1]
    ok(driver.cuMemSetAccess(start, PAGE, [access(0)], 1))
    with pytest.raises(MemoryFault, match=r"device 1 has no access to mapped memory .* on device 0"):
        driver.process.space.reach(start, 4, "load", context)
    ok(driver.cuMemSetAccess(start, PAGE, [access(1)], 1))
    assert driver.process.space.reach(start, 4, "load", context).device is driver.node.devices[0]


def test_access_of_a_device_that_is_no_peer() -> None:
    driver = open_driver("h100", "h100", "a100")
    start = mapped(driver, create(driver), devices=(0, 1))
    result = driver.cuMemSetAccess(start, PAGE, [access(2)], 1)
    refused(driver, result, "INVALID_DEVICE", "device 2 (NVIDIA A100", "of device 0", "cuDeviceCanAccessPeer")


def test_access_is_asked_for_and_taken_back() -> None:
    driver = open_driver("h100", "h100")
    start = mapped(driver, create(driver))
    second_device = access(1)
    there = second_device.location
    assert ok(driver.cuMemGetAccess(there, start)) == 0
    ok(driver.cuMemSetAccess(start, PAGE, [access(0), access(1)], 2))
    assert ok(driver.cuMemGetAccess(there, start + 5)) == int(READ_WRITE)
    none = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
    ok(driver.cuMemSetAccess(start, PAGE, [access(1, none)], 1))
    assert ok(driver.cuMemGetAccess(there, start)) == 0
    read = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
    refused(driver, driver.cuMemSetAccess(start, PAGE, [access(0, read)], 1), "NOT_SUPPORTED", "read-only")
    refused(driver, driver.cuMemSetAccess(start, PAGE, [], 1), "INVALID_VALUE", "entries of desc")


def test_address_gives_its_handle_back_even_after_release() -> None:
    driver = open_driver()
    handle = create(driver)
    start = mapped(driver, handle)
    ok(driver.cuMemRelease(handle))
    again = ok(driver.cuMemRetainAllocationHandle(start + 100), driver)
    assert int(again) == int(handle)
    ok(driver.cuMemUnmap(start, PAGE))
    assert used(driver) == PAGE, "the handle keeps it"
    ok(driver.cuMemRelease(again))
    assert used(driver) == 0
    refused(driver, driver.cuMemRetainAllocationHandle(start), "INVALID_VALUE", "is not mapped")


def test_mapped_memory_is_not_freed_with_cuMemFree() -> None:
    driver = open_driver()
    start = mapped(driver, create(driver))
    refused(driver, driver.cuMemFree(start), "INVALID_VALUE", "cuMemUnmap")


# ------------------------------------------------------------------------------------------------ descriptors


def test_descriptor_brings_memory_into_another_process() -> None:
    """Over a Unix socket, as real processes pass it."""
    driver = open_driver("h100", "h100")
    other = second(driver)
    before = open_descriptors()
    handle = create(driver)
    start = mapped(driver, handle)
    ok(driver.cuMemsetD32(start, 42, PAGE // 4))
    ok(driver.cuCtxSynchronize())
    descriptor = ok(driver.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0), driver)
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        socket.send_fds(left, [b"."], [descriptor])
        _, (received,), *_ = socket.recv_fds(right, 1, 1)
    os.close(descriptor)
    imported = ok(other.cuMemImportFromShareableHandle(received, DESCRIPTOR), other)
    os.close(received)
    there = mapped(other, imported)
    assert there != start
    back = np.empty(2, np.uint32)
    ok(other.cuMemcpyDtoH(back.ctypes.data, there, 8), other)
    assert back.tolist() == [42, 42]
    refused(other, other.cuMemcpyDtoH(back.ctypes.data, start, 8), "INVALID_VALUE")
    ok(driver.cuMemRelease(handle))
    ok(driver.cuMemUnmap(start, PAGE))
    assert used(driver) == PAGE, "the import keeps it"
    other.end()
    assert used(driver) == 0
    assert open_descriptors() == before


def test_open_descriptor_keeps_the_memory() -> None:
    driver = open_driver()
    before = open_descriptors()
    handle = create(driver)
    descriptor = ok(driver.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0))
    copy = os.dup(descriptor)
    os.close(descriptor)
    ok(driver.cuMemRelease(handle))
    assert used(driver) == PAGE
    again = ok(driver.cuMemImportFromShareableHandle(copy, DESCRIPTOR), driver)
    ok(driver.cuMemRelease(again))
    free, total = ok(driver.cuMemGetInfo())
    assert total - free == PAGE
    os.close(copy)
    assert ok(driver.cuMemGetInfo()) == (total, total)
    assert open_descriptors() == before


def test_end_of_a_process_frees_what_it_mapped() -> None:
    node = Node(["h100"])
    driver = Driver(node, "first")
    ok(driver.cuInit(0))
    mapped(driver, create(driver))
    create(driver)
    assert used(driver) == 2 * PAGE
    driver.end()
    assert used(driver) == 0


def test_thousand_exports_and_imports_leak_nothing() -> None:
    driver = open_driver()
    before = open_descriptors()
    handle = create(driver)
    for _ in range(1000):
        descriptor = ok(driver.cuMemExportToShareableHandle(handle, DESCRIPTOR, 0))
        again = ok(driver.cuMemImportFromShareableHandle(descriptor, DESCRIPTOR))
        os.close(descriptor)
        ok(driver.cuMemRelease(again))
    ok(driver.cuMemRelease(handle))
    assert used(driver) == 0
    assert open_descriptors() == before


def test_only_shareable_memory_is_exported_as_a_descriptor() -> None:
    driver = open_driver()
    private = create(driver, shareable=False)
    answer = driver.cuMemExportToShareableHandle(private, DESCRIPTOR, 0)
    refused(driver, answer, "INVALID_VALUE", "was not made shareable", "POSIX_FILE_DESCRIPTOR")
    fabric = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    answer = driver.cuMemExportToShareableHandle(create(driver), fabric, 0)
    refused(driver, answer, "NOT_SUPPORTED", "CU_MEM_HANDLE_TYPE_FABRIC")


def test_foreign_and_closed_descriptors_are_refused() -> None:
    driver = open_driver()
    with open("/dev/null", "rb") as file:
        number = file.fileno()
        answer = driver.cuMemImportFromShareableHandle(number, DESCRIPTOR)
        refused(driver, answer, "INVALID_VALUE", f"descriptor {number} names no memory of this node")
    answer = driver.cuMemImportFromShareableHandle(number, DESCRIPTOR)
    refused(driver, answer, "INVALID_VALUE", "Bad file descriptor", "SCM_RIGHTS")
    elsewhere = open_driver()
    descriptor = ok(elsewhere.cuMemExportToShareableHandle(create(elsewhere), DESCRIPTOR, 0))
    answer = driver.cuMemImportFromShareableHandle(descriptor, DESCRIPTOR)
    refused(driver, answer, "INVALID_VALUE", "no memory of this node")
    os.close(descriptor)


def test_descriptor_holds_nothing_to_read() -> None:
    driver = open_driver()
    descriptor = ok(driver.cuMemExportToShareableHandle(create(driver), DESCRIPTOR, 0))
    with pytest.raises(BlockingIOError):
        os.read(descriptor, 1)
    os.close(descriptor)


# ----------------------------------------------------------------------------------------------- NUMA nodes


def test_half_of_the_devices_are_near_each_numa_node() -> None:
    driver = open_driver(*["h100"] * 4)
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID
    assert [ok(driver.cuDeviceGetAttribute(attribute, device)) for device in range(4)] == [0, 0, 1, 1]


def test_host_memory_lies_on_the_node_that_was_named() -> None:
    driver = open_driver()
    address = ok(driver.cuMemHostAlloc(4096, 0))
    find = driver.node.host.numa_node_of
    assert find(driver.process, address) is None
    driver.place_host_memory(address, 4096, 1)
    assert find(driver.process, address + 4095) == 1
    assert find(driver.process, address + 4096) is None
    assert find(second(driver).process, address) is None, "addresses of pageable memory are a process's own"
    driver.place_host_memory(address, 4096, None)
    assert find(driver.process, address) is None
    with pytest.raises(ValueError, match=r"NUMA nodes 0 to 1 \(got 2\)"):
        driver.place_host_memory(address, 4096, 2)
    ctypes.memset(address, 0, 4096)
