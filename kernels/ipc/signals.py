"""Signals between ranks: where their words lie, and what a control block holds (include/signals.cuh).

A rank has two blocks. Its **pad** is symmetric memory: one 32-bit word per (slot, writer), written by that
peer alone with release semantics at system scope, and polled by the rank with acquire. A slot belongs to one
CTA, so the CTAs of a collective never wait for each other. Its **control block** is its own memory, read by
nobody else: the abort word, where the peers' pads are, the epoch of each slot, and what a wait that was
aborted leaves behind.

Words only grow: barrier number n of a slot writes n and waits until ``int(word - n) >= 0``, so that a fast
peer may be one barrier ahead, the count may wrap, and nothing is ever reset (case D19). A kernel reads its
slot's epoch when it starts and stores it when it ends: a replayed graph goes on where the last launch
stopped. The last slot is the host's, for stream memory operations: its epoch lives in the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kernels.common import check_whole, plain_integers, require

LINE_BYTES = 128
MAX_WORLD = 32
"""More ranks than one NVLink domain of today's 8-GPU nodes; a warp has a lane per peer."""

RECORD = np.dtype([(name, "<u4") for name in ("step", "wanted", "seen", "number")])
"""What a wait leaves when it is aborted, per (slot, peer). ``step`` is 0 where nothing waited; ``number``
tells steps of one kind apart."""


class Step(IntEnum):
    """What a record is about: a barrier of a collective, or a counted step of a reduction."""

    ENTRY = 1
    EXIT = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    ROOM = 5
    """In the scratch memory of the peer, for what the step sends."""
    TREE_REDUCE = 6
    TREE_BROADCAST = 7
    TERMS = 8
    """All terms of what the rank adds in this turn."""
    TREE_ROOM = 9
    """In the scratch memory of the parent."""


_TEXTS = {
    Step.ENTRY: "entry barrier",
    Step.EXIT: "exit barrier",
    Step.REDUCE_SCATTER: "reduce-scatter step {}",
    Step.ALL_GATHER: "all-gather step {}",
    Step.ROOM: "room for step {}",
    Step.TREE_REDUCE: "reduction up tree {}",
    Step.TREE_BROADCAST: "broadcast down tree {}",
    Step.TERMS: "terms of turn {}",
    Step.TREE_ROOM: "room up tree {}",
}


def step_text(step: int, number: int = 0) -> str:
    """What a record is about, in words."""
    return _TEXTS[Step(step)].format(number) if step in list(Step) else f"barrier {step}"


@dataclass(frozen=True)
class SignalLayout:
    """Sizes and offsets, in bytes, of the pad and the control block.

    ``slots`` for CTAs: the largest grid that a collective can have. The host's slot follows them in the pad
    and has neither epoch nor record in the control block. Raises ConfigError.
    """

    world_size: int
    slots: int = 512

    def __post_init__(self) -> None:
        plain_integers(self)
        for name, most in (("world_size", MAX_WORLD), ("slots", 1 << 16)):
            value = check_whole(name, getattr(self, name))
            require(1 <= value <= most, f"{name} is 1 to {most}", value, "use a value inside")

    # --- the pad: u32 [slots + 1][world_size] -------------------------------------------------------

    @property
    def pad_bytes(self) -> int:
        """Size of the pad, whole lines."""
        return _lines(4 * (self.slots + 1) * self.world_size)

    def word(self, slot: int, writer: int) -> int:
        """Offset in the pad of the word of ``slot`` that rank ``writer`` writes."""
        return 4 * (slot * self.world_size + writer)

    @property
    def host_slot(self) -> int:
        """The host's slot, the last one."""
        return self.slots

    # --- the control block --------------------------------------------------------------------------

    @property
    def abort_offset(self) -> int:
        """u32, alone in its line: 0, or not 0 when every wait of the rank shall end."""
        return 0

    @property
    def pads_offset(self) -> int:
        """u64 [world_size]: the pads of all ranks, as this rank's GPU sees them; its own among them."""
        return LINE_BYTES

    @property
    def epochs_offset(self) -> int:
        """u32 [slots]: barriers that the slot has done so far, modulo 2^32."""
        return self.pads_offset + _lines(8 * self.world_size)

    @property
    def records_offset(self) -> int:
        """RECORD [slots][world_size]: the waiting slot, and the peer waited for."""
        return self.epochs_offset + _lines(4 * self.slots)

    @property
    def control_bytes(self) -> int:
        """Size of the control block."""
        return self.records_offset + RECORD.itemsize * self.slots * self.world_size

    @property
    def defines(self) -> dict[str, object]:
        """What a kernel is compiled with: ``signals.cuh`` asserts that its structs lie so."""
        return {
            "WORLD_SIZE": self.world_size,
            "SIGNAL_SLOTS": self.slots,
            "SIGNAL_PADS_OFFSET": self.pads_offset,
            "SIGNAL_EPOCHS_OFFSET": self.epochs_offset,
            "SIGNAL_RECORDS_OFFSET": self.records_offset,
            **{f"SIGNAL_STEP_{step.name}": int(step) for step in Step},
        }


def behind(wanted: int, seen: int) -> bool:
    """Whether a word that reads ``seen`` has not reached epoch ``wanted`` (cyclic comparison of 32 bits)."""
    return (seen - wanted) % 2**32 >= 2**31


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE_BYTES) * LINE_BYTES
