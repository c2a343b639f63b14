"""Questions of driver_facts.py that one process asks alone: batches, descriptors, multicast, words, captures.

Each takes a driver, 2 MiB of its device memory, and what takes the answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cuda

BYTES = 1 << 21
DISABLE_TIMING = 2

Say = Callable[[str, Any], None]
"""Takes a question and its answer: the tuple that a driver call returned, or a value."""


def must(answer: tuple[Any, ...]) -> Any:
    if int(answer[0]):
        raise RuntimeError(answer[0].name)
    return answer[1] if len(answer) > 1 else None


def opening(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """The answer of a call that makes something, without its value."""
    return answer[:1]


def ask_batches(driver: Any, memory: int, say: Say) -> None:
    """What cuMemcpyBatchAsync refuses."""
    stream, order = must(driver.cuStreamCreate(1)), cuda.CUmemcpySrcAccessOrder

    def ask(question: str, sizes: list[int], source_order: Any, attrs: int, hStream: Any) -> None:
        attribute = cuda.CUmemcpyAttributes()
        attribute.srcAccessOrder = source_order
        dsts = [cuda.CUdeviceptr(memory + 8192 + 64 * i) for i in range(len(sizes))]
        srcs = [cuda.CUdeviceptr(memory + 64 * i) for i in range(len(sizes))]
        made, starts = [attribute] * attrs, list(range(attrs))
        answer = driver.cuMemcpyBatchAsync(dsts, srcs, sizes, len(sizes), made, starts, attrs, hStream)
        say(f"batch: {question}", answer[:1])

    in_order = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    ask("a plain one", [64, 64], in_order, 1, stream)
    ask("a copy of no bytes", [64, 0], in_order, 1, stream)
    ask("no attributes", [64, 64], in_order, 0, stream)
    ask("no access order", [64], order.CU_MEMCPY_SRC_ACCESS_ORDER_INVALID, 1, stream)
    ask(
        "device memory read during the call",
        [64],
        order.CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL,
        1,
        stream,
    )
    ask("the legacy default stream", [64], in_order, 1, cuda.CUstream(0))
    must(driver.cuStreamSynchronize(stream))


def ask_descriptors(driver: Any, memory: int, say: Say) -> None:
    """Memory by file descriptor, mapped a second time where it was made; parts of a mapping."""
    del memory
    kind = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    for option in ("MINIMUM", "RECOMMENDED"):
        flag = getattr(cuda.CUmemAllocationGranularity_flags, f"CU_MEM_ALLOC_GRANULARITY_{option}")
        say(f"memory: granularity {option}", driver.cuMemGetAllocationGranularity(prop, flag))
    private = must(driver.cuMemCreate(BYTES, prop, 0))
    say("memory: export what is private", opening(driver.cuMemExportToShareableHandle(private, kind, 0)))
    prop.requestedHandleTypes = kind
    say("memory: half a granule", opening(driver.cuMemCreate(BYTES // 2, prop, 0)))
    handle = must(driver.cuMemCreate(2 * BYTES, prop, 0))
    descriptor = int(must(driver.cuMemExportToShareableHandle(handle, kind, 0)))
    again = driver.cuMemImportFromShareableHandle(descriptor, kind)
    say("memory: import where it was exported", opening(again))
    os.close(descriptor)
    address = int(must(driver.cuMemAddressReserve(2 * BYTES, 0, 0, 0)))
    must(driver.cuMemMap(address, 2 * BYTES, 0, must(again), 0))
    say("memory: map over a mapping", driver.cuMemMap(address, BYTES, 0, handle, 0))
    say("memory: unmap a half", driver.cuMemUnmap(address, BYTES))
    say("memory: free mapped addresses", driver.cuMemAddressFree(address, 2 * BYTES))


def ask_multicast(driver: Any, memory: int, say: Say) -> None:
    """A team of one GPU."""
    del memory
    prop = cuda.CUmulticastObjectProp()
    prop.numDevices, prop.size = 1, BYTES
    for option in ("MINIMUM", "RECOMMENDED"):
        flag = getattr(cuda.CUmulticastGranularity_flags, f"CU_MULTICAST_GRANULARITY_{option}")
        say(f"multicast: granularity {option}", driver.cuMulticastGetGranularity(prop, flag))
    made = driver.cuMulticastCreate(prop)
    say("multicast: object for one GPU", opening(made))
    if not int(made[0]):
        say("multicast: the GPU joins", driver.cuMulticastAddDevice(made[1], 0))
        say("multicast: the GPU joins again", driver.cuMulticastAddDevice(made[1], 0))
        must(driver.cuMemRelease(made[1]))


def ask_words(driver: Any, memory: int, say: Say) -> None:
    """Stream memory operations that end at once."""
    stream = must(driver.cuStreamCreate(1))
    flush = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH)
    must(driver.cuMemsetD32(memory, 0, 16))
    must(driver.cuCtxSynchronize())
    say("word: write", driver.cuStreamWriteValue32(stream, memory, 5, 0))
    say("word: wait for what is there", driver.cuStreamWaitValue32(stream, memory, 5, 0))
    say("word: wait with a flush", driver.cuStreamWaitValue32(stream, memory, 5, flush))
    say("word: 64 bits", driver.cuStreamWriteValue64(stream, memory + 8, 5, 0))
    say("word: on the legacy default stream", driver.cuStreamWriteValue32(cuda.CUstream(0), memory, 6, 0))
    must(driver.cuCtxSynchronize())


def ask_captures(driver: Any, memory: int, say: Say) -> None:
    """What a capture of this thread forbids, each in a capture of its own."""
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    stream = must(driver.cuStreamCreate(1))
    event = must(driver.cuEventCreate(DISABLE_TIMING))
    for question, ask in (
        ("nothing", lambda: (cuda.CUresult.CUDA_SUCCESS,)),
        ("synchronise the stream", lambda: driver.cuStreamSynchronize(stream)),
        ("query the stream", lambda: driver.cuStreamQuery(stream)),
        ("allocate", lambda: opening(driver.cuMemAlloc(BYTES))),
        ("wait for an event from outside", lambda: driver.cuStreamWaitEvent(stream, event, 0)),
        ("write a word", lambda: driver.cuStreamWriteValue32(stream, memory, 7, 0)),
    ):
        must(driver.cuEventRecord(event, cuda.CUstream(0)))
        must(driver.cuStreamBeginCapture(stream, mode))
        say(f"capture: {question}", ask())
        say(f"capture: end after: {question}", opening(driver.cuStreamEndCapture(stream)))


ALONE = (ask_descriptors, ask_multicast, ask_words, ask_captures)
