"""CUDA C++ through NVRTC: what comes out, and what a refused source says."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smfree.cuda import CompileError, CudaSource, Device, KernelNotFoundError, compile_cuda
from smfree.cuda.compile_cuda import compile_options, nvrtc_version, supported_archs
from smfree.cuda.image import usage_in_log
from smfree.cuda.sass import find_disassemblers
from tests.cuda.sources import ABI, COPY, FACTS, source

ARCHS = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]


@pytest.mark.parametrize("arch", ARCHS)
def test_one_compilation_gives_ptx_and_cubin(arch: str) -> None:
    image = compile_cuda(source(COPY), arch)
    assert f".target {arch}" in image.ptx.replace("\t", " ").replace("  ", " ")
    assert image.cubin[:4] == b"\x7fELF" and not image.ptx.endswith("\0")
    assert list(image.functions) == ["copy_words"]
    assert image.compiler == "NVRTC {}.{}".format(*nvrtc_version())
    assert image.sass().stems()["STG"] >= 1


def test_source_lines_are_kept_under_the_real_path(tmp_path: Path) -> None:
    file = tmp_path / "lines.cu"
    file.write_text(COPY)
    image = compile_cuda(CudaSource(file), "sm_90a")
    assert f'"{file}"' in image.ptx and ".loc\t1 3" in image.ptx


def test_defines_and_options_reach_the_compiler() -> None:
    text = 'extern "C" __global__ void f(int* p) { p[0] = VALUE; p[1] = FLAG; }'
    image = compile_cuda(source(text, VALUE=1234567, FLAG=True), "sm_90a")
    assert "1234567" in image.ptx
    options = compile_options(CudaSource("a/b.cu", {"N": 4}, ("--maxrregcount=32",)), "sm_80")
    assert options[0] == "--gpu-architecture=sm_80" and options[-2:] == ("-DN=4", "--maxrregcount=32")
    assert {"-lineinfo", "-default-device"} <= set(options)


@pytest.mark.parametrize("defines", [{"N-1": 2}, {"N": 1.5}, {"N": None}])
def test_define_that_is_no_c_token_is_refused(defines: dict) -> None:
    with pytest.raises(ValueError, match="define"):
        CudaSource("a.cu", defines)


def test_include_root_is_the_nearest_include_folder(tmp_path: Path) -> None:
    """E01: one consistent include root, found from the file's place, whatever the working directory."""
    kernels = tmp_path / "kernels"
    (kernels / "include").mkdir(parents=True)
    (kernels / "lsu").mkdir()
    (kernels / "include" / "ptx.cuh").write_text("#define ANSWER 42\n")
    (kernels / "lsu" / "near.cuh").write_text("#define NEAR 7\n")
    file = kernels / "lsu" / "copy.cu"
    file.write_text(
        '#include "ptx.cuh"\n#include "near.cuh"\n'
        'extern "C" __global__ void f(int* p) { *p = ANSWER + NEAR; }'
    )
    image = compile_cuda(CudaSource(file), "sm_90a")
    assert "49" in image.ptx and image.name == "lsu/copy.cu"
    assert CudaSource(file).search_dirs() == (kernels / "lsu", kernels / "include")


