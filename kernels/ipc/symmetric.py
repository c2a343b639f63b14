"""Symmetric memory: a buffer that every rank has at the same offset of its slab."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from kernels.common import check_whole
from kernels.ipc.errors import PoolError
from smfree.cuda import DeviceArray

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.pool import Block


class Symmetric:
    """``nbytes`` bytes on every rank of ``group``; from ``group.symmetric``. A context manager.

    A view (:meth:`bytes_view`) shares the block; :meth:`free` ends all of them. Every use of freed memory is
    a PoolError. Work that is queued on the members' streams may still use what is freed: the next owner's
    work comes behind it in the same streams. Where lanes have streams of their own, ``group.wait`` first.
    """

    def __init__(self, group: Group, block: Block, offset_bytes: int, nbytes: int) -> None:
        self.group = group
        self.block = block
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes

    def __enter__(self) -> Symmetric:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # after an error the ranks may not meet again
            self.free()

    def __repr__(self) -> str:
        return f"Symmetric('{self.label}', {self.nbytes} bytes, {self.group.world_size} ranks)"

    @property
    def label(self) -> str:
        """The name it was allocated under."""
        return self.block.label

    def array(self, rank: int) -> DeviceArray:
        """The bytes of a local rank. Raises GroupError for a rank of another process."""
        self.group.member(rank)
        return self.peer(rank, rank)

    def peer(self, rank: int, owner: int) -> DeviceArray:
        """The bytes of rank ``owner``, as local rank ``rank`` sees them: what a copy takes."""
        if owner != rank:
            self.group.check_direct()
        view = self.group.pool.check(self.block).views[self.group.member(rank).rank][owner]
        return view.bytes_view(self.block.offset + self.offset_bytes, self.nbytes)

    def pointers(self, rank: int) -> tuple[int, ...]:
        """The device addresses of all ranks' bytes, as the GPU of local rank ``rank`` sees them.

        Equal modulo 256 save for ``offset_bytes``. Raises GroupError when its kernels cannot reach the peers.
        """
        self.group.check_direct()
        views = self.group.pool.check(self.block).views[self.group.member(rank).rank]
        start = self.block.offset + self.offset_bytes
        return tuple(views[owner].ptr + start for owner in range(self.group.world_size))

    def multicast(self, rank: int) -> int | None:
        """The address that means these bytes of all ranks (``multimem`` instructions only); None where there
        is none: ``group.multicast_reason``."""
        base = self.group.pool.check(self.block).multicast.get(self.group.member(rank).rank)
        return None if base is None else base + self.block.offset + self.offset_bytes

    def bytes_view(self, offset_bytes: int = 0, nbytes: int | None = None) -> Symmetric:
        """``nbytes`` from ``offset_bytes`` on (default: to the end). Raises PoolError outside the buffer."""
        offset = check_whole("offset_bytes", offset_bytes)
        size = self.nbytes - offset if nbytes is None else check_whole("nbytes", nbytes)
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise PoolError(f"bytes {offset} to {offset + size} lie outside {self!r}; take a part of it")
        return Symmetric(self.group, self.block, self.offset_bytes + offset, size)

    def free(self) -> None:
        """Give the memory back, on all ranks in the same order. Raises PoolError the second time."""
        self.group.pool.free(self.block)
