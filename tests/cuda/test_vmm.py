"""Virtual memory management through the host side: memory, mappings, descriptors, what is freed when."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest

from smfree.cuda import ArrayError, Device, DeviceClosedError, DriverError, PhysicalMemory, UnavailableError
from smfree.cuda.compile_cuda import CudaSource
from smfree.cuda.vmm import attribute, round_up, vmm_unavailable
from tests.cuda.conftest import Opens
from tests.cuda.vmm_kit import PAGE, VmmDriver


@pytest.fixture
def pair() -> Iterator[list[Device]]:
    """Two emulated GPUs of one machine."""
    devices = Device.open_all("emu:h100x2")
    yield devices
    for device in devices:
        device.close()


def used(device: Device) -> int:
    """Bytes of device memory that are not free."""
    free, total = device.calls("cuMemGetInfo")
    return int(total) - int(free)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_array_in_mapped_memory_is_an_array(h100: Device) -> None:
    with PhysicalMemory.create(h100, 1000) as memory:
        assert memory.nbytes == memory.granularity == PAGE
        mapping = memory.map()
        array = mapping.array((250,), np.uint32)
        data = np.arange(250, dtype=np.uint32)
        assert (array.copy_from(data).numpy() == data).all()
        tail = mapping.array((10,), np.uint32, offset_bytes=960)
        assert (tail.numpy() == data[240:]).all()
    assert (array.numpy() == data).all(), "a closed handle leaves its mappings"
    with pytest.raises(DeviceClosedError, match="map it before"):
        memory.map()


def test_memory_goes_with_its_last_array(h100: Device) -> None:
    with PhysicalMemory.create(h100, PAGE) as memory:
        array = memory.map().array((16,))
    gc.collect()
    assert used(h100) == PAGE
    del array, memory
    gc.collect()
    assert used(h100) == 0


def test_freed_mapping_is_an_error_not_a_stray_pointer(h100: Device) -> None:
    with PhysicalMemory.create(h100, PAGE) as memory:
        mapping = memory.map()
        array = mapping.array((16,))
        mapping.free()
        with pytest.raises(DeviceClosedError, match="was freed"):
            array.numpy()
    assert used(h100) == 0


def test_closed_device_frees_mappings_and_handles() -> None:
    with Device.open("emu:h100") as device:
        memory = PhysicalMemory.create(device, PAGE)
        array = memory.map().array((16,))
        emulator = device.emulator
    assert emulator.memory.allocated_bytes == 0
    assert memory.closed
    with pytest.raises(DeviceClosedError):
        array.numpy()


def test_peer_maps_memory_by_descriptor(gpus: Opens) -> None:
    """As another process would; the descriptor is the caller's to close. The second time opens no more."""
    owner, other = gpus(2, shared=True)
    left = []
    for _ in range(2):
        with PhysicalMemory.create(owner, PAGE) as memory:
            array = memory.map().array((4,), np.uint32).copy_from(np.arange(4, dtype=np.uint32))
            descriptor = memory.export()
            with PhysicalMemory.from_descriptor(other, descriptor, memory.nbytes) as imported:
                os.close(descriptor)
                peer = imported.map().array((4,), np.uint32)
                assert peer.ptr != array.ptr
                assert peer.device is other
                assert peer.numpy().tolist() == [0, 1, 2, 3]
                array.free()
                peer.free()
        left.append((used(owner), open_descriptors()))
    assert left[0] == left[1]
    if owner.is_emulated:
        assert owner.emulator.memory.allocated_bytes == 0


def test_kernel_of_a_device_without_access_is_told_so(pair: list[Device]) -> None:
    text = 'extern "C" __global__ void put(unsigned* x) { x[threadIdx.x] = threadIdx.x; }'
    source = CudaSource("put.cu", text=text)
    kernels = [device.compile(source).kernel() for device in pair]
    with PhysicalMemory.create(pair[0], PAGE) as memory:
        mapping = memory.map([pair[0], pair[1]])
        kernels[1].launch(1, 32, [mapping.array((32,), np.uint32, device=pair[1])])
        pair[1].synchronize()
        assert mapping.array((32,), np.uint32).numpy().tolist() == list(range(32))
        private = memory.map([pair[0]])
        kernels[1].launch(1, 32, [private.array((32,), np.uint32, device=pair[1])])
        with pytest.raises(DriverError, match=r"device 1 has no access to mapped memory .* on device 0"):
            pair[1].synchronize()


def test_private_memory_is_not_exported(h100: Device) -> None:
    memory = PhysicalMemory.create(h100, PAGE, shareable=False)
    with pytest.raises(DriverError, match="was not made shareable"):
        memory.export()


def test_sizes_and_offsets_are_checked(h100: Device) -> None:
    with pytest.raises(ArrayError, match=r"at least one byte \(got 0\)"):
        PhysicalMemory.create(h100, 0)
    with PhysicalMemory.create(h100, PAGE) as memory:
        mapping = memory.map()
        with pytest.raises(ArrayError, match=f"leaves the mapping of {PAGE} bytes"):
            mapping.array((PAGE,), offset_bytes=1)
        mapping.array((PAGE - 1,), offset_bytes=1)
    assert [round_up(n, 16) for n in (0, 1, 16, 17)] == [16, 16, 16, 32]


def test_capability_is_asked_for() -> None:
    with Device(VmmDriver(VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=0), 0, spec="cuda:0", is_emulated=False) as old:
        assert "no virtual memory management; use cuMemAlloc" in (vmm_unavailable(old) or "")
        with pytest.raises(UnavailableError, match="no virtual memory management"):
            PhysicalMemory.create(old, PAGE)
    driver = VmmDriver(HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=0)
    with Device(driver, 0, spec="cuda:0", is_emulated=False) as private:
        assert "cannot share memory by file descriptor" in (vmm_unavailable(private) or "")
        assert vmm_unavailable(private, shareable=False) is None


def test_driver_that_does_not_know_an_attribute_lacks_it() -> None:
    driver = VmmDriver()
    with Device(driver, 0, spec="cuda:0", is_emulated=False) as device:
        driver.fail["cuDeviceGetAttribute"] = driver.CUresult.CUDA_ERROR_INVALID_VALUE
        assert attribute(device, "MULTICAST_SUPPORTED") == 0
        assert attribute(device, "NO_SUCH_ATTRIBUTE") == 0
        driver.fail["cuDeviceGetAttribute"] = driver.CUresult.CUDA_ERROR_INVALID_DEVICE
        with pytest.raises(DriverError, match="attribute=MULTICAST_SUPPORTED"):
            attribute(device, "MULTICAST_SUPPORTED")


def test_failed_mapping_leaves_nothing_behind() -> None:
    """The addresses are given back when the driver refuses to map or to give access."""
    for failing, undone in (("cuMemMap", []), ("cuMemSetAccess", ["cuMemUnmap"])):
        driver = VmmDriver()
        with Device(driver, 0, spec="cuda:0", is_emulated=False) as device:
            memory = PhysicalMemory.create(device, PAGE)
            driver.fail[failing] = driver.CUresult.CUDA_ERROR_INVALID_DEVICE
            with pytest.raises(DriverError, match=failing):
                memory.map()
            memory.close()
        ends = [api for api, _ in driver.log if api in ("cuMemUnmap", "cuMemAddressFree", "cuMemRelease")]
        assert ends == [*undone, "cuMemAddressFree", "cuMemRelease"]
