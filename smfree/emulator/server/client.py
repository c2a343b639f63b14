"""The driver of a client: the calls of :class:`smfree.emulator.driver.Driver`, carried out by the server.

Names, parameters and return tuples are the same. What a call reads or writes in this process's memory is
handled here: bytes travel, arguments are packed, page-locked memory is mapped. When the server is gone, every
call returns CUDA_ERROR_MPS_RPC_FAILURE, and :meth:`RemoteDriver.report` says so.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver, NotEmulated
from smfree.emulator.driver.errors import CUresult, Refusal, invalid, unsupported
from smfree.emulator.driver.memory import address_of
from smfree.emulator.driver.params import pack
from smfree.emulator.ptx.ast import Param
from smfree.emulator.server.calls import PLAIN, REFUSED, is_node_address
from smfree.emulator.server.host import ClientMemory
from smfree.emulator.server.link import Link, NodeLost
from smfree.emulator.server.remote import RemoteNode
from smfree.emulator.server.wire import Bulk

LOST = CUresult.CUDA_ERROR_MPS_RPC_FAILURE
_SUCCESS = CUresult.CUDA_SUCCESS
_HOST_POINTER = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER
_SAME_ADDRESS = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM

Returned = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Signature:
    """A kernel's parameters, as the server told them."""

    name: str
    params: tuple[Param, ...]
    params_bytes: int


def attach(address: str, label: str = "") -> RemoteDriver:
    """This process's driver on the node served at ``address`` (what ``SMFREE_NODE`` holds).

    One per process: a second call gives the same one while it is in use. Raises NodeLost.
    """
    link_alive = _ATTACHED.get(address)
    if link_alive is None or link_alive.lost:
        link_alive = _ATTACHED[address] = RemoteDriver(Link(address, label))
    return link_alive


_ATTACHED: weakref.WeakValueDictionary[str, RemoteDriver] = weakref.WeakValueDictionary()


def special(method: Callable[..., Any]) -> Callable[..., Returned]:
    """A call with a way of its own: it returns what the server returned, or raises Refusal."""
    real = getattr(Driver, method.__name__)

    @functools.wraps(real)
    def call(self: RemoteDriver, *args: Any, **kwargs: Any) -> Returned:
        try:
            result: Returned = method(self, *args, **kwargs)
        except Refusal as refusal:
            return self._refuse(method.__name__, refusal)
        return result

    return call


