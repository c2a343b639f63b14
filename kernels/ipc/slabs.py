"""One slab of device memory per rank, and every rank's way to the slabs of its peers.

Three ways lead there. ``PEER``: one process, whose GPUs use cuMemAlloc's address itself once peer access is
enabled. ``VMM``: memory that is mapped where it is needed, across processes by file descriptor; multicast
takes it. ``IPC``: cuMemAlloc and a 64-byte handle, for GPUs or systems without file descriptors. That a GPU
can reach a peer does not mean that its driver opens the handle (case D05), so the real thing is tried, and
where nothing works (``ALONE``) a rank has its own slab only.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

from kernels.ipc.errors import GroupError
from kernels.ipc.exchange import Exchange, together
from kernels.ipc.member import Seat
from kernels.ipc.multicast_slab import NoMulticast, join_multicast
from smfree.cuda import CudaHostError, Device, DeviceArray, ipc
from smfree.cuda.multicast import multicast_unavailable
from smfree.cuda.vmm import PhysicalMemory, vmm_unavailable

PAGE_BYTES = 1 << 21


class Backing(StrEnum):
    """How the peers reach a slab."""

    PEER = "peer access in one process"
    VMM = "virtual memory management"
    IPC = "CUDA IPC"
    ALONE = "no way to the peers"


@dataclass(eq=False)
class Slabs:
    """A slab of ``nbytes`` on every rank.

    ``views``: per local rank the slabs of all ranks by rank, as its GPU sees them. ``direct_reason``: why
    only its own is among them; None when all are. ``multicast``: per local rank the address that means all
    slabs at once; empty where there is none, for ``multicast_reason``.
    ``open_seconds``: wall time of allocating, exchanging and opening. ``undo`` closes, last entry first.
    """

    nbytes: int
    backing: Backing
    reason: str
    views: dict[int, dict[int, DeviceArray]] = field(default_factory=dict)
    direct_reason: str | None = None
    multicast: dict[int, int] = field(default_factory=dict)
    multicast_reason: str | None = None
    open_seconds: float = 0.0
    undo: list[Callable[[], object]] = field(default_factory=list)

    def close(self) -> None:
        """Close the peers' slabs; when no peer has them open any more, free the own ones."""
        while self.undo:
            with suppress(CudaHostError):  # a failed context has freed everything itself
                self.undo.pop()()
        self.views.clear()
        self.multicast.clear()


def make_first(seats: Sequence[Seat], exchange: Exchange, nbytes: int, wanted: Backing | None) -> Slabs:
    """Slabs by the first way that works on all ranks; by ``wanted`` alone unless it is None."""
    if wanted is not None:
        return make_slabs(seats, exchange, nbytes, wanted, "asked for")
    reason = ""
    for backing in (Backing.VMM, Backing.PEER) if in_process(exchange) else (Backing.VMM, Backing.IPC):
        refused = _refusal(backing, seats, exchange)
        if refused is None:
            try:
                return make_slabs(seats, exchange, nbytes, backing, reason or "the first choice")
            except (CudaHostError, GroupError) as error:  # on every rank alike
                refused = str(error)
        reason = refused
    return make_slabs(seats, exchange, nbytes, Backing.ALONE, reason)


def _refusal(backing: Backing, seats: Sequence[Seat], exchange: Exchange) -> str | None:
    """Why a backing is not worth a try."""
    devices = [seat.device for seat in seats]
    if backing is not Backing.VMM:
        return None
    if in_process(exchange):  # only multicast is a reason not to take cuMemAlloc
        if len(_distinct(devices)) < len(devices):
            return "several ranks share a GPU"
        return "one rank" if len(seats) == 1 else multicast_unavailable(devices)
    said = exchange.gather([(vmm_unavailable(device) or "").encode() for device in devices], "backing")
    return next((f"rank {rank}: {text.decode()}" for rank, text in enumerate(said) if text), None)


def make_slabs(
    seats: Sequence[Seat], exchange: Exchange, nbytes: int, backing: Backing, reason: str
) -> Slabs:
    """Allocate and open slabs of at least ``nbytes``, collectively. When one rank cannot, all raise."""
    makers = {Backing.PEER: _peer, Backing.IPC: _ipc, Backing.VMM: _vmm, Backing.ALONE: _alone}
    start = time.perf_counter()
    slabs = Slabs(nbytes, backing, reason)
    try:
        makers[backing](slabs, seats, exchange)
        exchange.barrier("opening of the peers' memory")
    except BaseException:
        slabs.close()
        raise
    slabs.open_seconds = time.perf_counter() - start
    return slabs


def in_process(exchange: Exchange) -> bool:
    """Whether all ranks are in this process."""
    return len(exchange.ranks) == exchange.world_size


def _distinct(devices: Sequence[Device]) -> list[Device]:
    return list({device.ordinal: device for device in devices}.values())


def _alone(slabs: Slabs, seats: Sequence[Seat], exchange: Exchange) -> None:
    del exchange
    slabs.direct_reason = slabs.multicast_reason = f"no rank can use its peers' memory ({slabs.reason})"
    for seat in seats:
        own = seat.device.empty(slabs.nbytes)
        slabs.undo.append(own.free)
        slabs.views[seat.rank] = {seat.rank: own}


# --- cuMemAlloc --------------------------------------------------------------------------------------


