"""What scripts/published.py runs on emulated nodes: pushes, copies, flags, gathers; all modelled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from bench.reductions import outside_bound
from kernels.ipc import flag_latency
from kernels.ipc.allgather import allgather, throughput_config
from kernels.ipc.bulk import BulkPullConfig, BulkPushConfig
from kernels.ipc.flag_latency import FlagLatencyConfig
from kernels.ipc.group import Group
from kernels.ipc.pull import PullConfig
from kernels.ipc.push import PushConfig
from kernels.reduce import allreduce as reductions
from kernels.reduce.config import ReduceConfig
from kernels.reduce.elements import Element
from kernels.reduce.workspace import Workspace
from smfree.cuda import Device, enable_peers
from smfree.emulator.driver import Driver
from smfree.emulator.node import Node
from smfree.emulator.profile import Profile, load
from smfree.measure.handles import costs_of_ranks
from smfree.measure.host_costs import Backing, Operation
from smfree.measure.queue import DeviceQueue
from smfree.measure.timer import DeviceTimer
from smfree.model.crossover import format_bytes

KIB, MIB = 1 << 10, 1 << 20
LIMIT_S = 600
SATURATED = 0.95
"""A link counts as full from this share of its best rate on."""
MOVES = 0.02
"""A parameter that moves a rate by less does not matter to it."""

Config = PushConfig | PullConfig | BulkPushConfig | BulkPullConfig
"""What an SM does; the number of SMs is given apart."""
WAYS: Mapping[type, str] = {
    PushConfig: "sm.push",
    PullConfig: "sm.pull",
    BulkPushConfig: "tma.push",
    BulkPullConfig: "tma.pull",
}


@contextmanager
def node(gpu: str | Profile, count: int) -> Iterator[list[Device]]:
    """Emulated GPUs of one machine."""
    profile = gpu if isinstance(gpu, Profile) else load(gpu)
    driver = Driver(Node([profile] * count))
    devices = [Device(driver, n, spec=f"emu:{profile.key}:{n}", is_emulated=True) for n in range(count)]
    try:
        yield devices
    finally:
        for device in devices:
            device.close()


@contextmanager
def group(gpu: str | Profile, count: int, pool_bytes: int = 64 * MIB) -> Iterator[Group]:
    """A rank on each GPU of an emulated node."""
    with node(gpu, count) as devices, Group.local(devices, pool_bytes=pool_bytes) as ranks:
        yield ranks


class OneWay:
    """The shard of rank 0 of two goes to rank 1, which has none: what SMs and links give in one direction."""

    def __init__(self, ranks: Group) -> None:
        self._ranks = ranks

    def gbps(self, config: Config, ctas: int) -> float:
        """1e9 bytes/s of so many SMs with a CTA each: the slope between two lengths, so launch and barriers
        cancel. The source is in DRAM."""
        rounds = 8, 24  # of what a CTA has in flight
        short, long = (ctas * count * config.bytes_in_flight_per_sm for count in rounds)
        seconds = [self._seconds(replace(config, ctas=ctas), nbytes) for nbytes in (short, long)]
        return (long - short) / (seconds[1] - seconds[0]) / 1e9

    def _seconds(self, config: Config, nbytes: int) -> float:
        sender, receiver = self._ranks.members
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        with self._ranks.symmetric(nbytes, "shard") as dst:
            dst.array(sender.rank).copy_from(data)
            sender.device.synchronize()
            sender.device.emulator.l2.flush()
            way = WAYS[type(config)]
            allgather(self._ranks, dst, way=way, counts=[nbytes, 0], config=config)
            self._ranks.wait(timeout_s=LIMIT_S)
            assert np.array_equal(dst.array(receiver.rank).numpy(), data), f"{way} is wrong"
        mover = receiver if way.endswith("pull") else sender
        launch = mover.device.emulator.last_launch
        return float(launch.end_s - launch.start_s)

    def saturating(self, config: Config, full_gbps: float) -> int:
        """The fewest SMs that reach ``SATURATED`` of a link's best rate."""
        enough = SATURATED * full_gbps
        count = max(1, int(enough / self.gbps(config, 1)))
        while self.gbps(config, count) < enough:
            count += 1
        while count > 1 and self.gbps(config, count - 1) >= enough:
            count -= 1
        return count


def one_way_gbps(gpu: str | Profile, config: Config, ctas: int) -> float:
    """:meth:`OneWay.gbps` on a node of its own."""
    with group(gpu, 2) as ranks:
        return OneWay(ranks).gbps(config, ctas)


