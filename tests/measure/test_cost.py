"""SASS instructions per KiB, read from disassembly whose answer is known."""

from __future__ import annotations

import pytest

from bench.cost import function_text, parse_loops, sass_per_kib, width_bytes

LSU = """
\t.section\t.text.lsu_copy,"ax",@progbits
.L_x_9:
        /*0010*/                   MOV R1, c[0x0][0x28] ;
.L_x_2:
        /*0020*/                   LDG.E.128 R16, desc[UR8][R16.64] ;
        /*0030*/                   LDG.E.128 R12, desc[UR8][R12.64] ;
        /*0040*/                   STS.128 [R46], R16 ;
        /*0050*/                   STS.128 [R46+0x800], R12 ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
.L_x_5:
        /*0070*/                   LDG.E.128 R12, desc[UR8][R12.64] ;
        /*0080*/                   STS.128 [R18], R12 ;
        /*0090*/              @!P3 BRA `(.L_x_5) ;
.L_x_7:
        /*00a0*/                   LDS.128 R12, [R44] ;
        /*00b0*/                   STG.E.128 desc[UR8][R46.64], R12 ;
        /*00c0*/              @!P2 BRA `(.L_x_7) ;
        /*00d0*/              @!P1 BRA `(.L_x_9) ;
        /*00e0*/                   EXIT ;
.L_x_12:
        /*00f0*/                   BRA `(.L_x_12);
\t.section\t.text.other,"ax",@progbits
        /*0000*/                   EXIT ;
"""

TMA = """
.L_x_9:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R21+URZ], R14 ;
        /*0020*/                   UBLKCP.G.S [UR4], [UR8], UR6 ;
.L_x_8:
        /*0030*/                   UBLKCP.S.G [UR8], [UR4], UR6 ;
        /*0040*/               @P0 BRA.U.ANY `(.L_x_8) ;
        /*0050*/              @!P0 BRA `(.L_x_9) ;
"""


def test_inner_loops_of_load_and_store_are_added_and_the_rest_loop_left_out() -> None:
    # loads: 5 instructions move 2 x 512 bytes; stores: 3 instructions move 512 bytes
    assert sass_per_kib(function_text(LSU, "lsu_copy"), 4096) == pytest.approx(5 / 1 + 3 / 0.5)


def test_a_tma_loop_counts_once_and_moves_the_tile() -> None:
    assert sass_per_kib(TMA, 2048) == pytest.approx(5 / 2)


def test_traps_and_uniform_retries_are_no_loops() -> None:
    assert [(loop.start, loop.end) for loop in parse_loops(TMA)] == [(0, 4)]
    assert len(parse_loops(LSU)) == 4


def test_a_kernel_without_a_moving_loop_has_no_number() -> None:
    assert sass_per_kib(function_text(LSU, "other"), 4096) is None
    assert function_text(LSU, "missing") == ""


@pytest.mark.parametrize(
    ("opcode", "width"), [("LDG.E.128", 16), ("LDG.E", 4), ("LDG.E.64.CONSTANT", 8), ("LDG.E.U8", 1)]
)
def test_width_is_in_the_opcode(opcode: str, width: int) -> None:
    assert width_bytes(opcode) == width
