"""What one operating-system process sees of a node: contexts, handles, an address space, a host clock.

Several processes share a node's devices as they share real ones: each has its own primary context per device,
its own handles and addresses; a fault kills one context, not the device. A Driver stands for one process.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from smfree.emulator.address_space import AddressSpace
from smfree.emulator.streams import LEGACY_STREAM, NON_BLOCKING, Event, Stream

if TYPE_CHECKING:
    from smfree.emulator.graphs import Capture
    from smfree.emulator.interprocess import Export, Import
    from smfree.emulator.node import DeviceState, Fault, Node

_FIRST_CONTEXT = 0x5AFC_0000_0000


class Count(NamedTuple):
    """What a process has on its node: what a leak makes grow."""

    contexts: int
    allocations: int
    mappings: int
    handles: int
    host_ranges: int
    streams: int
    queued: int


class AllocationKind(StrEnum):
    """What made an allocation; it decides how it may be freed and whether it may be exported."""

    DEVICE = "cuMemAlloc"
    STREAM_ORDERED = "cuMemAllocAsync"
    VARIABLE = "a module's variable"


@dataclass(slots=True, eq=False)
class Context:
    """The primary context of one process on one device."""

    process: Process
    device: DeviceState
    retained: int = 0
    flags: int = 0
    fault: Fault | None = None
    default_stream: Stream | None = None
    per_thread_streams: dict[int, Stream] = field(default_factory=dict)
    modules: dict[int, Any] = field(default_factory=dict)
    """Loaded modules by handle."""
    allocations: dict[int, AllocationKind] = field(default_factory=dict)
    """Addresses of the memory that this context holds."""
    peers: set[int] = field(default_factory=set)
    """Ordinals of the devices whose memory this context's kernels may use (cuCtxEnablePeerAccess)."""
    launches: int = 0
    """Kernels that were launched in it so far."""
    exports: dict[int, Export] = field(default_factory=dict)
    """Allocations that other processes may open, by address."""
    imports: dict[int, Import] = field(default_factory=dict)
    """Memory of other processes that this context has open, by address."""

    @property
    def ordinal(self) -> int:
        return self.device.ordinal

    @property
    def active(self) -> bool:
        """Whether the primary context exists."""
        return self.retained > 0

    @property
    def handle(self) -> int:
        """The value of its CUcontext, the same in every process."""
        return _FIRST_CONTEXT + 0x1000 * (self.ordinal + 1)

    def __str__(self) -> str:
        return f"device {self.ordinal} of {self.process}"

    def allocate(self, nbytes: int, align: int, label: str, kind: AllocationKind) -> int:
        """Address of new memory of the device. Raises MemoryError."""
        address = self.device.memory.alloc(nbytes, align, label, owner=self.process)
        self.allocations[address] = kind
        return address

    def pooled(self, address: int) -> bool:
        """Whether the allocation there is stream-ordered."""
        return self.allocations.get(address) is AllocationKind.STREAM_ORDERED

    def free(self, address: int) -> None:
        """Give memory back; what others have open stays until they close it. Raises MemoryFault."""
        export = self.exports.pop(address, None)
        self.allocations.pop(address, None)
        if export is not None:
            del self.process.node.ipc_handles[export.key]
        if export is None or not export.imports:
            self.device.memory.free(address)

    def new_stream(self, flags: int = 0, priority: int = 0, *, legacy: bool = False) -> Stream:
        """A stream; only the legacy default stream has no handle of its own."""
        stream = Stream(0, self, flags, priority, legacy)
        stream.handle = LEGACY_STREAM if legacy else self.process.name(stream)
        self.process.node.timeline.add(stream)
        return stream

    def lane(self, stream: Stream, way: Any) -> Stream:
        """Where copies of ``stream``'s batches queue that take one way."""
        found = stream.lanes.get(way)
        if found is None:
            found = stream.lanes[way] = Stream(0, self, NON_BLOCKING, stream.priority)
            found.title = f"a batch of {stream.name}"
            self.process.node.timeline.add(found)
        return found

    def end(self) -> None:
        """Drop queued work, streams, events, modules, handles and memory; a fault stays."""
        timeline = self.process.node.timeline
        timeline.drop(self, self.process.host_time_s)
        for stream in timeline.streams_of(self):
            timeline.remove(stream)
        self.default_stream = None
        self.per_thread_streams.clear()
        self.modules.clear()
        self.peers.clear()
        for other in self.process.contexts.values():
            other.peers.discard(self.ordinal)
        for opened in list(self.imports.values()):
            opened.close()
        for address in list(self.allocations):
            self.free(address)
        self.process.captures = [
            capture for capture in self.process.captures if self not in capture.graph.contexts
        ]
        self.process.forget(self)


