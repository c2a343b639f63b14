"""What the benchmarks of AllReduce and ReduceScatter share: operands, launches, what is told, proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import nccl
from bench.bench_allgather import copies
from bench.cost import resources
from bench.groups import finish, group_for, workspace_for
from bench.peer_axes import NCCL
from bench.reduce_axes import ReducePoint
from kernels.common import ConfigError
from kernels.ipc.copy_engine import CopyEngineConfig
from kernels.ipc.group import Group
from kernels.ipc.symmetric import Symmetric
from kernels.reduce import allreduce, reduce_scatter
from kernels.reduce.config import ReduceConfig
from kernels.reduce.elements import Element
from kernels.reduce.message import share_of
from kernels.reduce.order import ORDERS, error_bound, expected, true_sum
from kernels.reduce.workspace import Workspace
from smfree.measure.fixture import Measure, Point
from smfree.measure.records import CacheState, Cost, Memory, Question, Traffic

SEED = 12
APART = 4099
"""Elements between the beginnings of two ranks' terms in the same random ones: no two terms are alike."""
BLOCK = 1 << 20
"""Elements that are held against a bound at a time: float64 takes eight bytes of each, several times."""
EMPTY = 0xA5
ONESHOT_BYTES = 256 << 10
SCRATCH_BYTES = 8 << 20
SLACK_BYTES = 1 << 16

Bits = NDArray[np.unsignedinteger]
Launch = Callable[[int], object]


@dataclass(frozen=True)
class Reduction:
    """A collective. ``module``: its interface; ``call``, of that, and ``nccl``, of NCCL, queue it.
    ``halves``: what a rank has to send at least, in (N - 1)/N messages."""

    question: Question
    module: Any
    call: Callable[..., object]
    nccl: Callable[[Group, Symmetric, Symmetric, Element], Launch]
    halves: int

    def result_bytes(self, message_bytes: int, ranks: int) -> int:
        """Of one rank."""
        return message_bytes if self.question is Question.ALLREDUCE else message_bytes // ranks

    def result(self, total: Bits, rank: int, ranks: int) -> Bits:
        """What of the whole sum a rank gets."""
        if self.question is Question.ALLREDUCE:
            return total
        return total[slice(*share_of(len(total), ranks, rank))]


ALL = Reduction(Question.ALLREDUCE, allreduce, allreduce.allreduce, nccl.allreduce, 2)
SCATTER = Reduction(
    Question.REDUCE_SCATTER, reduce_scatter, reduce_scatter.reduce_scatter, nccl.reduce_scatter, 1
)


@dataclass(frozen=True)
class Job:
    """One reduction with its memory."""

    reduction: Reduction
    workspace: Workspace
    src: Symmetric
    dst: Symmetric
    element: Element

    @property
    def group(self) -> Group:
        return self.workspace.group

    @property
    def count(self) -> int:
        """Elements of a message."""
        return self.src.nbytes // self.element.bytes


def measure_reduction(measure: Measure, point: ReducePoint, reduction: Reduction) -> None:
    """Seconds of one reduction, verified."""
    group = group_for(measure, point.ranks, pool_bytes(point.ranks, point.largest_bytes))
    if group.direct_reason is not None:
        measure.skip(f"reductions between GPUs: {group.direct_reason}")
    size, element = point.message_bytes, Element.of(point.dtype)
    workspace = workspace_for(group, SCRATCH_BYTES, ONESHOT_BYTES)
    src = group.symmetric(size, f"src of {point.id}")
    dst = group.symmetric(reduction.result_bytes(size, point.ranks), f"dst of {point.id}")
    job = Job(reduction, workspace, src, dst, element)
    try:
        launch, said, cost = _launch(measure, job, point)
        place(job)
        said |= {
            "in_place": False,
            "counted": point.counted,
            "element_bytes": element.bytes,
            "bitwise": order_of(point.way) is not None,
        }
        before = ring_sends(job)

        def proof() -> None:
            verify(job, point.way)
            if point.counted and point.way.startswith("ring."):
                said["steps"] = (ring_sends(job) - before) % 2**32 / channel_pieces(job, said)

        sent = reduction.halves * (point.ranks - 1) * size // point.ranks
        measure.collective(
            Point(
                question=reduction.question,
                key={
                    "way": point.way,
                    "ranks": point.ranks,
                    "message_bytes": size,
                    "dtype": point.dtype,
                    "ctas": point.ctas,
                },
                traffic=Traffic(size, sent, sent),
                memory=Memory.PEER,
                cache=CacheState.REPEATED,
                working_set_bytes=src.nbytes + dst.nbytes,
                config=said,
                cost=cost,
            ),
            group.members,
            launch,
            proof,
            wait=lambda: finish(group),
            cold_counters=point.counted,
        )
    finally:
        dst.free()
        src.free()


def pool_bytes(ranks: int, largest_bytes: int) -> int:
    """Symmetric memory per rank: source and destination of the largest message, and the workspace's."""
    return 2 * largest_bytes + SCRATCH_BYTES + 2 * ranks * ONESHOT_BYTES + SLACK_BYTES


