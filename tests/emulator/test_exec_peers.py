"""Accesses of kernels to the memory of other devices: where they go, when they land, what orders them."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from smfree.emulator.address_space import Mapping, MappingKind
from smfree.emulator.errors import MemoryFault
from smfree.emulator.exec.launch import Launch, LaunchResult, run
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.node import Node
from smfree.emulator.process import Context
from smfree.emulator.profile import load as load_profile
from smfree.emulator.replay import replay
from smfree.emulator.strong import Shape, StrongLog
from smfree.emulator.tensormap import encode
from tests.emulator.driver_kit import (
    array_of,
    launch,
    load,
    ok,
    open_driver,
    open_node,
    refused,
    values_at,
)
from tests.emulator.exec_kit import every_schedule, kernel, report

TILE = ".shared .align 128 .b8 tile[1024];\n.shared .align 8 .b64 full;"


@dataclass
class Pair:
    """Two devices in one process; kernels run on the first. ``access``: peer access from it to the second."""

    schedule: str = "min-pc"
    seed: int = 0
    access: bool = True
    strict: str = "error"
    node: Node = field(init=False)

    def __post_init__(self) -> None:
        self.node = Node(["h100", "h100"], schedule=self.schedule, seed=self.seed, strict=self.strict)
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
    """D13."""
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


def mapped(pair: Pair, backing: int, nbytes: int, users: set[int] | None, kind: MappingKind) -> int:
    """An address at which the process has memory of device 1 mapped."""
    device, space = pair.node.devices[1], pair.process.space
    start = space.fresh(nbytes)
    space.map(Mapping(start, nbytes, kind, device.memory, backing, device, users, "shard"))
    return start


@pytest.mark.parametrize("kind", [MappingKind.IPC, MappingKind.VMM])
def test_a_mapping_leads_to_the_peers_memory(kind: MappingKind) -> None:
    pair = Pair(access=kind is MappingKind.IPC)
    behind = pair.put(pair.peer, np.zeros(64, np.uint32))
    dst = mapped(pair, behind + 128, 128, {0} if kind is MappingKind.VMM else None, kind)
    counters = pair.run(COPY, dst, pair.put(pair.own, words(32))).counters
    assert (pair.read(pair.peer, behind, 64) == [*[0] * 32, *range(1, 33)]).all()
    assert counters.peer_store_bytes == 128


@every_schedule
@pytest.mark.parametrize(
    "access", ["st.global.u32 [%rd4], 1;", "ld.global.u32 %r10, [%rd4];", "red.global.add.u32 [%rd4], 1;"]
)
def test_what_lies_behind_a_mapping_and_what_lies_nowhere_is_outside(access: str, schedule: str) -> None:
    """The second one is nobody's address: the own memory's bounds are broken."""
    pair = Pair(schedule)
    body = f"mul.wide.u32 %rd4, %r2, 4;\nadd.u64 %rd4, %rd4, %rd1;\nadd.u64 %rd4, %rd4, %rd2;\n{access}"
    start = mapped(pair, pair.put(pair.peer, words(32)), 128, {0}, MappingKind.IPC)
    with report(
        "is outside memory of another process 'shard'", "132 bytes past its end", rule="memory.bounds"
    ):
        pair.run(body, 0, start, 260)
    with report("is outside every allocation", rule="memory.bounds"):
        pair.run(body, 0, start, 1 << 30)


def test_a_mapping_without_access_and_past_its_end() -> None:
    pair = Pair()
    src, behind = pair.put(pair.own, words(40)), pair.put(pair.peer, words(64))
    dst = mapped(pair, behind, 128, {1}, MappingKind.VMM)
    with report("device 0 has no access", "'shard'", "device 1", "cuMemSetAccess", rule="memory.no_access"):
        pair.run(COPY, dst, src)
    dst = mapped(pair, behind, 128, {0}, MappingKind.VMM)
    with report("store", "'shard'", "thread 32", rule="memory.bounds"):
        pair.run(COPY, dst, src, block=40)


# ---------------------------------------------------------------------------------------- what orders what

MESSAGE = """
mul.wide.u32 %rd4, %r2, 4;
add.s64 %rd5, %rd1, %rd4;
add.s64 %rd6, %rd0, %rd4;
setp.ne.u32 %p1, %r3, 0;
@%p1 bra CONSUMER;
SEND
bra DONE;
CONSUMER:
ld.acquire.sys.global.u32 %r11, [%rd2];
setp.eq.u32 %p3, %r11, 0;
@%p3 bra CONSUMER;
ld.global.u32 %r12, [%rd5];
st.global.u32 [%rd6], %r12;
DONE:
"""
"""CTA 0 sends 32 words and a flag to device 1, CTA 1 of the same device waits for the flag there."""

STORES = """
add.u32 %r10, %r2, 1;
st.global.u32 [%rd5], %r10;
bar.sync 0;
setp.ne.u32 %p2, %r2, 0;
@%p2 bra DONE;
FLAG"""
RELEASES = {
    "st.release": "st.release.sys.global.u32 [%rd2], 1;",
    "fence": "fence.acq_rel.sys;\nst.relaxed.sys.global.u32 [%rd2], 1;",
    "membar": "membar.sys;\nst.volatile.global.u32 [%rd2], 1;",
    "fence.gpu": "fence.acq_rel.gpu;\nst.relaxed.sys.global.u32 [%rd2], 1;",
    "red.release": "red.release.sys.global.add.u32 [%rd2], 1;",
    "atom.acq_rel": "atom.acq_rel.sys.global.add.u32 %r13, [%rd2], 1;",
}
UNORDERED = {
    "st.relaxed": "st.relaxed.sys.global.u32 [%rd2], 1;",
    "fence.cta": "fence.acq_rel.cta;\nst.relaxed.sys.global.u32 [%rd2], 1;",
}


def message(schedule: str, send: str, seed: int = 0, shared: str = "") -> np.ndarray:
    """The 32 words that the consumer saw."""
    pair = Pair(schedule, seed)
    data, flag = pair.put(pair.peer, np.zeros(32, np.uint32)), pair.put(pair.peer, np.zeros(1, np.uint32))
    out = pair.put(pair.own, np.zeros(32, np.uint32))
    pair.run(MESSAGE.replace("SEND", send), out, data, flag, grid=2, shared=shared)
    return pair.read(pair.own, out, 32)


@every_schedule
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_makes_the_data_land_before_the_flag(schedule: str, release: str) -> None:
    assert (message(schedule, STORES.replace("FLAG", RELEASES[release])) == words(32)).all()


@pytest.mark.parametrize("flag", UNORDERED)
def test_without_a_release_the_flag_may_land_first(flag: str) -> None:
    assert (message("async-latest", STORES.replace("FLAG", UNORDERED[flag])) == 0).all()
    found = [message("random", STORES.replace("FLAG", UNORDERED[flag]), seed) for seed in range(8)]
    assert any((seen != words(32)).any() for seen in found)


BULK = """
add.u32 %r10, %r2, 1;
mov.u32 %r20, tile;
shl.b32 %r21, %r2, 2;
add.u32 %r21, %r21, %r20;
st.shared.u32 [%r21], %r10;
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p2, %r2, 0;
@%p2 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r20], 128;
cp.async.bulk.commit_group;
cp.async.bulk.wait_groupREAD 0;
st.release.sys.global.u32 [%rd2], 1;
"""


@every_schedule
def test_a_bulk_store_has_landed_when_its_group_was_waited_for(schedule: str) -> None:
    # PTX ISA, "Async Proxy": an implicit fence follows completion, so the release needs no proxy fence.
    assert (message(schedule, BULK.replace("READ", ""), shared=TILE) == words(32)).all()


def test_a_release_does_not_wait_for_a_bulk_store() -> None:
    with report(
        "load reads 4 bytes", "cp.async.bulk store of 128 bytes", "thread 0 of device 0", "has yet to write",
        "wait_group, not .read", "CTA 1", rule="copy.race",
    ):  # fmt: skip
        message("async-latest", BULK.replace("READ", ".read"), shared=TILE)


@every_schedule
def test_stores_to_one_word_land_in_order_and_are_read_back(schedule: str) -> None:
    pair = Pair(schedule)
    word, out = pair.put(pair.peer, np.zeros(32, np.uint32)), pair.put(pair.own, np.zeros(32, np.uint32))
    body = """
    mul.wide.u32 %rd4, %r2, 4;
    add.s64 %rd5, %rd1, %rd4;
    st.global.u32 [%rd5], 1;
    st.global.u32 [%rd5], 2;
    ld.global.u32 %r10, [%rd5];
    st.global.u16 [%rd5], %h1;
    st.global.u32 [%rd3], %r10;
    """
    pair.run("mov.u16 %h1, 7;" + body, out, word)
    assert (pair.read(pair.own, out, 32) == 2).all()
    assert (pair.read(pair.peer, word, 32) == 7).all()


@every_schedule
def test_another_thread_of_the_cta_reads_it_after_a_barrier(schedule: str) -> None:
    pair = Pair(schedule)
    word, out = pair.put(pair.peer, np.zeros(64, np.uint32)), pair.put(pair.own, np.zeros(64, np.uint32))
    body = """
    mul.wide.u32 %rd4, %r2, 4;
    add.s64 %rd5, %rd1, %rd4;
    add.u32 %r10, %r2, 1;
    st.global.u32 [%rd5], %r10;
    bar.sync 0;
    sub.s64 %rd6, %rd1, %rd4;
    ld.global.u32 %r11, [%rd6+252];
    st.global.u32 [%rd3], %r11;
    """
    pair.run(body, out, word, block=64)
    assert (pair.read(pair.own, out, 64) == words(64)[::-1]).all()


@every_schedule
def test_reductions_and_atomics_on_a_peer(schedule: str) -> None:
    pair = Pair(schedule)
    count, out = pair.put(pair.peer, np.zeros(2, np.uint32)), pair.put(pair.own, np.zeros(64, np.uint32))
    body = """
    red.relaxed.sys.global.add.u32 [%rd1], 3;
    atom.relaxed.sys.global.add.u32 %r10, [%rd1+4], 1;
    st.global.u32 [%rd3], %r10;
    """
    counters = pair.run(body, out, count, grid=2).counters
    assert pair.read(pair.peer, count, 2).tolist() == [192, 64]
    assert sorted(pair.read(pair.own, out, 64)) == list(range(64))
    assert counters.peer_store_bytes == 2 * 64 * 4


SIGNALS = [
    ("st.global.u32 [%rd4], 1;", 0, 0),
    ("st.relaxed.sys.global.u32 [%rd4], 1;", 1, 4),
    ("st.release.sys.global.v2.u32 [%rd4], {1, 2};", 1, 8),
    ("st.volatile.global.u64 [%rd4], 1;", 1, 8),
    ("red.release.sys.global.add.u32 [%rd4], 1;", 1, 4),
    ("atom.relaxed.sys.global.cas.b64 %rd5, [%rd4], 77, 1;", 1, 8),
    ("ld.relaxed.sys.global.u32 %r10, [%rd4];", 0, 0),
]


@every_schedule
@pytest.mark.parametrize(("access", "count", "nbytes"), SIGNALS, ids=[a.split()[0] for a, _, _ in SIGNALS])
def test_signals_are_the_strong_stores_and_atomics_to_a_peer(
    schedule: str, access: str, count: int, nbytes: int
) -> None:
    pair = Pair(schedule)
    data, words_of = pair.put(pair.peer, np.zeros(32, np.uint32)), {}
    for home, memory in (("peer", pair.peer), ("own", pair.own)):
        words_of[home] = pair.put(memory, np.zeros(64, np.uint32))
    body = f"""
    mul.wide.u32 %rd6, %r2, 8;
    add.s64 %rd4, %rd1, %rd6;
    st.global.u32 [%rd3], 5;
    {access}
    """
    counters = pair.run(body, data, words_of["peer"]).counters
    assert (counters.peer_signals, counters.peer_signal_bytes) == (32 * count, 32 * nbytes)
    weak = 32 * 4 if access.startswith("st.global") else 0
    assert counters.peer_store_bytes - counters.peer_signal_bytes == 32 * 4 + weak
    counters = pair.run(body, data, words_of["own"]).counters
    assert (counters.peer_signals, counters.peer_signal_bytes, counters.peer_store_bytes) == (0, 0, 32 * 4)


# ------------------------------------------------------------------------------------- asynchronous copies


@every_schedule
@pytest.mark.parametrize("home", ["peer", "host"])
def test_copies_from_and_to_other_memory(schedule: str, home: str) -> None:
    pair = Pair(schedule)
    if home == "host":
        source, target = (pair.node.host.allocate(1024, 0) for _ in range(2))
        source.bytes.views[4][:] = words(256)
        src, dst = source.address, target.address
    else:
        src, dst = pair.put(pair.peer, words(256)), pair.put(pair.peer, np.zeros(256, np.uint32))
    body = """
    mov.u32 %r20, tile;
    shl.b32 %r21, %r2, 4;
    add.u32 %r22, %r20, %r21;
    cvt.u64.u32 %rd4, %r21;
    add.s64 %rd5, %rd1, %rd4;
    cp.async.cg.shared.global [%r22], [%rd5], 16;
    cp.async.wait_all;
    fence.proxy.async.shared::cta;
    mov.u32 %r23, full;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra DONE;
    mbarrier.init.shared.b64 [%r23], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r23], 512;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r20+512], [%rd1+512], 512, [%r23];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r23], 0;
    @!%p2 bra WAIT;
    cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r20], 1024;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    DONE:
    """
    counters = pair.run(body, dst, src, shared=TILE).counters
    found = target.bytes.views[4] if home == "host" else pair.read(pair.peer, dst, 256)
    assert (found == words(256)).all()
    loaded = counters.host_load_bytes if home == "host" else counters.peer_load_bytes
    stored = counters.host_store_bytes if home == "host" else counters.peer_store_bytes
    assert (loaded, stored) == (1024, 1024)
    assert counters.bytes_async == 2048


# ------------------------------------------------------------------------------------ strength and scope


@pytest.mark.parametrize(
    ("instruction", "what", "scope"),
    [
        ("st.relaxed.gpu.global.u32 [%rd1], 1;", "store", "gpu"),
        ("ld.acquire.cta.global.u32 %r10, [%rd1];", "load", "cta"),
        ("atom.global.add.u32 %r10, [%rd1], 1;", "atom", "gpu"),
        ("red.release.gpu.global.add.u32 [%rd1], 1;", "red", "gpu"),
    ],
)
def test_a_scope_that_does_not_reach_the_peer(instruction: str, what: str, scope: str) -> None:
    pair = Pair()
    word = pair.put(pair.peer, np.zeros(1, np.uint32), "flag")
    with report(
        f"{what} of 4 bytes with scope .{scope} by device 0", f"0x{word:x}", "'flag'", "reach device 1",
        "use .sys", rule="scope.too_narrow",
    ):  # fmt: skip
        pair.run(instruction, pair.put(pair.own, words(1)), word, block=1)
    wide = (
        instruction.replace(".cta", ".sys").replace(".gpu", ".sys").replace("atom.global", "atom.sys.global")
    )
    pair.run(wide, pair.put(pair.own, words(1)), word, block=1)


def test_a_scope_that_does_not_reach_the_peer_is_right_for_one_device_alone() -> None:
    """PTX ISA, "Scope": .gpu are the threads of the device, wherever the memory lies."""
    pair = Pair(strict="record")
    word = pair.put(pair.peer, np.zeros(1, np.uint32))
    found = pair.run("atom.global.add.u32 %r10, [%rd1], 1;", pair.put(pair.own, words(1)), word, grid=3)
    assert pair.read(pair.peer, word, 1) == 96
    assert {finding.rule for finding in found.findings} == {"scope.too_narrow"}


class Kernel:
    """Somebody who accesses."""


def noted(log: StrongLog, who: Kernel, device: int, addr: list[int], shape: Shape) -> None:
    kind = "store" if shape.writes else "load"
    label = f"{kind}.{shape.scope} of {shape.nbytes} bytes by device {device}"
    log.note(who, device, np.array(addr), shape, label)


def test_two_devices_and_different_sizes_are_a_race() -> None:
    # Case D18: byte stores against an eight-byte polling load.
    log, poller, writer = StrongLog(), Kernel(), Kernel()
    noted(log, poller, 0, [0x1000, 0x1008], Shape(8, False, "sys"))
    noted(log, writer, 1, [0x2000], Shape(1, True, "sys"))
    with report(
        "store.sys of 1 bytes by device 1 at 0x100b", "load.sys of 8 bytes by device 0 at 0x1008",
        "mixed-size", rule="race.mixed_size",
    ) as caught:  # fmt: skip
        noted(log, writer, 1, [0x2001, 0x100B], Shape(1, True, "sys"))
    assert caught.value.index == 1
    log.forget(poller)
    noted(log, writer, 1, [0x100B], Shape(1, True, "sys"))


def test_one_size_and_scope_for_each_word_is_no_race() -> None:
    log, one, two = StrongLog(), Kernel(), Kernel()
    for _ in range(2):
        noted(log, one, 0, [0x1000, 0x1004], Shape(4, False, "sys"))
        noted(log, two, 1, [0x1004], Shape(4, True, "sys"))
    noted(log, two, 1, [0x1000], Shape(8, False, "sys"))  # reads do not conflict
    with report("load.gpu of 4 bytes by device 0", "scope .gpu", "store.sys", rule="scope.too_narrow"):
        noted(log, one, 0, [0x1004], Shape(4, False, "gpu"))


# ----------------------------------------------------------------------------------- two kernels at a time

ENTRY = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry work(.param .u64 data, .param .u64 flag, .param .u64 out, .param .u64 back)
{
.reg .pred %p<8>;
.reg .b32 %r<24>;
.reg .b64 %rd<12>;
ld.param.u64 %rd1, [data];
ld.param.u64 %rd2, [flag];
ld.param.u64 %rd0, [out];
ld.param.u64 %rd3, [back];
mov.u32 %r2, %tid.x;
mul.wide.u32 %rd4, %r2, 4;
add.s64 %rd5, %rd1, %rd4;
add.s64 %rd6, %rd0, %rd4;
"""
WAIT = "WAIT: ld.acquire.sys.global.u32 %r11, [%rd2];\nsetp.eq.u32 %p3, %r11, 0;\n@%p3 bra WAIT;\n"
READ = "ld.global.u32 %r12, [%rd5];\nst.global.u32 [%rd6], %r12;\nDONE:\n"


