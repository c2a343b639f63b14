"""What the compiler made of each kernel, on every architecture that has its instructions. Needs no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kernels.chain import Leg
from kernels.lsu.chain import LsuChainConfig
from kernels.lsu.copy import LsuCopyConfig
from kernels.tma.chain_bulk import BulkChainConfig
from smfree.cuda import CompileError, compile_cuda
from smfree.cuda.sass import SassInstruction, find_disassemblers
from tests.kernels.cases import ASYNC_STEMS, CASES, Case, compiled

WIDTHS = {4: "", 8: ".64", 16: ".128", 32: ".256"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of ``case`` and ``arch`` runs for all kernels, or those that its name speaks of."""
    if {"case", "arch"} <= set(metafunc.fixturenames):
        pairs = compiled(everywhere=metafunc.config.getoption("--full-product"))
        name = metafunc.function.__name__
        if name.startswith("test_lsu_copy"):
            pairs = [(case, arch) for case, arch in pairs if isinstance(case.config, LsuCopyConfig)]
        elif name.startswith("test_chain"):
            pairs = [(case, arch) for case, arch in pairs if "chain" in case.name]
        metafunc.parametrize(("case", "arch"), pairs, ids=[f"{case.name}-{arch}" for case, arch in pairs])


def test_no_spills_and_no_local_memory(case: Case, arch: str) -> None:
    image = case.image(arch)
    (facts,) = image.functions.values()
    assert (facts.local_bytes, facts.spill_bytes) == (0, 0)
    assert not {"LDL", "STL"} & case.sass(arch).stems().keys()


def test_no_function_is_called(case: Case, arch: str) -> None:
    """Everything is inlined. (A CALL to a label of the kernel itself, which nothing returns from, is how
    ptxas writes the back edge of a loop with diverged warps for sm_80.)"""
    found = case.sass(arch).instructions
    assert not [one for one in found if one.stem == "RET"]
    assert not [one.operands for one in found if one.stem == "CALL" and "(.L_x_" not in one.operands]


def test_each_engine_uses_its_own_instructions_and_no_other_engine(case: Case, arch: str) -> None:
    assert ASYNC_STEMS & case.sass(arch).stems().keys() == case.async_stems


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_ptxas_assembles_the_ptx_that_the_emulator_runs(case: Case, tmp_path: Path) -> None:
    arch = case.archs[-1]
    ptx = tmp_path / "kernel.ptx"
    ptx.write_text(case.image(arch).ptx)
    done = subprocess.run(
        [_ptxas(), f"-arch={arch}", "-o", str(tmp_path / "kernel.cubin"), str(ptx)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_lsu_copy_moves_the_width_it_claims(case: Case, arch: str) -> None:
    config = case.config
    width = WIDTHS[config.vector_bytes]
    found = case.sass(arch).instructions
    loads = [i.opcode for i in found if i.stem == "LDG" and ".U8" not in i.opcode]
    stores = [i.opcode for i in found if i.stem == "STG" and ".U8" not in i.opcode]
    assert len(loads) == len(stores) == config.unroll + 1, "one batch, and one vector for the rest of a tile"
    for opcode in loads + stores:
        assert _width(opcode) == width, opcode
    constant = [".CONSTANT" in opcode for opcode in loads]
    assert all(constant) if config.read_only else not any(constant)


def test_lsu_copy_has_unroll_loads_in_flight_before_the_first_use(case: Case, arch: str) -> None:
    found = case.sass(arch).instructions
    assert _runs(found, load="LDG", use="STS")[0] == case.config.unroll


def test_chain_moves_its_tiles_between_the_two_clock_reads(case: Case, arch: str) -> None:
    found = list(case.sass(arch).instructions)
    clocks = [at for at, i in enumerate(found) if i.stem in ("CS2R", "CS2UR") and "SR_CLOCK" in i.operands]
    assert len(clocks) == 2
    begin, end = clocks
    moved = {i.stem for i in found[begin:end]}
    loads = {"lsu": {"LDG", "STS"}, "cp.async": {"LDGSTS"}, "bulk": {"UBLKCP"}, "tensor": {"UTMALDG"}}
    stores = {"lsu": {"STG"}, "cp.async": {"STG"}, "bulk": {"UBLKCP"}, "tensor": {"UTMASTG"}}
    engine = next(name for name in loads if case.name.startswith(name))
    if case.config.leg is not Leg.STORE:
        assert loads[engine] <= moved
    if case.config.leg is not Leg.LOAD:
        assert stores[engine] <= moved
    assert {"LDS", "BAR"} <= moved


@pytest.mark.parametrize("leg", list(Leg))
def test_every_chain_ends_its_steps_with_the_same_barriers(leg: Leg) -> None:
    """Matched work: the timed loops of all engines have equally many __syncthreads."""
    counts = {}
    for case in CASES:
        if "chain" in case.name and case.config.leg is leg:
            instructions = list(case.sass("sm_90a").instructions)
            begin, end = [i for i, found in enumerate(instructions) if "SR_CLOCK" in found.operands]
            counts[case.name] = sum(found.stem == "BAR" for found in instructions[begin:end])
    assert set(counts.values()) == {2 if leg is Leg.COPY else 1}, counts


def test_lsu_chain_completes_its_stores_at_gpu_scope_and_the_tma_chain_its_writes() -> None:
    lsu = compile_cuda(LsuChainConfig(4096, 128, Leg.STORE).source, "sm_90a")
    tma = compile_cuda(BulkChainConfig(4096, 128, Leg.STORE).source, "sm_90a")
    assert "fence.acq_rel.gpu;" in lsu.ptx
    assert "cp.async.bulk.wait_group 0;" in tma.ptx and "wait_group.read" not in tma.ptx


def test_wide_vectors_do_not_compile_before_sm_100() -> None:
    with pytest.raises(CompileError, match=r"sm_90a"):
        compile_cuda(LsuCopyConfig(16384, 128, 32).source, "sm_90a")


def test_tma_kernels_do_not_compile_for_sm_80() -> None:
    with pytest.raises(CompileError, match=r"sm_80"):
        compile_cuda(BulkChainConfig(4096).source, "sm_80")


def _width(opcode: str) -> str:
    return next((w for w in (".64", ".128", ".256") if opcode.endswith(w) or f"{w}." in opcode), "")


def _runs(found: tuple[SassInstruction, ...], *, load: str, use: str) -> list[int]:
    """How many loads precede each first use, counted from the use before."""
    runs, loads = [], 0
    for instruction in found:
        if instruction.stem == load and ".U8" not in instruction.opcode:
            loads += 1
        elif instruction.stem == use and loads:
            runs.append(loads)
            loads = 0
    return runs


def _ptxas() -> str:
    for nvdisasm in find_disassemblers():
        beside = nvdisasm.with_name("ptxas")
        if beside.exists():
            return str(beside)
    pytest.skip("ptxas comes with nvidia-cuda-nvcc (extra dev), which is not installed")