def threads(count: int, unroll: int = 1) -> PushConfig:
    """A push by so many threads per SM, each with ``unroll`` loads of 16 bytes under way."""
    return PushConfig(threads=count, unroll=unroll)


def tiles(tile_bytes: int, num_stages: int) -> BulkPushConfig:
    """A push by the TMA, so many tiles under way per SM."""
    return BulkPushConfig(threads=32, tile_bytes=tile_bytes, num_stages=num_stages)


def pulling(count: int, unroll: int = 1) -> PullConfig:
    """A pull by so many threads per SM, each with ``unroll`` loads of 16 bytes under way."""
    return PullConfig(threads=count, unroll=unroll)


def pulling_tiles(tile_bytes: int, num_stages: int) -> BulkPullConfig:
    """A pull by the TMA, so many tiles under way per SM."""
    return BulkPullConfig(threads=32, tile_bytes=tile_bytes, num_stages=num_stages)


def described(config: Config) -> str:
    """Engine, threads and bytes in flight per SM."""
    flight = f"{format_bytes(config.bytes_in_flight_per_sm)} in flight per SM"
    if isinstance(config, BulkPushConfig | BulkPullConfig):
        each = f"{config.num_stages} tiles of {format_bytes(config.tile_bytes)}"
    else:
        each = f"{config.unroll} x 16 B each"
    return f"`{WAYS[type(config)]}`, {config.threads} threads, {each}: {flight}"


def copy_us(gpu: str, nbytes: int, count: int = 1) -> float:
    """Microseconds of a peer copy by a copy engine, of ``count`` behind each other in one stream."""
    with node(gpu, 2) as (here, there):
        enable_peers([here, there])
        src, dst = here.empty(nbytes).fill(1), there.empty(nbytes)
        here.synchronize()
        timer = DeviceTimer(DeviceQueue(here, here.stream()))
        return timer.batch(lambda _, stream: here.copy(dst, src, stream=stream), count).seconds * 1e6


def copy_gbps(gpu: str, nbytes: int) -> float:
    """1e9 bytes/s of one copy of ``nbytes``, start-up included. Beyond 64 MiB the line through two shorter
    ones is gone along."""
    short, long = 16 * MIB, 64 * MIB
    if nbytes <= long:
        return nbytes / copy_us(gpu, nbytes) / 1e3
    times = copy_us(gpu, short), copy_us(gpu, long)
    return nbytes / (times[1] + (times[1] - times[0]) / (long - short) * (nbytes - long)) / 1e3


def puts_us(gpu: str, *, batched: bool, count: int = 16) -> float:
    """Host and device together: microseconds of each of ``count`` puts of a byte, until the host knows."""
    with node(gpu, 2) as (here, there):
        enable_peers([here, there])
        pairs = [(there.empty(1), here.empty(1).fill(1)) for _ in range(count)]
        stream = here.stream()
        here.synchronize()
        start = here.host_seconds()
        if batched:
            here.copy_batch(pairs, stream=stream)
        else:
            for dst, src in pairs:
                here.copy(dst, src, stream=stream)
        stream.synchronize()
        return (here.host_seconds() - start) / count * 1e6


def flag_us(gpu: str, rounds: int = 16) -> float:
    """One way of a released flag, by ping-pong."""
    with group(gpu, 2, MIB) as ranks, ranks.symmetric(128, "landing") as landing:
        results = {m.rank: m.device.empty(flag_latency.RESULT_WORDS, np.uint64) for m in ranks.members}
        config = FlagLatencyConfig()
        flag_latency.ping_pong(ranks, results, landing, first=0, second=1, config=config, num_rounds=rounds)
        ranks.wait(timeout_s=LIMIT_S)
        return flag_latency.one_way_ns(results[0], rounds) / 1e3


def gather_us(gpu: str, way: str, shard_bytes: int, count: int = 8) -> float:
    """Microseconds of an AllGather in place, from the start of the last rank's kernel to the last one's
    end."""
    with group(gpu, count, count * shard_bytes + MIB) as ranks:
        with ranks.symmetric(count * shard_bytes, "gathered") as dst:
            for member in ranks.members:
                own = dst.array(member.rank).bytes_view(member.rank * shard_bytes, shard_bytes)
                own.fill(1 + member.rank, stream=member.stream)
            allgather(ranks, dst, way=way, config=throughput_config(ranks, way, shard_bytes))
            ranks.wait(timeout_s=LIMIT_S)
            wanted = np.repeat(np.arange(1, 1 + count, dtype=np.uint8), shard_bytes)
            assert all(np.array_equal(dst.array(m.rank).numpy(), wanted) for m in ranks.members)
        launches = [member.device.emulator.last_launch for member in ranks.members]
        return float(max(one.end_s for one in launches) - max(one.start_s for one in launches)) * 1e6


