"""What an AllReduce should take on a cluster, as text: ``smfree predict``. All times are modelled."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tabulate import tabulate

from smfree.model.collectives import (
    ACROSS,
    INSIDE,
    NVLINK_4,
    RDMA_400G,
    Algorithm,
    Cost,
    Link,
    hierarchical,
    nvls,
    reigns,
)
from smfree.results.report import time_text

NOTES = {NVLINK_4: "NVLink 4", RDMA_400G: "400G RDMA"}
"""Links with numbers that are often quoted."""
NODES = (2, 4, 16, 64, 256, 1024)
"""Of the table that extrapolates."""
COLUMNS = (
    "piece: what a tree sends at a time; algbw: bytes / T; busbw: algbw x 2 (N - 1)/N of N ranks, to be "
    "compared with beta"
)
MAX_BYTES, MAX_RANKS = 10**18, 1 << 20
_PREFIXES = "kmgt"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of ``node_ranks`` ranks. ``inside``: from a rank to others of its node; ``across``: to those of
    other nodes, each rank with a link of its own. Raises ValueError."""

    node_ranks: int = 8
    inside: Link = NVLINK_4
    across: Link = RDMA_400G

    def __post_init__(self) -> None:
        if self.node_ranks < 1:
            raise ValueError(f"a node has 1 rank or more (got {self.node_ranks}); use 8")

    def link(self, ranks: int) -> Link:
        """Of so many ranks, the slowest link that algorithms take that know nothing of nodes."""
        return self.inside if ranks <= self.node_ranks else self.across

    def algorithms(self, ranks: int) -> tuple[Algorithm, ...]:
        """Those for so many ranks. Raises ValueError where they do not fill nodes."""
        if ranks <= self.node_ranks:
            return INSIDE
        rest = ranks % self.node_ranks
        if rest:
            raise ValueError(
                f"ranks fill their nodes of {self.node_ranks} (got {ranks}); use {ranks - rest}, or another "
                "size of nodes"
            )
        if self.node_ranks == 1:
            return ACROSS
        return *ACROSS, *(partial(self._by_nodes, between=between) for between in ACROSS)

    def _by_nodes(self, nbytes: float, ranks: int, link: Link, *, between: Algorithm) -> Cost:
        nodes = ranks // self.node_ranks
        return hierarchical(nbytes, nodes, self.node_ranks, self.inside, link, between=between)

    def costs(self, nbytes: float, ranks: int) -> list[Cost]:
        """Of every algorithm. Raises ValueError."""
        return [one(nbytes, ranks, self.link(ranks)) for one in self.algorithms(ranks)]


