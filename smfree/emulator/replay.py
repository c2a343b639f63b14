"""What the clock says about the public measurements that did not fix it.

``python -m smfree.emulator.replay h100`` prints every parameter with its source, then each test row: the
public value, the modelled value and the relative error. No kernel runs here; the rows are replayed on the
bare clock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from smfree.emulator.clock import F8, Clock
from smfree.emulator.crossing import Asked, Crossing, packets_of
from smfree.emulator.links import Links
from smfree.emulator.profile import Profile, PublishedRow, load, names

_LOOP_INSTRUCTIONS = (
    6  # of the producer's loop around one bulk copy: issue, expect, arrive, wait, add, branch
)
_PUSH_INSTRUCTIONS = 9  # PTX instructions of a copy loop's turn
_ROUNDS = 24  # half of them to settle, half counted


class Replayed(NamedTuple):
    """One test row: ``public`` is from elsewhere, ``modelled`` from the clock; ``error`` is relative."""

    row: PublishedRow
    modelled: float

    @property
    def error(self) -> float:
        return self.modelled / self.row.value - 1.0


def _latency(clock: Clock, args: Mapping[str, float], *, bulk: bool) -> float:
    """Cycles from issue to data of one access, nothing else running."""
    sm, t = np.zeros(1, dtype=np.int64), np.zeros(1)
    nbytes = np.array([int(args["bytes"])])
    hit = nbytes if args["hit"] else np.zeros_like(nbytes)
    if bulk:
        return float(clock.bulk_load(sm, t, nbytes, hit, np.ones(1, dtype=np.int64))[0])
    return float(clock.global_load(sm, t, nbytes, -(-nbytes // 32), hit)[0])


def _bulk_loop(clock: Clock, args: Mapping[str, float], *, tensor: bool) -> float:
    """GiB/s of a kernel whose every CTA keeps one bulk copy from DRAM in flight and waits for it."""
    device = clock.profile.device
    ctas = device.num_sms * int(args["ctas"])
    sm = np.arange(ctas) % device.num_sms
    size = int(args["bytes"])
    nbytes = np.full(ctas, size)
    none, one = np.zeros(ctas, dtype=np.int64), np.ones(ctas, dtype=np.int64)
    t: F8 = np.zeros(ctas)
    middle = 0.0
    for index in range(_ROUNDS):
        if index == _ROUNDS // 2:
            middle = float(t.mean())
        t = clock.issue(sm, t, _LOOP_INSTRUCTIONS)
        t = clock.bulk_load(sm, t, nbytes, none, one, tensor=tensor)
        t = t + clock.mbarrier_arrive_cycles + clock.mbarrier_wait_wake_cycles
    per_round = (float(t.mean()) - middle) / (_ROUNDS - _ROUNDS // 2)
    return ctas * size / clock.seconds(per_round) / 2**30


def _stream(clock: Clock, reads: int, writes: int, *, hit: bool) -> float:
    """GB/s of all SMs streaming through the LSU with much more in flight than needed."""
    device = clock.profile.device
    warps = device.num_sms * 64
    sm = np.arange(warps) % device.num_sms
    nbytes, sectors = np.full(warps, 512), np.full(warps, 16)
    none = np.zeros(warps, dtype=np.int64)
    end, t = 0.0, np.zeros(warps)
    for _ in range(4):
        for _ in range(reads):
            end = max(end, float(clock.global_load(sm, t, nbytes, sectors, nbytes if hit else none).max()))
        for _ in range(writes):
            end = max(
                end, float(clock.global_store(sm, t, nbytes, sectors, none if hit else nbytes)[1].max())
            )
    latency = clock.profile.l2.hit_latency_cycles if hit else clock.profile.dram.latency_cycles
    return 4 * (reads + writes) * warps * 512 / clock.seconds(end - latency) / 1e9


class _Peer(NamedTuple):
    """A second GPU of the same kind."""

    ordinal: int
    clock: Clock


def _across(clock: Clock) -> tuple[Crossing, Links]:
    """The way from a GPU to another one of its kind."""
    links, per_ns = Links([clock.profile] * 2), clock.clock_mhz / 1e3
    there = _Peer(1, Clock(clock.profile))
    return Crossing(clock, links, 0, there, lambda c: c / per_ns, lambda ns: ns * per_ns), links


def _asked(count: int, nbytes: int) -> Asked:
    """``count`` requests of whole lines, none of them in the other's L2."""
    size = np.full(count, float(nbytes))
    return Asked(size, size, packets_of(size), size)


