"""What a driver answers where its documentation says little: the emulator's answer beside a real one's.

    python scripts/driver_facts.py                  # on a machine with a GPU: one GPU, two processes
    python scripts/driver_facts.py --emulated       # the emulator's answers alone
    python scripts/driver_facts.py --json facts.json  # writes them down, too

No kernel runs, and nothing is done that CUDA leaves undefined. A line that differs is something that the
emulator and docs/emulator.md have wrong. The exit code is the number of such lines, 100 at most.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.driver_questions import ALONE, BYTES, DISABLE_TIMING, Say, ask_batches, must, opening

PTX = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .global .b32 table[4];\n\0"
MARK = 0x5A5A1234
LAZY, INTERPROCESS = 1, 4
LIMIT_S = 120.0
ATTRIBUTES = (
    "IPC_EVENT_SUPPORTED", "CAN_FLUSH_REMOTE_WRITES", "NUMA_CONFIG", "HOST_NUMA_ID", "UNIFIED_ADDRESSING",
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "HANDLE_TYPE_FABRIC_SUPPORTED", "MULTICAST_SUPPORTED", "ASYNC_ENGINE_COUNT", "CONCURRENT_KERNELS",
    "COMPUTE_PREEMPTION_SUPPORTED", "COOPERATIVE_LAUNCH", "CAN_USE_64_BIT_STREAM_MEM_OPS",
    "CAN_USE_STREAM_WAIT_VALUE_NOR", "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", "PAGEABLE_MEMORY_ACCESS",
)  # fmt: skip
POINTER, DEVICE = cuda.CUpointer_attribute, cuda.CUdevice_attribute


def plain(answer: Any) -> str:
    """An answer as text: the error's name, or the values."""
    if not isinstance(answer, tuple):
        return str(answer)
    code, *values = answer
    if int(code):
        return str(code.name.removeprefix("CUDA_ERROR_"))
    return " ".join(str(int(value)) for value in values if hasattr(value, "__int__")) or "success"


def data_of(handle: Any) -> bytes:
    return ctypes.string_at(handle.getPtr(), 64)


def handle_of(data: bytes, kind: Any = cuda.CUipcMemHandle) -> Any:
    made = kind()
    ctypes.memmove(made.getPtr(), data, 64)
    return made


def begin(driver: Any) -> Any:
    must(driver.cuInit(0))
    context = must(driver.cuDevicePrimaryCtxRetain(0))
    must(driver.cuCtxSetCurrent(context))
    return context


def virtual_memory(driver: Any) -> int:
    """Mapped memory of cuMemCreate."""
    prop = cuda.CUmemAllocationProp()
    prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    address = must(driver.cuMemAddressReserve(BYTES, 0, 0, 0))
    must(driver.cuMemMap(address, BYTES, 0, must(driver.cuMemCreate(BYTES, prop, 0)), 0))
    return int(address)


