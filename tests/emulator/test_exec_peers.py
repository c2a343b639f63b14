"""Accesses of kernels to the memory of other devices: where they go, when they land, what orders them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from smfree.emulator.errors import MemoryFault
from smfree.emulator.exec.launch import LaunchResult, run
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.node import Node
from smfree.emulator.process import Context
from tests.emulator.exec_kit import UNTIMED, every_schedule, kernel, report

TILE = ".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b64 full;"


@dataclass
class Pair:
    """Two devices in one process; kernels run on the first. ``access``: peer access from it to the second."""

    schedule: str = "min-pc"
    seed: int = 0
    access: bool = True
    node: Node = field(init=False)

    def __post_init__(self) -> None:
        self.node = Node(["h100", "h100"], schedule=self.schedule, seed=self.seed)
        self.process = self.node.attach()
        if self.access:
            self.context.peers.add(1)
        self.own, self.peer = (device.memory for device in self.node.devices)

    @property
    def context(self) -> Context:
        return self.process.contexts[0]

    def put(self, memory: GlobalMemory, array: np.ndarray, label: str = "") -> int:
        """A copy of ``array``; its address."""
        where = memory.alloc(array.nbytes, label=label, owner=self.process)
        memory.write(where, array.tobytes())
        return where

    def run(
        self, body: str, out: int, a: int = 0, b: int = 0, n: int = 0, grid: int = 1, block: int = 32,
        shared: str = "",
    ) -> LaunchResult:  # fmt: skip
        """Run a body of PTX on device 0."""
        params = struct.pack("<QQQI", out, a, b, n)
        return run(
            self.node.devices[0], kernel(body, shared=shared), params, (grid, 1, 1), (block, 1, 1), None, 0,
            schedule=self.schedule, seed=self.seed, context=self.context,
        )  # fmt: skip

    def read(self, memory: GlobalMemory, address: int, count: int) -> np.ndarray:
        return np.frombuffer(bytes(memory.read(address, 4 * count)), np.uint32)


def words(count: int, start: int = 1) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.uint32)


COPY = """
mul.wide.u32 %rd4, %r1, 4;
add.s64 %rd5, %rd1, %rd4;
ld.global.u32 %r10, [%rd5];
st.global.u32 [%rd3], %r10;
"""


@every_schedule
@pytest.mark.parametrize("push", [True, False], ids=["push", "pull"])
def test_a_copy_between_devices(schedule: str, push: bool) -> None:
    pair = Pair(schedule)
    source, target = (pair.own, pair.peer) if push else (pair.peer, pair.own)
    src, dst = pair.put(source, words(256)), pair.put(target, np.zeros(256, np.uint32))
    counters = pair.run(COPY, dst, src, grid=2, block=128).counters
    assert (pair.read(target, dst, 256) == words(256)).all()
    assert (counters.peer_store_bytes, counters.peer_load_bytes) == ((1024, 0) if push else (0, 1024))
    assert counters.global_load_bytes == counters.global_store_bytes == 1024
    sent, received = pair.node.links.traffic[int(not push)].nvlink, pair.node.links.traffic[int(push)].nvlink
    assert sent.sent_bytes == received.received_bytes == 1024
    assert sent.sent_wire_bytes == 1024 + 8 * 34
    assert received.sent_bytes == 0


def test_lanes_of_one_access_go_to_several_places() -> None:
    pair = Pair()
    host = pair.node.host.allocate(256, 0)
    host.bytes.views[4][:32] = words(32, 300)
    own, peer = pair.put(pair.own, words(32, 100)), pair.put(pair.peer, words(32, 200))
    out = pair.put(pair.own, np.zeros(32, np.uint32))
    body = f"""
    rem.u32 %r10, %r2, 3;
    setp.eq.u32 %p1, %r10, 0;
    setp.eq.u32 %p2, %r10, 1;
    selp.b64 %rd4, %rd1, %rd2, %p1;
    selp.b64 %rd4, {host.address}, %rd4, %p2;
    add.s64 %rd4, %rd4, %rd39;
    ld.u32 %r11, [%rd4];
    st.global.u32 [%rd3], %r11;
    """
    counters = pair.run(body, out, own, peer).counters
    expected = words(32, 100) + 100 * np.array([0, 2, 1])[np.arange(32) % 3].astype(np.uint32)
    assert (pair.read(pair.own, out, 32) == expected).all()
    assert (counters.peer_load_bytes, counters.host_load_bytes) == (40, 44)


def test_without_peer_access_both_devices_and_the_allocation_are_named() -> None:
    pair = Pair(access=False)
    src, dst = pair.put(pair.own, words(32)), pair.put(pair.peer, words(32), "inbox")
    with report(
        f"store: device 0 uses 0x{dst:x}", "memory of device 1", "peer access from device 0 to device 1",
        "cuCtxEnablePeerAccess", "'inbox'", "thread 0", rule="memory.peer_access", kind=MemoryFault,
    ):  # fmt: skip
        pair.run(COPY, dst, src)


def test_bounds_of_a_peers_allocation() -> None:
    pair = Pair()
    src, dst = pair.put(pair.own, words(40)), pair.put(pair.peer, words(36), "inbox")
    with report(
        "store of 4 bytes", "global memory of device 1", "'inbox'", "thread 36", rule="memory.bounds"
    ):  # fmt: skip
        pair.run(COPY, dst, src, block=40)


_ = (Any, UNTIMED, TILE)
