"""SASS of a cubin, by nvdisasm: instructions in order and counts by opcode."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from smfree.cuda.errors import ToolMissingError
from smfree.cuda.store import FileStore, key_of

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$.]+)", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:(?P<guard>@!?U?P\w+)\s+)?(?P<opcode>[A-Z][A-Z0-9_.]*)\s*(?P<operands>[^;]*);"
)


@dataclass(frozen=True)
class SassInstruction:
    """One instruction: byte address, guard (``@P0``, ``@!UP1`` or empty), opcode with modifiers, operands."""

    address: int
    guard: str
    opcode: str
    operands: str

    @property
    def stem(self) -> str:
        """The opcode before its modifiers: ``LDG`` of ``LDG.E.128``."""
        return self.opcode.split(".", 1)[0]


@dataclass(frozen=True)
class SassFunction:
    """The instructions of one kernel in address order. Padding NOPs are left out."""

    name: str
    instructions: tuple[SassInstruction, ...]

    def counts(self) -> dict[str, int]:
        """Static counts by full opcode."""
        return dict(Counter(instruction.opcode for instruction in self.instructions))

    def stems(self) -> dict[str, int]:
        """Static counts by opcode without modifiers."""
        return dict(Counter(instruction.stem for instruction in self.instructions))


def find_disassemblers() -> list[Path]:
    """Every nvdisasm within reach, best first: the nvidia-cuda-nvdisasm wheel, PATH, Triton's own."""
    found: list[Path] = []
    namespace = importlib.util.find_spec("nvidia")
    for root in (namespace.submodule_search_locations or []) if namespace else []:
        found += sorted(Path(root).glob("*/bin/nvdisasm"), reverse=True)
    on_path = shutil.which("nvdisasm")
    if on_path:
        found.append(Path(on_path))
    triton = importlib.util.find_spec("triton")
    for root in (triton.submodule_search_locations or []) if triton else []:
        found += Path(root).glob("backends/nvidia/bin/nvdisasm")
    return list(dict.fromkeys(found))


def disassembly(cubin: bytes, arch: str) -> str:
    """nvdisasm's text of a cubin's code, through the cache on disk (the tool takes a second to start).

    Raises ToolMissingError when no disassembler can read it.
    """
    store, key = FileStore(suffix="sass"), key_of(["sass", cubin])
    stored = store.read(key)
    if stored is not None:
        return stored.decode()
    text = _disassemble(cubin, arch)
    store.write(key, text.encode())
    return text


def _disassemble(cubin: bytes, arch: str) -> str:
    tools = find_disassemblers()
    failures = []
    with _file(cubin) as (path, descriptors):
        for tool in tools:
            command = [str(tool), "-c", path]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=60, pass_fds=descriptors
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                failures.append(f"{tool}: {error}")
                continue
            if done.returncode == 0:
                return done.stdout
            failures.append(f"{tool}: {(done.stderr or done.stdout).strip()}")
    tried = "; tried " + ", ".join(failures) if failures else ""
    raise ToolMissingError(
        f"SASS of {arch} needs an nvdisasm that reads it; install nvidia-cuda-nvdisasm{tried}"
    )


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A path that a child process reads ``data`` from, and the descriptors it needs.

    In memory where the system can, so that a process killed meanwhile leaves nothing behind.
    """
    if not hasattr(os, "memfd_create"):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(data)
            file.flush()
            yield file.name, ()
        return
    descriptor = os.memfd_create("cubin")
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{descriptor}", (descriptor,)


def disassemble(cubin: bytes, arch: str) -> dict[str, SassFunction]:
    """The kernels of a cubin by name."""
    return parse_disassembly(disassembly(cubin, arch))


def parse_disassembly(text: str) -> dict[str, SassFunction]:
    """Parse the output of ``nvdisasm -c``."""
    starts = list(_SECTION.finditer(text))
    functions = {}
    for start, end in zip(starts, [*starts[1:], None], strict=True):
        body = text[start.end() : end.start() if end else len(text)]
        instructions = [
            SassInstruction(int(m["address"], 16), m["guard"] or "", m["opcode"], m["operands"].strip())
            for m in _INSTRUCTION.finditer(body)
        ]
        while instructions and instructions[-1].opcode == "NOP":
            instructions.pop()
        functions[start[1]] = SassFunction(start[1], tuple(instructions))
    return functions
