"""Virtual addresses of one process: which memory an address means, and which devices may use it.

An address that cuMemAlloc gave lies in its device's window. Only the process that owns the allocation may
name it, and only a device with peer access may use another's. Everything else is a :class:`Mapping`: memory
of another process opened through IPC, virtual memory management, multicast objects. Page-locked host memory
is usable by all devices.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from smfree.emulator.allocations import DEVICE_SPACE_BYTES
from smfree.emulator.bytespace import fault, shown

if TYPE_CHECKING:
    from smfree.emulator.host_memory import HostMemory
    from smfree.emulator.memory import GlobalMemory
    from smfree.emulator.node import DeviceState
    from smfree.emulator.process import Context, Process

MAPPED_BASE = 0x4000_0000_0000
"""Mappings lie from here on, far above every device's window."""
MAPPED_BYTES = 1 << 44
_PROCESS_BYTES = 1 << 40
PAGE_BYTES = 1 << 21
"""Pages of device memory, 2 MiB: the granularity of virtual memory management."""


class MappingKind(StrEnum):
    """How a range came to be mapped."""

    IPC = "memory of another process"
    VMM = "mapped memory"
    MULTICAST = "multicast memory"


@dataclass(slots=True, eq=False)
class Mapping:
    """[start, start + nbytes) of a process means [backing, ...) of ``memory``, which is ``device``'s.

    ``users``: ordinals of the devices whose kernels may use it; None: as device memory, by peer access.
    A MULTICAST mapping has no memory of its own: ``members`` are (memory, backing address, device) per bound
    device, and only ``multimem`` instructions may use it.
    """

    start: int
    nbytes: int
    kind: MappingKind
    memory: GlobalMemory | None
    backing: int
    device: DeviceState | None
    users: set[int] | None = None
    label: str = ""
    members: list[tuple[GlobalMemory, int, DeviceState]] = field(default_factory=list)
    unbound: tuple[int, ...] = ()
    """Ordinals of a multicast object's devices that have bound nothing here."""

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def __str__(self) -> str:
        name = f" '{self.label}'" if self.label else ""
        return f"{self.kind}{name} [{self.start:#x}, {self.end:#x}) of {self.nbytes} bytes"


class Located(NamedTuple):
    """Where a range really is: ``address`` in ``memory``, on ``device`` (None: the host)."""

    memory: GlobalMemory | HostMemory
    address: int
    device: DeviceState | None
    mapping: Mapping | None = None


