"""Nearest samples of many queries, ties by sample order, in bounded memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64

Index = NDArray[np.intp]

DIRECT_CELLS = 50_000  # query-sample pairs that are quicker compared than pruned
BLOCK = 256  # queries that share their candidates
SPLIT = 8  # parts that a larger block is pruned for at a time
SLACK = 1 + 1e-9  # on bounds, for rounding
BITS = 10  # of each axis in the order that keeps near queries together


def nearest(samples: F64, queries: F64, count: int) -> tuple[Index, F64]:
    """Indices and Euclidean distances, both (min(count, N), Q), of the nearest ``samples`` (A, N) of each of the
    ``queries`` (A, Q), ascending by (distance, sample index)."""
    count = min(count, samples.shape[1])
    total = queries.shape[1]
    if samples.shape[1] * total <= DIRECT_CELLS:
        return _compare(samples, queries, count)
    index, distance = np.empty((count, total), np.intp), np.empty((count, total))
    order = np.argsort(_morton(queries), kind="stable")
    # (queries, candidates) still to be looked at: pruned together, then in ever smaller parts
    work = [(order, np.arange(samples.shape[1]))]
    while work:
        block, some = work.pop()
        asked = queries[:, block]
        some = some[candidates(samples[:, some], asked, count)]
        if len(block) <= BLOCK:
            chosen, distance[:, block] = _compare(samples[:, some], asked, count)
            index[:, block] = some[chosen]
        else:
            work += [(part, some) for part in np.array_split(block, min(SPLIT, -(-len(block) // BLOCK)))]
    return index, distance


def _compare(samples: F64, queries: F64, count: int) -> tuple[Index, F64]:
    left = np.zeros((queries.shape[1], samples.shape[1]))
    for values, asked in zip(samples, queries, strict=True):
        step = values - asked[:, None]
        step *= step
        left += step
    np.sqrt(left, out=left)
    rows = np.arange(len(left))
    index, distance = np.empty((count, len(left)), np.intp), np.empty((count, len(left)))
    for rank in range(count):
        index[rank] = left.argmin(axis=1)
        distance[rank] = left[rows, index[rank]]
        left[rows, index[rank]] = np.inf
    return index, distance


def candidates(samples: F64, queries: F64, count: int) -> Index:
    """Samples that may be among the ``count`` nearest of any of ``queries``, judged by the box around these."""
    least, most = np.zeros(samples.shape[1]), np.zeros(samples.shape[1])
    for values, asked in zip(samples, queries, strict=True):
        low, high = asked.min(), asked.max()
        away = np.maximum(low - values, values - high)
        reach = away + (high - low)
        most += reach * reach
        np.maximum(away, 0.0, out=away)
        least += away * away
    limit = np.partition(most, count - 1)[count - 1]
    return np.flatnonzero(least <= limit * SLACK)


def _morton(queries: F64) -> NDArray[np.int64]:
    """A code of each query such that near codes mean near queries."""
    low = queries.min(axis=1, keepdims=True)
    span = np.maximum(queries.max(axis=1, keepdims=True) - low, np.finfo(np.float64).tiny)
    cells = ((queries - low) / span * (2**BITS - 1)).astype(np.int64)
    code = np.zeros(queries.shape[1], np.int64)
    for bit in range(BITS - 1, -1, -1):
        for cell in cells:
            code = (code << 1) | ((cell >> bit) & 1)
    return code
