"""The mean of a measured surface over lengths around the asked one, tabulated by integer length as it is asked."""

from __future__ import annotations

from collections.abc import Callable
from math import nan

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.interp.plane import Plane

BLOCK = 2048  # lengths that are tabulated together
LIMIT = 1 << 18  # longer ones are not


class Averaged:
    """Means of ``plane`` over (batch, length). ``spread`` gives the lengths (k, N) that stand for N lengths.

    Exact: a mean of values that are linear in the batch is the same line through the means at the measured batches.
    """

    def __init__(self, plane: Plane, spread: Callable[[F64], F64]) -> None:
        self._plane = plane
        self._spread = spread
        self._batch = plane.axes[0]
        size = min(int(plane.axes[1].knots[-1]) + 2, LIMIT)
        self._size = -(-size // BLOCK) * BLOCK
        # pages of zeros cost nothing until a block is written
        self._means = np.zeros((len(self._batch.knots) + 2, self._size))
        self._flat = self._means.ravel()
        self._filled = np.zeros(self._size // BLOCK, np.bool_)

    def at(self, batch: F64, length: F64) -> F64:
        """The mean at each point; NaN where a sample is outside of the plane and for a length that is no integer."""
        s = length.astype(np.intp)
        known = (s >= 0) & (s < self._size) & (s == length)
        if not known.all():
            s = np.where(known, s, 0)
        if not self._filled.take(s // BLOCK).all():
            self._fill(s)
        low, high, weight = self._batch.cell(batch)
        a = self._flat.take(low * self._size + s)
        b = self._flat.take(high * self._size + s)
        return np.where(known, a + (b - a) * weight, np.nan)

    def one(self, batch: float, length: float) -> float:
        """``at`` for a single point."""
        s = int(length)
        if not 0 <= s < self._size or s != length:
            return nan
        if not self._filled[s // BLOCK]:
            self._fill(np.array([s]))
        low, high, weight = self._batch.one(batch)
        a: float = self._means.item(low, s)
        return a if low == high else a + (self._means.item(high, s) - a) * weight

    def _fill(self, s: np.ndarray) -> None:
        for block in np.unique(s // BLOCK):
            if self._filled[block]:
                continue
            columns = slice(block * BLOCK, (block + 1) * BLOCK)
            asked = self._spread(np.arange(columns.start, columns.stop, dtype=np.float64)).astype(np.intp)
            lengths = np.arange(asked.min(), asked.max() + 1)
            knots = self._plane.axes[1].knots
            for row, values in enumerate(self._plane.values):
                there = ~np.isnan(values[1:-1])
                if there.any():
                    line = np.interp(lengths, knots[there], values[1:-1][there], left=np.nan, right=np.nan)
                    self._means[row, columns] = line[asked - lengths[0]].sum(axis=0) / len(asked)
                else:
                    self._means[row, columns] = np.nan
            self._filled[block] = True
