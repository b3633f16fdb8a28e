"""Latency from the utilisation of the nearest samples: roofline / utilisation (spec/02 sections 3 and 9)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, log2, sqrt

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Coords, Grid, Query
from perfcast_engine.interp.nearest import Samples

ANCHORS = 4
TINY = 1e-12
BOX = 0.25  # single queries in boxes whose corners are multiples of it share their candidates
BOXES = 1 << 12  # of single queries that are kept
Box = tuple[float, float, float]  # the first coordinate, and which box the logarithms of the others are in
Leaf = tuple[float, float, float, float]  # squared distance on the first axis, logarithms of the others, utilisation


@dataclass(frozen=True, eq=False)
class Hold:
    """The leaves that a hold may lean on: log2 coordinates, roofline / latency (N,), power (N,) or None. ``among``: a
    hold on these leaves and more that was asked the same before, and which of these each of them is, -1 for none."""

    leaves: Samples
    util: F64
    power: F64 | None
    among: tuple[Hold, NDArray[np.intp]] | None = None
    _told: dict[str, tuple[F64, NDArray[np.intp], F64] | None] = field(default_factory=dict, repr=False)
    _boxes: dict[Box, list[Leaf]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, grid: Grid, sol: F64, beside: Hold | None = None) -> Hold:
        """``sol``: the roofline (ms) of each leaf; ``beside``: what was asked the same before."""
        valid = (grid.ms > 0) & np.isfinite(grid.ms) & (sol > 0) & np.isfinite(sol)
        logs = np.log2(np.maximum(np.stack([c[valid] for c in grid.floats]), TINY))
        power = None if grid.power is None else grid.power[valid]
        hold = cls(Samples(logs), sol[valid] / grid.ms[valid], power)
        if beside is None:
            return hold
        own = {leaf: i for i, leaf in enumerate(zip(*logs.tolist(), strict=True))}
        which = np.array([own.get(leaf, -1) for leaf in zip(*beside.leaves.at.tolist(), strict=True)], np.intp)
        if np.count_nonzero(which >= 0) < len(own):
            return hold
        beside._told["last"] = None  # from now on it tells
        return replace(hold, among=(beside, which))

    def at(self, query: Coords) -> tuple[F64, F64 | None]:
        """Utilisation and power of the nearest four leaves in log space, weights tapering to 0 at the distance of the
        fifth; utilisation 0 where there is no leaf."""
        if not len(self.util):
            return np.zeros(len(query[0])), self.power
        index, distance = self._nearest(np.log2(np.maximum(np.stack(query), TINY)))
        weight = _taper(distance)
        index = index[:ANCHORS]
        mass = weight.sum(axis=0)
        util = (weight * self.util[index]).sum(axis=0) / mass
        return util, None if self.power is None else (weight * self.power[index]).sum(axis=0) / mass

    def _nearest(self, logs: F64) -> tuple[NDArray[np.intp], F64]:
        """The anchors and the leaf behind them, and their distances; as ``among`` has just told where it has."""
        if self.among is not None:
            hold, which = self.among
            told, hold._told["last"] = hold._told["last"], None
            if told is not None and np.array_equal(told[0], logs) and (index := which[told[1]]).min(initial=0) >= 0:
                return index, told[2]
        index, distance = self.leaves.nearest(logs, ANCHORS + 1)
        if self._told:
            self._told["last"] = logs, index, distance
        return index, distance

    def one(self, lead: float, x: float, y: float) -> float:
        """The utilisation that ``at`` gives to a single query, of three axes."""
        x, y = log2(max(x, TINY)), log2(max(y, TINY))
        near = [
            (sqrt(off + (a - x) * (a - x) + (b - y) * (b - y)), rank, util)
            for rank, (off, a, b, util) in enumerate(self._candidates(lead, x, y))
        ]
        near.sort()
        reach = near[ANCHORS][0] if len(near) > ANCHORS else inf
        del near[ANCHORS:]
        total = mass = 0.0
        for distance, _, util in near:
            if reach < inf:
                weight = (reach - distance) / (reach * distance + TINY)
                weight *= weight
            else:
                weight = 1 / (distance * distance + TINY)
            mass += weight
            total += weight * util
        if mass > 0:
            return total / mass
        return sum(util for _, _, util in near) / len(near) if near else 0.0

    def _candidates(self, lead: float, x: float, y: float) -> list[Leaf]:
        """Leaves of which the nearest to any query in the box around (x, y) are some."""
        box = lead, x // BOX, y // BOX
        found = self._boxes.get(box)
        if found is None:
            first, count = np.log2(max(lead, TINY)), min(ANCHORS + 1, len(self.util))
            low, high = (np.array([[first], *([(number + end) * BOX] for number in box[1:])]) for end in (0, 1))
            every = np.arange(len(self.util))[None]
            some = self.leaves.candidates(every, low, high, count)[1] if count else every[0]
            off, a, b = self.leaves.at[:, some]
            columns = (off - first) ** 2, a, b, self.util[some]
            found = list(zip(*(column.tolist() for column in columns), strict=True))
            if len(self._boxes) >= BOXES:
                self._boxes.clear()
            self._boxes[box] = found
        return found


def _taper(distance: F64) -> F64:
    """Weights (<= 4, Q) of the nearest anchors from their ascending distances (<= 5, Q)."""
    d = distance[:ANCHORS]
    if len(distance) <= ANCHORS:
        return 1 / (d * d + TINY)
    reach = distance[ANCHORS]
    weight: NDArray[np.float64] = (np.maximum(reach - d, 0.0) / (reach * d + TINY)) ** 2
    return np.where(weight.sum(axis=0) > 0, weight, 1.0)


FLOOR = 1e-9


@dataclass(frozen=True, slots=True)
class LogSpace:
    """Samples in min-max normalised log space. low, span: (A, 1)."""

    z: Samples
    low: F64
    span: F64

    @classmethod
    def of(cls, coords: Coords) -> LogSpace:
        """From one array (N,) per axis, N > 0."""
        logs = _logs(coords)
        low = logs.min(axis=1, keepdims=True)
        span = logs.max(axis=1, keepdims=True) - low
        span[span == 0] = 1.0
        return cls(Samples((logs - low) / span), low, span)

    def nearest(self, query: Query, count: int, *, clip: bool) -> tuple[NDArray[np.intp], F64]:
        """Indices and distances (count, Q) of the nearest samples, ties by sample order. ``clip``: a query outside the
        samples' box counts as the nearest point of the box."""
        z = (_logs(query) - self.low) / self.span
        return self.z.nearest(np.clip(z, 0.0, 1.0) if clip else z, count)


def _logs(coords: Query) -> F64:
    logs: F64 = np.log(np.maximum(np.stack(np.broadcast_arrays(*coords)), FLOOR))
    return logs


@dataclass(frozen=True, slots=True)
class UtilGrid:
    """Samples with their utilisation, util (N,) = roofline / measured."""

    space: LogSpace
    util: F64

    @classmethod
    def of(cls, coords: Coords, ms: F64, sol: F64) -> UtilGrid | None:
        """From samples in traversal order (keys ascending, outermost first); None when no sample is usable."""
        keep = (ms > 0) & (sol > 0)
        if not keep.any():
            return None
        return cls(LogSpace.of(tuple(axis[keep] for axis in coords)), sol[keep] / ms[keep])

    def at(self, query: Query) -> F64:
        """Utilisation at each query: the sample at distance zero, else the two nearest weighted by 1/distance."""
        index, distance = self.space.nearest(query, 2, clip=True)
        util = self.util[index]
        hit = distance[0] == 0
        weight = 1 / np.where(hit, 1.0, distance)
        mean: F64 = np.where(hit, util[0], (util * weight).sum(axis=0) / weight.sum(axis=0))
        return mean
