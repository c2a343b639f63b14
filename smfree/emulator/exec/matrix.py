"""Warp-wide matrices: ldmatrix, stmatrix, movmatrix, mma.sync (PTX ISA, "Warp-level matrix instructions").

An 8x8 matrix of 16-bit elements lies in one register per lane: lane 4 r + c holds elements 2 c and 2 c + 1 of
row r. Numerics of mma, where the ISA leaves them open: products are exact, each element of D is C, to which
the K products are added one after the other from k = 0 on, every sum rounded once to float32, as K fma.rn.f32
would; an f16 result is rounded once more at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.coalescing import wavefronts_per_warp
from smfree.emulator.errors import BarrierFault, EmulationError, MemoryFault
from smfree.emulator.exec.half import from_half, from_tf32, odd_sum, to_half
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import flat_addresses, resolve_generic, space_of
from smfree.emulator.exec.memory_unit import OWN_CTA_ONLY
from smfree.emulator.exec.table import Visible, visible
from smfree.emulator.exec.warp import per_lane
from smfree.emulator.ptx import ast
from smfree.emulator.specs import WARP_SIZE

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder

ROW_BYTES = 16
ROWS = 8
_ALL_LANES = np.uint32(0xFFFFFFFF)
_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


def _whole_warps(dec: Decoder, act: Callable[[Group], None]) -> Visible:
    """Run ``act`` when all 32 lanes of each warp are at the instruction."""
    warps, mask, name = dec.launch.warps, dec.constant(_ALL_LANES), dec.instr.opcode

    def whole(g: Group) -> None:
        if not g.lanes.full_warps:
            short = int(np.argmax(g.lanes.warp_counts < WARP_SIZE))
            raise BarrierFault(
                f"{name} by a warp of which only {int(g.lanes.warp_counts[short])} threads are left: "
                "undefined; all 32 threads of the warp must execute it",
                rule="warp.not_whole",
                index=int(g.lanes.warp_starts[short]),
            )
        act(g)

    return lambda g: bool(warps.gather(g, mask, whole))


def _registers(
    dec: Decoder, operand: ast.Operand, count: int, resolve: Callable[[ast.Operand], int]
) -> list[int]:
    elems = operand.elems if isinstance(operand, ast.Vector) else (operand,)
    if len(elems) != count:
        raise dec.wrong(f"this operand has {count} registers, got {len(elems)}")
    return [resolve(e) for e in elems]


def _fragments(g: Group, registers: list[int]) -> Any:
    """uint32[warps, registers, 32]."""
    columns = [per_lane(g.regs[r], g).reshape(-1, WARP_SIZE) for r in registers]
    return np.ascontiguousarray(np.stack(columns, axis=1).astype(np.uint32, copy=False))


# ---------------------------------------------------------------------------- to and from shared memory


def _matrices(dec: Decoder, *extra: str) -> tuple[int, bool]:
    """(number of 8x8 matrices, whether they are transposed) of an instruction."""
    mods = dec.instr.modifiers
    dec.only("sync", "aligned", "m8n8", "trans", "b16", *_COUNTS, *extra)
    return next((_COUNTS[m] for m in mods if m in _COUNTS), 1), "trans" in mods


class _Rows:
    """The shared-memory rows that the lanes of whole warps name: lane 8 i + r row r of matrix i."""

    def __init__(self, dec: Decoder, address: ast.Operand, count: int) -> None:
        self.launch, self.named = dec.launch, space_of(dec) == "shared"
        self.base, self.offset = dec.address(address)
        self.lanes = count * ROWS  # of each warp

    def access(self, g: Group, act: Callable[[Any], Any], *, write: bool) -> tuple[Any, Any]:
        """Result of ``act(flat row addresses)`` and, under a clock, when each warp's registers are filled."""
        addr = flat_addresses(g, self.base, self.offset)
        chosen = np.flatnonzero(g.lanes.laneid < self.lanes)  # the addresses of the others do not matter
        lanes = g.lanes if len(chosen) == g.lanes.n else g.lanes.split(g.lanes.laneid < self.lanes)[0]
        addr = addr[chosen]
        try:
            if not self.named:
                space, addr = resolve_generic(self.launch, g, addr)
                if space not in ("shared", "cluster"):
                    raise MemoryFault(
                        f"{self.launch.kernel.instrs[g.pc].opcode} takes addresses in shared memory, this "
                        f"one is in {space} memory",
                        rule="matrix.space",
                        index=0,
                    )
            found = act(self.launch.memory.flat_shared(lanes, addr, ROW_BYTES, OWN_CTA_ONLY))
        except EmulationError as error:
            error.index = int(chosen[error.index or 0])
            raise
        waves = wavefronts_per_warp(addr, ROW_BYTES, lanes.warp_starts, lanes.laneid)
        self._count(len(lanes.warps), int(waves.sum()), lanes.n * ROW_BYTES, write=write)
        clock = self.launch.clock
        return found, None if clock is None else clock.shared(lanes.sm, self.launch.settle(g), waves)

    def _count(self, requests: int, wavefronts: int, nbytes: int, *, write: bool) -> None:
        counters = self.launch.counters
        if write:
            counters.shared_store_requests += requests
            counters.shared_store_wavefronts += wavefronts
            counters.shared_store_bytes += nbytes
        else:
            counters.shared_load_requests += requests
            counters.shared_load_wavefronts += wavefronts
            counters.shared_load_bytes += nbytes


