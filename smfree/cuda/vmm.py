"""Virtual memory management: memory without an address, addresses without memory, and what joins them.

:class:`PhysicalMemory` is memory of one GPU. :meth:`~PhysicalMemory.map` gives it an address that the named
GPUs may use; :meth:`~PhysicalMemory.export` makes a file descriptor that another process imports (send it
over a Unix socket with SCM_RIGHTS)::

    with PhysicalMemory.create(device, nbytes) as memory:      # exporting process
        array = memory.map().array((nbytes,), np.uint8)
        descriptor = memory.export()                           # closing it is the caller's duty
    with PhysicalMemory.from_descriptor(device, descriptor, nbytes) as memory:      # importing process
        peer = memory.map().array((nbytes,), np.uint8)

Memory goes when nothing refers to it: no handle, no mapping, no descriptor in any process (CUDA driver API,
cuMemRelease). Closing a handle leaves its mappings; an array keeps its mapping.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from smfree.cuda.errors import ArrayError, DeviceClosedError, DriverError, UnavailableError
from smfree.cuda.memory import Allocation, DeviceArray, as_dtype, as_shape

if TYPE_CHECKING:
    from smfree.cuda.calls import Calls
    from smfree.cuda.device import Device

_Handle = TypeVar("_Handle", bound="MemoryObject")


def attribute(device: Device, name: str) -> int:
    """A CU_DEVICE_ATTRIBUTE of the device; 0 where the binding or the driver does not know it."""
    found = getattr(device.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if found is None:
        return 0
    try:
        return int(device.calls("cuDeviceGetAttribute", found, device.ordinal, attribute=name))
    except DriverError as error:
        if error.code_name == "CUDA_ERROR_INVALID_VALUE":
            return 0
        raise


def vmm_unavailable(device: Device, *, shareable: bool = True) -> str | None:
    """Why the device has no virtual memory management (``shareable``: with descriptors); None when it has."""
    if not attribute(device, "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        return f"{device.name} ({device.spec}) has no virtual memory management; use cuMemAlloc and CUDA IPC"
    if shareable and not attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        return f"{device.name} ({device.spec}) cannot share memory by file descriptor; use CUDA IPC"
    return None


def round_up(nbytes: int, granularity: int) -> int:
    """The next multiple of ``granularity``, at least one."""
    return max(1, -(-nbytes // granularity)) * granularity


class MemoryObject:
    """What physical memory and multicast objects have in common: a handle that is mapped and exported.

    ``nbytes`` is a multiple of ``granularity``. A context manager; :meth:`close` releases the handle.
    """

    kind = "memory"

    def __init__(self, device: Device, handle: Any, nbytes: int, granularity: int) -> None:
        self.device = device
        self.handle = handle
        self.nbytes = nbytes
        self.granularity = granularity
        self._release = weakref.finalize(self, device.calls.quiet, "cuMemRelease", handle)
        device.track(self)

    def __enter__(self: _Handle) -> _Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.nbytes} bytes, device={self.device.spec!r})"

    @property
    def closed(self) -> bool:
        """Whether the handle was released."""
        return not self._release.alive

    def close(self) -> None:
        """Release the handle; what is mapped stays. A second call does nothing."""
        self._release()

    def _call(self, api: str, *args: Any, **what: object) -> Any:
        if self.closed:
            raise DeviceClosedError(f"{api}: the {self.kind} {self!r} was closed; keep it open until then")
        return self.device.calls(api, *args, **what)

    def export(self) -> int:
        """A new file descriptor for another process. The caller closes it; until then the memory lives.

        Raises DriverError for memory that was not made shareable.
        """
        kinds = self.device.driver.CUmemAllocationHandleType
        kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return int(self._call("cuMemExportToShareableHandle", self.handle, kind, 0))

    def map(self, devices: Iterable[Device] | None = None) -> MappedMemory:
        """All of it at a new address, which ``devices`` (default: this one) may read and write."""
        if self.closed:
            raise DeviceClosedError(f"map: the {self.kind} {self!r} was closed; map it before")
        return MappedMemory(self, [self.device] if devices is None else list(devices))


class PhysicalMemory(MemoryObject):
    """Memory of one GPU without an address: what cuMemCreate makes, or an import of it."""

    @classmethod
    def create(cls, device: Device, nbytes: int, *, shareable: bool = True) -> PhysicalMemory:
        """New memory of ``device``, ``nbytes`` rounded up to its granularity (2 MiB on current GPUs).

        ``shareable``: it can be exported as a file descriptor. Raises UnavailableError, DriverError.
        """
        reason = vmm_unavailable(device, shareable=shareable)
        if reason is not None:
            raise UnavailableError(reason)
        if nbytes < 1:
            raise ArrayError(f"physical memory has at least one byte (got {nbytes})")
        properties = _properties(device, shareable)
        granularity = _granularity(device, properties)
        size = round_up(nbytes, granularity)
        handle = device.calls("cuMemCreate", size, properties, 0, bytes=size)
        return cls(device, handle, size, granularity)

    @classmethod
    def from_descriptor(cls, device: Device, descriptor: int, nbytes: int) -> PhysicalMemory:
        """Memory that another process exported, for use by ``device``. The descriptor may be closed then.

        ``nbytes`` is the exporter's :attr:`nbytes`: the driver cannot be asked for it.
        """
        granularity = _granularity(device, _properties(device, shareable=True))
        return cls(device, import_descriptor(device, descriptor), nbytes, granularity)


class MappedMemory(Allocation):
    """A range of addresses and the memory behind it; unmapped with its last array, or by :meth:`free`.

    ``devices`` may use it. Free it only when no queued work uses it: unmapping need not wait for that.
    """

    def __init__(self, memory: MemoryObject, devices: Sequence[Device]) -> None:
        self.device = memory.device
        self.devices = tuple(devices)
        calls, nbytes = memory.device.calls, memory.nbytes
        ptr = int(calls("cuMemAddressReserve", nbytes, memory.granularity, 0, 0, bytes=nbytes))
        try:
            calls("cuMemMap", ptr, nbytes, 0, memory.handle, 0, ptr=hex(ptr), bytes=nbytes)
        except BaseException:
            calls.quiet("cuMemAddressFree", ptr, nbytes)
            raise
        super().__init__(calls, ptr, nbytes, owner=memory, release=partial(_unmap, nbytes=nbytes))
        memory.device.track(self)
        try:
            self.allow(self.devices)
        except BaseException:
            self.free()
            raise

    def allow(self, devices: Iterable[Device]) -> None:
        """Let these GPUs read and write the range too."""
        driver = self.device.driver
        descriptions = []
        for device in devices:
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = device.ordinal
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            descriptions.append(access)
        what = {"ptr": hex(self.ptr), "bytes": self.nbytes, "devices": [d.location.id for d in descriptions]}
        if descriptions:
            self.device.calls(
                "cuMemSetAccess", self.ptr, self.nbytes, descriptions, len(descriptions), **what
            )

    def array(
        self,
        shape: int | Sequence[int],
        dtype: DTypeLike = np.uint8,
        *,
        offset_bytes: int = 0,
        device: Device | None = None,
    ) -> DeviceArray:
        """The memory from ``offset_bytes`` on as an array of ``device`` (default: the memory's)."""
        dims, wanted, offset = as_shape(shape), as_dtype(dtype), index(offset_bytes)
        nbytes = math.prod(dims) * wanted.itemsize
        if offset < 0 or offset + nbytes > self.nbytes:
            raise ArrayError(
                f"an array of {nbytes} bytes at offset {offset} leaves the mapping of {self.nbytes} bytes"
            )
        return DeviceArray(device or self.device, self, offset, dims, wanted)


def _unmap(calls: Calls, ptr: int, nbytes: int) -> None:
    calls.quiet("cuMemUnmap", ptr, nbytes)
    calls.quiet("cuMemAddressFree", ptr, nbytes)


def import_descriptor(device: Device, descriptor: int) -> Any:
    """The handle behind another process's file descriptor. Raises DriverError."""
    kinds = device.driver.CUmemAllocationHandleType
    kind = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return device.calls("cuMemImportFromShareableHandle", int(descriptor), kind, descriptor=descriptor)


def _properties(device: Device, shareable: bool) -> Any:
    driver = device.driver
    kinds = driver.CUmemAllocationHandleType
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.ordinal
    properties.requestedHandleTypes = (
        kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR if shareable else kinds.CU_MEM_HANDLE_TYPE_NONE
    )
    return properties


def _granularity(device: Device, properties: Any) -> int:
    option = device.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(device.calls("cuMemGetAllocationGranularity", properties, option))
