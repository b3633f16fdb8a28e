"""A grid at one outer coordinate as resampled planes: where most queries end (spec/02 section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
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
class Sheet:
    """A grid, or the part of it at one outer key, resampled. power: W, None where the grid has none."""

    ms: Plane
    power: Plane | None

    @classmethod
    def of(cls, grid: Grid, roots: bool, lead: float | None = None) -> Sheet | None:
        ms = Plane.of(grid.coords, grid.ms, roots, lead)
        power = None if grid.power is None else Plane.of(grid.coords, grid.power, lead=lead)
        return None if ms is None else cls(ms, power)


@dataclass(frozen=True, eq=False)
class Sheets:
    """The sheets at one outer coordinate: the first one, and a second one blended into it at its weight where the
    coordinate lies between keys and square roots are blended further in.

    ``complete``: a point that they do not know lies beyond the measurements. Otherwise the grid itself may know it.
    """

    parts: tuple[tuple[float, Sheet], ...]
    complete: bool

    @classmethod
    def of(cls, grid: Grid, sqrt_axis: int | None, *lead: float) -> Sheets:
        """At ``lead`` of the first axis, or of the whole grid. Square roots can only be blended on the first axis that
        is left, and too large a grid is not resampled: there are no sheets then."""
        roots = sqrt_axis is not None
        outer = grid.coords[0]
        if lead and not outer[0] <= lead[0] <= outer[-1]:
            return cls((), True)
        if roots and sqrt_axis != len(lead):
            return cls((), False)
        if not lead:
            return cls._whole([(0.0, Sheet.of(grid, roots))], True)
        low, high = outer[outer.searchsorted(lead[0], "right") - 1], outer[outer.searchsorted(lead[0])]
        if roots and low < high:
            ends = ((0.0, low), (float((lead[0] - low) / (high - low)), high))
            return cls._whole([(w, Sheet.of(grid.between(k, k), roots, float(k))) for w, k in ends], False)
        # where all blends are linear, the blend of two sheets is a sheet
        return cls._whole([(0.0, Sheet.of(grid.between(low, high), roots, lead[0]))], bool(low == high))

    @classmethod
    def _whole(cls, parts: list[tuple[float, Sheet | None]], exact: bool) -> Sheets:
        sheets = tuple((weight, sheet) for weight, sheet in parts if sheet is not None)
        if len(sheets) < len(parts):
            return cls((), False)
        return cls(sheets, exact and len(sheets[0][1].ms.axes) <= 2)

    def at(self, query: Coords, sol: Sol) -> Resolved:
        """Inside of the measurements, carried along the roofline ``sol`` where one of two rows ends before the query;
        NaN elsewhere."""
        carry = sol if self.complete else None
        ms, power = np.full(len(query[0]), np.nan), np.zeros(len(query[0]))
        for weight, sheet in self.parts:
            here = sheet.ms.at(*query, sol=carry)
            ms = here if weight == 0 else ms + (here - ms) * weight
            if sheet.power is not None:
                watts = sheet.power.at(*query, sol=None if carry is None else _same)
                power = watts if weight == 0 else power + (watts - power) * weight
        return Resolved(ms, power)


def _same(*coords: F64) -> F64:
    """The roofline along which nothing changes: power passes from a row as it is."""
    return np.ones(len(coords[0]))