def reduce_gbps(
    gpu: str | Profile, way: str, count: int = 8, lengths: tuple[int, int] = (16 * MIB, 32 * MIB)
) -> float:
    """Bus bandwidth of an AllReduce of bfloat16 in 1e9 bytes/s, 2 (N - 1)/N of the message's bytes per
    second: the slope between two lengths, on the grid that the longer one has."""
    short, long = lengths
    with group(gpu, count, 2 * long + 32 * MIB) as ranks, Workspace(ranks) as workspace:
        config = reductions.throughput_config(workspace, way, long)
        seconds = [_reduce_seconds(workspace, way, nbytes, config) for nbytes in lengths]
    return 2 * (count - 1) / count * (long - short) / (seconds[1] - seconds[0]) / 1e9


def _reduce_seconds(workspace: Workspace, way: str, nbytes: int, config: ReduceConfig) -> float:
    """From the start of the last rank's kernel to the last one's end."""
    ranks, element = workspace.group, Element.BF16
    rng = np.random.default_rng(nbytes)
    given = [element.narrow(rng.standard_normal(nbytes // 2, np.float32)) for _ in ranks.members]
    with ranks.symmetric(nbytes, "terms") as src, ranks.symmetric(nbytes, "sums") as dst:
        for member, bits in zip(ranks.members, given, strict=True):
            src.array(member.rank).copy_from(bits.view(np.uint8), stream=member.stream)
        reductions.allreduce(workspace, dst, src, dtype=element, way=way, config=config)
        ranks.wait(timeout_s=LIMIT_S)
        found = [dst.array(member.rank).numpy() for member in ranks.members]
    assert all(np.array_equal(sums, found[0]) for sums in found), f"{way} differs from rank to rank"
    assert not len(outside_bound(way, found[0].view(element.bits), given, element)), f"{way} is wrong"
    launches = [member.device.emulator.last_launch for member in ranks.members]
    return float(max(one.end_s for one in launches) - max(one.start_s for one in launches))


def open_ms(gpu: str) -> float:
    """What opening an IPC handle costs the host."""
    with Device.open(f"emu:{gpu}") as device:
        return costs_of_ranks(device, Backing.IPC, 2 * MIB, 2, 1)[Operation.OPEN][0] * 1e3


# --- one SM, many SMs -------------------------------------------------------------------------------------

SPREAD: tuple[Config, ...] = (
    threads(1024),
    threads(512),
    threads(256),
    threads(128),
    threads(128, 4),
    tiles(16 * KIB, 8),
    tiles(16 * KIB, 4),
    tiles(16 * KIB, 2),
    tiles(2 * KIB, 8),
)
PULLS: tuple[Config, ...] = (pulling(1024), pulling(256, 8), pulling_tiles(16 * KIB, 4))


@dataclass(frozen=True)
class Spread:
    """What one SM moves, and how many fill a link."""

    gpu: str
    config: Config
    gbps: float
    sms: int

    @property
    def held_ns(self) -> float:
        """How long a byte occupies its place, by Little's law: bytes in flight over the rate."""
        return self.config.bytes_in_flight_per_sm / self.gbps


def spread(gpu: str, configs: Sequence[Config]) -> list[Spread]:
    """Each configuration on one SM and on as many as it needs."""
    found = []
    with group(gpu, 2) as ranks:
        one_way = OneWay(ranks)
        full = one_way.gbps(threads(1024), 32)
        for config in configs:
            found.append(Spread(gpu, config, one_way.gbps(config, 1), one_way.saturating(config, full)))
    return found


@dataclass(frozen=True)
class Shift:
    """One SM's rate with a parameter 20 % lower and higher."""

    path: str
    source: str
    gbps: tuple[float, float]


def shifts(gpu: str, config: Config) -> list[Shift]:
    """The parameters that one SM's rate follows from, the strongest first."""
    profile, found = load(gpu), []
    engine = "tma" if isinstance(config, BulkPushConfig | BulkPullConfig) else "lsu"
    nominal = one_way_gbps(gpu, config, 1)
    for row in profile.parameters(clock_only=True):
        if row.path.split(".")[0] not in (engine, "issue", "l2", "dram", "link"):
            continue
        low, high = (one_way_gbps(profile.replace(row.path, factor=f), config, 1) for f in (0.8, 1.2))
        if max(abs(low - nominal), abs(high - nominal)) > MOVES * nominal:
            found.append(Shift(row.path, row.source, (low, high)))
    return sorted(found, key=lambda shift: -abs(shift.gbps[1] - shift.gbps[0]))