class Two:
    """A sender on device 0 and a receiver on device 1, in one process. ``data``, ``flag``: 32 words and 2 of
    the receiver, ``back``: one of the sender."""

    def __init__(self, sender: str, receiver: str, *, grid: int = 1, **settings: Any) -> None:
        self.grid = (grid, 1)
        self.driver = open_driver("h100", "h100", executor=Launch, **settings)
        self.contexts = open_node(self.driver)
        self.streams, self.functions = [], []
        for i, body in enumerate((sender, receiver)):
            ok(self.driver.cuCtxSetCurrent(self.contexts[i]))
            ok(self.driver.cuCtxEnablePeerAccess(self.contexts[1 - i], 0))
            self.functions.append(load(self.driver, f"{ENTRY}{body}\nret;\n}}\n".encode()))
            self.streams.append(ok(self.driver.cuStreamCreate(1)))
        self.data, self.flag, self.out = (array_of(self.driver, np.zeros(32, np.uint32)) for _ in range(3))
        ok(self.driver.cuCtxSetCurrent(self.contexts[0]))
        self.back = array_of(self.driver, np.zeros(32, np.uint32))

    def run(self) -> np.ndarray:
        """What the receiver wrote to ``out``."""
        for i in range(2):
            self.launch(i)
        for i in range(2):
            ok(self.finish(i), self.driver)
        return values_at(self.driver, self.out, 32)

    def launch(self, i: int) -> None:
        ok(self.driver.cuCtxSetCurrent(self.contexts[i]))
        values = tuple(map(int, (self.data, self.flag, self.out, self.back)))
        params = (values, (ctypes.c_void_p,) * 4)
        grid = (self.grid[i], 1, 1)
        ok(launch(self.driver, self.functions[i], self.streams[i], params, grid=grid), self.driver)

    def finish(self, i: int) -> Any:
        ok(self.driver.cuCtxSetCurrent(self.contexts[i]))
        return self.driver.cuStreamSynchronize(self.streams[i])