@visible("ldmatrix")
def ldmatrix(dec: Decoder, ins: ast.Instr) -> Visible:
    count, transposed = _matrices(dec, "shared", "shared::cta")
    outs = _registers(dec, ins.operands[0], count, dec.dst)
    rows, launch = _Rows(dec, ins.operands[1], count), dec.launch

    def act(g: Group) -> None:
        found, ready = rows.access(g, lambda flat: launch.memory.shared.load(flat, 2, ROWS), write=False)
        matrices = found.reshape(-1, count, ROWS, ROWS)
        if transposed:
            matrices = np.ascontiguousarray(matrices.swapaxes(2, 3))
        fragments = matrices.view(np.uint32).reshape(-1, count, WARP_SIZE)
        for i, d in enumerate(outs):
            g.regs[d] = fragments[:, i].reshape(-1)
        launch.memory.until(g, outs, ready)

    return _whole_warps(dec, act)


@visible("stmatrix")
def stmatrix(dec: Decoder, ins: ast.Instr) -> Visible:
    count, transposed = _matrices(dec, "shared", "shared::cta")
    rows, launch = _Rows(dec, ins.operands[0], count), dec.launch
    sources = _registers(dec, ins.operands[1], count, lambda x: dec.src(x, "b32"))

    def act(g: Group) -> None:
        matrices = _fragments(g, sources).view(np.uint16).reshape(-1, count, ROWS, ROWS)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        values = np.ascontiguousarray(matrices).reshape(-1, ROWS)
        rows.access(g, lambda flat: launch.memory.shared.store(flat, values), write=True)
        launch.did_something()

    return _whole_warps(dec, act)


@visible("movmatrix")
def movmatrix(dec: Decoder, ins: ast.Instr) -> Visible:
    """The transpose of an 8x8 matrix, from registers to registers."""
    _matrices(dec)
    d, a = dec.dst(ins.operands[0]), dec.src(ins.operands[1], "b32")

    def act(g: Group) -> None:
        matrices = _fragments(g, [a]).view(np.uint16).reshape(-1, ROWS, ROWS)
        g.regs[d] = np.ascontiguousarray(matrices.swapaxes(1, 2)).view(np.uint32).reshape(-1)

    return _whole_warps(dec, act)


# ------------------------------------------------------------------------------------------------- mma

_LANE = np.arange(WARP_SIZE)[:, None]
_GROUP, _IN_GROUP = _LANE // 4, _LANE % 4  # as the ISA names them: groupID, threadID_in_group


@dataclass(frozen=True)
class _Fragment:
    """Where a lane's elements stand in a matrix: int[32, elements] each; ``packed`` ones share a register."""

    row: Any
    col: Any
    packed: bool

    @property
    def registers(self) -> int:
        return int(self.row.shape[1]) // (2 if self.packed else 1)


