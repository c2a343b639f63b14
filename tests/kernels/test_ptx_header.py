"""ptx.cuh and ptx_peer.cuh keep their promises: names, clobbers, no stray include, nothing unused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.common import KERNELS

INCLUDE = KERNELS / "include"
PTX_HEADERS = ("ptx.cuh", "ptx_peer.cuh")
HEADER = "\n".join((INCLUDE / name).read_text() for name in PTX_HEADERS)
BUILT_ON = {
    "ptx_peer.cuh": ["ptx.cuh"],
    "signals.cuh": ["ptx_peer.cuh"],
    "slice.cuh": ["ptx_peer.cuh"],
    "gather.cuh": ["signals.cuh", "slice.cuh"],
    "reduce.cuh": ["signals.cuh", "slice.cuh"],
    "ring.cuh": ["reduce.cuh"],
    "tile.cuh": ["ptx.cuh"],
}
"""What each header between GPUs includes: who copies a kernel copies these, too."""
KERNEL_FILES = sorted(KERNELS.glob("*/*.cu"))
SPACES = {"shared::cta": "shared", "shared::cluster": "shared"}


@dataclass(frozen=True)
class Wrapper:
    """A function of ptx.cuh: its name, its asm statement as written, and the instruction in it."""

    name: str
    statement: str

    @property
    def instruction(self) -> str:
        lines = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', self.statement.split(" : ")[0].split(" :: ")[0]))
        body = re.sub(r"\{\\n\\t\.reg \.pred complete;\\n\\t|\\n\\t.*$|\\n\\t", "", lines)
        return body.split(";")[0].strip()


def _wrappers() -> list[Wrapper]:
    functions = re.split(r"(?=^PTX_INLINE )", HEADER, flags=re.MULTILINE)[1:]
    found = []
    for text in functions:
        name = re.match(r"PTX_INLINE .*?(\w+)\(", text)
        statement = re.search(r"asm volatile\((.*?)\);", text, re.DOTALL)
        if name and statement:
            found.append(Wrapper(name[1], statement[1]))
    return found


WRAPPERS = _wrappers()


def test_every_asm_statement_is_volatile_and_clobbers_memory() -> None:
    assert len(WRAPPERS) == HEADER.count("asm volatile(") == len(re.findall(r"\basm\b", HEADER))
    for wrapper in WRAPPERS:
        assert wrapper.statement.rstrip().endswith('"memory"'), wrapper.name


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=[f"{w.name}-{i}" for i, w in enumerate(WRAPPERS)])
def test_a_function_bears_its_instructions_name(wrapper: Wrapper) -> None:
    """The words of the name stand, in this order, in the instruction (copies name the destination first)."""
    words = re.split(r"[.:\s,%\[\]{}]+", wrapper.instruction)
    joined = "_".join(words)
    at = -1
    for part in re.split(r"_(?=now$)|_", wrapper.name):
        if part == "now":
            continue
        found = joined.find(part, at + 1)
        assert found > at, f"{wrapper.name}: '{part}' is not in {wrapper.instruction}"
        at = found


def test_the_header_includes_nothing_and_is_the_only_include_of_every_kernel() -> None:
    """What the watchdog's builds include stands behind their define. Kernels between GPUs include headers
    that are built on it."""
    assert re.findall(r"^(.*)\n\s*#\s*include\s+(\S+)", (INCLUDE / "ptx.cuh").read_text(), re.MULTILINE) == [
        ("#ifdef WATCHDOG_NS", '"watchdog.cuh"')
    ]
    for name, below in BUILT_ON.items():
        assert _includes(INCLUDE / name) == [f'"{header}"' for header in below]
    for file in KERNEL_FILES:
        if file.parent.name in ("ipc", "reduce"):
            assert set(_includes(file)) <= {f'"{name}"' for name in ("ptx.cuh", *BUILT_ON)}, file
        else:
            assert _includes(file) == ['"ptx.cuh"'], file


def _includes(file: Path) -> list[str]:
    return re.findall(r"^\s*#\s*include\s+(.*)$", file.read_text(), re.MULTILINE)


def test_every_function_of_the_header_is_used_by_a_kernel() -> None:
    """By a kernel, or by another function of the header."""
    code = "\n".join(file.read_text() for file in (*KERNEL_FILES, *(INCLUDE / name for name in BUILT_ON)))
    code = "\n".join(line for line in code.splitlines() if not line.startswith("PTX_INLINE"))
    for wrapper in WRAPPERS:
        used = re.search(rf"\b{wrapper.name}\b", code) or len(re.findall(rf"\b{wrapper.name}\(", HEADER)) > 1
        assert used, f"{wrapper.name} is used by no kernel"


@pytest.mark.parametrize("file", KERNEL_FILES, ids=[f"{f.parent.name}/{f.name}" for f in KERNEL_FILES])
def test_a_kernel_file_explains_itself_and_stays_short(file: Path) -> None:
    text = file.read_text()
    header = text.split("#include")[0]
    assert header.splitlines()[0].endswith("?"), "the first line is the question that the kernel answers"
    for label in ("Moves", "In flight", "Needs", "Barriers", "Shared", "Compile", "Launch"):
        assert re.search(rf"^// {label}\s", header, re.MULTILINE), f"the header has no '{label}'"
    assert len(text.splitlines()) <= 150
    assert max(map(len, text.splitlines())) <= 110


def test_the_header_fits_its_limits() -> None:
    for file in INCLUDE.glob("*.cuh"):
        lines = file.read_text().splitlines()
        assert len(lines) <= 500  # every instruction of every kernel; sections, found by their headings
        assert max(map(len, lines)) <= 110, file.name
