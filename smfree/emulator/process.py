"""What one operating-system process sees of a node: contexts, handles, an address space, a host clock.

Several processes share a node's devices as they share real ones: each has its own primary context per device,
its own handles and addresses; a fault kills one context, not the device. A Driver stands for one process.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smfree.emulator.address_space import AddressSpace

if TYPE_CHECKING:
    from smfree.emulator.node import DeviceState, Fault, Node
    from smfree.emulator.streams import Stream


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
    allocations: set[int] = field(default_factory=set)
    """Addresses from cuMemAlloc and cuMemAllocAsync that are not freed."""
    peers: set[int] = field(default_factory=set)
    """Ordinals of the devices whose memory this context's kernels may use (cuCtxEnablePeerAccess)."""

    @property
    def ordinal(self) -> int:
        return self.device.ordinal

    @property
    def active(self) -> bool:
        """Whether the primary context exists."""
        return self.retained > 0

    def __str__(self) -> str:
        return f"device {self.ordinal} of {self.process}"


class Process:
    """One process attached to a node. ``label`` names it in reports ("rank 3 (pid 4711)")."""

    def __init__(self, node: Node, number: int, label: str = "") -> None:
        self.node = node
        self.number = number
        self.label = label or f"process {number}"
        self.alive = True
        self.initialised = False
        self.report = ""
        """Full text of the latest error or refusal."""
        self.host_time_s = 0.0
        """The modelled clock of this process's host thread."""
        self.threads = threading.local()
        """Per host thread: ``contexts``, the stack of current contexts."""
        self.objects: dict[int, Any] = {}
        """Everything a handle of this process can name."""
        self.contexts = {device.ordinal: Context(self, device) for device in node.devices}
        self.space = AddressSpace(self)

    def __str__(self) -> str:
        return self.label
