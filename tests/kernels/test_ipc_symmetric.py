"""Symmetric memory: one offset on every rank, addresses that reach it, what a rank must not do with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernels.ipc.errors import GroupError, PoolError
from kernels.ipc.group import Group
from kernels.ipc.slabs import Backing
from kernels.ipc.symmetric import Symmetric
from tests.kernels.group_kit import joined, local_group, need, random_bytes

IN_PROCESS = [Backing.PEER, Backing.VMM]


@pytest.mark.parametrize("backing", IN_PROCESS)
def test_a_buffer_has_one_offset_and_every_rank_reaches_it(backing: Backing, node: str) -> None:
    """What rank 1 copies to its address for rank 0 is in rank 0's array, and nothing beside it changes."""
    with local_group(2, backing=backing, node=node) as group:
        before = group.symmetric(100, "before")
        buffer = group.symmetric(1000, "buffer")
        after = group.symmetric(10, "after")
        parts = [(before, 1), (after, 3)]
        for part, byte in parts:
            part.array(0).fill(byte)
        data = random_bytes(1000, 1)
        writer = group.member(1).device
        writer.copy(buffer.peer(1, 0), writer.asarray(data))
        writer.synchronize()
        assert (buffer.array(0).numpy() == data).all()
        assert all((part.array(0).numpy() == byte).all() for part, byte in parts)
        for rank in (0, 1):
            pointers = buffer.pointers(rank)
            assert pointers[rank] == buffer.array(rank).ptr
            assert pointers == tuple(buffer.peer(rank, owner).ptr for owner in (0, 1))
            assert {pointer % 256 for pointer in pointers} == {0}
        assert group.pool.backing.startswith(str(backing))


def test_without_a_choice_a_process_takes_what_multicasts() -> None:
    with local_group(2) as group:
        assert group.pool.backing == "virtual memory management: the first choice"
        assert group.multicast_reason is None
    with local_group(2, "emu:a100") as group:
        assert group.pool.backing.startswith("peer access in one process: ")
        assert "has no multicast" in str(group.multicast_reason)


def test_a_multicast_address_has_the_buffers_offset(node: str) -> None:
    with local_group(2, node=node) as group:
        need("multicast", group, node)
        buffer = group.symmetric(4096, "buffer")
        base, part = buffer.multicast(0), buffer.bytes_view(48, 16)
        assert base is not None and part.multicast(0) == base + 48
    with local_group(2, backing=Backing.PEER, node=node) as group:
        assert group.symmetric(4096, "buffer").multicast(0) is None


def test_a_view_is_a_part_on_every_rank(node: str) -> None:
    with local_group(2, node=node) as group:
        buffer = group.symmetric(64, "buffer")
        part = buffer.bytes_view(16, 8).bytes_view(3)
        assert (part.nbytes, part.label) == (5, "buffer")
        assert part.pointers(1) == tuple(pointer + 19 for pointer in buffer.pointers(1))
        for offset, nbytes in ((60, 5), (-1, 4), (0, 65)):
            with pytest.raises(PoolError, match=f"bytes {offset} to {offset + nbytes} lie outside Symmetric"):
                buffer.bytes_view(offset, nbytes)


def test_no_use_after_free_of_the_buffer_nor_of_its_views(node: str) -> None:
    with local_group(2, node=node) as group:
        buffer = group.symmetric(64, "buffer")
        part = buffer.bytes_view(16)
        buffer.array(0)
        buffer.free()
        for use in (
            lambda: buffer.array(0),
            lambda: part.pointers(1),
            lambda: part.multicast(0),
            lambda: part.free(),
            lambda: buffer.free(),
        ):
            with pytest.raises(PoolError, match=r"'buffer' \(64 bytes, allocation 2\) was freed"):
                use()


def test_a_block_frees_itself_but_not_after_an_error(node: str) -> None:
    """After an error the ranks may not come to the same frees any more."""
    with local_group(2, node=node) as group:
        with group.symmetric(64, "first") as first:
            pass
        with pytest.raises(PoolError, match="was freed"):
            first.array(0)
        with pytest.raises(RuntimeError), group.symmetric(64, "second") as second:
            raise RuntimeError
        second.array(0)