@every_schedule
@pytest.mark.parametrize("release", ["st.release", "fence", "atom.acq_rel"])
def test_a_message_to_a_running_kernel(schedule: str, release: str) -> None:
    two = Two(STORES.replace("FLAG", RELEASES[release]) + "\nDONE:\n", WAIT + READ, schedule=schedule, seed=1)
    assert (two.run() == words(32)).all()


def test_a_running_kernel_sees_the_flag_before_the_data_without_a_release() -> None:
    sender = STORES.replace("FLAG", UNORDERED["st.relaxed"]) + "\nDONE:\n"
    assert (Two(sender, WAIT + READ, schedule="async-latest").run() == 0).all()


FENCE_GPU = STORES.replace("FLAG", RELEASES["fence.gpu"]) + "\nDONE:\n"


def test_a_fence_of_the_own_device_orders_nothing_for_another() -> None:
    """The ISA wants scopes that include the other thread ("Morally strong operations"); the CTA of the same
    device above may rely on it."""
    assert (Two(FENCE_GPU, WAIT + READ, schedule="async-latest").run() == 0).all()
    right = Two(FENCE_GPU.replace("acq_rel.gpu", "acq_rel.sys"), WAIT + READ, schedule="async-latest")
    assert (right.run() == words(32)).all()


