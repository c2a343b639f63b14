"""Host memory on a NUMA node: of an emulated machine, and of this one by system call."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smfree.cuda import Device, UnavailableError, numa
from tests.cuda.fake_driver import FakeDriver


@pytest.fixture
def four() -> Iterator[list[Device]]:
    devices = Device.open_all("emu:h100x4")
    yield devices
    for device in devices:
        device.close()


class InSlot(FakeDriver):
    """A GPU at a PCI address."""

    def answers(self) -> dict[str, Callable[..., tuple[Any, ...]]]:
        return super().answers() | {"cuDeviceGetPCIBusId": lambda size, device: (b"0000:1B:00.0\0\0",)}


def placed(device: Device, address: int) -> int | None:
    found: int | None = device.driver.node.host.numa_node_of(device.driver.process, address)
    return found


def test_emulated_devices_are_near_one_of_two_nodes(four: list[Device]) -> None:
    assert [device.numa_node for device in four] == [0, 0, 1, 1]


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_emulated_buffer_lies_where_it_was_put(four: list[Device], pinned: bool) -> None:
    device = four[0]
    make = device.pinned if pinned else device.pageable
    buffer = make((100,), np.float32, numa_node=1)
    assert buffer.pinned is pinned
    assert buffer.array.tolist() == [0.0] * 100
    address = buffer.ptr
    assert placed(device, address + 399) == 1
    assert placed(device, make((100,), np.float32).ptr) is None
    view = buffer.array[10:]
    del buffer
    gc.collect()
    assert placed(device, address) == 1, "a view keeps it"
    del view
    gc.collect()
    assert placed(device, address) is None


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_memory_of_any_node_comes_and_goes_bitwise(gpu: Device, pinned: bool) -> None:
    """Also on a machine with one node, and where neither driver nor system knows which one is near."""
    make = gpu.pinned if pinned else gpu.pageable
    data = np.random.default_rng(3).integers(0, 2**32, 5000, dtype=np.uint32)
    for node in range(2) if gpu.is_emulated else numa.nodes():
        try:
            there, back = (make(data.shape, np.uint32, numa_node=node) for _ in range(2))
        except UnavailableError as error:  # a container may forbid mbind
            pytest.skip(str(error))
        there.array[...] = data
        array = gpu.empty(data.shape, np.uint32).copy_from(there)
        gpu.copy(back, array)
        gpu.synchronize()
        assert (back.array == data).all()


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_copies_of_the_far_node_take_longer(four: list[Device], pinned: bool) -> None:
    """By the profile's fraction; the near node is as fast as one that nobody chose (modelled)."""
    device, nbytes = four[3], 4 << 20
    array = device.asarray(np.zeros(nbytes, np.uint8))
    stream = device.stream()
    make = device.pinned if pinned else device.pageable
    times = {}
    for node in (None, 1, 0):
        buffer = make(nbytes, numa_node=node)
        before = stream.record()
        array.copy_from(buffer, stream=stream)
        after = stream.record()
        stream.synchronize()
        times[node] = after.elapsed_us(before)
    assert times[1] == pytest.approx(times[None], rel=0.01)
    assert times[0] / times[1] == pytest.approx(1 / 0.75, rel=0.05)


def test_node_that_does_not_exist_is_refused(four: list[Device]) -> None:
    with pytest.raises(UnavailableError, match=r"NUMA nodes 0 to 1 \(got 2\)"):
        four[0].pageable(4, numa_node=2)
    with pytest.raises(UnavailableError, match=r"no NUMA node 12345 \(it has .*use one of them"):
        numa.memory_on(12345, 10)


def test_memory_of_this_machine_is_zeroed_and_writable() -> None:
    """mbind is a system call that the test machine may forbid; then the reason is told."""
    node = numa.nodes()[0]
    try:
        memory = numa.memory_on(node, 10_000)
    except UnavailableError as error:
        assert "mbind to NUMA node" in str(error) or "use Linux" in str(error)
        return
    assert len(memory) == 10_000
    assert memory[:] == bytes(10_000)
    memory[9_999] = 7


def test_real_pinned_buffer_is_registered_until_its_last_view_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numa, "memory_on", lambda node, nbytes: mmap.mmap(-1, nbytes))
    driver = FakeDriver()
    with Device(driver, 0, spec="cuda:0", is_emulated=False) as device:
        buffer = device.pinned((100,), np.uint32, mapped=True, numa_node=0)
        ((address, nbytes, flags),) = driver.calls("cuMemHostRegister")
        assert (address, nbytes, flags) == (buffer.ptr, 400, 1 | 2)
        assert address % 4096 == 0
        view = buffer.array[1:]
        del buffer
        gc.collect()
        assert driver.calls("cuMemHostUnregister") == []
        del view
        gc.collect()
        assert driver.calls("cuMemHostUnregister") == [(address,)]
        assert not driver.calls("cuMemHostAlloc")


def test_node_of_a_real_gpu_comes_from_the_driver_or_from_its_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Device(FakeDriver(HOST_NUMA_ID=1), 0, spec="cuda:0", is_emulated=False) as device:
        assert device.numa_node == 1
    slot = tmp_path / "0000:1b:00.0"
    slot.mkdir()
    monkeypatch.setattr(numa, "_PCI", tmp_path)
    with Device(InSlot(HOST_NUMA_ID=-1), 0, spec="cuda:0", is_emulated=False) as device:
        assert device.numa_node is None
        for text, node in (("1\n", 1), ("-1\n", None)):
            (slot / "numa_node").write_text(text)
            assert device.numa_node == node


def test_lists_of_nodes() -> None:
    assert numa._parse("0-1,3\n") == (0, 1, 3)
    assert numa._parse("0") == (0,)
    assert numa.nodes()