def _peer(slabs: Slabs, seats: Sequence[Seat], exchange: Exchange) -> None:
    """An allocation per rank; the others use its address."""
    del exchange
    slabs.multicast_reason = f"the slabs are plain allocations ({slabs.reason})"
    own: dict[int, DeviceArray] = {}
    for seat in seats:
        own[seat.rank] = seat.device.empty(slabs.nbytes)
        slabs.undo.append(own[seat.rank].free)
    slabs.views.update((seat.rank, own) for seat in seats)


def _ipc(slabs: Slabs, seats: Sequence[Seat], exchange: Exchange) -> None:
    """An allocation in each process, whose handle every peer opens once.

    Whole pages of 2 MiB: smaller ones share a page, and with it an opened handle, with other allocations
    (CUDA programming guide, interprocess communication).
    """
    (seat,) = seats
    slabs.nbytes = -(-slabs.nbytes // PAGE_BYTES) * PAGE_BYTES
    slabs.multicast_reason = f"the slabs are plain allocations ({slabs.reason})"

    def make() -> tuple[DeviceArray, bytes]:
        own = seat.device.empty(slabs.nbytes)
        slabs.undo.append(own.free)
        return own, pickle.dumps(ipc.export(own))

    own, handle = together(exchange, "export of CUDA IPC handles", make)
    slabs.undo[-1] = lambda: own.free() if _parting(exchange) else own.allocation.leave()
    handles = exchange.gather([handle], "CUDA IPC handles")

    def open_all() -> dict[int, DeviceArray]:
        views = {seat.rank: own}
        for rank, data in enumerate(handles):
            if rank != seat.rank:
                views[rank] = seat.device.open_ipc(pickle.loads(data))
                slabs.undo.append(views[rank].free)
        return views

    slabs.views[seat.rank] = together(exchange, "opening of CUDA IPC handles", open_all)


# --- cuMemCreate -------------------------------------------------------------------------------------


def _vmm(slabs: Slabs, seats: Sequence[Seat], exchange: Exchange) -> None:
    """Memory without an address, mapped for the GPUs of this process; peers get file descriptors.

    Handles are closed at the end: a mapping keeps its memory (CUDA driver API, cuMemRelease).
    """
    handles: list[PhysicalMemory] = []

    def make() -> None:
        for seat in seats:
            handles.append(PhysicalMemory.create(seat.device, slabs.nbytes))

    try:
        together(exchange, "making of shareable memory", make)
        own = tuple(handles)
        sizes = exchange.gather([str(memory.nbytes).encode() for memory in own], "slab sizes")
        slabs.nbytes = min(int(size) for size in sizes)
        if in_process(exchange):
            _map_in_process(slabs, seats, own)
        else:
            slabs.undo.append(lambda: _parting(exchange))
            _map_across(slabs, seats[0], own[0], [int(size) for size in sizes], exchange, handles)
        try:
            slabs.multicast.update(join_multicast(slabs.nbytes, seats, own, exchange, slabs.undo))
        except NoMulticast as reason:
            slabs.multicast_reason = str(reason)
    finally:
        for memory in handles:
            memory.close()


def _map_in_process(slabs: Slabs, seats: Sequence[Seat], own: Sequence[PhysicalMemory]) -> None:
    devices = _distinct([seat.device for seat in seats])
    views: dict[int, DeviceArray] = {}
    for seat, memory in zip(seats, own, strict=True):
        mapped = memory.map(devices)
        slabs.undo.append(mapped.free)
        views[seat.rank] = mapped.array(slabs.nbytes, device=seat.device)
    slabs.views.update((seat.rank, views) for seat in seats)


def _map_across(
    slabs: Slabs,
    seat: Seat,
    own: PhysicalMemory,
    sizes: Sequence[int],
    exchange: Exchange,
    handles: list[PhysicalMemory],
) -> None:
    """Send a descriptor of ``own`` to every peer, import theirs into ``handles``, map all of them."""
    descriptors = pass_around(exchange, own.export(), "descriptors of device memory")

    def map_all() -> dict[int, DeviceArray]:
        views: dict[int, DeviceArray] = {}
        for rank, size in enumerate(sizes):
            if rank == seat.rank:
                memory = own
            else:
                memory = PhysicalMemory.from_descriptor(seat.device, descriptors[rank], size)
                handles.append(memory)
            mapped = memory.map([seat.device])
            slabs.undo.append(mapped.free)
            views[rank] = mapped.array(slabs.nbytes)
        return views

    try:
        slabs.views[seat.rank] = together(exchange, "mapping of the peers' memory", map_all)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def pass_around(exchange: Exchange, descriptor: int, what: str) -> dict[int, int]:
    """Give ``descriptor`` (closed here) to every peer; theirs, by rank, are the caller's to close."""
    peers = [rank for rank in range(exchange.world_size) if rank not in exchange.ranks]
    received: dict[int, int] = {}
    try:
        for peer in peers:
            exchange.send_fd(peer, descriptor, what)
        for peer in peers:
            received[peer] = exchange.recv_fd(peer, what)
    except BaseException:
        for other in received.values():
            os.close(other)
        raise
    finally:
        os.close(descriptor)
    return received


def _parting(exchange: Exchange) -> bool:
    """Wait until the peers have closed their views. False after a failure: some may use them still."""
    with suppress(Exception):
        exchange.barrier("closing of the peers' memory")
        return True
    return False
