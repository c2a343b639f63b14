"""Where a kernel's static shared variables lie: what names a shared-memory address that a kernel reported.

A cubin does not name them. ptxas places them in the order of the PTX, each at its alignment, from the start
of the CTA's window; from sm_90 on the window begins with 1024 bytes of the system
(``.nv.shared.reserved``). Tests hold this against the addresses in SASS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from smfree.cuda.capabilities import compute_capability_of
from smfree.cuda.image import ModuleImage

RESERVED_BYTES = 1024
WINDOW_MASK = (1 << 24) - 1
"""A shared address holds the CTA's rank in its cluster above these bits."""
_ALIGNED = re.compile(
    r"^\s*\.shared\s+(?:\.align\s+(?P<align>\d+)\s+)?\.[busf](?P<bits>\d+)\s+(?P<name>[\w$.]+)"
    r"(?:\[(?P<count>\d+)\])?\s*;",
    re.MULTILINE,
)
_LOCAL_STATIC = re.compile(r"_ZZ.*?E(\d+)(\w+)$")


@dataclass(frozen=True)
class SharedVariable:
    """A static shared variable: its name in the source, offset in the CTA's own part of the window, size in
    bytes."""

    name: str
    offset: int
    size_bytes: int


def shared_variables(image: ModuleImage) -> tuple[SharedVariable, ...]:
    """Those of a module with one kernel, in order; of a module with several kernels none, since each kernel
    has only those that it uses."""
    if len(image.functions) != 1:
        return ()
    found, offset = [], 0
    for match in _ALIGNED.finditer(image.ptx):
        item = int(match["bits"]) // 8
        align = int(match["align"] or item)
        offset = -(-offset // align) * align
        size = item * int(match["count"] or 1)
        found.append(SharedVariable(_source_name(match["name"]), offset, size))
        offset += size
    return tuple(found)


def window_base(image: ModuleImage, *, is_emulated: bool) -> int:
    """Shared address of offset 0: 1024 on real GPUs from compute capability 9.0 on, else 0."""
    return RESERVED_BYTES if not is_emulated and compute_capability_of(image.arch) >= (9, 0) else 0


def name_barrier(variables: tuple[SharedVariable, ...], offset: int) -> str:
    """ "full[1]" for the offset of an 8-byte barrier, "shared+0x40" where no variable lies."""
    for variable in variables:
        inside = offset - variable.offset
        if 0 <= inside < variable.size_bytes:
            return variable.name if variable.size_bytes == 8 else f"{variable.name}[{inside // 8}]"
    return f"shared+0x{offset:x}"


def _source_name(mangled: str) -> str:
    """The name of a variable declared inside a function; others keep theirs."""
    match = _LOCAL_STATIC.match(mangled)
    return match[2][: int(match[1])] if match else mangled
