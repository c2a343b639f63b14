"""Virtual memory management: cuMemCreate and what maps, shares and ends it; the objects are in virtual.py."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.address_space import PAGE_BYTES
from smfree.emulator.driver.base import Needs, entry
from smfree.emulator.driver.errors import CUresult, Refusal, invalid, unsupported
from smfree.emulator.driver.memory import MemoryCalls, address_of
from smfree.emulator.driver.peers import can_access
from smfree.emulator.node import DeviceState
from smfree.emulator.virtual import GRANULARITY_BYTES, Backing, Handle, Physical, Reservation, Team, View

_TYPES = cuda.CUmemAllocationHandleType
_DESCRIPTOR = _TYPES.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ_WRITE = int(cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)


class VmmCalls(MemoryCalls):
    """cuMemCreate, cuMemAddressReserve, cuMemMap, cuMemSetAccess and theirs. None needs a context."""

    # ----------------------------------------------------------------------------------- physical memory

    @entry(1, Needs.INIT)
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self._checked(prop)
        if int(option) not in (0, 1):
            raise invalid(f"option must be CU_MEM_ALLOC_GRANULARITY_MINIMUM or _RECOMMENDED, got {option}")
        return GRANULARITY_BYTES

    @entry(1, Needs.INIT)
    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        device, shareable = self._checked(prop)
        no_flags(flags)
        multiples(size=size)
        self.node.exports.reap()
        label = f"cuMemCreate at {self._caller()}"
        try:
            address = device.memory.alloc(int(size), PAGE_BYTES, label)
        except MemoryError as error:
            raise Refusal(CUresult.CUDA_ERROR_OUT_OF_MEMORY, str(error)) from None
        return self._name(Physical(int(size), shareable, device=device, address=address, label=label))

    def _checked(self, prop: Any) -> tuple[DeviceState, bool]:
        """Device and shareability of a CUmemAllocationProp."""
        if prop is None:
            raise invalid("prop is None")
        if prop.type != cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED:
            raise invalid(f"prop.type must be CU_MEM_ALLOCATION_TYPE_PINNED, got {prop.type.name}")
        device = self._at(prop.location)
        if int(prop.allocFlags.compressionType) or int(prop.allocFlags.usage):
            raise unsupported("compressible memory and tile pools are not emulated; leave allocFlags at 0")
        kinds = int(prop.requestedHandleTypes)
        if kinds not in (0, int(_DESCRIPTOR)):
            raise unsupported(f"handle types {kinds:#x}: only POSIX file descriptors are emulated")
        return device, bool(kinds)

    def _at(self, location: Any) -> DeviceState:
        """The device of a CUmemLocation."""
        kinds = cuda.CUmemLocationType
        if location.type == kinds.CU_MEM_LOCATION_TYPE_DEVICE:
            return self._device_at(location.id)
        if int(location.type) == 0:
            raise invalid("location.type must be set; use CU_MEM_LOCATION_TYPE_DEVICE")
        raise unsupported(f"{location.type.name} is not emulated; use CU_MEM_LOCATION_TYPE_DEVICE")

    @entry(1, Needs.INIT)
    def cuMemGetAllocationPropertiesFromHandle(self, handle: Any) -> Any:
        physical = self._backing(handle, Physical)
        prop = cuda.CUmemAllocationProp()
        prop.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = physical.device.ordinal
        prop.requestedHandleTypes = _DESCRIPTOR if physical.shareable else _TYPES.CU_MEM_HANDLE_TYPE_NONE
        return prop

    # ------------------------------------------------------------------------------------------- handles

    def _name(self, backing: Backing, *, imported: bool = False) -> Any:
        """A new handle of this process."""
        backing.retain()
        handle = Handle(0, backing, imported)
        handle.value = self.process.name(handle)
        return cuda.CUmemGenericAllocationHandle(handle.value)

    def _handle(self, handle: Any) -> Handle:
        value = int(handle)
        found = self.process.objects.get(value)
        if not isinstance(found, Handle):
            raise invalid(f"{value:#x} is no memory handle of {self.process}; it was released or never made")
        return found

    def _backing(self, handle: Any, kind: type[Any]) -> Any:
        found = self._handle(handle).backing
        if not isinstance(found, kind):
            wanted = "a multicast object" if kind is Team else "memory from cuMemCreate"
            raise invalid(f"the handle must name {wanted}; it names {found}")
        return found

    @entry(0, Needs.INIT)
    def cuMemRelease(self, handle: Any) -> None:
        found = self._handle(handle)
        found.count -= 1
        if found.count == 0:
            del self.process.objects[found.value]
            found.backing.release()
        self.node.exports.reap()

    @entry(1, Needs.INIT)
    def cuMemRetainAllocationHandle(self, addr: Any) -> Any:
        """The very handle that the mapping was made with, also when it had been released."""
        address = address_of(addr)
        views = self._views(address, 1)
        if not views:
            raise invalid(f"{address:#x} is not mapped; map it with cuMemMap first")
        handle = views[0].handle
        if handle.count == 0:
            handle.backing.retain()
            self.process.objects[handle.value] = handle
        handle.count += 1
        return cuda.CUmemGenericAllocationHandle(handle.value)

    @entry(1, Needs.INIT)
    def cuMemExportToShareableHandle(self, handle: Any, handleType: Any, flags: int) -> int:
        found = self._handle(handle)
        no_flags(flags)
        _descriptor_only(handleType)
        if not found.backing.shareable:
            raise invalid(
                f"{found.backing} was not made shareable; ask for CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR "
                "in its properties"
            )
        try:
            return self.node.exports.make(found.backing)
        except OSError as error:
            raise Refusal(CUresult.CUDA_ERROR_OUT_OF_MEMORY, f"no file descriptor: {error}") from None

    @entry(1, Needs.INIT)
    def cuMemImportFromShareableHandle(self, osHandle: Any, shHandleType: Any) -> Any:
        _descriptor_only(shHandleType)
        descriptor = address_of(osHandle)
        try:
            backing = self.node.exports.find(descriptor)
        except OSError as error:
            raise invalid(
                f"descriptor {descriptor}: {error}; send it over a Unix socket (SCM_RIGHTS)"
            ) from None
        if backing is None:
            raise invalid(f"descriptor {descriptor} names no memory of this node; pass on the exported one")
        return self._name(backing, imported=True)

    # ----------------------------------------------------------------------------------------- addresses

    @entry(1, Needs.INIT)
    def cuMemAddressReserve(self, size: int, alignment: int, addr: Any, flags: int) -> Any:
        """``addr`` is a hint, which is not taken."""
        no_flags(flags)
        size, alignment = int(size), int(alignment)
        if size <= 0 or size % mmap.PAGESIZE or int(addr) % mmap.PAGESIZE:
            raise invalid(
                f"size and addr must be multiples of {mmap.PAGESIZE}, got {size} and {int(addr):#x}"
            )
        if alignment & (alignment - 1):
            raise invalid(f"alignment must be 0 or a power of two, got {alignment}")
        start = self.process.space.fresh(size, max(alignment, PAGE_BYTES))
        self.process.objects[start] = Reservation(start, size)
        return cuda.CUdeviceptr(start)

    @entry(0, Needs.INIT)
    def cuMemAddressFree(self, ptr: Any, size: int) -> None:
        found = self.process.objects.get(int(ptr))
        if not isinstance(found, Reservation) or found.nbytes != int(size):
            raise invalid(
                f"[{int(ptr):#x}, +{size}) is no reservation; pass cuMemAddressReserve's address and size"
            )
        if found.views:
            still = ", ".join(f"[{view.start:#x}, {view.end:#x})" for view in found.views.values())
            raise invalid(f"{found} still has {still} mapped; unmap it first")
        del self.process.objects[found.start]

    def _reservation(self, start: int, nbytes: int) -> Reservation:
        for thing in self.process.objects.values():
            if isinstance(thing, Reservation) and thing.start <= start and start + nbytes <= thing.end:
                return thing
        raise invalid(f"[{start:#x}, +{nbytes}) is in no reservation; use cuMemAddressReserve")

    def _views(self, start: int, nbytes: int) -> list[View]:
        """What is mapped in a range of one reservation."""
        return self._reservation(start, nbytes).overlapping(start, nbytes)

    # ------------------------------------------------------------------------------------------ mappings

    @entry(0, Needs.INIT)
    def cuMemMap(self, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
        start, size, offset, found = int(ptr), int(size), int(offset), self._handle(handle)
        no_flags(flags)
        multiples(ptr=start, size=size)
        if offset:
            raise invalid(f"offset must be 0, got {offset}")
        if size > found.backing.nbytes:
            raise invalid(f"size must be at most the memory's {found.backing.nbytes} bytes, got {size}")
        home = self._reservation(start, size)
        taken = home.overlapping(start, size)
        if taken:
            raise invalid(
                f"[{start:#x}, +{size}) is mapped already, to {taken[0].handle.backing} at "
                f"{taken[0].start:#x}; unmap it first"
            )
        if isinstance(found.backing, Team):
            self._await_members(found.backing)
        view = home.views[start] = View(self.process, start, size, found)
        view.open()

    def _await_members(self, team: Team) -> None:
        """Block until all devices were added to a multicast object."""
        waited_s, step_s = 0.0, 0.001
        while not team.complete:
            if waited_s >= self.node.host_wait_limit_s:
                there = ", ".join(str(device.ordinal) for device in team.devices) or "none"
                raise Refusal(
                    CUresult.CUDA_ERROR_TIMEOUT,
                    f"{team}: {len(team.devices)} of {team.num_devices} devices were added (device {there}), "
                    f"and the call blocks until all are; the host waited {waited_s:.1f} s, real hardware "
                    "would hang here. Let every rank call cuMulticastAddDevice before any binds or maps",
                )
            self.node.lock.wait(step_s)
            waited_s += step_s
            step_s = min(step_s * 2, 0.05)

    @entry(0, Needs.INIT)
    def cuMemUnmap(self, ptr: Any, size: int) -> None:
        """Does not wait for queued work that uses the range; that work will find nothing there."""
        for view in self._whole(int(ptr), int(size), "cuMemUnmap"):
            view.close()
            del self._reservation(view.start, view.nbytes).views[view.start]
        self.node.exports.reap()

    @entry(0, Needs.INIT)
    def cuMemSetAccess(self, ptr: Any, size: int, desc: Sequence[Any] | None, count: int) -> None:
        views = self._whole(int(ptr), int(size), "cuMemSetAccess")
        if int(count) < 1 or len(desc or ()) < int(count):
            raise invalid(f"count must be 1 to the {len(desc or ())} entries of desc, got {count}")
        wanted = []
        for description in (desc or ())[: int(count)]:
            device, flags = self._at(description.location), int(description.flags)
            if flags not in (0, _READ_WRITE):
                raise unsupported("read-only access is not emulated; use CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
            wanted.append((device.ordinal, bool(flags)))
            for home in (view.handle.backing for view in views if flags):
                if isinstance(home, Physical) and home.device is not device:
                    _check_reach(device, home)
        for view in views:
            for ordinal, may in wanted:
                (view.users.add if may else view.users.discard)(ordinal)
        self.process.space.version += 1

    @entry(1, Needs.INIT)
    def cuMemGetAccess(self, location: Any, ptr: Any) -> int:
        if location is None:
            raise invalid("location is None")
        ordinal, views = self._at(location).ordinal, self._views(int(ptr), 1)
        if not views:
            raise invalid(f"{int(ptr):#x} is not mapped; map it with cuMemMap first")
        return _READ_WRITE if ordinal in views[0].users else 0

    def _whole(self, start: int, nbytes: int, call: str) -> list[View]:
        """The mappings that fill a range without gaps; none may reach beyond it."""
        multiples(ptr=start, size=nbytes)
        views = self._views(start, nbytes)
        for view in views:
            if view.start < start or view.end > start + nbytes:
                raise invalid(
                    f"[{start:#x}, +{nbytes}) is part of the mapping [{view.start:#x}, {view.end:#x}); "
                    f"{call} takes whole mappings"
                )
        if sum(view.nbytes for view in views) != nbytes:
            raise invalid(f"[{start:#x}, +{nbytes}) is not mapped throughout; map it with cuMemMap first")
        return views


def _check_reach(device: DeviceState, memory: Physical) -> None:
    """Refuse access of a device to memory of another that is no peer. The code is not documented."""
    if not can_access(device, memory.device):
        raise Refusal(
            CUresult.CUDA_ERROR_INVALID_DEVICE,
            f"device {device.ordinal} ({device.profile.device.name}) cannot access {memory}; ask "
            "cuDeviceCanAccessPeer first",
        )


def no_flags(flags: int) -> None:
    if int(flags):
        raise invalid(f"flags must be 0, got {flags}")


def multiples(**values: int) -> None:
    for name, value in values.items():
        if int(value) % GRANULARITY_BYTES or (name == "size" and int(value) <= 0):
            raise invalid(
                f"{name} must be a multiple of {GRANULARITY_BYTES} (cuMemGetAllocationGranularity), "
                f"got {int(value):#x}"
            )


def _descriptor_only(kind: Any) -> None:
    if int(kind) != int(_DESCRIPTOR):
        raise unsupported(f"{kind.name}: only CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR is emulated")
