"""What AllReduce, AllGather and ReduceScatter cost on paper: steps, bytes that a rank sends, seconds.

A step costs alpha + bytes / beta (:mod:`smfree.model.hockney`); steps that do not wait for each other cost
one alpha. A rank sends and receives at the same time. Adding is taken to be hidden behind the links.

==============  ==========================  ===========================================================
AllReduce       steps                       sent per rank
==============  ==========================  ===========================================================
ring            2 (N - 1)                   2 (N - 1)/N S; no algorithm sends less [2]
tree            2 floor(log2 N), and more   2 S at most, 2 (N - 1) S over all ranks: two trees for half
                for pieces: :func:`tree`    of the message each [3]
one-shot        1                           (N - 1) S
two-shot        2                           2 (N - 1)/N S: the ring's two halves [1], each in one step
NVLS            2                           (N + 1)/N S: the switch adds. S to it, S/N back, S/N to it, S
                                            back
hierarchical    of both networks            reduce-scatter inside the node, AllReduce of S/n across,
                                            all-gather inside
==============  ==========================  ===========================================================

[1] R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19, 2005. [2] P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 69, 2009. [3] P. Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth
broadcast, reduction and scan", Parallel Computing 35, 2009.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# ---- exact counts: what the counters of a run must show -------------------------------------------


def part_count(count: int, parts: int, index: int) -> int:
    """Elements of one of ``parts`` parts: equal ones, the first ``count % parts`` an element longer."""
    return count // parts + (index < count % parts)


def expected_steps(way: str, ranks: int) -> int:
    """Sends of an AllReduce that wait for each other, on the longest path. ``way``: as kernels/reduce has it.

    Raises ValueError for a way that is not known.
    """
    return _known(_STEPS, way)(ranks) if ranks > 1 else 0


def expected_sent_bytes(
    way: str,
    count: int,
    element_bytes: int,
    ranks: int,
    rank: int,
    *,
    neighbours: Sequence[int] = (),
) -> int:
    """Bytes that leave ``rank`` in an AllReduce of ``count`` elements, flags not counted.

    Exact, also where the chunks are uneven. What a peer loads from the rank leaves it, too. ``neighbours``,
    for a tree: how many the rank has in each of the two, its parent and its children; each gets the tree's
    half of the message once. Raises ValueError for a way that is not known.
    """
    _known(_STEPS, way)
    if ranks == 1:
        return 0
    own, following = part_count(count, ranks, rank), part_count(count, ranks, (rank + 1) % ranks)
    match way.partition(".")[0]:
        case "ring":  # all chunks but its own, then all but its next's
            elements = 2 * count - own - following
        case "twoshot" | "ce":  # every other chunk to who owns it, its own to everybody
            elements = count - own + (ranks - 1) * own
        case "oneshot":
            elements = (ranks - 1) * count
        case "nvls":  # what the switch adds, and the sums of its own chunk
            elements = count + own
        case _:
            if len(neighbours) != 2:
                raise ValueError(
                    f"a tree's bytes need the rank's neighbours in both trees (got {tuple(neighbours)}); "
                    "count parent and children"
                )
            elements = sum(links * part_count(count, 2, tree) for tree, links in enumerate(neighbours))
    return elements * element_bytes


def reduce_scatter_sent_bytes(count: int, element_bytes: int, ranks: int, rank: int) -> int:
    """Bytes that ``rank`` sends around a ring until it has its own chunk of the sum: all chunks but that."""
    return (count - part_count(count, ranks, rank)) * element_bytes if ranks > 1 else 0


def all_gather_sent_bytes(count: int, element_bytes: int, ranks: int, rank: int) -> int:
    """Bytes that ``rank`` sends around a ring until all have all chunks: all but that of its next."""
    return (count - part_count(count, ranks, (rank + 1) % ranks)) * element_bytes if ranks > 1 else 0


def tree_depth(ranks: int) -> int:
    """Edges from the root of a balanced binary tree to its deepest leaf."""
    return ranks.bit_length() - 1


_STEPS: Mapping[str, Callable[[int], int]] = {
    "ring": lambda ranks: 2 * (ranks - 1),
    "tree": lambda ranks: 2 * tree_depth(ranks),
    "oneshot": lambda ranks: 1,
    "twoshot": lambda ranks: 2,
    "nvls": lambda ranks: 2,
    "ce": lambda ranks: 2,
}


def _known(table: Mapping[str, Callable[[int], int]], way: str) -> Callable[[int], int]:
    found = table.get(way.partition(".")[0])
    if found is None:
        raise ValueError(f"costs are known of {', '.join(table)} (got {way!r}); name one of them")
    return found


# ---- times -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """What a rank sends through: seconds to begin, bytes per second in one direction. Raises ValueError."""

    alpha_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 < self.alpha_s < math.inf and 1 <= self.bytes_per_s < math.inf):
            raise ValueError(
                f"a link has a start-up above 0, and a rate of a byte per second or more (got {self}); "
                "measure them"
            )

    @property
    def critical_bytes(self) -> float:
        """S*: a message of which start-up and transfer take as long."""
        return self.alpha_s * self.bytes_per_s

    def seconds(self, steps: float, sent_bytes: float) -> float:
        """Of so many steps that wait for each other, in which a rank sends so many bytes altogether."""
        return steps * self.alpha_s + sent_bytes / self.bytes_per_s


NVLINK_4 = Link(0.8e-6, 450e9)
RDMA_400G = Link(12e-6, 45e9)
"""Often quoted, not measured here."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one collective. ``sent_bytes``: of the rank that sends most. ``piece_bytes``: what a tree has under
    way."""

    algorithm: str
    ranks: int
    nbytes: float
    steps: int
    sent_bytes: float
    seconds: float
    piece_bytes: float | None = None

    @property
    def algorithm_bytes_per_s(self) -> float:
        """Size of the message / time (nccl-tests: algbw)."""
        return self.nbytes / self.seconds if self.seconds else math.inf

    @property
    def bus_bytes_per_s(self) -> float:
        """What a ring AllReduce of this time sends per second (nccl-tests: busbw); of an AllReduce."""
        return self.algorithm_bytes_per_s * 2 * (self.ranks - 1) / self.ranks

    def start_up_share(self, link: Link) -> float:
        """Share of the time that goes into alphas, in a collective over one link."""
        return self.steps * link.alpha_s / self.seconds if self.seconds else 0.0


def ring(nbytes: float, ranks: int, link: Link) -> Cost:
    """AllReduce around a ring."""
    return _plain("ring", nbytes, ranks, link, 2 * (ranks - 1), 2 * (ranks - 1) / ranks)


def one_shot(nbytes: float, ranks: int, link: Link) -> Cost:
    """AllReduce in which every rank sends all it has to all, and adds for itself."""
    return _plain("one-shot", nbytes, ranks, link, 1, ranks - 1)


def two_shot(nbytes: float, ranks: int, link: Link) -> Cost:
    """AllReduce in which every rank adds its chunk of all and sends the sum to all."""
    return _plain("two-shot", nbytes, ranks, link, 2, 2 * (ranks - 1) / ranks)


def nvls(nbytes: float, ranks: int, link: Link) -> Cost:
    """AllReduce in the switch."""
    return _plain("NVLS", nbytes, ranks, link, 2, (ranks + 1) / ranks)


def reduce_scatter(nbytes: float, ranks: int, link: Link) -> Cost:
    """Around a ring; ``nbytes``: what every rank gives."""
    return _plain("reduce-scatter", nbytes, ranks, link, ranks - 1, (ranks - 1) / ranks)


def all_gather(nbytes: float, ranks: int, link: Link) -> Cost:
    """Around a ring; ``nbytes``: what every rank has at the end."""
    return _plain("all-gather", nbytes, ranks, link, ranks - 1, (ranks - 1) / ranks)


def tree(nbytes: float, ranks: int, link: Link, *, piece_bytes: float | None = None) -> Cost:
    """AllReduce up and down two binary trees, half of the message in each, in pieces.

    A rank is a leaf in one tree and has two children in the other, so for a piece of each it sends 4: one up
    in both, two down. The first piece takes 2 depth steps in which a rank sends 2 at most, every other one
    alpha + 4 pieces / beta more, which with n pieces of p = S / 2n is::

        T = 2 depth (alpha + 2 p / beta) + (n - 1) (alpha + 4 p / beta)

    ``piece_bytes``: p, what a tree has under way in all channels together; None: the best, near
    sqrt(S alpha beta / (8 (depth - 1))). Of 2 ranks none sends 4 pieces but 2, of 3 and 4 but 3. ``steps``:
    those of the first piece, and one for every other.
    """
    if ranks == 1:
        return _plain("tree", nbytes, ranks, link, 0, 0)
    depth, load, half = tree_depth(ranks), {2: 2, 3: 3, 4: 3}.get(ranks, 4), nbytes / 2

    def in_pieces(pieces: int) -> Cost:
        steps = 2 * depth + pieces - 1
        seconds = link.seconds(steps, (depth + pieces - 1) * load * half / pieces)
        return Cost("tree", ranks, nbytes, steps, load * half, seconds, half / pieces)

    if piece_bytes is not None:
        return in_pieces(max(1, math.ceil(half / piece_bytes)))
    best = math.sqrt((depth - 1) * load * half / link.critical_bytes)
    few = max(1, math.floor(best))
    return min(in_pieces(few), in_pieces(few + 1), key=lambda cost: cost.seconds)


def hierarchical(
    nbytes: float,
    nodes: int,
    node_ranks: int,
    inside: Link,
    across: Link,
    *,
    between: Callable[[float, int, Link], Cost] = ring,
) -> Cost:
    """AllReduce over nodes: reduce-scatter inside, ``between`` of a chunk of each rank across, all-gather
    inside. Every rank has a link of its own to the other nodes."""
    parts = (
        reduce_scatter(nbytes, node_ranks, inside),
        between(nbytes / node_ranks, nodes, across),
        all_gather(nbytes, node_ranks, inside),
    )
    return Cost(
        f"hierarchical, {parts[1].algorithm} across",
        nodes * node_ranks,
        nbytes,
        sum(part.steps for part in parts),
        sum(part.sent_bytes for part in parts),
        sum(part.seconds for part in parts),
        parts[1].piece_bytes,
    )


def _plain(name: str, nbytes: float, ranks: int, link: Link, steps: int, share: float) -> Cost:
    steps, sent = (steps, share * nbytes) if ranks > 1 else (0, 0.0)
    return Cost(name, ranks, nbytes, steps, sent, link.seconds(steps, sent))


# ---- which, and from where -------------------------------------------------------------------------

Algorithm = Callable[[float, int, Link], Cost]

INSIDE: tuple[Algorithm, ...] = (ring, tree, one_shot, two_shot, nvls)
"""AllReduces where every rank reaches every other, as in a node."""
ACROSS: tuple[Algorithm, ...] = (ring, tree)
"""Those whose ranks have few peers."""


@dataclass(frozen=True, slots=True)
class Reign:
    """The sizes, in bytes, at which an algorithm takes the least time."""

    algorithm: str
    low: float
    high: float


def reigns(
    algorithms: Sequence[Algorithm], ranks: int, link: Link, *, low: float = 8, high: float = 1 << 33
) -> tuple[Reign, ...]:
    """Who is fastest from ``low`` to ``high`` bytes, in order of size; of equals, the first."""
    steps = 16 * math.ceil(math.log2(high / low))
    sizes = [low * (high / low) ** (i / steps) for i in range(steps + 1)]
    ends = {low, high}
    for a, b in itertools.combinations(algorithms, 2):
        lead = [_lead(a, b, ranks, link, size) for size in sizes]
        for i in range(steps):
            if lead[i] * lead[i + 1] < 0:
                ends.add(_meeting(a, b, ranks, link, sizes[i], sizes[i + 1]))
    found: list[Reign] = []
    for begin, end in itertools.pairwise(sorted(ends)):
        costs = [algorithm(math.sqrt(begin * end), ranks, link) for algorithm in algorithms]
        best = min(costs, key=lambda cost: cost.seconds)
        if found and found[-1].algorithm == best.algorithm:
            begin = found.pop().low
        found.append(Reign(best.algorithm, begin, end))
    return tuple(found)


def _lead(a: Algorithm, b: Algorithm, ranks: int, link: Link, size: float) -> float:
    return b(size, ranks, link).seconds - a(size, ranks, link).seconds


def _meeting(a: Algorithm, b: Algorithm, ranks: int, link: Link, low: float, high: float) -> float:
    """Where two take as long; they change places between ``low`` and ``high``."""
    sign = _lead(a, b, ranks, link, low)
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        if _lead(a, b, ranks, link, middle) * sign > 0:
            low = middle
        else:
            high = middle
    return high