def exporter(driver: Any, send: Callable[[Any], None], receive: Callable[[], Any], say: Say) -> None:
    """The first process: everything that one process can ask alone, then its half of what takes two."""
    context = begin(driver)
    for name in ATTRIBUTES:
        say(
            f"attribute {name}",
            driver.cuDeviceGetAttribute(getattr(DEVICE, f"CU_DEVICE_ATTRIBUTE_{name}"), 0),
        )
    say("can a device access itself", driver.cuDeviceCanAccessPeer(0, 0))
    say("enable peer access to the current context", driver.cuCtxEnablePeerAccess(context, 0))
    rank = cuda.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK
    say("link of a device to itself", driver.cuDeviceGetP2PAttribute(rank, 0, 0))

    memory = int(must(driver.cuMemAlloc(BYTES)))
    ordered = int(must(driver.cuMemAllocAsync(BYTES, 0)))
    must(driver.cuCtxSynchronize())
    mapped, host = virtual_memory(driver), int(must(driver.cuMemHostAlloc(BYTES, 0)))
    variable = int(must(driver.cuModuleGetGlobal(must(driver.cuModuleLoadData(PTX)), b"table")))
    for name, pointer in (
        ("cuMemAlloc", memory), ("cuMemAllocAsync", ordered), ("cuMemCreate", mapped), ("host", host),
        ("variable", variable),
    ):  # fmt: skip
        exported = driver.cuIpcGetMemHandle(pointer)
        say(f"{name} memory: export", opening(exported))
        for attribute in ("IS_LEGACY_CUDA_IPC_CAPABLE", "DEVICE_ORDINAL"):
            found = driver.cuPointerGetAttribute(
                getattr(POINTER, f"CU_POINTER_ATTRIBUTE_{attribute}"), pointer
            )
            say(f"{name} memory: {attribute}", found)
        found = driver.cuPointerGetAttribute(POINTER.CU_POINTER_ATTRIBUTE_CONTEXT, pointer)
        names = {0: "none", int(context): "the primary one"}
        say(f"{name} memory: CONTEXT", found if int(found[0]) else names.get(int(found[1]), "another"))
    say("free a variable", driver.cuMemFree(variable))

    whole = data_of(must(driver.cuIpcGetMemHandle(memory)))
    say(
        "handle of a pointer inside: the same",
        data_of(must(driver.cuIpcGetMemHandle(memory + 4096))) == whole,
    )
    say("open a handle where it was exported", driver.cuIpcOpenMemHandle(handle_of(whole), LAZY))
    say("event: INTERPROCESS with timing", driver.cuEventCreate(INTERPROCESS))
    plain_event = must(driver.cuEventCreate(DISABLE_TIMING))
    got = driver.cuIpcGetEventHandle(plain_event)
    say("event: export without INTERPROCESS", opening(got))
    event = must(driver.cuEventCreate(INTERPROCESS | DISABLE_TIMING))
    event_data = data_of(must(driver.cuIpcGetEventHandle(event)))
    opened = driver.cuIpcOpenEventHandle(handle_of(event_data, cuda.CUipcEventHandle))
    say("event: open where it was exported", opening(opened))

    if hasattr(driver, "cuMemcpyBatchAsync"):
        ask_batches(driver, memory, say)

    for ask in ALONE:
        try:
            ask(driver, memory, say)
        except RuntimeError as error:  # a call that both should do: the questions after it are left out
            say(f"{ask.__name__}: all asked", f"stopped by {error}")

    small = [int(must(driver.cuMemAlloc(4096))) for _ in range(2)]
    must(driver.cuMemsetD32(small[1], MARK, 1024))
    must(driver.cuCtxSynchronize())
    second = data_of(must(driver.cuIpcGetMemHandle(small[1])))
    inside = small[1] - int(must(driver.cuMemGetAddressRange(small[1])))
    say("small allocation: begins its address range", inside == 0)

    freed = must(driver.cuMemAlloc(BYTES))
    stale = data_of(must(driver.cuIpcGetMemHandle(freed)))
    must(driver.cuMemFree(freed))
    again = data_of(must(driver.cuIpcGetMemHandle(must(driver.cuMemAlloc(BYTES)))))
    say("handle of memory allocated anew: the same", stale == again)
    send((whole, stale, event_data, second))
    receive()  # the other process is done


def importer(driver: Any, send: Callable[[Any], None], receive: Callable[[], Any], say: Say) -> None:
    """The second process."""
    context = begin(driver)
    whole, stale, event_data, second = receive()
    say("import: random bytes", driver.cuIpcOpenMemHandle(handle_of(bytes(range(64))), LAZY))
    found = driver.cuIpcOpenMemHandle(handle_of(whole), 0)
    say("import: Flags 0", opening(found))
    if not int(found[0]):
        must(driver.cuIpcCloseMemHandle(found[1]))
    pointer = int(must(driver.cuIpcOpenMemHandle(handle_of(whole), LAZY)))
    say("import: again, the same", int(must(driver.cuIpcOpenMemHandle(handle_of(whole), LAZY))) == pointer)
    start, nbytes = driver.cuMemGetAddressRange(pointer + 64)[1:]
    say("import: cuMemGetAddressRange", f"{int(start) - pointer:+} {nbytes}")
    for attribute in ("DEVICE_ORDINAL", "MEMORY_TYPE", "RANGE_SIZE", "MAPPED", "IS_LEGACY_CUDA_IPC_CAPABLE"):
        value = driver.cuPointerGetAttribute(getattr(POINTER, f"CU_POINTER_ATTRIBUTE_{attribute}"), pointer)
        say(f"import: {attribute}", value)
    owner = must(driver.cuPointerGetAttribute(POINTER.CU_POINTER_ATTRIBUTE_CONTEXT, pointer))
    say("import: its context is the current one", int(owner) == int(context))
    again = driver.cuIpcGetMemHandle(pointer)
    say("import: exported again", opening(again))
    say("import: freed", driver.cuMemFree(pointer))
    say("import: closed at a pointer inside", driver.cuIpcCloseMemHandle(pointer + 4096))
    say("import: closed", driver.cuIpcCloseMemHandle(pointer))
    say("import: closed a second time", driver.cuIpcCloseMemHandle(pointer))
    say("import: closed once too often", driver.cuIpcCloseMemHandle(pointer))
    event = must(driver.cuIpcOpenEventHandle(handle_of(event_data, cuda.CUipcEventHandle)))
    got = driver.cuIpcGetEventHandle(event)
    say("import: event exported again", opening(got))
    say("import: event that nobody recorded", driver.cuEventQuery(event))
    as_event = driver.cuIpcOpenEventHandle(handle_of(whole, cuda.CUipcEventHandle))
    say("import: memory's handle as an event's", opening(as_event))
    say("import: handle of memory that was freed", opening(driver.cuIpcOpenMemHandle(handle_of(stale), LAZY)))
    there = int(must(driver.cuIpcOpenMemHandle(handle_of(second), LAZY)))
    word = ctypes.c_uint32()
    must(driver.cuMemcpyDtoH(ctypes.addressof(word), there, 4))
    say("import of a small allocation: its own bytes are first", word.value == MARK)
    must(driver.cuIpcCloseMemHandle(there))
    send(None)


