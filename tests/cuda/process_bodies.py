"""What the ranks of test_ipc.py do, each in a process of its own."""

from __future__ import annotations

import pickle

import numpy as np

from smfree.cuda import IpcError
from smfree.cuda.ipc import export, export_event
from smfree.ranks import RankContext

ROUNDS = 20


def pattern(rank: int) -> np.ndarray:
    """A rank's words: uint32[3000]."""
    return np.random.default_rng(rank).integers(0, 2**32, 3000, dtype=np.uint32)


def read_write_and_wait(context: RankContext) -> list[str]:
    """Every rank opens a part of its neighbour's array, reads it, writes it, waits for an event of its, opens
    and closes it some more times; what went wrong."""
    device, exchange = context.device, context.rendezvous
    mine, neighbour = context.rank, (context.rank + 1) % context.world_size
    wrong: list[str] = []

    def expect(holds: object, what: str) -> None:
        if not holds:
            wrong.append(f"rank {mine}: {what}")

    array, event = device.asarray(pattern(mine)), device.event(interprocess=True)
    writing, reading = device.stream(), device.stream()
    card = pickle.dumps((export(array[1000:2000]), export_event(event), array.ptr))
    handle, event_handle, address = pickle.loads(exchange.all_gather(card, "handles")[neighbour])

    peer = device.open_ipc(handle)
    expect(peer.ptr != address + 4000, "the address of another process means something here")
    expect((peer.numpy() == pattern(neighbour)[1000:2000]).all(), "other bytes than the neighbour wrote")
    exchange.barrier("all have read")
    peer.fill(0xAB)
    device.synchronize()
    exchange.barrier("all have written")
    own = array.numpy()
    expect((own[1000:2000] == 0xABABABAB).all(), "the neighbour's writes are missing")
    own[1000:2000] = pattern(mine)[1000:2000]
    expect((own == pattern(mine)).all(), "bytes outside of what was exported have changed")

    exchange.barrier("all have looked")
    array.fill(7, stream=writing)
    writing.record(event)
    exchange.barrier("all have recorded")
    reading.wait(device.open_ipc_event(event_handle))
    landing = device.empty(1000, np.uint32)
    device.copy(landing, peer, stream=reading)
    reading.synchronize()
    expect((landing.numpy() == 0x07070707).all(), "the event of another process orders nothing")

    peer.free()
    for _ in range(ROUNDS):
        device.open_ipc(handle).free()
    expect(len(device.imports) == 0, "imports are left open")
    exchange.barrier("all have closed")
    array.free()
    exchange.barrier("all have freed")
    try:
        device.open_ipc(handle)
        expect(False, "a handle of freed memory was opened")
    except IpcError as error:
        expect("export it again" in str(error), f"the refusal of a stale handle says: {error}")
    return wrong
