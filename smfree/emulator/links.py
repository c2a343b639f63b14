"""The links of a node: NVLink between its GPUs, PCIe between each GPU and the host.

Every GPU has one egress and one ingress port to the NVLink switch, and one of each to the host. Bytes cross
the sender's egress and the receiver's ingress port in packets, whose headers cost time and no payload, and
arrive a latency later. Switches never limit: what two GPUs exchange takes nothing from the others. Times are
nanoseconds of the node's clock; without a clock bytes are counted and take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

import numpy as np

from smfree.emulator.profile import Profile
from smfree.emulator.servers import F8, ServerBank

_PAUSE_NS = 1000.0
"""Without traffic for so long, a port's bins may move."""

_HISTORY = 1 << 17
"""Bins that a port remembers, 4 ms: the host clocks of processes may be so far apart."""

NUMA_NODES = 2
"""Memory nodes of an emulated host."""

HOST = -1
"""The host as an end of a transfer; GPUs are ends by their ordinal."""


class Path(StrEnum):
    """What connects two ends."""

    NVLINK = "NVLink"
    PCIE = "PCIe"
    SAME = "the same device"


@dataclass(slots=True)
class Traffic:
    """What one GPU sent and received over one kind of link. ``wire`` bytes are those of the packets, headers
    included."""

    sent_bytes: int = 0
    sent_wire_bytes: int = 0
    received_bytes: int = 0
    received_wire_bytes: int = 0


@dataclass(slots=True)
class DeviceTraffic:
    """All link traffic of one GPU."""

    nvlink: Traffic = field(default_factory=Traffic)
    pcie: Traffic = field(default_factory=Traffic)


class Passage(NamedTuple):
    """When transfers begin to leave the last port, have left the sender, and have arrived."""

    begin_ns: F8
    sent_ns: F8
    arrival_ns: F8


class _Ports:
    """One port of every GPU. Its calendar's bins begin with the first transfer after a pause, so that the
    same work takes as long whenever it is done."""

    def __init__(self, count: int) -> None:
        self._bank = ServerBank(count, bins=2 * _HISTORY, history=_HISTORY)
        self._phase_ns, self._until_ns = 0.0, -inf

    def serve(self, port: int, t_ns: F8, work_ns: F8) -> F8:
        """When transfers that arrive at ``t_ns`` have passed."""
        if not len(t_ns):
            return t_ns
        first = float(t_ns.min())
        if first > self._until_ns + _PAUSE_NS:
            self._phase_ns = first % self._bank.bin
        done = self._bank.serve(np.full(len(t_ns), port), t_ns - self._phase_ns, work_ns) + self._phase_ns
        self._until_ns = max(self._until_ns, float(done.max()))
        return done