LAST = """
add.u32 %r10, %r2, 1;
mov.u32 %r3, %ctaid.x;
setp.ne.u32 %p1, %r3, 0;
@%p1 bra LAST;
st.global.u32 [%rd5], %r10;
bar.sync 0;
setp.eq.u32 %p2, %r2, 0;
fence.acq_rel.gpu;
@%p2 st.relaxed.gpu.global.u32 [%rd3], 1;
bra DONE;
LAST:
setp.ne.u32 %p2, %r2, 0;
@%p2 bra DONE;
OTHER: ld.acquire.gpu.global.u32 %r11, [%rd3];
setp.eq.u32 %p3, %r11, 0;
@%p3 bra OTHER;
st.release.sys.global.u32 [%rd2], 1;
DONE:
"""
"""CTA 0 sends data and tells CTA 1 of its own device, which signals device 1: release is cumulative."""


@every_schedule
def test_a_release_covers_what_another_cta_had_released_to_it(schedule: str) -> None:
    two = Two(LAST, WAIT + READ, schedule=schedule, grid=2)
    assert (two.run() == words(32)).all()


MIXED = "WAIT: ld.relaxed.sys.global.u64 %rd7, [%rd2];\nsetp.eq.u64 %p3, %rd7, 0;\n@%p3 bra WAIT;\n"
BYTE = "cvt.u64.u32 %rd8, %r2;\nadd.s64 %rd9, %rd2, %rd8;\nst.relaxed.sys.global.u8 [%rd9], %r2;\n"


