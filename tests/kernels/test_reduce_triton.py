"""The Triton twin of the ring: the bits of ring.sm under several schedules, and the instructions it says."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernels.common import ConfigError, OperandError
from kernels.ipc.group import Group
from kernels.ipc.signals import SignalLayout
from kernels.ipc.wait import CollectiveTimeout
from kernels.reduce.allreduce import allreduce
from kernels.reduce.elements import Element
from kernels.reduce.message import all_reduce_message
from kernels.reduce.order import ring_sum
from kernels.reduce.ring import RingConfig
from kernels.reduce.workspace import Workspace
from smfree.cuda import Path, triton_unavailable
from smfree.cuda.compile_triton import compile_triton
from tests.kernels.ipc_kit import opened_group

pytestmark = pytest.mark.skipif(triton_unavailable() is not None, reason=str(triton_unavailable()))

STALE = 0xEE
SMALL = {"ctas": 2, "threads": 32, "unroll": 1}
"""Pieces of 512 bytes in two slots."""
CALLS = 3


def workspace(group: Group) -> Workspace:
    return Workspace(group, scratch_bytes=1 << 14, oneshot_bytes=0, channels=2)


def inputs(num_ranks: int, count: int, element: Element) -> list[Any]:
    """Normal numbers: the bits that each rank gives."""
    values = np.random.default_rng(num_ranks).standard_normal((num_ranks, count)).astype(np.float32)
    return [element.narrow(row) for row in values]


def twin(
    space: Workspace, dst: Any, src: Any, element: Element, only: int | None = None, **config: Any
) -> None:
    """Queue one call, or what rank ``only`` would queue of it."""
    from kernels.reduce.ring_triton import RING_TRITON, TritonRingConfig

    message = all_reduce_message(space, dst, src, element)
    chosen = TritonRingConfig(**{**SMALL, **config})
    if only is None:
        RING_TRITON.run(message, chosen, "the twin")
        return
    kernels = [RING_TRITON.prepare(member, message, chosen) for member in space.group.members]
    RING_TRITON.launch(space.group.member(only), message, chosen, kernels[only])


@pytest.mark.parametrize(
    ("num_ranks", "pieces", "element", "schedule"),
    [
        (2, 5, Element.F32, "min-pc"),
        (2, 3, Element.BF16, "async-latest"),
        (3, 3, Element.F16, "random"),
        (3, 2, Element.BF16, "producer-ahead"),
        (4, 1, Element.BF16, "timed"),
    ],
    ids=lambda value: value.name if isinstance(value, Element) else str(value),
)
def test_the_twin_has_the_bits_of_ring_sm_before_and_after_it(
    num_ranks: int, pieces: int, element: Element, schedule: str, node: str
) -> None:
    """In turn with ring.sm, in place and not, without a barrier between them; the last piece is a part."""
    chunk = pieces * 512 // element.bytes - 16
    given = inputs(num_ranks, num_ranks * chunk, element)
    want = ring_sum(given, element)
    ring = RingConfig(ctas=2, threads=64, unroll=1, piece_bytes=256)
    with opened_group(num_ranks, schedule, 1, node=node) as group, workspace(group) as space:
        dst = [group.symmetric(want.nbytes, f"dst {call}") for call in range(CALLS)]
        src = [member.device.asarray(given[member.rank]) for member in group.members]
        for member in group.members:
            for call in range(CALLS):
                own = dst[call].array(member.rank)
                if call == 0:
                    own.fill(STALE, stream=member.stream)
                else:
                    own.copy_from_device(src[member.rank].bytes_view(), stream=member.stream)
        for call in range(CALLS):
            operands = src if call == 0 else None
            if call % 2 == 0:
                twin(space, dst[call], operands, element)
            else:
                allreduce(space, dst[call], operands, dtype=element, way="ring.sm", config=ring)
        group.wait(60)
        for call in range(CALLS):
            for member in group.members:
                got = dst[call].array(member.rank).numpy().view(element.bits)
                np.testing.assert_array_equal(got, want)


def test_an_atomic_that_signals_does_not_overtake_what_it_releases() -> None:
    """Five ranks whose clocks are apart. On an emulated node an atomic is done at once, while stores to a
    peer take their time."""
    given = inputs(5, 80, Element.F32)
    with opened_group(5, "timed", 1) as group, workspace(group) as space:
        dst = group.symmetric(given[0].nbytes, "dst")
        for member in group.members:
            dst.array(member.rank).copy_from(given[member.rank].view(np.uint8), stream=member.stream)
        twin(space, dst, None, Element.F32, threads=64)
        group.wait(60)
        for member in group.members:
            got = dst.array(member.rank).numpy().view(np.uint32)
            np.testing.assert_array_equal(got, ring_sum(given, Element.F32))


def test_sums_at_the_edges_of_halves_are_rounded_once(node: str) -> None:
    """Ties, subnormals, signed zeros and overflow, which add.f16x2 and add.bf16x2 must round as float32 and a
    conversion do."""
    for element in (Element.F16, Element.BF16):
        rng = np.random.default_rng(7)
        given = [rng.integers(0, 2**16, 1024, dtype=np.uint16) for _ in range(2)]
        near = given[0][:512] ^ np.uint16(0x8000) ^ rng.integers(0, 4, 512, dtype=np.uint16)
        given[1][:512] = near  # nearly cancel
        finite = ~np.isnan(element.widen(ring_sum(given, element)))
        with opened_group(2, node=node) as group, workspace(group) as space:
            dst = group.symmetric(2048, "dst")
            src = [member.device.asarray(given[member.rank]) for member in group.members]
            twin(space, dst, src, element)
            group.wait(60)
            for member in group.members:
                got = dst.array(member.rank).numpy().view(np.uint16)
                np.testing.assert_array_equal(got[finite], ring_sum(given, element)[finite])
                assert np.isnan(element.widen(got[~finite])).all()


def test_a_rank_that_never_calls_is_named_with_the_step(node: str) -> None:
    """Rank 1 does not come: rank 2 gets nothing, so rank 3 gets no sum from it, and rank 0 has filled both
    slots of rank 1."""
    with opened_group(4, node=node) as group, workspace(group) as space:
        dst = group.symmetric(4 * 128 * 4, "dst")
        src = [member.device.asarray(np.ones(4 * 128, np.float32)) for member in group.members]
        for rank in (0, 2, 3):
            twin(space, dst, src, Element.F32, rank, ctas=1)
        with pytest.raises(CollectiveTimeout) as caught:
            group.wait(0.5)
        waits = {(wait.rank, wait.peer, wait.step) for wait in caught.value.waits}
        assert waits == {
            (2, 1, "reduce-scatter step 1"),
            (3, 2, "reduce-scatter step 2"),
            (0, 1, "room for step 2"),
        }


@pytest.mark.parametrize(
    ("count", "shift", "what"),
    [
        (100, 0, "16 elements for each rank (got 100, 4 more than a multiple of 32)"),
        (32, 4, "a src aligned to 16"),
    ],
)
def test_what_the_twin_does_not_take_is_refused(count: int, shift: int, what: str) -> None:
    with opened_group(2) as group, workspace(group) as space:
        dst = group.symmetric(4 * count, "dst")
        src = [
            member.device.empty(4 * count + shift).bytes_view(shift, 4 * count) for member in group.members
        ]
        with pytest.raises(OperandError, match=f"(?=.*{re.escape(what)})(?=.*use way 'ring.sm')"):
            twin(space, dst, src, Element.F32)


def test_its_signals_are_atomics_which_pcie_does_not_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_group(2) as group, workspace(group) as space, group.symmetric(128, "dst") as dst:
        for member in group.members:
            dst.array(member.rank).fill(0, stream=member.stream)
        twin(space, dst, None, Element.F32)  # over NVLink
        group.wait()
        monkeypatch.setattr(group, "path", Path.PCIE)
        with pytest.raises(ConfigError, match=r"signals are atomics.*PCIe.*use way 'ring.sm'"):
            twin(space, dst, None, Element.F32)


def test_pieces_are_powers_of_two() -> None:
    from kernels.reduce.ring_triton import TritonRingConfig

    for wrong in ({"threads": 96}, {"unroll": 3}, {"num_slots": 1}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} must be"):
            TritonRingConfig(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("element", Element, ids=lambda element: element.name)
def test_a_step_moves_vectors_and_signals_by_two_atomics(element: Element) -> None:
    """Loads of step 0, of a sum's two sources and of a complete chunk; stores to the slot, of a sum to the
    slot, to dst and the next dst, of a complete chunk."""
    from kernels.reduce.ring_triton import TritonRingConfig

    slots = {"SIGNAL_RING_DATA": 2, "SIGNAL_RING_ROOM": 4}
    space: Any = SimpleNamespace(lane=SimpleNamespace(layout=SignalLayout(4, 8)), defines=slots)
    image = compile_triton(TritonRingConfig(threads=64, unroll=2).source(space, element), (9, 0))
    (facts,) = image.functions.values()
    assert (facts.local_bytes, facts.spill_bytes) == (0, 0)
    found = Counter(re.findall(r"\b(?:ld|st|atom|add|fma|cvt)\.[\w.:]*", image.ptx))
    assert found["ld.global.v4.b32"] == 4 * 2 and found["st.global.v4.b32"] == 5 * 2
    assert found["atom.global.sys.release.exch.b32"] == 2
    waits, loops, loads = 2, 2, 2  # a wait looks once before its loop
    assert found["ld.acquire.sys.global.u32"] == waits * loops * loads
    addition = {Element.F32: "add.f32", Element.F16: "add.f16x2", Element.BF16: "add.bf16x2"}[element]
    assert found[addition] == 2 * 4
    assert not any(name.startswith("fma") for name in found)