class AddressSpace:
    """The mappings of one process. ``version`` grows with every change, so that caches know."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.version = 0
        self._starts: list[int] = []
        self._by_start: dict[int, Mapping] = {}
        share = process.number % (MAPPED_BYTES // _PROCESS_BYTES)
        self._fresh = MAPPED_BASE + share * _PROCESS_BYTES  # so that no other process's pointer fits

    def __iter__(self) -> Iterator[Mapping]:
        return iter(self._by_start.values())

    def fresh(self, nbytes: int, align: int = PAGE_BYTES) -> int:
        """The start of [start, + nbytes) that this process never had; a page that stays empty follows."""
        start = -(-self._fresh // align) * align
        self._fresh = start + -(-nbytes // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES
        return start

    def map(self, mapping: Mapping) -> Mapping:
        """Take in a mapping; it must not overlap another one."""
        before = self.find(mapping.start)
        at = bisect_right(self._starts, mapping.start)
        after = self._by_start[self._starts[at]] if at < len(self._starts) else None
        other = before or (after if after is not None and after.start < mapping.end else None)
        if other is not None:
            raise ValueError(f"{mapping} overlaps {other}")
        insort(self._starts, mapping.start)
        self._by_start[mapping.start] = mapping
        self.version += 1
        return mapping

    def unmap(self, start: int) -> Mapping:
        """Forget the mapping that begins at ``start``. Raises KeyError."""
        mapping = self._by_start.pop(start)
        self._starts.remove(start)
        self.version += 1
        return mapping

    def find(self, address: int) -> Mapping | None:
        """The mapping that contains ``address``."""
        found = self.before(address)
        return found if found is not None and address < found.end else None

    def before(self, address: int) -> Mapping | None:
        """The last mapping that starts at ``address`` or below."""
        i = bisect_right(self._starts, address)
        return self._by_start[self._starts[i - 1]] if i else None

    def window(self, address: int) -> DeviceState | None:
        """The device in whose window an address lies."""
        for device in self.process.node.devices:
            if 0 <= address - device.memory.base < DEVICE_SPACE_BYTES:
                return device
        return None

    def locate(self, address: int, nbytes: int, what: str, index: int | None = None) -> Located | None:
        """Where the process's [address, address + nbytes) is; None when it is neither on a device nor
        page-locked. A range that leaves its allocation or mapping, or belongs to another process, is a
        MemoryFault that says ``what``."""
        size = max(1, nbytes)
        device = self.window(address)
        if device is not None:
            found = device.memory.check_range(address, size, what, index)
            if found.owner is not None and found.owner is not self.process:
                raise fault(
                    "memory.foreign",
                    index,
                    f"{what}: {shown(address)} is in {found} of {found.owner}, which {self.process} has not "
                    "opened",
                    "exchange an IPC handle and open it; a pointer means nothing in another process",
                )
            return Located(device.memory, address, device)
        mapping = self.find(address)
        if mapping is not None:
            if address + size > mapping.end:
                raise fault(
                    "memory.bounds", index, f"{what}: {size} bytes at {shown(address)} leave {mapping}",
                    "check the size",
                )  # fmt: skip
            if mapping.memory is None:
                raise fault(
                    "memory.multicast", index, f"{what}: {shown(address)} is in {mapping}",
                    "only multimem instructions may use a multicast address; use the device's own mapping",
                )  # fmt: skip
            place = mapping.backing + address - mapping.start
            mapping.memory.check_range(place, size, what, index)
            return Located(mapping.memory, place, mapping.device, mapping)
        host = self.process.node.host
        known = host.range_of(address, size)
        if known is not None and known.process in (None, self.process):
            return Located(host, address, None)
        return None

    def _pooled(self, found: Located) -> bool:
        """Whether located device memory is of cuMemAllocAsync: peers get access to a pool, not to a context
        (CUDA programming guide, "Device Accessibility for Multi-GPU Support")."""
        assert found.device is not None
        home = found.device.memory.allocation_of(found.address)
        return home is not None and self.process.contexts[found.device.ordinal].pooled(home.start)

    def reach(
        self, address: int, nbytes: int, what: str, by: Context, index: int | None = None
    ) -> Located | None:
        """:meth:`locate` for an access of a kernel in context ``by``: the device must be allowed to."""
        found = self.locate(address, nbytes, what, index)
        if found is None or found.device is None:
            return found
        users = found.mapping.users if found.mapping is not None else None
        mine, owner = by.device.ordinal, found.device.ordinal
        if users is not None:
            if mine not in users:
                raise fault(
                    "memory.no_access", index,
                    f"{what}: device {mine} has no access to {found.mapping} on device {owner}",
                    f"open the handle while the context of device {mine} is current"
                    if found.mapping is not None and found.mapping.kind is MappingKind.IPC
                    else "give it access with cuMemSetAccess",
                )  # fmt: skip
        elif found.device is not by.device and self._pooled(found):
            raise fault(
                "memory.no_access",
                index,
                f"{what}: device {mine} uses {shown(address)}, stream-ordered memory of device {owner} "
                f"({found.device.memory.allocation_of(found.address)}): peer access does not extend to it",
                "allocate it with cuMemAlloc or cuMemCreate (cuMemPoolSetAccess is not emulated)",
            )
        elif found.device is not by.device and owner not in by.peers:
            raise fault(
                "memory.peer_access",
                index,
                f"{what}: device {mine} uses {shown(address)}, memory of device {owner} "
                f"({found.device.memory.allocation_of(found.address)}), but peer access from device {mine} "
                f"to device {owner} is not enabled",
                f"call cuCtxEnablePeerAccess with device {owner}'s context while device {mine}'s is current "
                "(it is one-directional)",
            )
        return found