@pytest.mark.parametrize("schedule", ["min-pc", "timed"])
def test_bytes_stored_to_a_word_that_another_device_polls(schedule: str) -> None:
    # Case D18: one 8-byte flag of which every peer writes one byte.
    two = Two(f"setp.gt.u32 %p1, %r2, 7;\n@%p1 ret;\n{BYTE}", MIXED, schedule=schedule, seed=2)
    for i in (1, 0):
        two.launch(i)
    refused(
        two.driver, two.finish(0), "ILLEGAL_ADDRESS", "in different sizes",
        "store.sys of 1 bytes by device 0", "load.sys of 8 bytes by device 1", "mixed-size race",
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["min-pc", "timed", "random"])
def test_a_word_for_each_peer_is_right(schedule: str) -> None:
    two = Two("st.release.sys.global.u32 [%rd2], 1;", WAIT + READ, schedule=schedule, seed=2)
    assert (two.run() == 0).all()


def test_a_poll_of_the_own_flag_with_too_narrow_a_scope() -> None:
    two = Two("st.release.sys.global.u32 [%rd2], 1;", WAIT.replace("acquire.sys", "acquire.gpu"))
    for i in (1, 0):
        two.launch(i)
    refused(
        two.driver, two.finish(0), "ILLEGAL_ADDRESS", "scope .gpu", "does not reach another device",
        "store.sys of 4 bytes by device 0", "load.gpu of 4 bytes by device 1",
    )  # fmt: skip


