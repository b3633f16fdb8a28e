"""Beyond the measurements: latency from the utilisation of the nearest leaves (spec/02 section 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor, inf, log2, sqrt

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Coords, Grid
from perfcast_engine.interp.nearest import candidates, nearest

ANCHORS = 4
TINY = 1e-12
BOXES_TO_OCTAVE = 4  # of queries that share their candidates
BOXES = 1 << 12  # that are kept


@dataclass(frozen=True, eq=False)
class Hold:
    """The leaves that a hold may lean on: log2 coordinates (A, N), roofline / latency (N,), power (N,) or None."""

    logs: F64
    util: F64
    power: F64 | None
    _boxes: dict[tuple[int | float, ...], list[tuple[list[float], float]]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, grid: Grid, sol: F64) -> Hold:
        """``sol``: the roofline (ms) of each leaf."""
        valid = (grid.ms > 0) & np.isfinite(grid.ms) & (sol > 0) & np.isfinite(sol)
        logs = np.log2(np.maximum(np.stack([c[valid] for c in grid.floats]), TINY))
        return cls(logs, sol[valid] / grid.ms[valid], None if grid.power is None else grid.power[valid])

    def at(self, query: Coords) -> tuple[F64, F64 | None]:
        """Utilisation and power of the nearest four leaves in log space, weights tapering to 0 at the distance of the
        fifth; utilisation 0 where there is no leaf."""
        if not len(self.util):
            return np.zeros(len(query[0])), self.power
        index, distance = nearest(self.logs, np.log2(np.maximum(np.stack(query), TINY)), ANCHORS + 1)
        weight = _taper(distance)
        index = index[:ANCHORS]
        mass = weight.sum(axis=0)
        util = (weight * self.util[index]).sum(axis=0) / mass
        return util, None if self.power is None else (weight * self.power[index]).sum(axis=0) / mass

    def one(self, query: tuple[float, ...]) -> float:
        """The utilisation that ``at`` gives to a single query."""
        asked = [log2(max(c, TINY)) for c in query]
        near = []
        for rank, (leaf, util) in enumerate(self._candidates(asked)):
            total = 0.0
            for a, b in zip(leaf, asked, strict=True):
                total += (a - b) * (a - b)
            near.append((sqrt(total), rank, util))
        near.sort()
        reach = near[ANCHORS][0] if len(near) > ANCHORS else inf
        weights = [_weight(distance, reach) for distance, _, _ in near[:ANCHORS]]
        if not any(weights):
            weights = [1.0] * len(weights)
        return sum(w * util for w, (_, _, util) in zip(weights, near, strict=False)) / (sum(weights) or inf)

    def _candidates(self, asked: list[float]) -> list[tuple[list[float], float]]:
        """Leaves and their utilisation, of which the nearest to any query in the box around ``asked`` are some."""
        low = [asked[0], *(floor(c * BOXES_TO_OCTAVE) / BOXES_TO_OCTAVE for c in asked[1:])]
        found = self._boxes.get(tuple(low))
        if found is None:
            box = np.array([low, [low[0], *(c + 1 / BOXES_TO_OCTAVE for c in low[1:])]]).T
            count = min(ANCHORS + 1, len(self.util))
            some = candidates(self.logs, box, count) if count else np.zeros(0, np.intp)
            found = list(zip(self.logs[:, some].T.tolist(), self.util[some].tolist(), strict=True))
            if len(self._boxes) >= BOXES:
                self._boxes.clear()
            self._boxes[tuple(low)] = found
        return found


def _taper(distance: F64) -> F64:
    """Weights (<= 4, Q) of the nearest anchors from their ascending distances (<= 5, Q)."""
    d = distance[:ANCHORS]
    if len(distance) <= ANCHORS:
        return 1 / (d * d + TINY)
    reach = distance[ANCHORS]
    weight: NDArray[np.float64] = (np.maximum(reach - d, 0.0) / (reach * d + TINY)) ** 2
    return np.where(weight.sum(axis=0) > 0, weight, 1.0)


def _weight(d: float, reach: float) -> float:
    """``_taper`` of one anchor, inf for a fifth one that is not there; all 0 stand for all 1."""
    return 1 / (d * d + TINY) if reach == inf else (max(reach - d, 0.0) / (reach * d + TINY)) ** 2
