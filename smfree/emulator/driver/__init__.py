"""The stand-in for ``cuda.bindings.driver``: the same calls, on an emulated node.

``Driver(node)`` takes the place of the module: functions have the real names, parameters and return tuples;
enums, structs and constants are the real ones. A call that the emulator lacks raises NotEmulated; one that
fails leaves its reason in :meth:`Driver.report`.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from smfree.emulator.driver.device import DeviceCalls
from smfree.emulator.driver.graphs import GraphCalls
from smfree.emulator.driver.ipc import IpcCalls
from smfree.emulator.driver.launch import LaunchCalls
from smfree.emulator.driver.libraries import LibraryCalls
from smfree.emulator.driver.multicast import MulticastCalls
from smfree.emulator.driver.tensormaps import TensorMapCalls
from smfree.emulator.links import NUMA_NODES

__all__ = ["Driver", "NotEmulated"]


class NotEmulated(NotImplementedError, AttributeError):
    """A driver function that exists, but not in the emulator. ``hasattr`` answers False for it."""


class Driver(DeviceCalls, LaunchCalls, LibraryCalls, IpcCalls, GraphCalls, TensorMapCalls, MulticastCalls):
    """The calls of one process on a node; ``label`` names it in reports."""

    def host_seconds(self) -> float:
        """The modelled clock of this process's host; it stands still under any schedule but ``timed``."""
        return self.process.host_time_s

    def report(self) -> str:
        """Full text of the latest error: rule, value, remedy, and which launch it came from."""
        return self.process.report

    def end(self) -> None:
        """End the process: its work is dropped and all it had on the node is freed. Twice is fine."""
        self.node.end(self.process)

    def place_host_memory(self, address: int, nbytes: int, numa_node: int | None) -> None:
        """Say on which NUMA node of the emulated machine host memory lies (None: no longer there).

        No driver call: on a real machine the operating system decides it. Raises ValueError.
        """
        if numa_node is not None and not 0 <= numa_node < NUMA_NODES:
            raise ValueError(
                f"an emulated machine has the NUMA nodes 0 to {NUMA_NODES - 1} (got {numa_node})"
            )
        with self.node.lock:
            self.node.host.place(self.process, address, nbytes, numa_node)

    def context_failed(self, ctx: Any) -> bool:
        """Whether a kernel's fault has killed the context, so that every call in it is refused."""
        return self._context_of(ctx).fault is not None

    def __getattr__(self, name: str) -> Any:
        """Types and constants of the real module; its functions that are not emulated raise NotEmulated."""
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(cuda, name)
        if name.startswith("cu") and callable(found) and not isinstance(found, type):
            raise NotEmulated(f"{name} is not emulated; smfree.emulator.driver lists what is")
        return found
