"""Many points, so many at a time that what they take stays in the processor's cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from perfcast_surface.arrays import F64, Ints

BAND = 1 << 14
before_each: ContextVar[Callable[[], object]] = ContextVar("before_each", default=bool)
"""Called before each band, of whatever is evaluated. What it raises ends that: for work that may become unwanted."""


def in_bands(evaluate: Callable[..., F64], *values: Any) -> F64:
    """``evaluate`` of columns of counts, BAND points at a time; a single value that holds for all points stays one."""
    columns = [np.atleast_1d(np.asarray(value)) for value in values]
    (n,) = np.broadcast_shapes(*(column.shape for column in columns))
    return banded(evaluate, [column.astype(np.int64, copy=False) for column in columns], n)


def banded(evaluate: Callable[..., F64], columns: Sequence[Ints], n: int) -> F64:
    """``in_bands`` of ``columns``, (N,) or (1,)."""
    if n <= BAND:
        before_each.get()()
        ms = evaluate(*columns)
        return ms if len(ms) == n else np.repeat(ms, n)
    ms = np.empty(n)
    for band in (slice(start, start + BAND) for start in range(0, n, BAND)):
        before_each.get()()
        ms[band] = evaluate(*(column if len(column) == 1 else column[band] for column in columns))
    return ms
