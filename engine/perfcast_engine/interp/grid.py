"""Nested ragged grids and their resolution chain: exact, interior, one survivor, hold (spec/02 section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64
from perfcast_engine.interp.nearest import nearest

Coords = tuple[F64, ...]
Sol = Callable[..., F64]  # one array per axis -> ms
Ints = NDArray[np.int64]

ANCHORS = 4
TINY = 1e-12


class Level(NamedTuple):
    """One axis of the tree: the keys of all nodes, where each parent's children start, and a global search key."""

    keys: Ints
    start: Ints
    search: Ints
    span: int


@dataclass(frozen=True)
class Grid:
    """Leaves of nested sorted integer keys, outermost first. coords: int64 (N,) per axis, lexicographically sorted and
    distinct; ms: float64 (N,); power: W (N,) or None."""

    coords: tuple[Ints, ...]
    ms: F64
    power: F64 | None
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, coords: Sequence[Ints], ms: F64, power: F64 | None = None) -> Grid:
        fresh = np.zeros(len(ms), np.bool_)
        fresh[:1] = True
        parent = np.zeros(len(ms), np.int64)
        levels = []
        for column in coords:
            fresh = fresh.copy()
            fresh[1:] |= column[1:] != column[:-1]
            first = np.flatnonzero(fresh)
            keys, parents = column[first], parent[first]
            start = np.searchsorted(parents, np.arange(parent[-1] + 2 if len(parent) else 1))
            span = int(keys.max(initial=0)) + 2
            levels.append(Level(keys, start, parents * span + keys, span))
            parent = np.cumsum(fresh) - 1
        return cls(tuple(coords), ms, power, tuple(levels))

    def __len__(self) -> int:
        return len(self.ms)

    @cached_property
    def logs(self) -> F64:
        """log2 of the leaf coordinates, (N, A)."""
        return np.log2(np.maximum(np.stack(self.coords, axis=1), TINY))

    @cached_property
    def floats(self) -> Coords:
        return tuple(column.astype(np.float64) for column in self.coords)


class Resolved(NamedTuple):
    """ms: (Q,) with NaN where nothing anchors the query; power: (Q,) W or None where the grid has none."""

    ms: F64
    power: F64 | None

    @property
    def energy(self) -> F64:
        return np.zeros(len(self.ms)) if self.power is None else self.ms * self.power


def resolve(grid: Grid, query: Coords, sol: Sol, sqrt_axis: int | None = None) -> Resolved:
    """The latency at each query point. ``sol`` is the roofline (ms) in the grid's axes; blending is linear on every
    axis but ``sqrt_axis``, where square roots are blended."""
    query = tuple(np.asarray(axis, np.float64) for axis in query)
    walk = _Walk(grid, query, sol, sqrt_axis)
    points = np.arange(len(query[0]))
    ms, power, outside = walk.interior(0, np.zeros(len(points), np.int64), points)
    if outside.any():
        hold = _hold_one_axis if len(query) == 1 else _hold
        held = tuple(axis[outside] for axis in query)
        ms[outside], held_power = hold(grid, held, sol)
        if power is not None and held_power is not None:
            power[outside] = held_power
    return Resolved(ms, power)


