"""Several devices of one process: peer access, copies between them, events across them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from smfree.emulator.bytespace import as_addresses
from smfree.emulator.driver import Driver
from smfree.emulator.errors import MemoryFault
from tests.emulator.driver_kit import (
    FakeExecutor,
    array_of,
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
P2P = cuda.CUdevice_P2PAttribute
STREAM_ORDER = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


def pair(*profiles: str, **settings: Any) -> tuple[Driver, Any, Any]:
    """Two devices, their contexts; that of device 0 is current."""
    driver = open_driver(*(profiles or ("h100", "h100")), **settings)
    return driver, *open_node(driver)


# --- access


def test_devices_of_one_generation_can_access_each_other_but_not_themselves() -> None:
    driver = open_driver("h100", "h100", "a100")
    answers = [[ok(driver.cuDeviceCanAccessPeer(a, b)) for b in range(3)] for a in range(3)]
    assert answers == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    refused(driver, driver.cuDeviceCanAccessPeer(0, 3), "INVALID_DEVICE", "no device 3")


def test_attributes_of_a_link() -> None:
    driver = open_driver("h100", "h100", "a100")
    access, atomics = (
        P2P.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED,
        (P2P.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED),
    )
    rank, arrays = (
        P2P.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK,
        (P2P.CU_DEVICE_P2P_ATTRIBUTE_CUDA_ARRAY_ACCESS_SUPPORTED),
    )
    asked = (access, atomics, rank, arrays)
    assert [ok(driver.cuDeviceGetP2PAttribute(one, 0, 1)) for one in asked] == [1, 1, 0, 0]
    assert ok(driver.cuDeviceGetP2PAttribute(access, 0, 2)) == 0
    refused(driver, driver.cuDeviceGetP2PAttribute(access, 1, 1), "INVALID_DEVICE", "both 1")


def test_peer_access_is_one_directional() -> None:
    """D14: the direction that is missing is named, with the device that is current."""
    driver, first, second = pair()
    ok(driver.cuCtxEnablePeerAccess(second, 0))
    ok(driver.cuCtxSetCurrent(second))
    refused(
        driver, driver.cuCtxDisablePeerAccess(first), "PEER_ACCESS_NOT_ENABLED",
        "from device 1 (current) to device 0 is not enabled", "one-directional",
    )  # fmt: skip
    ok(driver.cuCtxEnablePeerAccess(first, 0))
    ok(driver.cuCtxDisablePeerAccess(first))


def test_enabling_twice_is_704_and_leaves_nothing_behind() -> None:
    """D16."""
    driver, _, second = pair()
    ok(driver.cuCtxEnablePeerAccess(second, 0))
    result = driver.cuCtxEnablePeerAccess(second, 0)
    assert int(result[0]) == 704
    refused(
        driver,
        result,
        "PEER_ACCESS_ALREADY_ENABLED",
        "from device 0 (current) to device 1",
        "nothing is wrong",
    )
    ok(driver.cuCtxSynchronize())
    ok(driver.cuCtxDisablePeerAccess(second))
    refused(driver, driver.cuCtxDisablePeerAccess(second), "PEER_ACCESS_NOT_ENABLED")
    ok(driver.cuCtxEnablePeerAccess(second, 0))


def test_what_cannot_be_enabled_says_why() -> None:
    driver, first, second = pair("h100", "a100")
    refused(driver, driver.cuCtxEnablePeerAccess(first, 0), "INVALID_CONTEXT", "device 0", "the peer itself")
    refused(driver, driver.cuCtxEnablePeerAccess(second, 1), "INVALID_VALUE", "Flags must be 0, got 1")
    refused(
        driver, driver.cuCtxEnablePeerAccess(second, 0), "PEER_ACCESS_UNSUPPORTED", "device 0", "device 1"
    )
    refused(driver, driver.cuCtxEnablePeerAccess(12345, 0), "INVALID_CONTEXT", "no live context")
    ok(driver.cuCtxSetCurrent(None))
    refused(driver, driver.cuCtxEnablePeerAccess(second, 0), "INVALID_CONTEXT", "no context is current")


def test_context_that_ends_takes_the_access_to_it_along() -> None:
    driver, _, second = pair()
    ok(driver.cuCtxEnablePeerAccess(second, 0))
    ok(driver.cuDevicePrimaryCtxRelease(1))
    ok(driver.cuDevicePrimaryCtxRetain(1))
    ok(driver.cuCtxEnablePeerAccess(second, 0))


def test_kernel_reaches_a_peer_only_with_access() -> None:
    """D13: both devices are named, and what to call."""
    driver, _, second = pair()
    ok(driver.cuCtxSetCurrent(second))
    pointer = array_of(driver, WORDS)
    user, space = driver.process.contexts[0], driver.process.space
    with pytest.raises(MemoryFault) as caught:
        space.reach(int(pointer), 4, "load", user)
    assert caught.value.rule == "memory.peer_access"
    for words in ("device 0", "memory of device 1", "cuCtxEnablePeerAccess with device 1's context"):
        assert words in str(caught.value)
    assert space.reach(int(pointer), 4, "load", driver.process.contexts[1]) is not None
    user.peers.add(1)
    found = space.reach(int(pointer), 4, "load", user)
    assert found is not None and found.device is driver.node.devices[1]
    assert int(found.memory.load(as_addresses(np.array([found.address])), 4)[0, 0]) == 1


def test_peer_access_does_not_extend_to_stream_ordered_memory() -> None:
    driver, _, second = pair()
    ok(driver.cuCtxEnablePeerAccess(second, 0))
    ok(driver.cuCtxSetCurrent(second))
    pooled, plain = ok(driver.cuMemAllocAsync(64, 0)), ok(driver.cuMemAlloc(64))
    user, space = driver.process.contexts[0], driver.process.space
    with pytest.raises(MemoryFault) as caught:
        space.reach(int(pooled), 4, "load", user)
    assert caught.value.rule == "memory.no_access"
    for words in ("device 0", "stream-ordered memory of device 1", "cuMemAlloc or cuMemCreate"):
        assert words in str(caught.value)
    assert space.reach(int(plain), 4, "load", user) is not None
    assert space.reach(int(pooled), 4, "load", driver.process.contexts[1]) is not None


# --- copies


@pytest.mark.parametrize("enabled", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("call", ["cuMemcpyPeerAsync", "cuMemcpyAsync", "cuMemcpyDtoDAsync", "cuMemcpyPeer"])
def test_copy_between_devices_needs_no_peer_access(call: str, enabled: bool) -> None:
    driver, first, second = pair()
    if enabled:
        ok(driver.cuCtxEnablePeerAccess(second, 0))
    src = array_of(driver, WORDS)
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuCtxSetCurrent(second))
    dst = ok(driver.cuMemAlloc(WORDS.nbytes))
    ok(driver.cuCtxSetCurrent(first))
    if "Peer" in call:
        arguments = (dst, second, src, first, WORDS.nbytes)
    else:
        arguments = (int(dst), int(src), WORDS.nbytes)
    ok(getattr(driver, call)(*arguments, *((stream,) if "Async" in call else ())), driver)
    ok(driver.cuStreamSynchronize(stream))
    assert (values_at(driver, dst, len(WORDS)) == WORDS).all()
    devices = driver.node.devices
    assert driver.process.direct(devices[0], devices[1]) is enabled


def test_copy_names_a_context_that_does_not_hold_the_memory() -> None:
    driver, first, second = pair()
    src, dst = array_of(driver, WORDS), ok(driver.cuMemAlloc(WORDS.nbytes))
    result = driver.cuMemcpyPeer(dst, second, src, first, WORDS.nbytes)
    refused(driver, result, "INVALID_VALUE", "dstDevice", "memory of device 0", "that of device 1")
    ok(driver.cuMemcpyPeer(dst, first, src, first, WORDS.nbytes))
    refused(driver, driver.cuMemcpyPeer(dst, 7, src, first, 4), "INVALID_CONTEXT", "no live context")


def test_copy_past_the_end_on_the_other_device_is_refused() -> None:
    driver, first, second = pair()
    src = array_of(driver, WORDS)
    ok(driver.cuCtxSetCurrent(second))
    dst = ok(driver.cuMemAlloc(64))
    result = driver.cuMemcpyPeer(dst, second, src, first, 68)
    refused(driver, result, "INVALID_VALUE", "4 bytes past the end", "global memory of device 1")


@pytest.mark.parametrize("call", ["cuMemcpyPeer", "cuMemcpyDtoD", "cuMemcpyAsync"])
def test_copy_between_devices_in_the_default_stream_is_ordered_with_both(call: str) -> None:
    """Behind the writer in a non-blocking stream of the source, before a reader in one of the destination."""
    driver, first, second = pair()
    src = array_of(driver, WORDS)
    writer = ok(driver.cuStreamCreate(1))
    ok(driver.cuCtxSetCurrent(second))
    dst, reader = ok(driver.cuMemAlloc(WORDS.nbytes)), ok(driver.cuStreamCreate(1))
    out = ok(driver.cuMemHostAlloc(WORDS.nbytes, 0))
    flag = ok(driver.cuMemHostAlloc(4, 0))
    ok(driver.cuStreamWaitValue32(writer, flag, 1, 0))
    ok(driver.cuMemsetD32Async(src, 7, len(WORDS), writer))
    if call == "cuMemcpyPeer":
        ok(driver.cuMemcpyPeer(dst, second, src, first, WORDS.nbytes))
    else:
        ok(getattr(driver, call)(int(dst), int(src), WORDS.nbytes, *((0,) if "Async" in call else ())))
    ok(driver.cuMemcpyDtoHAsync(out, dst, WORDS.nbytes, reader))
    assert driver.cuStreamQuery(reader)[0] == cuda.CUresult.CUDA_ERROR_NOT_READY
    driver.node.host.store(as_addresses(np.array([flag])), np.array([[1]], np.uint32))
    ok(driver.cuStreamSynchronize(reader), driver)
    seen = driver.node.host.load(as_addresses(np.array([out])), 4)
    assert int(seen[0, 0]) == 7


def attributes(order: Any = STREAM_ORDER) -> Any:
    made = cuda.CUmemcpyAttributes()
    made.srcAccessOrder = order
    return made


def batch(driver: Driver, pairs: Any, stream: Any, *, nbytes: int = 64, starts: Any = (0,)) -> Any:
    dsts = [cuda.CUdeviceptr(int(dst)) for dst, _ in pairs]
    srcs = [cuda.CUdeviceptr(int(src)) for _, src in pairs]
    sizes = [nbytes] * len(pairs)
    made = [attributes() for _ in starts]
    return driver.cuMemcpyBatchAsync(dsts, srcs, sizes, len(pairs), made, list(starts), len(starts), stream)


batched = pytest.mark.skipif(
    not hasattr(cuda, "cuMemcpyBatchAsync"), reason="cuMemcpyBatchAsync came with CUDA 12.8"
)


@batched
def test_batch_copies_every_pair_in_stream_order() -> None:
    driver, first, second = pair()
    src = array_of(driver, WORDS)
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuCtxSetCurrent(second))
    dst = ok(driver.cuMemAlloc(WORDS.nbytes))
    ok(driver.cuCtxSetCurrent(first))
    pairs = [(int(dst) + 64 * i, int(src) + 64 * (63 - i)) for i in range(64)]
    assert batch(driver, pairs, stream, starts=(0, 10))[0] == 0, driver.report()
    ok(driver.cuStreamSynchronize(stream))
    wanted = WORDS.reshape(64, 16)[::-1].reshape(-1)
    assert (values_at(driver, dst, len(WORDS)) == wanted).all()


@batched
def test_batch_refuses_what_cuda_leaves_undefined_or_forbids() -> None:
    driver, *_ = pair()
    src, dst, stream = (
        int(array_of(driver, WORDS)),
        int(array_of(driver, WORDS)),
        ok(driver.cuStreamCreate(1)),
    )
    two = [(dst, src), (dst + 64, src + 64)]
    refused(driver, batch(driver, two, 0), "INVALID_VALUE", "legacy default stream")
    refused(
        driver,
        batch(driver, [(dst, src), (dst + 60, src + 64)], stream),
        "INVALID_VALUE",
        "0 and 1",
        "overlap",
    )
    refused(driver, batch(driver, [(dst, src), (dst + 64, dst)], stream), "INVALID_VALUE", "overlap")
    refused(driver, batch(driver, two, stream, starts=(1,)), "INVALID_VALUE", "begin with 0", "[1]")
    refused(driver, batch(driver, two, stream, starts=(0, 2)), "INVALID_VALUE", "below count (2)")
    refused(driver, batch(driver, two, stream, starts=()), "INVALID_VALUE", "numAttrs must be 1..count")
    wrong = driver.cuMemcpyBatchAsync([dst], [src], [4], 1, [cuda.CUmemcpyAttributes()], [0], 1, stream)
    refused(driver, wrong, "INVALID_VALUE", "attrs[0].srcAccessOrder", "got 0")
    short = driver.cuMemcpyBatchAsync([dst], [src], [4], 2, [attributes()], [0], 1, stream)
    refused(driver, short, "INVALID_VALUE", "count is 2, dsts has 1")
    assert batch(driver, two, stream)[0] == 0
    assert batch(driver, [(dst, src), (dst + 64, src)], stream)[0] == 0  # one source, twice


@batched
def test_source_during_the_call_is_read_then_and_never_on_a_device() -> None:
    driver, *_ = pair()
    during = attributes(cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL)
    dst, stream = ok(driver.cuMemAlloc(WORDS.nbytes)), ok(driver.cuStreamCreate(1))
    values = WORDS.copy()
    arguments = ([WORDS.nbytes], 1, [during], [0], 1, stream)
    assert driver.cuMemcpyBatchAsync([dst], [values.ctypes.data], *arguments)[0] == 0
    values[:] = 0
    ok(driver.cuStreamSynchronize(stream))
    assert (values_at(driver, dst, len(WORDS)) == WORDS).all()
    other = ok(driver.cuMemAlloc(WORDS.nbytes))
    refused(
        driver, driver.cuMemcpyBatchAsync([other], [dst], *arguments), "NOT_SUPPORTED", "srcs[0]", "device"
    )


@batched
def test_copies_of_a_batch_overlap_where_they_take_different_ways() -> None:
    """Both ways at once take about as long as one; twice the same way takes twice as long."""
    seconds = []
    for both in (False, True):
        driver, *_ = pair()
        big = ok(driver.cuMemAlloc(1 << 25))
        host = ok(driver.cuMemHostAlloc(1 << 25, 0))
        ok(driver.cuMemsetD8(big, 1, 1 << 25))
        stream, half = ok(driver.cuStreamCreate(1)), 1 << 24
        begin, end = ok(driver.cuEventCreate(0)), ok(driver.cuEventCreate(0))
        ok(driver.cuEventRecord(begin, stream))
        into, out = (int(big), host), (host + half, int(big) + half)
        pairs = [into, out] if both else [into, (int(big) + half, host + half)]
        assert batch(driver, pairs, stream, nbytes=half)[0] == 0, driver.report()
        ok(driver.cuEventRecord(end, stream))
        ok(driver.cuEventSynchronize(end))
        seconds.append(ok(driver.cuEventElapsedTime(begin, end)))
        ok(driver.cuStreamDestroy(stream))
        assert driver.node.count_of(driver.process).streams == 1  # the default one
    assert seconds[0] > 1.9 * seconds[1]


@batched
def test_batch_waits_for_its_turn_and_the_stream_for_the_batch() -> None:
    driver, *_ = pair()
    src, dst = array_of(driver, WORDS), array_of(driver, WORDS)
    out, flag = ok(driver.cuMemAlloc(WORDS.nbytes)), array_of(driver, np.zeros(1, np.uint32))
    stream, other = ok(driver.cuStreamCreate(1)), ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWaitValue32(stream, flag, 1, 0))
    ok(driver.cuMemsetD32Async(src, 5, len(WORDS), stream))
    assert batch(driver, [(dst, src)], stream, nbytes=WORDS.nbytes)[0] == 0
    ok(driver.cuMemcpyDtoDAsync(out, dst, WORDS.nbytes, stream))
    ok(driver.cuStreamWriteValue32(other, flag, 1, 0))
    ok(driver.cuStreamSynchronize(stream), driver)
    assert (values_at(driver, out, len(WORDS)) == 5).all()


@batched
def test_batch_cannot_be_captured() -> None:
    driver, *_ = pair()
    src, dst = array_of(driver, WORDS), array_of(driver, WORDS)
    stream = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamBeginCapture(stream, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))
    refused(driver, batch(driver, [(dst, src)], stream), "STREAM_CAPTURE_UNSUPPORTED", "use cuMemcpyAsync")
    assert driver.cuStreamEndCapture(stream)[0] == cuda.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED


# --- order across devices


def test_stream_waits_for_an_event_of_another_device() -> None:
    executor = FakeExecutor(100_000)
    driver, _, second = pair(executor=executor)
    event, writer = ok(driver.cuEventCreate(2)), ok(driver.cuStreamCreate(1))
    ok(launch(driver, load(driver, ptx()), writer))
    ok(driver.cuEventRecord(event, writer))
    ok(driver.cuCtxSetCurrent(second))
    reader = ok(driver.cuStreamCreate(1))
    ok(driver.cuStreamWaitEvent(reader, event, 0))
    ok(launch(driver, load(driver, ptx()), reader))
    ok(driver.cuStreamSynchronize(reader))
    launched = [device.last_launch for device in driver.node.devices]
    assert launched[1].start_s >= launched[0].end_s


def test_default_streams_of_two_devices_are_not_ordered() -> None:
    driver, first, second = pair(executor=FakeExecutor(100_000))
    ok(launch(driver, load(driver, ptx())))
    ok(driver.cuCtxSetCurrent(second))
    ok(launch(driver, load(driver, ptx())))
    ok(driver.cuCtxSynchronize())
    ok(driver.cuCtxSetCurrent(first))
    ok(driver.cuCtxSynchronize())
    launched = [device.last_launch for device in driver.node.devices]
    assert launched[1].start_s < launched[0].end_s


@pytest.mark.parametrize("width", [32, 64])
def test_stream_waits_for_a_word_in_a_peers_memory(width: int) -> None:
    driver, first, second = pair()
    flag = array_of(driver, np.zeros(2, np.uint32))
    writer = ok(driver.cuStreamCreate(1))
    ok(driver.cuCtxSetCurrent(second))
    refused(
        driver, getattr(driver, f"cuStreamWriteValue{width}")(0, flag, 5, 0), "INVALID_VALUE",
        "device 1 uses", "memory of device 0", "peer access from device 1 to device 0 is not enabled",
    )  # fmt: skip
    ok(driver.cuCtxEnablePeerAccess(first, 0))
    waiter, out = ok(driver.cuStreamCreate(1)), array_of(driver, WORDS)
    ok(getattr(driver, f"cuStreamWaitValue{width}")(waiter, flag, 5, 0))
    ok(driver.cuMemsetD32Async(out, 9, 1, waiter))
    assert driver.cuStreamQuery(waiter)[0] == cuda.CUresult.CUDA_ERROR_NOT_READY
    ok(getattr(driver, f"cuStreamWriteValue{width}")(writer, flag, 6, 0))
    ok(driver.cuStreamSynchronize(waiter), driver)
    assert values_at(driver, out, 1)[0] == 9


def test_flush_of_remote_writes_is_refused_as_the_attribute_says() -> None:
    driver, *_ = pair()
    flag = array_of(driver, np.zeros(2, np.uint32))
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
    assert ok(driver.cuDeviceGetAttribute(attribute, 0)) == 0
    refused(
        driver, driver.cuStreamWaitValue32(0, flag, 1, 1 << 30), "NOT_SUPPORTED", "CAN_FLUSH_REMOTE_WRITES"
    )


def test_device_identities_are_distinct() -> None:
    driver = open_driver(*["h100"] * 8)
    uuids = {bytes(ok(driver.cuDeviceGetUuid(device)).bytes) for device in range(8)}
    numa = [
        ok(driver.cuDeviceGetAttribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device))
        for device in range(8)
    ]
    assert len(uuids) == 8 and numa == [0] * 4 + [1] * 4