def test_mixed_include_roots_are_named(tmp_path: Path) -> None:
    """E01: two roots with different versions of one header; the error says which was used."""
    for folder, body in (("old", "#error old header\n"), ("new", "#define OK 1\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.h").write_text(body)
    roots = (tmp_path / "old", tmp_path / "new")
    broken = CudaSource("t/x.cu", text='#include "config.h"\n', include_dirs=roots)
    with pytest.raises(CompileError) as caught:
        compile_cuda(broken, "sm_90a")
    text = str(caught.value)
    assert f"config.h differs between {roots[0]} and {roots[1]}; the first was used" in text
    assert "old header" in caught.value.log


def test_missing_header_lists_the_searched_directories(tmp_path: Path) -> None:
    """E02: <cuda/barrier> without libcu++ names the directories and the package."""
    broken = CudaSource(
        tmp_path / "x.cu", text="#include <cuda/barrier>\n", include_dirs=(tmp_path / "extra",)
    )
    with pytest.raises(CompileError) as caught:
        compile_cuda(broken, "sm_90a")
    text = str(caught.value)
    assert "cuda/barrier" in caught.value.log
    assert f"include directories searched: {tmp_path / 'extra'}, {tmp_path}" in text
    assert "nvidia-cuda-cccl" in text and "options: --gpu-architecture=sm_90a" in text


@pytest.mark.parametrize(
    ("include", "of_cuda"),
    [('"watchdog.cuh"', False), ('"cuda_fp16.h"', True), ("<cuda_fp16.h>", True), ("<cuda/barrier>", True)],
)
def test_the_hint_about_a_missing_header_says_where_it_comes_from(include: str, of_cuda: bool) -> None:
    """A file of one's own was not copied along; CUDA's come with a package."""
    with pytest.raises(CompileError) as caught:
        compile_cuda(source(f"#include {include}\n"), "sm_80")
    text = str(caught.value)
    assert ("nvidia-cuda-runtime" in text) is of_cuda
    assert ("hint: watchdog.cuh is looked for beside the file that includes it" in text) is not of_cuda


def test_arch_specific_instruction_on_the_plain_arch_names_the_suffix() -> None:
    """E03: setmaxnreg on sm_90 instead of sm_90a."""
    text = """extern "C" __global__ void f() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }"""
    with pytest.raises(CompileError) as caught:
        compile_cuda(source(text), "sm_90")
    assert "setmaxnreg exists only on the arch-specific variant sm_90a: compile for it, not sm_90" in str(
        caught.value
    )
    assert "setmaxnreg" in compile_cuda(source(text), "sm_90a").ptx


def test_device_asks_for_the_arch_specific_variant(device: Device) -> None:
    """E03: the helper never compiles plain sm_90 for a Hopper device."""
    assert device.capabilities.arch == "sm_90a"
    assert device.compile_image(source(COPY)).arch == "sm_90a"


def test_syntax_error_carries_log_and_line() -> None:
    with pytest.raises(CompileError) as caught:
        compile_cuda(source('extern "C" __global__ void f() {\n  undeclared = 1;\n}'), "sm_90a")
    assert "test/kernel.cu(2)" in caught.value.log and "undeclared" in str(caught.value)


@pytest.mark.parametrize("arch", ["sm_9", "compute_90", "90a", "hopper"])
def test_misspelt_architecture_is_refused(arch: str) -> None:
    with pytest.raises(ValueError, match=r"sm_NN"):
        compile_cuda(source(COPY), arch)


def test_unknown_architecture_lists_those_there_are() -> None:
    with pytest.raises(CompileError) as caught:
        compile_cuda(source(COPY), "sm_35")
    assert ", ".join(supported_archs()) in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"absent\.cu cannot be read: No such file"):
        compile_cuda(CudaSource(tmp_path / "absent.cu"), "sm_90a")


def test_lookup_failure_lists_the_entry_points(device: Device) -> None:
    """E19: a name that is not there, and one that C++ mangled."""
    text = COPY + "__global__ void mangled(int* p) { *p = 1; }\n"
    module = device.compile(source(text))
    with pytest.raises(KernelNotFoundError, match=r"no entry point 'copy'; it has _Z7mangledPi, copy_words$"):
        module.kernel("copy")
    with pytest.raises(
        KernelNotFoundError, match=r'_Z7mangledPi looks like its mangled name: declare it extern "C"'
    ):
        module.kernel("mangled")
    with pytest.raises(KernelNotFoundError, match="no entry point None"):
        module.kernel()


@pytest.mark.parametrize("arch", ARCHS)
def test_facts_from_the_cubin_agree_with_the_ptxas_log(arch: str) -> None:
    """Two independent sources: the ELF sections and the -v output."""
    image = compile_cuda(source(FACTS), arch)
    usage = usage_in_log(image.log)
    assert set(usage) == set(image.functions) == {"plain", "shared", "spills", "local"}
    for name, facts in image.functions.items():
        assert facts.registers == usage[name].registers
        assert facts.local_bytes == usage[name].stack_bytes
        assert facts.static_shared_bytes == usage[name].static_shared_bytes
        assert facts.spill_bytes == usage[name].spill_store_bytes + usage[name].spill_load_bytes
    assert image.functions["shared"].static_shared_bytes == 1200
    assert image.functions["spills"].spill_bytes > 0
    assert image.functions["local"].local_bytes >= 256 and image.functions["local"].spill_bytes == 0
    assert image.functions["plain"].spill_bytes == image.functions["plain"].local_bytes == 0


