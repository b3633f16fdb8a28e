"""Nearest samples of many queries, ties by sample order, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64

Index = NDArray[np.intp]
Axis = tuple[F64, Index]  # the values that there are along it, ascending, and which of them each sample has

DIRECT_CELLS = 50_000  # query-sample pairs that are quicker compared than pruned
BLOCK = 256  # most queries that share their candidates; fewer where there are fewer than BLOCKS times as many
BLOCKS = 16
TOGETHER = 64  # blocks that are pruned at once
BOX = 0.25  # queries in boxes whose corners are multiples of it share their candidates
BOXES = 1 << 8  # that are kept
SLACK = 1e-9  # on bounds, relative to squared distances, for rounding


@dataclass(frozen=True, eq=False)
class Samples:
    """What queries are near to, at (A, N)."""

    at: F64
    _boxes: dict[tuple[bytes, int], Index] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def _axes(self) -> list[Axis]:
        return [np.unique(values, return_inverse=True) for values in self.at]

    def nearest(self, queries: F64, count: int) -> tuple[Index, F64]:
        """Indices and Euclidean distances, both (min(count, N), Q), of the nearest samples of each of the ``queries``
        (A, Q), ascending by (distance, sample index)."""
        count = min(count, self.at.shape[1])
        if self.at.shape[1] * queries.shape[1] <= DIRECT_CELLS:
            return _compare(self.at, queries, count)
        if queries.shape[1] * count <= DIRECT_CELLS:
            near = self.near(queries, count)
            if queries.shape[1] * len(near) <= DIRECT_CELLS:
                at, found = _compare(self.at[:, near], queries, count)
                return near[at], found
        order, bounds = _blocks(self._axes, queries)
        queries = queries[:, order]
        index, distance = np.empty((count, len(order)), np.intp), np.empty((count, len(order)))
        for first in range(0, len(bounds) - 1, TOGETHER):
            some = bounds[first : first + TOGETHER + 1]
            for near, low, high in zip(_candidates(self._axes, queries, some, count), some, some[1:], strict=False):
                block, chosen = order[low:high], np.flatnonzero(near)
                at, distance[:, block] = _compare(self.at[:, chosen], queries[:, low:high], count)
                index[:, block] = chosen[at]
        return index, distance

    def near(self, queries: F64, count: int) -> Index:
        """Samples, ascending, of which the ``count`` nearest to anything in the box around ``queries`` are some."""
        ends = np.floor(queries.min(axis=1) / BOX), np.ceil(queries.max(axis=1) / BOX)
        box = np.stack(ends, axis=1) * BOX
        key = box.tobytes(), count
        found = self._boxes.get(key)
        if found is None:
            if len(self._boxes) >= BOXES:
                self._boxes.clear()
            found = self._boxes[key] = np.flatnonzero(_candidates(self._axes, box, np.array([0, 2]), count))
        return found


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


def _candidates(axes: Sequence[Axis], queries: F64, bounds: Index, count: int) -> NDArray[np.bool_]:
    """(blocks, samples): which may be among the ``count`` nearest of any query of a block, from one bound to the next.

    Along an axis, by how much the square of the distance to one value exceeds that to another is a line over the query.
    Its values at both ends of a block bound the excess over the nearest value, and sums of these bound the ranks.
    """
    least, most = np.zeros((2, len(bounds) - 1, len(axes[0][1])))
    slack = np.zeros((len(bounds) - 1, 1))
    for (known, code), asked in zip(axes, queries[:, : bounds[-1]], strict=True):
        ends = np.stack([extreme.reduceat(asked, bounds[:-1]) for extreme in (np.minimum, np.maximum)])
        squares = (known - ends[..., None]) ** 2
        lines = squares[..., None] - squares[:, :, None]
        least += lines.min(axis=0).max(axis=-1).take(code, axis=1)
        most += lines.max(axis=(0, -1)).take(code, axis=1)
        slack += squares.max(axis=(0, 2))[:, None] * SLACK
    most.partition(count - 1, axis=1)
    return least <= most[:, count - 1 : count] + slack


def _blocks(axes: Sequence[Axis], queries: F64) -> tuple[Index, Index]:
    """An order of the queries and the bounds of blocks in it, each of which lies between few values of every axis."""
    order, bounds = np.arange(queries.shape[1]), [queries.shape[1]]
    places = [np.interp(asked, known, np.arange(len(known))) for asked, (known, _) in zip(queries, axes, strict=True)]
    most = min(BLOCK, max(BLOCK // BLOCKS, len(order) // BLOCKS))
    work = [(0, len(order), [place for place in places if np.ptp(place)])]
    while work:
        low, high, places = work.pop()
        if high - low <= most or not places:
            bounds.append(low)
            continue
        half = (high - low) // 2
        parts = np.argpartition(max(places, key=np.ptp), half)
        order[low:high] = order[low:high][parts]
        for at, part in ((low, parts[:half]), (low + half, parts[half:])):
            work.append((at, at + len(part), [place[part] for place in places]))
    return order, np.sort(bounds)
