"""The compile line in each kernel's header is one that compiles, with no definition missing or left over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kernels.common import KERNELS
from smfree.cuda import CudaSource, compile_cuda
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


@pytest.mark.parametrize("file", KERNEL_FILES, ids=[f"{f.parent.name}/{f.name}" for f in KERNEL_FILES])
def test_the_compile_line_of_the_header_compiles(file: Path) -> None:
    line = compile_line(file)
    arch = re.search(r"-arch=(sm_\w+)", line)
    defines = dict(re.findall(r"-D(\w+)=(\S+)", line))
    assert arch is not None and line.split()[0] == "nvcc" and file.name in line.split(), line
    assert compile_cuda(CudaSource(file, defines), arch[1]).cubin
    code = file.read_text().split("#include", 1)[1] + "".join(map(Path.read_text, included(file)))
    assert all(re.search(rf"\b{name}\b", code) for name in defines), "a definition that nothing reads"