PING = """
mov.u32 %r20, 1;
ROUND:
st.release.sys.global.u32 [THERE], %r20;
WAIT: ld.acquire.sys.global.u32 %r11, [HERE];
setp.ne.u32 %p3, %r11, %r20;
@%p3 bra WAIT;
add.u32 %r20, %r20, 1;
setp.le.u32 %p4, %r20, COUNT;
@%p4 bra ROUND;
"""
PONG = PING.replace("st.release.sys.global.u32 [THERE], %r20;\n", "").replace(
    "@%p3 bra WAIT;\n", "@%p3 bra WAIT;\nst.release.sys.global.u32 [THERE], %r20;\n"
)


def round_trips(count: int) -> float:
    """Modelled seconds of so many round trips of one thread each."""
    one = "setp.ne.u32 %p1, %r2, 0;\n@%p1 ret;\n"
    ping = PING.replace("THERE", "%rd2").replace("HERE", "%rd3").replace("COUNT", str(count))
    pong = PONG.replace("THERE", "%rd3").replace("HERE", "%rd2").replace("COUNT", str(count))
    two = Two(one + ping, one + pong, schedule="timed")
    two.run()
    record = two.driver.node.devices[0].last_launch
    assert record is not None
    return record.end_s - record.start_s


SLOWLY = "mov.u32 %r9, 400;\nSLOW: sub.u32 %r9, %r9, 1;\nsetp.ne.u32 %p4, %r9, 0;\n@%p4 bra SLOW;\n"