def test_ten_thousand_buffers_leave_the_memory_of_the_node_as_it_was() -> None:
    with local_group(2) as group:
        device = group.member(0).device
        process = device.driver.process
        free, objects = device.calls("cuMemGetInfo"), len(process.objects)
        for number in range(10_000):
            group.symmetric(number % 5000, "buffer").free()
        assert device.calls("cuMemGetInfo") == free
        assert len(process.objects) == objects
        assert group.pool.live[0].label == "signals" and len(group.pool.live) == 1


def test_a_rank_of_another_process_has_no_array_here() -> None:
    def body(group: Group) -> str:
        buffer = group.symmetric(64, "buffer")
        with pytest.raises(GroupError) as refused:
            buffer.array(1 - group.members[0].rank)
        return str(refused.value)

    found = joined(["h100", "h100"], body)
    assert found == [
        "this process holds rank 0 of 2 (got 1); loop over members",
        "this process holds rank 1 of 2 (got 0); loop over members",
    ]


# --- collective calls --------------------------------------------------------------------------------


def different_sizes(group: Group) -> Symmetric:
    return group.symmetric(64 + group.members[0].rank, "buffer")


def different_labels(group: Group) -> Symmetric:
    return group.symmetric(64, f"buffer of rank {group.members[0].rank}")


def different_frees(group: Group) -> Symmetric:
    first, second = group.symmetric(64, "first"), group.symmetric(64, "second")
    (first if group.members[0].rank == 0 else second).free()
    return group.symmetric(64, "third")


def different_room(group: Group) -> Symmetric:
    large = group.symmetric(1 << 20, "large")
    if group.members[0].rank == 1:
        large.free()
    return group.symmetric(1 << 20, "larger")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (different_sizes, ("rank 0: 64 bytes for 'buffer' ", "rank 1: 65 bytes for 'buffer' ")),
        (different_labels, ("rank 0: 64 bytes for 'buffer of rank 0' ", "'buffer of rank 1' ")),
        (different_frees, ("rank 0: 64 bytes for 'third' at offset ", "rank 1: 64 bytes for 'third' at ")),
        (different_room, ("for which it has no room; rank 1: 1048576 bytes for 'larger' at offset ",)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_ranks_that_do_not_call_alike_are_both_quoted_on_every_rank(
    body: Any, words: tuple[str, ...]
) -> None:
    for error in joined(["h100", "h100"], body):
        assert isinstance(error, GroupError)
        assert "symmetric memory: every rank makes the same call in the same order" in str(error)
        assert all(word in str(error) for word in words)


def test_ranks_that_call_alike_agree() -> None:
    """The correct twin: the same calls, in the same order, give the same offsets."""

    def body(group: Group) -> list[int]:
        first, second = group.symmetric(64, "first"), group.symmetric(64, "second")
        first.free()
        third = group.symmetric(64, "third")
        return [second.block.offset, third.block.offset, len(third.pointers(group.members[0].rank))]

    one, other = joined(["h100", "h100"], body)
    assert one == other and one[1] < one[0] and one[2] == 2


@pytest.mark.parametrize("backing", [Backing.VMM, Backing.IPC])
def test_processes_reach_each_others_bytes(backing: Backing) -> None:
    def body(group: Group) -> tuple[bool, str]:
        rank = group.members[0].rank
        device, peer = group.members[0].device, 1 - rank
        buffer = group.symmetric(300, "buffer")
        device.copy(buffer.peer(rank, peer), device.asarray(random_bytes(300, peer)))
        device.synchronize()
        group.barrier()
        same = buffer.array(rank).numpy() == random_bytes(300, rank)
        group.barrier()
        return bool(np.all(same)), group.pool.backing

    for found in joined(["h100", "h100"], body, options=lambda rank: {"backing": backing}):
        assert found == (True, f"{backing}: asked for")
