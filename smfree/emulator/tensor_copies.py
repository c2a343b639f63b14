"""Tensor copies and reductions: checked at issue (PTX ISA, "Tensor copy")."""

from __future__ import annotations

import numpy as np

from smfree.emulator.bytespace import as_addresses
from smfree.emulator.copy_kinds import CopyKind
from smfree.emulator.copy_rules import CopyRules, strict
from smfree.emulator.errors import CopyFault, Unsupported
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.pending import PendingCopies
from smfree.emulator.reductions import GLOBAL_TYPES, Reduction, of_map
from smfree.emulator.tensor_boxes import BoxRows, box_rows
from smfree.emulator.tensor_mover import TensorMover
from smfree.emulator.tensormap import MAP_BYTES, TensorMap, decode


class TensorCopies(CopyRules):
    """Issues tensor copies. ``coords`` are int64[n, rank], innermost first."""

    def tensor_map(self, data: bytes | bytearray | memoryview | np.ndarray) -> TensorMap:
        """Decode with a cache (a map is read by every copy)."""
        raw = bytes(data)
        found = self._maps.get(raw)
        if found is None:
            found = self._maps[raw] = decode(raw)
        return found

    def tensor_load(
        self,
        issuer: np.ndarray,
        dst: np.ndarray,
        map_addr: np.ndarray,
        coords: np.ndarray,
        key: np.ndarray,
        *,
        maps: TensorMap | None = None,
        in_memory: bool | None = None,
        label: str = "",
    ) -> PendingCopies:
        """``cp.async.bulk.tensor.Nd.shared.global.tile``: dst flat shared.

        ``map_addr`` int64[n]: global addresses of the maps, all with the same content; or pass ``maps``,
        the decoded map, and ``map_addr`` serves reports, and the claim on it if it is ``in_memory``.
        Elements outside the tensor are filled and count in complete_tx.
        """
        dst, map_addr = as_addresses(dst), as_addresses(map_addr)
        coords = np.asarray(coords, np.int64)
        tensor = maps if maps is not None else self._map_in_memory(map_addr)
        self._tensor_rules(tensor, dst, coords, "destination", store=False)
        self._live_barrier(key)
        sizes = np.full(len(dst), tensor.box_bytes)
        mover = TensorMover(
            self._tensor_home(), self.shared, tensor, box_rows(tensor, coords), dst, loads=True
        )
        self._tensor_bounds(mover)
        mover.check_global(self.report, "cp.async.bulk.tensor")
        span = mover.envelope()
        flying = self.memory.in_flight
        if span is not None and span[0] < flying.write_hi and span[1] > flying.write_lo:
            lo, hi = mover.row_ranges(np.arange(len(dst)))
            self._unordered_source(lo, hi - lo, "cp.async.bulk.tensor load")
        self._into_shared(dst, sizes, "cp.async.bulk.tensor", label)
        batch = PendingCopies(
            self,
            CopyKind.TENSOR_G2S,
            issuer,
            dst,
            map_addr,
            sizes,
            mover,
            key=key,
            coords=coords,
            label=label,
        )
        self._claim_rows(
            batch, mover, writes=False, in_memory=maps is None if in_memory is None else in_memory
        )
        self._live.append(batch)
        return batch

    def tensor_store(
        self,
        issuer: np.ndarray,
        src: np.ndarray,
        map_addr: np.ndarray,
        coords: np.ndarray,
        *,
        op: str | None = None,
        group: np.ndarray | None = None,
        maps: TensorMap | None = None,
        in_memory: bool | None = None,
        label: str = "",
    ) -> PendingCopies:
        """``cp{.reduce}.async.bulk.tensor.Nd.global.shared::cta.tile.bulk_group``: src flat shared.

        ``op`` names a reduction; its type is the map's. Elements outside the tensor are dropped; where a row
        of the tensor ends inside a 16-byte unit, hardware is reported to write the whole unit: a strict
        finding.
        """
        src, map_addr = as_addresses(src), as_addresses(map_addr)
        coords = np.asarray(coords, np.int64)
        tensor = maps if maps is not None else self._map_in_memory(map_addr)
        self._tensor_rules(tensor, src, coords, "source", store=True)
        kind = CopyKind.TENSOR_S2G if op is None else CopyKind.REDUCE_TENSOR
        reduction = None if op is None else _reduction(op, tensor)
        self._source_ready(src, tensor.box_bytes, kind.value)
        rows = box_rows(tensor, coords)
        self._whole_units(tensor, rows, coords)
        mover = TensorMover(
            self._tensor_home(), self.shared, tensor, rows, src, loads=False, reduction=reduction
        )  # fmt: skip
        self._tensor_bounds(mover)
        if reduction is not None:
            mover.check_global(self.report, kind.value)
        span, flying = mover.envelope(), self.memory.in_flight
        if span is not None and span[0] < flying.hi and span[1] > flying.lo:
            lo, hi = mover.row_ranges(np.arange(len(src)))
            self._unordered_target(lo, hi - lo, kind)
        self.shared.use_source(src, tensor.box_bytes, +1)
        sizes = np.full(len(src), tensor.box_bytes)
        batch = PendingCopies(
            self, kind, issuer, map_addr, src, sizes, mover, group=group, coords=coords, label=label
        )
        self._claim_rows(
            batch, mover, writes=True, in_memory=maps is None if in_memory is None else in_memory
        )
        self._live.append(batch)
        return batch

    def _whole_units(self, tensor: TensorMap, rows: BoxRows, coords: np.ndarray) -> None:
        ragged = (rows.hi % 16 != 0) & (rows.hi > rows.lo)
        if ragged.any():
            i = int(np.argmax(ragged))
            self.report(
                strict(
                    "tensor.store_tail",
                    f"tensor store at {tuple(coords[i].tolist())} ends {int(rows.hi[i]) % 16} bytes into "
                    f"a 16-byte unit of the row ({tensor}): hardware is reported to write the whole unit, "
                    "past dimension 0; make its extent a multiple of 16 bytes or store the tail with "
                    "ordinary stores",
                    i,
                )
            )

    def _tensor_home(self) -> GlobalMemory:
        if not isinstance(self.memory, GlobalMemory):
            raise Unsupported(
                f"a tensor in {self.memory.name} is not modelled; copy it to the device, or use plain bulk "
                "copies",
                rule="unsupported.host_memory",
            )
        return self.memory

    def _map_in_memory(self, map_addr: np.ndarray) -> TensorMap:
        self._aligned(map_addr, 64, "tensor map")
        starts = np.unique(map_addr).tolist()
        for start in starts:
            self.maps_memory.check_range(start, MAP_BYTES, "tensor map")
        found = [self.tensor_map(self.maps_memory.read(start, MAP_BYTES)) for start in starts]
        if any(other != found[0] for other in found[1:]):
            raise Unsupported(
                "lanes of one instruction use different tensor maps; split the issue", rule="tensormap"
            )
        return found[0]


def _reduction(op: str, tensor: TensorMap) -> Reduction:
    found = of_map(op, tensor.data_type)
    if found is None:
        raise CopyFault(
            f"cp.reduce.async.bulk.tensor.{op} does not exist for {tensor.data_type.name} (the type comes "
            f"from the map: {tensor}); encode the map with one of {', '.join(GLOBAL_TYPES[op])}",
            rule="tensor.reduce_type",
            index=0,
        )
    return found
