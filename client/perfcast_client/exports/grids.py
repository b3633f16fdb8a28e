"""Tables over one or two axes: how their readers interpolate them, and how far that is off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from perfcast_client.results import F64

EVERY = 1 << 16  # whole numbers of one axis at which a table is held against predictions
EVERY_OF_TWO = 512  # the same of each of two axes


def counts(low: int, high: int, resolution: int) -> F64:
    """Up to ``resolution`` whole numbers from ``low`` to ``high``, dense at the small end, strictly increasing; a
    single one is ``high``."""
    if low >= high or resolution < 2:
        return np.array([float(high)])
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


def wholes(low: float, high: float, most: int = EVERY) -> F64:
    """Every whole number from ``low`` to ``high``, or about ``most`` of them: more at the small end, and those
    around powers of two, where engines change what they run."""
    low, high = int(low), int(high)
    if high - low < most:
        return np.arange(low, high + 1, dtype=np.float64)
    powers = 2.0 ** np.arange(high.bit_length())
    around = np.concatenate([powers - 1, powers, powers + 1])
    return np.union1d(counts(low, high, most), around[(around >= low) & (around <= high)])


def across(rows: F64, columns: F64) -> tuple[F64, F64]:
    """All pairs of whole numbers over the ranges of two axes, columns (N,); of long ranges about EVERY_OF_TWO."""
    row, column = np.meshgrid(*(wholes(axis[0], axis[-1], EVERY_OF_TWO) for axis in (rows, columns)))
    return row.ravel(), column.ravel()


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


def require_least(**settings: tuple[float, float]) -> None:
    """ValueError that names a setting, given as (value, least value), which is less than it can be."""
    for name, (value, least) in settings.items():
        if not least <= value < np.inf:
            raise ValueError(f"{name} must be at least {least}, not {value}")
