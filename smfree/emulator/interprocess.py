"""Memory that one process exports and another opens (CUDA IPC).

A handle is 64 random bytes: a key of ``Node.ipc_handles`` and nothing else, so one of another node, of freed
memory or of a process that has ended opens nothing. Events are exported under such keys, too.

What is open when the exporting process or its context ends stays until the last import is closed: the
driver's documentation calls only an early cuMemFree undefined, and GPUs keep such memory
(kvcache-ai/Mooncake#761, ai-dynamo/nixl#1066).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from smfree.emulator.address_space import Mapping, MappingKind

if TYPE_CHECKING:
    from smfree.emulator.allocations import Allocation
    from smfree.emulator.process import Context

HANDLE_BYTES = 64


def new_key() -> bytes:
    """The bytes of a new handle."""
    return os.urandom(HANDLE_BYTES)


@dataclass(slots=True, eq=False)
class Export:
    """An allocation that other processes may open with the handle ``key``."""

    key: bytes
    context: Context
    allocation: Allocation
    imports: list[Import] = field(default_factory=list)
    """Those that are open."""

    def open(self, by: Context) -> Import:
        """Map the allocation into another process: an address that it never had, for ``by``'s device only."""
        memory, home = self.context.device.memory, self.allocation
        mapping = Mapping(
            start=by.process.space.fresh(home.nbytes),
            nbytes=home.nbytes,
            kind=MappingKind.IPC,
            memory=memory,
            backing=home.start,
            device=self.context.device,
            users={by.ordinal},
            label=f"{home.label}, of {self.context.process}",
        )
        by.process.space.map(mapping)
        made = Import(self, by, mapping)
        self.imports.append(made)
        by.imports[mapping.start] = made
        return made


@dataclass(slots=True, eq=False)
class Import:
    """An export as one context has it open, ``count`` times."""

    export: Export
    context: Context
    mapping: Mapping
    count: int = 1

    def close(self) -> None:
        """Unmap it, however often it was opened. The last one frees what its context has left behind."""
        export = self.export
        self.context.process.space.unmap(self.mapping.start)
        export.imports.remove(self)
        del self.context.imports[self.mapping.start]
        start = export.allocation.start
        if not export.imports and start not in export.context.exports:
            export.context.device.memory.free(start)
