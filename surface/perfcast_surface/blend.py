"""Planes read together, and planes held at their ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfcast_surface.arrays import F64, Ints
from perfcast_surface.lines import Lines
from perfcast_surface.plane import Plane


@dataclass(frozen=True, eq=False)
class Blend:
    """Planes at one outer coordinate: the first, and each further one blended into it at its weight."""

    parts: tuple[tuple[float, Plane], ...]

    def at(self, *query: Ints) -> F64:
        ms = self.parts[0][1].at_counts(*query)
        for weight, plane in self.parts[1:]:
            ms = ms + (plane.at_counts(*query) - ms) * weight
        return ms

    @cached_property
    def one(self) -> Callable[..., float]:
        """``at`` for single numbers."""
        (_, first), *rest = ((weight, plane.one) for weight, plane in self.parts)
        if not rest:
            return first

        def one(*query: int) -> float:
            ms = first(*query)
            for weight, read in rest:
                ms += (read(*query) - ms) * weight
            return ms

        return one

    @property
    def lines(self) -> Lines | None:
        """What a single plane over two counts is read from."""
        return self.parts[0][1].lines if len(self.parts) == 1 else None

    @property
    def ends(self) -> tuple[float, ...]:
        """The last knot of each axis that all planes reach."""
        return tuple(map(min, zip(*(plane.ends for _, plane in self.parts), strict=True)))

    def planes(self) -> list[Plane]:
        return [plane for _, plane in self.parts]

    def parameters(self) -> dict[str, float]:
        return {f"weight_{i}": float(weight) for i, (weight, _) in enumerate(self.parts)}

    @classmethod
    def read(cls, parameters: Mapping[str, float], planes: Sequence[Plane], axes: int) -> Blend:
        """ValueError where ``planes`` are none, or not over ``axes`` axes each."""
        if not planes or any(len(plane.axes) != axes for plane in planes):
            raise ValueError(f"needs planes over {axes} axes")
        return cls(tuple((parameters[f"weight_{i}"], plane) for i, plane in enumerate(planes)))


@dataclass(frozen=True, eq=False)
class Held:
    """A plane on every axis of which a coordinate beyond the knots counts as the nearest of them."""

    plane: Plane

    @cached_property
    def _ends(self) -> list[tuple[int, int]]:
        return [(int(axis.knots[0]), int(axis.knots[-1])) for axis in self.plane.axes]

    def at(self, *query: F64 | Ints) -> F64:
        held: list[F64] = [np.clip(c, *ends) for c, ends in zip(query, self._ends, strict=True)]
        return self.plane.at(*held)

    def one(self, *query: int) -> float:
        """``at`` for a single query."""
        return self.plane.one(*(min(max(c, low), high) for c, (low, high) in zip(query, self._ends, strict=True)))
