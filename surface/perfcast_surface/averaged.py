"""The mean of a measured surface over lengths around the asked one, tabulated by length as it is asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import nan

import numpy as np

from perfcast_surface.arrays import F64, Ints
from perfcast_surface.plane import Plane

BITS = 10
BLOCK = 1 << BITS  # lengths that are tabulated together
LIMIT = 1 << 17  # longer lengths are not tabulated


class Averaged:
    """Means of ``plane`` over (batch, length), counts. ``spread`` gives the lengths (k, N) that stand for N lengths.

    Exact: a mean of values that are linear in the batch is the same line through the means at the measured batches.
    """

    def __init__(self, plane: Plane, spread: Callable[[F64], F64]) -> None:
        self.plane = plane
        self._spread = spread
        batch = plane.axes[0].knots
        # for each batch: the measured one at or below it, the one at or above it, and the weight of that
        counts = np.arange(int(batch[-1]) + 2)
        self._low: Ints = batch.searchsorted(counts, "right")
        weight = counts - np.append(0.0, batch)[self._low]
        self._weight: F64 = weight / np.concatenate([[1.0], np.diff(batch), [1.0]])[self._low]
        self._high: Ints = self._low + (weight > 0)
        self._rows = len(batch) + 2
        size = min(int(plane.axes[1].knots[-1]) + 2, LIMIT)
        self._means = np.zeros((size, self._rows))  # memory that is not written to is not taken
        self._means[-1] = np.nan
        self._filled = np.zeros((size - 1 >> BITS) + 1, np.bool_)

    @property
    def nbytes(self) -> int:
        """Bytes of the means filled in so far."""
        return int(np.count_nonzero(self._filled)) * BLOCK * self._rows * self._means.itemsize

    def at(self, batch: Ints, length: Ints) -> F64:
        """The mean at each point; NaN where a sample is outside of the plane."""
        self._fill(length)
        first = length * self._rows
        means = self._means.ravel()
        a = means.take(first + self._low.take(batch, mode="clip"), mode="clip")
        b = means.take(first + self._high.take(batch, mode="clip"), mode="clip")
        b -= a
        a += b * self._weight.take(batch, mode="clip")
        return a

    @cached_property
    def _around(self) -> list[tuple[int, int, float]]:
        """By batch: the rows around it, and the weight of the upper one."""
        return list(zip(self._low.tolist(), self._high.tolist(), self._weight.tolist(), strict=True))

    def one(self, scale: float = 1.0) -> Callable[..., float]:
        """``at`` for a single (batch, length), and whatever follows; times ``scale``."""
        means, width, around = self._means.ravel().data, self._rows, self._around

        def one(batch: int, length: int, _: int = 0) -> float:
            try:
                low, high, share = around[batch]
                first = length * width
                a, b = means[first + low], means[first + high]
                if not (a and b):  # not written to so far
                    self._fill(np.array([length]))
                    a, b = means[first + low], means[first + high]
            except IndexError:
                return nan
            ms: float = (a + (b - a) * share) * scale
            return ms

        return one

    def _fill(self, lengths: Ints) -> None:
        """Tabulate what is asked for and was not before; to do so twice at a time changes nothing."""
        last = len(self._filled) - 1
        low, high = (min(int(end) >> BITS, last) for end in (lengths.min(initial=LIMIT), lengths.max(initial=0)))
        if self._filled[low : high + 1].all():
            return
        for block in np.unique(np.minimum(lengths >> BITS, last)):
            if not self._filled[block]:
                first, end = block << BITS, min((block + 1) << BITS, len(self._means) - 1)
                self._means[first:end] = self._tabulated(first, end)
                self._filled[block] = True

    def _tabulated(self, first: int, end: int) -> F64:
        """Means (length, batch) at the lengths from ``first`` to ``end``."""
        asked = self._spread(np.arange(first, end, dtype=np.float64)).astype(np.intp)
        means = np.full((end - first, self._rows), np.nan)
        if not asked.size:
            return means
        lengths = np.arange(asked.min(), asked.max() + 1)
        knots = self.plane.axes[1].knots
        for row, values in enumerate(self.plane.values):
            there = ~np.isnan(values[1:-1])
            if there.any():
                line = np.interp(lengths, knots[there], values[1:-1][there], left=np.nan, right=np.nan)
                means[:, row] = line[asked - lengths[0]].sum(axis=0) / len(asked)
        return means
