"""Errors of ranks. Each says which rank waited for which, in what call, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class RankError(Exception):
    """Base of every error that smfree.ranks raises."""


class PeerLost(RankError):
    """Ranks whose process has ended, or which left or failed, while this one still needs them."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RendezvousTimeout(RankError):
    """Ranks that are alive, or never came, did not make a call in time."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RendezvousMismatch(RankError):
    """Ranks that disagree about the world, or make different calls."""


class RankFailed(RankError):
    """A rank of :func:`smfree.ranks.spawn` raised, was killed or did not end. ``rank`` says which; its
    exception is the cause of this one where it could be carried over. ``results``: what others returned."""

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank
        self.results: dict[int, Any] = {}


def named(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 2 and 3``, ``ranks 1, 2 and 3``."""
    listed = [str(rank) for rank in sorted(ranks)]
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"ranks {', '.join(listed[:-1])} and {listed[-1]}"
