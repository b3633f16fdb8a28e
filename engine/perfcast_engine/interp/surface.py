"""A measured slice with the roofline of its operator: what an operator asks for a latency (spec/02 section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
from perfcast_surface.blend import Blend

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Coords, Grid, Sol
from perfcast_engine.interp.hold import Hold
from perfcast_engine.interp.sheets import Resolved, Sheets
from perfcast_engine.interp.util import UtilGrid

SHEETS = 32  # of one surface that are kept


@dataclass(frozen=True, eq=False)
class Surface:
    """``sol``: roofline in ms of the grid's axes; ``sqrt_axis``: the axis on which square roots are blended."""

    grid: Grid
    sol: Sol
    sqrt_axis: int | None = None
    _sheets: dict[tuple[float, ...], Sheets] = field(default_factory=dict, repr=False)

    def at(self, *query: F64 | float) -> Resolved:
        """The latency at each query (a Query): exact, else interior, else held at the utilisation of the nearest
        leaves. NaN where the hold has no anchor or the query no positive roofline."""
        lead, rest = self._split(query)
        sheets = self.sheets(*lead)
        ms, power = sheets.at(rest, lambda *coords: self.sol(*lead, *coords))
        open_ = np.isnan(ms)
        if open_.any():
            n = int(np.count_nonzero(open_))
            left = tuple(c[open_] if isinstance(c, np.ndarray) else np.full(n, c) for c in query)
            found = self._hold(left) if sheets.complete else self._chain(left)
            ms[open_] = found.ms
            if power is not None and found.power is not None:
                power[open_] = found.power
        return Resolved(ms, power if self.grid.power is not None else None)

    def sheets(self, *lead: float) -> Sheets:
        """The grid resampled at one outer coordinate, or the whole of it."""
        found = self._sheets.get(lead)
        if found is None:
            if len(self._sheets) >= SHEETS:
                self._sheets.clear()
            found = self._sheets[lead] = Sheets.of(self.grid, self.sqrt_axis, *lead)
        return found

    def blend(self, *lead: float) -> Blend | None:
        """The planes at one outer coordinate; None where there are none."""
        return self.sheets(*lead).blend

    def everywhere(self, lead: float) -> Blend:
        """As ``blend``, but single queries of counts are answered beyond the measurements too, as ``at`` does it."""
        return Everywhere((), self, lead)

    def _split(self, query: tuple[Any, ...]) -> tuple[tuple[float, ...], tuple[Any, ...]]:
        """The leading number, if sheets are made for one, and what is left."""
        many = len(self.grid.coords) > 1
        return (query[:1], query[1:]) if many and not isinstance(query[0], np.ndarray) else ((), query)

    def _chain(self, query: Coords) -> Resolved:
        ms, power = self.grid.interior(query, self.sol, self.sqrt_axis)
        outside = np.isnan(ms)
        if outside.any():
            held = self._hold(tuple(c[outside] for c in query))
            ms[outside] = held.ms
            if power is not None and held.power is not None:
                power[outside] = held.power
        return Resolved(ms, power)

    @cached_property
    def util(self) -> UtilGrid | None:
        """The samples as the utilisation-space model sees them; None when none is usable."""
        return UtilGrid.of(self.grid.floats, self.grid.ms, self.leaf_sol)

    @cached_property
    def leaf_sol(self) -> F64:
        return self.sol(*self.grid.floats)

    @cached_property
    def hold(self) -> Hold:
        """What answers beyond the measurements."""
        return Hold.of(self.grid, self.leaf_sol)

    def _hold(self, query: Coords) -> Resolved:
        here = self.sol(*query)
        usable = np.isfinite(here) & (here > 0)
        util, power = self._end_util(query[0]) if len(query) == 1 else self.hold.at(query)
        usable &= util > 0
        return Resolved(np.where(usable, here, np.nan) / np.where(usable, util, 1.0), power)

    def _end_util(self, c: F64) -> tuple[F64, F64 | None]:
        """One axis: the utilisation of the nearest end point; 0 where it has none."""
        keys, ms, sol = self.grid.floats[0], self.grid.ms, self.leaf_sol
        end = np.where(c < keys[0], 0, len(keys) - 1)
        util = np.where(ms[end] > 0, sol[end], 0.0) / np.where(ms[end] > 0, ms[end], 1.0)
        return util, None if self.grid.power is None else self.grid.power[end]


@dataclass(frozen=True, eq=False)
class Everywhere(Blend):
    """``surface`` at ``lead`` of the first of three axes, for single queries."""

    surface: Surface
    lead: float

    @cached_property
    def one(self) -> Callable[[int, int], float]:
        surface, lead = self.surface, self.lead
        sheets, sol, util = surface.sheets(lead), partial(surface.sol, lead), surface.hold.one

        def one(x: int, y: int) -> float:
            ms = sheets.one(sol, x, y)
            if ms == ms:
                return ms
            if not sheets.complete:
                return surface.at(lead, np.array([float(x)]), np.array([float(y)])).ms.item()
            here, share = float(sol(x, y)), util(lead, x, y)
            return here / share if 0 < here < np.inf and share > 0 else np.nan

        return one
