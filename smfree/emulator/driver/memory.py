"""Allocations, host memory and pointer queries."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
from cuda.bindings import driver as cuda

from smfree.emulator.address_space import Located, MappingKind
from smfree.emulator.driver.base import DriverBase, Needs, as_context, entry
from smfree.emulator.driver.errors import CUresult, Refusal, invalid
from smfree.emulator.errors import MemoryFault
from smfree.emulator.host_memory import HostRange
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.node import DeviceState
from smfree.emulator.process import AllocationKind, Context


class Place(NamedTuple):
    """Where an address lies: on a device, in page-locked host memory (``known``), or in pageable memory.

    ``address`` is the process's; on a device the bytes are those of ``memory`` from ``at`` on.
    ``numa_node``: that of host memory, None where nobody chose one.
    """

    address: int
    device: DeviceState | None = None
    known: HostRange | None = None
    memory: GlobalMemory | None = None
    at: int = 0
    numa_node: int | None = None

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
        return self._allocate(self._context(), bytesize, AllocationKind.DEVICE)

    def _allocate(self, context: Context, nbytes: int, kind: AllocationKind) -> Any:
        if nbytes <= 0:
            raise invalid(f"bytesize must be positive, got {nbytes}")
        try:
            return cuda.CUdeviceptr(context.allocate(nbytes, 512, f"{kind} at {self._caller()}", kind))
        except MemoryError as error:
            raise Refusal(CUresult.CUDA_ERROR_OUT_OF_MEMORY, str(error)) from None

    @entry(0)
    def cuMemFree(self, dptr: Any) -> None:
        address = int(dptr)
        if address:
            context = self._holder(address)
            if context.allocations.get(address) is not AllocationKind.STREAM_ORDERED:
                self._synchronize(context)
            self._free(context, address)

    def _holder(self, address: int) -> Context:
        """This process's context on the device in whose window ``address`` lies."""
        device = self.process.space.window(address)
        if device is None:
            mapping = self.process.space.find(address)
            if mapping is None:
                raise invalid(f"{address:#x} is no device address")
            imported = mapping.kind is MappingKind.IPC
            raise invalid(
                f"{address:#x} is {mapping}; give it back with "
                + ("cuIpcCloseMemHandle" if imported else "cuMemUnmap")
            )
        return self.process.contexts[device.ordinal]

    def _free(self, context: Context, address: int) -> None:
        found = context.device.memory.allocation_of(address)
        if found is not None and found.owner is not self.process:
            raise invalid(f"{address:#x} is in {found} of {found.owner}; only that process may free it")
        if context.allocations.get(address) is AllocationKind.VARIABLE:
            raise invalid(f"{address:#x} is {found}, {AllocationKind.VARIABLE}; unload the module instead")
        export = context.exports.get(address)
        if export is not None and export.imports:
            users = " and ".join(str(opened.context) for opened in export.imports)
            raise invalid(
                f"{found} is open in {users}; what they would then read is undefined. Let them call "
                "cuIpcCloseMemHandle first"
            )
        try:
            context.free(address)
        except MemoryFault as fault:
            raise invalid(str(fault)) from None

    @entry(1)
    def cuMemAllocAsync(self, bytesize: int, hStream: Any) -> Any:
        stream = self._stream(hStream)
        self._no_capture(stream, "an allocation")
        pointer = self._allocate(stream.context, bytesize, AllocationKind.STREAM_ORDERED)
        self._submit(stream, f"allocation of {bytesize} bytes")
        return pointer

    @entry(0)
    def cuMemFreeAsync(self, dptr: Any, hStream: Any) -> None:
        stream, address = self._stream(hStream), int(dptr)
        self._no_capture(stream, "a free")
        context = self._holder(address)
        if context.device.memory.allocation_of(address) is None:
            raise invalid(f"{address:#x} is in no live allocation")

        def release(start_s: float) -> float:
            try:
                self._free(context, address)
            except Refusal as refusal:
                self._fail(context, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, refusal.message, start_s)
            return 0.0

        self._submit(stream, f"free of {address:#x}", release)

    @entry(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        self.node.exports.reap()
        device = self._device()
        total = device.profile.device.memory_bytes
        return total - device.memory.allocated_bytes, total

    @entry(2)
    def cuMemGetAddressRange(self, dptr: Any) -> tuple[Any, int]:
        address = int(dptr)
        found = self._located(address)
        if found is None:
            raise Refusal(CUresult.CUDA_ERROR_NOT_FOUND, f"{address:#x} is in no live allocation")
        start, nbytes = self._extent(found, address)
        return cuda.CUdeviceptr(start), nbytes

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
            made = self.node.host.allocate(nbytes, flags, self.process)
        except OSError as error:
            raise Refusal(
                CUresult.CUDA_ERROR_OUT_OF_MEMORY, f"{nbytes} bytes of host memory: {error}"
            ) from None
        made.context = self._context()
        return made.address

    @entry(0)
    def cuMemFreeHost(self, p: Any) -> None:
        found = self._host_start(p)
        if found.owner is None:
            raise invalid(f"{found.address:#x} was registered, not allocated; use cuMemHostUnregister")
        self._synchronize(self._context())
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
        made = self.node.host.register(address, int(bytesize), int(Flags), self.process)
        made.context = self._context()

    @entry(0)
    def cuMemHostUnregister(self, p: Any) -> None:
        address = address_of(p)
        found = self.node.host.ranges.get(address)
        if found is None or found.owner is not None or found.process not in (None, self.process):
            raise Refusal(
                CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, f"{address:#x} starts no registered range"
            )
        self._synchronize(self._context())
        self.node.host.drop(address)

    @entry(1)
    def cuMemHostGetDevicePointer(self, p: Any, Flags: int) -> Any:
        if int(Flags) != 0:
            raise invalid(f"Flags must be 0, got {Flags}")
        address = address_of(p)
        found = self.node.host.range_of(address)
        if found is None or found.process not in (None, self.process):
            raise invalid(f"{address:#x} is in no page-locked range; use cuMemHostAlloc or cuMemHostRegister")
        return cuda.CUdeviceptr(address)

    @entry(1)
    def cuMemHostGetFlags(self, p: Any) -> int:
        return self._host_start(p).flags

    def _host_start(self, p: Any) -> HostRange:
        address = address_of(p)
        found = self.node.host.ranges.get(address)
        if found is None or found.process not in (None, self.process):
            raise invalid(f"{address:#x} starts no page-locked range of {self.process}")
        return found

    # ------------------------------------------------------------------------------------------ pointers

    def _place(self, address: int, nbytes: int, role: str, *, on_device: bool = False) -> Place:
        """Where [address, address + nbytes) lies; refused when it is not all in one place.

        ``on_device``: the argument is a CUdeviceptr, so pageable memory is refused too.
        """
        try:
            found = self.process.space.locate(address, nbytes, role)
        except MemoryFault as fault:
            raise invalid(str(fault)) from None
        if found is not None and isinstance(found.memory, GlobalMemory):
            if found.mapping is not None and found.mapping.users == set():
                raise invalid(f"{role}: no device has access to {found.mapping}; give it with cuMemSetAccess")
            return Place(address, found.device, None, found.memory, found.address)
        known = found and self.node.host.range_of(address, max(1, nbytes))
        if known is None and on_device:
            raise invalid(f"{role}: {address:#x} is neither a device address nor page-locked; use cuMemAlloc")
        if known is None and address == 0 and nbytes:
            raise invalid(f"{role} is NULL")
        if known is None:
            for other in self.node.host.ranges.values():
                mine = other.process in (None, self.process)
                if mine and other.address < address + nbytes and address < other.end:
                    raise invalid(
                        f"{role}: [{address:#x}, +{nbytes}) is partly inside the page-locked range "
                        f"[{other.address:#x}, +{other.nbytes}); copy within one of them"
                    )
        return Place(address, None, known, numa_node=self.node.host.numa_node_of(self.process, address))

    def _located(self, address: int) -> Located | None:
        """Where one byte of this process is; None when the driver does not know it."""
        try:
            return self.process.space.locate(address, 1, "address")
        except MemoryFault:
            return None

    def _extent(self, found: Located, address: int) -> tuple[int, int]:
        """First address and bytes of the allocation or mapping that holds a located address."""
        if found.mapping is not None:
            return found.mapping.start, found.mapping.nbytes
        if isinstance(found.memory, GlobalMemory):
            home = found.memory.check_range(found.address, 1, "address")
            return home.start, home.nbytes
        host = found.memory.range_of(address)
        assert host is not None, "located there"
        return host.address, host.nbytes

    def _why_not_exportable(self, found: Located | None) -> str | None:
        """What keeps located memory from being exported with cuIpcGetMemHandle; None when nothing does."""
        if found is None:
            return "is in no live allocation of this process"
        if found.mapping is not None:
            if found.mapping.kind is MappingKind.IPC:
                return f"is {found.mapping}; only the process that allocated it exports it"
            return f"is {found.mapping}, of virtual memory management"
        if found.device is None or not isinstance(found.memory, GlobalMemory):
            return "is host memory"
        home = found.memory.check_range(found.address, 1, "dptr")
        kind = self.process.contexts[found.device.ordinal].allocations.get(home.start)
        if kind is not AllocationKind.DEVICE:
            return f"is in {home}, which is memory of {kind}"
        return None

    def _context_around(self, found: Located, start: int) -> Context | None:
        """The context that allocated, registered or opened memory; stream-ordered and virtual memory has none
        (openucx/ucx, cuda_copy_md.c)."""
        if found.device is None:
            known = self.node.host.range_of(found.address)
            return known.context if known is not None and isinstance(known.context, Context) else None
        if found.mapping is not None:
            opened = [one for one in self.process.contexts.values() if start in one.imports]
            return opened[0] if opened else None
        context = self.process.contexts[found.device.ordinal]
        return None if context.allocations.get(start) is AllocationKind.STREAM_ORDERED else context

    @entry(1)
    def cuPointerGetAttribute(self, attribute: Any, ptr: Any) -> Any:
        address = int(ptr)
        if self._located(address) is None:
            raise invalid(f"{address:#x} is unknown to the driver")
        return self._pointer_attribute(attribute, address)

    @entry(1, Needs.INIT)
    def cuPointerGetAttributes(self, numAttributes: int, attributes: Any, ptr: Any) -> list[Any]:
        """Unknown pointers give zeros, as the driver documents."""
        if int(numAttributes) > len(attributes or ()):
            raise invalid(f"numAttributes is {numAttributes}, attributes has {len(attributes or ())} entries")
        return [self._pointer_attribute(item, int(ptr)) for item in (attributes or ())[: int(numAttributes)]]

    def _pointer_attribute(self, attribute: Any, address: int) -> Any:
        found = self._located(address)
        device = found.device if found is not None else None
        start, nbytes = self._extent(found, address) if found is not None else (0, 0)
        match attribute.name.removeprefix("CU_POINTER_ATTRIBUTE_"):
            case "CONTEXT":
                return as_context(self._context_around(found, start) if found is not None else None)
            case "MEMORY_TYPE":
                kinds = cuda.CUmemorytype
                kind = kinds.CU_MEMORYTYPE_DEVICE if device is not None else kinds.CU_MEMORYTYPE_HOST
                return int(kind) if start else 0
            case "DEVICE_POINTER":
                return cuda.CUdeviceptr(address if start else 0)
            case "HOST_POINTER":
                if device is not None:
                    raise invalid(f"{address:#x} is device memory; it has no host pointer")
                return address if found is not None else 0
            case "IS_LEGACY_CUDA_IPC_CAPABLE":
                return self._why_not_exportable(found) is None
            case "SYNC_MEMOPS" | "IS_MANAGED":
                return False
            case "BUFFER_ID":
                return start
            case "DEVICE_ORDINAL":
                if found is not None and device is None:
                    context = self._context_around(found, start)
                    return context.ordinal if context is not None else 0
                return device.ordinal if device is not None else -2
            case "RANGE_START_ADDR":
                return cuda.CUdeviceptr(start)
            case "RANGE_SIZE":
                return nbytes
            case "MAPPED":
                return bool(start)
        raise invalid(f"the emulator has no answer for {attribute.name}")


def host_bytes(address: int, nbytes: int) -> np.ndarray:
    """A view of host memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
