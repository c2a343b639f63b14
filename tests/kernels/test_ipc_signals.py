"""Signals between ranks: the words they write, epochs that are never reset (D19), wrap-around, aborts."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.ipc import barrier
from kernels.ipc.barrier import stream_barrier
from kernels.ipc.group import Group
from kernels.ipc.signals import SignalLayout, Step
from smfree.cuda import compile_cuda
from tests.kernels.ipc_kit import control_words, epochs, opened_group, records, set_epochs, words

WRAP = 2**32


def barrier_of(group: Group, *ranks: int) -> None:
    """Launch the barrier on some ranks only."""
    for rank in ranks:
        member = group.member(rank)
        kernel = member.device.compile(barrier.source(group.layout)).kernel()
        args = (group.lane.control(rank), np.uint32(rank))
        kernel.launch(1, barrier.THREADS, args, stream=member.stream)


def signal_as(group: Group, writer: int, reader: int, epoch: int) -> None:
    """Write the word of slot 0 that rank ``writer`` signals to ``reader``."""
    at = group.layout.word(0, writer)
    word = group.lane.pad(reader).bytes_view(at, 4).view(np.uint32)
    stream = group.member(reader).stream
    word.copy_from(np.array([epoch % WRAP], np.uint32), stream=stream)


@pytest.mark.parametrize(("world_size", "slots"), [(1, 1), (3, 5), (8, 512), (32, 33)])
def test_the_structs_of_signals_cuh_lie_as_signals_py_says(world_size: int, slots: int) -> None:
    """The static_asserts of signals.cuh, for sizes that leave padding everywhere."""
    assert compile_cuda(barrier.source(SignalLayout(world_size, slots)), "sm_90a").cubin


@pytest.mark.parametrize("epoch", [0, 41, WRAP - 1, WRAP // 2 - 1])
def test_a_rank_whose_peers_have_signalled_writes_their_words_and_goes_on(epoch: int, node: str) -> None:
    """Alone, also across the wrap of the word and of its sign; its own word stays as it is."""
    with opened_group(3, node=node) as group:
        set_epochs(group, epoch)
        for peer in (0, 2):
            signal_as(group, peer, 1, epoch + 1)
        barrier_of(group, 1)
        group.member(1).stream.synchronize()
        layout = group.layout
        for reader in range(3):
            word = words(group.lane.pad(reader))[layout.word(0, 1) // 4]
            assert word == (epoch if reader == 1 else epoch + 1) % WRAP
        assert epochs(group, 1) == [(epoch + 1) % WRAP] + 7 * [epoch % WRAP]
        assert epochs(group, 0) == 8 * [epoch % WRAP]


def test_a_peer_may_be_one_barrier_ahead(node: str) -> None:
    with opened_group(2, node=node) as group:
        signal_as(group, 0, 1, 2)
        barrier_of(group, 1)
        group.member(1).stream.synchronize()
        assert epochs(group, 1)[0] == 1


@pytest.mark.parametrize("epoch", [0, WRAP - 1])
def test_an_aborted_wait_leaves_a_record_per_missing_peer_and_keeps_the_epoch(epoch: int, node: str) -> None:
    with opened_group(4, node=node) as group:
        set_epochs(group, epoch)
        signal_as(group, 3, 1, epoch + 1)
        control_words(group, 1, 0, 1).copy_from(np.array([1], np.uint32), stream=group.member(1).stream)
        barrier_of(group, 1)
        group.member(1).stream.synchronize()
        wanted = [int(Step.ENTRY), (epoch + 1) % WRAP, epoch % WRAP]
        assert records(group, 1, 0).tolist() == [wanted, [0, 0, 0], wanted, [0, 0, 0]]
        assert epochs(group, 1)[0] == epoch % WRAP


def test_an_abort_does_not_end_a_wait_that_is_over(node: str) -> None:
    with opened_group(2, node=node) as group:
        signal_as(group, 1, 0, 1)
        control_words(group, 0, 0, 1).copy_from(np.array([1], np.uint32), stream=group.member(0).stream)
        barrier_of(group, 0)
        group.member(0).stream.synchronize()
        assert epochs(group, 0)[0] == 1
        assert not records(group, 0, 0).any()


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_barriers_in_a_row_take_every_rank_on_by_one_each(num_ranks: int, node: str) -> None:
    with opened_group(num_ranks, node=node) as group:
        set_epochs(group, WRAP - 2)
        for _ in range(3):
            stream_barrier(group)
        group.wait(60)
        assert [epochs(group, rank)[0] for rank in range(num_ranks)] == num_ranks * [1]