@every_schedule
def test_a_poll_by_weak_loads_of_what_another_device_writes(schedule: str) -> None:
    """Told where the loop has waited; a write that came before its first turn is none of its business."""
    send = SLOWLY + STORES.replace("FLAG", RELEASES["st.release"]) + "\nDONE:\n"
    two = Two(send, WAIT.replace(".acquire.sys", "") + READ, schedule=schedule)
    for i in (1, 0):
        two.launch(i)
    report = refused(
        two.driver, two.finish(0), "ILLEGAL_ADDRESS", "a loop polls with weak loads", "ld.relaxed.sys"
    )
    for side in ("a loop of weak loads by device 1", "store.sys of 4 bytes by device 0"):
        assert side in report
    right = Two(send, WAIT.replace(".acquire.sys", ".volatile") + READ, schedule=schedule)
    assert (right.run() == words(32)).all()


def test_half_a_round_trip_is_what_the_clock_says_of_a_flag() -> None:
    (row,) = [done for done in replay(load_profile("h20")) if done.row.id == "flag-nvlink"]
    one_way_us = (round_trips(9) - round_trips(1)) / 16 * 1e6
    assert one_way_us == pytest.approx(row.modelled, rel=0.05)


# ----------------------------------------------------------------------------------- several processes


def two_processes(schedule: str = "min-pc") -> tuple[Pair, Pair]:
    """Two processes on one node; the first allocates, the second runs on device 0."""
    owner, other = Pair(schedule), Pair(schedule)
    other.node = owner.node
    other.process = owner.node.attach("rank 1")
    other.context.peers.add(1)
    other.own, other.peer = owner.own, owner.peer
    return owner, other