def _launch(measure: Measure, job: Job, point: ReducePoint) -> tuple[Launch, dict[str, Any], Cost]:
    """What queues the reduction, what a reader needs to know of it, and what it needs of an SM."""
    group = job.group
    if point.way == NCCL:
        reason = nccl.unavailable(group)
        if reason is not None:
            measure.skip(f"nccl: {reason}")
        said = {"path": group.path.value, "version": nccl.version(), "ctas": 0}
        return job.reduction.nccl(group, job.dst, job.src, job.element), said, Cost()
    reason = job.reduction.module.ways(group)[point.way]
    if reason is not None:
        measure.skip(f"{point.way}: {reason}")
    try:
        with measure.compiling():
            config = chosen_config(job, point)
            loaded = job.reduction.module.prepare(
                job.workspace, job.dst, job.src, dtype=job.element, way=point.way, config=config
            )
    except ConfigError as error:
        measure.skip(f"{point.way}: {error}")

    def launch(_: int) -> object:
        return job.reduction.call(
            job.workspace, job.dst, job.src, dtype=job.element, way=point.way, config=config
        )

    capabilities = group.members[0].device.capabilities
    cost = resources(loaded[0], config.threads, config.shared_bytes, capabilities)
    said = described(job, config)
    if point.way == "ce":
        said["copies"] = copies(group, CopyEngineConfig(batched=True))
    return launch, said, cost


def chosen_config(job: Job, point: ReducePoint) -> ReduceConfig:
    """The way's own for such messages, with the point's grid. Raises ConfigError."""
    config: ReduceConfig = job.reduction.module.throughput_config(
        job.workspace, point.way, point.message_bytes
    )
    return config if point.ctas is None else replace(config, ctas=point.ctas)


def described(job: Job, config: ReduceConfig) -> dict[str, Any]:
    """The parts of a configuration that a reader compares, and how the bytes go (cases D15, D30).

    ``bytes_in_flight_per_sm``: of loads of one term, at most; a CTA cannot have more than its part of a
    message.
    """
    group = job.group
    per_sm = -(-config.ctas // group.capabilities.num_sms)
    part = -(-job.src.nbytes // config.ctas)
    names = ("ctas", "threads", "unroll", "piece_bytes", "num_slots", "num_stages", "shared_bytes")
    return {
        "path": group.path.value,
        "backing": group.pool.backing,
        "num_sms": group.capabilities.num_sms,
        **{name: getattr(config, name, None) for name in names},
        "bytes_in_flight_per_sm": min(config.bytes_in_flight_per_sm, part) * per_sm,
    }


def ring_sends(job: Job) -> int:
    """How many pieces channel 0 of a rank has sent around rings so far, modulo 2^32: what its data word in
    the next rank's pad says (ring.cuh)."""
    workspace, member = job.workspace, job.group.members[0]
    slot = workspace.defines["SIGNAL_RING_DATA"]
    assert isinstance(slot, int)
    word = workspace.control(member).bytes_view(workspace.lane.layout.epochs_offset + 4 * slot, 4)
    return int(word.numpy(stream=workspace.stream(member.rank)).view(np.uint32)[0])


def channel_pieces(job: Job, said: Mapping[str, Any]) -> int:
    """Pieces of each chunk that are channel 0's; chunks of whole lines."""
    pieces = -(-job.src.nbytes // job.group.world_size // said["piece_bytes"])
    return -(-pieces // said["ctas"])


# --- terms and sums -----------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def random_elements(count: int, element: Element) -> Bits:
    """Normal numbers: sums of some are finite, and differ with the order of addition."""
    return element.narrow(np.random.default_rng(SEED).standard_normal(count, np.float32))


def terms(count: int, ranks: int, element: Element) -> list[Bits]:
    """What each rank gives: as its bits."""
    whole = random_elements(count + ranks * APART, element)
    return [whole[rank * APART :][:count] for rank in range(ranks)]


def place(job: Job) -> None:
    """Every local rank's term in its src, and no sum in dst."""
    given = terms(job.count, job.group.world_size, job.element)
    for member in job.group.members:
        job.dst.array(member.rank).fill(EMPTY, stream=member.stream)
        job.src.array(member.rank).copy_from(given[member.rank].view(np.uint8), stream=member.stream)
    finish(job.group)


@lru_cache(maxsize=3)
def sum_of(order: str, count: int, ranks: int, element: Element) -> Bits:
    """The sum by a way whose order stands for all of its kind."""
    return expected(order, terms(count, ranks, element), element)


def order_of(way: str) -> str | None:
    """A way that adds in the same order as ``way``, the same one for all that do; None where the order is not
    ours. A direct ReduceScatter is the first half of a two-shot."""
    order = ORDERS.get("twoshot" if way == "direct" else way)
    return None if order is None else next(name for name, one in ORDERS.items() if one is order)


def verify(job: Job, way: str) -> None:
    """Raise AssertionError unless every local rank has its sum."""
    ranks, order = job.group.world_size, order_of(way)
    right: Bits | None = None  # a result within its bound, which another rank may have, too
    for member in job.group.members:
        has = job.dst.array(member.rank).numpy(stream=member.stream).view(job.element.bits)
        if order is not None:
            total = sum_of(order, job.count, ranks, job.element)
            wrong = np.flatnonzero(has != job.reduction.result(total, member.rank, ranks))
        elif job.reduction is ALL and right is not None and np.array_equal(has, right):
            continue
        else:
            given = [
                job.reduction.result(term, member.rank, ranks)
                for term in terms(job.count, ranks, job.element)
            ]
            wrong = outside_bound(way, has, given, job.element)
        if len(wrong):
            raise AssertionError(
                f"rank {member.rank} has {len(wrong)} wrong sums, from element {wrong[0]} on"
            )
        right = has


def outside_bound(way: str, has: Bits, given: Sequence[Bits], element: Element) -> NDArray[np.intp]:
    """The elements that no order of addition explains (:func:`kernels.reduce.order.error_bound`)."""
    wrong = []
    for begin in range(0, len(has), BLOCK):
        block = slice(begin, begin + BLOCK)
        part = [term[block] for term in given]
        far = np.abs(element.widen(has[block]).astype(np.float64) - true_sum(part, element))
        wrong.append(begin + np.flatnonzero(~(far <= error_bound(way, part, element))))
    return np.concatenate(wrong)
