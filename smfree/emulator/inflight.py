"""Global byte ranges that asynchronous copies in flight still read or will write."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from smfree.emulator.bytespace import Report, raise_finding
from smfree.emulator.errors import CopyFault, Severity

_FAR = 1 << 62


class Claim:
    """Ranges of one batch of copies: ``ranges()`` -> (lo, hi) int64[m], asked only when an access comes near.

    ``writes``: the copies write these bytes (else they read them); ``reduces``: by reductions, which other
    reductions may meet. ``verdict``: the whole sentence instead of the usual one.
    """

    __slots__ = ("_sorted", "hi", "lo", "name", "ranges", "reduces", "verdict", "writes")

    def __init__(
        self,
        lo: int,
        hi: int,
        ranges: Callable[[], tuple[np.ndarray, np.ndarray]],
        writes: bool,
        name: Callable[[int], str],
        *,
        reduces: bool = False,
        verdict: Callable[[], str] | None = None,
    ) -> None:
        self.lo, self.hi, self.ranges, self.writes, self.name = lo, hi, ranges, writes, name
        self.reduces, self.verdict = reduces, verdict
        self._sorted: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def changed(self) -> None:
        """Some elements completed: ask ``ranges`` again."""
        self._sorted = None

    def hit(self, addr: np.ndarray, nbytes: int) -> tuple[int, int] | None:
        """(position in addr, start of the claimed range) of the first overlap."""
        if self._sorted is None:
            lo, hi = self.ranges()
            order = np.argsort(lo, kind="stable")
            reach = np.maximum.accumulate(hi[order]) if len(order) else hi
            self._sorted = lo[order], reach, hi[order]
        lo, reach, hi = self._sorted
        if not len(lo):
            return None
        at = np.searchsorted(lo, addr + nbytes, side="left") - 1
        touching = (at >= 0) & (reach[np.maximum(at, 0)] > addr)
        if not touching.any():
            return None
        first = int(np.argmax(touching))
        inside = (lo < addr[first] + nbytes) & (hi > addr[first])
        return first, int(lo[np.argmax(inside)])


class InFlight:
    """All claims on one global memory, with an envelope that rejects most accesses in O(1)."""

    def __init__(self) -> None:
        self._claims: dict[int, Claim] = {}
        self._stale = False
        self._envelope()

    def _envelope(self) -> None:
        writes = [c for c in self._claims.values() if c.writes]
        self.write_lo = min((c.lo for c in writes), default=_FAR)
        self.write_hi = max((c.hi for c in writes), default=-_FAR)
        self.lo = min((c.lo for c in self._claims.values()), default=_FAR)
        self.hi = max((c.hi for c in self._claims.values()), default=-_FAR)
        self._stale = False

    def add(self, claim: Claim) -> None:
        self._claims[id(claim)] = claim
        if claim.writes:
            self.write_lo = min(self.write_lo, claim.lo)
            self.write_hi = max(self.write_hi, claim.hi)
        self.lo = min(self.lo, claim.lo)
        self.hi = max(self.hi, claim.hi)

    def remove(self, claim: Claim) -> None:
        del self._claims[id(claim)]
        self._stale = True  # the envelope may be too wide until an access falls into it
        if not self._claims:
            self._envelope()

    def __len__(self) -> int:
        return len(self._claims)

    def _near(self, lo: int, hi: int, write: bool) -> bool:
        if write:
            return lo < self.hi and hi > self.lo
        return lo < self.write_hi and hi > self.write_lo

    def check(
        self,
        addr: np.ndarray,
        nbytes: int,
        *,
        write: bool,
        what: str,
        reduces: bool = False,
        atomic: bool = False,
        report: Report = raise_finding,
    ) -> None:
        """Fault when an access (``what``) meets bytes of a copy in flight: both sides named.

        ``reduces``: the access is a reduction in flight, too. ``atomic``: it is an atomic of a thread; with a
        reduction in flight it differs in the proxy only, a strict finding for ``report``.
        """
        lo, hi = int(addr.min()), int(addr.max()) + nbytes
        if not self._near(lo, hi, write):
            return
        if self._stale:
            self._envelope()
            if not self._near(lo, hi, write):
                return
        for claim in self._claims.values():
            if (not write and not claim.writes) or hi <= claim.lo or lo >= claim.hi:
                continue
            if reduces and claim.reduces:
                continue
            found = claim.hit(addr, nbytes)
            if found is not None:
                fault = _conflict(claim, addr, nbytes, *found, what, write)
                if not (atomic and claim.reduces):
                    raise fault
                fault.severity = Severity.STRICT
                report(fault)


def _conflict(
    claim: Claim, addr: np.ndarray, nbytes: int, index: int, start: int, what: str, write: bool
) -> CopyFault:
    access = f"{what} {'writes' if write else 'reads'} {nbytes} bytes at 0x{int(addr[index]):x}"
    if claim.verdict is not None:
        return CopyFault(f"{access}: {claim.verdict()}", rule="copy.descriptor", index=index)
    role = "has yet to write" if claim.writes else "still reads"
    cure = "completed (wait_group, not .read)" if claim.writes else "read its source (wait_group.read)"
    return CopyFault(
        f"{access} that {claim.name(start)} {role}: nothing orders the two; wait until that copy has {cure}",
        rule="copy.race",
        index=index,
    )
