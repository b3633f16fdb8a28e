"""Nearest samples of many queries, ties by sample order, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray
from perfcast_surface.arrays import Ints

from perfcast_engine.answer import F64

Index = NDArray[np.intp]
Axis = tuple[F64, Index]  # the values that there are along it, ascending, and which of them each sample has

DIRECT_CELLS = 50_000  # query-sample pairs that are quicker compared than pruned
TOGETHER = 512  # queries that are compared at once
BOX = 0.25  # queries in boxes whose corners are multiples of it share their candidates
BOXES = 1 << 12  # that are kept
FAMILY = 16  # half steps; boxes that lie in as many are pruned together
FEW = 32  # boxes that are one family, or one on each side of 0
MOST_CODES = 1 << 62
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
        places, place = self._boxed(queries, count)
        sizes = np.array([len(near) for near in places])
        listed = np.full((len(places), sizes.max()), self.at.shape[1])
        listed[np.arange(sizes.max()) < sizes[:, None]] = np.concatenate(places)
        padded = np.pad(self.at, ((0, 0), (0, 1)), constant_values=np.inf)
        order = np.argsort(sizes[place], kind="stable")
        index, distance = np.empty((count, len(order)), np.intp), np.empty((count, len(order)))
        for some in np.split(order, np.arange(TOGETHER, len(order), TOGETHER)):
            near = listed[place[some], : sizes[place[some[-1]]]]  # what is not there is infinitely far
            which, distance[:, some] = _compare(padded.take(near, axis=1), queries[:, some], count)
            index[:, some] = near[np.arange(len(some)), which]
        return index, distance

    @cached_property
    def _step(self) -> F64:
        """Along each axis, a third of the mean distance of its values (A, 1)."""
        return np.array([np.ptp(known) / (3 * max(len(known) - 1, 1)) or 1.0 for known, _ in self._axes])[:, None]

    def _boxed(self, queries: F64, count: int) -> tuple[list[Index], Index]:
        """Samples, ascending, that may be nearest in each of the boxes of a step that ``queries`` lie in, a point along
        an axis where they lie on multiples of it; and which box that is for each query."""
        ends = np.stack([np.floor(queries / self._step), np.ceil(queries / self._step)])
        places, place = _distinct(ends.sum(axis=0).astype(np.int64))
        names = [(column.tobytes(), count) for column in np.ascontiguousarray(places.T)]
        found = {name: box for name in names if (box := self._boxes.get(name)) is not None}  # another may clear them
        new = np.array([i for i, name in enumerate(names) if name not in found], np.intp)
        wide, inside = _distinct(places[:, new] // (FAMILY if len(new) > FEW else MOST_CODES))
        for family in range(wide.shape[1]):
            some = new[inside == family]
            box = places[:, some]
            low, high = box // 2 * self._step, -(-box // 2) * self._step
            around = np.stack([low.min(axis=1), high.max(axis=1)], axis=1)
            near = np.flatnonzero(_candidates(self._axes, around, np.array([0, 2]), count))
            sides = np.stack([low, high], axis=-1).reshape(len(low), -1)
            which = _candidates(Samples(self.at[:, near])._axes, sides, np.arange(0, sides.shape[1] + 1, 2), count)
            found |= {names[i]: near[each] for i, each in zip(some.tolist(), which, strict=True)}
        if len(self._boxes) > BOXES:
            self._boxes.clear()
        self._boxes.update(found)
        return [found[name] for name in names], place

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
    left = np.zeros((queries.shape[1], samples.shape[-1]))
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


def _distinct(columns: Ints) -> tuple[Ints, Index]:
    """The distinct ones of ``columns`` (A, N), and which of them each is."""
    codes = columns - columns.min(axis=1, keepdims=True, initial=0)
    sizes = (codes.max(axis=1, initial=0) + 1).tolist()
    if prod(sizes) >= MOST_CODES:
        return np.unique(columns, return_inverse=True, axis=1)
    _, first, which = np.unique(np.ravel_multi_index(tuple(codes), sizes), return_index=True, return_inverse=True)
    return columns[:, first], which
