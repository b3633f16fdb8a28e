"""Nested grids read without rooflines: linear and held at their ends, or nearest (spec/04 sections 4.3 and 9)."""

from __future__ import annotations

import numpy as np
from perfcast_surface.blend import Held
from perfcast_surface.plane import Axis, Plane

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Coords, Grid, Ints, Level


def held(grid: Grid) -> Held:
    """``grid`` read linearly on every axis, where a coordinate beyond the keys of a node counts as the nearest one."""
    # a piecewise linear function stays the same when it is told at more knots
    knots = [np.unique(column).astype(np.float64) for column in grid.coords]
    every = np.meshgrid(*knots, indexing="ij")
    values = _linear(grid, tuple(axis.ravel() for axis in every)).reshape(every[0].shape)
    return Held(Plane(tuple(map(Axis, knots)), np.pad(values, 1, constant_values=np.nan)))


def _linear(grid: Grid, query: Coords) -> F64:
    nodes, weights = np.zeros((1, len(query[0])), np.int64), np.ones((1, len(query[0])))
    for level, c in zip(grid.levels, query, strict=True):
        low, high, t = _bracket(level, nodes, c)
        nodes, weights = np.concatenate([low, high]), np.concatenate([weights * (1 - t), weights * t])
    total: F64 = np.sum(grid.ms[nodes] * weights, axis=0)
    return total


def nearest_curve(grid: Grid, query: Coords) -> F64:
    """The nearest key on every axis but the last (the smaller on ties), linear on the last. (Q,) ms, NaN where the
    second axis asks beyond the largest key of its node."""
    nodes = np.zeros(len(query[0]), np.int64)
    beyond = np.zeros(len(nodes), np.bool_)
    for axis, (level, c) in enumerate(zip(grid.levels[:-1], query[:-1], strict=True)):
        low, high, t = _bracket(level, nodes, c)
        if axis == 1:
            beyond = c > level.keys[level.start[nodes + 1] - 1]
        nodes = np.where(t > 0.5, high, low)
    low, high, t = _bracket(grid.levels[-1], nodes, query[-1])
    return np.where(beyond, np.nan, grid.ms[low] * (1 - t) + grid.ms[high] * t)


def _bracket(level: Level, node: Ints, c: F64) -> tuple[Ints, Ints, F64]:
    """The children of ``node`` around ``c`` and the weight of the upper one; equal, with weight 0, beyond the ends."""
    low = level.below(node, c)
    high = np.where((level.keys[low] < c) & (low < level.start[node + 1] - 1), low + 1, low)
    width = level.keys[high] - level.keys[low]
    return low, high, np.where(width > 0, c - level.keys[low], 0.0) / np.where(width > 0, width, 1.0)


def reversed_axes(grid: Grid) -> Grid:
    """The same leaves, nested the other way round."""
    order = np.lexsort(grid.coords)
    return Grid.of([c[order] for c in reversed(grid.coords)], grid.ms[order])
