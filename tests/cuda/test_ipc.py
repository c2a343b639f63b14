"""Memory and events of another process: with fake drivers, and with two processes of an emulated node."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.cuda import Device, DeviceArray, DeviceClosedError, IpcError, KernelFaultError
from smfree.cuda.ipc import MemoryHandle, export, export_event, ipc_unavailable
from smfree.emulator.driver import Driver
from smfree.emulator.node import Node
from tests.cuda.fake_driver import FakeDriver, FakeMachine
from tests.cuda.process_bodies import read_write_and_wait
from tests.nodes import spawn_ranks
from tests.ranks.kit import as_threads

CODES = cuda.CUresult


def device_of(driver: FakeDriver, ordinal: int = 0) -> Device:
    return Device(driver, ordinal, spec=f"cuda:{ordinal}", is_emulated=False)


@pytest.fixture
def pair() -> Iterator[tuple[Device, Device]]:
    """A device of an exporting and one of an importing process."""
    machine = FakeMachine()
    exporter, importer = device_of(FakeDriver(machine=machine)), device_of(FakeDriver(machine=machine))
    yield exporter, importer
    importer.close()
    assert not importer.driver.opened, "every import was closed"
    exporter.close()


def sent(array: DeviceArray) -> MemoryHandle:
    """A handle as it comes out of a socket."""
    return pickle.loads(pickle.dumps(export(array)))


# --- export ------------------------------------------------------------------------------------------


def test_d31_the_offset_into_the_allocation_is_added(pair: tuple[Device, Device]) -> None:
    """A view 4096 bytes into an allocation; the bytes before it stay as they are."""
    exporter, importer = pair
    whole = exporter.asarray(np.zeros(8192, np.uint8))
    handle = sent(whole[4096:].view(np.uint32))
    assert (handle.offset_bytes, handle.nbytes, handle.allocation_bytes) == (4096, 4096, 8192)
    peer = importer.open_ipc(handle)
    assert (peer.shape, peer.dtype, peer.ptr) == ((1024,), np.uint32, whole.ptr + 4096)
    peer.copy_from(np.arange(1024, dtype=np.uint32))
    bytes_there = whole.numpy()
    assert (bytes_there[4096:].view(np.uint32) == np.arange(1024)).all() and not bytes_there[:4096].any()


@pytest.mark.parametrize("api", ["cuIpcGetMemHandle", "cuMemGetAddressRange"])
def test_d02_d03_what_cannot_be_exported_says_what_can(api: str, pair: tuple[Device, Device]) -> None:
    exporter, _ = pair
    array = exporter.empty(64)
    exporter.driver.fail[api] = CODES.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(IpcError) as caught:
        export(array)
    text = str(caught.value)
    assert "cannot be exported. CUDA IPC exports what cuMemAlloc gave (device.empty, cudaMalloc)" in text
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in text and "cudaMallocAsync" in text
    assert "turn that setting off, or share such memory by file descriptor (smfree.cuda.vmm)" in text
    assert f"{api}(" in text and "CUDA_ERROR_INVALID_VALUE" in text


def test_what_is_no_array_and_what_is_no_handle_is_told_so(pair: tuple[Device, Device]) -> None:
    exporter, importer = pair
    with pytest.raises(IpcError, match=r"exports arrays of a device \(got ndarray\); use device.asarray"):
        export(np.zeros(4))  # type: ignore[arg-type]
    blob = pickle.dumps(export(exporter.asarray(np.zeros(4))))
    with pytest.raises(IpcError, match=r"a MemoryHandle \(got bytes\); unpickle what the other process sent"):
        importer.open_ipc(blob)  # type: ignore[arg-type]


def test_a_fault_of_the_context_is_not_blamed_on_the_memory(pair: tuple[Device, Device]) -> None:
    exporter, _ = pair
    array = exporter.empty(64)
    exporter.driver.fail["cuIpcGetMemHandle"] = CODES.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(KernelFaultError, match="a kernel launched earlier failed"):
        export(array)


# --- import ------------------------------------------------------------------------------------------


def test_d01_a_handle_is_opened_once_and_closed_with_its_last_array(pair: tuple[Device, Device]) -> None:
    exporter, importer = pair
    whole = exporter.empty(256)
    first, second = importer.open_ipc(sent(whole)), importer.open_ipc(sent(whole[16:]))
    assert second.ptr == first.ptr + 16
    assert len(importer.driver.calls("cuIpcOpenMemHandle")) == len(importer.imports) == 1
    first.free()
    with pytest.raises(DeviceClosedError):
        first.numpy()
    second.numpy()
    del second
    gc.collect()
    assert len(importer.imports) == 0
    assert importer.driver.calls("cuIpcCloseMemHandle") == [(whole.ptr,)]
    importer.open_ipc(sent(whole)).free()
    assert len(importer.driver.calls("cuIpcOpenMemHandle")) == 2


def test_queued_work_keeps_what_it_uses_open(pair: tuple[Device, Device]) -> None:
    exporter, importer = pair
    array, stream = exporter.empty(256), importer.stream()
    importer.open_ipc(sent(array)).fill(3, stream=stream)
    gc.collect()
    assert len(importer.imports) == 1
    stream.synchronize()
    assert len(importer.imports) == 0


def test_closing_the_device_closes_its_imports(pair: tuple[Device, Device]) -> None:
    exporter, importer = pair
    array = exporter.empty(256)
    peer = importer.open_ipc(sent(array))
    importer.close()
    assert not importer.driver.opened
    with pytest.raises(DeviceClosedError):
        _ = peer.ptr


def test_d08_memory_that_replaced_freed_memory_closes_the_old_mapping_first(
    pair: tuple[Device, Device],
) -> None:
    """Ten rounds at one address; what is still open of the round before is closed, its handle is refused."""
    exporter, importer = pair
    fake = exporter.driver
    array = exporter.empty(256)
    address, buffer = array.ptr, fake.memory[array.ptr]
    handle = sent(array)
    for serial in range(100, 110):
        peer = importer.open_ipc(handle)
        fake.serials[address] = serial  # freed, and allocated anew at the same address
        fake.memory[address] = buffer
        before, handle = handle, sent(array)
        again = importer.open_ipc(handle)
        assert len(importer.imports) == 1 and len(importer.driver.opened) == 1
        with pytest.raises(DeviceClosedError):
            peer.numpy()
        with pytest.raises(IpcError, match=rf"memory at {address:#x} is stale: .*export it again"):
            importer.open_ipc(before)
        again.numpy()


def test_d04_a_handle_of_the_same_process_is_refused() -> None:
    """Also for another device of the process."""
    driver = FakeDriver(2)
    with device_of(driver) as here, device_of(driver, 1) as there:
        array = here.empty(64)
        handle = sent(array)
        for device in (here, there):
            with pytest.raises(IpcError, match=r"memory of this very process \(pid \d+\).*peer access"):
                device.open_ipc(handle)
        event = pickle.loads(pickle.dumps(export_event(here.event(interprocess=True))))
        with pytest.raises(IpcError, match=r"an event of this very process"):
            there.open_ipc_event(event)
    assert not driver.calls("cuIpcOpenMemHandle")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pid_namespace": "pid:[7]"}, r"another pid namespace \(pid:\[7\], here pid:\[\d+\]\).*common one"),
        ({"machine": "other"}, r"another machine \(boot id other, here [0-9a-f-]+\)"),
    ],
    ids=["d07-namespace", "machine"],
)
def test_d07_handles_do_not_cross_namespaces_or_machines(
    change: dict[str, str], message: str, pair: tuple[Device, Device]
) -> None:
    exporter, importer = pair
    array = exporter.empty(64)
    handle = export(array)
    with pytest.raises(IpcError, match=message):
        importer.open_ipc(replace(handle, origin=replace(handle.origin, **change)))
    assert not importer.driver.calls("cuIpcOpenMemHandle")


def test_d11_memory_is_opened_on_the_callers_device_whatever_the_exporter_calls_its_own() -> None:
    """Exporter: GPU 7 is its device 3. Importer: sees GPU 9 alone, as device 0."""
    machine = FakeMachine()
    exporting, importing = FakeDriver(4, machine), FakeDriver(1, machine)
    exporting.uuids, importing.uuids = [1, 2, 3, 7], [9]
    with device_of(exporting, 3) as exporter, device_of(importing) as importer:
        array = exporter.empty(64)
        handle = sent(array)
        assert handle.device_uuid == "07" * 16
        peer = importer.open_ipc(handle)
        assert importing.opened == {array.ptr: importer.calls.context}
        importing.fail["cuIpcOpenMemHandle"] = CODES.CUDA_ERROR_INVALID_DEVICE
        with pytest.raises(IpcError, match=rf"cuda:0 cannot open .* from the GPU {'07' * 16}: the driver"):
            importer.open_ipc(replace(handle, handle=bytes(64), base=0))
        peer.free()


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        ("INVALID_HANDLE", "the exporting process freed it, or has ended"),
        ("ALREADY_MAPPED", "this process has it open already"),
        ("TOO_MANY_PEERS", "no room for another peer"),
        ("MAP_FAILED", "whatever peer access says; share by file descriptor"),
    ],
)
def test_a_refusal_to_open_says_what_it_means(code: str, meaning: str, pair: tuple[Device, Device]) -> None:
    exporter, importer = pair
    array = exporter.empty(64)
    importer.driver.fail["cuIpcOpenMemHandle"] = getattr(CODES, f"CUDA_ERROR_{code}")
    with pytest.raises(IpcError, match=meaning) as caught:
        importer.open_ipc(sent(array))
    assert f"CUDA_ERROR_{code}" in str(caught.value)
    assert len(importer.imports) == 0


def test_only_interprocess_events_are_exported(pair: tuple[Device, Device]) -> None:
    exporter, importer = pair
    with pytest.raises(IpcError, match=r"device.event\(interprocess=True\)"):
        export_event(exporter.event())
    event = exporter.event(interprocess=True)
    assert exporter.driver.calls("cuEventCreate")[-1] == (6,) and not event.timing
    opened = importer.open_ipc_event(export_event(event))
    importer.stream().wait(opened)
    assert not opened.timing


# --- the probe ---------------------------------------------------------------------------------------


def probe(drivers: list[FakeDriver]) -> list[str | None]:
    def rank(rendezvous: object) -> str | None:
        with device_of(drivers[rendezvous.rank]) as device:  # type: ignore[attr-defined]
            return ipc_unavailable(device, rendezvous)  # type: ignore[arg-type]

    return as_threads(rank, len(drivers))


def test_d05_the_probe_opens_real_handles() -> None:
    machine = FakeMachine()
    drivers = [FakeDriver(machine=machine) for _ in range(3)]
    assert probe(drivers) == [None] * 3
    assert [len(driver.calls("cuIpcOpenMemHandle")) for driver in drivers] == [2, 2, 2]
    assert not any(driver.opened or driver.memory for driver in drivers)


@pytest.mark.parametrize("api", ["cuIpcOpenMemHandle", "cuIpcGetMemHandle", "cuMemAlloc"])
def test_d05_where_one_rank_fails_all_get_the_reason(api: str) -> None:
    machine = FakeMachine()
    drivers = [FakeDriver(machine=machine) for _ in range(3)]
    drivers[1].fail[api] = CODES.CUDA_ERROR_INVALID_DEVICE
    reasons = probe(drivers)
    assert len(set(reasons)) == 1
    assert reasons[0] is not None and reasons[0].startswith("rank 1: ") and f"{api}(" in reasons[0]
    assert not any(driver.opened or driver.memory for driver in drivers)


# --- two processes of an emulated node ---------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[tuple[Device, Device]]:
    """Device 0 in one process and device 1 in another."""
    node = Node(["h100", "h100"])
    devices = [
        Device(Driver(node), ordinal, spec=f"emu:h100x2:{ordinal}", is_emulated=True) for ordinal in (0, 1)
    ]
    yield devices[0], devices[1]
    for device in devices:
        device.close()


def test_another_process_reads_and_writes_an_exported_array(processes: tuple[Device, Device]) -> None:
    exporter, importer = processes
    data = np.arange(3000, dtype=np.uint32)
    array = exporter.asarray(data)
    peer = importer.open_ipc(sent(array[1000:2000]))
    assert peer.ptr != array[1000:].ptr, "a pointer means nothing in another process"
    assert (peer.numpy() == data[1000:2000]).all()
    own = importer.empty(1000, np.uint32)
    importer.copy(own, peer)
    importer.copy(peer, own)
    peer.fill(0xAB)
    importer.synchronize()
    assert (array.numpy()[1000:2000] == 0xABABABAB).all() and (array.numpy()[2000:] == data[2000:]).all()
    assert (own.numpy() == data[1000:2000]).all()


def test_opening_and_closing_a_thousand_times_leaks_nothing(processes: tuple[Device, Device]) -> None:
    exporter, importer = processes
    array = exporter.empty(1 << 20)
    handle = sent(array)
    space = importer.driver.process.space
    before = len(list(space))
    for _ in range(1000):
        importer.open_ipc(handle).free()
    assert len(importer.imports) == 0 and len(list(space)) == before


def test_freed_and_allocated_anew_the_old_handle_opens_nothing(processes: tuple[Device, Device]) -> None:
    exporter, importer = processes
    array = exporter.empty(4096)
    handle = sent(array)
    array.free()
    with pytest.raises(IpcError, match="the exporting process freed it, or has ended; export it again"):
        importer.open_ipc(handle)
    again = exporter.empty(4096)
    importer.open_ipc(sent(again)).free()


def test_an_event_of_another_process_orders_two_streams(processes: tuple[Device, Device]) -> None:
    exporter, importer = processes
    array, event = exporter.asarray(np.zeros(1024, np.uint8)), exporter.event(interprocess=True)
    peer, done = importer.open_ipc(sent(array)), importer.open_ipc_event(export_event(event))
    writing, reading = exporter.stream(), importer.stream()
    array.fill(7, stream=writing)
    writing.record(event)
    reading.wait(done)
    own = importer.empty(1024)
    importer.copy(own, peer, stream=reading)
    reading.synchronize()
    assert (own.numpy() == 7).all()


# --- real processes ----------------------------------------------------------------------------------


def test_processes_read_write_and_wait_for_each_other(node: str) -> None:
    """D01, D31, and that what is freed is not opened again; two processes, on one GPU if there is one."""
    assert spawn_ranks(node, read_write_and_wait, 2, timeout_s=100) == [[], []]
