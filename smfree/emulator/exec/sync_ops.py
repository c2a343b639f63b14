"""Barriers, fences, mbarriers, exits (PTX ISA, "Parallel Synchronization" and "mbarrier")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import BarrierFault, EmulationError
from smfree.emulator.exec import tensormap_ops
from smfree.emulator.exec.barrier_unit import Reduction
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import flat_addresses, resolve_generic
from smfree.emulator.exec.memory_unit import NEEDS_CLUSTER
from smfree.emulator.exec.table import Visible, visible
from smfree.emulator.exec.warp import per_lane
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.decode import Decoder

NUM_HARDWARE_BARRIERS = 16


@visible("ret", "exit")
def leave(dec: Decoder, ins: ast.Instr) -> Visible:
    launch = dec.launch
    return lambda g: bool(launch.leave(g))


@visible("trap", "brkpt")
def trap(dec: Decoder, ins: ast.Instr) -> Visible:
    text = ins.opcode

    def act(g: Group) -> bool:
        raise EmulationError(f"the kernel executed {text}", rule="trap", index=0)

    return act


@visible("nanosleep")
def nanosleep(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("u32")
    t, launch = dec.src(ins.operands[0], "u32"), dec.launch

    def act(g: Group) -> bool:
        longest = np.maximum.reduceat(per_lane(g.regs[t], g), g.lanes.warp_starts)
        launch.spend(g, longest * launch.cycles_per_ns)
        return True

    return act


@visible("griddepcontrol")
def griddepcontrol(dec: Decoder, ins: ast.Instr) -> Visible:
    """Kernels run one after another here, so the primary has always completed: both forms pass at once."""
    dec.only("wait", "launch_dependents")
    return lambda g: True


@visible("bar", "barrier")
def barrier(dec: Decoder, ins: ast.Instr) -> Visible:
    if "cluster" in ins.modifiers:
        return _cluster_barrier(dec, ins)
    launch = dec.launch
    if "warp" in ins.modifiers:
        dec.only("warp", "sync")
        mask = dec.src(ins.operands[0], "b32")
        return lambda g: bool(launch.warps.gather(g, mask, _nothing, meets="bar.warp.sync"))
    dec.only("cta", "sync", "arrive", "aligned", "red", "popc", "and", "or", "u32", "pred")
    aligned = ins.opcode == "bar" or "aligned" in ins.modifiers
    arrive = "arrive" in ins.modifiers
    reduction, operands = _reduction(dec, ins) if "red" in ins.modifiers else (None, ins.operands)
    number = dec.src(operands[0], "u32")
    threads = dec.src(operands[1], "u32") if len(operands) > 1 else None

    def act(g: Group) -> bool:
        for register, what in ((number, "barrier"), (threads, "thread count")):
            values = None if register is None else g.regs[register]
            if type(values) is np.ndarray and (values != values[0]).any():
                _check_one_per_warp(g, values, what)
                for part in launch.flow.part_mask(g, values == values[0]):
                    assert part is not None
                    launch.current = part
                    if act(part):
                        launch.flow.resume([part])
                return False
        first = _only(g, number)
        if first >= NUM_HARDWARE_BARRIERS:
            raise BarrierFault(
                f"barrier number must be 0..{NUM_HARDWARE_BARRIERS - 1} (got {first})",
                rule="bar.number",
                index=0,
            )
        expected = None if threads is None else _only(g, threads)
        return bool(
            launch.barriers.meet(g, first, expected, aligned=aligned, arrive_only=arrive, reduction=reduction)
        )

    return act


def _reduction(dec: Decoder, ins: ast.Instr) -> tuple[Reduction, tuple[ast.Operand, ...]]:
    """What barrier.red combines, and its operands in between: the barrier and the thread count."""
    d, *between, c = ins.operands
    negated = isinstance(c, ast.Not)
    source = dec.src(c.reg if isinstance(c, ast.Not) else c, "pred")
    mode = next(m for m in ins.modifiers if m in ("popc", "and", "or"))
    return Reduction(mode, source, negated, dec.dst(d)), tuple(between)


def _only(g: Group, register: int) -> int:
    """The value that all lanes have."""
    value = g.regs[register]
    return int(value[0]) if type(value) is np.ndarray else int(value)


def _check_one_per_warp(g: Group, values: Any, what: str) -> None:
    """Warps may name different barriers and thread counts, the lanes of a warp may not."""
    of_warp = values[g.lanes.warp_starts][g.lanes.warp_index]
    apart = np.flatnonzero(values != of_warp)
    if len(apart):
        raise BarrierFault(
            f"the lanes of a warp must name one {what} (got {int(of_warp[apart[0]])} and "
            f"{int(values[apart[0]])}); give the whole warp one number",
            rule="bar.number" if what == "barrier" else "bar.count",
            index=int(apart[0]),
        )


def _cluster_barrier(dec: Decoder, ins: ast.Instr) -> Visible:
    """Both halves wait for all threads of the warp that have not exited (PTX ISA, "barrier.cluster")."""
    dec.only("cluster", "arrive", "wait", "release", "relaxed", "acquire", "aligned")
    launch, arrives, release = dec.launch, "arrive" in ins.modifiers, "relaxed" not in ins.modifiers
    everyone = dec.constant(np.uint32(0xFFFFFFFF))
    meets = "" if "aligned" in ins.modifiers else ".".join(ins.modifiers[:2])

    def meet(g: Group) -> bool:
        if not arrives:
            return bool(launch.cluster_barrier.wait(g))
        launch.cluster_barrier.arrive(g, release=release)
        return True

    def act(g: Group) -> bool:
        launch.cluster_barrier.check(g, arrives=arrives)
        return bool(launch.warps.gather(g, everyone, meet, meets=meets))

    return act


def _nothing(g: Group) -> None:
    """bar.warp.sync moves no data."""


@visible("membar", "fence")
def fence(dec: Decoder, ins: ast.Instr) -> Visible:
    """Generic fences wait for earlier stores; a proxy fence orders generic and async accesses, or (.alias)
    those through several addresses of one memory, which are never out of order here."""
    if "tensormap::generic" in ins.modifiers:
        return tensormap_ops.fence(dec, ins)
    dec.only(
        "cta", "gl", "sys", "gpu", "cluster", "sc", "acq_rel", "acquire", "release", "proxy", "async",
        "async.global", "global", "async.shared::cta", "shared::cta", "shared::cluster", "mbarrier_init",
        "alias", "generic", "async::generic", "sync_restrict::shared::cta", "sync_restrict::shared::cluster",
    )  # fmt: skip
    launch = dec.launch
    proxy = "proxy" in ins.modifiers
    scope = next((m for m in ("sys", "gpu", "gl", "cluster") if m in ins.modifiers), "cta")
    scope = {"gl": "gpu"}.get(scope, scope)
    releases = not proxy and scope != "cta" and "acquire" not in ins.modifiers
    # What ptxas makes of them: nothing of mbarrier_init and a restricted acquire, which order only what the
    # SM has; of a restricted release the same as of a proxy fence.
    if "mbarrier_init" in ins.modifiers or "sync_restrict::shared::cluster" in ins.modifiers:
        scope = "cta"
    if proxy or "sync_restrict::shared::cta" in ins.modifiers:
        scope = "proxy"

    def act(g: Group) -> bool:
        launch.sync.fence(g, scope)
        if releases:
            launch.peers.publish(g)
        return True

    return act


_OWN_ONLY = "mbarrier.init, inval and the waits act on barriers of the own CTA only"
_NO_STATE = "an arrival there returns no state: write _ as the destination"


def shared_keys(dec: Decoder, address: ast.Operand, *, own_only: str = "") -> Any:
    """Function of a group giving the mbarrier keys at [address]; resolves generic addresses.

    ``own_only``: why the barrier must not be another CTA's (PTX ISA, "mbarrier support with shared memory").
    """
    base, offset = dec.address(address)
    launch = dec.launch
    mods = dec.instr.modifiers
    named = next((m for m in mods if m in ("shared", "shared::cta", "shared::cluster")), None)
    narrow = "cluster" not in mods

    def keys(g: Group) -> Any:
        addr = flat_addresses(g, base, offset)
        space = "cluster" if named == "shared::cluster" else "shared"
        if named is None:
            space, addr = resolve_generic(launch, g, addr)
            if space not in ("shared", "cluster"):
                raise BarrierFault(
                    f"an mbarrier lies in shared memory (the address is in {space} memory)",
                    rule="mbarrier.space",
                    index=0,
                )  # fmt: skip
        if space == "shared" or own_only:
            flat = launch.memory.flat_shared(g.lanes, addr, 8, own_only or NEEDS_CLUSTER)
            return launch.sync.mbarriers.keys(flat)
        found = launch.sync.mbarriers.keys(launch.memory.flat_cluster(g.lanes, addr, 8))
        launch.peers.touched(g.lanes, found, narrow=narrow)
        return found

    return keys


@visible("mbarrier")
def mbarrier(dec: Decoder, ins: ast.Instr) -> Visible:
    operation = ins.modifiers[0]
    handler = _MBARRIER.get(operation)
    if handler is None:
        raise dec.refuse(f"mbarrier.{operation}")
    action: Visible = handler(dec, ins)
    return action


_SCOPES = (
    "release", "acquire", "relaxed", "cta", "cluster", "shared", "shared::cta", "shared::cluster", "b64"
)  # fmt: skip


def _init(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("init", "shared", "shared::cta", "b64")
    keys, launch = shared_keys(dec, ins.operands[0], own_only=_OWN_ONLY), dec.launch
    count = dec.src(ins.operands[1], "u32")

    def act(g: Group) -> bool:
        which = keys(g)
        launch.sync.mbarriers.init(which, _ints(g, count), launch.lane_times(g))
        launch.peers.initialised(g.lanes, which)
        launch.did_something()
        return True

    return act


def _inval(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("inval", "shared", "shared::cta", "b64")
    keys, launch = shared_keys(dec, ins.operands[0], own_only=_OWN_ONLY), dec.launch

    def act(g: Group) -> bool:
        launch.sync.mbarriers.inval(keys(g))
        launch.did_something()
        return True

    return act


def _arrive(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("arrive", "arrive_drop", "expect_tx", "noComplete", *_SCOPES)
    operands = list(ins.operands)
    state = None
    if not isinstance(operands[0], ast.Address):
        target = operands.pop(0)
        state = None if isinstance(target, ast.Sink) else dec.dst(target)
    generic = not any(m.startswith("shared") for m in ins.modifiers)
    keys = shared_keys(dec, operands[0], own_only=_NO_STATE if generic and state is not None else "")
    launch = dec.launch
    number = dec.src(operands[1], "u32") if len(operands) > 1 else None
    releases = "cluster" in ins.modifiers and "relaxed" not in ins.modifiers
    expects = "expect_tx" in ins.modifiers
    drop, no_complete = "arrive_drop" in ins.modifiers, "noComplete" in ins.modifiers

    def act(g: Group) -> bool:
        amount = _ints(g, number) if number is not None else 1
        if releases:
            launch.peers.release(g)
        before = launch.sync.arrive(
            g, keys(g), 1 if expects else amount, expect_tx=amount if expects else None, drop=drop,
            no_complete=no_complete,
        )  # fmt: skip
        if state is not None:
            g.regs[state] = before
        return True

    return act


def _expect_tx(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("expect_tx", "complete_tx", *_SCOPES)
    keys, launch = shared_keys(dec, ins.operands[0]), dec.launch
    number, complete = dec.src(ins.operands[1], "u32"), ins.modifiers[0] == "complete_tx"

    def act(g: Group) -> bool:
        launch.sync.change_tx(g, keys(g), _ints(g, number), complete=complete)
        return True

    return act


def _pending_count(dec: Decoder, ins: ast.Instr) -> Visible:
    dec.only("pending_count", "b64")
    d, s, launch = dec.dst(ins.operands[0]), dec.src(ins.operands[1], "b64"), dec.launch

    def act(g: Group) -> bool:
        g.regs[d] = launch.sync.mbarriers.pending_count(per_lane(g.regs[s], g))
        return True

    return act


def _wait(dec: Decoder, ins: ast.Instr) -> Visible:
    """test_wait answers at once; try_wait may sleep until its phase completes or its time limit runs out."""
    dec.only("try_wait", "test_wait", "parity", *_SCOPES)
    may_sleep = ins.modifiers[0] == "try_wait"
    by_parity = "parity" in ins.modifiers
    d, address, operand, *hint = ins.operands
    p = dec.dst(d)
    keys, launch = shared_keys(dec, address, own_only=_OWN_ONLY), dec.launch
    value = dec.src(operand, "u32" if by_parity else "b64")
    limit = dec.src(hint[0], "u32") if hint else None
    narrow = "cluster" not in ins.modifiers

    def act(g: Group) -> bool:
        token = per_lane(g.regs[value], g)
        limit_ns = None if limit is None else float(np.max(g.regs[limit]))
        return bool(
            launch.sync.wait(
                g,
                p,
                keys(g),
                token,
                by_parity=by_parity,
                may_sleep=may_sleep,
                limit_ns=limit_ns,
                narrow=narrow,
            )
        )

    return act


def _ints(g: Group, register: int) -> Any:
    value = g.regs[register]
    return value.astype(np.int64) if type(value) is np.ndarray else int(value)


_MBARRIER: dict[str, Any] = {
    "init": _init,
    "inval": _inval,
    "arrive": _arrive,
    "arrive_drop": _arrive,
    "expect_tx": _expect_tx,
    "complete_tx": _expect_tx,
    "pending_count": _pending_count,
    "test_wait": _wait,
    "try_wait": _wait,
}
