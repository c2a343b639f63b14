"""The multicast address of slabs: one that means the same offset of every rank's memory.

Slabs work without it, so what stands in its way is a reason, not an error: the GPUs, the fabric manager, an
IMEX channel (case D26). The driver wants an order: all GPUs are members before the first memory is bound, all
memory is bound before the address is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kernels.ipc.exchange import Exchange
from smfree.cuda import CudaHostError
from smfree.cuda.multicast import MulticastObject
from smfree.cuda.vmm import PhysicalMemory, attribute

if TYPE_CHECKING:
    from kernels.ipc.slabs import Seat, Slabs

_Made = TypeVar("_Made")


class _Impossible(Exception):
    """Why there is no multicast address."""


def add_multicast(
    slabs: Slabs, seats: Sequence[Seat], own: Sequence[PhysicalMemory], exchange: Exchange
) -> None:
    """Join the slabs of all ranks in one object, or say in ``slabs.multicast_reason`` why not."""
    try:
        _check(seats, exchange)
        team = _team(slabs, seats, exchange)
        for seat in seats:
            _try(exchange, "adding a GPU to the multicast team", partial(team.add, seat.device))
        exchange.barrier("multicast team")
        for seat, memory in zip(seats, own, strict=True):
            _try(exchange, "binding memory to the multicast team", partial(team.bind, memory))
            slabs.undo.append(partial(team.unbind, seat.device))
        exchange.barrier("multicast memory")
        mapped = _try(exchange, "mapping multicast memory", lambda: team.map([seat.device for seat in seats]))
        slabs.undo.append(mapped.free)
        slabs.multicast.update((seat.rank, mapped.ptr) for seat in seats)
    except _Impossible as reason:
        slabs.multicast_reason = str(reason)


def _check(seats: Sequence[Seat], exchange: Exchange) -> None:
    """Every rank has a GPU of its own that can multicast."""
    if exchange.world_size == 1:
        raise _Impossible("one rank has nobody to multicast to")
    uuids = exchange.gather([seat.device.uuid.encode() for seat in seats], "GPUs")
    if len(set(uuids)) < len(uuids):
        raise _Impossible("several ranks share a GPU")
    able = [str(attribute(seat.device, "MULTICAST_SUPPORTED")).encode() for seat in seats]
    for rank, can in enumerate(exchange.gather(able, "multicast")):
        if can == b"0":
            raise _Impossible(f"rank {rank}'s GPU has no multicast (CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)")


def _team(slabs: Slabs, seats: Sequence[Seat], exchange: Exchange) -> MulticastObject:
    """The object, made by rank 0, opened by every other process."""
    device, world_size = seats[0].device, exchange.world_size
    creator = exchange.ranks[0] == 0

    def create() -> MulticastObject | None:
        return MulticastObject.create(device, slabs.nbytes, world_size) if creator else None

    team = _try(exchange, "making a multicast object", create)
    if team is not None:
        slabs.undo.append(team.close)
    size = str(0 if team is None else team.nbytes).encode()
    nbytes = max(int(text) for text in exchange.gather([size] * len(seats), "size of the multicast object"))
    if len(seats) == world_size:
        assert team is not None
        return team
    what = "descriptor of the multicast object"
    if team is not None:
        descriptor = team.export()
        for peer in range(1, world_size):
            exchange.send_fd(peer, descriptor, what)
    else:
        descriptor = exchange.recv_fd(0, what)

    def opened() -> MulticastObject:
        return team or MulticastObject.from_descriptor(device, descriptor, nbytes, world_size)

    try:
        result = _try(exchange, "opening the multicast object", opened)
    finally:
        os.close(descriptor)
    if team is None:
        slabs.undo.append(result.close)
    return result


def _try(exchange: Exchange, what: str, step: Callable[[], _Made]) -> _Made:
    """What ``step`` gives; _Impossible on all ranks when the driver refuses it on one."""
    made: list[_Made] = []
    text = ""
    try:
        made.append(step())
    except CudaHostError as error:
        text = str(error)
    for rank, said in enumerate(exchange.gather([text.encode()] * len(exchange.ranks), what)):
        if said:
            raise _Impossible(f"{what} failed on rank {rank}: {said.decode()}")
    return made[0]
