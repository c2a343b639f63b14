"""Two binary trees over the ranks: who adds for whom, and who passes the sums on.

In each tree the ranks stand in some order, the left child's tree in front of a rank and the right one's
behind it, and every place of even number is a leaf. The second tree stands in reverse order where the number
of ranks is even, else one rank further on: so who is a leaf in one adds in the other, and every rank's links
carry about as much both ways. With an odd number one rank is a leaf in both. The idea: P. Sanders, J. Speck,
J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35,
2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property


@dataclass(frozen=True)
class Tree:
    """``parents[r]``: the parent of rank r, None for the root."""

    parents: tuple[int | None, ...]

    @property
    def root(self) -> int:
        """Whose sum is the whole one."""
        return self.parents.index(None)

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        ranks = range(len(self.parents))
        return tuple(tuple(child for child in ranks if self.parents[child] == rank) for rank in ranks)

    def children(self, rank: int) -> tuple[int, ...]:
        """Of a rank, the lower first; two at most."""
        return self._children[rank]

    def neighbours(self, rank: int) -> int:
        """How many ranks it sends to: its parent and its children."""
        return len(self.children(rank)) + (self.parents[rank] is not None)

    def level(self, rank: int) -> int:
        """Edges from the root to a rank."""
        parent = self.parents[rank]
        return 0 if parent is None else 1 + self.level(parent)

    @property
    def depth(self) -> int:
        """Edges from the root to the rank that is furthest from it."""
        return max(map(self.level, range(len(self.parents))))


@cache
def two_trees(world_size: int) -> tuple[Tree, Tree]:
    """For so many ranks, both of the least depth there is."""
    above: list[int | None] = [None] * world_size
    _grow(above, 0, world_size, None)
    ranks = list(range(world_size))
    others = ranks[::-1] if world_size % 2 == 0 else ranks[1:] + ranks[:1]
    return _tree(above, ranks), _tree(above, others)


def _grow(above: list[int | None], begin: int, end: int, parent: int | None) -> None:
    """Plant places ``begin`` to ``end``, where ``begin`` is even, below ``parent``.

    An odd number of places is a tree whose ranks have two children or none, so it has one leaf more than
    others. An even number is one whose last leaf is missing. Half of the leaves go to the left.
    """
    leaves = (end - begin) // 2 + 1
    place = begin if leaves == 1 else begin + 2 * (leaves // 2) - 1
    above[place] = parent
    if begin < place:
        _grow(above, begin, place, place)
    if place + 1 < end:
        _grow(above, place + 1, end, place)


def _tree(above: Sequence[int | None], ranks: Sequence[int]) -> Tree:
    """With ``ranks[i]`` at place i."""
    parents = dict(zip(ranks, (None if place is None else ranks[place] for place in above), strict=True))
    return Tree(tuple(parents[rank] for rank in range(len(ranks))))
