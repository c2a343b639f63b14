"""One line of an AllGather kernel wrong: what shows, under which schedule; the right kernel is clean."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from kernels.ipc.allgather import allgather
from kernels.ipc.signals import SignalLayout
from smfree.cuda import CudaSource
from tests.kernels.ipc_kit import CONFIGS, filled, opened_group, shard_bytes
from tests.kernels.mutant_kit import reported

RANKS = 2
FILL = 0x5A
ENTRY = "  if (!sync_ranks(signals, SIGNAL_STEP_ENTRY)) return;\n"
EXIT = "  if (!sync_ranks(signals, SIGNAL_STEP_EXIT)) return;\n"


def mutated(way: str, old: str, new: str) -> Any:
    """The way's configuration with another text in its kernel."""
    config = CONFIGS[way]

    class Mutated(type(config)):  # type: ignore[misc]
        def source(self, layout: SignalLayout) -> CudaSource:
            right = super().source(layout)
            text = right.read().decode()
            assert text.count(old) == 1, f"{old!r} stands once in {right.name}"
            return CudaSource(right.path, dict(right.defines), text=text.replace(old, new))

    return Mutated(**{field.name: getattr(config, field.name) for field in fields(config)})


def late_bytes(
    way: str, config: Any, schedule: str, seed: int = 0, *, calls: int = 2, nbytes: int = 2000, shift: int = 0
) -> dict[tuple[int, int], int]:
    """Gathers into one dst, each copied away at once in the rank's stream: by (call, rank) how many bytes
    were not those of the call. Every one of them was there before or came from another call."""
    want = np.array(
        [np.concatenate([shard_bytes(r, nbytes, call) for r in range(RANKS)]) for call in range(calls)]
    )
    with opened_group(RANKS, schedule, seed) as group:
        dst = group.symmetric(RANKS * nbytes, "dst")
        src = [
            [filled(group, r, shard_bytes(r, nbytes, call), shift) for r in range(RANKS)]
            for call in range(calls)
        ]
        seen = {}
        for member in group.members:
            dst.array(member.rank).fill(FILL, stream=member.stream)
        for call in range(calls):
            allgather(group, dst, src[call], way=way, config=config)
            for member in group.members:
                seen[call, member.rank] = kept = member.device.empty(dst.nbytes, np.uint8)
                kept.copy_from_device(dst.array(member.rank), stream=member.stream)
        group.wait(60)
        found = {}
        for (call, rank), array in seen.items():
            got = array.numpy()
            wrong = got != want[call]
            assert ((got == FILL) | (got == want).any(axis=0))[wrong].all()
            found[call, rank] = int(wrong.sum())
        return found


@pytest.mark.parametrize(
    ("way", "old", "new", "schedule"),
    [
        ("sm.push", ENTRY, "  __syncthreads();\n", "min-pc"),
        ("sm.pull", ENTRY, "  __syncthreads();\n", "timed"),
        ("sm.push", EXIT, "", "min-pc"),
        ("sm.pull", EXIT, "", "producer-ahead"),
        ("tma.push", EXIT, "", "producer-ahead"),
    ],
    ids=["push-entry", "pull-entry", "push-exit", "pull-exit", "bulk-push-exit"],
)
def test_without_one_of_its_barriers_a_rank_sees_bytes_of_another_call(
    way: str, old: str, new: str, schedule: str
) -> None:
    assert any(late_bytes(way, mutated(way, old, new), schedule).values())
    assert not any(late_bytes(way, CONFIGS[way], schedule).values())


def test_a_push_that_waits_only_until_its_stages_are_read_signals_before_its_bytes_have_landed() -> None:
    """wait_group.read says that shared memory may be reused, nothing of the destination. Which of the seeds
    show it depends on when the copies land."""
    way = "tma.push"
    wrong = mutated(way, "cp_async_bulk_wait_group<0>();", "cp_async_bulk_wait_group_read<0>();")
    showing = (
        seed for seed in range(1, 30)
        if any(late_bytes(way, wrong, "random", seed, calls=1, nbytes=600).values())
    )  # fmt: skip
    seed = next(showing, None)
    assert seed is not None
    assert not any(late_bytes(way, CONFIGS[way], "random", seed, calls=1, nbytes=600).values())


def test_a_push_that_refills_a_stage_too_early() -> None:
    wrong = mutated("tma.push", "cp_async_bulk_wait_group_read<DEFER>();", "")
    with reported(
        "overwrites the source of the cp.async.bulk store", "bulk_push.cu", "has not been read yet"
    ):
        late_bytes("tma.push", wrong, "timed")


@pytest.mark.usefixtures("impatient")
def test_a_pull_that_leaves_before_its_stages_are_read() -> None:
    """Threads have placed a src that is not aligned like dst."""
    wrong = mutated("tma.pull", "cp_async_bulk_wait_group<0>();", "")
    with reported("exits while the cp.async.bulk store", "still uses its shared memory"):
        late_bytes("tma.pull", wrong, "async-latest", shift=1)
    assert not any(late_bytes("tma.pull", CONFIGS["tma.pull"], "async-latest", shift=1).values())


def test_a_pull_that_asks_its_peers_before_its_own_shard_has_left_the_stages() -> None:
    wrong = mutated("tma.pull", "cp_async_bulk_wait_group<0>();", "")
    with reported("overwrites the source of the cp.async.bulk store", "bulk_pull.cu", "not been read yet"):
        late_bytes("tma.pull", wrong, "async-latest")
    assert not any(late_bytes("tma.pull", CONFIGS["tma.pull"], "async-latest").values())
