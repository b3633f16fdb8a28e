"""Tables over one or two axes: how their readers interpolate them, and how far that is off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfcast_client.results import F64

BETWEEN = (0.25, 0.5, 0.75)


def counts(low: int, high: int, resolution: int) -> F64:
    """Up to ``resolution`` whole numbers from ``low`` to ``high``, dense at the small end, strictly increasing."""
    if low >= high:
        return np.array([float(low)])
    wanted = min(resolution, high - low + 1)
    axis = np.unique(np.geomspace(max(low, 1), high, wanted).round())
    spread = np.unique(np.linspace(low, high, wanted).round())
    missing = wanted - len(axis)
    while missing > 0:  # rounding merged some: fill up from an even spread
        fresh = np.setdiff1d(spread, axis)
        if not len(fresh):
            break
        axis = np.union1d(axis, fresh[:: max(1, len(fresh) // missing)][:missing])
        missing = wanted - len(axis)
    return axis.astype(np.float64)


def midpoints(axis: F64) -> F64:
    """Whole numbers between the points of an axis, where a reader of the table interpolates."""
    inner = [np.round(axis[:-1] + share * np.diff(axis)) for share in BETWEEN]
    return np.setdiff1d(np.concatenate(inner), axis) if len(axis) > 1 else np.zeros(0)


def linear(axis: F64, values: F64, at: F64) -> F64:
    return np.interp(at, axis, values)


def bilinear(rows: F64, columns: F64, values: F64, at_row: F64, at_column: F64) -> F64:
    """Values (R, C) at points (N,) inside of the axes."""

    def place(axis: F64, at: F64) -> tuple[np.ndarray, F64]:
        cell = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, max(len(axis) - 2, 0))
        upper = np.minimum(cell + 1, len(axis) - 1)
        width = axis[upper] - axis[cell]
        return cell, np.divide(at - axis[cell], width, out=np.zeros_like(at), where=width > 0)

    (i, x), (j, y) = place(rows, at_row), place(columns, at_column)
    up, right = np.minimum(i + 1, len(rows) - 1), np.minimum(j + 1, len(columns) - 1)
    low = values[i, j] * (1 - y) + values[i, right] * y
    high = values[up, j] * (1 - y) + values[up, right] * y
    interpolated: F64 = low * (1 - x) + high * x
    return interpolated


def worst(interpolated: F64, predicted: F64) -> float:
    """The largest relative deviation; 0 where nothing is interpolated."""
    return float(np.max(np.abs(interpolated - predicted) / predicted, initial=0.0))


def require_sound(axes: Sequence[F64], values: Sequence[F64]) -> None:
    """ValueError unless axes increase strictly and all values are finite and positive."""
    for axis in axes:
        if not (np.isfinite(axis).all() and (np.diff(axis) > 0).all()):
            raise ValueError("refused to write a table: an axis is not finite and strictly increasing")
    for column in values:
        if not (len(column) and np.isfinite(column).all() and (column > 0).all()):
            raise ValueError("refused to write a table: it holds values that are missing, not finite or not positive")
