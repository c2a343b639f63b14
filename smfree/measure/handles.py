"""What it costs a process to use another one's memory: to get a handle, open it, use it, close it.

All ranks do the same at once, as they do when a group of ranks starts: each exports an allocation and opens
those of all its peers. Times are the host's (``Device.host_seconds``), of one handle, the mean over the
peers. What is read from a peer is verified.
"""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from smfree.cuda.device import Device
from smfree.cuda.errors import IpcError, UnavailableError
from smfree.cuda.ipc import MemoryHandle, export
from smfree.cuda.memory import DeviceArray
from smfree.cuda.vmm import PhysicalMemory
from smfree.measure.errors import MeasureError
from smfree.measure.host_costs import USE_BYTES, Backing, Operation
from smfree.measure.timer import collector_paused
from smfree.ranks import RankContext, RankFailed, UnixRendezvous, spawn

TIMEOUT_S = 60.0

Samples = Mapping[Operation, Sequence[float]]
"""Seconds, one for each round."""


# --- one rank ---------------------------------------------------------------------------------------------


def handle_costs(context: RankContext, backing: Backing, nbytes: int, rounds: int) -> Samples:
    """What one rank finds. Raises MeasureError for wrong bytes."""
    watches = [_round(context, backing, nbytes, number) for number in range(rounds)]
    return {operation: [watch.mean(operation) for watch in watches] for operation in Operation}