def _peer_stream(clock: Clock, args: Mapping[str, float], *, bulk: bool) -> float:
    """GB/s of all SMs that store to a peer, a warp 512 bytes at a time or the TMA ``bytes``."""
    across, _ = _across(clock)
    sms, size = clock.profile.device.num_sms, int(args.get("bytes", 512))
    each = max(1, (64 << 10) // size)
    sm = np.arange(sms * each) % sms
    t: F8 = np.zeros(len(sm))
    end = 0.0
    for _ in range(_ROUNDS):
        asked = _asked(len(sm), size)
        done = across.bulk_store(sm, t, asked, tensor=False) if bulk else across.store(sm, t, asked)
        end = max(end, float(done.performed.max()))
        t = done.accepted
    return _ROUNDS * len(sm) * size / (clock.seconds(end) * 1e9 - across.one_way_ns)


def _push(clock: Clock, args: Mapping[str, float]) -> float:
    """GB/s of one SM whose ``threads`` load 16 bytes from DRAM and store them to a peer, again and again."""
    across, _ = _across(clock)
    warps = int(args["threads"]) // 32
    sm = np.zeros(warps, dtype=np.int64)
    t: F8 = np.zeros(warps)
    nbytes, sectors, none = np.full(warps, 512), np.full(warps, 16), np.zeros(warps, dtype=np.int64)
    for _ in range(_ROUNDS):
        t = clock.issue(sm, t, _PUSH_INSTRUCTIONS)
        t = clock.global_load(sm, t, nbytes, sectors, none)
        t = across.store(sm, t, _asked(warps, 512)).accepted
    return _ROUNDS * warps * 512 / (clock.seconds(float(t.max())) * 1e9)


def _copy_engine(clock: Clock, args: Mapping[str, float]) -> float:
    """GB/s of one copy to a peer by a copy engine."""
    _, links = _across(clock)
    start = np.array([clock.profile.host.copy_startup_us * 1e3])
    nbytes = int(args["bytes"])
    return nbytes / float(links.send(0, 1, start, np.array([nbytes]))[0])


def _flag(clock: Clock) -> float:
    """Microseconds from a release of .sys until the peer, which polls its own memory, has seen it."""
    across, _ = _across(clock)
    word = Asked(4, np.array([32.0]), np.ones(1), np.zeros(1))
    start = np.array([clock.fence_cycles["sys"]])
    there = float(across.store(np.zeros(1, dtype=np.int64), start, word).performed[0])
    return clock.seconds(there + clock.profile.l2.hit_latency_cycles) * 1e6


_KINDS: dict[str, Callable[[Clock, Mapping[str, float]], float]] = {
    "load_latency": lambda clock, args: _latency(clock, args, bulk=False),
    "bulk_latency": lambda clock, args: _latency(clock, args, bulk=True),
    "bulk_loop": lambda clock, args: _bulk_loop(clock, args, tensor=False),
    "tensor_loop": lambda clock, args: _bulk_loop(clock, args, tensor=True),
    "dram_stream": lambda clock, args: _stream(clock, int(args["reads"]), int(args["writes"]), hit=False),
    "l2_stream": lambda clock, args: _stream(clock, 1, 0, hit=True),
    "peer_store": lambda clock, args: _peer_stream(clock, args, bulk=False),
    "peer_bulk": lambda clock, args: _peer_stream(clock, args, bulk=True),
    "peer_push": _push,
    "peer_copy": _copy_engine,
    "peer_flag": lambda clock, args: _flag(clock),
}


def replay(profile: Profile) -> list[Replayed]:
    """Model every test row of the profile, in its own unit."""
    return [
        Replayed(row, _KINDS[row.kind](Clock(profile.variant(row.variant)), row.args))
        for row in profile.tests
    ]


def error_table(profile: Profile) -> list[str]:
    """The test rows as lines of a Markdown table (docs/emulator.md holds a copy)."""
    lines = ["| test row | board | unit | public | modelled | error |", "|---|---|---|---:|---:|---:|"]
    for done in replay(profile):
        row = done.row
        lines.append(
            f"| {row.id} | {row.variant or profile.key} | {row.unit} | {row.value:.1f} | {done.modelled:.1f} "
            f"| {done.error:+.1%} |"
        )
    return lines


def parameter_table(profile: Profile, *, assumed_only: bool = False) -> list[str]:
    """The clock's parameters as lines of a Markdown table, all or only those no public row fixes."""
    lines = ["| parameter | value | unit | source |", "|---|---:|---|---|"]
    for item in profile.parameters(clock_only=True):
        if not assumed_only or item.source.startswith("assumed"):
            lines.append(f"| {item.path} | {item.value:g} | {item.unit} | {item.source} |")
    return lines


def main(arguments: list[str]) -> int:
    """Print parameters and test rows of the named profiles (default: all)."""
    for name in arguments or names():
        profile = load(name)
        print(f"## {profile.key}: {profile.device.name}\n")
        print("\n".join(parameter_table(profile)))
        print("\nRows that fixed a parameter: " + ", ".join(profile.fixed_by) + "\n")
        print("\n".join(error_table(profile)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
