"""What a person reads when a kernel is wrong: places, and the deadlock report."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.errors import Deadlock
from smfree.emulator.exec.cluster_barrier import is_cluster_barrier
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.sync_unit import MBarrierWait
from smfree.emulator.exec.warp_unit import WarpWait
from smfree.emulator.ptx.ast import Instr
from smfree.emulator.specs import WARP_SIZE

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch

_LOCAL_STATIC = re.compile(r"^_ZZ.*?E(\d+)(\w+)$")
_MANY = 6
DEADLOCK = "deadlock: no thread can run, no copy is pending, and no wait can time out into anything new."


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


def barrier_name(launch: Launch, key: int) -> str:
    """ "full[1] of CTA 3" for an mbarrier's key."""
    slot, offset = divmod(key * 8, launch.memory.pitch)
    return f"{variable_at(launch, offset)} of {launch.name_cta(slot)}"


def _ranges(values: Any) -> str:
    """ "0, 32-159" """
    v = np.unique(values)
    cuts = np.flatnonzero(np.diff(v) != 1)
    starts, ends = [v[0], *v[cuts + 1]], [*v[cuts], v[-1]]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def waiting_threads(launch: Launch, parts: list[tuple[Group, Any]]) -> list[str]:
    """One phrase per CTA and place: which threads wait, and where in the source.

    ``parts`` are groups, each with the positions of the lanes meant (None: all of them).
    """
    found: dict[tuple[int, int], list[Any]] = {}
    for g, chosen in parts:
        lanes = g.lanes
        slot, tid = (lanes.slot, lanes.tid) if chosen is None else (lanes.slot[chosen], lanes.tid[chosen])
        for s in np.unique(slot).tolist():
            found.setdefault((int(launch.cta[s]), g.pc), []).append(tid[slot == s])
    out = []
    for (cta, pc), tids in sorted(found.items(), key=lambda item: item[0]):
        threads = _threads(np.concatenate(tids))
        out.append(f"CTA {xyz(cta, launch.grid)} {threads} at {launch.line_of(pc)}")
    return out


def deadlock(launch: Launch) -> Deadlock:
    """The exact reason why nothing can run any more, of a kernel that ran alone."""
    return Deadlock("\n".join([DEADLOCK, *stuck(launch)]), rule="deadlock")


def stuck(launch: Launch) -> list[str]:
    """What the threads of a kernel wait for, and which CTAs never started."""
    waits = (_mbarrier_lines, _barrier_lines, _cluster_lines, _warp_lines, _register_lines, _poll_lines)
    lines = [line for of in waits for line in of(launch)]
    return lines if launch.dispatched else [*lines, _not_started(launch)]


def _poll_lines(launch: Launch) -> list[str]:
    """The loops that poll in vain, and the words they poll."""
    spins = launch.stalls.spinning
    if not spins:
        return []
    threads = waiting_threads(launch, [(spin.group, None) for spin in spins])
    lines = ["looping for ever over what nobody else will change: " + "; ".join(_few(threads))]
    words: dict[str, list[str]] = {}  # each word once, whoever polls it
    for spin in spins:
        who = [phrase.partition(" at ")[0] for phrase in waiting_threads(launch, [(spin.group, None)])]
        for look in spin.looks:
            words.setdefault(str(look), []).extend(who)
    return lines + _few(
        [f"{'; '.join(_few(list(dict.fromkeys(who))))} polls {look}" for look, who in words.items()]
    )


def _not_started(launch: Launch) -> str:
    first, last = launch.next_cta, launch.num_ctas - 1
    linear = launch.cluster[1] == launch.cluster[2] == 1
    which = f"CTAs {first}-{last}" if linear else f"{last - first + 1} of {last + 1} CTAs"
    if launch.lacks_room:
        others = ", ".join(each.kernel.name for each in launch.residents.launches if each is not launch)
        return (
            f"{which} never started: beside {others} the device has no room for them. Kernels whose CTAs "
            "wait for each other need all of them resident; use smaller grids, or run them one after another."
        )
    return (
        f"{which} never started: {launch.geometry.slots} CTAs fill the device and none of them leaves. "
        "A kernel whose CTAs wait for each other needs all of them resident; launch it cooperatively or with "
        f"a grid of at most {launch.geometry.slots}."
    )


def _mbarrier_lines(launch: Launch) -> list[str]:
    waits: dict[int, list[tuple[Group, Any]]] = {}
    parities: dict[int, str] = {}
    for g in launch.sync.sleepers:
        wait: MBarrierWait = g.wait
        for key in np.unique(wait.keys):
            chosen = np.flatnonzero(wait.keys == key)
            waits.setdefault(int(key), []).append((g, chosen))
            if wait.by_parity:
                parities[int(key)] = f" (parity {int(wait.token[chosen[0]])})"
    lines = [
        _mbarrier_line(launch, key, waiting_threads(launch, parts), parities.get(key, ""))
        for key, parts in sorted(waits.items())
    ]
    return [*lines[:_MANY], f"... and {len(lines) - _MANY} more barriers"] if len(lines) > _MANY else lines


