"""When accesses of one GPU's SMs to memory beyond a link are done.

Bytes stream through the engine of the SM, the ports of the link and the owner's L2 and DRAM; an access ends
when the slowest of them has passed its last byte, plus the latencies: of the link once for a write, twice for
a read, and of the owner's memory. Times go in and come out in cycles of the asking launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from smfree.emulator.clock import F8, I8, Clock
from smfree.emulator.links import HOST, Links, Passage
from smfree.emulator.specs import LINE_BYTES


class Owner(Protocol):
    """The device whose memory is asked."""

    @property
    def ordinal(self) -> int: ...
    @property
    def clock(self) -> Clock: ...


class Asked(NamedTuple):
    """What n requests move: bytes that the program asked for, bytes on the link (whole sectors) and in how
    many packets, and the bytes of them that the owner's L2 lacks."""

    payload: Any
    moved: F8
    packets: F8
    missed: F8


class Written(NamedTuple):
    """Cycles at which a write has left the SM for good, the owner's memory has it, and the writer knows."""

    accepted: F8
    performed: F8
    acknowledged: F8


class Crossing:
    """From the launch's GPU to one owner (None: the host) and back."""

    def __init__(
        self,
        clock: Clock,
        links: Links,
        here: int,
        owner: Owner | None,
        node_ns: Callable[[Any], Any],
        cycles_of: Callable[[Any], Any],
    ) -> None:
        self._clock, self._links, self._owner = clock, links, owner
        self._here = here
        self._there = HOST if owner is None else owner.ordinal
        self._node_ns, self._cycles_of = node_ns, cycles_of
        self.one_way_ns = links.latency_ns(here, self._there)
        self._per_ns = clock.clock_mhz / 1e3

    def load(self, sm: I8, t: F8, asked: Asked) -> F8:
        """When warp-wide loads are in registers."""
        latency = self._round_trip(asked)
        begin, done = self._clock.lsu_out(sm, t, asked.moved, latency, write=False)
        return np.maximum(done + latency, self._fetched(begin, asked))

    def bulk_load(self, sm: I8, t: F8, asked: Asked, *, tensor: bool) -> F8:
        """When bulk copies are complete in shared memory."""
        latency = self._round_trip(asked)
        begin, done, startup = self._clock.tma_out(sm, t, asked.moved, latency, tensor=tensor)
        return np.maximum(done + latency, self._fetched(begin, asked)) + startup

    def store(self, sm: I8, t: F8, asked: Asked) -> Written:
        """Warp-wide stores and reductions: the SM may go on when the link has taken them."""
        latency = self._there_latency(asked, write=True) + self.one_way_ns * self._per_ns
        begin, done = self._clock.lsu_out(sm, t, asked.moved, latency, write=True)
        return self._brought(begin, done, asked, 0.0)

    def bulk_store(self, sm: I8, t: F8, asked: Asked, *, tensor: bool) -> Written:
        """Bulk stores: ``accepted`` is when the source has been read."""
        latency = self._there_latency(asked, write=True) + self.one_way_ns * self._per_ns
        begin, done, startup = self._clock.tma_out(sm, t, asked.moved, latency, tensor=tensor)
        return self._brought(begin, done, asked, startup)

    def count(self, asked: Asked, *, write: bool) -> None:
        """Without a clock: the traffic of such accesses."""
        now = np.zeros(len(asked.moved))
        if not write:
            self._pass(self._here, self._there, now, Asked(0, now, asked.packets, now))
        ends = (self._here, self._there) if write else (self._there, self._here)
        self._pass(*ends, now, asked)

    def _brought(self, begin: F8, done: F8, asked: Asked, startup: float) -> Written:
        passed = self._pass(self._here, self._there, self._node_ns(begin), asked)
        arrival = self._cycles_of(self._at_owner(passed, asked, write=True)) + startup
        accepted = np.maximum(done, self._cycles_of(passed.sent_ns)) + startup
        one_way = self.one_way_ns * self._per_ns
        inside = self._owner_latency_ns(asked, write=True) * self._per_ns
        performed = np.maximum(accepted + one_way, arrival) + inside
        return Written(accepted, performed, performed + one_way)

    def _fetched(self, begin: F8, asked: Asked) -> F8:
        """The request goes there as a header, the bytes come back.

        Requests take the ports' time from the data and wait for none: a channel of their own, as networks
        need where answers must not block behind requests.
        """
        header = Asked(0, np.zeros(len(begin)), asked.packets, asked.missed)
        sent_ns = self._node_ns(begin)
        self._pass(self._here, self._there, sent_ns, header)
        request = Passage(sent_ns, sent_ns, sent_ns + self.one_way_ns)
        ready = self._at_owner(request, asked, write=False)
        back = self._pass(self._there, self._here, request.arrival_ns, asked, answer=True)
        arrival = np.maximum(back.arrival_ns, ready + self.one_way_ns)
        return self._cycles_of(arrival + self._owner_latency_ns(asked, write=False))

    def _pass(self, src: int, dst: int, t_ns: F8, asked: Asked, *, answer: bool = False) -> Passage:
        return self._links.carry(
            src, dst, t_ns, asked.moved, packets=asked.packets, payload=asked.payload, answer=answer
        )

    def _at_owner(self, passed: Passage, asked: Asked, *, write: bool) -> F8:
        """When the owner's memory has passed the bytes; the first come a latency after ``begin``."""
        if self._owner is None:
            return passed.arrival_ns
        first = passed.begin_ns + self.one_way_ns
        done = self._owner.clock.memory_at(first, asked.moved, asked.missed, write=write)
        return np.maximum(done, passed.arrival_ns) if write else done

    def _owner_latency_ns(self, asked: Asked, *, write: bool) -> F8:
        """Of the owner's memory; the host's is in the link's latency."""
        if self._owner is None:
            return np.zeros(len(asked.moved))
        return self._owner.clock.memory_latency_ns(asked.missed, write=write)

    def _there_latency(self, asked: Asked, *, write: bool) -> F8:
        """Cycles to the owner's memory, which answers then."""
        return (self.one_way_ns + self._owner_latency_ns(asked, write=write)) * self._per_ns

    def _round_trip(self, asked: Asked) -> F8:
        return self._there_latency(asked, write=False) + self.one_way_ns * self._per_ns


def packets_of(nbytes: Any) -> F8:
    """Lines of a bulk copy: the TMA's packets."""
    return np.ceil(np.asarray(nbytes, np.float64) / LINE_BYTES)
