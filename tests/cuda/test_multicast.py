"""Multicast objects through the host side, and why there are none (D26)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from smfree.cuda import (
    ArrayError,
    CudaSource,
    Device,
    DriverError,
    MulticastObject,
    PhysicalMemory,
    UnavailableError,
    multicast_unavailable,
)
from smfree.emulator.address_space import MappingKind
from smfree.emulator.driver import Driver
from smfree.emulator.node import Node
from tests.cuda.conftest import Opens
from tests.cuda.vmm_kit import PAGE, VmmDriver

PUT = """extern "C" __global__ void put(unsigned* all, unsigned base) {
  unsigned* address = all + threadIdx.x;
  asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;"
               :: "l"(address), "r"(base + threadIdx.x) : "memory");
}"""


@pytest.fixture
def team() -> Iterator[list[Device]]:
    """Three emulated GPUs of one machine."""
    devices = Device.open_all("emu:h100x3")
    yield devices
    for device in devices:
        device.close()


def joined(devices: list[Device], nbytes: int = PAGE) -> tuple[MulticastObject, list[PhysicalMemory]]:
    """An object with memory of every device."""
    multicast = MulticastObject.create(devices[0], nbytes, len(devices))
    for device in devices:
        multicast.add(device)
    memories = [PhysicalMemory.create(device, multicast.nbytes) for device in devices]
    for memory in memories:
        multicast.bind(memory)
    return multicast, memories


def members(device: Device, address: int) -> list[int]:
    """Ordinals of the devices behind a multicast address."""
    mapping = device.driver.process.space.find(address)
    assert mapping.kind is MappingKind.MULTICAST
    return [member.ordinal for _, _, member in mapping.members]


def test_one_address_means_all_devices(team: list[Device]) -> None:
    multicast, memories = joined(team, 3 * PAGE - 5)
    assert multicast.nbytes == 3 * PAGE
    mapping = multicast.map(team)
    assert members(team[0], mapping.ptr) == [0, 1, 2]
    assert members(team[0], mapping.ptr + mapping.nbytes - 1) == [0, 1, 2]
    multicast.unbind(team[1])
    assert members(team[0], mapping.ptr) == [0, 2]
    mapping.free()
    for thing in (multicast, *memories):
        thing.close()
    assert [device.emulator.memory.allocated_bytes for device in team] == [0, 0, 0]


def test_store_reaches_all_devices_once_all_have_bound(team: list[Device]) -> None:
    put = team[1].compile(CudaSource("put.cu", text=PUT)).kernel()
    multicast, memories = joined(team)
    everywhere = multicast.map(team).array((32,), np.uint32, device=team[1])
    own = [memory.map().array((32,), np.uint32) for memory in memories]
    put.launch(1, 32, [everywhere, np.uint32(7)])
    team[1].synchronize()
    for array in own:
        assert array.numpy().tolist() == list(range(7, 39))
    multicast.unbind(team[2])
    put.launch(1, 32, [everywhere, np.uint32(0)])
    with pytest.raises(DriverError, match="devices of the object have bound no memory: 2"):
        team[1].synchronize()


def test_a_store_by_any_gpu_reaches_the_memory_of_all(gpus: Opens) -> None:
    """A team of two; real GPUs may have no multicast, then the reason is told."""
    team = gpus(2)
    reason = multicast_unavailable(team)
    if reason is not None and not team[0].is_emulated:
        pytest.skip(reason)
    multicast, memories = joined(team)
    own = [memory.map().array((32,), np.uint32) for memory in memories]
    mapping = multicast.map(team)
    for base, device in enumerate(team):
        put = device.compile(CudaSource("put.cu", text=PUT)).kernel()
        put.launch(1, 32, [mapping.array((32,), np.uint32, device=device), np.uint32(base)])
        device.synchronize()
        for array in own:
            assert array.numpy().tolist() == list(range(base, base + 32))
    for array in own:
        array.free()
    mapping.free()
    for device in team:
        multicast.unbind(device)
    for thing in (multicast, *memories):
        thing.close()


def test_parts_are_bound_and_unbound_as_they_were_bound(team: list[Device]) -> None:
    multicast = MulticastObject.create(team[0], 2 * PAGE, 1)
    multicast.add(team[0])
    for part in range(2):
        multicast.bind(PhysicalMemory.create(team[0], PAGE), offset_bytes=part * PAGE)
    mapping = multicast.map()
    assert members(team[0], mapping.ptr + PAGE) == [0]
    multicast.unbind(team[0])
    assert members(team[0], mapping.ptr + PAGE) == []


def test_peer_joins_by_descriptor(team: list[Device]) -> None:
    multicast = MulticastObject.create(team[0], PAGE, 2)
    descriptor = multicast.export()
    theirs = MulticastObject.from_descriptor(team[1], descriptor, multicast.nbytes, 2)
    os.close(descriptor)
    for each, device in ((multicast, team[0]), (theirs, team[1])):
        each.add(device)
    for each, device in ((multicast, team[0]), (theirs, team[1])):
        each.bind(PhysicalMemory.create(device, PAGE))
    mapping = theirs.map()
    assert members(team[1], mapping.ptr) == [0, 1]


def test_forgotten_device_is_named() -> None:
    driver = Driver(Node(["h100", "h100"], host_wait_limit_s=0.01))
    with Device(driver, 0, spec="emu:h100x2:0", is_emulated=True) as device:
        multicast = MulticastObject.create(device, PAGE, 2)
        multicast.add(device)
        memory = PhysicalMemory.create(device, PAGE)
        with pytest.raises(DriverError, match=r"1 of 2 devices were added \(device 0\)"):
            multicast.bind(memory)


def test_arguments_are_checked(team: list[Device]) -> None:
    with pytest.raises(ArrayError, match=r"at least one byte and one GPU \(got 0 and 2\)"):
        MulticastObject.create(team[0], 0, 2)
    with pytest.raises(ArrayError, match=r"\(got 5 and 0\)"):
        MulticastObject.create(team[0], 5, 0)


# ------------------------------------------------------------------------------------------ why there is none


def test_gpus_of_an_hgx_board_have_multicast(team: list[Device]) -> None:
    """The probe binds memory, and leaves nothing behind."""
    assert multicast_unavailable(team) is None
    assert [device.emulator.memory.allocated_bytes for device in team] == [0, 0, 0]


def test_gpu_without_multicast_is_named() -> None:
    with Device.open("emu:a100") as device:
        reason = multicast_unavailable([device]) or ""
        assert "A100" in reason and "sm_80" in reason and "NVSwitch" in reason
        with pytest.raises(UnavailableError, match="has no multicast"):
            MulticastObject.create(device, PAGE, 1)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("ILLEGAL_STATE", ("(401)", "fabric manager", "nvidia-fabricmanager", "IMEX")),
        ("SYSTEM_NOT_READY", ("(802)", "fabric manager", "IMEX")),
        ("NOT_PERMITTED", ("(800)", "IMEX channel")),
        ("OUT_OF_MEMORY", ("(2)", "multicast resources")),
        ("NOT_SUPPORTED", ("(801)", "NVSwitch")),
    ],
)
@pytest.mark.parametrize("failing", ["cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem"])
def test_d26_refused_multicast_tells_the_reason_not_the_number_alone(
    code: str, words: tuple[str, ...], failing: str
) -> None:
    """The attribute says yes, binding says no: no fabric manager runs, an IMEX channel is missing."""
    driver = VmmDriver()
    driver.fail[failing] = getattr(driver.CUresult, f"CUDA_ERROR_{code}")
    with Device(driver, 0, spec="cuda:0", is_emulated=False) as device:
        reason = multicast_unavailable([device]) or ""
        for word in (failing, *words):
            assert word in reason, reason
    released = len(driver.calls("cuMemRelease"))
    assert released == {"cuMulticastCreate": 0, "cuMulticastAddDevice": 1, "cuMulticastBindMem": 2}[failing]


def test_d26_other_errors_are_not_explained_away() -> None:
    driver = VmmDriver()
    driver.fail["cuMulticastBindMem"] = driver.CUresult.CUDA_ERROR_INVALID_HANDLE
    with Device(driver, 0, spec="cuda:0", is_emulated=False) as device:
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"):
            multicast_unavailable([device])
        driver.fail.clear()
        assert multicast_unavailable([device]) is None
    binds: list[Any] = driver.calls("cuMulticastBindMem")
    assert len(binds) == 2
    assert len(driver.calls("cuMulticastUnbind")) == 1