Halves = (exporter, importer)


def emulated_answers() -> dict[str, str]:
    """Two drivers on one emulated node, each in a thread."""
    from smfree.emulator.driver import Driver
    from smfree.emulator.node import Node

    node = Node(["h200"])
    boxes: tuple[queue.Queue[Any], queue.Queue[Any]] = queue.Queue(), queue.Queue()
    found: tuple[dict[str, str], dict[str, str]] = {}, {}
    errors: list[BaseException] = []

    def run(which: int) -> None:
        def receive() -> Any:
            return boxes[which].get(timeout=LIMIT_S)

        def say(question: str, answer: Any) -> None:
            found[which][question] = plain(answer)

        try:
            Halves[which](Driver(node), boxes[1 - which].put, receive, say)
        except BaseException as error:
            errors.append(error)
            boxes[1 - which].put(None)

    threads = [threading.Thread(target=run, args=(which,), daemon=True) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found[0] | found[1]


def _half(which: int, link: Any, answers: Any) -> None:
    """One process on the real driver."""

    def receive() -> Any:
        if not link.poll(LIMIT_S):
            raise TimeoutError("the other process said nothing")
        return link.recv()

    Halves[which](cuda, link.send, receive, lambda question, answer: answers.send((question, plain(answer))))
    answers.close()


def real_answers() -> dict[str, str]:
    """Two processes on the GPU."""
    spawn = multiprocessing.get_context("spawn")
    links = spawn.Pipe()
    found: dict[str, str] = {}
    readers, children = [], []
    for which in (0, 1):
        reader, writer = spawn.Pipe(duplex=False)
        child = spawn.Process(target=_half, args=(which, links[which], writer), daemon=True)
        child.start()
        writer.close()
        readers.append(reader)
        children.append(child)
    for link in links:
        link.close()
    for reader in readers:
        while True:
            try:
                found.update([reader.recv()])
            except EOFError:
                break
    for child in children:
        child.join(LIMIT_S)
    if any(child.exitcode != 0 for child in children):
        found["both processes ended well"] = "no"
    return found


def has_gpu() -> bool:
    try:
        return not int(cuda.cuInit(0)[0]) and must(cuda.cuDeviceGetCount()) > 0
    except RuntimeError:  # no driver library
        return False


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the answers: question, emulated, real")
    parser.add_argument("--emulated", action="store_true", help="no GPU: print the emulator's answers")
    options = parser.parse_args(arguments)
    if not options.emulated and not has_gpu():
        print("no CUDA driver or no GPU here; --emulated prints the emulator's answers", file=sys.stderr)
        return 1
    emulated = emulated_answers()
    real = {} if options.emulated else real_answers()
    wide = max(map(len, emulated | real))
    rows = [
        {"question": question, "emulated": emulated.get(question, "-"), "real": real.get(question, "-")}
        for question in emulated | real
    ]
    differ = 0
    for row in rows:
        mine, its = row["emulated"], row["real"] if real else ""
        differs = bool(real) and mine != its
        differ += differs
        print(
            f"{row['question']:{wide}}  {mine:22} {its:22} {'differs' if differs else ''}".rstrip(),
            flush=True,
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if real:
        print(f"{differ} of {len(rows)} answers differ")
    return min(differ, 100)


if __name__ == "__main__":
    sys.exit(main())
