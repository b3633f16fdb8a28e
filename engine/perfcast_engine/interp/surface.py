"""A measured slice with the roofline of its operator: what an operator asks for a latency (spec/02 section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from perfcast_surface.blend import Blend
from perfcast_surface.plane import Plane

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Coords, Grid, Query, Sol
from perfcast_engine.interp.util import Hold, UtilGrid

SHEETS = 32  # of one surface that are kept


class Resolved(NamedTuple):
    """ms: (Q,) with NaN where nothing anchors the query; power: (Q,) W or None where the grid has none."""

    ms: F64
    power: F64 | None

    @property
    def energy(self) -> F64 | None:
        return None if self.power is None else self.ms * self.power


@dataclass(frozen=True, eq=False)
class Sheets:
    """The sheets at one outer coordinate: the first one, and a second one blended into it at its weight where the
    coordinate lies between keys and square roots are blended further in.

    ``complete``: a point that they do not know lies beyond the measurements. Otherwise the grid itself may know it.
    """

    blend: Blend | None
    complete: bool

    @classmethod
    def of(cls, grid: Grid, sqrt_axis: int | None, *lead: float) -> Sheets:
        """At ``lead`` of the first axis, or of the whole grid. Square roots can only be blended on the first axis that
        is left, and too large a grid is not resampled: there are no sheets then."""
        roots = sqrt_axis is not None
        outer = grid.coords[0]
        if lead and not outer[0] <= lead[0] <= outer[-1]:
            return cls(None, True)
        if roots and sqrt_axis != len(lead):
            return cls(None, False)
        if not lead:
            return cls._whole([(0.0, _sheet(grid, roots))], True)
        low, high = outer[outer.searchsorted(lead[0], "right") - 1], outer[outer.searchsorted(lead[0])]
        if roots and low < high:
            ends = ((0.0, low), (float((lead[0] - low) / (high - low)), high))
            return cls._whole([(w, _sheet(grid.between(k, k), roots, float(k))) for w, k in ends], False)
        # where all blends are linear, the blend of two sheets is a sheet
        return cls._whole([(0.0, _sheet(grid.between(low, high), roots, lead[0]))], bool(low == high))

    @classmethod
    def _whole(cls, parts: list[tuple[float, Plane | None]], exact: bool) -> Sheets:
        sheets = tuple((weight, sheet) for weight, sheet in parts if sheet is not None)
        if len(sheets) < len(parts):
            return cls(None, False)
        return cls(Blend(sheets), exact and len(sheets[0][1].axes) <= 2)

    def at(self, query: Coords, sol: Sol) -> Resolved:
        """Inside of the measurements, carried along the roofline ``sol`` where one of two rows ends before the query;
        NaN elsewhere."""
        carry = sol if self.complete else None
        ms, power = np.full(len(query[0]), np.nan), np.zeros(len(query[0]))
        for weight, sheet in self.blend.parts if self.blend is not None else ():
            here = sheet.at(*query, sol=carry)
            ms = here if weight == 0 else ms + (here - ms) * weight
            if sheet.power is not None:
                watts = sheet.power.at(*query, sol=None if carry is None else _same)
                power = watts if weight == 0 else power + (watts - power) * weight
        return Resolved(ms, power)

    def one(self, sol: Sol, *query: int) -> float:
        """The latency that ``at`` gives to a single query of counts."""
        if self.blend is None:
            return np.nan
        ms = self.blend.one(*query)
        return ms if ms == ms or not self.complete else self.blend.parts[0][1].carried(sol, *query)


def _sheet(grid: Grid, roots: bool, lead: float | None = None) -> Plane | None:
    """``grid``, or the part of it at one outer key, resampled."""
    ms = Plane.of(grid.coords, grid.ms, roots, lead)
    if ms is None or grid.power is None:
        return ms
    return replace(ms, power=Plane.of(grid.coords, grid.power, lead=lead))


def _same(*coords: F64) -> F64:
    """The roofline along which nothing changes: power passes from a row as it is."""
    return np.ones(len(coords[0]))


@dataclass(frozen=True, eq=False)
class Surface:
    """``sol``: roofline in ms of the grid's axes; ``sqrt_axis``: the axis on which square roots are blended.
    ``beside``: what was measured at the same points, and at more, and is asked the same just before."""

    grid: Grid
    sol: Sol
    sqrt_axis: int | None = None
    beside: Surface | None = None
    _sheets: dict[tuple[float, ...], Sheets] = field(default_factory=dict, repr=False)

    def at(self, *query: F64 | float) -> Resolved:
        """The latency at each query (a Query): exact, else interior, else held at the utilisation of the nearest
        leaves. NaN where the hold has no anchor or the query no positive roofline."""
        lead, rest = self._split(query)
        sheets = self.sheets(*lead)
        found = sheets.at(rest, lambda *coords: self.sol(*lead, *coords))
        found = _filled(found, query, self._hold if sheets.complete else self._chain)
        return found if self.grid.power is not None else found._replace(power=None)

    def sheets(self, *lead: float) -> Sheets:
        """The grid resampled at one outer coordinate, or the whole of it."""
        found = self._sheets.get(lead)
        if found is None:
            if len(self._sheets) >= SHEETS:
                self._sheets.clear()
            found = self._sheets[lead] = Sheets.of(self.grid, self.sqrt_axis, *lead)
        return found

    def _split(self, query: tuple[Any, ...]) -> tuple[tuple[float, ...], tuple[Any, ...]]:
        """The leading number, if sheets are made for one, and what is left."""
        many = len(self.grid.coords) > 1
        return (query[:1], query[1:]) if many and not isinstance(query[0], np.ndarray) else ((), query)

    def _chain(self, query: Coords) -> Resolved:
        grid = self.grid
        ms = grid.interior(grid.ms, query, self.sol, self.sqrt_axis)
        power = None if grid.power is None else grid.interior(grid.power, query, _same, None)
        return _filled(Resolved(ms, power), query, self._hold)

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
        return Hold.of(self.grid, self.leaf_sol, None if self.beside is None else self.beside.hold)

    def _hold(self, query: Coords) -> Resolved:
        here = self.sol(*query)
        util, power = self._end_util(query[0]) if len(query) == 1 else self.hold.at(query)
        usable = np.isfinite(here) & (here > 0) & (util > 0)
        return Resolved(np.where(usable, here, np.nan) / np.where(usable, util, 1.0), power)

    def _end_util(self, c: F64) -> tuple[F64, F64 | None]:
        """One axis: the utilisation of the nearest end point; 0 where it has none."""
        keys, ms, sol = self.grid.floats[0], self.grid.ms, self.leaf_sol
        end = np.where(c < keys[0], 0, len(keys) - 1)
        util = np.where(ms[end] > 0, sol[end], 0.0) / np.where(ms[end] > 0, ms[end], 1.0)
        return util, None if self.grid.power is None else self.grid.power[end]


def _filled(found: Resolved, query: Query, then: Callable[[Coords], Resolved]) -> Resolved:
    """``found``, and what ``then`` says about the queries that it does not know."""
    gone = np.isnan(found.ms)
    if gone.any():
        n = int(np.count_nonzero(gone))
        more = then(tuple(c[gone] if isinstance(c, np.ndarray) else np.full(n, c) for c in query))
        found.ms[gone] = more.ms
        if found.power is not None and more.power is not None:
            found.power[gone] = more.power
    return found


@dataclass(frozen=True, eq=False)
class Everywhere(Blend):
    """``surface`` at ``lead`` of the first of three axes, for single queries of counts, beyond the measurements too."""

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