class _Watch:
    """Adds up the host's seconds and counts how often each operation was done."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._seconds: dict[Operation, list[float]] = {operation: [] for operation in Operation}

    @contextmanager
    def __call__(self, operation: Operation) -> Iterator[None]:
        start = self._device.host_seconds()
        yield
        self._seconds[operation].append(self._device.host_seconds() - start)

    def mean(self, operation: Operation) -> float:
        return sum(self._seconds[operation]) / len(self._seconds[operation])


def _round(context: RankContext, backing: Backing, nbytes: int, number: int) -> _Watch:
    device, mine, barrier = context.device, context.rank, context.rendezvous.barrier
    peers = [(mine + turn) % context.world_size for turn in range(1, context.world_size)]
    watch, stream = _Watch(device), device.stream()
    shared = _SHARED[backing](device, nbytes)
    place = shared.array.nbytes - USE_BYTES
    shared.array.bytes_view(place, USE_BYTES).copy_from(_pattern(mine, number))
    uses = (Operation.FIRST_USE, Operation.USE)
    landing = {(peer, use): device.empty(USE_BYTES).fill(0) for peer in peers for use in uses}
    device.synchronize()
    with collector_paused():
        with watch(Operation.GET):
            shared.get()
        shared.tell(context)
        opened: dict[int, DeviceArray] = {}
        for peer in peers:
            with watch(Operation.OPEN):
                opened[peer] = shared.open(peer)
        for (peer, use), target in landing.items():
            source = opened[peer].bytes_view(place, USE_BYTES)
            barrier("next use")  # each rank is asked by one peer, at the same time
            with watch(use):
                target.copy_from_device(source, stream=stream)
                stream.synchronize()
        for array in opened.values():
            with watch(Operation.POOLED):
                array.bytes_view(place // 2, USE_BYTES)
        barrier("all have used all")
        while opened:
            peer, array = opened.popitem()
            with watch(Operation.CLOSE):
                shared.close(peer, array)
    barrier("all have closed all")
    shared.free()
    for (peer, use), target in landing.items():
        if not np.array_equal(target.numpy(), _pattern(peer, number)):
            raise MeasureError(f"{use} of {backing}: rank {mine} has not read what rank {peer} wrote")
    return watch


def _pattern(rank: int, number: int) -> np.ndarray:
    return np.random.default_rng([rank, number]).integers(0, 256, USE_BYTES, np.uint8)


class _Shared(Protocol):
    """Memory of this rank for its peers: ``get`` makes the handle, ``tell`` exchanges those of all ranks."""

    array: DeviceArray

    def get(self) -> None: ...
    def tell(self, context: RankContext) -> None: ...
    def open(self, peer: int) -> DeviceArray: ...
    def close(self, peer: int, array: DeviceArray) -> None: ...
    def free(self) -> None: ...


class _Ipc:
    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.array = device, device.empty(nbytes)
        self.theirs: list[MemoryHandle] = []

    def get(self) -> None:
        self.handle = export(self.array)

    def tell(self, context: RankContext) -> None:
        told = context.rendezvous.all_gather(pickle.dumps(self.handle), "handles")
        self.theirs = [pickle.loads(data) for data in told]

    def open(self, peer: int) -> DeviceArray:
        return self.device.open_ipc(self.theirs[peer])

    def close(self, peer: int, array: DeviceArray) -> None:
        array.free()

    def free(self) -> None:
        self.array.free()


class _Descriptor:
    def __init__(self, device: Device, nbytes: int) -> None:
        self.device, self.own = device, PhysicalMemory.create(device, nbytes)
        self.array = self.own.map().array(self.own.nbytes)
        self.theirs: dict[int, int] = {}
        self.imported: dict[int, PhysicalMemory] = {}

    def get(self) -> None:
        self.descriptor = self.own.export()

    def tell(self, context: RankContext) -> None:
        peers = [rank for rank in range(context.world_size) if rank != context.rank]
        for peer in peers:
            context.rendezvous.send_fd(peer, self.descriptor, "descriptors")
        for peer in peers:
            self.theirs[peer] = context.rendezvous.recv_fd(peer, "descriptors")
        os.close(self.descriptor)

    def open(self, peer: int) -> DeviceArray:
        memory = PhysicalMemory.from_descriptor(self.device, self.theirs[peer], self.own.nbytes)
        self.imported[peer] = memory
        return memory.map().array(memory.nbytes)

    def close(self, peer: int, array: DeviceArray) -> None:
        array.free()
        self.imported.pop(peer).close()
        os.close(self.theirs.pop(peer))

    def free(self) -> None:
        self.array.free()
        self.own.close()


_SHARED: Mapping[Backing, Callable[[Device, int], _Shared]] = {
    Backing.IPC: _Ipc,
    Backing.DESCRIPTOR: _Descriptor,
}


# --- all ranks --------------------------------------------------------------------------------------------


def costs_of_ranks(device: Device, backing: Backing, nbytes: int, world_size: int, rounds: int) -> Samples:
    """Of each round the slowest rank's seconds. Real GPUs: a process per rank; they share GPUs where there
    are fewer. Emulated ones: a process of the node per rank, each a thread here, on GPUs like ``device``.

    Raises IpcError or UnavailableError when memory cannot be shared so here, MeasureError for wrong bytes.
    """
    work = (backing, nbytes, rounds)
    found = (
        on_emulated_node(device, world_size, handle_costs, *work)
        if device.is_emulated
        else _spawned(world_size, *work)
    )
    return {
        operation: [max(samples) for samples in zip(*(rank[operation] for rank in found), strict=True)]
        for operation in Operation
    }


def _spawned(world_size: int, *work: Any) -> list[Samples]:
    """:func:`handle_costs` by real processes on real GPUs."""
    try:
        return spawn(
            handle_costs, world_size, *work, device="cuda", timeout_s=TIMEOUT_S, several_per_gpu=True
        )
    except RankFailed as error:
        reason = error.__cause__
        if isinstance(reason, IpcError | UnavailableError):
            raise reason from error
        raise


def on_emulated_node(device: Device, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(context, *args)`` by each rank of a node of emulated GPUs like ``device``: what they return.

    To the node every rank is a process of its own (an emulated driver), with a host clock of its own.
    """
    from smfree.emulator.driver import Driver
    from smfree.emulator.node import Node

    node, name = Node([device.emulator.profile] * world_size), secrets.token_hex(8)

    def rank(number: int) -> Any:
        with UnixRendezvous(name, number, world_size, timeout_s=TIMEOUT_S) as rendezvous:
            driver = Driver(node, f"rank {number}")
            own = Device(driver, number, spec=f"{device.spec}:{number}", is_emulated=True)
            try:
                return function(RankContext(number, world_size, number, rendezvous, own), *args)
            finally:
                own.close()
                driver.end()

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(rank, range(world_size)))