class RemoteDriver:
    """The stand-in driver of a client process. Ends with :meth:`end`, or when nobody uses it."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.node = RemoteNode(link)
        self._memory = ClientMemory()
        self._signatures: dict[int, _Signature] = {}
        self._report: str | None = None
        """The latest failure's report when it arose here; None: ask the server."""

    @property
    def lost(self) -> bool:
        """Whether the server is out of reach, now and for ever."""
        return bool(self._link.lost)

    def end(self) -> None:
        """Leave the node; everything this process had there goes."""
        self._link.close()

    # ------------------------------------------------------------------- what the emulator adds to a driver

    def report(self) -> str:
        """Full text of the latest error: rule, value, remedy, and which launch it came from."""
        if self._report is not None:
            return self._report
        try:
            return str(self._link.request("report", ())[0])
        except NodeLost as error:
            return str(error)

    def context_failed(self, ctx: Any) -> bool:
        """Whether a kernel's fault has killed the context, so that every call in it is refused."""
        try:
            return bool(self._link.request("context_failed", (int(ctx),))[0])
        except NodeLost:
            return True

    def describe_function(self, function: Any, *, registers: int, local_bytes: int = 0) -> None:
        """Tell what ptxas found, as for :meth:`Driver.describe_function`."""
        self._link.request("describe_function", (function, registers, local_bytes))

    def __getattr__(self, name: str) -> Any:
        """Types and constants of the real module; functions that are not served raise NotEmulated."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(cuda, name)
        if name.startswith("cu") and callable(found) and not isinstance(found, type):
            why = REFUSED.get(name, "smfree.emulator.driver and smfree.emulator.server list what is")
            raise NotEmulated(f"{name} is not emulated on a node that another process serves; {why}")
        return found

    # ------------------------------------------------------------------------------------------ one call

    def _call(self, name: str, *arguments: Any) -> Returned:
        return self._exchange(name, arguments)[0]

    def _exchange(
        self, name: str, arguments: tuple[Any, ...], fds: Sequence[int] = (), into: memoryview | None = None
    ) -> tuple[Returned, list[int]]:
        """Have the server do it: what it returned, None for every value after a failure, and descriptors."""
        try:
            result, _, received = self._link.request(name, arguments, fds, into)
        except NodeLost as error:
            return self._refuse(name, Refusal(LOST, str(error))), []
        if result[0] == _SUCCESS:
            return result, received
        if result[0] != CUresult.CUDA_ERROR_NOT_READY:
            self._report = None
        return self._failed(name, result[0]), received

    def _refuse(self, name: str, refusal: Refusal) -> Returned:
        self._report = f"{name}: {refusal.code.name}: {refusal.message}"
        return self._failed(name, refusal.code)

    @staticmethod
    def _failed(name: str, code: Any) -> Returned:
        return (code, *(None,) * getattr(Driver, name).emulated_outputs)

    # ------------------------------------------------------------------------------------------- copies

    @special
    def cuMemcpyHtoD(self, dstDevice: Any, srcHost: Any, ByteCount: int) -> Returned:
        return self._call("cuMemcpyHtoD", dstDevice, self._source(srcHost, ByteCount), ByteCount)

    @special
    def cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: Any, ByteCount: int, hStream: Any) -> Returned:
        source = self._source(srcHost, ByteCount)
        return self._call("cuMemcpyHtoDAsync", dstDevice, source, ByteCount, hStream)

    @special
    def cuMemcpyDtoH(self, dstHost: Any, srcDevice: Any, ByteCount: int) -> Returned:
        return self._fetch("cuMemcpyDtoH", dstHost, srcDevice, ByteCount)

    @special
    def cuMemcpyDtoHAsync(self, dstHost: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> Returned:
        return self._fetch("cuMemcpyDtoHAsync", dstHost, srcDevice, ByteCount, hStream)

    @special
    def cuMemcpy(self, dst: Any, src: Any, ByteCount: int) -> Returned:
        return self._fetch("cuMemcpy", int(dst), self._source(int(src), ByteCount), ByteCount)

    @special
    def cuMemcpyAsync(self, dst: Any, src: Any, ByteCount: int, hStream: Any) -> Returned:
        return self._fetch("cuMemcpyAsync", int(dst), self._source(int(src), ByteCount), ByteCount, hStream)

    def _source(self, pointer: Any, nbytes: int) -> Any:
        """What to send for memory that a copy reads: an address of the node, or the bytes."""
        address = self._memory.on_node(address_of(pointer))
        if is_node_address(address) or address == 0 or nbytes <= 0:
            return address if is_node_address(address) else 0
        return Bulk(_bytes_at(address, nbytes))

    def _fetch(self, name: str, dst: Any, src: Any, nbytes: int, *stream: Any) -> Returned:
        """A copy whose destination may be this process's own memory: then the bytes come with the reply."""
        address = self._memory.on_node(address_of(dst))
        if is_node_address(address) or address == 0 or nbytes <= 0:
            target = address if is_node_address(address) else 0
            return self._exchange(name, (target, src, nbytes, *stream))[0][:1]
        into = _bytes_at(address, nbytes)
        result, _ = self._exchange(name, (None, src, nbytes, *stream), into=into)
        return result[:1]

    # --------------------------------------------------------------------------------------- host memory

    @special
    def cuMemAllocHost(self, bytesize: int) -> Returned:
        return self._pinned("cuMemAllocHost", bytesize)

    @special
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> Returned:
        return self._pinned("cuMemHostAlloc", bytesize, Flags)

    def _pinned(self, name: str, *arguments: Any) -> Returned:
        for _ in range(8):
            result, fds = self._exchange(name, arguments)
            if result[0] != _SUCCESS:
                return result
            code, address, nbytes = result
            if self._memory.map(address, nbytes, fds):
                return code, address
            self._call("cuMemFreeHost", address)  # something of this process lies there; try the next place
        raise Refusal(
            CUresult.CUDA_ERROR_OUT_OF_MEMORY, "this process has no room at the addresses the node offers"
        )

    @special
    def cuMemFreeHost(self, p: Any) -> Returned:
        address = self._known(p)
        result = self._call("cuMemFreeHost", address)
        if result[0] == _SUCCESS:
            self._memory.unmap(address)
        return result

    @special
    def cuMemHostRegister(self, p: Any, bytesize: int, Flags: int) -> Returned:
        address = address_of(p)
        if not address or bytesize <= 0:
            raise invalid(f"p must not be NULL and bytesize be positive, got {address:#x} and {bytesize}")
        other = self._memory.overlapping(address, bytesize)
        if other is not None:
            raise Refusal(
                CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                f"[{address:#x}, +{bytesize}) overlaps the known [{other[0]:#x}, +{other[1]})",
            )
        shared = self._memory.find_shared(address, bytesize)
        if isinstance(shared, str):
            raise unsupported(
                f"[{address:#x}, +{bytesize}) cannot be shown to the process that serves the node: {shared}; "
                "use page-locked memory (cuMemHostAlloc), or map a memfd or shared memory and keep its "
                "descriptor open"
            )
        result, _ = self._exchange(
            "cuMemHostRegister", (shared.offset, int(bytesize), int(Flags)), [shared.fd]
        )
        if result[0] == _SUCCESS:
            self._memory.registered[address] = int(bytesize), result[1]
        return result[:1]

    @special
    def cuMemHostUnregister(self, p: Any) -> Returned:
        address = address_of(p)
        if address not in self._memory.registered:
            raise Refusal(
                CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, f"{address:#x} starts no registered range"
            )
        result = self._call("cuMemHostUnregister", self._memory.on_node(address))
        if result[0] == _SUCCESS:
            del self._memory.registered[address]
        return result

    @special
    def cuMemHostGetDevicePointer(self, p: Any, Flags: int) -> Returned:
        return self._call("cuMemHostGetDevicePointer", self._known(p), Flags)

    @special
    def cuMemHostGetFlags(self, p: Any) -> Returned:
        return self._call("cuMemHostGetFlags", self._known(p))

    def _known(self, pointer: Any) -> int:
        """The node's address of page-locked memory."""
        address = self._memory.on_node(address_of(pointer))
        if not is_node_address(address):
            raise invalid(f"{address:#x} is in no page-locked range; use cuMemHostAlloc or cuMemHostRegister")
        return address

    # ------------------------------------------------------------------------------------------ pointers

    @special
    def cuPointerGetAttribute(self, attribute: Any, ptr: Any) -> Returned:
        result = self._call("cuPointerGetAttribute", attribute, self._memory.on_node(int(ptr)))
        return self._seen_here(result, attribute, int(ptr))

    @special
    def cuPointerGetAttributes(self, numAttributes: int, attributes: Any, ptr: Any) -> Returned:
        asked = list(attributes or ())
        result = self._call("cuPointerGetAttributes", numAttributes, asked, self._memory.on_node(int(ptr)))
        if result[0] != _SUCCESS:
            return result
        values = [
            self._seen_here((_SUCCESS, value), item, int(ptr))[1]
            for item, value in zip(asked, result[1], strict=False)
        ]
        return _SUCCESS, values

    def _seen_here(self, result: Returned, attribute: Any, ptr: int) -> Returned:
        """The host pointer of registered memory is this process's, not the node's."""
        if result[0] == _SUCCESS and attribute == _HOST_POINTER and self._memory.on_node(ptr) != ptr:
            return _SUCCESS, ptr
        return result

    @special
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> Returned:
        result = self._call("cuDeviceGetAttribute", attrib, dev)
        if attrib == _SAME_ADDRESS and result[0] == _SUCCESS:
            return _SUCCESS, 0  # the node maps registered memory elsewhere
        return result

    @special
    def cuTensorMapReplaceAddress(self, tensorMap: Any, globalAddress: Any) -> Returned:
        result = self._call("cuTensorMapReplaceAddress", tensorMap, globalAddress)
        if result[0] == _SUCCESS:
            ctypes.memmove(int(tensorMap.getPtr()), int(result[1].getPtr()), 128)
        return result[:1]

    # ------------------------------------------------------------------------------- modules and launches

    @special
    def cuModuleLoadData(self, image: Any) -> Returned:
        return self._call("cuModuleLoadData", _image(image))

    @special
    def cuModuleLoadDataEx(self, image: Any, numOptions: int, options: Any, optionValues: Any) -> Returned:
        return self._call("cuModuleLoadDataEx", _image(image), numOptions, options, optionValues)

    @special
    def cuLibraryLoadData(self, code: Any, *options: Any) -> Returned:
        return self._call("cuLibraryLoadData", _image(code), *options)

    @special
    def cuLaunchKernel(self, f: Any, *arguments: Any) -> Returned:
        *shape, kernel_params, extra = arguments
        return self._call("cuLaunchKernel", f, *shape, self._pack(f, kernel_params, extra), 0)

    @special
    def cuLaunchKernelEx(self, config: Any, f: Any, kernelParams: Any, extra: Any) -> Returned:
        return self._call("cuLaunchKernelEx", config, f, self._pack(f, kernelParams, extra), 0)

    @special
    def cuLaunchCooperativeKernel(self, f: Any, *arguments: Any) -> Returned:
        *shape, kernel_params = arguments
        return self._call("cuLaunchCooperativeKernel", f, *shape, self._pack(f, kernel_params, 0))

    def _pack(self, function: Any, kernel_params: Any, extra: Any) -> bytes:
        """The argument block of a launch; of a function that is none, nothing: the server refuses it."""
        handle = 0 if function is None else int(function)
        signature = self._signatures.get(handle)
        if signature is None:
            try:
                told = self._link.request("signature", (handle,))[0]
            except NodeLost:
                told = None
            if told is None:
                return b""
            name, params, params_bytes = told
            signature = _Signature(name, tuple(Param(*each) for each in params), params_bytes)
            self._signatures[handle] = signature
        return pack(signature, kernel_params, extra)


def _bytes_at(address: int, nbytes: int) -> memoryview:
    """This process's memory."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def _image(image: Any) -> Any:
    """A module image as what travels: None, or its bytes."""
    if image is None or (isinstance(image, int) and image == 0):
        return None
    return Bulk(ctypes.string_at(image) if isinstance(image, int) else bytes(memoryview(image)))


def _plain(name: str) -> Callable[..., Returned]:
    """A call that the server carries out as it stands."""
    real = getattr(Driver, name)
    signature = inspect.signature(real)

    @functools.wraps(real)
    def call(self: RemoteDriver, *args: Any, **kwargs: Any) -> Returned:
        if kwargs:
            args = signature.bind(self, *args, **kwargs).args[1:]
        return self._exchange(name, args)[0]

    return call


for _name in PLAIN:
    if hasattr(Driver, _name):
        setattr(RemoteDriver, _name, _plain(_name))
