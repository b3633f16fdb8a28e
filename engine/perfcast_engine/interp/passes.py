"""Measured whole passes as curves at scattered sites, and passes between them (spec/04 section 10.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfcast_engine.answer import F64, Mask
from perfcast_engine.interp.grid import Ints
from perfcast_engine.interp.hold import TINY
from perfcast_engine.interp.sites import GATE, NEIGHBOURS, Curve


@dataclass(frozen=True, eq=False)
class PassCurves:
    """Passes of one phase as curves. sites: (S, A) distinct, ascending; start: (S + 1,) rows of each site; x ascending
    within a site, ms (N,). Prefill: sites (batch, KV tokens read), x new tokens. Decode: sites (batch,), x KV tokens
    read. Tokens are totals of the pass."""

    sites: F64
    start: Ints
    x: F64
    ms: F64

    @classmethod
    def of(cls, site: F64, x: F64, ms: F64) -> PassCurves | None:
        """From rows in any order; site: (N, A). None without rows."""
        if not len(x):
            return None
        order = np.lexsort((x, *site.T[::-1]))
        site, x, ms = site[order], x[order], ms[order]
        fresh = np.ones(len(x) + 1, np.bool_)
        fresh[1:-1] = (site[1:] != site[:-1]).any(axis=1)
        start = np.flatnonzero(fresh)
        return cls(site[start[:-1]], start, x, ms)

    @cached_property
    def first(self) -> F64:
        return self.x[self.start[:-1]]

    @cached_property
    def last(self) -> F64:
        return self.x[self.start[1:] - 1]

    @cached_property
    def domain(self) -> tuple[F64, F64]:
        """Smallest and largest of each site axis and of x."""
        low, high = self.sites.min(axis=0), self.sites.max(axis=0)
        return np.append(low, self.x.min()), np.append(high, self.x.max())

    def find(self, site: F64) -> Ints:
        """The index of each of ``site`` (Q, A); -1 for one that was not measured."""
        same = (self.sites == site[:, None]).all(axis=2)
        return np.where(same.any(axis=1), same.argmax(axis=1), -1)

    def rows(self, site: int) -> slice:
        return slice(self.start[site], self.start[site + 1])


@dataclass(frozen=True, eq=False)
class PassSurface:
    """Curves with the roofline of a pass: ``sol``: ms at sites (Q, A) and x (Q,), NaN where there is none."""

    curves: PassCurves
    sol: Callable[[F64, F64], F64]

    def at(self, site: F64, x: F64) -> F64:
        """ms at each site (Q, A) and x (Q,); NaN outside the measured domain and where nothing is near enough."""
        curves = self.curves
        low, high = curves.domain
        asked = np.column_stack([site, x])
        inside = ((asked >= low) & (asked <= high)).all(axis=1)
        own = curves.find(site)
        ms = np.full(len(x), np.nan)
        on_curve = inside & self._covers(own, x)
        ms[on_curve] = self._on(own[on_curve], x[on_curve])
        rest = inside & ~on_curve
        bracketed = rest & (own < 0) & self._above_a_rung(site)
        ms[bracketed] = self._bracket(site[bracketed, 0], x[bracketed])
        rest &= ~bracketed
        if rest.any():
            ms[rest] = self._between(site[rest], x[rest], own[rest])
        return ms

    def _covers(self, site: Ints, x: F64) -> Mask:
        return (site >= 0) & (self.curves.first[site] <= x) & (x <= self.curves.last[site])

    def _on(self, site: Ints, x: F64) -> F64:
        """Each x on the curve of each site (index)."""
        ms = np.empty(len(x))
        for index in np.unique(site):
            here = site == index
            ms[here] = self._curves[index].at(x[here])
        return ms

    @cached_property
    def _curves(self) -> list[Curve]:
        def curve(index: int) -> Curve:
            rows, site = self.curves.rows(index), self.curves.sites[index]
            return Curve(self.curves.x[rows], self.curves.ms[rows], lambda x: self.sol(np.tile(site, (len(x), 1)), x))

        return [curve(index) for index in range(len(self.curves.sites))]

    @cached_property
    def _rungs(self) -> F64:
        """Batches measured together with the next larger one, where a captured graph ends (decode only)."""
        if self.curves.sites.shape[1] != 1:
            return np.zeros(0)
        batches = self.curves.sites[:, 0]
        return batches[np.isin(batches + 1, batches)]

    def _above_a_rung(self, site: F64) -> Mask:
        return np.searchsorted(self._rungs, site[:, 0]) > 0

    def _bracket(self, batch: F64, x: F64) -> F64:
        """Between the batch just above the last rung and the next rung: one captured graph serves them all."""
        batches, rungs = self.curves.sites[:, 0], self._rungs
        above = np.searchsorted(rungs, batch)
        ends = np.append(rungs, batches[-1])
        low, high = (np.searchsorted(batches, b) for b in (rungs[above - 1] + 1, ends[above]))
        usable_low, usable_high = self._covers(low, x), self._covers(high, x)
        at_low, at_high = self._on(low, x), self._on(high, x)
        weight = (batch - batches[low]) / np.maximum(batches[high] - batches[low], 1)
        both = at_low + (at_high - at_low) * weight
        alone = np.where(usable_low, at_low, np.where(usable_high, at_high, np.nan))
        return np.where(usable_low & usable_high, both, alone)

    @cached_property
    def _logs(self) -> F64:
        return np.log2(np.maximum(self.curves.sites, TINY))

    def _between(self, site: F64, x: F64, own: Ints) -> F64:
        """The roofline at the mean utilisation of the nearest other sites, those whose curve covers x if there are."""
        curves = self.curves
        others: Mask = np.arange(len(curves.sites)) != own[:, None]
        covers: Mask = (curves.first <= x[:, None]) & (x[:, None] <= curves.last) & others
        candidates = np.where(covers.any(axis=1, keepdims=True), covers, others)
        octaves = np.abs(np.log2(np.maximum(site, TINY))[:, None] - self._logs)
        distance: F64 = np.sqrt((octaves * octaves).sum(axis=2))
        near: Mask = candidates & (distance <= GATE)
        lone = np.flatnonzero(~near.any(axis=1))
        near[lone] = self._beyond(site[lone], candidates[lone], octaves[lone])
        chosen = np.argsort(np.where(near, distance, np.inf), axis=1, kind="stable")[:, :NEIGHBOURS]
        distance = np.take_along_axis(distance, chosen, axis=1)
        weight = np.where(np.take_along_axis(near, chosen, axis=1), 1 / (distance * distance + TINY), 0.0)
        each = np.repeat(x, chosen.shape[1])
        ms = self._on(chosen.ravel(), each).reshape(chosen.shape)
        sol = self.sol(curves.sites[chosen.ravel()], each).reshape(chosen.shape)
        usable = (weight > 0) & (ms > 0) & np.isfinite(ms) & (sol > 0) & np.isfinite(sol)
        weight = np.where(usable, weight, 0.0)
        util = (weight * np.where(usable, sol, 0.0) / np.where(usable, ms, 1.0)).sum(axis=1)
        mass = weight.sum(axis=1)
        known = mass > 0
        mean: F64 = np.where(known, util, 1.0) / np.where(known, mass, 1.0)
        return np.where(known, self.sol(site, x), np.nan) / mean

    def _beyond(self, site: F64, candidates: Mask, octaves: F64) -> Mask:
        """Sites that a query beyond the largest of them on exactly one axis may lean on, near on the other axes."""
        low = np.where(candidates[:, :, None], self.curves.sites, np.inf).min(axis=1)
        high = np.where(candidates[:, :, None], self.curves.sites, -np.inf).max(axis=1)
        over = site > high
        allowed = (over.sum(axis=1) == 1) & ~(site < low).any(axis=1)
        near: Mask = ((octaves <= GATE) | over[:, None]).all(axis=2)
        leans: Mask = candidates & allowed[:, None] & near
        return leans
