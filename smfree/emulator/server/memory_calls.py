"""Calls of a client that name its own memory: copies, page-locked and registered memory, pointers."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver import Driver
from smfree.emulator.driver.errors import CUresult, Refusal, invalid, unsupported
from smfree.emulator.driver.memory import address_of
from smfree.emulator.server.calls import is_node_address
from smfree.emulator.server.client_calls import SUCCESS, ClientCalls, Returned, special
from smfree.emulator.server.shared import find_shared
from smfree.emulator.server.wire import Bulk

_HOST_POINTER = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_HOST_POINTER
_SAME_ADDRESS = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class ClientMemoryCalls(ClientCalls):
    """Memory of this process travels as bytes, page-locked and registered memory as the node's address."""

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
            return self._ask(name, (target, src, nbytes, *stream))[0][:1]
        into = _bytes_at(address, nbytes)
        result, _ = self._ask(name, (None, src, nbytes, *stream), into=into)
        return result[:1]

    if hasattr(Driver, "cuMemcpyBatchAsync"):  # newer versions of the binding

        @special
        def cuMemcpyBatchAsync(self, dsts: Any, srcs: Any, sizes: Any, count: int, *rest: Any) -> Returned:
            places = []
            for role, pointers in (("dsts", dsts), ("srcs", srcs)):
                addresses = [self._memory.on_node(int(pointer)) for pointer in (pointers or ())[: int(count)]]
                for index, address in enumerate(addresses):
                    if not is_node_address(address):
                        raise unsupported(
                            f"{role}[{index}] is pageable memory ({address:#x}), which a batch does not copy "
                            "on a served node; use page-locked memory, or one copy each"
                        )
                places.append(addresses)
            return self._call("cuMemcpyBatchAsync", *places, list(sizes or ())[: int(count)], count, *rest)

    # --------------------------------------------------------------------------- memory without an address

    @special
    def cuMemExportToShareableHandle(self, handle: Any, handleType: Any, flags: int) -> Returned:
        result, fds = self._ask("cuMemExportToShareableHandle", (handle, handleType, flags))
        return (*result, fds[0]) if result[0] == SUCCESS else result

    @special
    def cuMemImportFromShareableHandle(self, osHandle: Any, shHandleType: Any) -> Returned:
        descriptor = address_of(osHandle)
        try:
            os.fstat(descriptor)
        except OSError as error:
            raise invalid(
                f"descriptor {descriptor}: {error}; send it over a Unix socket (SCM_RIGHTS)"
            ) from None
        return self._ask("cuMemImportFromShareableHandle", (shHandleType,), [descriptor])[0]

    # --------------------------------------------------------------------------------------- host memory

    @special
    def cuMemAllocHost(self, bytesize: int) -> Returned:
        return self._pinned("cuMemAllocHost", bytesize)

    @special
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> Returned:
        return self._pinned("cuMemHostAlloc", bytesize, Flags)

    def _pinned(self, name: str, *arguments: Any) -> Returned:
        for _ in range(8):
            result, fds = self._ask(name, arguments)
            if result[0] != SUCCESS:
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
        if result[0] == SUCCESS:
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
        shared = find_shared(address, bytesize)
        if isinstance(shared, str):
            raise unsupported(
                f"[{address:#x}, +{bytesize}) cannot be shown to the process that serves the node: {shared}; "
                "use page-locked memory (cuMemHostAlloc), or map a memfd or shared memory and keep its "
                "descriptor open"
            )
        result, _ = self._ask("cuMemHostRegister", (shared.offset, int(bytesize), int(Flags)), [shared.fd])
        if result[0] == SUCCESS:
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
        if result[0] == SUCCESS:
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
        if result[0] != SUCCESS:
            return result
        values = [
            self._seen_here((SUCCESS, value), item, int(ptr))[1]
            for item, value in zip(asked, result[1], strict=False)
        ]
        return SUCCESS, values

    def _seen_here(self, result: Returned, attribute: Any, ptr: int) -> Returned:
        """The host pointer of registered memory is this process's, not the node's."""
        if result[0] == SUCCESS and attribute == _HOST_POINTER and self._memory.on_node(ptr) != ptr:
            return SUCCESS, ptr
        return result

    @special
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> Returned:
        result = self._call("cuDeviceGetAttribute", attrib, dev)
        if attrib == _SAME_ADDRESS and result[0] == SUCCESS:
            return SUCCESS, 0  # the node maps registered memory elsewhere
        return result


def _bytes_at(address: int, nbytes: int) -> memoryview:
    """This process's memory."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
