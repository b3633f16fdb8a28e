"""Step times that rise strictly with the requests in them: a dip in the measurements is bridged, not passed on."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from perfcast_engine.answer import F64

# Batches whose step times are the ones that count; those in between are interpolated. Every answer uses all of them, so
# that a batch takes the same time whatever else is asked beside it.
BATCHES = (*range(1, 16), *range(16, 32, 4), *range(32, 64, 8), *range(64, 256, 16), *range(256, 513, 32))


def batches_to(most: float) -> F64:
    """0, BATCHES, and as many steps of an eighth of an octave beyond as it takes to reach ``most``."""
    beyond = [512.0]
    while beyond[-1] < most:
        beyond.append(float(np.ceil(beyond[-1] * 1.125)))
    return np.array([0, *BATCHES, *beyond[1:]], np.float64)


def rising(grid: F64, times: F64, at: F64, row: NDArray[np.intp] | None = None) -> F64:
    """``times`` (R, K) over ``grid`` (K,) read at ``at`` (N,), each in its ``row`` (N,) of the R (default: the one).

    Only times above all before them count; between two of those a straight line, beyond the last one the mean slope.
    NaN where the next time on the grid is NaN.
    """
    out = np.empty(len(at))
    for index, curve in enumerate(times):
        where = np.arange(len(at)) if row is None else np.flatnonzero(row == index)
        if len(where):
            out[where] = _read(grid, curve, at[where])
    return out


def _read(grid: F64, curve: F64, at: F64) -> F64:
    known = np.where(np.isnan(curve), -np.inf, curve)
    highest = np.maximum.accumulate(known)
    counts = known > np.concatenate([[-np.inf], highest[:-1]])
    x, y = grid[counts], curve[counts]
    if not len(x):
        return np.full(len(at), np.nan)
    slope = (y[-1] - y[0]) / (x[-1] - x[0]) if len(x) > 1 else 0.0
    value = np.interp(at, x, y) + slope * np.maximum(at - x[-1], 0)
    return np.where(np.isnan(curve[np.searchsorted(grid, at)]), np.nan, value)
