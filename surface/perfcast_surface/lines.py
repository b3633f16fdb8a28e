"""Planes over two axes of counts as straight lines, so that a point costs two reads, a product and a sum."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from math import nan

import numpy as np
from numpy.typing import NDArray

from perfcast_surface.arrays import F64, Ints

ROWS = 1 << 12  # of the longest axis that has a row for each count
COUNTS = 1 << 18  # of the longest axis along which there are lines
Read = Callable[..., float]  # single counts to ms


class Lines:
    """For each count on one axis, a line in each cell of the other one: on a knot, or between two.

    ``knots`` of the rows and along the lines; ``values`` (rows, along) with a NaN all around. ``squared``: values are
    squares of what the lines say, and points come as (along, row); otherwise as (row, along).
    """

    def __init__(self, rows: F64, along: F64, values: F64, squared: bool) -> None:
        counts = np.arange(int(rows[-1]) + 2)
        low = rows.searchsorted(counts, "right")
        weight = (counts - np.append(0.0, rows)[low]) / np.concatenate([[1.0], np.diff(rows), [1.0]])[low]
        a, b = values[low, 1:-1], values[low + (weight > 0), 1:-1]
        knots = a + (b - a) * weight[:, None]
        if squared:
            knots = np.sqrt(knots)
        slope = np.diff(knots) / np.diff(along)
        lines = np.full((len(counts), 2 * len(along) + 1, 2), np.nan)  # start and slope; beyond the knots NaN
        lines[:, 1::2, 0], lines[:, 1::2, 1] = knots, 0.0
        lines[:, 2:-1:2, 0], lines[:, 2:-1:2, 1] = knots[:, :-1] - slope * along[:-1], slope
        counts = np.arange(int(along[-1]) + 2)
        self._cell: Ints = along.searchsorted(counts, "left") + along.searchsorted(counts, "right")
        self.squared, self._width = squared, lines.shape[1]
        self._pairs = lines.view(np.complex128).ravel()

    @cached_property
    def _listed(self) -> tuple[list[list[tuple[float, ...]]], list[int]]:
        """Start and slope by row and cell, rows as they are asked; and the cells."""
        return [[]] * (len(self._pairs) // self._width), self._cell.tolist()

    def one(self, scale: float = 1.0, extra: float = 0.0, other: Callable[..., float] | None = None) -> Read:
        """``at`` for a single (row, along), plus ``extra``, times ``scale``; ``other`` where a third count is not 0."""
        (listed, cells), squared = self._listed, self.squared
        lines = self._pairs.view(np.float64).reshape(-1, self._width, 2)

        def filled(row: int) -> list[tuple[float, ...]]:
            listed[row] = list(map(tuple, lines[row].tolist()))  # which are read with one step less than lists
            return listed[row]

        def one(row: int, along: int, third: int = 0) -> float:
            if third and other:
                return other(row, along, third)
            try:
                start, slope = (listed[row] or filled(row))[cells[along]]
            except IndexError:
                return nan
            ms = start + slope * along
            return ((ms * ms if squared else ms) + extra) * scale

        return one

    @cached_property
    def _rising(self) -> NDArray[np.void]:
        """By row and cell: the line of the row below, which is 0 for row 0 and below row 1, and that of the row."""
        lines = self._pairs.reshape(-1, self._width)
        both = np.stack([np.roll(lines, 1, axis=0), lines], axis=2)
        both[0], both[1, :, 0] = 0.0, 0.0
        return both.view("V32").ravel()

    def short_of(self, row: Ints, short: F64, along: Ints) -> F64:
        """The value at each point, a fraction ``short`` of the way from ``row`` to the row below; row 0 is 0."""
        line = row * self._width
        line += self._cell.take(along, mode="clip")
        lines, length = self._rising.take(line, mode="clip").view(np.float64).reshape(-1, 4), along.astype(np.float64)
        below, ms = lines[:, 1] * length, lines[:, 3] * length
        below += lines[:, 0]
        ms += lines[:, 2]
        below *= below
        ms *= ms
        below -= ms
        below *= short
        ms += below
        return ms

    def at(self, x: Ints, y: Ints) -> F64:
        """The value at each point; NaN outside."""
        row, along = (y, x) if self.squared else (x, y)
        line = self._pairs.take(self._cell.take(along, mode="clip") + row * self._width, mode="clip")
        ms: F64 = line.imag * along
        ms += line.real
        if self.squared:
            ms *= ms
        return ms
