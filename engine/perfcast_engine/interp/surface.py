"""A measured slice with the roofline of its operator: what an operator asks for a latency (spec/02 section 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from perfcast_surface.blend import Blend

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Coords, Grid, Sol
from perfcast_engine.interp.nearest import nearest
from perfcast_engine.interp.sheets import Resolved, Sheets
from perfcast_engine.interp.util import UtilGrid

ANCHORS = 4
TINY = 1e-12
SHEETS = 32  # of one surface that are kept


class _Anchors(NamedTuple):
    """The leaves that a hold may lean on: log2 coordinates (A, N), roofline / latency (N,), power (N,) or None."""

    logs: F64
    util: F64
    power: F64 | None


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
        parts = self.sheets(*lead).parts
        return Blend(tuple((weight, sheet.ms) for weight, sheet in parts)) if parts else None

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
    def _anchors(self) -> _Anchors:
        grid, sol = self.grid, self.leaf_sol
        valid = (grid.ms > 0) & np.isfinite(grid.ms) & (sol > 0) & np.isfinite(sol)
        logs = np.log2(np.maximum(np.stack([c[valid] for c in grid.floats]), TINY))
        return _Anchors(logs, sol[valid] / grid.ms[valid], None if grid.power is None else grid.power[valid])

    def _hold(self, query: Coords) -> Resolved:
        here = self.sol(*query)
        usable = np.isfinite(here) & (here > 0)
        util, power = self._end_util(query[0]) if len(query) == 1 else self._near_util(query)
        usable &= util > 0
        return Resolved(np.where(usable, here, np.nan) / np.where(usable, util, 1.0), power)

    def _end_util(self, c: F64) -> tuple[F64, F64 | None]:
        """One axis: the utilisation of the nearest end point; 0 where it has none."""
        keys, ms, sol = self.grid.floats[0], self.grid.ms, self.leaf_sol
        end = np.where(c < keys[0], 0, len(keys) - 1)
        util = np.where(ms[end] > 0, sol[end], 0.0) / np.where(ms[end] > 0, ms[end], 1.0)
        return util, None if self.grid.power is None else self.grid.power[end]

    def _near_util(self, query: Coords) -> tuple[F64, F64 | None]:
        """The nearest four leaves in log space, weights tapering to 0 at the distance of the fifth."""
        anchors = self._anchors
        if not len(anchors.util):
            return np.zeros(len(query[0])), anchors.power
        logs = np.log2(np.maximum(np.stack(query), TINY))
        index, distance = nearest(anchors.logs, logs, ANCHORS + 1)
        weight = _taper(distance)
        index = index[:ANCHORS]
        mass = weight.sum(axis=0)
        util = (weight * anchors.util[index]).sum(axis=0) / mass
        return util, None if anchors.power is None else (weight * anchors.power[index]).sum(axis=0) / mass


def _taper(distance: F64) -> F64:
    """Weights (<= 4, Q) of the nearest anchors from their ascending distances (<= 5, Q)."""
    d = distance[:ANCHORS]
    if len(distance) <= ANCHORS:
        return 1 / (d * d + TINY)
    reach = distance[ANCHORS]
    weight: NDArray[np.float64] = (np.maximum(reach - d, 0.0) / (reach * d + TINY)) ** 2
    return np.where(weight.sum(axis=0) > 0, weight, 1.0)
