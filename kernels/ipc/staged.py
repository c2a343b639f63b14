"""AllGather through page-locked host memory, for GPUs that cannot reach each other (way ``staged``).

Every shard goes down over PCIe once and comes up on N - 1 GPUs. All ranks share one host buffer: in one
process a page-locked allocation, else anonymous shared memory (memfd) that each process maps and registers.
Its first page holds words [waiting rank][writer]: a rank writes its own word in every row with stream memory
operations and waits for the words of its row, as on the pads of the signals.

Two epochs per call. *Down*: the shard is in the buffer. *Up*: the rank has read all others. A shard goes down
when everybody is up from the last call.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kernels.ipc.copy_engine import peers_of, place_own, refuse_capture
from kernels.ipc.exchange import agree, together

if TYPE_CHECKING:
    from kernels.ipc.group import Group
    from kernels.ipc.member import Member
    from kernels.ipc.shards import Shards

WORDS_BYTES = 4096
SMALLEST_BYTES = 1 << 20

_PORTABLE_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP


class Staging:
    """The host buffer of a group: ``words`` u32 [waiting rank][writer], then ``data``."""

    def __init__(self, group: Group, nbytes: int) -> None:
        self.nbytes = nbytes
        self.epoch = 0
        """Barriers done, modulo 2^32: even between calls."""
        self._undo: list[Callable[[], None]] = []
        world_size = group.world_size
        try:
            memory = self._in_process(group) if group.in_process else self._across(group)
            self.words: NDArray[np.uint32] = (
                memory[: 4 * world_size**2].view(np.uint32).reshape(world_size, world_size)
            )
            self.data: NDArray[np.uint8] = memory[WORDS_BYTES:]
            address = int(memory.ctypes.data)
            self._words_ptr = {
                member.rank: int(member.device.calls("cuMemHostGetDevicePointer", address, 0))
                for member in group.members
            }
        except BaseException:
            self.close()
            raise

    @property
    def last_wanted(self) -> int:
        """The highest epoch that a queued operation waits for: the last call's *down*."""
        return (self.epoch - 1) % 2**32

    def word_ptr(self, rank: int, waiting: int, writer: int) -> int:
        """The device address of a word, for local rank ``rank``."""
        return self._words_ptr[rank] + 4 * (waiting * self.words.shape[1] + writer)

    def next_epoch(self) -> int:
        """Count one more barrier; every rank counts alike."""
        self.epoch = (self.epoch + 1) % 2**32
        return self.epoch

    def close(self) -> None:
        """Give the memory back; no queued work may use it."""
        self.words = self.data = np.empty(0, np.uint8)  # type: ignore[assignment]
        while self._undo:
            self._undo.pop()()

    def _in_process(self, group: Group) -> NDArray[np.uint8]:
        """Page-locked memory of one device is every device's (CUDA driver API, Unified Addressing)."""
        buffer = group.members[0].device.pinned(WORDS_BYTES + self.nbytes, mapped=True)
        buffer.array[:WORDS_BYTES] = 0
        return buffer.array

    def _across(self, group: Group) -> NDArray[np.uint8]:
        """Shared memory without a name, made by rank 0, registered by every process for its GPU."""
        (member,), exchange, total = group.members, group.exchange, WORDS_BYTES + self.nbytes
        what = "host buffer of way 'staged'"
        if member.rank == 0:
            descriptor = os.memfd_create("smfree-staged", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, total)
            for peer in range(1, group.world_size):
                exchange.send_fd(peer, descriptor, what)
        else:
            descriptor = exchange.recv_fd(0, what)
        try:
            shared = mmap.mmap(descriptor, total)
        finally:
            os.close(descriptor)
        memory = np.frombuffer(shared, np.uint8)
        address = int(memory.ctypes.data)

        def register() -> None:
            member.device.calls("cuMemHostRegister", address, total, _PORTABLE_MAPPED, bytes=total)
            self._undo.append(lambda: member.device.calls.quiet("cuMemHostUnregister", address))

        together(exchange, what, register)
        return memory


def reserve(group: Group, nbytes: int) -> Staging:
    """The group's host buffer, for shards of ``nbytes`` in sum.

    Collective, and slow when it has to be made or made larger: that waits for the members' work and locks
    pages. Call it before a timed region.
    """
    if group.staging is not None and group.staging.nbytes >= nbytes:
        return group.staging
    size = max(SMALLEST_BYTES, 1 << max(0, nbytes - 1).bit_length())
    agree(group.exchange, "host buffer of way 'staged'", f"{size} bytes")
    group.wait()
    group.exchange.barrier("end of the old host buffer")
    if group.staging is not None:
        group.staging.close()
    group.staging = Staging(group, size)
    return group.staging


def gather(group: Group, shards: Shards, what: str) -> None:
    """Queue the copies of the local ranks, ``what`` in errors. Raises ConfigError while a member's stream is
    captured."""
    for member in group.members:
        refuse_capture(member.stream, "staged")
    staging = reserve(group, shards.offsets[-1])
    with group.queueing(what):
        last_up, down, up = staging.epoch, staging.next_epoch(), staging.next_epoch()
        for member in group.members:
            _await(group, staging, member, last_up)
            first, end = shards.offsets[member.rank], shards.offsets[member.rank + 1]
            member.device.copy(staging.data[first:end], shards.src(member.rank), stream=member.stream)
            _signal(group, staging, member, down)
        for member in group.members:
            place_own(shards, member)
            _await(group, staging, member, down)
            first, end, total = (shards.offsets[i] for i in (member.rank, member.rank + 1, -1))
            dst = shards.dst.array(member.rank)
            for low, high in ((0, first), (end, total)):  # what is the rank's own is there
                part = dst.bytes_view(low, high - low)
                member.device.copy(part, staging.data[low:high], stream=member.stream)
            _signal(group, staging, member, up)


def _signal(group: Group, staging: Staging, member: Member, epoch: int) -> None:
    for peer in peers_of(group, member):
        member.stream.write_value(staging.word_ptr(member.rank, peer, member.rank), epoch)


def _await(group: Group, staging: Staging, member: Member, epoch: int) -> None:
    for peer in peers_of(group, member):
        member.stream.wait_value(staging.word_ptr(member.rank, member.rank, peer), epoch)
