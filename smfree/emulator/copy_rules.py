"""What the ISA asks of the operands of an asynchronous copy."""

from __future__ import annotations

import numpy as np

from smfree.emulator.bytespace import AWAITS_COPY, BARRIER, UNWRITTEN, WRITTEN, as_addresses, or_reduce, shown
from smfree.emulator.copy_kinds import CopyKind
from smfree.emulator.errors import BarrierFault, CopyFault, MemoryFault, Severity, Unsupported
from smfree.emulator.pending import CopyTracker, by_size
from smfree.emulator.tensor_mover import TensorMover
from smfree.emulator.tensormap import SHARED_ALIGNMENT, SWIZZLE_PERIOD, SWIZZLE_SPAN, Swizzle, TensorMap


class CopyRules(CopyTracker):
    """Checks at issue; each raises a fault with the offending lane, or reports a strict finding."""

    def _bulk_sizes(
        self,
        dst: np.ndarray,
        src: np.ndarray,
        nbytes: np.ndarray | int,
        what: str,
        *,
        to_shared: bool,
        from_shared: bool,
    ) -> np.ndarray:
        sizes = np.empty(len(dst), np.int64)
        sizes[:] = nbytes
        self._aligned(dst, 16, f"{what} destination", shared=to_shared)
        self._aligned(src, 16, f"{what} source", shared=from_shared)
        if int(or_reduce(sizes)) & 15:
            i = int(np.argmax((sizes & 15) != 0))
            raise CopyFault(
                f"{what} size must be a multiple of 16 bytes (got {int(sizes[i])}); copy the tail with "
                "ordinary loads and stores, or pad the tile",
                rule="bulk.size",
                index=i,
            )
        return sizes

    def prefetch_sizes(self, src: np.ndarray, nbytes: np.ndarray | int) -> np.ndarray:
        """The rules of ``cp.async.bulk.prefetch`` -> int64[n] bytes. It is a hint: bounds are not checked."""
        return self._bulk_sizes(
            np.zeros_like(src), src, nbytes, "cp.async.bulk.prefetch", to_shared=False, from_shared=False
        )

    def check_coordinates(self, tensor: TensorMap, coords: np.ndarray) -> None:
        """As many coordinates as the map has dimensions."""
        if coords.ndim != 2 or coords.shape[1] != tensor.rank:
            raise CopyFault(
                f"a {tensor.rank}-D tensor map needs {tensor.rank} coordinates (got {coords.shape[-1]}): use "
                f"cp.async.bulk.tensor.{tensor.rank}d",
                rule="tensor.rank",
                index=0,
            )

    def _tensor_rules(
        self, tensor: TensorMap, shared_addr: np.ndarray, coords: np.ndarray, side: str, *, store: bool
    ) -> None:
        self.check_coordinates(tensor, coords)
        self._aligned(shared_addr, SHARED_ALIGNMENT, f"cp.async.bulk.tensor shared {side}", shared=True)
        span = SWIZZLE_SPAN.get(tensor.swizzle)
        if span is not None and tensor.row_bytes < span and tensor.rows > 1:
            raise Unsupported(
                f"inner box of {tensor.row_bytes} bytes narrower than the {span}-byte swizzle: hardware's "
                "row pitch is "
                "undocumented; make the inner box as wide as the swizzle",
                rule="tensor.narrow_swizzle",
            )
        period = SWIZZLE_PERIOD[tensor.swizzle]
        if tensor.swizzle is not Swizzle.NONE:
            off = shared_addr % period != 0
            if off.any():
                i = int(np.argmax(off))
                self.report(
                    strict(
                        "tensor.swizzle_base",
                        f"shared {side} {self.shared.place(int(shared_addr[i]))} is not aligned to "
                        f"{period}: swizzle "
                        f"{tensor.swizzle.name} works on absolute shared addresses, so a formula relative "
                        "to the "
                        f"tile reads other bytes; align the tile to {period} bytes",
                        i,
                    )
                )
        inner = coords[:, 0] * tensor.element_bytes % 16 != 0
        if inner.any():
            i = int(np.argmax(inner))
            self.report(
                strict(
                    "tensor.inner_start",
                    "the box must start at a multiple of 16 bytes in dimension 0 (coordinate "
                    f"{int(coords[i, 0])} x "
                    f"{tensor.element_bytes} bytes); step by {16 // tensor.element_bytes} elements",
                    i,
                )
            )
        if store and (coords < 0).any():
            i = int(np.argmax((coords < 0).any(axis=1)))
            self.report(
                strict(
                    "tensor.store_negative",
                    "a tensor store's coordinates must not be negative (got "
                    f"{tuple(coords[i].tolist())}); only "
                    "loads fill what lies outside",
                    i,
                )
            )

    def _tensor_bounds(self, mover: TensorMover) -> None:
        """The bytes inside the tensor must be allocated memory."""
        span = mover.envelope()
        if span is not None:
            home = mover.memory.allocation_of(span[0])
            if home is None or span[1] > home.end:
                lo, hi = mover.row_ranges(np.arange(mover.boxes))
                for start, end in zip(lo.tolist(), hi.tolist(), strict=True):
                    mover.memory.check_range(start, end - start, f"tensor copy through {mover.tensor}")
        if self.flag_outside:
            outside = mover.wholly_outside()
            if outside.any():
                i = int(np.argmax(outside))
                self.report(
                    strict("tensor.outside", f"box {i} lies wholly outside {mover.tensor}; bound the loop", i)
                )

    # --- common checks ---

    def _aligned(self, addr: np.ndarray, to: int, operand: str, *, shared: bool = False) -> None:
        if int(or_reduce(addr)) & (to - 1):
            i = int(np.argmax((addr & (to - 1)) != 0))
            where = int(addr[i])
            place = self.shared.place(where) if shared else shown(where)
            raise CopyFault(
                f"{operand} must be {to}-byte aligned (got {place}, {where % to} past); move it by a "
                f"multiple of {to} "
                "bytes, or make the stage pitch one",
                rule="copy.misaligned",
                index=i,
            )

    def _live_barrier(self, key: np.ndarray, what: str = "cp.async.bulk") -> None:
        self.barriers._need_live(as_addresses(key), f"{what} with mbarrier completion")

    def _into_shared(
        self, dst: np.ndarray, sizes: np.ndarray, what: str, label: str, *, reduces: bool = False
    ) -> None:
        """Check the destinations in shared memory and close them."""
        for size, which in by_size(sizes):
            if reduces:
                self._reducible(dst[which], size, f"{what} ({label})" if label else what, which)
            else:
                self._open_destination(dst[which], size, what, label, which)
            if size:
                self.shared.mark(dst[which], size, AWAITS_COPY)

    def _reducible(self, dst: np.ndarray, nbytes: int, what: str, which: np.ndarray) -> None:
        """A reduction's destination: inside, written, no barrier; of copies in flight only reductions."""
        for i, start in enumerate(dst.tolist()):
            one, cells = dst[i : i + 1], self.shared.written[start : start + nbytes]
            try:
                self.shared.check_range(one, nbytes, f"{what} destination")
                if (cells == BARRIER).any():
                    self.shared.judge_range(one, nbytes, what)
            except (BarrierFault, MemoryFault) as fault:
                fault.index = int(which[i])
                raise
            others = [b.describe(k) for b, k in self._copies_at(start, nbytes, True) if not b.kind.reduces]
            others += [b.describe(k) for b, k in self._copies_at(start, nbytes, False)]
            if others:
                raise CopyFault(
                    f"{what} of {nbytes} bytes at {self.shared.place(start)} meets bytes of {others[0]}, "
                    "which is not complete; wait for it first, only reductions may overlap",
                    rule="copy.overlap",
                    index=int(which[i]),
                )
            if (cells == UNWRITTEN).any():
                self.report(
                    CopyFault(
                        f"{what} of {nbytes} bytes combines with bytes nobody has written "
                        f"({int((cells == UNWRITTEN).sum())} bytes from {self.shared.place(start)}); "
                        "initialise them first",
                        rule="copy.destination_unwritten",
                        index=int(which[i]),
                    )
                )

    def _open_destination(
        self, dst: np.ndarray, nbytes: int, what: str, label: str, which: np.ndarray | None = None
    ) -> None:
        """The destination lies in its CTA, holds no barrier, no copy in flight touches it, no two lanes
        share it."""
        try:
            self.shared.check_range(dst, nbytes, f"{what} destination")
            if self.shared.busy(dst, nbytes):
                self.shared.judge_range(dst, nbytes, f"{what} ({label})" if label else what)
        except (BarrierFault, CopyFault, MemoryFault) as fault:
            if which is not None and fault.index is not None:
                fault.index = int(which[fault.index])
            raise
        if len(dst) > 1 and (dst[1:] - dst[:-1] < nbytes).any():
            line = np.sort(dst)
            if (line[1:] - line[:-1] < nbytes).any():
                order = np.argsort(dst, kind="stable")
                i = int(np.argmax(dst[order][1:] - dst[order][:-1] < nbytes))
                raise CopyFault(
                    f"two {what} copies of one instruction write "
                    f"{self.shared.place(int(dst[order[i + 1]]))}: copies "
                    "are unordered, the result is undefined; give each its own destination",
                    rule="copy.overlap",
                    index=int(order[i + 1]),
                )

    def _close(self, dst: np.ndarray, nbytes: int) -> None:
        if nbytes:
            self.shared.mark(dst, nbytes, AWAITS_COPY)

    def _source_ready(self, src: np.ndarray, nbytes: int, what: str, which: np.ndarray | None = None) -> None:
        """A store's source: in its CTA, every byte written, no copy still landing in it, no barrier."""
        self.shared.check_range(src, nbytes, f"{what} source")
        if not nbytes or not self.shared.unreadable(src, nbytes):
            return
        for i, start in enumerate(src.tolist()):
            cells = self.shared.written[start : start + nbytes]
            if (cells == WRITTEN).all():
                continue
            at = int(np.argmax(cells != WRITTEN))
            index = i if which is None else int(which[i])
            where = self.shared.place(start + at)
            if cells[at] == AWAITS_COPY:
                cure = self._cure_at(start + at, "wait for that first")
                raise CopyFault(
                    f"{what} reads {where}, the destination of {self._copy_at(start + at, True)}, which is "
                    f"not complete; {cure}",
                    rule="copy.destination_read",
                    index=index,
                )
            content = (
                self.shared.barrier_at(start + at) if cells[at] == BARRIER else "bytes nobody has written"
            )
            missing = int((cells != WRITTEN).sum())
            self.report(
                CopyFault(
                    f"{what} of {nbytes} bytes reads {content} ({missing} bytes from {where}); fill the "
                    "tile first",
                    rule="copy.source_unwritten",
                    index=index,
                )
            )

    def _unordered_source(self, src: np.ndarray, sizes: np.ndarray, what: str) -> None:
        """A load must not read what a copy in flight has yet to write."""
        flying = self.memory.in_flight
        if len(src) and int(src.min()) < flying.write_hi and int((src + sizes).max()) > flying.write_lo:
            for size, which in by_size(sizes):
                if size:
                    flying.check(src[which], size, write=False, what=what)

    def _unordered_target(self, dst: np.ndarray, sizes: np.ndarray, kind: CopyKind) -> None:
        """A store must not meet what another copy in flight reads or writes; reductions meet each other."""
        flying = self.memory.in_flight
        if len(dst) and int(dst.min()) < flying.hi and int((dst + sizes).max()) > flying.lo:
            for size, which in by_size(sizes):
                if size:
                    flying.check(dst[which], size, write=True, what=kind.value, reduces=kind.reduces)


def strict(rule: str, message: str, index: int) -> CopyFault:
    return CopyFault(message, rule=rule, index=index, severity=Severity.STRICT)
