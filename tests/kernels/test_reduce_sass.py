"""What the compiler made of the reductions between GPUs: widths, sums, fences, poll loops. Needs no GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.ipc.signals import SignalLayout
from kernels.reduce.direct import OneshotConfig, TwoshotConfig
from kernels.reduce.elements import Element
from kernels.reduce.nvls import NVLS
from kernels.reduce.ring import RingConfig
from kernels.reduce.ring_bulk import RING_BULK
from kernels.reduce.tree import TreeConfig
from kernels.reduce.workspace import Workspace
from smfree.cuda import ModuleImage, compile_cuda
from tests.kernels.cases import ASYNC_STEMS, EVERY_ARCH, TMA_ARCHS
from tests.kernels.sass_kit import poll_turns

RANKS = 8
LONGEST_POLL = 16
"""Instructions of a turn, as of every wait between GPUs (test_ipc_sass.py)."""


@dataclass(frozen=True)
class Case:
    """A kernel, and what it has: ``sums``, (sources, targets) of every sum of a piece; ``signals``, as many
    waits, and for each of these a record."""

    name: str
    config: Any
    sums: tuple[tuple[int, int], ...]
    defines: tuple[tuple[str, int], ...] = ()
    signals: int = 1
    archs: tuple[str, ...] = EVERY_ARCH


RING_SUMS = ((1, 1), (2, 1), (2, 2), (1, 1))  # own part, own and what came, the last of those, complete ones
RING = Case("ring", RingConfig(), RING_SUMS, (("SCATTER_ONLY", 0),))
SCATTER = Case("ring-scatter", RingConfig(), ((1, 1), (2, 1), (2, 1)), (("SCATTER_ONLY", 1),), signals=2)
BULK = Case("ring-bulk", RING_BULK.config(), RING_SUMS, (("SCATTER_ONLY", 0),), archs=TMA_ARCHS)
TREE = Case("tree", TreeConfig(), ((3, 3), (2, 2), (3, 1), (2, 1), (1, 1), (1, 2), (1, 1)))
ONESHOT = Case("oneshot", OneshotConfig(), ((1, RANKS - 1), (RANKS, 1)), (("SHOT_BYTES", 1 << 18),))
TWOSHOT = Case("twoshot", TwoshotConfig(), ((1, 1), (RANKS, RANKS)), (("SCATTER_ONLY", 0),), signals=2)
SWITCH = Case("nvls", NVLS.config(), ((1, 1),), signals=2, archs=TMA_ARCHS)
CASES = [RING, SCATTER, BULK, TREE, ONESHOT, TWOSHOT, SWITCH]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each kernel for one element and architecture in turn, the ring for every element; with --full-product
    for all."""
    if "arch" not in metafunc.fixturenames:
        return
    rows = [(case, element, arch) for case in CASES for element in Element for arch in case.archs]
    if not metafunc.config.getoption("--full-product"):
        few = [(RING, element) for element in Element]
        few += [(case, list(Element)[turn % 3]) for turn, case in enumerate(CASES) if case is not RING]
        rows = [
            (case, element, case.archs[turn % len(case.archs)]) for turn, (case, element) in enumerate(few)
        ]
    ids = [f"{case.name}-{element.define}-{arch}" for case, element, arch in rows]
    metafunc.parametrize(("case", "element", "arch"), rows, ids=ids)


@cache
def _image(case: Case, element: Element, arch: str) -> ModuleImage:
    space: Any = SimpleNamespace(lane=SimpleNamespace(layout=SignalLayout(RANKS, 640)), channels=128)
    known: Any = SimpleNamespace(defines=Workspace.defines.fget(space))  # type: ignore[attr-defined]
    return compile_cuda(case.config.source(known, element, dict(case.defines)), arch)


def _counts(case: Case, element: Element, arch: str) -> Counter[str]:
    return Counter(one.opcode for one in _image(case, element, arch).sass().instructions)


def _vectors(case: Case) -> int:
    """Of a piece's sum, in whole rounds and in the last one, which is the same where nothing is unrolled."""
    unroll: int = case.config.unroll
    return 2 * unroll if unroll > 1 else 1


def test_nothing_spills_and_bytes_go_through_the_engine_that_it_says(
    case: Case, element: Element, arch: str
) -> None:
    (facts,) = _image(case, element, arch).functions.values()
    assert (facts.local_bytes, facts.spill_bytes) == (0, 0)
    stems = {one.stem for one in _image(case, element, arch).sass().instructions}
    assert not {"LDL", "STL", "RET"} & stems
    assert ASYNC_STEMS & stems == ({"UBLKCP"} if case is BULK else set())
    assert ("LDGMC" in stems) == (case is SWITCH)


def test_sums_load_and_store_vectors_of_16_bytes(case: Case, element: Element, arch: str) -> None:
    """Every source once, and every target once for all sources; a record of a wait is a vector, too."""
    found = _counts(case, element, arch)
    vectors = _vectors(case)
    assert found["LDG.E.128"] == vectors * sum(sources for sources, _ in case.sums)
    switch = case.config.unroll if case is SWITCH else 0  # to all ranks through one address
    assert found["STG.E.128"] == vectors * sum(targets for _, targets in case.sums) + case.signals + switch


def test_halves_are_added_in_float32_and_packed_by_twos(case: Case, element: Element, arch: str) -> None:
    """Vectors by pairs, single elements at the ends of a piece. Beside the switch threads add only these."""
    found = _counts(case, element, arch)
    added = [sources for sources, _ in case.sums if sources > 1]
    elements = _vectors(case) * 16 // element.bytes
    adds = sum(sources - 1 for sources in added) * (elements + 1)
    packs = len(added) * (elements // 2 + 1)
    if case is SWITCH:
        adds, packs = RANKS - 1, 1
    names = {Element.F32: set(), Element.F16: {"F2FP"}, Element.BF16: {"F2FP", "BF16"}}[element]
    packed = {name: n for name, n in found.items() if "PACK_AB" in name}
    assert all({"F2FP", "BF16"} & set(name.split(".")) == names for name in packed)
    if case is BULK:  # whose tiles are added besides, in as many steps at a time as the compiler likes
        assert found["FADD"] > adds and (element is Element.F32 or sum(packed.values()) > packs)
    else:
        assert (found["FADD"], sum(packed.values())) == (adds, packs if names else 0)
    assert not any(name.startswith("F2F.") for name in found)


def test_a_signal_is_one_membar_and_one_store(case: Case, element: Element, arch: str) -> None:
    """For both neighbours or all peers in one."""
    found = _counts(case, element, arch)
    assert found["MEMBAR.ALL.SYS"] == found["STG.E.STRONG.SYS"] == case.signals
    assert found["MEMBAR.SC.SYS"] == (2 if case is SWITCH else 0)  # of fence.proxy.alias


def test_a_turn_of_a_wait_is_two_loads_and_one_flush_of_l1(case: Case, element: Element, arch: str) -> None:
    turns = poll_turns(_image(case, element, arch).sass().instructions)
    assert len(turns) == case.signals
    for turn in turns:
        assert len(turn) <= LONGEST_POLL
        assert [one.opcode for one in turn if one.stem == "CCTL"] == ["CCTL.IVALL"]
        assert not {"MEMBAR", "ERRBAR", "STG", "BAR"} & {one.stem for one in turn}
