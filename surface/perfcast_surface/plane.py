"""Ragged grids resampled onto the union of their rows' keys, so that looking a point up costs a few reads.

A row that is linear between its own keys stays the same function when it is resampled at more keys, so the interior of
a grid comes back exactly (to rounding). What lies outside of a row is NaN, and so is every point that needs it: those
points belong to the full resolution chain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfcast_surface.arrays import F64, Ints, Sol
from perfcast_surface.lines import COUNTS, ROWS, Lines

CELLS = 1 << 21  # of the largest plane that is worth its memory
INTEGERS = 1 << 18  # queries below this are placed among knots by reading a list of all integers
FEW = 64  # queries that are not worth making that list


class Cell(NamedTuple):
    """Where queries lie on one axis: the knots around them (equal on a knot) and the weight of the upper one."""

    low: NDArray[np.intp]
    high: NDArray[np.intp]
    weight: F64


@dataclass(frozen=True, eq=False)
class Axis:
    """Ascending knots, with room for a NaN before the first and after the last one."""

    knots: F64

    @cached_property
    def _origin(self) -> F64:
        return np.concatenate([[0.0], self.knots])

    @cached_property
    def _width(self) -> F64:
        return np.concatenate([[1.0], np.diff(self.knots), [1.0]])

    @cached_property
    def list(self) -> list[float]:
        knots: list[float] = self.knots.tolist()
        return knots

    @cached_property
    def _by_integer(self) -> NDArray[Any]:
        """How many knots are at or below 0, 1, 2 ... and one more than the last knot."""
        end = min(self.knots[-1] + 2, INTEGERS)
        return self.knots.searchsorted(np.arange(end), "right").astype(np.min_scalar_type(len(self.knots)))

    def rank(self, c: F64 | Ints) -> NDArray[np.intp]:
        """How many knots are at or below each query; of a query below 0 nothing is said."""
        if len(c) > FEW and (self.knots[-1] < INTEGERS - 1 or c.max() < INTEGERS):
            floor = np.minimum(c, self.knots[-1] + 1).astype(np.intp)  # knots are integers
            low: NDArray[np.intp] = self._by_integer.take(floor, mode="clip").astype(np.intp)
            return low
        return self.knots.searchsorted(c, "right")

    def cell(self, c: F64 | Ints) -> Cell:
        low = self.rank(c)
        weight = (c - self._origin.take(low)) / self._width.take(low)
        return Cell(low, low + (weight > 0), weight)

    def one(self, c: float) -> tuple[int, int, float]:
        """``cell`` of a single query."""
        knots = self.list
        low = bisect_right(knots, c)
        if low == 0:
            return 0, 0, 0.0
        origin = knots[low - 1]
        if c == origin:
            return low, low, 0.0
        if low == len(knots):
            return 0, 0, 0.0
        return low, low + 1, (c - origin) / (knots[low] - origin)


@dataclass(frozen=True, eq=False)
class Plane:
    """Values at all combinations of the axes' knots, each axis padded by a NaN at both ends. ``roots``: square roots
    are blended on the first axis. power: W at the same knots, where any was measured; it stays with the engine."""

    axes: tuple[Axis, ...]
    values: F64
    roots: bool = False
    power: Plane | None = None

    @classmethod
    def of(
        cls,
        coords: tuple[Ints, ...],
        values: F64,
        roots: bool = False,
        lead: float | None = None,
        held: bool = False,
    ) -> Plane | None:
        """From leaves in nested order, all of them or at coordinate ``lead`` of the first axis. ``held``: beyond the
        ends of a row its last value counts, not NaN. None where the combinations are too many."""
        knots = [np.unique(column).astype(np.float64) for column in coords]
        if lead is not None:
            knots[0] = np.array([lead])
        if np.prod([len(k) + 2 for k in knots]) > CELLS:
            return None
        full = _resampled(coords, values, knots, held)
        if lead is not None:
            full, knots = full[0], knots[1:]
        return cls(tuple(map(Axis, knots)), np.pad(full, 1, constant_values=np.nan), roots)

    @property
    def ends(self) -> tuple[float, ...]:
        """The last knot of each axis."""
        return tuple(float(axis.knots[-1]) for axis in self.axes)

    @cached_property
    def _flat(self) -> F64:
        return np.ascontiguousarray(self.values).ravel()

    @cached_property
    def _nested(self) -> Any:
        return self.values.tolist()

    @cached_property
    def lines(self) -> Lines | None:
        """This plane where two counts are asked; None for other axes and too long ones."""
        if len(self.axes) != 2:
            return None
        rows, along = reversed(self.axes) if self.roots else self.axes
        if rows.knots[-1] >= ROWS or along.knots[-1] >= COUNTS:
            return None
        return Lines(rows.knots, along.knots, self.values.T if self.roots else self.values, self.roots)

    def at_counts(self, *query: Ints) -> F64:
        """``at`` for whole numbers."""
        return self.at(*query) if self.lines is None else self.lines.at(*query)

    @property
    def one(self) -> Callable[..., float]:
        """``at_counts`` for single numbers."""
        return self._one if self._along_lines is None else self._along_lines

    @cached_property
    def _along_lines(self) -> Callable[..., float] | None:
        if self.lines is None:
            return None
        read = self.lines.one()
        return (lambda along, row: read(row, along)) if self.roots else read

    def at(self, *query: F64 | Ints, sol: Sol | None = None) -> F64:
        """The value at each query; NaN outside. With ``sol``, the roofline of the axes, the value of a row carries over
        to a query that lies between it and one that ends too early."""
        cells = [axis.cell(c) for axis, c in zip(self.axes, query, strict=True)]
        low, high, weight = cells[0]
        a, b = self._row(cells, 1, low), self._row(cells, 1, high)
        blend: F64
        if self.roots:
            a_root, b_root = np.sqrt(a), np.sqrt(b)
            blend = np.where(weight > 0, (a_root + (b_root - a_root) * weight) ** 2, a)
        else:
            blend = a + (b - a) * weight
        if sol is not None and len(cells) > 1:
            self._carry(blend, a, b, cells[0], query, sol)
        return blend

    def _row(self, cells: list[Cell], depth: int, index: NDArray[np.intp]) -> F64:
        if depth == len(cells):
            leaves: F64 = self._flat.take(index)
            return leaves
        low, high, weight = cells[depth]
        index = index * self.values.shape[depth]
        a, b = self._row(cells, depth + 1, index + low), self._row(cells, depth + 1, index + high)
        blend: F64 = a + (b - a) * weight
        return blend

    def _carry(self, blend: F64, a: F64, b: F64, cell: Cell, query: tuple[F64 | Ints, ...], sol: Sol) -> None:
        """Fill ``blend`` where only one of two rows around the query has a value."""
        between = (cell.low > 0) & (cell.high <= len(self.axes[0].knots))
        alone = (np.isnan(a) != np.isnan(b)) & between
        if not alone.any():
            return
        lower = ~np.isnan(a[alone])
        key = self.axes[0].knots[np.where(lower, cell.low[alone], cell.high[alone]) - 1]
        asked = tuple(c[alone] for c in query)
        here, there = sol(*asked), sol(key, *asked[1:])
        usable = np.isfinite(here) & np.isfinite(there) & (here > 0) & (there > 0)
        ratio = np.where(usable, here, 1.0) / np.where(usable, there, 1.0)
        blend[alone] = np.where(lower, a[alone], b[alone]) * ratio

    def _one(self, *query: float) -> float:
        return self._blended([axis.one(c) for axis, c in zip(self.axes, query, strict=True)], 0, self._nested)

    def _blended(self, cells: list[tuple[int, int, float]], depth: int, node: Any) -> float:
        low, high, weight = cells[depth]
        last = depth + 1 == len(cells)
        a: float = node[low] if last else self._blended(cells, depth + 1, node[low])
        if low == high:
            return a
        b: float = node[high] if last else self._blended(cells, depth + 1, node[high])
        if depth == 0 and self.roots:
            root = sqrt(a) + (sqrt(b) - sqrt(a)) * weight if a >= 0 and b >= 0 else nan
            return root * root
        return a + (b - a) * weight

    def carried(self, sol: Sol, *query: float) -> float:
        """What ``at`` adds for ``sol``, for single numbers: NaN where it carries nothing."""
        low, high, _ = self.axes[0].one(query[0])
        if low == high or len(query) == 1:
            return nan
        cells = [axis.one(c) for axis, c in zip(self.axes, query, strict=True)]
        a, b = self._blended(cells, 1, self._nested[low]), self._blended(cells, 1, self._nested[high])
        if (a == a) == (b == b):
            return nan
        ms, row = (a, low) if a == a else (b, high)
        here, there = float(sol(*query)), float(sol(self.axes[0].list[row - 1], *query[1:]))
        return ms * here / there if 0 < here < inf and 0 < there < inf else ms


def _resampled(coords: tuple[Ints, ...], values: F64, knots: list[F64], held: bool) -> F64:
    """Values at the combinations of ``knots``; outside of each row NaN, or those of its ends."""
    if len(coords) == 1:
        beyond = None if held else np.nan
        return np.interp(knots[0], coords[0], values, left=beyond, right=beyond)
    keys, first = np.unique(coords[0], return_index=True)
    rows = np.stack(
        [
            _resampled(tuple(column[lo:hi] for column in coords[1:]), values[lo:hi], knots[1:], held)
            for lo, hi in zip(first, [*first[1:], len(values)], strict=True)
        ]
    )
    if np.array_equal(keys, knots[0]):
        return rows
    low = np.maximum(np.searchsorted(keys, knots[0], "right") - 1, 0)
    high = np.where(keys[low] == knots[0], low, np.minimum(low + 1, len(keys) - 1))
    width = np.maximum(keys[high] - keys[low], 1)
    weight = np.clip((knots[0] - keys[low]) / width, 0, 1).reshape(-1, *[1] * (rows.ndim - 1))
    out: F64 = rows[low] + (rows[high] - rows[low]) * weight
    if not held:
        out[(knots[0] < keys[0]) | (knots[0] > keys[-1])] = np.nan
    return out
