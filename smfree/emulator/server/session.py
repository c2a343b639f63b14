"""The server's side of one client process: its requests, answered by a driver of its own."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from cuda.bindings.driver import CUstreamCaptureStatus

from smfree.emulator.driver import Driver, NotEmulated
from smfree.emulator.driver.errors import CUresult, Refusal, unsupported
from smfree.emulator.driver.memory import address_of
from smfree.emulator.driver.modules import LoadedFunction
from smfree.emulator.driver.params import Packed
from smfree.emulator.errors import MemoryFault
from smfree.emulator.node import LaunchRecord, Node
from smfree.emulator.server.calls import (
    ANYWHERE,
    IMAGES,
    LAUNCHES,
    PINNED,
    PLAIN,
    TO_DEVICE,
    TO_HOST,
    is_node_address,
)
from smfree.emulator.server.channel import Channel
from smfree.emulator.server.shared import SharedHostMemory
from smfree.emulator.server.wire import Bulk, WireError

SUCCESS = CUresult.CUDA_SUCCESS
_PASSED_ON = (TypeError, ValueError, OverflowError, NotEmulated)
"""What a wrong argument raises in the emulated driver; the client raises it again."""

Reply = tuple[Any, list[int]]


class Session:
    """One client process. Its threads have a connection each, and each its own thread here.

    A handler takes (call, arguments, descriptors) and gives a reply: a value, and descriptors of its own,
    which are closed once sent.
    """

    def __init__(self, node: Node, host: SharedHostMemory, label: str) -> None:
        self.host = host
        self.driver = Driver(node, label)
        self.channels: set[Channel] = set()

    def end(self) -> None:
        """The client is gone: end what it left on the node and every thread that works for it."""
        self.driver.node.end(self.driver.process)
        for channel in list(self.channels):
            channel.close()

    def answer(self, request: Any, fds: Sequence[int]) -> Reply:
        """Carry out a request: what to send back, and descriptors to go with it.

        A result is ("result", what the call returned, the report of a failure); an exception is
        ("error", its type, its text). Raises WireError for what no client sends.
        """
        if not (isinstance(request, tuple) and len(request) == 4):
            raise WireError("a request is (call, caller, threads, arguments)")
        name, caller, threads, arguments = request
        if not (
            type(name) is str and type(caller) is str and type(threads) is int and type(arguments) is tuple
        ):
            raise WireError("a request is (call, caller, threads, arguments)")
        self.driver.process.threads.caller = caller
        self.driver.process.host_threads = threads
        handler = _HANDLERS.get(name)
        try:
            if handler is not None:
                result, out = handler(self, name, arguments, fds)
            elif name in PLAIN:
                result, out = getattr(self.driver, name)(*arguments), []
            else:
                raise NotEmulated(f"{name} is not served to other processes")
            quiet = type(result) is not tuple or result[0] in (SUCCESS, CUresult.CUDA_ERROR_NOT_READY)
            return ("result", result, "" if quiet else self.driver.report()), out
        except Refusal as refusal:
            report = f"{name}: {refusal.code.name}: {refusal.message}"
            self.driver.process.report = report
            return ("result", (refusal.code,), report), []
        except WireError:
            raise
        except _PASSED_ON as error:
            return ("error", type(error).__name__, str(error)), []
        except Exception:
            text = f"{name} failed in the process that serves the node:\n{traceback.format_exc()}"
            return ("error", "", text), []

    # ------------------------------------------------------------------------------------------- memory

    def to_device(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        destination, source, nbytes, *stream = arguments
        self._check_capture(source, stream)
        held = self._source(source, nbytes)
        return getattr(self.driver, name)(destination, held, nbytes, *stream), []

    def to_host(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        destination, source, nbytes, *stream = arguments
        self._check_capture(destination, stream)
        target, back = self._target(destination, nbytes)
        return _with_block(getattr(self.driver, name)(target, source, nbytes, *stream), back), []

    def anywhere(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        destination, source, nbytes, *stream = arguments
        self._check_capture(source, stream)
        self._check_capture(destination, stream)
        held = self._source(source, nbytes)
        target, back = self._target(destination, nbytes)
        result = getattr(self.driver, name)(address_of(target), address_of(held), nbytes, *stream)
        return _with_block(result, back), []

    def _check_capture(self, given: Any, stream: list[Any]) -> None:
        """A graph would keep the address of pageable memory; here there is none to keep."""
        if isinstance(given, int) or not self.driver.process.captures:
            return
        code, status = self.driver.cuStreamIsCapturing(*stream or [0])
        if code == SUCCESS and status == CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            raise unsupported(
                "a graph cannot copy from or to pageable memory of another process; use page-locked memory"
            )

    def _source(self, given: Any, nbytes: int) -> Any:
        """Where the driver reads: an address of the node, or the bytes that came with the request."""
        if isinstance(given, (bytes, memoryview)):
            if len(given) != nbytes:
                raise WireError(f"{len(given)} bytes came for a copy of {nbytes}")
            return given
        return self._located(given, nbytes)

    def _target(self, given: Any, nbytes: int) -> tuple[Any, np.ndarray | None]:
        """Where the driver writes: an address of the node, or a buffer to send back (``given`` is None)."""
        if given is not None or nbytes <= 0:
            return (0 if given is None else self._located(given, nbytes)), None
        buffer = np.empty(nbytes, np.uint8)
        return buffer, buffer

    def _located(self, address: Any, nbytes: int) -> int:
        """An address that the driver may follow: what the node does not know would be the server's memory."""
        value = _checked(address)
        try:
            known = value == 0 or self.driver.process.space.locate(value, nbytes, "address") is not None
        except MemoryFault:
            known = True  # the driver refuses it, and says why
        if not known:
            raise Refusal(
                CUresult.CUDA_ERROR_INVALID_VALUE,
                f"{value:#x} is neither a device address nor page-locked memory that is still there",
            )
        return value

    def pinned(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        result = getattr(self.driver, name)(*arguments)
        if result[0] != SUCCESS:
            return result, []
        fd, nbytes = self.host.descriptor(result[1])
        return (*result, nbytes), [os.dup(fd)]

    def batch(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        destinations, sources, sizes, *rest = arguments
        for addresses in (destinations, sources):
            for address, nbytes in zip(addresses, sizes, strict=True):
                self._located(int(address), int(nbytes))
        return getattr(self.driver, name)(destinations, sources, sizes, *rest), []

    def export(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        result = getattr(self.driver, name)(*arguments)
        return result[:1], [result[1]] if result[0] == SUCCESS else []

    def import_(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        if len(fds) != 1:
            raise WireError("a shareable handle comes as a descriptor")
        return getattr(self.driver, name)(fds[0], *arguments), []

    def host_call(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        """A call whose first argument is host memory that the node knows."""
        return getattr(self.driver, name)(_checked(arguments[0]), *arguments[1:]), []

    def register(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        """Map what the client maps, and register it at the node's address, which goes back."""
        offset, nbytes, flags = arguments
        if len(fds) != 1 or type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
            raise WireError("memory to register comes as a descriptor, an offset and a size")
        try:
            with self.driver.node.lock:
                address = self.host.adopt(fds[0], offset, nbytes)
        except OSError as error:
            raise Refusal(
                CUresult.CUDA_ERROR_OPERATING_SYSTEM, f"the node's process cannot map it: {error}"
            ) from None
        result = getattr(self.driver, name)(address, nbytes, flags)
        if result[0] != SUCCESS:
            self.host.give_up(address)
            return result, []
        return (*result, address), []

    # ------------------------------------------------------------------------------- modules and launches

    def image(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        image = arguments[0]
        if image is not None and not isinstance(image, (bytes, memoryview)):
            raise WireError("a module image comes as its bytes")
        return getattr(self.driver, name)(*arguments), []

    def launch(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        at = LAUNCHES[name]
        if len(arguments) <= at or type(arguments[at]) is not bytes:
            raise WireError("a launch comes with its packed parameters")
        rest = (0,) * len(arguments[at + 1 :])
        return getattr(self.driver, name)(*arguments[:at], Packed(arguments[at]), *rest), []

    def signature(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        """A kernel's name and parameters; None for a handle that names no function."""
        function = self.driver.process.objects.get(int(arguments[0]))
        if not isinstance(function, LoadedFunction):
            return None, []
        kernel = function.kernel
        return (
            kernel.name,
            [(each.name, each.type, each.align, each.size_bytes, each.offset) for each in kernel.params],
            kernel.params_bytes,
        ), []

    def replace_address(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        tensor_map, address = arguments
        return (*getattr(self.driver, name)(tensor_map, address), tensor_map), []

    # ------------------------------------------------------------------- what the emulator adds to a driver

    def describe_function(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        function, registers, local_bytes = arguments
        self.driver.describe_function(function, registers=registers, local_bytes=local_bytes)
        return None, []

    def context_failed(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        return self.driver.context_failed(*arguments), []

    def place_host_memory(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        address, nbytes, numa_node = arguments
        self.driver.place_host_memory(_checked(address), nbytes, numa_node)
        return None, []

    def host_seconds(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        with self.driver.node.lock:
            return float(self.driver.host_seconds()), []

    def report(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        return self.driver.report(), []

    def findings(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        with self.driver.node.lock:
            return [_finding(each) for each in self.driver.node.findings], []

    def last_launch(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        with self.driver.node.lock:
            record = self.driver.node.devices[arguments[0]].last_launch
            return None if record is None else _record(record), []

    def counters(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        with self.driver.node.lock:
            return _flat(self.driver.node.devices[arguments[0]].counters), []

    def flush_l2(self, name: str, arguments: tuple[Any, ...], fds: Sequence[int]) -> Reply:
        with self.driver.node.lock:
            self.driver.node.devices[arguments[0]].l2.flush()
        return None, []


def _checked(address: Any) -> int:
    """Host memory in the server's hands must be the node's: anything else is its own memory."""
    if isinstance(address, (bytes, memoryview)) or not (int(address) == 0 or is_node_address(int(address))):
        raise WireError(f"{address!r} is no address of the node")
    return int(address)


def _with_block(result: tuple[Any, ...], back: np.ndarray | None) -> tuple[Any, ...]:
    done = back is not None and result[0] == SUCCESS
    return (*result, Bulk(back.data) if done and back is not None else None)


def _flat(thing: Any) -> dict[str, Any]:
    return {each.name: getattr(thing, each.name) for each in fields(thing)}


def _record(record: LaunchRecord) -> dict[str, Any]:
    flat = _flat(record)
    return {
        **{key: float(value) if isinstance(value, np.floating) else value for key, value in flat.items()},
        "counters": _flat(record.counters),
        "findings": [_finding(each) for each in record.findings],
    }


def _finding(error: Any) -> dict[str, Any]:
    return {
        "type": type(error).__name__,
        "message": error.message,
        "rule": error.rule,
        "severity": str(error.severity),
        "where": error.where,
    }


_Handler = Callable[[Session, str, tuple[Any, ...], Sequence[int]], Reply]
_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(IMAGES, Session.image),
    **dict.fromkeys(LAUNCHES, Session.launch),
    **dict.fromkeys(TO_DEVICE, Session.to_device),
    **dict.fromkeys(TO_HOST, Session.to_host),
    **dict.fromkeys(ANYWHERE, Session.anywhere),
    **dict.fromkeys(PINNED, Session.pinned),
    **dict.fromkeys(
        ("cuMemFreeHost", "cuMemHostGetDevicePointer", "cuMemHostGetFlags", "cuMemHostUnregister"),
        Session.host_call,
    ),
    "cuMemHostRegister": Session.register,
    "cuMemcpyBatchAsync": Session.batch,
    "cuMemExportToShareableHandle": Session.export,
    "cuMemImportFromShareableHandle": Session.import_,
    "cuTensorMapReplaceAddress": Session.replace_address,
    "signature": Session.signature,
    "place_host_memory": Session.place_host_memory,
    "describe_function": Session.describe_function,
    "context_failed": Session.context_failed,
    "host_seconds": Session.host_seconds,
    "report": Session.report,
    "findings": Session.findings,
    "last_launch": Session.last_launch,
    "counters": Session.counters,
    "flush_l2": Session.flush_l2,
}