def test_spills_show_in_sass_as_local_accesses() -> None:
    image = compile_cuda(source(FACTS), "sm_90a")
    assert image.sass("spills").stems()["STL"] > 0
    assert "STL" not in image.sass("plain").stems()


def test_launch_bounds_are_read_from_the_ptx() -> None:
    text = 'extern "C" __global__ void __launch_bounds__(96) f(int* p) { *p = 1; }'
    assert compile_cuda(source(text), "sm_90a").functions["f"].max_threads == 96


def test_parameter_offsets_follow_the_abi() -> None:
    """E13: (u8, pointer, 64-aligned 128-byte map, u16, float4, u8, f64) has the padding of the .param
    list."""
    params = compile_cuda(source(ABI), "sm_90a").functions["abi"].params
    assert [(p.size_bytes, p.align, p.offset) for p in params] == [
        (1, 1, 0),
        (8, 8, 8),
        (128, 64, 64),
        (2, 2, 192),
        (16, 16, 208),
        (1, 1, 224),
        (8, 8, 232),
    ]


def test_grid_constant_map_needs_no_local_copy() -> None:
    """E14 (compile side): a by-value map marked __grid_constant__ leaves no local depot; unmarked and
    address-taken it does."""
    depot = "__local_depot"
    assert depot not in compile_cuda(source(ABI), "sm_90a").ptx
    text = """struct alignas(64) Map { unsigned long long opaque[16]; };
    extern "C" __global__ void f(Map map, unsigned long long* out) {
      unsigned long long at; asm volatile("mov.u64 %0, %1;" : "=l"(at) : "l"(&map) : "memory"); *out = at;
    }"""
    assert depot in compile_cuda(source(text), "sm_90a").ptx


def test_disassembler_of_the_wheel_comes_first() -> None:
    tools = find_disassemblers()
    assert tools and "nvidia" in tools[0].parts
    assert subprocess.run([tools[0], "--version"], capture_output=True, check=True).stdout


def test_an_address_of_a_parameter_that_the_compiler_converts_twice_is_found() -> None:
    made = """
	cvta.param.u64 	%rd4, %rd3;
	cvta.param.u64 	%rd1, %rd2;
	cvta.param.u64 	%rd5, %rd4;
"""
    found = importlib.import_module("smfree.cuda.compile_cuda")._converted_twice
    assert found(made) == "cvta.param.u64 \t%rd5, %rd4;"
    assert found(made.replace("%rd5, %rd4", "%rd5, %rd3")) is None


AFTER_DEBUG = """
from kernels.tma.tensor2d import Tensor2dConfig
from smfree.cuda import CompileError, CudaSource, compile_cuda

compile_cuda(CudaSource("f.cu", options=("--device-debug",), text="__global__ void f() {}"), "sm_100a")
try:
    print(compile_cuda(Tensor2dConfig(4096, 3).source, "sm_100a").ptx.count("cvta.param"))
except CompileError as error:
    print(error)
"""


def test_what_nvrtc_makes_after_a_debug_build_is_right_or_refused(tmp_path: Path) -> None:
    """NVRTC 13.5 converts the address of a map twice for sm_100a once it has compiled with --device-debug."""
    outputs = []
    for code in (AFTER_DEBUG, AFTER_DEBUG.replace('"--device-debug",', "")):
        env = {**os.environ, "SMFREE_CACHE_DIR": str(tmp_path / str(len(outputs)))}
        ran = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        outputs.append(ran.stdout)
    after_debug, alone = outputs
    refused = "made wrong code of tma/tensor2d.cu for sm_100a" in after_debug
    assert refused or after_debug == alone
    assert int(alone) >= 2  # one for each map