@pytest.mark.parametrize("where", ["own", "peer"])
def test_a_pointer_of_another_process_is_no_pointer(where: str) -> None:
    owner, other = two_processes()
    memory = getattr(owner, where)
    src = other.put(other.own, words(32))
    dst = owner.put(memory, np.zeros(32, np.uint32), "slab")
    with report("store", "'slab'", "process 0", "rank 1 has not opened", "IPC handle", rule="memory.foreign"):
        other.run(COPY, dst, src)
    assert (other.read(memory, dst, 32) == 0).all()


@every_schedule
def test_memory_of_another_process_on_the_same_device(schedule: str) -> None:
    # Several processes on one GPU: opened memory is the device's own, no link is crossed.
    owner, other = two_processes(schedule)
    behind = owner.put(owner.own, np.zeros(64, np.uint32))
    device, space = owner.node.devices[0], other.process.space
    start = space.fresh(256)
    space.map(Mapping(start, 256, MappingKind.IPC, device.memory, behind, device, None, "slab"))
    src = other.put(other.own, words(32))
    counters = other.run(COPY, start + 128, src).counters
    assert (other.read(owner.own, behind, 64) == [*[0] * 32, *range(1, 33)]).all()
    assert counters.peer_store_bytes == 0 and counters.global_store_bytes == 128
    assert other.node.links.traffic[0].nvlink.sent_bytes == 0


# ------------------------------------------------------------------------------------------- odd operands


def test_cp_async_of_no_bytes_from_nowhere() -> None:
    # With a source size of 0 the address means nothing (PTX ISA, "cp.async").
    pair = Pair()
    src, out = pair.put(pair.peer, words(32)), pair.put(pair.own, np.zeros(32, np.uint32))
    body = """
    mov.u32 %r20, tile;
    shl.b32 %r21, %r2, 2;
    add.u32 %r22, %r20, %r21;
    cvt.u64.u32 %rd4, %r21;
    add.s64 %rd5, %rd1, %rd4;
    setp.lt.u32 %p1, %r2, 8;
    selp.b64 %rd5, 0x2badbad0000, %rd5, %p1;
    selp.u32 %r23, 0, 4, %p1;
    cp.async.ca.shared.global [%r22], [%rd5], 4, %r23;
    cp.async.wait_all;
    ld.shared.u32 %r24, [%r22];
    st.global.u32 [%rd3], %r24;
    """
    counters = pair.run(body, out, src, shared=TILE).counters
    assert (pair.read(pair.own, out, 32) == [*[0] * 8, *range(9, 33)]).all()
    assert counters.peer_load_bytes == 24 * 4


TENSOR = """
mov.u32 %r20, full;
mov.u32 %r22, tile;
mov.b64 %rd6, map;
cvta.param.u64 %rd6, %rd6;
setp.ne.u32 %p1, %r2, 0;
@%p1 bra DONE;
mbarrier.init.shared::cta.b64 [%r20], 1;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 512;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
    [%r22], [%rd6, {0, 0}], [%r20];
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p8, [%r20], 0;
@!%p8 bra WAIT;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd6, {0, 4}], [%r22];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


@every_schedule
@pytest.mark.parametrize("way", ["window", "mapping"])
def test_a_tensor_of_a_peer(schedule: str, way: str) -> None:
    # 8 rows of 32 words; the first four are copied over the last four.
    pair = Pair(schedule)
    rows = pair.put(pair.peer, words(256), "tensor")
    where = rows if way == "window" else mapped(pair, rows, 1024, {0}, MappingKind.VMM)
    tensor = encode("UINT32", where, [32, 8], [128], [32, 4])
    params = struct.pack("<QQQI", 0, 0, 0, 0).ljust(64, b"\0") + tensor
    k = kernel(TENSOR, shared=TILE, params=", .param .align 64 .b8 map[128]")
    counters = run(
        pair.node.devices[0],
        k,
        params,
        (1, 1, 1),
        (32, 1, 1),
        None,
        0,
        schedule=schedule,
        context=pair.context,
    ).counters
    assert (pair.read(pair.peer, rows, 256) == np.tile(words(128), 2)).all()
    assert (counters.peer_load_bytes, counters.peer_store_bytes) == (512, 512)
