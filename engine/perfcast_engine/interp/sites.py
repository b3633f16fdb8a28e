"""Scattered sites: curves over tokens, one a measured weight shape, and shapes between them (spec/02 section 4)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64, Mask
from perfcast_engine.interp.grid import Ints, Sol
from perfcast_engine.interp.hold import TINY

NEIGHBOURS = 4
GATE = 2.0  # octaves
TAIL = 3  # points whose median utilisation holds beyond a curve's end


@dataclass(frozen=True, eq=False)
class Curve:
    """Latency over m of one site, m ascending. ``sol``: roofline in ms of m at the site's shape."""

    m: F64
    ms: F64
    sol: Sol

    def at(self, m: F64) -> F64:
        """Linear between measured points, held at the utilisation of the nearest end; NaN where that has none."""
        value = np.interp(m, self.m, self.ms)
        below, above = m < self.m[0], m > self.m[-1]
        outside = below | above
        if outside.any():
            util = np.where(below, self.low_util, self.high_util)[outside]
            value[outside] = self.sol(m[outside]) / util
        return value

    @cached_property
    def low_util(self) -> float:
        return self._util(slice(None, TAIL))

    @cached_property
    def high_util(self) -> float:
        return self._util(slice(-TAIL, None))

    def _util(self, part: slice) -> float:
        ms, sol = self.ms[part], self.sol(self.m[part])
        usable = (ms > 0) & (sol > 0)
        return float(np.median(sol[usable] / ms[usable])) if usable.any() else math.nan


@dataclass(frozen=True, eq=False)
class Sites:
    """The measured shapes of one table. n, k, rank: (S,), rank breaks ties of distance; start: (S + 1,) rows of each
    site in m and ms; ``sol(m, n, k)``: roofline in ms."""

    n: Ints
    k: Ints
    rank: Ints
    start: Ints
    m: F64
    ms: F64
    sol: Sol

    @classmethod
    def of(cls, m: Ints, n: Ints, k: Ints, ms: F64, rank_of: dict[tuple[int, int], int], sol: Sol) -> Sites:
        """From the rows of a table in any order; sites that ``rank_of`` does not list tie by shape."""
        order = np.lexsort((m, k, n))
        m, n, k, ms = m[order], n[order], k[order], ms[order]
        fresh = np.ones(len(m) + 1, np.bool_)
        fresh[1:-1] = (n[1:] != n[:-1]) | (k[1:] != k[:-1])
        start = np.flatnonzero(fresh)
        n, k = n[start[:-1]], k[start[:-1]]
        rank = np.array([rank_of.get(site, 0) for site in zip(n.tolist(), k.tolist(), strict=True)])
        return cls(n, k, rank, start, m.astype(np.float64), ms, sol)

    @cached_property
    def logs(self) -> tuple[F64, F64]:
        return _log2(self.n.tolist()), _log2(self.k.tolist())

    @cached_property
    def span(self) -> tuple[F64, F64]:
        """First and last m of each site."""
        return self.m[self.start[:-1]], self.m[self.start[1:] - 1]

    def curve(self, site: int) -> Curve:
        rows = slice(self.start[site], self.start[site + 1])
        n, k = float(self.n[site]), float(self.k[site])
        return Curve(self.m[rows], self.ms[rows], lambda m: self.sol(m, n, k))

    def shape(self, n: int, k: int) -> Curve | Between:
        """What answers for an (n, k) weight: its own curve where it was measured, else its neighbours."""
        own = np.flatnonzero((self.n == n) & (self.k == k))
        return self.curve(int(own[0])) if len(own) else Between(self, n, k)


@dataclass(frozen=True, eq=False)
class Between:
    """A shape that was not measured: its roofline at the mean utilisation of the nearest sites that span m."""

    sites: Sites
    n: int
    k: int
    _near: dict[bytes, list[tuple[float, Curve]]] = field(default_factory=dict, repr=False)

    def at(self, m: F64) -> F64:
        """ms at each m; NaN where no site is near enough."""
        first, last = self.sites.span
        edges = self._edges
        # which sites span m changes only at the ends of curves
        stretch = np.searchsorted(edges, m, "left") + np.searchsorted(edges, m, "right")
        out = np.empty(len(m))
        for which in np.unique(stretch):
            here = stretch == which
            probe = m[here][0]
            spans = (first <= probe) & (probe <= last)
            out[here] = self._mean(m[here], spans if spans.any() else np.ones(len(first), np.bool_))
        return out

    def _mean(self, m: F64, candidates: Mask) -> F64:
        key = candidates.tobytes()
        if key not in self._near:
            self._near[key] = list(self._neighbours(candidates))
        mass, total = np.zeros(len(m)), np.zeros(len(m))
        for weight, curve in self._near[key]:
            ms, sol = curve.at(m), curve.sol(m)
            usable = np.isfinite(ms) & np.isfinite(sol) & (ms > 0) & (sol > 0)
            mass += np.where(usable, weight, 0.0)
            total += np.where(usable, weight * (sol / np.where(usable, ms, 1.0)), 0.0)
        here = self.sites.sol(m, float(self.n), float(self.k))
        usable = (mass > 0) & (here > 0)
        return np.where(usable, here, np.nan) / np.where(usable, total / np.where(usable, mass, 1.0), 1.0)

    @cached_property
    def _edges(self) -> F64:
        first, last = self.sites.span
        return np.unique(np.concatenate([first, last]))

    @cached_property
    def _distance(self) -> tuple[F64, F64, F64]:
        """In octaves to every site: along n, along k, in all."""
        log_n, log_k = self.sites.logs
        dn, dk = log_n - _log2([self.n]), log_k - _log2([self.k])
        return np.abs(dn), np.abs(dk), np.sqrt(dn * dn + dk * dk)

    def _neighbours(self, candidates: Mask) -> Iterable[tuple[float, Curve]]:
        distance = self._distance[2]
        near = candidates & (distance <= GATE)
        if not near.any():
            near = self._beyond_one_axis(candidates)
        index = np.flatnonzero(near)
        for site in index[np.lexsort((self.sites.rank[index], distance[index]))][:NEIGHBOURS]:
            yield float(1 / (distance[site] * distance[site] + TINY)), self.sites.curve(int(site))

    def _beyond_one_axis(self, candidates: Mask) -> NDArray[np.bool_]:
        """Candidates near on one axis when the shape is larger than all of them on the other one alone."""
        nothing = np.zeros(len(candidates), np.bool_)
        n, k = self.sites.n[candidates], self.sites.k[candidates]
        if self.n < n.min() or self.k < k.min() or (self.n > n.max()) == (self.k > k.max()):
            return nothing
        other = self._distance[1] if self.n > n.max() else self._distance[0]
        return candidates & (other <= GATE)


def _log2(values: Iterable[float]) -> F64:
    # math.log2, not np.log2: mirrored ratios must give equal bits for ties to be ties
    return np.array([math.log2(max(value, TINY)) for value in values])