def _multiplicands(depth: int, kind: str) -> tuple[_Fragment, _Fragment]:
    """Fragments of A (16 x depth) and B (depth x 8)."""
    if kind == "tf32":
        i, j = np.arange(depth // 2), np.arange(depth // 4)
        a = _Fragment(_GROUP + 8 * (i % 2), _IN_GROUP + 4 * (i // 2), False)
        return a, _Fragment(_IN_GROUP + 4 * j, _GROUP + 0 * j, False)
    i, j = np.arange(depth // 2), np.arange(depth // 4)
    a = _Fragment(_GROUP + 8 * (i // 2 % 2), 2 * _IN_GROUP + i % 2 + 8 * (i // 4), True)
    return a, _Fragment(2 * _IN_GROUP + j % 2 + 8 * (j // 2), _GROUP + 0 * j, True)


def _accumulator(kind: str) -> _Fragment:
    """The fragment of C and D (16 x 8)."""
    i = np.arange(4)
    return _Fragment(_GROUP + 8 * (i // 2), 2 * _IN_GROUP + i % 2, kind == "f16")


def _elements(fragments: Any, kind: str) -> Any:
    """uint32[warps, registers, 32] -> float64[warps, 32, elements]."""
    by_lane = np.ascontiguousarray(fragments.swapaxes(1, 2))
    if kind == "f32":
        return by_lane.view(np.float32).astype(np.float64)
    return from_tf32(by_lane) if kind == "tf32" else from_half(by_lane.view(np.uint16), kind)


def _matrix(g: Group, registers: list[int], where: _Fragment, kind: str, shape: tuple[int, int]) -> Any:
    """float64[warps, *shape] of the fragments in these registers."""
    values = _elements(_fragments(g, registers), kind)
    out = np.empty((len(values), *shape))
    out[:, where.row, where.col] = values
    return out


def _exact_in_float32(a: Any, b: Any) -> bool:
    """Whether every product of elements, of at most 11 bits each, is a normal float32 or zero."""
    a, b = np.abs(a), np.abs(b)
    least = a[a > 0].min(initial=np.inf) * b[b > 0].min(initial=np.inf)
    return bool(a.max() * b.max() < 2.0**127 and least >= 2.0**-126)


def multiply(a: Any, b: Any, c: Any) -> Any:
    """float64[n, 16, k] x [n, k, 8] + [n, 16, 8] -> float32, ordered and rounded as the module says."""
    total = c.astype(np.float32)
    if _exact_in_float32(a, b):  # then a float32 addition rounds the sum once by itself
        a, b = a.astype(np.float32), b.astype(np.float32)
        for k in range(a.shape[2]):
            total = total + a[:, :, k, None] * b[:, None, k, :]
        return total
    for k in range(a.shape[2]):
        product = a[:, :, k, None] * b[:, None, k, :]
        total = odd_sum(product, total.astype(np.float64)).astype(np.float32)
    return total


_SHAPES = {
    ("m16n8k8", "f16"): 8, ("m16n8k16", "f16"): 16, ("m16n8k8", "bf16"): 8, ("m16n8k16", "bf16"): 16,
    ("m16n8k4", "tf32"): 4, ("m16n8k8", "tf32"): 8,
}  # fmt: skip
_COST = {"f16": 1, "bf16": 1, "tf32": 2}  # per multiply-add, in those of f16


@visible("mma")
def mma(dec: Decoder, ins: ast.Instr) -> Visible:
    if len(ins.modifiers) != 9:
        raise dec.refuse("this form of mma")
    sync, aligned, shape, row, col, d_kind, a_kind, b_kind, c_kind = ins.modifiers
    depth = _SHAPES.get((shape, a_kind))
    accumulators = ("f16", "f32") if a_kind == "f16" else ("f32",)
    if depth is None or a_kind != b_kind or d_kind != c_kind or c_kind not in accumulators:
        raise dec.refuse("this form of mma")
    if (sync, aligned, row, col) != ("sync", "aligned", "row", "col"):
        raise dec.refuse("this form of mma")
    (at_a, at_b), at_c = _multiplicands(depth, a_kind), _accumulator(c_kind)
    d, a, b, c = ins.operands
    outs = _registers(dec, d, at_c.registers, dec.dst)
    source = lambda x: dec.src(x, "b32")  # noqa: E731
    a_regs = _registers(dec, a, at_a.registers, source)
    b_regs = _registers(dec, b, at_b.registers, source)
    c_regs = _registers(dec, c, at_c.registers, source)
    launch, work = dec.launch, 16 * 8 * depth * _COST[a_kind]

    def act(g: Group) -> None:
        product = multiply(
            _matrix(g, a_regs, at_a, a_kind, (16, depth)),
            _matrix(g, b_regs, at_b, b_kind, (depth, 8)),
            _matrix(g, c_regs, at_c, c_kind, (16, 8)),
        )[:, at_c.row, at_c.col]
        if c_kind == "f16":
            bits = to_half(product.astype(np.float64), "f16").view(np.uint32)
        else:
            bits = product.view(np.uint32)
        for i, r in enumerate(outs):
            g.regs[r] = bits[:, :, i].reshape(-1)
        if launch.clock is not None:
            launch.memory.until(g, outs, launch.clock.mma(g.lanes.sm, launch.settle(g), work))

    return _whole_warps(dec, act)
