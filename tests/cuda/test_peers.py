"""Peer access, the path between two devices, and copies between any memories."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.cuda import (
    ArrayError,
    CopyWay,
    Device,
    DriverError,
    LaunchError,
    Path,
    PeerError,
    WaitCondition,
    enable_peers,
    path_between,
)
from tests.cuda.fake_driver import FakeDriver
from tests.nodes import open_gpus

NVLINK = {"ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED"}
PCIE = {"ACCESS_SUPPORTED"}


def opened(fake: FakeDriver) -> list[Device]:
    return [Device(fake, ordinal, spec=f"cuda:{ordinal}", is_emulated=False) for ordinal in range(fake.gpus)]


@pytest.fixture
def fake() -> FakeDriver:
    """Three GPUs: 0 and 1 joined by NVLink, 2 reached by PCIe from 0 only."""
    fake = FakeDriver(3)
    fake.links = {(0, 1): NVLINK, (1, 0): NVLINK, (0, 2): PCIE, (2, 0): PCIE}
    return fake


@pytest.fixture
def gpus(fake: FakeDriver) -> Iterator[list[Device]]:
    devices = opened(fake)
    yield devices
    for device in devices:
        device.close()


# --- access ------------------------------------------------------------------------------------------


def test_d14_enabling_sets_the_context_itself(fake: FakeDriver, gpus: list[Device]) -> None:
    """One direction only, in the context of the device that will use the memory, whichever was current."""
    a, b, _ = gpus
    b.synchronize()  # makes b's context current
    a.enable_peer_access(b)
    assert fake.enabled == {(a.calls.context, b.calls.context)}


def test_d14_a_refusal_names_the_current_device_and_the_peer(fake: FakeDriver, gpus: list[Device]) -> None:
    fake.fail["cuCtxEnablePeerAccess"] = cuda.CUresult.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
    with pytest.raises(DriverError, match=r"\(current=cuda:1, peer=cuda:2\).*PEER_ACCESS_UNSUPPORTED"):
        gpus[1].enable_peer_access(gpus[2])


def test_d16_enabling_twice_is_fine_and_leaves_no_stale_error(fake: FakeDriver, gpus: list[Device]) -> None:
    a, b, _ = gpus
    fake.fail["cuCtxEnablePeerAccess"] = cuda.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
    a.enable_peer_access(b)  # another library had done it
    a.enable_peer_access(b)
    assert len(fake.calls("cuCtxEnablePeerAccess")) == 1
    assert a.calls.failed is None
    a.synchronize()


def test_peers_are_enabled_in_both_directions(fake: FakeDriver, gpus: list[Device]) -> None:
    a, b, _ = gpus
    enable_peers([a, b])
    assert fake.enabled == {
        (a.calls.context, b.calls.context),
        (b.calls.context, a.calls.context),
    }


def test_peers_that_cannot_are_named(gpus: list[Device]) -> None:
    with pytest.raises(PeerError, match=r"cuda:1 cannot use memory of cuda:2.*nvidia-smi topo -p2p r"):
        enable_peers(gpus)


def test_a_device_may_use_its_own_memory(fake: FakeDriver, gpus: list[Device]) -> None:
    assert gpus[0].can_access_peer(gpus[0])
    gpus[0].enable_peer_access(gpus[0])
    assert not fake.calls("cuCtxEnablePeerAccess") and not fake.calls("cuDeviceCanAccessPeer")


def test_a_closed_peer_or_one_of_another_machine_is_refused(gpus: list[Device]) -> None:
    gpus[1].close()
    with pytest.raises(PeerError, match="the peer cuda:1 of cuda:0 is closed"):
        gpus[0].enable_peer_access(gpus[1])
    with (
        Device.open("emu:h100") as emulated,
        pytest.raises(PeerError, match=r"cuda:0 and emu:h100 are not on one machine.*open_all"),
    ):
        gpus[0].can_access_peer(emulated)


def test_d15_the_path_is_staged_until_access_is_enabled(gpus: list[Device]) -> None:
    a, b, c = gpus
    assert path_between(a, b) == Path.STAGED == "staged through the host"
    a.enable_peer_access(b)
    assert (path_between(a, b), path_between(b, a)) == ("NVLink", "NVLink")
    a.enable_peer_access(c)
    assert path_between(a, c) is Path.PCIE
    assert path_between(b, c) is Path.STAGED
    assert path_between(a, a) is Path.LOCAL


# --- copies ------------------------------------------------------------------------------------------


def test_a_copy_goes_between_any_two_memories(gpus: list[Device]) -> None:
    a, b, _ = gpus
    data = np.arange(1000, dtype=np.uint32)
    first, second = a.asarray(data), b.empty(1000, np.uint32)
    stream = b.stream()
    b.copy(second, first, stream=stream)
    pinned, back = a.pinned(1000, np.uint32), np.zeros(1000, np.uint32)
    a.copy(pinned, second)
    a.copy(back[10:20], second[10:20])
    a.synchronize()
    assert (pinned.array == data).all() and (back[10:20] == data[10:20]).all() and not back[20:].any()


def test_a_copy_keeps_both_memories_until_it_is_done(fake: FakeDriver, gpus: list[Device]) -> None:
    a, b, _ = gpus
    stream = a.stream()
    a.copy(a.empty(64), b.empty(64), stream=stream)
    assert len(fake.memory) == 2
    stream.synchronize()
    assert not fake.memory


@pytest.mark.parametrize(
    ("src_bytes", "dst", "message"),
    [
        (64, "b.empty(65)", r"uint8, device='cuda:0'\) has 64 bytes, .* has 65"),
        (64, "np.zeros((8, 16), np.uint8)[:, :8]", r"contiguous memory \(got strides \(16, 1\)"),
        (64, "bytes(64)", r"numpy array \(got bytes\)"),
        (64, "frozen", "read-only numpy array"),
        (64, "src.bytes_view(32, 64)", "must not overlap"),
    ],
)
def test_a_copy_that_cannot_be_is_refused(src_bytes: int, dst: str, message: str, gpus: list[Device]) -> None:
    a, b, _ = gpus
    src = a.empty(128)
    frozen = np.zeros(64, np.uint8)
    frozen.flags.writeable = False
    target = eval(dst, {"a": a, "b": b, "np": np, "src": src, "frozen": frozen})
    with pytest.raises(ArrayError, match=message):
        a.copy(target, src.bytes_view(0, src_bytes))


def test_a_copy_uses_the_streams_of_its_device(gpus: list[Device]) -> None:
    a, b, _ = gpus
    with pytest.raises(ArrayError, match=r"cuda:0 copies on its own streams \(got one of cuda:1\)"):
        a.copy(a.empty(8), b.empty(8), stream=b.stream())


def batch(gpus: list[Device], *, on_default: bool = False) -> CopyWay:
    """Three copies, one of them empty; checks the bytes."""
    a, b, _ = gpus
    data = np.arange(96, dtype=np.uint8)
    src, dst = a.asarray(data), b.asarray(np.zeros(96, np.uint8))
    pairs = [(dst[:32], src[64:]), (dst[32:32], src[:0]), (dst[40:96], src[:56])]
    way = b.copy_batch(pairs, stream=b.default_stream if on_default else b.stream())
    b.synchronize()
    assert (dst.numpy() == np.concatenate([data[64:], np.zeros(8, np.uint8), data[:56]])).all()
    return way


def test_a_batch_is_one_call_where_the_driver_has_it(fake: FakeDriver, gpus: list[Device]) -> None:
    assert batch(gpus) is CopyWay.BATCH
    ((dsts, _, sizes, count, attributes, first, num_attributes, _),) = fake.calls("cuMemcpyBatchAsync")
    assert (len(dsts), sizes, count, first, num_attributes) == (2, [32, 56], 2, [0], 1)
    order = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    assert attributes[0].srcAccessOrder == order


@pytest.mark.parametrize(
    "why", ["old driver", "driver of CUDA 12, binding of 13", "default stream", "capture", "nothing to copy"]
)
def test_a_batch_is_told_to_go_one_by_one(
    why: str, fake: FakeDriver, gpus: list[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "nothing to copy":
        assert gpus[0].copy_batch([], stream=gpus[0].stream()) is CopyWay.ONE_BY_ONE
        return
    if why == "old driver":
        fake.version = 12070
    if why.startswith("driver of CUDA 12"):
        monkeypatch.setattr(fake, "CUDA_VERSION", 13000, raising=False)
        fake.version = 12090
    if why == "capture":
        fake.capturing = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    assert batch(gpus, on_default=why == "default stream") is CopyWay.ONE_BY_ONE
    assert len(fake.calls("cuMemcpyAsync")) == 2 and not fake.calls("cuMemcpyBatchAsync")


# --- streams -----------------------------------------------------------------------------------------


def test_a_stream_waits_for_an_event_of_another_device(fake: FakeDriver, gpus: list[Device]) -> None:
    a, b, _ = gpus
    stream, event = a.stream(), b.stream().record()
    stream.wait(event)
    assert fake.calls("cuStreamWaitEvent") == [(stream.handle, event.handle, 0)]
    with pytest.raises(LaunchError, match="records events of its own device"):
        stream.record(event)


def test_words_of_64_bits_and_other_conditions(fake: FakeDriver, gpus: list[Device]) -> None:
    stream = gpus[0].stream()
    stream.wait_value(4096, 2**40, bits=64, condition=WaitCondition.EQ)
    stream.write_value(4096, 2**63, bits=64)
    stream.wait_value(4096, 5)
    assert fake.calls("cuStreamWaitValue64") == [(stream.handle, 4096, 2**40, 1)]
    assert fake.calls("cuStreamWriteValue64") == [(stream.handle, 4096, 2**63, 0)]
    assert fake.calls("cuStreamWaitValue32") == [(stream.handle, 4096, 5, 0)]
    assert [int(one) for one in WaitCondition] == [
        int(getattr(cuda.CUstreamWaitValue_flags, f"CU_STREAM_WAIT_VALUE_{one.name}"))
        for one in WaitCondition
    ]
    with pytest.raises(LaunchError, match=r"of a 32-bit word is 0 to 2\^32 - 1"):
        stream.write_value(4096, 2**32)
    with pytest.raises(LaunchError, match="32 or 64 bits"):
        stream.write_value(4096, 1, bits=16)


# --- GPUs of one machine --------------------------------------------------------------------------------


def test_the_devices_of_a_node_copy_wait_and_close_one_by_one(node: str) -> None:
    """Fill on 0, copied by 1 after an event of 0, then by peer access of 1, then with 0 closed."""
    first, second = open_gpus(node, 2)
    data = np.arange(4096, dtype=np.uint32)
    array, other = first.asarray(np.zeros(4096, np.uint32)), second.empty(4096, np.uint32)
    writing, reading = first.stream(non_blocking=True), second.stream(non_blocking=True)
    array.copy_from(data, stream=writing)
    reading.wait(writing.record())
    assert path_between(first, second) is Path.STAGED
    second.copy(other, array, stream=reading)
    reading.synchronize()
    assert (other.numpy() == data).all()
    enable_peers([first, second])
    links = {Path.NVLINK} if first.is_emulated else {Path.NVLINK, Path.PCIE}
    assert path_between(second, first) in links
    pairs = [(other[:1024], array[3072:]), (other[1024:2048], array[:1024])]
    assert second.copy_batch(pairs, stream=reading) in CopyWay
    reading.synchronize()
    assert (other.numpy()[:2048] == np.concatenate([data[3072:], data[:1024]])).all()
    first.close()
    assert (other.numpy()[2048:] == data[2048:]).all()
    second.close()
