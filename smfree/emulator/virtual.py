"""What virtual memory management deals in: physical memory, address reservations, multicast teams.

Backings (memory of a device, a team) belong to the node and are shared by processes. References keep one
alive: handles, mappings, bindings and exported file descriptors. Reservations and handles are a process's.
"""

from __future__ import annotations

import itertools
import os
import select
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smfree.emulator.address_space import PAGE_BYTES, Mapping, MappingKind

if TYPE_CHECKING:
    from smfree.emulator.node import DeviceState
    from smfree.emulator.process import Process

GRANULARITY_BYTES = PAGE_BYTES
"""Of sizes, offsets and addresses, of device memory and of multicast objects alike; minimum and recommended
(2 MiB is what the driver reports for device memory; for multicast objects assumed)."""


@dataclass(slots=True, eq=False)
class Backing:
    """What a handle names. ``shareable``: it may be exported as a file descriptor."""

    nbytes: int
    shareable: bool
    references: int = 0

    def retain(self) -> None:
        self.references += 1

    def release(self) -> None:
        """One reference less; with the last one it is gone."""
        self.references -= 1
        if self.references == 0:
            self.free()

    def free(self) -> None:
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Physical(Backing):
    """Memory of one device without an address of any process."""

    device: DeviceState = field(kw_only=True)
    address: int = field(kw_only=True)
    label: str = field(kw_only=True)

    def free(self) -> None:
        self.device.memory.free(self.address)

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of device {self.device.ordinal} ({self.label})"


@dataclass(slots=True, eq=False)
class Binding:
    """[offset, offset + nbytes) of a team means, on one device, ``memory`` from ``memory_offset`` on."""

    offset: int
    nbytes: int
    memory: Physical
    memory_offset: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(slots=True, eq=False)
class Team(Backing):
    """A multicast object: ``num_devices`` devices, and what each has bound where."""

    num_devices: int = field(kw_only=True)
    label: str = field(kw_only=True)
    devices: list[DeviceState] = field(default_factory=list)
    bindings: list[Binding] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    """Where it is mapped, in any process."""

    @property
    def complete(self) -> bool:
        """Whether all devices were added."""
        return len(self.devices) == self.num_devices

    def bind(self, binding: Binding) -> None:
        binding.memory.retain()
        self.bindings.append(binding)
        self._changed()

    def unbind(self, binding: Binding) -> None:
        self.bindings.remove(binding)
        binding.memory.release()
        self._changed()

    def _changed(self) -> None:
        for view in self.views:
            view.refresh()

    def segments(self, nbytes: int) -> Iterator[tuple[int, int, list[Binding]]]:
        """[lo, hi) of the first ``nbytes``, split where bindings begin or end, with those that cover it."""
        cuts = {0, nbytes, *(b.offset for b in self.bindings), *(b.end for b in self.bindings)}
        edges = sorted(cut for cut in cuts if cut <= nbytes)
        for lo, hi in itertools.pairwise(edges):
            yield lo, hi, [b for b in self.bindings if b.offset <= lo and hi <= b.end]

    def unbound(self, bindings: list[Binding]) -> tuple[int, ...]:
        """Ordinals of the devices that none of ``bindings`` is of."""
        bound = {binding.memory.device.ordinal for binding in bindings}
        return tuple(sorted({device.ordinal for device in self.devices} - bound))

    def free(self) -> None:
        for binding in list(self.bindings):
            self.unbind(binding)

    def __str__(self) -> str:
        return f"multicast object of {self.nbytes} bytes per device ({self.label})"


@dataclass(slots=True, eq=False)
class Handle:
    """A process's handle; ``count`` releases end it. Mappings made with it outlive it."""

    value: int
    backing: Any
    imported: bool = False
    count: int = 1

    def abandon(self) -> None:
        """The process is gone."""
        if self.count:
            self.count = 0
            self.backing.release()


