"""The multicast address of slabs: one that means the same offset of every rank's memory.

Slabs work without it, so what stands in its way is a reason, not an error: the GPUs, the fabric manager, an
IMEX channel (case D26). The driver wants an order: all GPUs are members before the first memory is bound, all
memory is bound before the address is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from kernels.ipc.exchange import Exchange
from kernels.ipc.member import Seat
from smfree.cuda import CudaHostError
from smfree.cuda.multicast import MulticastObject
from smfree.cuda.vmm import PhysicalMemory, attribute

_Made = TypeVar("_Made")


class NoMulticast(Exception):
    """Why there is no multicast address."""


def join_multicast(
    nbytes: int,
    seats: Sequence[Seat],
    own: Sequence[PhysicalMemory],
    exchange: Exchange,
    undo: list[Callable[[], object]],
) -> dict[int, int]:
    """Join the slabs of ``nbytes`` of all ranks in one object: its address for each local rank. ``undo`` gets
    what ends that. Raises NoMulticast, on all ranks."""
    _check(seats, exchange)
    team = _team(nbytes, seats, exchange, undo)
    for seat in seats:
        _try(exchange, "adding a GPU to the multicast team", partial(team.add, seat.device))
    exchange.barrier("multicast team")
    for seat, memory in zip(seats, own, strict=True):
        _try(exchange, "binding memory to the multicast team", partial(team.bind, memory))
        undo.append(partial(team.unbind, seat.device))
    exchange.barrier("multicast memory")
    mapped = _try(exchange, "mapping multicast memory", lambda: team.map([seat.device for seat in seats]))
    undo.append(mapped.free)
    return {seat.rank: mapped.ptr for seat in seats}


def _check(seats: Sequence[Seat], exchange: Exchange) -> None:
    """Every rank has a GPU of its own that can multicast."""
    if exchange.world_size == 1:
        raise NoMulticast("one rank has nobody to multicast to")
    uuids = exchange.gather([seat.device.uuid.encode() for seat in seats], "GPUs")
    if len(set(uuids)) < len(uuids):
        raise NoMulticast("several ranks share a GPU")
    able = [str(attribute(seat.device, "MULTICAST_SUPPORTED")).encode() for seat in seats]
    for rank, can in enumerate(exchange.gather(able, "multicast")):
        if can == b"0":
            raise NoMulticast(f"rank {rank}'s GPU has no multicast (CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)")


def _team(
    nbytes: int, seats: Sequence[Seat], exchange: Exchange, undo: list[Callable[[], object]]
) -> MulticastObject:
    """The object, made by rank 0, opened by every other process."""
    device, world_size = seats[0].device, exchange.world_size
    creator = exchange.ranks[0] == 0

    def create() -> MulticastObject | None:
        return MulticastObject.create(device, nbytes, world_size) if creator else None

    team = _try(exchange, "making a multicast object", create)
    if team is not None:
        undo.append(team.close)
    size = str(0 if team is None else team.nbytes).encode()
    total = max(int(text) for text in exchange.gather([size] * len(seats), "size of the multicast object"))
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
        return team or MulticastObject.from_descriptor(device, descriptor, total, world_size)

    try:
        result = _try(exchange, "opening the multicast object", opened)
    finally:
        os.close(descriptor)
    if team is None:
        undo.append(result.close)
    return result


def _try(exchange: Exchange, what: str, step: Callable[[], _Made]) -> _Made:
    """What ``step`` gives; NoMulticast on all ranks when the driver refuses it on one."""
    made: list[_Made] = []
    text = ""
    try:
        made.append(step())
    except CudaHostError as error:
        text = str(error)
    for rank, said in enumerate(exchange.gather([text.encode()] * len(exchange.ranks), what)):
        if said:
            raise NoMulticast(f"{what} failed on rank {rank}: {said.decode()}")
    return made[0]
