"""Nested ragged grids and the interior of the resolution chain: exact, bracketed, one survivor (spec/02 section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from perfcast_surface.plane import Axis

from perfcast_engine.answer import F64, Mask

Coords = tuple[F64, ...]  # one array (N,) per axis
Query = tuple[F64 | float, ...]  # as Coords, but a number may stand for all points
Sol = Callable[..., F64]  # one array per axis -> ms
Ints = NDArray[np.int64]

FEW = 64  # queries that are not worth a look at what rows reach them


class Level(NamedTuple):
    """One axis of the tree: the keys of all nodes, and where each parent's children start. known: the distinct keys;
    last: for each parent, its last child at or below none of them, the first, the second ... or else its first."""

    keys: F64
    start: Ints
    known: Axis
    last: Ints


@dataclass(frozen=True, eq=False)
class Grid:
    """Leaves of nested sorted integer keys, outermost first. coords: int64 (N,) per axis, lexicographically sorted and
    distinct; ms: float64 (N,); power: W (N,) or None. N > 0."""

    coords: tuple[Ints, ...]
    ms: F64
    power: F64 | None = None

    def __len__(self) -> int:
        return len(self.ms)

    def between(self, first: int, last: int) -> Grid:
        """The leaves at outer keys from ``first`` to ``last``."""
        rows = slice(int(self.coords[0].searchsorted(first)), int(self.coords[0].searchsorted(last, "right")))
        return Grid(
            tuple(c[rows] for c in self.coords), self.ms[rows], None if self.power is None else self.power[rows]
        )

    def shared(self, other: Grid) -> tuple[Ints, Ints]:
        """The leaves that both grids hold, in either."""
        spans = [int(max(a.max(), b.max())) + 1 for a, b in zip(self.coords, other.coords, strict=True)]
        own, others = (np.ravel_multi_index(grid.coords, spans) for grid in (self, other))
        _, here, there = np.intersect1d(own, others, assume_unique=True, return_indices=True)
        return here, there

    @cached_property
    def floats(self) -> Coords:
        return tuple(column.astype(np.float64) for column in self.coords)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        fresh = np.zeros(len(self.ms), np.bool_)
        fresh[0] = True
        parent = np.zeros(len(self.ms), np.int64)
        levels = []
        for column in self.coords:
            fresh = fresh.copy()
            fresh[1:] |= column[1:] != column[:-1]
            first = np.flatnonzero(fresh)
            keys, parents = column[first].astype(np.float64), parent[first]
            start = np.searchsorted(parents, np.arange(parent[-1] + 2))
            known, rank = np.unique(keys, return_inverse=True)
            places = np.arange((len(start) - 1) * (len(known) + 1))
            last = np.searchsorted(parents * (len(known) + 1) + rank + 1, places, "right") - 1
            last = np.maximum(last, start[places // (len(known) + 1)])
            levels.append(Level(keys, start, Axis(known), last))
            parent = np.cumsum(fresh) - 1
        return tuple(levels)

    def interior(self, leaves: F64, query: Coords, sol: Sol, sqrt_axis: int | None) -> F64:
        """What values of ``leaves`` are at each query, NaN where it lies outside. See ``Surface.at``."""
        ends = ((c, level.known.knots) for c, level in zip(query, self.levels, strict=True))
        spanned = np.logical_and.reduce([(known[0] <= c) & (c <= known[-1]) for c, known in ends])
        if not spanned.all():
            return self._interior_of(spanned, leaves, query, sol, sqrt_axis)
        nodes = np.zeros((1, len(query[0])), np.int64)
        steps = []
        for level, c in zip(self.levels, query, strict=True):
            if level is self.levels[-1] and len(c) > FEW:
                low, high = level.keys[level.start[nodes]], level.keys[level.start[nodes + 1] - 1]
                reached = np.logical_or.reduce((low <= c) & (c <= high))
                if not reached.all():
                    return self._interior_of(reached, leaves, query, sol, sqrt_axis)
            step = descend(level, nodes, c)
            steps.append(step)
            nodes = step.low if step.all_exact else np.concatenate([step.low, step.high])
        ms = leaves[nodes]
        for axis in range(len(steps) - 1, -1, -1):
            step = steps[axis]
            if not step.all_exact:
                half = len(step.low)
                lo, hi = ms[:half], ms[half:]
                ms = _blend(lo, hi, step.weight, axis == sqrt_axis)
                _scale_survivors(ms, lo, hi, step, level_keys=self.levels[axis].keys, axis=axis, query=query, sol=sol)
            ms = np.where(step.inside, ms, np.nan)
        inside: F64 = ms[0]
        return inside

    def _interior_of(self, some: Mask, leaves: F64, query: Coords, sol: Sol, sqrt_axis: int | None) -> F64:
        """``interior`` of ``some`` queries (N,); NaN for the others."""
        found = np.full(len(some), np.nan)
        if some.any():
            found[some] = self.interior(leaves, tuple(c[some] for c in query), sol, sqrt_axis)
        return found


class _Step(NamedTuple):
    """One level of a descent, arrays (branches, queries): the bracketing children (equal on an exact key), the weight
    of the upper one, and whether the query lies within the node at all."""

    low: Ints
    high: Ints
    weight: F64
    inside: Mask
    all_exact: bool


def descend(level: Level, nodes: Ints, c: F64) -> _Step:
    """From each of ``nodes`` to its children around ``c``."""
    low: Ints = level.last.take(nodes * (len(level.known.knots) + 1) + level.known.rank(c))
    below = level.keys[low]
    exact = below == c
    inside = exact | ((below < c) & (low < level.start[nodes + 1] - 1))
    if exact.all():
        return _Step(low, low, c, inside, True)
    high = np.where(exact | ~inside, low, low + 1)
    width = level.keys[high] - below
    weight = np.where(width > 0, c - below, 0.0) / np.where(width > 0, width, 1.0)
    return _Step(low, high, weight, inside, False)


def _blend(lo: F64, hi: F64, weight: F64, roots: bool) -> F64:
    if not roots:
        return lo + (hi - lo) * weight
    a, b = np.sqrt(np.maximum(lo, 0.0)), np.sqrt(np.maximum(hi, 0.0))
    return np.where(weight > 0, (a + (b - a) * weight) ** 2, lo)


def _scale_survivors(
    ms: F64, lo: F64, hi: F64, step: _Step, *, level_keys: F64, axis: int, query: Coords, sol: Sol
) -> None:
    """Where one bracket alone has a value, carry it to the query's coordinate along the roofline (in place)."""
    alone = np.isnan(lo) != np.isnan(hi)
    if not alone.any():
        return
    from_lo = ~np.isnan(lo[alone])
    key = level_keys[np.where(from_lo, step.low[alone], step.high[alone])]
    asked = tuple(c[np.nonzero(alone)[1]] for c in query)
    here = sol(*asked)
    there = sol(*(key if i == axis else c for i, c in enumerate(asked)))
    usable = np.isfinite(here) & np.isfinite(there) & (here > 0) & (there > 0)
    ratio = np.where(usable, here, 1.0) / np.where(usable, there, 1.0)
    ms[alone] = np.where(from_lo, lo[alone], hi[alone]) * ratio
