"""Whose memory a global address means: the device's own, another's, or the host's.

What a kernel may name depends on its process, what it may touch on peer access and mappings
(:meth:`~smfree.emulator.address_space.AddressSpace.reach`). The lanes of one access may go to several places;
each place gets its part. Where nothing but the device's own memory exists, all of this is one test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.address_space import PAGE_BYTES
from smfree.emulator.allocations import DEVICE_SPACE_BYTES, Allocation
from smfree.emulator.bytespace import fault, shown
from smfree.emulator.errors import EmulationError
from smfree.emulator.host_memory import HostMemory
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.movers import FarMemory

if TYPE_CHECKING:
    from smfree.emulator.address_space import Located, Mapping
    from smfree.emulator.exec.launch import Launch
    from smfree.emulator.node import DeviceState, Node

_KEPT = 16
_ALL = slice(None)


@dataclass(slots=True, eq=False)
class Region:
    """[start, end) of the process is [start + shift, ...) of ``memory``. ``device`` None: the host's."""

    start: int
    end: int
    memory: GlobalMemory | HostMemory
    shift: int
    device: DeviceState | None
    allocation: Allocation | None = None
    mapping: Mapping | None = None
    nowhere: bool = False

    def holds(self, low: int, high: int) -> bool:
        """Whether [low, high) lies inside."""
        return self.start <= low and high <= self.end

    def __str__(self) -> str:
        return self.memory.name if self.allocation is None else f"{self.allocation} of {self.memory.name}"


@dataclass(slots=True)
class Part:
    """The lanes of an access (positions, or a slice for all) that go to one region, and their addresses
    there."""

    index: Any
    region: Region
    addr: Any

    @property
    def memory(self) -> GlobalMemory | HostMemory:
        return self.region.memory

    @property
    def device(self) -> DeviceState | None:
        return self.region.device

    @property
    def far_memory(self) -> FarMemory:
        """The memory as the global side of an asynchronous copy."""
        if isinstance(self.region.memory, GlobalMemory):
            return self.region.memory
        known = self.region.memory.range_of(self.region.start + self.region.shift)
        assert known is not None, "it was found there"
        return known.window

    @contextmanager
    def positions(self) -> Iterator[None]:
        """A finding about a lane of the part carries its position in the whole access."""
        try:
            yield
        except EmulationError as error:
            if error.index is not None and not isinstance(self.index, slice):
                error.index = int(self.index[error.index])
            raise


