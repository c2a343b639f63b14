"""What the compiler made of the kernels between GPUs: widths, fences, poll loops. Needs no GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from kernels.ipc import barrier
from kernels.ipc.bulk import BulkPullConfig, BulkPushConfig
from kernels.ipc.flag_latency import FlagLatencyConfig
from kernels.ipc.multicast import MulticastConfig
from kernels.ipc.pull import PullConfig
from kernels.ipc.push import PushConfig
from kernels.ipc.signals import SignalLayout
from smfree.cuda import CompileError, CudaSource, ModuleImage, compile_cuda
from smfree.cuda.sass import SassInstruction
from tests.kernels.cases import ASYNC_STEMS, EVERY_ARCH, TMA_ARCHS
from tests.kernels.sass_kit import poll_turns

LAYOUT = SignalLayout(8)
LONGEST_POLL = 16
"""Instructions of a turn: two loads, the L1 flush, two comparisons, and what addresses and branches take."""


@dataclass(frozen=True)
class Case:
    """A kernel, where its instructions exist, and how many barriers over all ranks it has."""

    name: str
    source: CudaSource
    archs: tuple[str, ...] = EVERY_ARCH
    barriers: int = 2
    waits: int = 2


def _gather(config: Any, archs: tuple[str, ...] = EVERY_ARCH) -> Case:
    return Case(config.file.removesuffix(".cu"), config.source(LAYOUT), archs)


PULL, PUSH, MULTICAST = _gather(PullConfig()), _gather(PushConfig()), _gather(MulticastConfig(), TMA_ARCHS)
BULK = [_gather(BulkPushConfig(), TMA_ARCHS), _gather(BulkPullConfig(), TMA_ARCHS)]
BARRIER = Case("barrier", barrier.source(LAYOUT), barriers=1, waits=1)
FLAG = Case("flag-latency", FlagLatencyConfig(data_bytes=2048).source(LAYOUT), barriers=3)
RELAXED = Case("flag-relaxed", FlagLatencyConfig(release=False).source(LAYOUT), barriers=1)
GATHERS = [PULL, PUSH, MULTICAST, *BULK]
CASES = [*GATHERS, BARRIER, FLAG, RELAXED]


@cache
def _image(case: Case, arch: str) -> ModuleImage:
    return compile_cuda(case.source, arch)


def _sass(case: Case, arch: str) -> tuple[SassInstruction, ...]:
    return _image(case, arch).sass().instructions


def _count(case: Case, arch: str, opcode: str) -> int:
    return sum(found.opcode == opcode for found in _sass(case, arch))


def _every(cases: list[Case]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test runs for these, on Hopper and one other architecture in turn; with
    --full-product on all."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        vars(test)["cases"] = cases
        return test

    return mark


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "arch" not in metafunc.fixturenames:
        return
    pairs = []
    for case in vars(metafunc.function)["cases"]:
        others = [arch for arch in case.archs if arch != "sm_90a"]
        if not metafunc.config.getoption("--full-product"):
            others = [others[CASES.index(case) % len(others)]]
        pairs += [(case, arch) for arch in ("sm_90a", *others)]
    metafunc.parametrize(("case", "arch"), pairs, ids=[f"{case.name}-{arch}" for case, arch in pairs])


@_every(CASES)
def test_no_spills_no_calls_and_the_engine_that_it_says(case: Case, arch: str) -> None:
    (facts,) = _image(case, arch).functions.values()
    assert (facts.local_bytes, facts.spill_bytes) == (0, 0)
    stems = {found.stem for found in _sass(case, arch)}
    assert not {"LDL", "STL", "RET"} & stems
    assert ASYNC_STEMS & stems == ({"UBLKCP"} if case in BULK else set())


@_every(CASES)
def test_a_barrier_is_one_membar_and_one_store(case: Case, arch: str) -> None:
    """st.release.sys is MEMBAR.ALL.SYS and a strong store, for all peers in one; ld.acquire.sys needs none.

    flag-latency releases in two places besides, and flag-relaxed in none: its flags are two strong stores.
    """
    assert _count(case, arch, "MEMBAR.ALL.SYS") == case.barriers
    relaxed = 2 if case is RELAXED else 0
    assert _count(case, arch, "STG.E.STRONG.SYS") == case.barriers + relaxed
    assert ("MEMBAR.SC.SYS" in {found.opcode for found in _sass(case, arch)}) == (case is MULTICAST)


@_every(CASES)
def test_a_turn_of_a_wait_is_two_loads_and_one_flush_of_l1(case: Case, arch: str) -> None:
    turns = poll_turns(_sass(case, arch))
    assert len(turns) == case.waits
    for turn in turns:
        assert len(turn) <= LONGEST_POLL
        assert [one.opcode for one in turn if one.stem == "CCTL"] == ["CCTL.IVALL"]
        assert not {"MEMBAR", "ERRBAR", "STG", "BAR"} & {one.stem for one in turn}


@_every([PULL, PUSH, MULTICAST])
def test_bytes_between_gpus_go_in_vectors_of_16_by_batches(case: Case, arch: str) -> None:
    """UNROLL loads in a row, in whole rounds and in the last one: of a pull for its own shard and for its
    peers', of a push with the own dst and without."""
    runs, run = [], 0
    for one in _sass(case, arch):
        if one.opcode == "LDG.E.128":
            run += 1
        elif one.stem == "STG":
            runs, run = [*runs, run], 0
    peers = LAYOUT.world_size - 1
    own, theirs = PullConfig().unroll, PullConfig().unroll // peers * peers
    push = [PushConfig().unroll] * (2 if case is MULTICAST else 4)
    assert sorted(filter(None, runs)) == (sorted([own, own, theirs, theirs]) if case is PULL else push)


@_every([PUSH])
def test_push_loads_a_vector_once_and_stores_it_to_every_peer(case: Case, arch: str) -> None:
    """In place and not, in whole rounds and in the last."""
    unroll, ranks, records = PushConfig().unroll, LAYOUT.world_size, 2
    assert _count(case, arch, "LDG.E.128") == 2 * 2 * unroll
    assert _count(case, arch, "STG.E.128") == 2 * unroll * (ranks - 1 + ranks) + records


@_every(BULK)
def test_bulk_copies_have_one_proxy_fence_behind_the_entry_barrier(case: Case, arch: str) -> None:
    """Only a pull's own shard is copied before: a load, a store, a later load."""
    opcodes = [one.opcode for one in _sass(case, arch)]
    (fence,) = [at for at, opcode in enumerate(opcodes) if opcode == "FENCE.VIEW.ASYNC.G"]
    first_membar = opcodes.index("MEMBAR.ALL.SYS")
    copies = [at for at, opcode in enumerate(opcodes) if opcode.startswith("UBLKCP")]
    before = [at for at in copies if at < first_membar]
    assert len(before) == (0 if case is BULK[0] else 3) and len(copies) - len(before) == 3
    assert first_membar < fence < copies[len(before)]


def test_kernels_of_bulk_copies_and_multicast_do_not_compile_for_sm_80() -> None:
    for case in (*BULK, MULTICAST):
        with pytest.raises(CompileError, match="sm_80"):
            compile_cuda(case.source, "sm_80")
