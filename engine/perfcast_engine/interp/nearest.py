"""Nearest samples of many queries, ties by sample order, in bounded memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64

CELLS_PER_CHUNK = 2_000_000


def nearest(samples: F64, queries: F64, count: int) -> tuple[NDArray[np.intp], F64]:
    """Indices and Euclidean distances, both (Q, min(count, N)), of the nearest ``samples`` (N, A) of each of the
    ``queries`` (Q, A), ascending by (distance, sample index)."""
    count = min(count, len(samples))
    index = np.empty((len(queries), count), np.intp)
    distance = np.empty((len(queries), count))
    step = max(1, CELLS_PER_CHUNK // max(len(samples), 1))
    for lo in range(0, len(queries), step):
        part = slice(lo, lo + step)
        index[part], distance[part] = _nearest(samples, queries[part], count)
    return index, distance


def _nearest(samples: F64, queries: F64, count: int) -> tuple[NDArray[np.intp], F64]:
    square = np.zeros((len(queries), len(samples)))
    for axis in range(samples.shape[1]):
        square += (samples[:, axis] - queries[:, axis, None]) ** 2
    distance = np.sqrt(square)
    limit = np.partition(distance, count - 1, axis=1)[:, count - 1 : count]
    row, column = np.nonzero(distance <= limit)
    value = distance[row, column]
    order = np.lexsort((column, value, row))
    row, column, value = row[order], column[order], value[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    keep = rank < count
    return column[keep].reshape(-1, count), value[keep].reshape(-1, count)