@dataclass(slots=True, eq=False)
class View:
    """One mapped range of a process. ``users``: ordinals of the devices that may use it."""

    process: Process
    start: int
    nbytes: int
    handle: Handle
    users: set[int] = field(default_factory=set)
    parts: list[Mapping] = field(default_factory=list)
    """Its mappings in the address space: one, or one per stretch of a team that the same devices bound."""

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def open(self) -> None:
        """Enter the address space."""
        backing = self.handle.backing
        backing.retain()
        if isinstance(backing, Team):
            backing.views.append(self)
        self.refresh()

    def refresh(self) -> None:
        """Bring the address space up to date with the backing."""
        self._leave()
        backing, space = self.handle.backing, self.process.space
        if isinstance(backing, Physical):
            memory, label = backing.device.memory, backing.label
            self.parts = [
                Mapping(
                    self.start, self.nbytes, MappingKind.VMM, memory, backing.address, backing.device,
                    self.users, label,
                )
            ]  # fmt: skip
        else:
            self.parts = [
                Mapping(
                    self.start + lo, hi - lo, MappingKind.MULTICAST, None, 0, None, self.users,
                    backing.label, members=[_member(binding, lo) for binding in bound],
                    unbound=backing.unbound(bound),
                )
                for lo, hi, bound in backing.segments(self.nbytes)
            ]  # fmt: skip
        for part in self.parts:
            space.map(part)

    def close(self) -> None:
        """Leave the address space and let go of the backing."""
        self._leave()
        backing = self.handle.backing
        if isinstance(backing, Team):
            backing.views.remove(self)
        backing.release()

    def _leave(self) -> None:
        for part in self.parts:
            self.process.space.unmap(part.start)
        self.parts = []


def _member(binding: Binding, offset: int) -> tuple[Any, int, Any]:
    memory = binding.memory
    address = memory.address + binding.memory_offset + offset - binding.offset
    return memory.device.memory, address, memory.device


@dataclass(slots=True, eq=False)
class Reservation:
    """A range of addresses of a process, with what is mapped in it by start address."""

    start: int
    nbytes: int
    views: dict[int, View] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    def overlapping(self, start: int, nbytes: int) -> list[View]:
        """What is mapped in [start, start + nbytes), in order."""
        found = [view for view in self.views.values() if view.start < start + nbytes and start < view.end]
        return sorted(found, key=lambda view: view.start)

    def abandon(self) -> None:
        """The process is gone."""
        for view in self.views.values():
            view.close()
        self.views.clear()

    def __str__(self) -> str:
        return f"reservation [{self.start:#x}, {self.end:#x})"


class Exports:
    """The file descriptors that name backings, in whatever process they are.

    A descriptor is the reading end of a pipe: its inode says which export it is, and the node, which has the
    other end, sees when the last copy of it is closed. Nothing can be read from it.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], tuple[int, Backing]] = {}
        weakref.finalize(self, _close_all, self._open)

    def make(self, backing: Backing) -> int:
        """A new descriptor; it is the caller's to close, and keeps the backing alive until then."""
        self.reap()
        descriptor, ours = os.pipe()
        os.set_blocking(descriptor, False)
        backing.retain()
        self._open[_identity(descriptor)] = ours, backing
        return descriptor

    def find(self, descriptor: int) -> Backing | None:
        """What a descriptor names; None for any other. Raises OSError when it is not open."""
        found = self._open.get(_identity(descriptor))
        return None if found is None else found[1]

    def reap(self) -> None:
        """Let go of what no descriptor names any more."""
        if not self._open:
            return
        poll = select.poll()
        for ours, _ in self._open.values():
            poll.register(ours, 0)
        closed = {ours for ours, _ in poll.poll(0)}
        for identity, (ours, backing) in list(self._open.items()):
            if ours in closed:
                del self._open[identity]
                os.close(ours)
                backing.release()


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _close_all(exports: dict[tuple[int, int], tuple[int, Backing]]) -> None:
    for ours, _ in exports.values():
        os.close(ours)
