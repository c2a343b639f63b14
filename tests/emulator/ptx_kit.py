"""Helpers of the PTX tests: NVRTC as a source of real PTX, ptxas as the judge of what is legal."""

from __future__ import annotations

import importlib
import struct
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from cuda.bindings import nvrtc

# A kernel around the snippet under test; every register it may name is defined.
PROLOGUE = """
.visible .entry k(.param .u64 a, .param .u32 n)
{
    .reg .pred %p<6>;
    .reg .b16 %h<6>;
    .reg .b32 %r<20>;
    .reg .b64 %rd<12>;
    .reg .f32 %f<10>;
    .shared .align 128 .b8 sm[1024];
    ld.param.u64 %rd1, [a];
    ld.param.u32 %r1, [n];
    setp.ne.s32 %p1, %r1, 0;
    mov.u32 %r2, sm;
    mov.u64 %rd2, sm;
    mov.b64 %rd3, %rd1;
    mov.b32 %r3, %r1;
    mov.b32 %r4, %r1;
    mov.b32 %r5, %r1;
    mov.b32 %f1, %r1;
    mov.b32 %f2, %r1;
    cvt.u16.u32 %h1, %r1;
"""


@cache
def ptxas_path() -> Path:
    """The ptxas of the newest installed nvcc wheel, never the one on PATH (it may be older than the PTX)."""
    found: list[Path] = []
    for root in importlib.import_module("nvidia").__path__:
        found += sorted(Path(root).glob("*/bin/ptxas"))
    assert found, "the wheel nvidia-cuda-nvcc is missing; install the extra 'dev'"
    return found[-1]


def module_text(code: str, target: str) -> str:
    """A whole PTX text: ``code`` is a module if it starts with a directive, else the middle of a kernel."""
    return modules_text([code], target)


def modules_text(codes: list[str], target: str) -> str:
    """The same for several codes at once; their kernels are called k, k1, k2..."""
    text = f".version 9.0\n.target {target}\n.address_size 64\n"
    for number, code in enumerate(codes):
        whole = code if code.startswith(".") else f"{PROLOGUE}    {code}\n    ret;\n}}"
        text += whole.replace(" k(", f" k{number or ''}(", 1) + "\n"
    return text


@dataclass(frozen=True)
class Verdict:
    """What ptxas said."""

    accepted: bool
    log: str


def ptxas(text: str, target: str) -> Verdict:
    """Assemble one PTX text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.ptx"
        path.write_text(text)
        command = [str(ptxas_path()), f"-arch={target}", str(path), "-o", str(Path(folder) / "case.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return Verdict(done.returncode == 0, done.stdout + done.stderr)


def ptxas_all(cases: list[tuple[str, str]]) -> list[Verdict]:
    """Assemble many (text, target), two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda case: ptxas(*case), cases))


@cache
def nvrtc_ptx(source: str, arch: str, *options: str) -> str:
    """Compile CUDA C++ to PTX with line information; a compile error fails the test with the log.

    A debug build has a process of its own: for sm_100 and later it makes NVRTC 13.5 compile wrongly in the
    same process ever after (smfree.cuda.compile_cuda._converted_twice).
    """
    if "--device-debug" not in options:
        return _nvrtc_ptx(source, arch, *options)
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        return alone.submit(_nvrtc_ptx, source, arch, *options).result()


def _nvrtc_ptx(source: str, arch: str, *options: str) -> str:
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"case.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, error
    flags = [f"--gpu-architecture={arch}", "-lineinfo", "-default-device", *options]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), [f.encode() for f in flags])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = b" " * size
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


def cubin_parameters(text: str, target: str, kernel: str) -> tuple[int, list[int]]:
    """Where ptxas put the parameters: the block's address in the constant bank and each one's offset in it.

    They are the records PARAM_CBANK and KPARAM_INFO of the cubin's .nv.info section.
    """
    with tempfile.TemporaryDirectory() as folder:
        path, cubin = Path(folder) / "case.ptx", Path(folder) / "case.cubin"
        path.write_text(text)
        command = [str(ptxas_path()), f"-arch={target}", str(path), "-o", str(cubin)]
        subprocess.run(command, check=True, timeout=60)
        info = _elf_section(cubin.read_bytes(), f".nv.info.{kernel}")
    base, offsets, at = 0, dict[int, int](), 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:
            continue
        if attribute == 0x17:
            ordinal, offset = struct.unpack_from("<4xHH", info, at)
            offsets[ordinal] = offset
        elif attribute == 0x0A:
            (base,) = struct.unpack_from("<4xH", info, at)
        at += size
    return base, [offsets[i] for i in range(len(offsets))]


def _elf_section(data: bytes, name: str) -> bytes:
    table, size, count, strings = *struct.unpack_from("<40xQ", data), *struct.unpack_from("<58xHHH", data)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    names = headers[strings][4]
    for start, _, _, _, offset, length in headers:
        end = data.index(b"\0", names + start)
        if data[names + start : end].decode() == name:
            return data[offset : offset + length]
    raise AssertionError(f"the cubin has no section {name}")