def prediction_text(cluster: Cluster, nbytes: float, ranks: int) -> str:
    """The report: the links, every algorithm, who is fastest by size, and other numbers of nodes. Raises
    ValueError."""
    if not (1 <= nbytes <= MAX_BYTES and 2 <= ranks <= MAX_RANKS):
        raise ValueError(
            f"a prediction is for 1 to {MAX_BYTES:g} bytes on 2 to {MAX_RANKS} ranks (got {nbytes:g} on "
            f"{ranks}); change them"
        )
    costs = cluster.costs(nbytes, ranks)
    nodes = -(-ranks // cluster.node_ranks)
    where = "one node" if nodes == 1 else f"{nodes} nodes of {cluster.node_ranks}"
    across = _link_line("between nodes", cluster.across)
    flat = "ring and tree know nothing of nodes: all their steps are taken to go between nodes"
    lines = [
        f"AllReduce of {decimal(nbytes)} on {ranks} ranks: {where}; modelled: steps x alpha + bytes / beta",
        "",
        _link_line("in a node", cluster.inside),
        *([across] if nodes > 1 else []),
        "",
        _table(costs),
        COLUMNS,
        *([flat] if nodes > 1 else []),
        "",
        f"fastest: {_fastest(costs)}",
        *_by_size(cluster, ranks),
        *_trap(cluster.link(ranks), nbytes, costs),
        "",
        f"{decimal(nbytes)} on other numbers of nodes, modelled:",
        *([across] if nodes == 1 else []),
        "",
        _nodes_table(cluster, nbytes),
    ]
    return "\n".join(lines)


def decimal(nbytes: float) -> str:
    """Bytes in powers of ten with up to four digits: 134.2 MB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes:.4g} B"


def bytes_of(text: str) -> float:
    """The number of bytes that a text says: 140e9, 1GB, 64 KiB. Raises ValueError."""
    found = re.fullmatch(r"(\d+\.?\d*(?:e\+?\d+)?)\s*(?:(?:([kmgt])(i?))?b)?", text.strip().lower())
    if found is None:
        raise ValueError(
            f"a size is a number of bytes from 0 on, also with a unit (got {text}); write 140e9, 64KiB or 1GB"
        )
    number, prefix, binary = found.groups()
    power = _PREFIXES.index(prefix) + 1 if prefix else 0
    return float(number) * (1024 if binary else 1000) ** power


def _link_line(place: str, link: Link) -> str:
    source = f"{NOTES[link]}: often quoted, not measured" if link in NOTES else "as given"
    return (
        f"{place + ':':15}alpha {link.alpha_s * 1e6:g} us, beta {link.bytes_per_s / 1e9:g} GB/s, "
        f"S* {decimal(link.critical_bytes)} ({source})"
    )


def _table(costs: Sequence[Cost]) -> str:
    headers = ("algorithm", "steps", "piece", "sent per rank", "T (modelled)", "algbw GB/s", "busbw GB/s")
    rows = [
        (
            cost.algorithm,
            cost.steps,
            decimal(cost.piece_bytes) if cost.piece_bytes else "",
            decimal(cost.sent_bytes),
            time_text(cost.seconds),
            f"{cost.algorithm_bytes_per_s / 1e9:.3g}",
            f"{cost.bus_bytes_per_s / 1e9:.3g}",
        )
        for cost in costs
    ]
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 6))


def _fastest(costs: Sequence[Cost]) -> str:
    """Also of those that need no switch which adds."""
    best = min(costs, key=lambda cost: cost.seconds)
    if best.algorithm != "NVLS":
        return best.algorithm
    rest = min((cost for cost in costs if cost is not best), key=lambda cost: cost.seconds)
    return f"NVLS, where the switch adds; else {rest.algorithm}"


def _by_size(cluster: Cluster, ranks: int) -> list[str]:
    algorithms = [one for one in cluster.algorithms(ranks) if one is not nvls]
    found = reigns(algorithms, ranks, cluster.link(ranks), high=1e12)
    apart = " (NVLS apart)" if ranks <= cluster.node_ranks else ""
    parts = [f"{reign.algorithm} up to {decimal(reign.high)}" for reign in found[:-1]]
    last = found[-1].algorithm
    return [f"fastest by size{apart}: {'; '.join([*parts, f'{last} beyond' if parts else last])}"]


def _trap(link: Link, nbytes: float, costs: Sequence[Cost]) -> list[str]:
    if nbytes >= link.critical_bytes:
        return []
    share = costs[0].start_up_share(link)
    return [
        f"{decimal(nbytes)} is below S*: start-ups are {share:.0%} of the {costs[0].algorithm}'s time; fewer "
        "steps or larger messages help, faster links do not"
    ]


def _nodes_table(cluster: Cluster, nbytes: float) -> str:
    """How the times grow with the nodes."""
    rows, names = [], [""]
    for nodes in NODES:
        costs = cluster.costs(nbytes, nodes * cluster.node_ranks)
        names = [cost.algorithm for cost in costs]
        rows.append((costs[0].ranks, nodes, *(time_text(cost.seconds) for cost in costs), _fastest(costs)))
    aligned = (*["right"] * (2 + len(names)), "left")
    return tabulate(rows, ("ranks", "nodes", *names, "fastest"), disable_numparse=True, colalign=aligned)
