"""Measured whole passes as curves at scattered sites, and passes between them (spec/04 section 10.3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.interp.sites import Curves, Sites


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
