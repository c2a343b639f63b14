"""Loads, stores, atomics, prefetches (PTX ISA, "Data Movement and Conversion Instructions").

Every access resolves its state space here and then goes through ``Launch.global_access`` or
``Launch.shared_access``, the one place where bytes are checked, counted and timed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.bytespace import signed
from smfree.emulator.errors import MemoryFault
from smfree.emulator.exec.accesses import Issue
from smfree.emulator.exec.arith import instruction_type
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.table import Access, AccessKind, Visible, visible
from smfree.emulator.exec.values import (
    CLUSTER_SHIFT,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    SINT,
    UINT,
    WINDOW_BYTES,
    storage,
    width,
)
from smfree.emulator.exec.warp import per_lane
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder
    from smfree.emulator.exec.launch import Launch

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "param", "param::entry", "const")
_STRENGTH = ("weak", "volatile", "relaxed", "acquire", "release", "cta", "cluster", "gpu", "sys", "nc")
_HINTS = (
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first",
    "L1::evict_last", "L1::no_allocate", "L2::64B", "L2::128B", "L2::256B", "L2::evict_last",
    "L2::evict_normal", "L2::evict_first", "L2::cache_hint",
)  # fmt: skip
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_SCOPES = ("cta", "cluster", "gpu", "sys")
_WIDE_SCOPES = _SCOPES[1:]


def flat_addresses(g: Group, base: int | None, offset: int) -> Any:
    """int64[n] addresses (or window offsets) of [base + offset] for every lane; those
    from 2^63 on are negative."""
    if base is None:
        return np.full(g.lanes.n, offset, np.int64)
    value = g.regs[base]
    if type(value) is not np.ndarray:
        return np.full(g.lanes.n, signed(int(value) + offset), np.int64)
    if value.dtype == np.uint64:
        return value.view(np.int64) + offset
    return value.astype(np.int64) + offset


def strong_scope(ins: ast.Instr) -> str | None:
    """The scope of a strong access, None of a weak one. A volatile one is as strong as .relaxed.sys (PTX ISA,
    "volatile Operation")."""
    if "volatile" in ins.modifiers:
        return "sys"
    return next((m for m in ins.modifiers if m in _SCOPES), None)


def space_of(dec: Decoder) -> str:
    """State space among the modifiers: "cluster" is .shared::cluster, "generic" when none is named."""
    for modifier in dec.instr.modifiers:
        if modifier == "shared::cluster":
            return "cluster"
        if modifier in SPACES:
            return modifier.partition("::")[0]
    return "generic"


def resolve_generic(launch: Launch, g: Group, addr: Any) -> tuple[str, Any]:
    """(space, window offsets) of generic addresses; lanes must agree on the space.

    "cluster" where mapa made some of the shared addresses.
    """
    window = addr // WINDOW_BYTES
    first = int(window[0])
    if (window != first).any():
        raise MemoryFault(
            "one generic access of a group goes to several state spaces at once, which is not modelled; "
            "convert the address with cvta.to first",
            rule="memory.generic",
            index=int(np.flatnonzero(window != first)[0]),
        )
    spaces = {SHARED_WINDOW // WINDOW_BYTES: "shared", LOCAL_WINDOW // WINDOW_BYTES: "local",
              PARAM_WINDOW // WINDOW_BYTES: "param"}  # fmt: skip
    space = spaces.get(first)
    if space is None:
        return "global", addr
    offset = addr - first * WINDOW_BYTES
    if space == "shared" and (offset >> CLUSTER_SHIFT).any():
        space = "cluster"
    return space, offset


@visible("ld", "ldu")
def load(dec: Decoder, ins: ast.Instr) -> Visible:
    ptx_type = instruction_type(dec)
    dec.only(*SPACES, *_STRENGTH, *_HINTS, *_VECTORS, ptx_type)
    if "v8" in ins.modifiers and width(ptx_type) != 32:
        raise dec.refuse("this vector")
    count = next((_VECTORS[m] for m in ins.modifiers if m in _VECTORS), 1)
    target = ins.operands[0]
    elems = target.elems if isinstance(target, ast.Vector) else (target,)
    if len(elems) != count:
        raise dec.wrong(f"{count} elements need {count} destination registers, got {len(elems)}")
    outs = [None if isinstance(e, ast.Sink) else dec.dst(e) for e in elems]
    convert: list[Any] = [
        _widen(ptx_type, dec.dst_type(e)) if not isinstance(e, ast.Sink) else None for e in elems
    ]
    base, offset = dec.address(ins.operands[1])
    space, launch, size = space_of(dec), dec.launch, width(ptx_type) // 8
    acquire, scope = "acquire" in ins.modifiers, strong_scope(ins)
    _read_policy(dec, ins)
    if space == "param":
        return _load_param(launch, outs, convert, ptx_type, base, offset)
    plain = all(c is None for c in convert)
    written = [o for o in outs if o is not None]
    registers = tuple(written)

    def act(g: Group) -> bool:
        addr = flat_addresses(g, base, offset)
        where = space
        if where == "generic":
            where, addr = resolve_generic(launch, g, addr)
        if where in ("global", "const"):
            values, ready = launch.memory.load_global(Issue(g), addr, size, count, scope)
            launch.memory.until(g, written, ready)
        elif where == "shared":
            values, ready = launch.memory.load_shared(Issue(g), addr, size, count)
            launch.memory.until(g, written, ready)
        elif where == "cluster":
            values, ready = launch.peers.load(Issue(g), addr, size, count)
            launch.memory.until(g, written, ready)
        elif where == "local":
            values = launch.memory.load_local(g, addr, size, count)
        else:
            values = launch.memory.param_bytes(addr, size * count).view(UINT[size * 8]).reshape(-1, count)
        for i, d in enumerate(outs):
            if d is not None:
                column = values[:, i]
                g.regs[d] = column if plain or convert[i] is None else convert[i](column)
        if plain and len(written) == count > 1:
            g.remember(registers, values)
        if acquire:
            launch.memory.settle_loads(g)
        return True

    if plain and scope is None and len(written) == count and space in ("global", "shared"):
        return Access(AccessKind.LOAD, space, size, count, ((base, offset),), registers, act)
    return act


def _read_policy(dec: Decoder, ins: ast.Instr) -> None:
    """The cache policy is read and has no effect here."""
    if "L2::cache_hint" in ins.modifiers:
        dec.src(ins.operands[2], "b64")


def _widen(ptx_type: str, register: str) -> Any:
    """How a loaded element becomes a register; None when the widths agree."""
    if width(ptx_type) == width(register):
        return None
    final = storage(register)
    if ptx_type[0] == "s":
        narrow, wide = SINT[width(ptx_type)], SINT[width(register)]
        return lambda x: x.view(narrow).astype(wide).view(final)
    return lambda x: x.astype(final)


def _load_param(
    launch: Launch, outs: list[int | None], convert: list[Any], ptx_type: str, base: int | None, offset: int
) -> Visible:
    kind = UINT[width(ptx_type)]
    size = width(ptx_type) // 8

    def act(g: Group) -> bool:
        start = 0 if base is None else g.regs[base]
        varying = type(start) is np.ndarray
        at = flat_addresses(g, base, offset) if varying else np.array([int(start) + offset], np.int64)
        values = launch.memory.param_bytes(at, size * len(outs)).view(kind)
        for i, d in enumerate(outs):
            if d is not None:
                column = values[:, i] if convert[i] is None else convert[i](values[:, i])
                g.regs[d] = column if varying else column[0]
        return True

    return act


@visible("st")
def store(dec: Decoder, ins: ast.Instr) -> Visible:
    ptx_type = instruction_type(dec)
    dec.only(*SPACES, *_STRENGTH, *_HINTS, *_VECTORS, ptx_type)
    count = next((_VECTORS[m] for m in ins.modifiers if m in _VECTORS), 1)
    source = ins.operands[1]
    elems = source.elems if isinstance(source, ast.Vector) else (source,)
    if len(elems) != count:
        raise dec.wrong(f"{count} elements need {count} source registers, got {len(elems)}")
    sources = tuple(dec.src(e, ptx_type) for e in elems)
    base, offset = dec.address(ins.operands[0])
    _read_policy(dec, ins)
    space, launch, kind = space_of(dec), dec.launch, UINT[width(ptx_type)]
    if space in ("param", "const"):
        raise dec.refuse(f"st.{space}")
    release = "release" in ins.modifiers
    scope = strong_scope(ins)
    publishes = release and scope in _WIDE_SCOPES

    def act(g: Group) -> bool:
        addr = flat_addresses(g, base, offset)
        values = _columns(g, sources, kind)
        where = space
        if where == "generic":
            where, addr = resolve_generic(launch, g, addr)
        if release:
            launch.memory.release(g, scope)
        if publishes:
            launch.peers.publish(g)
        if where == "global":
            launch.memory.store_global(Issue(g), addr, values, scope)
        elif where == "shared":
            launch.memory.store_shared(Issue(g), addr, values)
        elif where == "cluster":
            launch.peers.store(Issue(g), addr, values)
        elif where == "local":
            launch.memory.store_local(g, addr, values)
        else:
            raise MemoryFault(
                "a store to the parameter window: kernel arguments are read-only", rule="memory.param"
            )
        return True

    same = [width(dec.types[e.name]) == width(ptx_type) for e in elems if isinstance(e, ast.Reg)]
    if all(same) and scope is None and space in ("global", "shared"):
        return Access(AccessKind.STORE, space, width(ptx_type) // 8, count, ((base, offset),), sources, act)
    return act


def _columns(g: Group, sources: tuple[int, ...], kind: Any) -> Any:
    """[n, k] array of the source registers, reusing the block a vector load left them in."""
    if len(sources) > 1:
        block = g.block(sources, g.lanes.n)
        if block is not None and block.dtype == kind:
            return block
    out = np.empty((g.lanes.n, len(sources)), kind)
    fill_columns(out, g, sources)
    return out


def fill_columns(out: Any, g: Group, sources: tuple[int, ...]) -> None:
    """Write the source registers into the columns of ``out``, cut to its width."""
    kind = out.dtype
    for i, s in enumerate(sources):
        value = g.regs[s]
        if value is None:
            raise MemoryFault("a store of a register that was never written", rule="register.undefined")
        out[:, i] = value if value.dtype == kind else value.astype(kind)


_ATOMIC_OPS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")


@visible("atom", "red")
def atomic(dec: Decoder, ins: ast.Instr) -> Visible:
    ptx_type = instruction_type(dec)
    dec.only(*SPACES, *_STRENGTH, "acq_rel", *_ATOMIC_OPS, ptx_type)
    if ptx_type[0] == "f" and ptx_type != "f32":
        raise dec.refuse(f"atomics on {ptx_type}")
    op = next(m for m in ins.modifiers if m in _ATOMIC_OPS)
    space, launch = space_of(dec), dec.launch
    operands = list(ins.operands)
    d = None
    if ins.opcode == "atom":
        target = operands.pop(0)
        d = None if isinstance(target, ast.Sink) else dec.dst(target)
    base, offset = dec.address(operands[0])
    values = [dec.src(x, ptx_type) for x in operands[1:]]
    kind: Any = {"s": SINT, "f": {32: np.float32}}.get(ptx_type[0], UINT)[width(ptx_type)]
    bits = storage(ptx_type)
    releases = any(m in ins.modifiers for m in ("release", "acq_rel"))
    scope = strong_scope(ins) or "gpu"
    publishes = releases and scope in _WIDE_SCOPES

    def act(g: Group) -> bool:
        addr = flat_addresses(g, base, offset)
        where = space
        if where == "generic":
            where, addr = resolve_generic(launch, g, addr)
        if releases:
            launch.memory.release(g, scope)
        cols = [per_lane(g.regs[v], g).view(kind) for v in values]
        value, compare = (cols[1], cols[0]) if op == "cas" else (cols[0], None)
        if publishes:
            launch.peers.publish(g)
        old = launch.memory.atomic(g, where, op, addr, value, compare, waits=d is not None, scope=scope)
        if d is not None:
            g.regs[d] = old.view(bits)
        return True

    return act


@visible("prefetch", "prefetchu", "applypriority", "discard")
def prefetch(dec: Decoder, ins: ast.Instr) -> Visible:
    """A hint: checked for form only. Its effect on time is not modelled."""
    if ins.opcode in ("discard", "applypriority"):
        raise dec.refuse(ins.opcode)
    if "tensormap" in ins.modifiers:
        return _prefetch_map(dec, ins)
    dec.only("global", "L1", "L2", "L2::evict_last", "L2::evict_normal")
    return lambda g: True


def _prefetch_map(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("tensormap", "param", "const")
    base, offset = dec.address(ins.operands[0])
    launch, generic = dec.launch, ins.modifiers == ("tensormap",)

    def act(g: Group) -> bool:
        if generic:
            launch.copy.bulk.maps.check_window(flat_addresses(g, base, offset))
        return True

    return act
