"""In which order each way adds, in numpy: the exact bits of its sums, and how far off the true ones they are.

``x[r]`` is what rank r gives, N the number of ranks. Every addition is one of float32.

- **ring**: chunk c is ``x[c + 1] + x[c + 2] + ... + x[c]``, ranks modulo N, from the left, rounded to the
  element after each addition: that is what travels.
- **trees**: a rank with children has ``own + the lower child's + the higher child's``, rounded to the element
  once; what the root has. Each half of the message has its tree (trees.py), the first an element longer.
- **in order of rank**: ``x[0] + x[1] + ... + x[N - 1]``, from the left, rounded to the element once, at the
  end.

The switch (``nvls``) does not say how it adds. In a group of one rank nothing is added, and bits are kept.

Signed zeros, subnormals and infinities are summed as IEEE 754 has it, and a sum beyond the largest element is
infinite. A sum with a NaN, or with infinities of both signs, is a NaN; which one is not promised (the PTX ISA
leaves its payload open).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, log1p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.common import ConfigError
from kernels.reduce.elements import Element
from kernels.reduce.message import share_of
from kernels.reduce.trees import Tree, two_trees

Inputs = Sequence[NDArray[np.unsignedinteger]]
"""The bits of what each rank gives, all of one length."""

FLOAT32_ROUNDOFF = Element.F32.unit_roundoff
FLOAT64_ROUNDOFF = 2.0**-53
FLOAT32_SMALLEST_NORMAL = 2.0**-126


@dataclass(frozen=True)
class Order:
    """``sum(inputs, element)``: the bits of the sum. ``roundings(ranks)``: how often what a rank gives is
    rounded to the element on its way, at most."""

    sum: Callable[[Inputs, Element], NDArray[np.unsignedinteger]]
    roundings: Callable[[int], int]


def ring_sum(inputs: Inputs, element: Element) -> NDArray[np.unsignedinteger]:
    """Around the ring."""
    world_size, count = len(inputs), len(inputs[0])
    total = np.empty(count, element.bits)
    for owner in range(world_size):
        part = slice(*share_of(count, world_size, owner))
        total[part] = inputs[(owner + 1) % world_size][part]
        for hop in range(2, world_size + 1):
            total[part] = sum_in_order([total[part], inputs[(owner + hop) % world_size][part]], element)
    return total


def tree_sum(inputs: Inputs, element: Element) -> NDArray[np.unsignedinteger]:
    """Up two trees."""

    def up(tree: Tree, rank: int, half: slice) -> NDArray[np.unsignedinteger]:
        terms = [up(tree, child, half) for child in tree.children(rank)]
        return sum_in_order([inputs[rank][half], *terms], element)

    middle = (len(inputs[0]) + 1) // 2
    halves = slice(0, middle), slice(middle, None)
    trees = two_trees(len(inputs))
    return np.concatenate([up(tree, tree.root, half) for tree, half in zip(trees, halves, strict=True)])


def sum_in_order(inputs: Inputs, element: Element) -> NDArray[np.unsignedinteger]:
    """From the first to the last, rounded once; one alone keeps its bits."""
    if len(inputs) == 1:
        return inputs[0].copy()
    total = element.widen(inputs[0])
    with np.errstate(over="ignore", invalid="ignore"):
        for more in inputs[1:]:
            total = total + element.widen(more)
    return element.narrow(total)


RING = Order(ring_sum, roundings=lambda ranks: ranks - 1)
TREES = Order(tree_sum, roundings=lambda ranks: two_trees(ranks)[0].depth)
BY_RANK = Order(sum_in_order, roundings=lambda ranks: min(ranks - 1, 1))

ORDERS: Mapping[str, Order] = {
    "ring.sm": RING, "ring.tma": RING, "tree": TREES, "oneshot": BY_RANK, "twoshot": BY_RANK, "ce": BY_RANK,
}  # fmt: skip
"""By way of an AllReduce."""


def expected(way: str, inputs: Inputs, element: Element) -> NDArray[np.unsignedinteger]:
    """The bits that an AllReduce by ``way`` gives to every rank, save for which NaN it is. Raises ConfigError
    for a way without a stated order."""
    if way not in ORDERS:
        raise ConfigError(
            f"the order of summation is stated for the ways {', '.join(ORDERS)} (got {way!r}); hold its sums "
            "against error_bound"
        )
    return ORDERS[way].sum(inputs, element)


def true_sum(inputs: Inputs, element: Element) -> NDArray[np.float64]:
    """In float64, in order of rank."""
    return np.sum([element.widen(bits).astype(np.float64) for bits in inputs], axis=0)


def error_bound(way: str, inputs: Inputs, element: Element) -> NDArray[np.float64]:
    """How far finite sums are from :func:`true_sum`, at most, if no sum on the way overflows.

    Each term goes through at most N - 1 additions. An addition in float32 multiplies by 1 + d, |d| <= 2^-24,
    a rounding to a half type by 1 + e, |e| <= its unit roundoff. So a term's factor is 1 + g with |g| <= (1 +
    2^-24)^(N - 1) (1 + u)^roundings - 1, and the error is at most that times the sum of the terms'
    magnitudes. Subnormals add nothing to it: every element is a multiple of the smallest, so are all sums and
    what float32 makes of them, and those in the range of subnormals are elements themselves. The true sum's
    own N - 1 roundings are added, and one for its comparison. A way without a stated order may round each
    addition; and flush float32 subnormals of terms and sums, as ``red.add.f32`` does: nothing says that the
    switch does not.
    """
    hops = len(inputs) - 1
    known = ORDERS.get(way, RING)
    roundings = 0 if element is Element.F32 else known.roundings(len(inputs))
    growth = hops * log1p(FLOAT32_ROUNDOFF) + roundings * log1p(element.unit_roundoff)
    own = (hops + 1) * FLOAT64_ROUNDOFF if hops else 0.0
    magnitudes: Any = np.sum([np.abs(element.widen(bits).astype(np.float64)) for bits in inputs], axis=0)
    flushed = 0.0 if way in ORDERS or not hops else (2 * hops + 1) * FLOAT32_SMALLEST_NORMAL
    return magnitudes * (expm1(growth) + own) + flushed