@dataclass(frozen=True, slots=True)
class _Walk:
    grid: Grid
    query: Coords
    sol: Sol
    sqrt_axis: int | None

    def interior(self, axis: int, node: Ints, point: NDArray[np.intp]) -> tuple[F64, F64 | None, NDArray[np.bool_]]:
        """Values below ``node`` for queries ``point``: ms (NaN without value), power, and which are out of range."""
        grid = self.grid
        if axis == len(grid.levels):
            return grid.ms[node], None if grid.power is None else grid.power[node], np.zeros(len(node), np.bool_)
        level = grid.levels[axis]
        c = self.query[axis][point]
        floor = np.clip(np.floor(c), -1, level.span - 1).astype(np.int64)
        low = np.searchsorted(level.search, node * level.span + floor, "right") - 1
        first, last = level.start[node], level.start[node + 1] - 1
        inside = low >= first
        exact = inside & (level.keys[np.maximum(low, 0)] == c)
        bracketed = inside & ~exact & (low < last)
        ms = np.full(len(node), np.nan)
        power = None if grid.power is None else np.zeros(len(node))
        outside = ~(exact | bracketed)
        single, double = np.flatnonzero(exact), np.flatnonzero(bracketed)
        below = np.concatenate([low[single], low[double], low[double] + 1])
        asked = np.concatenate([point[single], point[double], point[double]])
        if not len(below):
            return ms, power, outside
        child, child_power, child_out = self.interior(axis + 1, below, asked)
        n, m = len(single), len(double)
        ms[single], outside[single] = child[:n], child_out[:n]
        if power is not None and child_power is not None:
            power[single] = child_power[:n]
        if m:
            lo, hi = slice(n, n + m), slice(n + m, n + 2 * m)
            keys = level.keys[low[double]], level.keys[low[double] + 1]
            weight = (c[double] - keys[0]) / (keys[1] - keys[0])
            ms[double] = self.blend(axis, point[double], keys, weight, child[lo], child[hi])
            outside[double] = np.isnan(child[lo]) & np.isnan(child[hi]) & (child_out[lo] | child_out[hi])
            if power is not None and child_power is not None:
                power[double] = _lerp(child_power[lo], child_power[hi], weight, child[lo], child[hi])
        return ms, power, outside

    def blend(self, axis: int, point: NDArray[np.intp], keys: tuple[Ints, Ints], weight: F64, lo: F64, hi: F64) -> F64:
        if axis == self.sqrt_axis:
            a, b = np.sqrt(np.maximum(lo, 0)), np.sqrt(np.maximum(hi, 0))
            value = (a + (b - a) * weight) ** 2
        else:
            value = lo + (hi - lo) * weight
        alone = np.flatnonzero(np.isnan(lo) != np.isnan(hi))
        if len(alone):
            keep_lo = ~np.isnan(lo[alone])
            key = np.where(keep_lo, keys[0][alone], keys[1][alone]).astype(np.float64)
            asked = tuple(values[point[alone]] for values in self.query)
            here = self.sol(*asked)
            there = self.sol(*(key if i == axis else values for i, values in enumerate(asked)))
            usable = np.isfinite(here) & np.isfinite(there) & (here > 0) & (there > 0)
            ratio = np.where(usable, here / np.where(usable, there, 1.0), 1.0)
            value[alone] = np.where(keep_lo, lo[alone], hi[alone]) * ratio
        return value


def _lerp(lo: F64, hi: F64, weight: F64, lo_ms: F64, hi_ms: F64) -> F64:
    """Power on one axis: linear between two values, passed through from a single survivor."""
    return np.where(np.isnan(lo_ms), hi, np.where(np.isnan(hi_ms), lo, lo + (hi - lo) * weight))


def _hold_one_axis(grid: Grid, query: Coords, sol: Sol) -> tuple[F64, F64 | None]:
    """Beyond a curve: the utilisation of its nearest end point."""
    (c,) = query
    end = np.where(c < grid.coords[0][0], 0, len(grid) - 1)
    anchor, here = sol(grid.floats[0][end]), sol(c)
    usable = (grid.ms[end] > 0) & (anchor > 0) & (here > 0) & np.isfinite(here)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = here / (anchor / grid.ms[end])
    return np.where(usable, value, np.nan), None if grid.power is None else grid.power[end]


def _hold(grid: Grid, query: Coords, sol: Sol) -> tuple[F64, F64 | None]:
    """Beyond the frontier: utilisation of the nearest four leaves, tapered by the distance of the fifth."""
    leaf_sol = sol(*grid.floats)
    valid = np.flatnonzero((grid.ms > 0) & np.isfinite(grid.ms) & (leaf_sol > 0) & np.isfinite(leaf_sol))
    if not len(valid):
        return np.full(len(query[0]), np.nan), None if grid.power is None else np.zeros(len(query[0]))
    logs = np.log2(np.maximum(np.stack(query, axis=1), TINY))
    index, distance = nearest(grid.logs[valid], logs, ANCHORS + 1)
    leaf = valid[index[:, :ANCHORS]]
    d = distance[:, :ANCHORS]
    if index.shape[1] > ANCHORS:
        reach = distance[:, ANCHORS:]
        weight = (np.maximum(reach - d, 0) / (reach * d + TINY)) ** 2
    else:
        weight = 1 / (d**2 + TINY)
    mass = weight.sum(axis=1, keepdims=True)
    weight = np.where(mass > 0, weight, 1.0)
    mass = weight.sum(axis=1)
    util = (weight * (leaf_sol[leaf] / grid.ms[leaf])).sum(axis=1) / mass
    here = sol(*query)
    usable = np.isfinite(here) & (here > 0)
    power = None if grid.power is None else (weight * grid.power[leaf]).sum(axis=1) / mass
    return np.where(usable, here / util, np.nan), power
