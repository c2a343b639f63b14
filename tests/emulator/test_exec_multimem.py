"""multimem.st, .red and .ld_reduce: what they do at every member of a multicast mapping, and when."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import numpy as np
import pytest

from smfree.emulator.address_space import Mapping, MappingKind
from smfree.emulator.exec.launch import LaunchResult, run
from smfree.emulator.node import Node
from tests.emulator.exec_kit import every_schedule, kernel, report

NBYTES = 4096


@dataclass
class Team:
    """Devices of one process with a shard each, mapped at one multicast address. ``members``: those bound."""

    schedule: str = "min-pc"
    seed: int = 0
    members: tuple[int, ...] = (0, 1, 2)
    fill: int = 0
    node: Node = field(init=False)

    def __post_init__(self) -> None:
        self.node = Node(["h100"] * 3, schedule=self.schedule, seed=self.seed)
        self.process = self.node.attach()
        self.shards = []
        for device in self.node.devices:
            where = device.memory.alloc(NBYTES, label=f"shard {device.ordinal}", owner=self.process)
            device.memory.write(where, np.full(NBYTES // 4, self.fill, np.uint32))
            self.shards.append(where)
        devices = [self.node.devices[i] for i in self.members]
        self.start = self.process.space.fresh(NBYTES)
        self.process.space.map(
            Mapping(
                self.start, NBYTES, MappingKind.MULTICAST, None, 0, None, {0, 1, 2}, "team",
                members=[(d.memory, self.shards[d.ordinal], d) for d in devices],
            )
        )  # fmt: skip

    def run(self, body: str, out: int = 0, a: int = 0, grid: int = 1, block: int = 32) -> LaunchResult:
        """Run a body of PTX on device 0; %rd1 is the multicast address unless ``a`` is given."""
        params = struct.pack("<QQQI", out, a or self.start, self.shards[0], 0)
        return run(
            self.node.devices[0], kernel(body), params, (grid, 1, 1), (block, 1, 1), None, 0,
            schedule=self.schedule, seed=self.seed, context=self.process.contexts[0],
        )  # fmt: skip

    def shard(self, ordinal: int, count: int, dtype: type = np.uint32) -> np.ndarray:
        memory = self.node.devices[ordinal].memory
        return np.frombuffer(
            bytes(memory.read(self.shards[ordinal], count * np.dtype(dtype).itemsize)), dtype
        )

    def set(self, ordinal: int, array: np.ndarray) -> None:
        self.node.devices[ordinal].memory.write(self.shards[ordinal], array)


PLACE = "mul.wide.u32 %rd4, %r2, 4;\nadd.s64 %rd5, %rd1, %rd4;\nadd.u32 %r10, %r2, 1;\n"
PLACE16 = "mul.wide.u32 %rd4, %r2, 16;\nadd.s64 %rd5, %rd1, %rd4;\n"


@every_schedule
@pytest.mark.parametrize("order", ["weak", "relaxed.sys", "release.sys"])
def test_a_store_reaches_every_member(schedule: str, order: str) -> None:
    team = Team(schedule)
    counters = team.run(f"{PLACE}multimem.st.{order}.global.u32 [%rd5], %r10;").counters
    for ordinal in range(3):
        assert (team.shard(ordinal, 33) == [*range(1, 33), 0]).all()
    assert counters.peer_store_bytes == 128  # sent once
    signals = (0, 0) if order == "weak" else (32, 128)
    assert (counters.peer_signals, counters.peer_signal_bytes) == signals
    assert counters.instructions_by_class["multimem"] == 1
    traffic = [one.nvlink for one in team.node.links.traffic]
    assert [t.sent_bytes for t in traffic] == [128, 0, 0]
    assert [t.received_bytes for t in traffic] == [128, 128, 128]
    assert traffic[0].sent_wire_bytes == 128 + 34


def test_a_vector_of_four_floats() -> None:
    team = Team()
    bits = np.array([1, 2, 3, 4], np.float32).view(np.uint32)
    registers = "".join(f"mov.b32 %f{i}, {v};\n" for i, v in enumerate(bits))
    store = "multimem.st.weak.global.v4.f32 [%rd5], {%f0,%f1,%f2,%f3};"
    team.run(f"{{ .reg .f32 %f<4>;\n{registers}{PLACE16}{store} }}", block=4)
    for ordinal in range(3):
        assert (team.shard(ordinal, 16, np.float32) == np.tile([1, 2, 3, 4], 4)).all()


@every_schedule
def test_a_reduction_at_every_member(schedule: str) -> None:
    team = Team(schedule, fill=5)
    team.set(1, np.full(32, 100, np.uint32))
    counters = team.run(f"{PLACE}multimem.red.relaxed.sys.global.add.u32 [%rd5], %r10;", grid=2).counters
    assert (counters.peer_signals, counters.peer_signal_bytes) == (64, 256)
    added = 2 * np.arange(1, 33)
    assert (team.shard(0, 32) == added + 5).all() and (team.shard(1, 32) == added + 100).all()


def test_lanes_that_reduce_into_one_word() -> None:
    team = Team(fill=7)
    team.run("multimem.red.global.max.u32 [%rd1], %r2;\nmultimem.red.release.sys.global.add.u32 [%rd1+4], 3;")
    for ordinal in range(3):
        assert team.shard(ordinal, 2).tolist() == [31, 7 + 96]


def test_a_reduction_of_half_pairs() -> None:
    team = Team()
    for ordinal in range(3):
        team.set(ordinal, np.full(64, ordinal, np.float16))
    one = int(np.full(2, 1.5, np.float16).view(np.uint32)[0])
    add = "multimem.red.relaxed.sys.global.add.v4.f16x2 [%rd5], {%r11,%r11,%r11,%r11};"
    team.run(f"{PLACE16}mov.u32 %r11, {one};\n{add}", block=8)
    for ordinal in range(3):
        assert (team.shard(ordinal, 64, np.float16) == ordinal + 1.5).all()


@every_schedule
def test_a_load_brings_the_sum(schedule: str) -> None:
    team = Team(schedule)
    for ordinal in range(3):
        team.set(ordinal, np.arange(32, dtype=np.uint32) * 10**ordinal)
    memory = team.node.devices[0].memory
    out = memory.alloc(128, owner=team.process)
    body = f"{PLACE}multimem.ld_reduce.relaxed.sys.global.add.u32 %r11, [%rd5];\nst.global.u32 [%rd3], %r11;"
    counters = team.run(body, out).counters
    assert (np.frombuffer(bytes(memory.read(out, 128)), np.uint32) == 111 * np.arange(32)).all()
    assert counters.peer_load_bytes == 128
    traffic = [one.nvlink for one in team.node.links.traffic]
    assert [t.sent_bytes for t in traffic] == [128, 128, 128]
    assert [t.received_bytes for t in traffic] == [128, 0, 0]


@pytest.mark.parametrize(("wide", "expected"), [("", 2048.0), (".acc::f32", 2052.0)])
def test_halves_may_be_summed_in_float32(wide: str, expected: float) -> None:
    team = Team(members=(0, 1, 2))
    for ordinal, value in enumerate((2048.0, 1.0, 1.0)):
        team.set(ordinal, np.full(2, value, np.float16))
    memory = team.node.devices[0].memory
    out = memory.alloc(4, owner=team.process)
    op = f"multimem.ld_reduce.relaxed.sys.global.add{wide}.f16x2 %r11, [%rd1];\nst.global.u32 [%rd3], %r11;"
    team.run(op, out, block=1)
    found = np.frombuffer(bytes(memory.read(out, 4)), np.float16)
    assert (found == (2050.0 if wide else expected)).all()


def test_the_flag_may_arrive_before_the_data_without_a_release() -> None:
    body = f"""{PLACE}
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra CONSUMER;
    multimem.st.weak.global.u32 [%rd5], %r10;
    bar.sync 0;
    setp.ne.u32 %p2, %r2, 0;
    @%p2 bra DONE;
    multimem.st.ORDER.sys.global.u32 [%rd1+1024], 1;
    bra DONE;
    CONSUMER:
    ld.acquire.sys.global.u32 %r11, [%rd2+1024];
    setp.eq.u32 %p3, %r11, 0;
    @%p3 bra CONSUMER;
    add.s64 %rd6, %rd2, %rd4;
    ld.global.u32 %r12, [%rd6];
    add.s64 %rd7, %rd0, %rd4;
    st.global.u32 [%rd7], %r12;
    DONE:
    """
    seen = {}
    for order in ("relaxed", "release"):
        team = Team("async-latest")
        memory = team.node.devices[0].memory
        out = memory.alloc(128, owner=team.process)
        team.run(body.replace("ORDER", order), out, grid=2)
        seen[order] = np.frombuffer(bytes(memory.read(out, 128)), np.uint32)
    assert (seen["release"] == np.arange(1, 33)).all()
    assert (seen["relaxed"] == 0).all()


ALL = (0, 1, 2)
STORE = "multimem.st.weak.global.u32 [%rd1], 1;"


@pytest.mark.parametrize(
    ("members", "body", "rule", "phrases"),
    [
        ((1, 2), STORE, "multimem.member", ("device 0", "'team'", "devices bound: 1, 2")),
        ((), STORE, "multimem.member", ("devices bound: none", "cuMulticastBindMem")),
        (ALL, "multimem.st.weak.global.u32 [%rd1+2], 1;", "memory.misaligned", ("must be aligned",)),
        (ALL, "multimem.st.weak.global.u32 [%rd1+4096], 1;", "multimem.address", ("multicast mapping",)),
        (ALL, "multimem.st.weak.global.u32 [%rd2], 1;", "multimem.address", ("0x10000000", "cuMemMap")),
        (ALL, "multimem.st.relaxed.gpu.global.u32 [%rd1], 1;", "scope.too_narrow", (".gpu", "device 1")),
        (ALL, "ld.global.u32 %r10, [%rd1];", "memory.multicast", ("'team'", "multimem")),
        (ALL, "st.global.u32 [%rd1], %r2;", "memory.multicast", ("only multimem instructions",)),
    ],
)  # fmt: skip
def test_what_is_refused(members: tuple[int, ...], body: str, rule: str, phrases: tuple[str, ...]) -> None:
    with report(*phrases, "thread 0", rule=rule):
        Team(members=members).run(body, block=1)


def test_a_multicast_store_takes_the_senders_port_once() -> None:
    # 64 KiB to three members in about the time that one of them would take.
    team = Team("timed")
    body = f"{PLACE16}" + "\n".join(
        f"multimem.st.weak.global.v4.f32 [%rd5+{16 * 32 * i}], {{%f0,%f0,%f0,%f0}};" for i in range(4)
    )
    cycles = team.run(f"{{ .reg .f32 %f<1>;\nmov.f32 %f0, 0f3f800000;\n{body} }}").cycles
    # one way there, one back for the acknowledgement, and the L2's write in between
    assert 1.98 * (2 * 342) < cycles < 1.98 * (2 * 342 + 250)