class Links:
    """Ports, latencies and traffic of a node with these GPUs. ``clocked``: whether transfers take time.

    ``traffic[ordinal]`` counts. ``numa_node[ordinal]``: the host's memory node that is near; GPUs are dealt
    to them in halves, as in a two-socket server.
    """

    def __init__(self, profiles: Sequence[Profile], *, clocked: bool = True) -> None:
        self.profiles = tuple(profiles)
        self.clocked = clocked
        count = len(self.profiles)
        self.traffic = tuple(DeviceTraffic() for _ in self.profiles)
        self.numa_node = tuple(ordinal * NUMA_NODES // count for ordinal in range(count))
        self._out = {Path.NVLINK: _Ports(count), Path.PCIE: _Ports(count)}
        self._into = {Path.NVLINK: _Ports(count), Path.PCIE: _Ports(count)}

    @property
    def lookahead_ns(self) -> float:
        """No GPU affects another, nor the host, sooner than this."""
        return min(min(p.link.latency_ns, p.link.pcie_latency_ns) for p in self.profiles)

    def path(self, src: int, dst: int) -> Path:
        """What connects two ends."""
        if src == dst:
            return Path.SAME
        return Path.PCIE if HOST in (src, dst) else Path.NVLINK

    def latency_ns(self, src: int, dst: int) -> float:
        """One way, without the bytes' own time."""
        path = self.path(src, dst)
        if path is Path.SAME:
            return 0.0
        ends = [self.profiles[end].link for end in (src, dst) if end != HOST]
        if path is Path.PCIE:
            return ends[0].pcie_latency_ns
        return max(end.latency_ns for end in ends)

    def gbps(self, src: int, dst: int, *, pinned: bool = True, numa_node: int | None = None) -> float:
        """1e9 bytes/s that packets may have between two ends, headers included.

        To and from the host: of page-locked memory or not, on the GPU's own NUMA node (None) or another.
        """
        path = self.path(src, dst)
        if path is Path.PCIE:
            gpu = dst if src == HOST else src
            profile = self.profiles[gpu]
            rate = profile.host.pcie_pinned_gbps if pinned else profile.host.pcie_pageable_gbps
            far = numa_node is not None and numa_node != self.numa_node[gpu]
            return rate * (profile.link.far_numa_fraction if far else 1.0)
        return min(self.profiles[src].link.gbps, self.profiles[dst].link.gbps)

    def send(
        self,
        src: int,
        dst: int,
        t_ns: F8,
        nbytes: Any,
        *,
        packets: Any = None,
        pinned: bool = True,
        numa_node: int | None = None,
    ) -> F8:
        """When n transfers of ``nbytes`` that leave ``src`` at ``t_ns`` have arrived at ``dst``.

        ``packets`` of each; None: those of a copy engine, whose start-up holds the link's latency already.
        Ends are ordinals or HOST.
        """
        return self.carry(src, dst, t_ns, nbytes, packets=packets, pinned=pinned, numa_node=numa_node)[-1]

    def carry(
        self,
        src: int,
        dst: int,
        t_ns: F8,
        nbytes: Any,
        *,
        packets: Any = None,
        pinned: bool = True,
        numa_node: int | None = None,
        payload: Any = None,
        answer: bool = False,
    ) -> Passage:
        """:meth:`send`, with the times in between. ``payload``: the bytes that were asked for, where packets
        carry more (whole sectors). An ``answer`` leaves when the port of who has asked can take it: how much
        is under way is the reader's choice, and fills no queue where others are served."""
        nbytes = np.asarray(nbytes, np.float64)
        path = self.path(src, dst)
        if path is Path.SAME:
            return Passage(t_ns, t_ns, t_ns)
        latency = self.latency_ns(src, dst)
        if packets is None:
            packets, latency = self.copy_packets(src, dst, nbytes), 0.0
        wire = nbytes + self._header_bytes(path, src, dst) * packets
        self._count(path, [src], [dst], nbytes if payload is None else payload, wire)
        if not self.clocked:
            return Passage(t_ns, t_ns, t_ns)
        work = wire / self.gbps(src, dst, pinned=pinned, numa_node=numa_node)
        begin, sent, done = t_ns, t_ns, t_ns
        ports = ((self._out[path], src), (self._into[path], dst))
        for bank, end in reversed(ports) if answer else ports:
            if end != HOST:
                finish = bank.serve(end, begin, work)
                begin, done = finish - work, np.maximum(done, finish)
            if end == src or src == HOST:
                sent = done
        return Passage(begin, sent, done + latency)

    def copy_packets(self, src: int, dst: int, nbytes: Any) -> Any:
        """How many packets a copy engine makes of each transfer."""
        gpu = dst if src == HOST else src
        return np.ceil(np.asarray(nbytes, np.float64) / self.profiles[gpu].link.copy_packet_bytes)

    def replicate(
        self, src: int, members: Sequence[int], t_ns: F8, nbytes: Any, packets: Any
    ) -> tuple[F8, list[F8]]:
        """Multicast: the sender's port is passed once, the switch sends a copy to each member (its own GPU
        among them, if it is one). When all has left the sender, and when each member has it."""
        nbytes = np.asarray(nbytes, np.float64)
        link = self.profiles[src].link
        wire = nbytes + link.header_bytes * packets
        self._count(Path.NVLINK, [src], members, nbytes, wire)
        if not self.clocked:
            return t_ns, [t_ns] * len(members)
        work = wire / link.gbps
        out, into = self._out[Path.NVLINK], self._into[Path.NVLINK]
        sent = out.serve(src, t_ns, work)
        arrivals: list[F8] = []
        for member in members:
            taken = into.serve(member, sent - work, work)
            arrivals.append(np.maximum(sent, taken) + link.latency_ns)
        return sent, arrivals

    def gather(
        self, members: Sequence[int], dst: int, ready_ns: Sequence[F8], nbytes: Any, packets: Any
    ) -> F8:
        """A multicast load: each member's port is passed once, from ``ready_ns`` on, the switch combines, the
        reader's port is passed once. When the reader has all."""
        nbytes = np.asarray(nbytes, np.float64)
        link = self.profiles[dst].link
        wire = nbytes + link.header_bytes * packets
        self._count(Path.NVLINK, members, [dst], nbytes, wire)
        latest = np.max(np.stack(ready_ns), axis=0)
        if not self.clocked:
            return latest
        work = wire / link.gbps
        out, into = self._out[Path.NVLINK], self._into[Path.NVLINK]
        for member, ready in zip(members, ready_ns, strict=True):
            latest = np.maximum(latest, out.serve(member, ready, work))
        return np.maximum(into.serve(dst, latest - work, work), latest) + link.latency_ns

    def _header_bytes(self, path: Path, src: int, dst: int) -> float:
        if path is Path.PCIE:
            return 0.0  # the public rates are of payload
        return max(self.profiles[src].link.header_bytes, self.profiles[dst].link.header_bytes)

    def _count(
        self, path: Path, senders: Sequence[int], receivers: Sequence[int], payload: Any, wire: Any
    ) -> None:
        """The bytes of these transfers, at every end that is a GPU."""
        payload_bytes, wire_bytes = int(np.sum(payload)), int(np.sum(wire))
        for ends, sent in ((senders, True), (receivers, False)):
            for end in ends:
                if end == HOST:
                    continue
                one = self.traffic[end].nvlink if path is Path.NVLINK else self.traffic[end].pcie
                if sent:
                    one.sent_bytes += payload_bytes
                    one.sent_wire_bytes += wire_bytes
                else:
                    one.received_bytes += payload_bytes
                    one.received_wire_bytes += wire_bytes
