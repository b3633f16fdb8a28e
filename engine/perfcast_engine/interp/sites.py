"""Curves at scattered sites, and what they say between sites (spec/02 section 4, spec/04 section 10.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from perfcast_engine.answer import F64, Mask
from perfcast_engine.interp.grid import Ints
from perfcast_engine.interp.hold import TINY

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
            util = np.where(below, self._low_util, self._high_util)[outside]
            value[outside] = self.sol(x[outside]) / util
        return value

    @cached_property
    def _low_util(self) -> float:
        return self._util(slice(None, TAIL))

    @cached_property
    def _high_util(self) -> float:
        return self._util(slice(-TAIL, None))

    def _util(self, part: slice) -> float:
        ms, sol = self.ms[part], self.sol(self.x[part])
        usable = (ms > 0) & (sol > 0)
        return float(np.median(sol[usable] / ms[usable])) if usable.any() else math.nan


@dataclass(frozen=True, eq=False)
class Curves:
    """Measured curves. sites: (S, A) distinct, in the order that breaks ties of distance; begin, end: (S,) rows of each
    site; x ascending within a site, ms (N,)."""

    sites: F64
    begin: Ints
    end: Ints
    x: F64
    ms: F64

    @classmethod
    def of(cls, site: Sequence[F64], x: F64, ms: F64, ranks: Mapping[tuple[float, ...], int] | None = None) -> Curves:
        """From N > 0 rows in any order, ``site`` by axis. Sites are listed by ``ranks``, equal and missing
        ones ascending."""
        order = np.lexsort((x, *site[::-1]))
        columns = [column[order] for column in site]
        fresh = np.ones(len(x) + 1, np.bool_)
        fresh[1:-1] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        start = np.flatnonzero(fresh)
        sites = np.stack([column[start[:-1]] for column in columns], axis=1)
        ranked = [(ranks or {}).get(tuple(each), 0) for each in sites.tolist()]
        listed = np.argsort(ranked, kind="stable")
        return cls(sites[listed], start[:-1][listed], start[1:][listed], x[order], ms[order])

    @cached_property
    def first(self) -> F64:
        return self.x[self.begin]

    @cached_property
    def last(self) -> F64:
        return self.x[self.end - 1]

    def find(self, site: F64) -> Ints:
        """The index of each of ``site`` (Q, A); -1 for one that was not measured."""
        same = (self.sites == site[:, None]).all(axis=2)
        return np.where(same.any(axis=1), same.argmax(axis=1), -1)

    def rows(self, site: int) -> slice:
        return slice(self.begin[site], self.end[site])

    def covers(self, site: Ints, x: F64) -> Mask:
        """Whether each site (index) was measured around x."""
        return (site >= 0) & (self.first[site] <= x) & (x <= self.last[site])


@dataclass(frozen=True, eq=False)
class Sites:
    """Curves with their roofline: ``sol(x, *site)``, ms; NaN where there is none."""

    curves: Curves
    sol: Callable[..., F64]
    _read: dict[int, Curve] = field(default_factory=dict, repr=False)

    def shape(self, x: F64, *site: float) -> F64:
        """ms at each x of one site: its own curve where it was measured, else what its neighbours say."""
        asked = np.array([site])
        own = self.curves.find(asked)
        if own[0] >= 0:
            return self.curve(int(own[0])).at(x)
        # which sites span x changes only at the ends of curves
        edges = self._edges
        stretch = np.searchsorted(edges, x, "left") + np.searchsorted(edges, x, "right")
        ms = np.empty(len(x))
        for which in np.unique(stretch):
            here = stretch == which
            near, weight = self._neighbours(asked, x[here][:1], own)
            ms[here] = self._mean(near[0], weight[0], x[here], site)
        return ms

    def on(self, site: Ints, x: F64) -> F64:
        """Each x on the curve of each site (index), or of one."""
        if site.ndim == 0:
            return self.curve(int(site)).at(x)
        ms = np.empty(len(x))
        for index in np.unique(site):
            here = site == index
            ms[here] = self.curve(index).at(x[here])
        return ms

    def between(self, site: F64, x: F64, own: Ints) -> F64:
        """ms at each site (Q, A) and x by the neighbours other than ``own`` (index, -1: none)."""
        near, weight = self._neighbours(site, x, own)
        return self._mean(near.T, weight.T, x, site.T)

    def curve(self, index: int) -> Curve:
        """That of one site, kept."""
        if index not in self._read:
            rows, site = self.curves.rows(index), self.curves.sites[index].tolist()
            self._read[index] = Curve(self.curves.x[rows], self.curves.ms[rows], lambda x: self.sol(x, *site))
        return self._read[index]

    @cached_property
    def _edges(self) -> F64:
        edges: F64 = np.unique(np.concatenate([self.curves.first, self.curves.last]))
        return edges

    @cached_property
    def _logs(self) -> F64:
        return _log2(self.curves.sites)

    def _neighbours(self, site: F64, x: F64, own: Ints) -> tuple[Ints, F64]:
        """The nearest sites of each site and x, and their weights, both (Q, <= NEIGHBOURS); weight 0 for none."""
        curves = self.curves
        others: Mask = np.arange(len(curves.sites)) != own[:, None]
        spans: Mask = (curves.first <= x[:, None]) & (x[:, None] <= curves.last) & others
        candidates = np.where(spans.any(axis=1, keepdims=True), spans, others)
        octaves = np.abs(self._logs - _log2(site)[:, None])
        distance: F64 = np.sqrt((octaves * octaves).sum(axis=2))
        near: Mask = candidates & (distance <= GATE)
        lone = np.flatnonzero(~near.any(axis=1))
        if len(lone):
            near[lone] = self._beyond(site[lone], candidates[lone], octaves[lone])
        chosen = np.argsort(np.where(near, distance, np.inf), axis=1, kind="stable")[:, :NEIGHBOURS]
        distance = np.take_along_axis(distance, chosen, axis=1)
        return chosen, np.where(np.take_along_axis(near, chosen, axis=1), 1 / (distance * distance + TINY), 0.0)

    def _beyond(self, site: F64, candidates: Mask, octaves: F64) -> Mask:
        """Sites that a query beyond the largest of them on exactly one axis may lean on, near on the other axes."""
        low = np.where(candidates[:, :, None], self.curves.sites, np.inf).min(axis=1)
        high = np.where(candidates[:, :, None], self.curves.sites, -np.inf).max(axis=1)
        over = site > high
        allowed = (over.sum(axis=1) == 1) & ~(site < low).any(axis=1)
        near: Mask = ((octaves <= GATE) | over[:, None]).all(axis=2)
        leans: Mask = candidates & allowed[:, None] & near
        return leans

    def _mean(self, near: Ints, weight: F64, x: F64, site: Sequence[float] | F64) -> F64:
        """The roofline at the mean utilisation of neighbours (<= NEIGHBOURS[, Q]); NaN where they have none."""
        mass, total = np.zeros(len(x)), np.zeros(len(x))
        for index, w in zip(near, weight, strict=True):
            ms, sol = self.on(index, x), self.sol(x, *self.curves.sites[index].T)
            usable = (w > 0) & np.isfinite(ms) & np.isfinite(sol) & (ms > 0) & (sol > 0)
            mass += np.where(usable, w, 0.0)
            total += np.where(usable, w * (np.where(usable, sol, 0.0) / np.where(usable, ms, 1.0)), 0.0)
        here = self.sol(x, *site)
        known = (mass > 0) & (here > 0)
        return np.where(known, here, np.nan) / np.where(known, total / np.where(mass > 0, mass, 1.0), 1.0)


def _log2(sites: F64) -> F64:
    # math.log2, not np.log2: mirrored ratios must give equal bits for ties to be ties
    return np.array([[math.log2(max(value, TINY)) for value in site] for site in sites.tolist()])


@dataclass(frozen=True, eq=False)
class PassSurface:
    """Passes of one phase. Prefill: sites (batch, KV tokens read), x new tokens. Decode: sites (batch,), x KV tokens
    read. Tokens are totals of the pass. ``sol(x, *site)``: the roofline of a pass, ms; NaN where there is none."""

    curves: Curves
    sol: Callable[..., F64]

    @cached_property
    def sites(self) -> Sites:
        return Sites(self.curves, self.sol)

    def at(self, x: F64, *site: F64) -> F64:
        """ms at each x of each site; NaN outside the measured domain and where nothing is near enough."""
        curves, asked = self.curves, np.stack(site, axis=1)
        inside = ((asked >= curves.sites.min(axis=0)) & (asked <= curves.sites.max(axis=0))).all(axis=1)
        inside &= (x >= curves.x.min()) & (x <= curves.x.max())
        own = curves.find(asked)
        ms = np.full(len(x), np.nan)
        measured = inside & curves.covers(own, x)
        ms[measured] = self.sites.on(own[measured], x[measured])
        rest = inside & ~measured
        bracketed = rest & (own < 0) & (np.searchsorted(self._rungs, asked[:, 0]) > 0)
        ms[bracketed] = self._bracket(asked[bracketed, 0], x[bracketed])
        rest &= ~bracketed
        if rest.any():
            ms[rest] = self.sites.between(asked[rest], x[rest], own[rest])
        return ms

    @cached_property
    def _rungs(self) -> F64:
        """Batches measured together with the next larger one, where a captured graph ends (decode only)."""
        if self.curves.sites.shape[1] != 1:
            return np.zeros(0)
        batches = self.curves.sites[:, 0]
        return batches[np.isin(batches + 1, batches)]

    def _bracket(self, batch: F64, x: F64) -> F64:
        """Between the batch just above the last rung and the next rung: one captured graph serves them all."""
        batches, rungs = self.curves.sites[:, 0], self._rungs
        above = np.searchsorted(rungs, batch)
        ends = np.append(rungs, batches[-1])
        low, high = (np.searchsorted(batches, b) for b in (rungs[above - 1] + 1, ends[above]))
        at_low, at_high = (np.where(self.curves.covers(end, x), self.sites.on(end, x), np.nan) for end in (low, high))
        weight = (batch - batches[low]) / np.maximum(batches[high] - batches[low], 1)
        both = at_low + (at_high - at_low) * weight
        return np.where(np.isnan(at_low), at_high, np.where(np.isnan(at_high), at_low, both))
