"""The two numbers of a transfer: what it costs to begin, and how fast it goes then.

T(S) = alpha + S / beta (R. W. Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994).
At S* = alpha beta both parts are equal: below it a message is bound by latency, above by bandwidth. A line is
never the whole truth, so a fit carries its residuals and the sizes that it was made from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from smfree.model.crossover import Curve


@dataclass(frozen=True, slots=True)
class Hockney:
    """``alpha`` in the curve's unit of time, ``beta`` in bytes per that unit (inf: no size costs anything).

    ``residuals``: size -> (line - time) / time of what was fitted.
    """

    alpha: float
    beta: float
    residuals: Mapping[int, float]

    @property
    def worst(self) -> float:
        """The largest relative residual, so that a bad line shows itself."""
        return max(map(abs, self.residuals.values()))

    @property
    def range_bytes(self) -> tuple[int, int]:
        """Smallest and largest size that were fitted."""
        return min(self.residuals), max(self.residuals)

    @property
    def critical_bytes(self) -> float:
        """S*: where start-up and transfer take as long. 0 for a line without a start-up."""
        return self.alpha * self.beta if self.alpha > 0 else 0.0

    def time(self, size_bytes: float) -> float:
        """What the line says for a size, also outside of the range."""
        return self.alpha + size_bytes / self.beta


def hockney(curve: Curve, *, low: float = 0, high: float = math.inf) -> Hockney:
    """Fit the line to the medians of the sizes from ``low`` to ``high``, relative residuals least in squares.

    A size counts as much as any other, however long it takes. Raises ValueError below two sizes.
    """
    points = {size: time for size, time in sorted(curve.medians().items()) if low <= size <= high}
    if len(points) < 2:
        raise ValueError(f"a line for {curve.name} needs two sizes (got {len(points)})")
    sizes, times = np.array([*points], np.float64), np.array([*points.values()])
    weighted = np.stack([1.0 / times, sizes / times], axis=1)
    (alpha, per_byte), *_ = np.linalg.lstsq(weighted, np.ones_like(times), rcond=None)
    if per_byte <= 0:  # larger messages are not slower: the best constant
        alpha, per_byte = np.sum(1.0 / times) / np.sum(1.0 / times**2), 0.0
    residuals = (alpha + per_byte * sizes) / times - 1.0
    beta = float(1.0 / per_byte) if per_byte else math.inf
    return Hockney(float(alpha), beta, dict(zip(points, map(float, residuals), strict=True)))
