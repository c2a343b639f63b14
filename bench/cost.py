"""What a configuration needs from the SM: registers, occupancy, and SASS instructions of its inner loops."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kernels.engine import CopyConfig
from smfree.cuda import Capabilities, Kernel
from smfree.cuda.errors import CudaHostError
from smfree.cuda.sass import disassembly
from smfree.measure.records import Cost

KIB = 1024
LANES = 32

#: Opcode stems that move a tile between global and shared memory or registers, by direction.
LOADS = ("LDG", "LDGSTS", "UTMALDG", "UBLKCP.S.G")
STORES = ("STG", "UTMASTG", "UBLKCP.G.S")

_LINE = re.compile(
    r"^\s*\.(?P<label>L_\w+):"
    r"|/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)\s*(?P<operands>[^;]*);"
)


def cost_of(kernel: Kernel, config: CopyConfig, capabilities: Capabilities) -> Cost:
    """What the kernel needs of an SM, and the SASS instructions of the loops that move the tile."""
    image = kernel.module.image
    try:
        sass = sass_per_kib(
            function_text(disassembly(image.cubin, image.arch), kernel.name), config.tile_bytes
        )
    except CudaHostError:  # no disassembler here: the column stays empty
        sass = None
    return replace(resources(kernel, config.threads, config.shared_bytes, capabilities), sass_per_kib=sass)


def resources(kernel: Kernel, threads: int, shared_bytes: int, capabilities: Capabilities) -> Cost:
    """Registers and local bytes, and the CTAs per SM that fit."""
    fit = kernel.occupancy(threads, shared_bytes)
    return Cost(
        registers=kernel.registers,
        local_bytes=kernel.local_bytes,
        ctas_per_sm=fit,
        occupancy=fit * threads / capabilities.max_threads_per_sm,
    )


@dataclass(frozen=True, slots=True)
class Loop:
    """Instructions of one loop (opcodes in order), from its label to the branch back."""

    start: int
    end: int
    opcodes: tuple[str, ...]

    def moves(self, stems: Sequence[str]) -> int:
        return sum(_is(opcode, stems) for opcode in self.opcodes)

    def payload_bytes(self, stems: Sequence[str], tile_bytes: int) -> int:
        """Bytes that one warp moves in one iteration; a TMA instruction moves the whole tile."""
        return sum(
            tile_bytes if opcode.startswith("U") else LANES * width_bytes(opcode)
            for opcode in self.opcodes
            if _is(opcode, stems)
        )


def sass_per_kib(text: str, tile_bytes: int) -> float | None:
    """Warp instructions of the inner loops that load and that store a tile, per KiB of payload.

    ``text``: one function of ``nvdisasm -c``. Static: each loop's instructions over the bytes of an
    iteration, without
    what surrounds the loops once per tile. None when the kernel has no loop that moves data.
    """
    loops = parse_loops(text)
    chosen: dict[tuple[int, int], float] = {}
    for stems in (LOADS, STORES):
        moving = [loop for loop in loops if loop.moves(stems)]
        if not moving:
            continue
        innermost = [
            loop
            for loop in moving
            if not any(
                loop.start <= other.start and other.end <= loop.end and other is not loop for other in moving
            )
        ]
        main = max(innermost, key=lambda loop: loop.payload_bytes(stems, tile_bytes))
        cost = len(main.opcodes) / (main.payload_bytes(stems, tile_bytes) / KIB)
        chosen[(main.start, main.end)] = max(cost, chosen.get((main.start, main.end), 0.0))
    return sum(chosen.values()) if chosen else None


def parse_loops(text: str) -> list[Loop]:
    """Loops: branches back to a label. Traps (a branch to itself) and the retry of a uniform branch are
    none."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = _LINE.search(line)
        if found is None:
            continue
        if found["label"]:
            labels[found["label"]] = len(opcodes)
            continue
        if found["opcode"].startswith("BRA") and ".ANY" not in found["opcode"]:
            target = re.search(r"\.(L_\w+)", found["operands"])
            if target:
                branches.append((len(opcodes), target[1]))
        opcodes.append(found["opcode"])
    return [
        Loop(labels[label], at, tuple(opcodes[labels[label] : at + 1]))
        for at, label in branches
        if label in labels and labels[label] < at
    ]


def function_text(text: str, name: str) -> str:
    """The part of ``nvdisasm -c`` that belongs to one kernel."""
    parts = re.split(r"^\s*\.section\s+\.text\.([\w$.]+)[^\n]*$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)).get(name, "")


def width_bytes(opcode: str) -> int:
    """Bytes per lane of a load or store: ``LDG.E.128`` moves 16; 4 without a width."""
    for part in opcode.split("."):
        if part in ("64", "128", "256"):
            return int(part) // 8
        if part in ("U8", "S8", "U16", "S16"):
            return int(part[1:]) // 8
    return 4


def _is(opcode: str, stems: Sequence[str]) -> bool:
    return any(opcode == stem or opcode.startswith(stem + ".") for stem in stems)
