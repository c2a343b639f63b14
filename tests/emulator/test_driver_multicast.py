"""Multicast objects of the stand-in driver: the order of calls, what may be bound, what an address means."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.address_space import MappingKind
from smfree.emulator.driver import Driver
from smfree.emulator.errors import MemoryFault
from tests.emulator.driver_kit import ok, open_driver, refused
from tests.emulator.test_driver_vmm import DESCRIPTOR, PAGE, create, mapped, used

TWO = ("h100", "h100")


def properties(pages: int = 1, devices: int = 2, *, shareable: bool = True) -> Any:
    made = cuda.CUmulticastObjectProp()
    made.numDevices = devices
    made.size = pages * PAGE
    made.handleTypes = int(DESCRIPTOR) if shareable else 0
    return made


def team(driver: Driver, pages: int = 1, devices: int = 2, **options: Any) -> Any:
    """A multicast object to which all devices were added."""
    made = ok(driver.cuMulticastCreate(properties(pages, devices, **options)), driver)
    for device in range(devices):
        ok(driver.cuMulticastAddDevice(made, device), driver)
    return made


def members(driver: Driver, address: int) -> list[tuple[int, int]]:
    """(device, offset into the memory that is bound) behind a multicast address."""
    mapping = driver.process.space.find(address)
    assert mapping is not None and mapping.kind is MappingKind.MULTICAST
    found = []
    for memory, backing, device in mapping.members:
        home = memory.allocation_of(backing)
        found.append((device.ordinal, backing - home.start + address - mapping.start))
    return sorted(found)


def test_address_means_the_same_offset_of_every_device() -> None:
    driver = open_driver(*TWO)
    multicast = team(driver, pages=2)
    for device in range(2):
        ok(driver.cuMulticastBindMem(multicast, 0, create(driver, 2, device=device), 0, 2 * PAGE, 0), driver)
    start = mapped(driver, multicast, 2, devices=(0, 1))
    assert members(driver, start + PAGE + 64) == [(0, PAGE + 64), (1, PAGE + 64)]
    assert driver.process.space.find(start).users == {0, 1}


def test_bindings_before_and_after_the_mapping_are_seen_by_it() -> None:
    """Also where devices have bound different stretches."""
    driver = open_driver(*TWO)
    multicast = team(driver, pages=3)
    start = mapped(driver, multicast, 3, devices=(0,))
    assert members(driver, start) == []
    ok(driver.cuMulticastBindMem(multicast, 0, create(driver, 3, device=0), 0, 3 * PAGE, 0), driver)
    ok(driver.cuMulticastBindMem(multicast, PAGE, create(driver, 4, device=1), 2 * PAGE, PAGE, 0), driver)
    assert members(driver, start) == [(0, 0)]
    assert members(driver, start + PAGE) == [(0, PAGE), (1, 2 * PAGE)]
    assert members(driver, start + 2 * PAGE) == [(0, 2 * PAGE)]
    ok(driver.cuMulticastUnbind(multicast, 1, PAGE, PAGE), driver)
    assert members(driver, start + PAGE) == [(0, PAGE)]
    ok(driver.cuMemUnmap(start, 3 * PAGE), driver)
    assert driver.process.space.find(start) is None


def test_plain_accesses_may_not_use_it() -> None:
    driver = open_driver(*TWO)
    start = mapped(driver, team(driver), devices=(0, 1))
    data = np.zeros(4, np.uint32)
    answer = driver.cuMemcpyHtoD(start, data.ctypes.data, 16)
    refused(driver, answer, "INVALID_VALUE", "multicast memory", "only multimem instructions")
    with pytest.raises(MemoryFault, match="only multimem instructions"):
        driver.process.space.reach(start, 4, "store", driver.process.contexts[0])


def test_memory_is_bound_by_its_address() -> None:
    driver = open_driver(*TWO)
    multicast = team(driver)
    handle = create(driver, 2, device=1)
    address = mapped(driver, handle, 2)
    ok(driver.cuMemRelease(handle))
    ok(driver.cuMulticastBindAddr(multicast, 0, address + PAGE, PAGE, 0), driver)
    start = mapped(driver, multicast)
    assert members(driver, start) == [(1, PAGE)]
    plain = ok(driver.cuMemAlloc(PAGE))
    answer = driver.cuMulticastBindAddr(multicast, 0, plain, PAGE, 0)
    refused(driver, answer, "INVALID_VALUE", "memptr must be a multiple")


def test_bound_memory_lives_until_it_is_unbound() -> None:
    driver = open_driver(*TWO)
    multicast = team(driver)
    memory = create(driver, device=1)
    ok(driver.cuMulticastBindMem(multicast, 0, memory, 0, PAGE, 0))
    ok(driver.cuMemRelease(memory))
    assert used(driver, 1) == PAGE
    ok(driver.cuMulticastUnbind(multicast, 1, 0, PAGE), driver)
    assert used(driver, 1) == 0


def test_end_of_the_object_lets_go_of_what_is_bound() -> None:
    driver = open_driver(*TWO)
    multicast = team(driver)
    memory = create(driver, device=1)
    ok(driver.cuMulticastBindMem(multicast, 0, memory, 0, PAGE, 0))
    start = mapped(driver, multicast)
    for handle in (memory, multicast):
        ok(driver.cuMemRelease(handle))
    assert members(driver, start) == [(1, 0)], "the mapping keeps it"
    ok(driver.cuMemUnmap(start, PAGE))
    assert used(driver, 1) == 0


# ---------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("call", ["bind", "map"])
def test_binding_before_all_devices_are_added_would_hang(call: str) -> None:
    driver = open_driver(*TWO, host_wait_limit_s=0.01)
    multicast = ok(driver.cuMulticastCreate(properties()))
    ok(driver.cuMulticastAddDevice(multicast, 1))
    memory = create(driver, device=1)
    start = int(ok(driver.cuMemAddressReserve(PAGE, 0, 0, 0)))

    def attempt() -> tuple[Any, ...]:
        if call == "map":
            return driver.cuMemMap(start, PAGE, 0, multicast, 0)
        return driver.cuMulticastBindMem(multicast, 0, memory, 0, PAGE, 0)

    refused(
        driver, attempt(), "TIMEOUT", "1 of 2 devices were added (device 1)", "real hardware would hang",
        "cuMulticastAddDevice before any binds or maps",
    )  # fmt: skip
    ok(driver.cuMulticastAddDevice(multicast, 0))
    ok(attempt(), driver)


def test_binding_waits_for_another_process_to_add_its_device() -> None:
    driver = open_driver(*TWO, host_wait_limit_s=20.0)
    other = Driver(driver.node, "rank 1")
    ok(other.cuInit(0))
    multicast = ok(driver.cuMulticastCreate(properties()))
    ok(driver.cuMulticastAddDevice(multicast, 0))
    descriptor = ok(driver.cuMemExportToShareableHandle(multicast, DESCRIPTOR, 0), driver)
    theirs = ok(other.cuMemImportFromShareableHandle(descriptor, DESCRIPTOR), other)
    os.close(descriptor)
    timer = threading.Timer(0.02, lambda: ok(other.cuMulticastAddDevice(theirs, 1), other))
    timer.start()
    ok(driver.cuMulticastBindMem(multicast, 0, create(driver), 0, PAGE, 0), driver)
    timer.join()
    ok(other.cuMulticastBindMem(theirs, 0, create(other, device=1), 0, PAGE, 0), other)
    assert members(driver, mapped(driver, multicast)) == [(0, 0), (1, 0)]
    other.end()
    assert used(driver, 1) == PAGE, "bound memory stays as long as the object, which driver still has"


def test_devices_are_added_once_and_not_too_many() -> None:
    driver = open_driver(*["h100"] * 3)
    multicast = ok(driver.cuMulticastCreate(properties()))
    ok(driver.cuMulticastAddDevice(multicast, 0))
    refused(driver, driver.cuMulticastAddDevice(multicast, 0), "INVALID_VALUE", "add each device once")
    ok(driver.cuMulticastAddDevice(multicast, 1))
    refused(driver, driver.cuMulticastAddDevice(multicast, 2), "INVALID_VALUE", "has its 2 devices")
    refused(driver, driver.cuMulticastAddDevice(multicast, 7), "INVALID_DEVICE", "no device 7")


def test_gpu_without_multicast() -> None:
    driver = open_driver("a100", "a100")
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    assert ok(driver.cuDeviceGetAttribute(attribute, 0)) == 0
    refused(driver, driver.cuMulticastCreate(properties()), "NOT_SUPPORTED", "sm_80", "MULTICAST_SUPPORTED")
    assert ok(open_driver(*TWO).cuDeviceGetAttribute(attribute, 0)) == 1


def test_properties_of_an_object() -> None:
    driver = open_driver(*TWO)
    for option in cuda.CUmulticastGranularity_flags:
        assert ok(driver.cuMulticastGetGranularity(properties(), option)) == PAGE
    refused(driver, driver.cuMulticastCreate(properties(devices=0)), "INVALID_VALUE", "at least 1")
    refused(driver, driver.cuMulticastCreate(properties(devices=3)), "INVALID_VALUE", "at most the node's 2")
    odd = properties()
    odd.size = PAGE + 512
    refused(driver, driver.cuMulticastCreate(odd), "INVALID_VALUE", f"size must be a multiple of {PAGE}")
    fabric = properties()
    fabric.handleTypes = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)
    refused(driver, driver.cuMulticastCreate(fabric), "NOT_SUPPORTED", "only POSIX file descriptors")


@pytest.mark.parametrize(
    ("offset", "memory_offset", "size", "words"),
    [
        (512, 0, PAGE, f"mcOffset must be a multiple of {PAGE}"),
        (0, 512, PAGE, f"memOffset must be a multiple of {PAGE}"),
        (0, 0, PAGE + 1, f"size must be a multiple of {PAGE}"),
        (0, PAGE, 2 * PAGE, f"at most the memory's {2 * PAGE}"),
        (2 * PAGE, 0, 2 * PAGE, f"at most the object's {3 * PAGE}"),
    ],
    ids=["mcOffset", "memOffset", "size", "past-memory", "past-object"],
)
def test_binding_stays_inside_memory_and_object(
    offset: int, memory_offset: int, size: int, words: str
) -> None:
    driver = open_driver(*TWO)
    multicast, memory = team(driver, pages=3), create(driver, 2)
    answer = driver.cuMulticastBindMem(multicast, offset, memory, memory_offset, size, 0)
    refused(driver, answer, "INVALID_VALUE", words)
    ok(driver.cuMulticastBindMem(multicast, PAGE, memory, 0, 2 * PAGE, 0), driver)


def test_stretch_is_bound_once_per_device() -> None:
    driver = open_driver(*TWO)
    multicast = team(driver, pages=2)
    ok(driver.cuMulticastBindMem(multicast, 0, create(driver), 0, PAGE, 0))
    answer = driver.cuMulticastBindMem(multicast, 0, create(driver, 2), 0, 2 * PAGE, 0)
    refused(driver, answer, "INVALID_VALUE", f"device 0 has [0, {PAGE})", "unbind it first")
    ok(driver.cuMulticastBindMem(multicast, PAGE, create(driver), 0, PAGE, 0), driver)
    ok(driver.cuMulticastBindMem(multicast, 0, create(driver, 2, device=1), 0, 2 * PAGE, 0), driver)


def test_memory_outside_the_team_is_refused() -> None:
    driver = open_driver(*["h100"] * 3)
    multicast = team(driver)
    answer = driver.cuMulticastBindMem(multicast, 0, create(driver, device=2), 0, PAGE, 0)
    refused(driver, answer, "INVALID_DEVICE", "of device 2", "outside the team (devices 0, 1)")


def test_shareable_objects_take_shareable_memory_only() -> None:
    driver = open_driver(*TWO)
    private = create(driver, shareable=False)
    answer = driver.cuMulticastBindMem(team(driver), 0, private, 0, PAGE, 0)
    refused(driver, answer, "INVALID_VALUE", "is shareable", "ask for a file descriptor")
    ok(driver.cuMulticastBindMem(team(driver, shareable=False), 0, private, 0, PAGE, 0), driver)


def test_unbinding_takes_the_offset_and_size_of_the_bind() -> None:
    driver = open_driver(*TWO)
    multicast = team(driver, pages=2)
    ok(driver.cuMulticastBindMem(multicast, 0, create(driver, 2), 0, 2 * PAGE, 0))
    answer = driver.cuMulticastUnbind(multicast, 0, 0, PAGE)
    refused(driver, answer, "INVALID_VALUE", "device 0 bound no", "with the bind's own offset and size")
    ok(driver.cuMulticastUnbind(multicast, 0, 0, 2 * PAGE), driver)


def test_handles_of_the_two_kinds_are_told_apart() -> None:
    driver = open_driver(*TWO)
    multicast, memory = team(driver), create(driver)
    answer = driver.cuMulticastBindMem(memory, 0, memory, 0, PAGE, 0)
    refused(driver, answer, "INVALID_VALUE", "the handle must name a multicast object")
    answer = driver.cuMulticastBindMem(multicast, 0, multicast, 0, PAGE, 0)
    refused(driver, answer, "INVALID_VALUE", "the handle must name memory from cuMemCreate")
