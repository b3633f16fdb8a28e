"""A grid at one outer coordinate as resampled planes: where most queries end (spec/02 section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from perfcast_surface.blend import Blend
from perfcast_surface.plane import Plane

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Coords, Grid, Sol


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
