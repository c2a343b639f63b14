"""What an AllGather moves through memory, links and SMs: counted on emulated GPUs, beside what it must be.

In units of a shard, per rank, all shards equal and in place. Signals, the words of the kernels' own barriers
and their polling are in what is counted and not in what is expected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from smfree.measure.records import Record
from smfree.model.crossover import format_bytes


@dataclass(frozen=True, slots=True)
class Formula:
    """``peers`` (N - 1) + ``own`` shards."""

    peers: int = 0
    own: int = 0

    def shards(self, ranks: int) -> int:
        return self.peers * (ranks - 1) + self.own

    def __str__(self) -> str:
        if not self.peers:
            return str(self.own)
        text = "N - 1" if self.peers == 1 else f"{self.peers} (N - 1)"
        return "N" if (self.peers, self.own) == (1, 1) else text + (f" + {self.own}" if self.own else "")


NOTHING, ONE, PEERS, ALL, TWICE = Formula(), Formula(0, 1), Formula(1), Formula(1, 1), Formula(2)


@dataclass(frozen=True, slots=True)
class Movement:
    """Shards per rank. ``read`` and ``written``: of the GPU's memory, a copy engine's reads each time, a
    kernel's once, because the L2 has the second one. ``sent`` and ``received``: over the link, NVLink or
    PCIe. ``registers``: in and out of them. ``shared``: in and out of shared memory by the TMA."""

    read: Formula
    written: Formula
    sent: Formula
    received: Formula
    registers: Formula = NOTHING
    shared: Formula = NOTHING


EXPECTED: Mapping[str, Movement] = {
    "ce.batch": Movement(PEERS, PEERS, PEERS, PEERS),
    "ce.streams": Movement(PEERS, PEERS, PEERS, PEERS),
    "sm.push": Movement(ONE, PEERS, PEERS, PEERS, registers=ALL),
    "sm.pull": Movement(ONE, PEERS, PEERS, PEERS, registers=TWICE),
    "tma.push": Movement(ONE, PEERS, PEERS, PEERS, shared=ALL),
    "tma.pull": Movement(ONE, PEERS, PEERS, PEERS, shared=TWICE),
    "multicast": Movement(ONE, PEERS, ONE, ALL, registers=Formula(0, 2)),
    "staged": Movement(ONE, PEERS, ONE, PEERS),
}

#: What is counted of each column. Of a multicast the switch sends the own shard back, too.
COUNTED: Mapping[str, tuple[str, ...]] = {
    "read": ("dram_read_bytes", "copy_engine_read_bytes"),
    "written": ("dram_write_bytes", "copy_engine_write_bytes"),
    "sent": ("nvlink_sent_bytes", "pcie_sent_bytes"),
    "received": ("nvlink_received_bytes", "pcie_received_bytes"),
    "registers": ("bytes_through_registers",),
    "shared": ("bytes_async",),
}
WIRE = ("nvlink_sent_wire_bytes", "pcie_sent_wire_bytes")


def counted(record: Record, names: Sequence[str]) -> float:
    """Bytes of the rank that has most of them."""
    return max(
        map(sum, zip(*(record.per_rank[n] for n in names if n in record.per_rank), strict=True)), default=0
    )


def movement(records: Sequence[Record]) -> str:
    """A table of the ways that were counted; empty on a real GPU, which does not tell."""
    rows = []
    for record in records:
        expected = EXPECTED.get(record.key["way"])
        if expected is None or not record.counters:
            continue
        shard = record.key["shard_bytes"]
        row = [record.key["way"]]
        for column, names in COUNTED.items():
            row.append(f"{counted(record, names) / shard:.2f} ({getattr(expected, column)})")
            if column == "sent":
                row.append(f"{counted(record, WIRE) / shard:.2f}")
        rows.append([*row, record.config["path"]])
    if not rows:
        return ""
    first = records[0]
    headers = [
        "way", "memory\nread", "memory\nwritten", "link\nsent", "sent with\nheaders", "link\nreceived",
        "through\nregisters", "through shared\nmemory (TMA)", "link",
    ]  # fmt: skip
    aligned = ("left", *["right"] * 7, "left")
    text = tabulate(rows, headers=headers, disable_numparse=True, colalign=aligned)
    return text + (
        f"\nshards of {format_bytes(first.key['shard_bytes'])} per rank, N = {first.key['ranks']}, counted "
        "(expected), per rank; signals and polling are in what is counted; in place,\nno clock involved. "
        "Memory of kernels: DRAM, the L2 cold. Of copy engines: what they asked of the L2"
    )