def _mbarrier_line(launch: Launch, key: int, threads: list[str], parity: str) -> str:
    state = launch.sync.mbarriers.describe(key)
    missing = state.tx_announced - state.tx_completed
    if state.tx_announced or state.tx_completed:
        if missing >= 0:
            tx = f"{missing} of {state.tx_announced} bytes missing"
        else:
            tx = f"{-missing} bytes more than the {state.tx_announced} announced have arrived"
    else:
        tx = "no bytes announced"
    arrivals = f"{state.pending} of {state.expected} arrivals missing"
    ranks = launch.peers.who_arrived(key, state.phase)
    if ranks:
        arrivals += f" (arrived: {', '.join(ranks)})"
    touched = "" if state.ever_touched else "; nobody ever arrived at it or announced bytes"
    return (
        f"{launch.name_barrier(key)}, phase {state.phase}{parity}: {tx}, {arrivals}{touched}; waiting: "
        + "; ".join(_few(threads))
    )


def _barrier_lines(launch: Launch) -> list[str]:
    waiting: dict[tuple[int, int], list[Group]] = {}
    for number, b in launch.barriers.by_number.items():
        for g in b.parked:
            for slot in g.lanes.slots.tolist():
                waiting.setdefault((number, slot), []).append(g)
    lines = [_barrier_line(launch, *place, groups) for place, groups in sorted(waiting.items())[:_MANY]]
    if len(waiting) > _MANY:
        lines.append(f"... and {len(waiting) - _MANY} more barriers")
    return lines


def _barrier_line(launch: Launch, number: int, slot: int, groups: list[Group]) -> str:
    b = launch.barriers.by_number[number]
    count = int(b.expected[slot])
    if count:
        missing = f"{count - int(b.warps_in[slot]) * WARP_SIZE} of {count} threads missing"
    else:
        alive = np.flatnonzero(launch.alive.reshape(launch.geometry.slots, -1)[slot])
        here = np.concatenate([g.lanes.tid[g.lanes.slot == slot] for g in groups])
        absent = np.setdiff1d(alive, here)
        missing = f"{len(absent)} of {len(alive)} threads missing ({_ranges(absent)})"
    phrases = waiting_threads(launch, [(g, g.lanes.slot == slot) for g in groups])
    return (
        f"barrier {number} of CTA {xyz(int(launch.cta[slot]), launch.grid)}: {missing}; waiting: "
        + "; ".join(_few(phrases))
    )


def _cluster_lines(launch: Launch) -> list[str]:
    """The cluster barriers at which threads wait."""
    barrier, size = launch.cluster_barrier, launch.cluster_size
    waiting: dict[int, list[Group]] = {}
    for g in barrier.parked:
        for cluster in np.unique(g.lanes.slots // size).tolist():
            waiting.setdefault(cluster, []).append(g)
    lines = [_cluster_line(launch, c, groups) for c, groups in sorted(waiting.items())[:_MANY]]
    if len(waiting) > _MANY:
        lines.append(f"... and {len(waiting) - _MANY} more cluster barriers")
    return lines


def _cluster_line(launch: Launch, cluster: int, groups: list[Group]) -> str:
    size, threads = launch.cluster_size, launch.geometry.threads
    slots = range(cluster * size, (cluster + 1) * size)
    absent = launch.alive.reshape(-1, threads)[slots] & launch.cluster_barrier.absent(slots)
    who = "; ".join(
        f"{launch.name_cta(slot)} {_threads(tids)}"
        for slot, row in zip(slots, absent, strict=True)
        if len(tids := np.flatnonzero(row))
    )
    ctas = ", ".join(launch.name_cta(slot) for slot in slots)
    phrases = waiting_threads(launch, [(g, g.lanes.slot // size == cluster) for g in groups])
    return (
        f"cluster barrier of {ctas}, phase {int(launch.cluster_barrier.phase[cluster])}: "
        f"{int(absent.sum())} of {int(launch.live[slots].sum())} threads missing ({who}); waiting: "
        + "; ".join(_few(phrases))
    )


def _threads(tids: Any) -> str:
    return f"{'thread' if len(tids) == 1 else 'threads'} {_ranges(tids)}"


def _warp_lines(launch: Launch) -> list[str]:
    parked = launch.warps.parked
    lines = []
    for g in parked:
        wait: WarpWait = g.wait
        members = np.broadcast_to(np.asarray(g.regs[wait.mask], np.int64), (g.lanes.n,))
        for warp, start in zip(g.lanes.warps[:_MANY], g.lanes.warp_starts, strict=False):
            mates = [p for p in parked if p is g or (wait.meets and p.wait.meets == wait.meets)]
            here = np.concatenate([p.lanes.laneid[p.lanes.warp == warp] for p in mates])
            live = int(launch.live_mask(np.array([warp]))[0])
            missing = [i for i in range(32) if int(members[start]) & live & ~_bits(here) & 1 << i]
            instr = launch.kernel.instrs[g.pc]
            what = f"a warp-wide instruction with member mask 0x{int(members[start]):08x}"
            lines.append(
                f"{instr.name if is_cluster_barrier(instr) else what} waits for lanes {_ranges(missing)} of "
                f"warp {int(warp) % launch.geometry.warps_per_cta}; waiting: "
                + "; ".join(_few(waiting_threads(launch, [(g, g.lanes.warp == warp)])))
            )
    return lines


def _register_lines(launch: Launch) -> list[str]:
    return [
        f"registers of {launch.name_cta(slot)}: {launch.registers.describe(slot)}; waiting: "
        + "; ".join(_few(waiting_threads(launch, [(g, g.lanes.slot == slot) for g in groups])))
        for slot, groups in sorted(launch.registers.waiting().items())[:_MANY]
    ]


def _bits(lanes: Any) -> int:
    return sum(1 << int(i) for i in lanes)


def _few(phrases: list[str]) -> list[str]:
    return phrases if len(phrases) <= _MANY else [*phrases[:_MANY], f"and {len(phrases) - _MANY} more"]
