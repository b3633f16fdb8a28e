"""Nearest samples of many queries, ties by sample order, in bounded memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64

Index = NDArray[np.intp]

DIRECT_CELLS = 200_000  # query-sample pairs that are quicker compared than pruned
BLOCK = 64  # queries that share their candidates
SLACK = 1 + 1e-9  # on bounds, for rounding
BITS = 10  # of each axis in the order that keeps near queries together


def nearest(samples: F64, queries: F64, count: int) -> tuple[Index, F64]:
    """Indices and Euclidean distances, both (Q, min(count, N)), of the nearest ``samples`` (N, A) of each of the
    ``queries`` (Q, A), ascending by (distance, sample index)."""
    count = min(count, len(samples))
    if len(samples) * len(queries) <= DIRECT_CELLS:
        return _compare(samples, queries, count)
    index = np.empty((len(queries), count), np.intp)
    distance = np.empty((len(queries), count))
    order = np.argsort(_morton(queries), kind="stable")
    for start in range(0, len(queries), BLOCK):
        block = order[start : start + BLOCK]
        some = _candidates(samples, queries[block], count)
        chosen, distance[block] = _compare(samples[some], queries[block], count)
        index[block] = some[chosen]
    return index, distance


def _compare(samples: F64, queries: F64, count: int) -> tuple[Index, F64]:
    square = np.zeros((len(queries), len(samples)))
    for axis in range(samples.shape[1]):
        step = samples[:, axis] - queries[:, axis, None]
        step *= step
        square += step
    distance = np.sqrt(square, out=square)
    limit = np.partition(distance, count - 1, axis=1)[:, count - 1 : count]
    row, column = np.nonzero(distance <= limit)
    value = distance[row, column]
    order = np.lexsort((column, value, row))
    row, column, value = row[order], column[order], value[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    keep = rank < count
    return column[keep].reshape(-1, count), value[keep].reshape(-1, count)


def _candidates(samples: F64, queries: F64, count: int) -> Index:
    """Samples that may be among the ``count`` nearest of any of ``queries``, judged by the box around these."""
    low, high = queries.min(axis=0), queries.max(axis=0)
    least, most = np.zeros(len(samples)), np.zeros(len(samples))
    for axis in range(samples.shape[1]):
        under, over = low[axis] - samples[:, axis], samples[:, axis] - high[axis]
        gap = np.maximum(np.maximum(under, over), 0.0)
        reach = np.maximum(under, over) + (high[axis] - low[axis])
        least += gap * gap
        most += reach * reach
    limit = np.partition(most, count - 1)[count - 1]
    return np.flatnonzero(least <= limit * SLACK)


def _morton(queries: F64) -> NDArray[np.int64]:
    """A code of each query such that near codes mean near queries."""
    low = queries.min(axis=0)
    span = np.maximum(queries.max(axis=0) - low, np.finfo(np.float64).tiny)
    cell = ((queries - low) / span * (2**BITS - 1)).astype(np.int64)
    code = np.zeros(len(queries), np.int64)
    for bit in range(BITS - 1, -1, -1):
        for axis in range(queries.shape[1]):
            code = (code << 1) | ((cell[:, axis] >> bit) & 1)
    return code
