"""Nearest samples of many queries, ties by sample order, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from perfcast_surface.arrays import Ints

from perfcast_engine.answer import F64

Index = NDArray[np.intp]
Boxes = tuple[Ints, NDArray[Any]]  # K codes of their places, ascending, and (W, K) candidates, ascending, behind them N

DIRECT_CELLS = 50_000  # query-sample pairs that are quicker compared than pruned
TOGETHER = 1024  # queries that are compared at once
CELLS = 1 << 17  # box-sample pairs that are pruned at once
KEPT = 1 << 20  # candidates
COARSE = 4  # steps; boxes of one are pruned from what is near to the box of as many that they lie in
MANY = 256  # queries that are worth boxes of one step
NARROW = 100  # samples that are quicker sorted than searched for the least
STEPS = 128  # make up the span of an axis along which samples lie uneven
SLACK = 1e-9  # on bounds, relative to squares, for rounding
MIX = np.cumprod(np.full(16, 0x9E3779B97F4A7C15, np.uint64)).view(np.int64)  # no two sums of small multiples are alike
FAR = np.full((16, 1), np.inf)  # what is not there is that far
NONE: Boxes = np.array([np.iinfo(np.int64).max]), np.zeros((0, 1), np.uint16)  # but a box that no query lies in


@dataclass(frozen=True, eq=False)
class Samples:
    """What queries are near to, at (A, N)."""

    at: F64
    _boxes: dict[tuple[int, int], Boxes] = field(default_factory=dict, init=False, repr=False)

    def nearest(self, queries: F64, count: int) -> tuple[Index, F64]:
        """Indices and Euclidean distances, both (min(count, N), Q), of the nearest samples of each of the ``queries``
        (A, Q), ascending by (distance, sample index)."""
        count = min(count, self.at.shape[1])
        if self.at.shape[1] * queries.shape[1] <= DIRECT_CELLS:
            return _least(_squares(self.at, queries[..., None]), count)
        places = np.stack([np.floor(queries / self._step), np.ceil(queries / self._step)])
        listed, box = self._boxed(places, count, COARSE if queries.shape[1] < MANY else 1)
        sizes = (listed < self.at.shape[1]).sum(axis=0, dtype=listed.dtype)[box]
        index, distance = np.empty((count, len(box)), np.intp), np.empty((count, len(box)))
        padded = np.append(self.at, FAR[: len(self.at)], axis=1)
        for some in np.split(sizes.argsort(kind="stable"), np.arange(TOGETHER, len(box), TOGETHER)):
            near = listed[: sizes[some[-1]]].take(box[some], axis=1)
            squares = _squares(padded.take(near, axis=1), queries[:, some])
            least, distance[:, some] = _least(squares.T.copy(), count)
            index[:, some] = near.take(least * len(some) + np.arange(len(some)))
        return index, distance

    @cached_property
    def _step(self) -> F64:
        """Along each axis, a third of what is between most samples (A, 1)."""
        known = [np.unique(values) for values in self.at]
        gaps = [np.diff(values) if len(values) > 1 else np.ones(1) for values in known]
        return np.array([max(np.median(each), each.sum() / STEPS) / 3 for each in gaps])[:, None]

    def _boxed(self, ends: F64, count: int, steps: int) -> tuple[NDArray[Any], Index]:
        """The candidates of boxes of ``steps``, a point along an axis where both ``ends`` (2, A, Q) are the same
        multiple of it, and in which of them all between them lies."""
        ends = np.stack([np.floor(ends[0] / steps), np.ceil(ends[1] / steps)])
        codes = MIX[: ends.shape[1]] @ ends.sum(axis=0).astype(np.int64)
        known, listed = self._boxes.get((count, steps), NONE)
        box = np.minimum(known.searchsorted(codes), len(known) - 1)
        gone = known[box] != codes
        if gone.any():
            if listed.size > KEPT:
                (known, listed), gone = NONE, np.ones(len(codes), np.bool_)
            new, first, again = np.unique(codes[gone], return_index=True, return_inverse=True)
            ends = ends[..., gone][..., first] * steps
            among = np.broadcast_to(np.arange(self.at.shape[1]), (len(new), self.at.shape[1]))
            if steps == 1:
                around, place = self._boxed(ends, count, COARSE)
                among = around.T[place]
            which, near = self.candidates(among, ends[0] * self._step, ends[1] * self._step, count)
            sizes, (most, old) = np.bincount(which), listed.shape
            kind = np.min_scalar_type(self.at.shape[1])  # small, to be read soon
            grown = np.full((max(most, sizes.max()), old + len(new)), self.at.shape[1], kind)
            grown[:most, :old] = listed
            grown[np.arange(len(near)) - (np.cumsum(sizes) - sizes)[which], old + which] = near
            known = np.append(known, new)
            order = known.argsort()
            listed, box[gone] = grown[:, order], old + again
            self._boxes[count, steps] = known[order], listed
            box = order.argsort()[box]
        return listed, box

    def candidates(self, among: Index, low: F64, high: F64, count: int) -> tuple[Index, Index]:
        """Which of the boxes from ``low`` to ``high`` (A, B), and samples of those ``among`` (B, W) that may be nearest
        in it: those that as many as ``count`` of the nearest to its centre do not beat in all of its corners."""
        if len(among) > 1 and among.size > CELLS:
            n = len(among) // 2
            (box, near), (rest, more) = (self.candidates(among[i], low[:, i], high[:, i], count) for i in np.s_[:n, n:])
            return np.append(box, rest + n), np.append(near, more)
        at = np.append(self.at, FAR[: len(self.at)], axis=1).take(among, axis=1)
        centre, half = (low + high) / 2, (high - low) / 2
        off = _squares(at, centre[..., None])
        lead = off.argpartition(count - 1, axis=1)[:, :count]
        ahead = np.take_along_axis(off, lead, axis=1)
        slack = SLACK * (ahead.max(axis=1) + np.square(centre).sum(axis=0))
        reach = (np.sqrt(ahead.max(axis=1)) + 2 * np.sqrt(np.square(half).sum(axis=0))) ** 2 + slack
        box, near = np.divmod(np.flatnonzero(off <= reach[:, None]), off.shape[1])
        lead = lead[box].T
        turns = (2 * side[box] * np.abs(x[box, near] - x[box, lead]) for side, x in zip(half, at, strict=True))
        keep = ~(off[box, near] - ahead[box].T > sum(turns) + slack[box]).all(axis=0)
        return box[keep], among[box[keep], near[keep]]


def _squares(samples: F64, queries: F64) -> F64:
    """Of distances."""
    left: F64 = np.square(samples[0] - queries[0])
    for values, asked in zip(samples[1:], queries[1:], strict=True):
        left += np.square(values - asked)
    return left


def _least(squares: F64, count: int) -> tuple[Index, F64]:
    """Places and roots, (count, Q), of the least of each row of ``squares`` (Q, N), ascending by (root, place)."""
    rows, columns = squares.shape
    least, left = np.empty((count, rows), np.intp), slice(None)
    if columns <= NARROW:
        bits = (columns - 1).bit_length()
        keys = squares.view(np.int64) & -1 << bits  # which sort as the squares do, but for the last bits
        keys |= np.arange(columns)
        keys.sort(axis=1)
        keys = keys[:, : count + 1].T.copy()
        least = keys[:count] & ~(-1 << bits)
        left = ((keys[1:] >> bits) - (keys[:-1] >> bits) <= 1).any(axis=0)
    roots = np.sqrt(squares[left])
    each = np.arange(len(roots))
    for rank in range(count if len(roots) else 0):
        least[rank, left] = at = roots.argmin(axis=1)
        roots[each, at] = np.inf
    return least, np.sqrt(squares.take(least + np.arange(rows) * columns))
