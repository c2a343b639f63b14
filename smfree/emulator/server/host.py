"""A client's own host memory that the node knows: page-locked by the driver, or registered."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from smfree.emulator.server.channel import close_all
from smfree.emulator.server.shared import map_at, unmap


class ClientMemory:
    """``registered``: bytes and the node's address of each registered range, by this process's address.

    Page-locked memory has one address for both. It is unmapped when freed, or with this object.
    """

    def __init__(self) -> None:
        self.registered: dict[int, tuple[int, int]] = {}
        self._pinned: dict[int, int] = {}
        weakref.finalize(self, _unmap_all, self._pinned).atexit = False

    def on_node(self, address: int) -> int:
        """The node's address of registered memory; any other address as it is."""
        for start, (nbytes, there) in self.registered.items():
            if start <= address < start + nbytes:
                return there + address - start
        return address

    def overlapping(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Start and bytes of a known range that shares bytes with [address, address + nbytes)."""
        known = {**self._pinned, **{start: size for start, (size, _) in self.registered.items()}}
        for start, size in known.items():
            if start < address + nbytes and address < start + size:
                return start, size
        return None

    def map(self, address: int, nbytes: int, fds: Sequence[int]) -> bool:
        """Map new page-locked memory where the server has it; False when something else is there."""
        try:
            map_at(address, nbytes, fds[0])
        except OSError:
            return False
        finally:
            close_all(fds)
        self._pinned[address] = nbytes
        return True

    def unmap(self, address: int) -> None:
        """Page-locked memory was freed."""
        unmap(address, self._pinned.pop(address))


def _unmap_all(pinned: dict[int, int]) -> None:
    for address, nbytes in pinned.items():
        unmap(address, nbytes)
