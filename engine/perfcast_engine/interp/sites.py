"""Curves at scattered sites, and what they say between sites (spec/02 section 4, spec/04 section 10.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from perfcast_engine.answer import F64, Mask
from perfcast_engine.interp.grid import Ints
from perfcast_engine.interp.util import TINY

NEIGHBOURS = 4
GATE = 2.0  # octaves
TAIL = 3  # points whose median utilisation holds beyond a curve's end


@dataclass(frozen=True, eq=False)
class Curve:
    """Latency over x of one site, x ascending. ``sol``: roofline in ms of x at the site."""

    x: F64
    ms: F64
    sol: Callable[[F64], F64]

    def at(self, x: F64) -> F64:
        """Linear between measured points, held at the utilisation of the nearest end; NaN where that has none."""
        value = np.interp(x, self.x, self.ms)
        below, above = x < self.x[0], x > self.x[-1]
        outside = below | above
        if outside.any():
            util = np.where(below, *self._utils)[outside]
            value[outside] = self.sol(x[outside]) / util
        return value

    @cached_property
    def _utils(self) -> tuple[float, float]:
        return self._util(slice(None, TAIL)), self._util(slice(-TAIL, None))

    def _util(self, part: slice) -> float:
        ms, sol = self.ms[part], self.sol(self.x[part])
        usable = (ms > 0) & (sol > 0)
        return float(np.median(sol[usable] / ms[usable])) if usable.any() else math.nan


@dataclass(frozen=True, eq=False)
class Curves:
    """Measured curves. sites: (S, A) distinct, in the order that breaks ties of distance; x, ms: of each site, x
    ascending."""

    sites: F64
    x: Sequence[F64]
    ms: Sequence[F64]

    @classmethod
    def of(cls, site: Sequence[F64], x: F64, ms: F64, ranks: Mapping[tuple[float, ...], int] | None = None) -> Curves:
        """From N > 0 rows in any order, ``site`` by axis. Sites are listed by ``ranks``, equal and missing
        ones ascending."""
        order = np.lexsort((x, *site[::-1]))
        columns = np.stack([column[order] for column in site])
        start = np.flatnonzero(np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0)))
        sites, rows = columns[:, start].T, np.split(order, start[1:])
        listed = np.argsort([(ranks or {}).get(tuple(each), 0) for each in sites.tolist()], kind="stable")
        return cls(sites[listed], [x[rows[i]] for i in listed], [ms[rows[i]] for i in listed])

    @cached_property
    def first(self) -> F64:
        return np.array([x[0] for x in self.x])

    @cached_property
    def last(self) -> F64:
        return np.array([x[-1] for x in self.x])

    def find(self, *site: float) -> int | None:
        """The index of a measured site."""
        return next(iter(np.flatnonzero((self.sites == site).all(axis=1)).tolist()), None)


@dataclass(frozen=True, eq=False)
class Sites:
    """Curves with their roofline: ``sol(x, *site)``, ms; NaN where there is none."""

    curves: Curves
    sol: Callable[..., F64]
    _read: dict[int, Curve] = field(default_factory=dict, repr=False)

    def shape(self, x: F64, *site: float) -> F64:
        """ms at each x of one site: its own curve where it was measured, else what its neighbours say."""
        own = self.curves.find(*site)
        return self.between(x, *site) if own is None else self.curve(own).at(x)

    def between(self, x: F64, *site: float) -> F64:
        """ms at each x of one site by its neighbours; NaN where there are none."""
        # which sites span x changes only at the ends of curves
        edges = self._edges
        stretch = np.searchsorted(edges, x, "left") + np.searchsorted(edges, x, "right")
        ms = np.empty(len(x))
        for which in np.unique(stretch):
            here = stretch == which
            near, weight = self._neighbours(site, x[here][0])
            ms[here] = self._mean(near, weight, x[here], site)
        return ms

    def curve(self, index: int) -> Curve:
        """That of one site, kept."""
        if index not in self._read:
            site = self.curves.sites[index].tolist()
            self._read[index] = Curve(self.curves.x[index], self.curves.ms[index], lambda x: self.sol(x, *site))
        return self._read[index]

    @cached_property
    def _edges(self) -> F64:
        edges: F64 = np.unique(np.concatenate([self.curves.first, self.curves.last]))
        return edges

    @cached_property
    def _logs(self) -> F64:
        return np.array([_log2(site) for site in self.curves.sites.tolist()])

    def _neighbours(self, site: tuple[float, ...], x: float) -> tuple[Ints, F64]:
        """The nearest NEIGHBOURS other sites around x, or wherever where none is, and their weights."""
        curves, asked = self.curves, np.array(site)
        others: Mask = (curves.sites != asked).any(axis=1)
        spans: Mask = (curves.first <= x) & (x <= curves.last) & others
        candidates = spans if spans.any() else others
        octaves = np.abs(self._logs - _log2(site))
        distance = np.sqrt((octaves * octaves).sum(axis=1))
        near: Mask = candidates & (distance <= GATE)
        if not near.any() and candidates.any():
            # beyond the largest of them on exactly one axis, those that are near on the other axes
            known = curves.sites[candidates]
            over = asked > known.max(axis=0)
            if over.sum() == 1 and not (asked < known.min(axis=0)).any():
                near = candidates & ((octaves <= GATE) | over).all(axis=1)
        chosen = np.flatnonzero(near)
        chosen = chosen[np.argsort(distance[chosen], kind="stable")][:NEIGHBOURS]
        return chosen, 1 / (distance[chosen] ** 2 + TINY)

    def _mean(self, near: Ints, weight: F64, x: F64, site: tuple[float, ...]) -> F64:
        """The roofline at the mean utilisation of the sites ``near``; NaN where they have none."""
        mass, total = np.zeros(len(x)), np.zeros(len(x))
        for index, w in zip(near.tolist(), weight, strict=True):
            curve = self.curve(index)
            ms, sol = curve.at(x), curve.sol(x)
            usable = np.isfinite(ms) & np.isfinite(sol) & (ms > 0) & (sol > 0)
            mass += np.where(usable, w, 0.0)
            total += np.where(usable, w * (np.where(usable, sol, 0.0) / np.where(usable, ms, 1.0)), 0.0)
        here = self.sol(x, *site)
        known = (mass > 0) & (here > 0)
        return np.where(known, here, np.nan) / np.where(known, total / np.where(mass > 0, mass, 1.0), 1.0)


def _log2(site: Sequence[float]) -> list[float]:
    # math.log2, not np.log2: mirrored ratios must give equal bits for ties to be ties
    return [math.log2(max(value, TINY)) for value in site]
