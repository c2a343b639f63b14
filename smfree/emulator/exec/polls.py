"""What a polling loop looks at: the words of memory that could end it, read off its instructions.

A loop that is parked because its turns changed nothing is woken when one of these words changes, by whoever
writes it: its own kernel, another one, a copy, the host. A deadlock report names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from smfree.emulator.allocations import DEVICE_SPACE_BYTES
from smfree.emulator.errors import EmulationError
from smfree.emulator.exec.classes import instruction_class
from smfree.emulator.exec.lanes import Group
from smfree.emulator.exec.memory_ops import strong_scope
from smfree.emulator.exec.special import TIMED_REGISTERS
from smfree.emulator.exec.values import WINDOW_BYTES, width
from smfree.emulator.exec.warp import per_lane
from smfree.emulator.host_memory import HostMemory
from smfree.emulator.memory import GlobalMemory
from smfree.emulator.ptx import ast

if TYPE_CHECKING:
    from smfree.emulator.exec.launch import Launch

_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_HARMLESS = frozenset({"alu", "branch", "fence", "param load", "const load"})
_NAMED = 4


@dataclass(slots=True)
class Look:
    """The words that one load or atomic of a loop read: ``values`` uint8[n, size] at ``places`` of ``home``.

    ``addresses`` are the same as the kernel names them. ``weak``: the load has neither order nor scope.
    """

    home: GlobalMemory | HostMemory
    places: Any
    addresses: Any
    values: Any
    weak: bool

    @property
    def size(self) -> int:
        return int(self.values.shape[1])

    def now(self) -> Any:
        """uint8[n, size]: what the words hold now. Freed host memory keeps the old values."""
        if isinstance(self.home, GlobalMemory):
            return self.home.data[(self.places - self.home.base)[:, None] + np.arange(self.size)]
        words = self.values.copy()
        for i, place in enumerate(self.places.tolist()):
            found = self.home.range_of(place, self.size)
            if found is not None:
                words[i] = found.bytes.raw[place - found.base : place - found.base + self.size]
        return words

    def changed(self) -> bool:
        return bool((self.now() != self.values).any())

    def meets(self, home: GlobalMemory | HostMemory, lo: int, hi: int) -> bool:
        """Whether a change of [lo, hi) of ``home`` can be one of these words."""
        return home is self.home and bool(((self.places < hi) & (self.places + self.size > lo)).any())

    def __str__(self) -> str:
        """ "4 bytes at 0x10000000100 (+0 of allocation 'flags' [...) of 64 bytes), 0x0" """
        texts = []
        words = self.now()
        for place, address, word in zip(
            self.places[:_NAMED].tolist(), self.addresses.tolist(), words, strict=False
        ):
            value = int.from_bytes(word.tobytes(), "little")
            texts.append(f"{self.size} bytes at {address:#x} ({self._where(place)}), now {value:#x}")
        if len(self.places) > _NAMED:
            texts.append(f"and {len(self.places) - _NAMED} more")
        return "; ".join(texts)

    def _where(self, place: int) -> str:
        if isinstance(self.home, GlobalMemory):
            allocation = self.home.allocation_of(place)
            return f"+{place - allocation.start} of {allocation}" if allocation else "freed"
        known = self.home.range_of(place)
        return f"+{place - known.address} of {known}" if known else "freed"


def looks(launch: Launch, g: Group, first: int, last: int) -> tuple[list[Look], bool, bool]:
    """What the loop from ``first`` to ``last`` has read in its latest turn; whether that is all that could
    make another turn differ while its registers stay the same; whether it reads memory that others reach."""
    found: list[Look] = []
    complete, public = True, False
    for instr in launch.kernel.instrs[first : last + 1]:
        kind = instruction_class(instr)
        if kind in _HARMLESS:
            complete = complete and not _reads_time(instr)
            continue
        public = public or not _is_own(instr)
        look = _look(launch, g, instr) if instr.opcode in ("ld", "ldu", "atom") else None
        if look is None:
            complete = False
        else:
            found.append(look)
    return found, complete, public


def _is_own(instr: ast.Instr) -> bool:
    """Whether only threads of the kernel itself can reach what it looks at."""
    own = instr.opcode in ("mbarrier", "bar", "barrier", "elect", "vote", "shfl", "redux", "activemask")
    return own or any(m.startswith(("shared", "local")) for m in instr.modifiers)


def _reads_time(instr: ast.Instr) -> bool:
    return any(isinstance(o, ast.Special) and o.name in TIMED_REGISTERS for o in instr.operands)


def _look(launch: Launch, g: Group, instr: ast.Instr) -> Look | None:
    """None where it is not global memory, or cannot be told any more."""
    address = instr.operands[1]
    if _is_own(instr) or not isinstance(address, ast.Address):
        return None
    names = launch.program.register_names
    target = instr.operands[0]
    elems = target.elems if isinstance(target, ast.Vector) else (target,)
    registers = [g.regs[names[e.name]] if isinstance(e, ast.Reg) else None for e in elems]
    match address.base:
        case ast.Reg(name):
            base = g.regs[names[name]]
        case ast.Symbol(name) if name in launch.symbols:
            base = np.uint64(launch.symbols[name])
        case ast.Imm(value=int(value)):
            base = np.uint64(value)
        case _:
            return None
    if base is None or any(r is None for r in registers):
        return None
    n = g.lanes.n
    addresses = np.broadcast_to(np.asarray(base).astype(np.int64) + address.offset, n)
    if int(addresses.max()) >= WINDOW_BYTES or int(addresses.min()) < 0:
        return None
    element = next(width(m) // 8 for m in reversed(instr.modifiers) if m[0] in "busf" and m[1:].isdigit())
    words = np.stack([_bytes(per_lane(r, g), element) for r in registers], axis=1).reshape(n, -1)
    addresses, which = np.unique(addresses, return_index=True)
    home, places = _home(launch, addresses, words.shape[1])
    weak = instr.opcode != "atom" and strong_scope(instr) is None
    return None if home is None else Look(home, places, addresses, words[which], weak)


def _bytes(column: Any, size: int) -> Any:
    """uint8[n, size]: the low bytes of a register."""
    return np.ascontiguousarray(column).view(np.uint8).reshape(len(column), -1)[:, :size]


def _home(launch: Launch, addresses: Any, size: int) -> tuple[GlobalMemory | HostMemory | None, Any]:
    """The one memory in which the words lie, and where there; None when they are spread over several."""
    own = launch.device.memory
    if int(addresses[0]) - own.base >= 0 and int(addresses[-1]) - own.base < DEVICE_SPACE_BYTES:
        return own, addresses
    if launch.context is None:
        host = own.host
        return (host, addresses) if all(host.range_of(a) for a in addresses.tolist()) else (None, addresses)
    try:
        at = [launch.context.process.space.locate(a, size, "a poll") for a in addresses.tolist()]
    except EmulationError:
        return None, addresses
    homes = {id(each.memory) if each else 0 for each in at}
    if len(homes) != 1 or at[0] is None:
        return None, addresses
    return at[0].memory, np.array([each.address for each in at if each], np.int64)


def on_host(found: Sequence[Look]) -> bool:
    """Whether some of the words are host memory."""
    return any(isinstance(look.home, HostMemory) for look in found)
