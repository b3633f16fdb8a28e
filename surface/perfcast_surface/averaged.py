"""The mean of a measured surface over lengths around the asked one, tabulated by integer length as it is asked."""

from __future__ import annotations

from collections.abc import Callable
from math import nan

import numpy as np

from perfcast_surface.arrays import F64, Ints, Mask
from perfcast_surface.plane import Plane

BITS = 10
BLOCK = 1 << BITS  # lengths that are tabulated together
BLOCKS = 64  # tabulated blocks that are kept
LIMIT = 1 << 18  # longer lengths are not tabulated


class Averaged:
    """Means of ``plane`` over (batch, length). ``spread`` gives the lengths (k, N) that stand for N lengths.

    Exact: a mean of values that are linear in the batch is the same line through the means at the measured batches.
    """

    def __init__(self, plane: Plane, spread: Callable[[F64], F64]) -> None:
        self.plane = plane
        self._spread = spread
        self._batch = plane.axes[0]
        size = min(int(plane.axes[1].knots[-1]) + 2, LIMIT)
        self._size = -(-size // BLOCK) * BLOCK
        self._state = self._empty()

    def at(self, batch: F64, length: F64) -> F64:
        """The mean at each point; NaN where a sample is outside of the plane and for a length that is no integer."""
        s = length.astype(np.intp)
        known = (s >= 0) & (s < self._size) & (s == length)
        if not known.all():
            s = np.where(known, s, 0)
        flat = self._means(s >> BITS).ravel()
        low, high, weight = self._batch.cell(batch)
        a, b = flat.take(low * self._size + s), flat.take(high * self._size + s)
        return np.where(known, a + (b - a) * weight, np.nan)

    def one(self, batch: float, length: float) -> float:
        """``at`` for a single point."""
        s = int(length)
        if not 0 <= s < self._size or s != length:
            return nan
        means, filled = self._state
        if not filled[s >> BITS]:
            means = self._means(np.array([s >> BITS]))
        low, high, weight = self._batch.one(batch)
        a: float = means.item(low, s)
        return a if low == high else a + (means.item(high, s) - a) * weight

    def _empty(self) -> tuple[F64, Mask]:
        # pages of zeros cost nothing until a block is written
        return np.zeros((len(self._batch.knots) + 2, self._size)), np.zeros(self._size // BLOCK, np.bool_)

    def _means(self, blocks: Ints) -> F64:
        """Means (batch, length) of which at least ``blocks`` are filled in."""
        means, filled = self._state
        if filled.take(blocks).all():
            return means
        if np.count_nonzero(filled) >= BLOCKS:
            means, filled = self._empty()  # who reads the old ones goes on reading them
        for block in np.unique(blocks):
            if not filled[block]:
                self._fill(means, slice(block * BLOCK, (block + 1) * BLOCK))
                filled[block] = True
        self._state = means, filled
        return means

    def _fill(self, means: F64, columns: slice) -> None:
        asked = self._spread(np.arange(columns.start, columns.stop, dtype=np.float64)).astype(np.intp)
        lengths = np.arange(asked.min(), asked.max() + 1)
        knots = self.plane.axes[1].knots
        for row, values in enumerate(self.plane.values):
            there = ~np.isnan(values[1:-1])
            if there.any():
                line = np.interp(lengths, knots[there], values[1:-1][there], left=np.nan, right=np.nan)
                means[row, columns] = line[asked - lengths[0]].sum(axis=0) / len(asked)
            else:
                means[row, columns] = np.nan
