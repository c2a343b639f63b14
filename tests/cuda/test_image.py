"""Reading PTX, cubins and disassembly."""

from __future__ import annotations

from pathlib import Path

import pytest

from smfree.cuda import ToolMissingError, compile_cuda
from smfree.cuda.image import cubin_facts, entry_points
from smfree.cuda.sass import disassembly, parse_disassembly
from tests.cuda.sources import CLUSTER, COPY, source


def test_parameters_in_both_compilers_spelling() -> None:
    ptx = """
.version 8.8
// .entry commented_out ( .param .u64 x ) {
.visible .entry one(
    .param .u64 .ptr .global .align 1 one_param_0,
    .param .u32 one_param_1, .param .f64 one_param_2,
    .param .align 64 .b8 one_param_3[128],
    .param .b8 one_param_4
)
.reqntid 128
{
ret;
}
.entry two() .maxntid 64, 2 .reqnctapercluster 2, 1, 1 { ret; }
.func helper(.param .u32 p) { ret; }
.entry three { ret; }
"""
    found = entry_points(ptx)
    assert list(found) == ["one", "two", "three"]
    shown = [(p.kind, p.size_bytes, p.align, p.offset, p.is_pointer) for p in found["one"].params]
    assert shown == [
        ("u", 8, 8, 0, True),
        ("u", 4, 4, 8, False),
        ("f", 8, 8, 16, False),
        ("b", 128, 64, 64, False),
        ("b", 1, 1, 192, False),
    ]
    assert found["one"].param_bytes == 193
    assert found["one"].required_block == (128, 1, 1) and found["one"].max_threads == 128
    assert found["two"].max_threads == 128 and found["two"].cluster_dims == (2, 1, 1)
    assert found["three"].params == () and found["three"].param_bytes == 0


def test_unknown_parameter_type_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"without a type smfree knows: '\.param \.texref t'"):
        entry_points(".entry f(.param .texref t) { ret; }")


def test_compiled_in_cluster_is_known() -> None:
    assert compile_cuda(source(CLUSTER), "sm_90a").functions["paired"].cluster_dims == (2, 1, 1)


def test_bytes_that_are_no_cubin_are_refused() -> None:
    with pytest.raises(ValueError, match="64-bit ELF"):
        cubin_facts(b"\x7fELF\x01" + bytes(100))


def test_disassembly_keeps_order_guards_and_operands() -> None:
    text = """
	.section	.text.f,"ax",@progbits
f:
.text.f:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/             @UP1 UIADD3 UR4, UP0, UR4, UR6, URZ ;
        /*0030*/                   BRA `(.L_x_1);
        /*0040*/                   NOP;
        /*0050*/                   NOP;
	.section	.text.g,"ax",@progbits
        /*0000*/                   EXIT ;
"""
    functions = parse_disassembly(text)
    f = functions["f"].instructions
    assert [(i.address, i.guard, i.opcode) for i in f] == [
        (0, "", "LDC"),
        (16, "@!P0", "LDG.E.128.CONSTANT"),
        (32, "@UP1", "UIADD3"),
        (48, "", "BRA"),
    ]
    assert f[1].operands == "R4, desc[UR4][R2.64]" and f[1].stem == "LDG"
    assert functions["g"].counts() == {"EXIT": 1}


def test_every_disassembled_instruction_of_a_real_kernel_is_parsed() -> None:
    image = compile_cuda(source(COPY), "sm_90a")
    listed = [line for line in disassembly(image.cubin, image.arch).splitlines() if "/*0" in line]
    padding = sum(line.split("*/")[1].strip().startswith("NOP") for line in listed)
    parsed = image.sass().instructions
    assert len(parsed) + padding == len(listed) and len(parsed) > 10


def test_missing_disassembler_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smfree.cuda.sass.find_disassemblers", list)
    image = compile_cuda(source(COPY.replace("copy_words", "never_disassembled")), "sm_90a")
    with pytest.raises(ToolMissingError, match="install nvidia-cuda-nvdisasm"):
        image.sass()


def test_disassembler_that_cannot_read_the_cubin_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolMissingError, match=r"SASS of sm_90a needs.*tried .*nvdisasm"):
        disassembly(b"not a cubin", "sm_90a")


def test_asking_for_sass_of_an_unknown_kernel_lists_them() -> None:
    image = compile_cuda(source(COPY), "sm_90a")
    with pytest.raises(KeyError, match="copy_words"):
        image.sass("other")


def test_second_disassembly_comes_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    image = compile_cuda(source(COPY), "sm_90a")
    first = image.sass()
    monkeypatch.setattr("smfree.cuda.sass.find_disassemblers", list)
    assert image.sass() == first


def test_disassembling_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to clean up: a process killed while the tool runs cannot leave its cubin in /tmp."""
    tool = tmp_path / "slow"
    tool.write_text(f"#!/bin/sh\ncat $2 > {tmp_path}/seen; ls {tmp_path}/tmp > {tmp_path}/listed; exit 1\n")
    tool.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr("smfree.cuda.sass.find_disassemblers", lambda: [tool])
    with pytest.raises(ToolMissingError):
        disassembly(b"some bytes of a cubin", "sm_90a")
    assert (tmp_path / "seen").read_bytes() == b"some bytes of a cubin"
    assert (tmp_path / "listed").read_text() == ""
