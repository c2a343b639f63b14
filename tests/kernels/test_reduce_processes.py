"""Reductions between real processes on the GPUs that --device names, which they may share: the bits of every
way, one after the other in one workspace, over both backings."""

from __future__ import annotations

from kernels.ipc.slabs import Backing
from kernels.reduce import allreduce, reduce_scatter
from kernels.reduce.elements import Element
from tests.kernels.group_kit import EMULATED
from tests.kernels.reduce_bodies import CASES, Case, reduce_each_way
from tests.nodes import spawn_ranks


def wrong(node: str, num_ranks: int, backing: Backing, cases: list[Case]) -> dict[tuple[int, str, str], str]:
    """By rank, collective and way: what was not right."""
    found = spawn_ranks(node, reduce_each_way, num_ranks, backing, cases, timeout_s=200)
    assert all(list(of_rank) == [case[:2] for case in cases] for of_rank in found)
    return {
        (rank, *place): said
        for rank, of_rank in enumerate(found)
        for place, said in of_rank.items()
        if said != "right"
    }


def test_three_processes_reduce_each_way(node: str) -> None:
    """A way that is not open is an error, save the switch's on a machine without one. By hand: 2, 4, 8."""
    found = wrong(node, 3, Backing.VMM, CASES)
    assert {place: said for place, said in found.items() if node == EMULATED or place[2] != "nvls"} == {}


def test_two_processes_that_share_a_gpu_reduce_over_cuda_ipc(node: str) -> None:
    """Stores, one barrier, copies. By hand: every way, of which the switch's must say that it cannot."""
    one = f"{EMULATED}:0" if node == EMULATED else node
    cases = [
        case for case in CASES if case[:2] in {("allreduce", way) for way in ("ring.sm", "oneshot", "ce")}
    ]
    assert len(cases) == 3
    assert wrong(one, 2, Backing.IPC, cases) == {}


def test_every_way_and_every_element_is_among_the_cases() -> None:
    for name, ways in (("allreduce", allreduce.WAYS), ("reduce_scatter", reduce_scatter.WAYS)):
        assert [way for collective, way, _ in CASES if collective == name] == list(ways)
    assert {element for _, _, element in CASES} == set(Element)
