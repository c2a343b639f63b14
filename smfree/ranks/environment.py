"""Ranks that somebody else started: with our own variables, or under torchrun."""

from __future__ import annotations

import os

from smfree.ranks.errors import RankError
from smfree.ranks.rendezvous import Rendezvous
from smfree.ranks.unix import UnixRendezvous

RANK = "SMFREE_RANK"
WORLD_SIZE = "SMFREE_WORLD_SIZE"
RENDEZVOUS = "SMFREE_RENDEZVOUS"
_OURS = (RANK, WORLD_SIZE, RENDEZVOUS)
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def from_environment(*, timeout_s: float = 60.0) -> Rendezvous:
    """The rendezvous that the environment describes.

    ``SMFREE_RANK``, ``SMFREE_WORLD_SIZE`` and ``SMFREE_RENDEZVOUS`` (any name that all ranks of one host
    share), as :func:`smfree.ranks.spawn` sets them; else ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``, as torchrun does. Raises RankError naming what is missing.
    """
    if _names() == _OURS:
        return UnixRendezvous(os.environ[RENDEZVOUS], _number(RANK), _number(WORLD_SIZE), timeout_s=timeout_s)
    from smfree.ranks.torch import TorchRendezvous

    return TorchRendezvous(timeout_s=timeout_s)


def local_ranks() -> tuple[int, int]:
    """(number of this rank among those of its host, how many they are): torchrun's LOCAL_RANK and
    LOCAL_WORLD_SIZE, else the world's numbers, which is one host then. Raises RankError."""
    names = _names()
    if names != _OURS and "LOCAL_RANK" in os.environ:
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        _check_all(names)
    return _number(names[0]), _number(names[1])


def _names() -> tuple[str, ...]:
    """The variables that say which rank this is: all of ours, or all of torchrun's. Raises RankError."""
    for names, telling in ((_OURS, _OURS), (_TORCHRUN, _TORCHRUN[:2])):
        if any(name in os.environ for name in telling):
            _check_all(names)
            return names
    raise RankError(
        "nothing in the environment says which rank this is: start it with torchrun, set "
        f"{', '.join(_OURS)}, or call smfree.ranks.spawn"
    )


def _check_all(names: tuple[str, ...]) -> None:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RankError(f"the environment lacks {', '.join(missing)}; ranks need {', '.join(names)}")


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise RankError(f"{name} is a whole number (got {os.environ[name]!r})") from None
