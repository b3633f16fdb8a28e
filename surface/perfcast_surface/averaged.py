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
        self._rows = len(self._batch.knots) + 2
        self._size = min(int(plane.axes[1].knots[-1]) + 2, LIMIT)
        self._state = self._empty(0)

    def at(self, batch: F64, length: F64) -> F64:
        """The mean at each point; NaN where a sample is outside of the plane and for a length that is no integer."""
        s = length.astype(np.intp)
        known = (s >= 0) & (s < self._size) & (s == length)
        if not known.all():
            s = np.where(known, s, 0)
        block = s >> BITS
        flat = self._means(block).ravel()
        low, high, weight = self._batch.cell(batch)
        block *= self._rows << BITS
        block += s & (BLOCK - 1)
        a, b = flat.take(block + (low << BITS)), flat.take(block + (high << BITS))
        return np.where(known, a + (b - a) * weight, np.nan)

    def one(self, batch: float, length: float) -> float:
        """``at`` for a single point."""
        s = int(length)
        if not 0 <= s < self._size or s != length:
            return nan
        block, s = s >> BITS, s & (BLOCK - 1)
        means, filled = self._state
        if block >= len(filled) or not filled.item(block):
            means = self._means(np.array([block]))
        low, high, weight = self._batch.one(batch)
        a: float = means.item(block, low, s)
        return a if low == high else a + (means.item(block, high, s) - a) * weight

    def _empty(self, blocks: int) -> tuple[F64, Mask]:
        return np.zeros((blocks, self._rows, BLOCK)), np.zeros(blocks, np.bool_)

    def _means(self, blocks: Ints) -> F64:
        """Means (block, batch, length in the block) of which at least ``blocks`` are filled in."""
        means, filled = self._state
        last = int(blocks.max(initial=0))
        if last < len(filled) and filled.take(blocks).all():
            return means
        if np.count_nonzero(filled) >= BLOCKS:
            means, filled = self._empty(0)  # who reads the old ones goes on reading them
        if last >= len(filled):
            (old, had), (means, filled) = (means, filled), self._empty(1 << last.bit_length())
            filled[: len(had)] = had  # before the means: another thread may be filling a block in just now
            means[: len(old)] = old
        for block in np.unique(blocks):
            if not filled[block]:
                means[block] = self._filled(block * BLOCK)
                filled[block] = True
        self._state = means, filled
        return means

    def _filled(self, first: int) -> F64:
        """Means (batch, length) at BLOCK lengths from ``first`` on."""
        asked = self._spread(np.arange(first, first + BLOCK, dtype=np.float64)).astype(np.intp)
        lengths = np.arange(asked.min(), asked.max() + 1)
        knots = self.plane.axes[1].knots
        means = np.full((self._rows, BLOCK), np.nan)
        for row, values in enumerate(self.plane.values):
            there = ~np.isnan(values[1:-1])
            if there.any():
                line = np.interp(lengths, knots[there], values[1:-1][there], left=np.nan, right=np.nan)
                means[row] = line[asked - lengths[0]].sum(axis=0) / len(asked)
        return means
