"""Control flow of one function: basic blocks, dominators, reconvergence points, liveness.

A block ends at a branch or an exit, and before a branch target. The virtual block ``Flow.exit`` stands for
every way out. Loops that never reach the exit get a virtual edge to it from their last block, so that
branches inside them still have a reconvergence point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from smfree.emulator.errors import Unsupported
from smfree.emulator.ptx import effects
from smfree.emulator.ptx.ast import Function, Instr, LabelRef

_WAYS_OUT = frozenset({"ret", "exit", "trap"})


@dataclass(frozen=True)
class Flow:
    """The control flow of one function.

    Blocks are numbered in program order, ``exit`` is one past the last. ``idom`` and ``ipdom`` give the
    immediate dominator and post-dominator of each block, None where there is none (entry, unreachable code)
    and ``exit`` where only the exit follows. ``ipdom_pc`` maps each guarded branch to the pc where its two
    ways meet again, None if they meet nowhere before the exit. ``live_in`` is given at leaders;
    :meth:`live_at` anywhere.
    """

    instrs: tuple[Instr, ...]
    leaders: tuple[int, ...]
    block_of: tuple[int, ...]
    successors: tuple[tuple[int, ...], ...]
    predecessors: tuple[tuple[int, ...], ...]
    idom: tuple[int | None, ...]
    ipdom: tuple[int | None, ...]
    ipdom_pc: dict[int, int | None]
    live_in: dict[int, frozenset[str]]
    live_out: tuple[frozenset[str], ...] = field(repr=False)

    @property
    def exit(self) -> int:
        """The number of the virtual exit block."""
        return len(self.leaders)

    def block_range(self, block: int) -> range:
        """The pcs of a block."""
        last = self.leaders[block + 1] if block + 1 < len(self.leaders) else len(self.instrs)
        return range(self.leaders[block], last)

    def live_at(self, pc: int) -> frozenset[str]:
        """Registers whose value some path from just before ``pc`` may still read."""
        if pc >= len(self.instrs):
            return frozenset()
        if pc in self.live_in:
            return self.live_in[pc]
        block = self.block_of[pc]
        live = set(self.live_out[block])
        for at in range(self.block_range(block).stop - 1, pc - 1, -1):
            instr = self.instrs[at]
            live -= effects.kills(instr)
            live |= effects.reads(instr)
        return frozenset(live)

    def dominates(self, above: int, below: int) -> bool:
        """Whether every path to block ``below`` goes through block ``above``."""
        node: int | None = below
        while node is not None and node != above:
            node = self.idom[node]
        return node == above


KNOWN = 256
"""Functions whose control flow is kept: parsed texts are shared by all devices and launches."""
_known: dict[int, tuple[Function, Flow]] = {}


def flow_of(function: Function) -> Flow:
    """:func:`analyse`, once for each function. They are told apart by identity, which is theirs while they
    are kept here."""
    found = _known.get(id(function))
    if found is None:
        while len(_known) >= KNOWN:
            _known.pop(next(iter(_known)), None)
        found = _known[id(function)] = function, analyse(function)
    return found[1]


def analyse(function: Function) -> Flow:
    """The control flow of ``function``.

    Raises :class:`~smfree.emulator.errors.Unsupported` for an indirect branch (brx.idx).
    """
    instrs = function.instrs
    leaders = _find_leaders(function)
    block_of: list[int] = []
    for number, leader in enumerate(leaders):
        last = leaders[number + 1] if number + 1 < len(leaders) else len(instrs)
        block_of += [number] * (last - leader)
    successors = _successors(function, leaders, block_of)
    exit_block = len(leaders)
    predecessors: list[list[int]] = [[] for _ in range(exit_block + 1)]
    for block, following in enumerate(successors):
        for s in following:
            predecessors[s].append(block)
    idom = _dominators(successors, predecessors, 0) if leaders else []
    ipdom = _post_dominators(successors, predecessors)
    ipdom_pc: dict[int, int | None] = {}
    for pc, instr in enumerate(instrs):
        if instr.opcode == "bra" and instr.guard is not None:
            meet = ipdom[block_of[pc]]
            ipdom_pc[pc] = None if meet is None or meet == exit_block else leaders[meet]
    live_in, live_out = _liveness(instrs, leaders, successors)
    return Flow(
        instrs,
        tuple(leaders),
        tuple(block_of),
        tuple(successors),
        tuple(tuple(p) for p in predecessors),
        tuple(idom),
        tuple(ipdom),
        ipdom_pc,
        dict(zip(leaders, live_in, strict=True)),
        tuple(live_out),
    )


def _target(function: Function, instr: Instr) -> int:
    operand = instr.operands[0]
    assert isinstance(operand, LabelRef)
    return function.labels[operand.name]


def _find_leaders(function: Function) -> list[int]:
    instrs = function.instrs
    leaders = {0} if instrs else set()
    for pc, instr in enumerate(instrs):
        if instr.opcode == "brx":
            raise Unsupported(
                f"PTX line {instr.line}: indirect branch '{instr.text}' is not modelled; write the switch as "
                "if/else, or make its cases fewer than the compiler's jump-table limit",
                rule="ptx.brx",
            )
        if instr.opcode == "bra":
            leaders.add(_target(function, instr))
            leaders.add(pc + 1)
        elif instr.opcode in _WAYS_OUT:
            leaders.add(pc + 1)
    return sorted(pc for pc in leaders if pc < len(instrs))


def _successors(function: Function, leaders: Sequence[int], block_of: Sequence[int]) -> list[tuple[int, ...]]:
    instrs, exit_block = function.instrs, len(leaders)

    def block_at(pc: int) -> int:
        return block_of[pc] if pc < len(instrs) else exit_block

    out: list[tuple[int, ...]] = []
    for number in range(len(leaders)):
        last = (leaders[number + 1] if number + 1 < len(leaders) else len(instrs)) - 1
        instr = instrs[last]
        if instr.opcode == "bra":
            ways = [block_at(_target(function, instr))]
        elif instr.opcode in _WAYS_OUT:
            ways = [exit_block]
        else:
            ways = [block_at(last + 1)]
        if instr.guard is not None and instr.opcode in ("bra", *_WAYS_OUT):
            ways.insert(0, block_at(last + 1))
        out.append(tuple(dict.fromkeys(ways)))
    return out


def _post_order(successors: Sequence[Sequence[int]], root: int) -> list[int]:
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(successors[root]))]
    while stack:
        node, ways = stack[-1]
        for way in ways:
            if way not in seen:
                seen.add(way)
                stack.append((way, iter(successors[way])))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def _dominators(
    successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]], root: int
) -> list[int | None]:
    """Immediate dominators by iteration over reverse post-order (Cooper, Harvey, Kennedy)."""
    size = max(len(successors), len(predecessors))
    padded = [*successors, *([()] * (size - len(successors)))]
    order = _post_order(padded, root)
    rank = {node: i for i, node in enumerate(order)}
    idom: dict[int, int] = {root: root}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            best: int | None = None
            for before in predecessors[node]:
                if before in idom:
                    best = before if best is None else _meet(best, before, idom, rank)
            if best is not None and idom.get(node) != best:
                idom[node] = best
                changed = True
    return [idom[n] if n in idom and n != root else None for n in range(size)]


def _meet(a: int, b: int, idom: dict[int, int], rank: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = idom[a]
        while rank[b] < rank[a]:
            b = idom[b]
    return a


def _post_dominators(
    successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]
) -> list[int | None]:
    exit_block = len(successors)
    forward = [list(s) for s in successors] + [[]]
    backward = [list(p) for p in predecessors]
    while True:
        reaching = set(_post_order(backward, exit_block))
        stuck = [b for b in range(exit_block) if b not in reaching]
        if not stuck:
            break
        # A loop without a way out: its last block in program order is where an iteration ends.
        last = max(_sink_loop(stuck, forward))
        forward[last].append(exit_block)
        backward[exit_block].append(last)
    return _dominators(backward, forward, exit_block)


def _sink_loop(stuck: Sequence[int], forward: Sequence[Sequence[int]]) -> set[int]:
    """Blocks of a loop among ``stuck`` that control never leaves."""
    here = stuck[0]
    reach = set(_post_order(forward, here))
    for other in sorted(reach):
        from_other = set(_post_order(forward, other))
        if len(from_other) < len(reach):
            return _sink_loop([other], forward)
    return reach


def _liveness(
    instrs: Sequence[Instr], leaders: Sequence[int], successors: Sequence[Sequence[int]]
) -> tuple[list[frozenset[str]], list[frozenset[str]]]:
    """Registers live at the start and at the end of each block (as integers, one bit per register)."""
    bits: dict[str, int] = {}

    def mask(names: frozenset[str]) -> int:
        value = 0
        for name in names:
            value |= 1 << bits.setdefault(name, len(bits))
        return value

    needs, kept = [], []
    for number, leader in enumerate(leaders):
        last = leaders[number + 1] if number + 1 < len(leaders) else len(instrs)
        need, killed = 0, 0
        for pc in range(last - 1, leader - 1, -1):
            kill = mask(effects.kills(instrs[pc]))
            need = (need & ~kill) | mask(effects.reads(instrs[pc]))
            killed |= kill
        needs.append(need)
        kept.append(~killed)
    count = len(leaders)
    live = [0] * (count + 1)
    out = [0] * count
    changed = True
    while changed:
        changed = False
        for block in range(count - 1, -1, -1):
            after = 0
            for way in successors[block]:
                after |= live[way]
            before = needs[block] | (after & kept[block])
            if before != live[block] or after != out[block]:
                live[block], out[block] = before, after
                changed = True
    names = list(bits)

    def unmask(value: int) -> frozenset[str]:
        found = []
        while value:
            low = value & -value
            found.append(names[low.bit_length() - 1])
            value ^= low
        return frozenset(found)

    return [unmask(v) for v in live[:count]], [unmask(v) for v in out]