class Process:
    """One process attached to a node. ``label`` names it in reports ("rank 3 (pid 4711)")."""

    def __init__(self, node: Node, number: int, label: str = "") -> None:
        self.node = node
        self.number = number
        self.label = label or f"process {number}"
        self.alive = True
        self.initialised = False
        self.in_host_function = False
        """Whether a function of cuLaunchHostFunc is running; the others' calls wait for the node's lock."""
        self.report = ""
        """Full text of the latest error or refusal."""
        self.host_time_s = 0.0
        """The modelled clock of this process's host thread."""
        self.host_threads = 0
        """How many host threads a served program has, as its latest call said."""
        self.threads = threading.local()
        """Per host thread: ``contexts``, the stack of current ones; ``caller``, the line of a served call."""
        self.objects: dict[int, Any] = {}
        """Everything a handle of this process can name."""
        self.described: dict[str, tuple[int, int]] = {}
        """Registers and local bytes by function name, for modules loaded later."""
        self.contexts = {device.ordinal: Context(self, device) for device in node.devices}
        self.space = AddressSpace(self)
        self.captures: list[Capture] = []
        """Stream captures that have not ended."""

    def __str__(self) -> str:
        return self.label

    @property
    def context_stack(self) -> list[Context]:
        """The calling host thread's stack of current contexts."""
        stack: list[Context] | None = getattr(self.threads, "contexts", None)
        if stack is None:
            stack = self.threads.contexts = []
        return stack

    def name(self, thing: Any) -> int:
        """A new handle for ``thing``."""
        handle = self.node.new_handle()
        self.objects[handle] = thing
        return handle

    def forget(self, context: Context) -> None:
        """Drop every handle of a context that ended."""
        for handle, thing in list(self.objects.items()):
            if getattr(thing, "context", None) is context:
                del self.objects[handle]
                if isinstance(thing, Event):
                    self.destroy(thing)

    def destroy(self, event: Event) -> None:
        """An event is gone, for the processes that opened it, too."""
        event.destroyed = True
        if event.key:
            del self.node.ipc_handles[event.key]

    def direct(self, device: DeviceState, other: DeviceState) -> bool:
        """Whether copies between two devices take the link: peer access is enabled in either direction.
        Otherwise they are staged through the host (CUDA programming guide, peer-to-peer memory copy)."""
        first, second = self.contexts[device.ordinal], self.contexts[other.ordinal]
        return device is other or other.ordinal in first.peers or device.ordinal in second.peers

    def end(self) -> None:
        """The process is gone: its running work is dropped, everything it had is freed. Twice is fine.

        Handles to things with a method ``abandon()`` (memory that outlives contexts, say) get it called.
        """
        self.alive = False
        for context in self.contexts.values():
            context.end()
            context.retained = 0
        for thing in list(self.objects.values()):
            if hasattr(thing, "abandon"):
                thing.abandon()
        self.objects.clear()
        for mapping in list(self.space):
            self.space.unmap(mapping.start)
        self.node.host.drop_all_of(self)
