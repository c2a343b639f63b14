"""What a person reads when a kernel is wrong: places, and the deadlock report."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import Deadlock
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.sync_unit import BarrierWait, MBarrierWait, WarpWait
from smfree.emulator.ptx.ast import Instr

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch

_LOCAL_STATIC = re.compile(r"^_ZZ.*?E(\d+)(\w+)$")
_MANY = 6


def place(launch: Launch, g: Group, instr: Instr, index: int | None) -> str:
    """CTA, thread, source line, PTX line and text of one lane at one instruction."""
    i = min(index or 0, g.lanes.n - 1)
    slot, tid = int(g.lanes.slot[i]), int(g.lanes.tid[i])
    source = f"{instr.source}, " if instr.source else ""
    cta, thread = xyz(int(launch.cta[slot]), launch.grid), xyz(tid, launch.block)
    return f"CTA {cta} thread {thread}, {source}PTX line {instr.line}: {instr.text}"


def xyz(linear: int, extent: tuple[int, int, int]) -> str:
    x, y, z = linear % extent[0], linear // extent[0] % extent[1], linear // (extent[0] * extent[1])
    if extent[1] == extent[2] == 1:
        return str(x)
    return f"({x},{y},{z})" if extent[2] > 1 else f"({x},{y})"


def variable_at(launch: Launch, offset: int) -> str:
    """ "full[1]" for a shared-memory offset: the variable that holds it, in 8-byte elements."""
    best: Any = None
    for var in launch.kernel.shared.values():
        inside = var.offset <= offset and (var.size_bytes is None or offset < var.offset + var.size_bytes)
        if inside and (best is None or var.offset >= best.offset):
            best = var
    if best is None:
        return f"shared memory at 0x{offset:x}"
    match = _LOCAL_STATIC.match(best.name)
    name = match.group(2)[: int(match.group(1))] if match else best.name
    inside = offset - best.offset
    if best.size_bytes is None:
        return f"{name} + 0x{inside:x}"
    if best.size_bytes == 8:
        return name
    return f"{name}[{inside // 8}]"


def _ranges(values: Any) -> str:
    """ "0, 32-159" """
    v = np.unique(values)
    cuts = np.flatnonzero(np.diff(v) != 1)
    starts, ends = [v[0], *v[cuts + 1]], [*v[cuts], v[-1]]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def waiting_threads(launch: Launch, g: Group, chosen: Any = None) -> list[str]:
    """One phrase per CTA: which of its threads wait, and where in the source."""
    lanes = g.lanes
    slot, tid = (lanes.slot, lanes.tid) if chosen is None else (lanes.slot[chosen], lanes.tid[chosen])
    out = []
    for s in np.unique(slot):
        mine = tid[slot == s]
        threads = "thread" if len(mine) == 1 else "threads"
        out.append(
            f"CTA {xyz(int(launch.cta[s]), launch.grid)} {threads} {_ranges(mine)} at {launch.line_of(g.pc)}"
        )
    return out


def deadlock(launch: Launch) -> Deadlock:
    """The exact reason why nothing can run any more."""
    lines = ["deadlock: no thread can run, no copy is pending, and no wait can time out into anything new."]
    lines += _mbarrier_lines(launch)
    lines += _barrier_lines(launch)
    lines += _warp_lines(launch)
    for _, g in launch.stalls.spinning:
        lines.append(
            "spinning on memory that nobody will change: " + "; ".join(_few(waiting_threads(launch, g)))
        )
    if launch.next_cta < launch.num_ctas:
        first, last = launch.next_cta, launch.num_ctas - 1
        lines.append(
            f"CTAs {first}-{last} never started: {launch.geometry.slots} CTAs fill the device and none of "
            "them leaves. "
            "A kernel whose CTAs wait for each other needs all of them resident; launch it cooperatively "
            "or with a "
            f"grid of at most {launch.geometry.slots}."
        )
    return Deadlock("\n".join(lines), rule="deadlock")


def _mbarrier_lines(launch: Launch) -> list[str]:
    waits: dict[int, list[str]] = {}
    parities: dict[int, str] = {}
    for g in launch.sync.sleepers:
        wait: MBarrierWait = g.wait
        for key in np.unique(wait.keys):
            chosen = np.flatnonzero(wait.keys == key)
            waits.setdefault(int(key), []).extend(waiting_threads(launch, g, chosen))
            if wait.by_parity:
                parities[int(key)] = f" (parity {int(wait.token[chosen[0]])})"
    lines = [
        _mbarrier_line(launch, key, threads, parities.get(key, "")) for key, threads in sorted(waits.items())
    ]
    return [*lines[:_MANY], f"... and {len(lines) - _MANY} more barriers"] if len(lines) > _MANY else lines


def _mbarrier_line(launch: Launch, key: int, threads: list[str], parity: str) -> str:
    state = launch.sync.mbarriers.describe(key)
    pitch = launch.memory.pitch
    slot, offset = divmod(key * 8, pitch)
    name = variable_at(launch, offset)
    cta = xyz(int(launch.cta[slot]), launch.grid)
    missing = state.tx_announced - state.tx_completed
    if state.tx_announced or state.tx_completed:
        if missing >= 0:
            tx = f"{missing} of {state.tx_announced} bytes missing"
        else:
            tx = f"{-missing} bytes more than the {state.tx_announced} announced have arrived"
    else:
        tx = "no bytes announced"
    arrivals = f"{state.pending} of {state.expected} arrivals missing"
    touched = "" if state.ever_touched else "; nobody ever arrived at it or announced bytes"
    return (
        f"{name} of CTA {cta}, phase {state.phase}{parity}: {tx}, {arrivals}{touched}; waiting: "
        + "; ".join(_few(threads))
    )


def _barrier_lines(launch: Launch) -> list[str]:
    lines = []
    for number, b in launch.sync.barriers.items():
        for g in b.parked:
            assert isinstance(g.wait, BarrierWait)
            for slot in g.lanes.slots[:_MANY]:
                arrived = int(b.arrived[slot])
                expected = int(b.expected[slot]) or int(launch.live[slot])
                lines.append(
                    f"barrier {number} of CTA {xyz(int(launch.cta[slot]), launch.grid)}: "
                    f"{expected - arrived} of {expected} "
                    "threads missing; waiting: "
                    + "; ".join(_few(waiting_threads(launch, g, g.lanes.slot == slot)))
                )
    return lines


def _warp_lines(launch: Launch) -> list[str]:
    lines = []
    for g in launch.sync.warp_parked:
        wait: WarpWait = g.wait
        members = np.broadcast_to(np.asarray(g.regs[wait.mask], np.int64), (g.lanes.n,))
        for warp, start in zip(g.lanes.warps[:_MANY], g.lanes.warp_starts, strict=False):
            here = g.lanes.laneid[g.lanes.warp == warp]
            absent = [i for i in range(32) if int(members[start]) >> i & 1 and i not in here]
            live = int(launch.live_mask(np.array([warp]))[0])
            missing = [i for i in absent if live >> i & 1]
            lines.append(
                f"a warp-wide instruction with member mask 0x{int(members[start]):08x} waits for lanes "
                f"{_ranges(missing)} of "
                f"warp {int(warp) % launch.geometry.warps_per_cta}; waiting: "
                + "; ".join(_few(waiting_threads(launch, g, g.lanes.warp == warp)))
            )
    return lines


def _few(phrases: list[str]) -> list[str]:
    return phrases if len(phrases) <= _MANY else [*phrases[:_MANY], f"and {len(phrases) - _MANY} more"]
