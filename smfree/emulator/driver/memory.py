"""Allocations, host memory and pointer queries."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cuda

from smfree.emulator.allocations import DEVICE_SPACE_BYTES
from smfree.emulator.driver.base import DriverBase, Needs, as_context, calling_line, entry
from smfree.emulator.driver.errors import CUresult, Refusal, invalid
from smfree.emulator.errors import MemoryFault
from smfree.emulator.host_memory import HostRange
from smfree.emulator.node import DeviceState


class Place(NamedTuple):
    """Where an address lies: on a device, in page-locked host memory (``known``), or in pageable memory."""

    address: int
    device: DeviceState | None
    known: HostRange | None

    @property
    def pinned(self) -> bool:
        return self.known is not None


def address_of(pointer: Any) -> int:
    """What the real binding takes as ``void*``: None, an int, a CUdeviceptr or a contiguous buffer."""
    if pointer is None:
        return 0
    if isinstance(pointer, int):
        return pointer
    if isinstance(pointer, cuda.CUdeviceptr):
        return int(pointer)
    try:
        view = memoryview(pointer)
    except TypeError:
        raise TypeError(
            f"expected an address, a CUdeviceptr or a buffer, got {type(pointer).__name__}"
        ) from None
    if not view.contiguous:
        raise TypeError("the buffer must be contiguous")
    return int(np.frombuffer(view, np.uint8).ctypes.data) if view.nbytes else 0


class MemoryCalls(DriverBase):
    """cuMem{Alloc,Free,Host}*, cuMemGetInfo, cuPointerGetAttribute*."""

    @entry(1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        return self._allocate(self._device(), bytesize, "cuMemAlloc")

    def _allocate(self, device: DeviceState, nbytes: int, call: str) -> Any:
        if nbytes <= 0:
            raise invalid(f"bytesize must be positive, got {nbytes}")
        try:
            address = device.memory.alloc(nbytes, 512, f"{call} at {calling_line()}")
        except MemoryError as error:
            raise Refusal(CUresult.CUDA_ERROR_OUT_OF_MEMORY, str(error)) from None
        device.allocations.add(address)
        return cuda.CUdeviceptr(address)

    @entry(0)
    def cuMemFree(self, dptr: Any) -> None:
        address = int(dptr)
        if address:
            device = self._owner(address)
            self._synchronize(device)
            self._free(device, address)

    def _owner(self, address: int) -> DeviceState:
        """The device whose address space holds ``address``."""
        for device in self.node.devices:
            if 0 <= address - device.memory.base < DEVICE_SPACE_BYTES:
                return device
        raise invalid(f"{address:#x} is no device address")

    def _free(self, device: DeviceState, address: int) -> None:
        try:
            device.memory.free(address)
        except MemoryFault as fault:
            raise invalid(str(fault)) from None
        device.allocations.discard(address)

    @entry(1)
    def cuMemAllocAsync(self, bytesize: int, hStream: Any) -> Any:
        stream = self._stream(hStream)
        pointer = self._allocate(self.node.devices[stream.context], bytesize, "cuMemAllocAsync")
        self._submit(stream, f"allocation of {bytesize} bytes")
        return pointer

    @entry(0)
    def cuMemFreeAsync(self, dptr: Any, hStream: Any) -> None:
        stream, address = self._stream(hStream), int(dptr)
        device = self._owner(address)
        if device.memory.allocation_of(address) is None:
            raise invalid(f"{address:#x} is in no live allocation")

        def release(start_s: float) -> float:
            try:
                self._free(device, address)
            except Refusal as refusal:
                self._fail(device, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, refusal.message, start_s)
            return 0.0

        self._submit(stream, f"free of {address:#x}", release)

    @entry(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        device = self._device()
        total = device.profile.device.memory_bytes
        return total - device.memory.allocated_bytes, total

    @entry(2)
    def cuMemGetAddressRange(self, dptr: Any) -> tuple[Any, int]:
        address = int(dptr)
        device = self.node.device_of(address)
        if device is not None:
            found = device.memory.allocation_of(address)
            assert found is not None
            return cuda.CUdeviceptr(found.start), found.nbytes
        host = self.node.host.range_of(address)
        if host is None:
            raise Refusal(CUresult.CUDA_ERROR_NOT_FOUND, f"{address:#x} is in no live allocation")
        return cuda.CUdeviceptr(host.address), host.nbytes

    # --------------------------------------------------------------------------------------- host memory

    @entry(1)
    def cuMemAllocHost(self, bytesize: int) -> int:
        return self._allocate_host(bytesize, 0)

    @entry(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        if int(Flags) & ~7:
            raise invalid(
                f"Flags may hold CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP, _WRITECOMBINED, got {Flags:#x}"
            )
        return self._allocate_host(bytesize, int(Flags))

    def _allocate_host(self, nbytes: int, flags: int) -> int:
        if nbytes <= 0:
            raise invalid(f"bytesize must be positive, got {nbytes}")
        try:
            return self.node.host.allocate(nbytes, flags).address
        except OSError as error:
            raise Refusal(
                CUresult.CUDA_ERROR_OUT_OF_MEMORY, f"{nbytes} bytes of host memory: {error}"
            ) from None

    @entry(0)
    def cuMemFreeHost(self, p: Any) -> None:
        found = self._host_start(p)
        if found.owner is None:
            raise invalid(f"{found.address:#x} was registered, not allocated; use cuMemHostUnregister")
        self._synchronize(self._device())
        self.node.host.drop(found.address)

    @entry(0)
    def cuMemHostRegister(self, p: Any, bytesize: int, Flags: int) -> None:
        address = address_of(p)
        if not address or bytesize <= 0:
            raise invalid(f"p must not be NULL and bytesize be positive, got {address:#x} and {bytesize}")
        for known in self.node.host.ranges.values():
            if known.address < address + bytesize and address < known.end:
                raise Refusal(
                    CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                    f"[{address:#x}, +{bytesize}) overlaps the known [{known.address:#x}, +{known.nbytes})",
                )
        self.node.host.register(address, int(bytesize), int(Flags))

    @entry(0)
    def cuMemHostUnregister(self, p: Any) -> None:
        address = address_of(p)
        found = self.node.host.ranges.get(address)
        if found is None or found.owner is not None:
            raise Refusal(
                CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, f"{address:#x} starts no registered range"
            )
        self._synchronize(self._device())
        self.node.host.drop(address)

    @entry(1)
    def cuMemHostGetDevicePointer(self, p: Any, Flags: int) -> Any:
        if int(Flags) != 0:
            raise invalid(f"Flags must be 0, got {Flags}")
        address = address_of(p)
        if self.node.host.range_of(address) is None:
            raise invalid(f"{address:#x} is in no page-locked range; use cuMemHostAlloc or cuMemHostRegister")
        return cuda.CUdeviceptr(address)

    @entry(1)
    def cuMemHostGetFlags(self, p: Any) -> int:
        return self._host_start(p).flags

    def _host_start(self, p: Any) -> HostRange:
        address = address_of(p)
        found = self.node.host.ranges.get(address)
        if found is None:
            raise invalid(f"{address:#x} starts no page-locked range")
        return found

    # ------------------------------------------------------------------------------------------ pointers

    def _place(self, address: int, nbytes: int, role: str, *, on_device: bool = False) -> Place:
        """Where [address, address + nbytes) lies; refused when it is not all in one place.

        ``on_device``: the argument is a CUdeviceptr, so pageable memory is refused too.
        """
        for device in self.node.devices:
            if 0 <= address - device.memory.base < DEVICE_SPACE_BYTES:
                try:
                    device.memory.check_range(address, max(1, nbytes), role)
                except MemoryFault as fault:
                    raise invalid(str(fault)) from None
                return Place(address, device, None)
        known = self.node.host.range_of(address, max(1, nbytes))
        if known is None and on_device:
            raise invalid(f"{role}: {address:#x} is neither a device address nor page-locked; use cuMemAlloc")
        if known is None and address == 0 and nbytes:
            raise invalid(f"{role} is NULL")
        if known is None:
            for other in self.node.host.ranges.values():
                if other.address < address + nbytes and address < other.end:
                    raise invalid(
                        f"{role}: [{address:#x}, +{nbytes}) is partly inside the page-locked range "
                        f"[{other.address:#x}, +{other.nbytes}); copy within one of them"
                    )
        return Place(address, None, known)

    @entry(1)
    def cuPointerGetAttribute(self, attribute: Any, ptr: Any) -> Any:
        address = int(ptr)
        if self.node.device_of(address) is None and self.node.host.range_of(address) is None:
            raise invalid(f"{address:#x} is unknown to the driver")
        return self._pointer_attribute(attribute, address)

    @entry(1, Needs.INIT)
    def cuPointerGetAttributes(self, numAttributes: int, attributes: Any, ptr: Any) -> list[Any]:
        """Unknown pointers give zeros, as the driver documents."""
        if int(numAttributes) > len(attributes or ()):
            raise invalid(f"numAttributes is {numAttributes}, attributes has {len(attributes or ())} entries")
        return [self._pointer_attribute(item, int(ptr)) for item in (attributes or ())[: int(numAttributes)]]

    def _pointer_attribute(self, attribute: Any, address: int) -> Any:
        device, host = self.node.device_of(address), self.node.host.range_of(address)
        found = device.memory.allocation_of(address) if device is not None else None
        start = found.start if found is not None else host.address if host is not None else 0
        match attribute.name.removeprefix("CU_POINTER_ATTRIBUTE_"):
            case "CONTEXT":
                return as_context(device)
            case "MEMORY_TYPE":
                kinds = cuda.CUmemorytype
                kind = kinds.CU_MEMORYTYPE_DEVICE if device is not None else kinds.CU_MEMORYTYPE_HOST
                return int(kind) if start else 0
            case "DEVICE_POINTER":
                return cuda.CUdeviceptr(address if start else 0)
            case "HOST_POINTER":
                if device is not None:
                    raise invalid(f"{address:#x} is device memory; it has no host pointer")
                return address if host is not None else 0
            case "SYNC_MEMOPS" | "IS_MANAGED" | "IS_LEGACY_CUDA_IPC_CAPABLE":
                return False
            case "BUFFER_ID":
                return start
            case "DEVICE_ORDINAL":
                return device.ordinal if device is not None else (0 if host is not None else -2)
            case "RANGE_START_ADDR":
                return cuda.CUdeviceptr(start)
            case "RANGE_SIZE":
                return found.nbytes if found is not None else host.nbytes if host is not None else 0
            case "MAPPED":
                return bool(start)
        raise invalid(f"the emulator has no answer for {attribute.name}")


def host_bytes(address: int, nbytes: int) -> np.ndarray:
    """A view of host memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
