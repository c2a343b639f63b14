"""The compile line in each kernel's header is one that compiles, with no definition missing or left over;
what does not fit together is said in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.common import KERNELS
from kernels.ipc.signals import SignalLayout
from smfree.cuda import CompileError, CudaSource, compile_cuda
from tests.kernels.test_ptx_header import KERNEL_FILES


def compile_line(file: Path) -> str:
    """The lines under "Compile", joined."""
    header = file.read_text().split("#include")[0]
    found = re.search(r"^// Compile\s+(.*?)(?=^// \w)", header, re.MULTILINE | re.DOTALL)
    assert found is not None
    return " ".join(line.removeprefix("//").strip() for line in found[1].splitlines())


def included(file: Path) -> list[Path]:
    """The headers of the repository that a file includes, with what they include."""
    names = re.findall(r'^#include "(.*)"', file.read_text(), re.MULTILINE)
    found = [KERNELS / "include" / name for name in names]
    return found + [below for header in found for below in included(header)]


def defines_of(file: Path) -> dict[str, str]:
    """The definitions of the compile line."""
    return dict(re.findall(r"-D(\w+)=(\S+)", compile_line(file)))


@pytest.mark.parametrize("file", KERNEL_FILES, ids=[f"{f.parent.name}/{f.name}" for f in KERNEL_FILES])
def test_the_compile_line_of_the_header_compiles(file: Path) -> None:
    line = compile_line(file)
    arch = re.search(r"-arch=(sm_\w+)", line)
    defines = defines_of(file)
    assert arch is not None and line.split()[0] == "nvcc" and file.name in line.split(), line
    assert compile_cuda(CudaSource(file, defines), arch[1]).cubin
    code = file.read_text().split("#include", 1)[1] + "".join(map(Path.read_text, included(file)))
    assert all(re.search(rf"\b{name}\b", code) for name in defines), "a definition that nothing reads"


def test_the_reductions_have_one_layout_of_signals() -> None:
    """Of a workspace with 128 channels: who copies two of them needs one control block."""
    channels = 128
    layout = SignalLayout(8, 5 * channels).defines
    layout |= {
        f"SIGNAL_{name}": place * channels
        for place, name in enumerate(("RING_DATA", "RING_ROOM", "TREE", "ONESHOT"), 1)
    }
    for file in (KERNELS / "reduce").glob("*.cu"):
        said = {name: value for name, value in defines_of(file).items() if name in layout or "SIGNAL" in name}
        assert said == {name: str(layout[name]) for name in said}, file.name


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("WORLD_SIZE", 1, "WORLD_SIZE must be 2 or more: one rank alone has nothing to add"),
        ("WORLD_SIZE", 33, "WORLD_SIZE must be 32 or less"),
        ("SIGNAL_PADS_OFFSET", 8, "SIGNAL_PADS_OFFSET must be 128"),
        ("SIGNAL_EPOCHS_OFFSET", 384, "SIGNAL_EPOCHS_OFFSET belongs to another WORLD_SIZE"),
        ("SIGNAL_RECORDS_OFFSET", 2304, "SIGNAL_RECORDS_OFFSET belongs to another SIGNAL_SLOTS"),
        ("SIGNAL_SLOTS", 512, "SIGNAL_RECORDS_OFFSET belongs to another SIGNAL_SLOTS"),
        ("PIECE_BYTES", 1000, "PIECE_BYTES must be a multiple of 128"),
        ("NUM_SLOTS", 1, "NUM_SLOTS must be 2 or more"),
    ],
)
def test_definitions_that_do_not_fit_are_told_in_words(name: str, wrong: int, said: str) -> None:
    file = KERNELS / "reduce" / ("ring.cu" if name == "NUM_SLOTS" else "oneshot.cu")
    with pytest.raises(CompileError, match=said):
        compile_cuda(CudaSource(file, {**defines_of(file), name: wrong}), "sm_80")