class Router:
    """Routes the global accesses of one launch.

    ``node`` is None where the launch has no context (a kernel run by itself): then there is the device's own
    memory and the host's."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.device = launch.device
        self.own = launch.device.memory
        self.host = self.own.host
        self.context = launch.context
        self.node: Node | None = None if self.context is None else self.context.process.node
        self._space = None if self.context is None else self.context.process.space
        self._window = Region(self.own.base, self.own.base + DEVICE_SPACE_BYTES, self.own, 0, launch.device)
        self._regions: list[Region] = []
        self._version = -1

    @property
    def alone(self) -> bool:
        """Nothing exists but the device's own memory, all of this process."""
        if self.host.ranges:
            return False
        node = self.node
        return node is None or (len(node.devices) == 1 and len(node.processes) < 2 and not self._mapped)

    @property
    def _mapped(self) -> bool:
        return self._space is not None and next(iter(self._space), None) is not None

    @property
    def several(self) -> bool:
        """Whether kernels of several devices may meet in one memory."""
        return self.node is not None and len(self.node.devices) > 1

    @property
    def others(self) -> bool:
        """Whether other GPUs or processes share the machine."""
        return self.node is not None and (len(self.node.devices) > 1 or len(self.node.processes) > 1)

    def local(self, addr: Any, nbytes: int) -> bool:
        """Whether the access stays in the device's own memory, at these very addresses."""
        if self.alone:
            return True
        if self.node is not None and len(self.node.processes) > 1:
            return False  # the device's window holds memory of several processes
        return self._window.holds(int(addr.min()), int(addr.max()) + nbytes)

    def all_own(self, addr: Any) -> Part:
        """The whole access, where it is :meth:`local`."""
        return Part(_ALL, self._window, addr)

    def parts(self, addr: Any, nbytes: int, what: str) -> list[Part]:
        """The places that lanes ``addr`` int64[n] access, ``nbytes`` each. Raises MemoryFault with the lane
        where the process may not name an address or the device may not touch it.

        What lies nowhere belongs to the own memory, whose bounds it breaks.
        """
        low, high = int(addr.min()), int(addr.max()) + nbytes
        first = self._find(int(addr[0]), nbytes, what, 0)
        self._check_nearness(first, nbytes, what, 0)
        if first.holds(low, high):
            return [Part(_ALL, first, addr + first.shift if first.shift else addr)]
        return self._split(addr, np.full(len(addr), nbytes), what, first)

    def region_of(self, address: int, what: str) -> Region:
        """Where one byte is."""
        return self._window if self.alone else self._find(address, 1, what, 0)

    def ranges(self, addr: Any, sizes: Any, what: str) -> list[Part]:
        """:meth:`parts` of n ranges of different sizes."""
        return self._split(addr, sizes, what)

    def _split(self, addr: Any, sizes: Any, what: str, first: Region | None = None) -> list[Part]:
        """The ranges by region; where the first lane's lies in ``first``, none of them leaves its own."""
        found: list[Part] = []
        left = np.arange(len(addr))
        while len(left):
            at = int(left[0])
            nbytes = int(sizes[at])
            region = self._find(int(addr[at]), nbytes, what, at)
            if first is not None and region.nowhere and (first.device is None or first.mapping is not None):
                whole = first.mapping or self.host.range_of(first.start)
                raise fault(
                    "memory.bounds",
                    at,
                    f"{what} of {nbytes} bytes at {shown(int(addr[at]))} is outside {whole}, where other "
                    "threads' go",
                    "check index and size",
                )
            self._check_nearness(region, nbytes, what, at)
            inside = (addr[left] >= region.start) & (addr[left] + sizes[left] <= region.end)
            inside[0] = True
            mine, left = left[inside], left[~inside]
            index = _ALL if len(mine) == len(addr) else mine
            found.append(Part(index, region, addr[mine] + region.shift))
        return found

    def _check_nearness(self, region: Region, nbytes: int, what: str, index: int) -> None:
        """Raise MemoryFault for what is nowhere, but shortly behind a mapping: that is what was meant."""
        near = self._space.before(region.start) if region.nowhere and self._space is not None else None
        if near is not None and region.start < near.end + PAGE_BYTES:
            raise fault(
                "memory.bounds",
                index,
                f"{what} of {nbytes} bytes at {shown(region.start)} is outside {near}: "
                f"{region.start - near.end} bytes past its end",
                "check index and size",
            )

    def peer_of(self, region: Region) -> DeviceState | None:
        """The other device whose memory it is, if it is one."""
        return region.device if region.device is not self.device else None

    def _find(self, address: int, nbytes: int, what: str, index: int) -> Region:
        space = self._space
        if space is not None and self._version != space.version:
            self._regions.clear()
            self._version = space.version
        for region in self._regions:
            if region.holds(address, address + nbytes) and self._still(region):
                return region
        region = self._ask(address, nbytes, what, index)
        if region is not self._window and not region.nowhere:
            if len(self._regions) >= _KEPT:
                self._regions.pop()
            self._regions.insert(0, region)
        return region

    def _still(self, region: Region) -> bool:
        """Whether what was found before is still so: peer access, the allocation."""
        if region.allocation is not None and region.allocation.freed:
            return False
        if region.device is None:
            return region.start in self.host.ranges
        if region.mapping is not None and region.mapping.users is not None:
            return self.device.ordinal in region.mapping.users
        return region.device is self.device or (
            self.context is not None and region.device.ordinal in self.context.peers
        )

    def _ask(self, address: int, nbytes: int, what: str, index: int) -> Region:
        own_window = self._window.start <= address < self._window.end
        if own_window and (self.node is None or len(self.node.processes) < 2):
            return self._window
        process = None
        if self._space is not None and self.context is not None:
            found = self._space.reach(address, nbytes, what, self.context, index)
            if found is not None:
                return self._region(address, found)
            process = self._space.process
        known = self.host.range_of(address)
        if known is not None and known.process in (None, process):
            return Region(known.address, known.end, self.host, 0, None)
        return Region(address, address + nbytes, self.own, 0, self.device, nowhere=True)

    def _region(self, address: int, found: Located) -> Region:
        shift = found.address - address
        if isinstance(found.memory, HostMemory):
            known = found.memory.range_of(found.address)
            assert known is not None, "it was found there"
            return Region(known.address - shift, known.end - shift, found.memory, shift, None)
        home = found.memory.allocation_of(found.address)
        assert home is not None, "it was found there"
        start, end = home.start - shift, home.end - shift
        if found.mapping is not None:
            start, end = max(start, found.mapping.start), min(end, found.mapping.end)
        return Region(start, end, found.memory, shift, found.device, home, found.mapping)
