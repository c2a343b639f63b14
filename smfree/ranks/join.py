"""The rank of a process that somebody else started, with its GPU."""

from __future__ import annotations

import os

from smfree.cuda.choose import NODE_VARIABLE
from smfree.ranks.context import RankContext
from smfree.ranks.environment import from_environment, local_ranks
from smfree.ranks.errors import RankError, named
from smfree.ranks.gpus import Gpus
from smfree.ranks.rendezvous import Rendezvous


def join(
    device: str | None = None,
    *,
    several_per_gpu: bool = False,
    timeout_s: float = 60.0,
    schedule: str = "timed",
    seed: int = 0,
    strict: str = "error",
) -> RankContext:
    """Become the rank that the environment names (:func:`smfree.ranks.from_environment`), with GPU number
    LOCAL_RANK of those that ``device`` names (None: ``SMFREE_DEVICE``, else all); a launcher may as well show
    each rank a GPU of its own (CUDA_VISIBLE_DEVICES).

    The first rank of a host serves emulated GPUs to the others, unless ``SMFREE_NODE`` names who does;
    ``schedule``, ``seed`` and ``strict`` are theirs. The other parameters and the errors are those of
    :func:`smfree.ranks.spawn`. Use it as a context manager.
    """
    gpus = Gpus.of(device)
    local_rank, local_size = local_ranks()
    rendezvous = from_environment(timeout_s=timeout_s)
    context = RankContext(rendezvous.rank, rendezvous.world_size, local_rank, rendezvous)
    try:
        if gpus.emulated and NODE_VARIABLE not in os.environ:
            _serve(context, gpus, local_size, schedule, seed, strict)
        else:
            context.open(gpus)
        if not several_per_gpu:
            _check_distinct(context, local_size)
    except BaseException as error:
        context.close(f"{type(error).__name__}: {error}")
        raise
    return context


def _check_distinct(context: RankContext, local_size: int) -> None:
    """Refuse ranks of one host that share a GPU, whatever number each gives it (case D11)."""
    uuids = context.rendezvous.all_gather(context.device.uuid.encode(), "GPUs of the ranks")
    first = context.rank - context.local_rank
    users: dict[bytes, int] = {}
    for rank in range(first, first + local_size):
        other = users.setdefault(uuids[rank], rank)
        if other != rank:
            raise RankError(
                f"{named((other, rank))} both have the GPU {uuids[rank].decode()}; give each its own, or let "
                "them share with several_per_gpu=True, which tests correctness only"
            )


def _serve(context: RankContext, gpus: Gpus, local_size: int, schedule: str, seed: int, strict: str) -> None:
    """One server for each host; torchrun numbers the ranks of a host one after the other."""
    from smfree.emulator.server import start

    first = context.rank - context.local_rank
    node = None
    if context.local_rank == 0:
        node = start(gpus.node, schedule=schedule, seed=seed, strict=strict, clients=local_size)
    rendezvous: Rendezvous = context.rendezvous
    addresses = rendezvous.all_gather((node.address if node else "").encode(), "address of the emulated node")
    os.environ[NODE_VARIABLE] = addresses[first].decode()
    context.open(gpus, node)
