"""Regressions of pass time on scheduled work (spec/04 11.7).

All sums run over axis 0, which numpy adds one sample after the other: where several candidates fit exactly, rounding
decides between them, and so it decides the same way on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np
from perfcast_engine.answer import F64

FLOOR_MS = 1e-6
HINGE_SAMPLES = 6
WEIGHT_FLOOR_MS = 25.0
SLOPE_SLACK = 1e-6


@dataclass(frozen=True, slots=True)
class Fit:
    """ms = intercept + slopes . x + bend * max(x[0] - knot, 0), at least FLOOR_MS."""

    intercept: float
    slopes: tuple[float, ...]
    bend: float = 0.0
    knot: float = 0.0

    def __call__(self, features: F64) -> F64:
        """ms of N points (N, features)."""
        value: F64 = self.intercept + sum(slope * x for slope, x in zip(self.slopes, features.T, strict=True))
        if self.bend:
            value = value + self.bend * np.maximum(features[:, 0] - self.knot, 0.0)
        return np.maximum(value, FLOOR_MS)


def fit(features: Sequence[Sequence[float]], ms: Sequence[float], min_observations: int) -> Fit | None:
    """The best fit of the samples, hinged where there is one feature and enough samples; None while there is none."""
    x, y = np.asarray(features, np.float64), np.asarray(ms, np.float64)
    if len(y) < min_observations:
        return None
    if x.shape[1] == 1 and len(y) >= max(min_observations, HINGE_SAMPLES):
        hinged = _hinge(x[:, 0], y)
        if hinged is not None:
            return hinged
    return _linear(x, y)


def _hinge(x: F64, y: F64) -> Fit | None:
    """Weighted least squares with one bend, at the candidate knot of least weighted error."""
    weight = 1 / np.maximum(y, WEIGHT_FLOOR_MS)
    best: tuple[float, Fit] | None = None
    for knot in _knots(np.unique(x)):
        design = np.stack([np.ones_like(x), x, np.maximum(x - knot, 0.0)], axis=1)
        solved = solve(design * weight[:, None], y * weight)
        if solved is None:
            continue
        intercept, slope, bend = solved
        if slope < -SLOPE_SLACK or slope + bend < -SLOPE_SLACK:
            continue
        error = _squares((_predicted(design, solved) - y) * weight) / len(y)
        if best is None or error < best[0]:
            slope, beyond = max(slope, 0.0), max(slope + bend, 0.0)
            best = error, Fit(float(intercept), (float(slope),), float(beyond - slope), float(knot))
    return None if best is None else best[1]


def _knots(u: F64) -> list[float]:
    """Candidate knots from the sorted distinct features: quantiles and log-spaced points, strictly inside."""
    if len(u) < 3:
        return []
    top = len(u) - 1
    candidates = [float(u[j * top // 5]) for j in range(1, 5)]
    if u[0] > 0:
        low, high = np.log(u[0]), np.log(u[-1])
        candidates += [float(np.exp(low + (i / 9) * (high - low))) for i in range(1, 9)]
    kept: list[float] = []
    for knot in sorted(k for k in candidates if u[0] < k < u[-1]):
        if not kept or abs(knot - kept[-1]) > 1e-9 * max(abs(knot), abs(kept[-1]), 1.0):
            kept.append(knot)
    return kept


def _linear(x: F64, y: F64) -> Fit | None:
    """Ordinary least squares with non-negative slopes, over every subset of features."""
    count = x.shape[1]
    best: tuple[float, F64, list[int]] | None = None
    for subset in range(2**count):
        used = [axis for axis in range(count) if subset >> axis & 1]
        design = np.concatenate([np.ones((len(y), 1)), x[:, used]], axis=1)
        solved = solve(design, y)
        if solved is None or (solved[1:] < 0).any():
            continue
        error = _squares(_predicted(design, solved) - y)
        if best is None or error < best[0]:
            best = error, solved, used
    if best is None:
        return None
    slopes = [0.0] * count
    for axis, slope in zip(best[2], best[1][1:], strict=True):
        slopes[axis] = float(slope)
    if len(y) > count and not any(compress(slopes, (slope > 0 for slope in slopes))):
        return None
    return Fit(float(best[1][0]), tuple(slopes))


def _predicted(design: F64, solution: F64) -> F64:
    return np.asarray((design.T * solution[:, None]).sum(axis=0))


def _squares(errors: F64) -> float:
    return float((errors[:, None] ** 2).sum(axis=0)[0])


def solve(design: F64, target: F64) -> F64 | None:
    """Least squares by the normal equations; the ridge that a singular system gets spares the intercept. None when
    there is no finite solution."""
    normal = (design[:, :, None] * design[:, None, :]).sum(axis=0)
    right = (design * target[:, None]).sum(axis=0)
    solution = _eliminate(normal, right)
    if solution is None:
        ridge = np.full(len(right), 1e-9 * max(1.0, float(np.abs(np.diag(normal)).sum())))
        ridge[0] = 0.0
        solution = _eliminate(normal + np.diag(ridge), right)
    return solution if solution is not None and np.isfinite(solution).all() else None


def _eliminate(matrix: F64, right: F64) -> F64 | None:
    """Gauss-Jordan with partial pivoting (the later row on equal pivots); None at a pivot below 1e-12."""
    work = np.concatenate([matrix, right[:, None]], axis=1)
    size = len(right)
    for column in range(size):
        below = np.abs(work[column:, column])
        pivot = column + size - column - 1 - int(np.argmax(below[::-1]))
        if abs(work[pivot, column]) < 1e-12:
            return None
        work[[column, pivot]] = work[[pivot, column]]
        work[column] /= work[column, column]
        for row in range(size):
            if row != column:
                work[row] -= work[row, column] * work[column]
    solution: F64 = work[:, -1]
    return solution
