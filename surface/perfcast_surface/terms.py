"""Summands of a step that depend on batch, length and prefix: planes of measurements and the arithmetic around them.

Every term answers arrays (``at``) and single numbers (``one``) with the same digits; NaN outside of its planes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, nan
from typing import Any, ClassVar, Protocol

import numpy as np

from perfcast_surface.arrays import F64
from perfcast_surface.averaged import Averaged
from perfcast_surface.plane import Axis, Plane

SAMPLES = 5  # decode lengths averaged around the asked one
SHORTEST, LONGEST = 0.9, 1.1  # of the asked length


def decode_lengths(s: F64) -> F64:
    """The cache lengths (SAMPLES, N) that stand for N decode lengths (spec/02 section 5.4)."""
    low = np.maximum(np.trunc(s * SHORTEST), 1.0)
    high = np.maximum(np.trunc(s * LONGEST), low)
    return low + np.floor((high - low) * np.arange(SAMPLES)[:, None] / (SAMPLES - 1))


@dataclass(frozen=True, eq=False)
class Blend:
    """Planes at one outer coordinate: the first, and each further one blended into it at its weight."""

    parts: tuple[tuple[float, Plane], ...]

    def at(self, *query: F64) -> F64:
        ms = np.full(len(query[0]), np.nan)
        for weight, plane in self.parts:
            here = plane.at(*query)
            ms = here if weight == 0 else ms + (here - ms) * weight
        return ms

    def one(self, *query: float) -> float:
        ms = nan
        for weight, plane in self.parts:
            here = plane.one(*query)
            ms = here if weight == 0 else ms + (here - ms) * weight
        return ms


class Term(Protocol):
    """One summand of a phase. ``scale``: instances."""

    evaluator: ClassVar[str]

    @property
    def scale(self) -> float: ...
    def at(self, batch: F64, s: F64, prefix: F64) -> F64: ...
    def one(self, batch: float, s: float, prefix: float) -> float: ...
    def parameters(self) -> dict[str, float]: ...
    def planes(self) -> Sequence[Plane]: ...


@dataclass(frozen=True, eq=False)
class Causal:
    """Context attention measured without prefix over (length, batch); a cached prefix saves its share of the causal
    area. ``ranks``: context-parallel GPUs, each of which computes the first and the last of twice as many parts.
    ``extra_ms``: memory-bound steps around each kernel."""

    blend: Blend
    scale: float
    extra_ms: float = 0.0
    ranks: int = 1

    evaluator: ClassVar[str] = "causal"

    def at(self, batch: F64, s: F64, prefix: F64) -> F64:
        if self.ranks == 1:
            return (self._kernel(batch, s + prefix, prefix) + self.extra_ms) * self.scale
        part = np.maximum(np.ceil(s / (2 * self.ranks)), 1.0)
        near, far = part + prefix, s + prefix
        kernel = self._kernel(batch, near, prefix) + self._kernel(batch, far, far - part)
        return (kernel + self.extra_ms) * self.scale

    def _kernel(self, batch: F64, full: F64, prefix: F64) -> F64:
        return self.blend.at(full, batch) * ((full * full - prefix * prefix) / (full * full))

    def one(self, batch: float, s: float, prefix: float) -> float:
        if self.ranks == 1:
            return (self._one(batch, s + prefix, prefix) + self.extra_ms) * self.scale
        part = max(ceil(s / (2 * self.ranks)), 1)
        near, far = part + prefix, s + prefix
        return (self._one(batch, near, prefix) + self._one(batch, far, far - part) + self.extra_ms) * self.scale

    def _one(self, batch: float, full: float, prefix: float) -> float:
        return self.blend.one(full, batch) * ((full * full - prefix * prefix) / (full * full))

    def parameters(self) -> dict[str, float]:
        return {"extra_ms": self.extra_ms, "ranks": float(self.ranks), **_weights(self.blend)}

    def planes(self) -> Sequence[Plane]:
        return [plane for _, plane in self.blend.parts]

    @classmethod
    def read(cls, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> Causal:
        return cls(_blend(parameters, planes), scale, parameters["extra_ms"], int(parameters["ranks"]))


@dataclass(frozen=True, eq=False)
class Decode:
    """Decode measured over (batch, cache length)."""

    blend: Blend
    scale: float

    evaluator: ClassVar[str] = "decode"

    def at(self, batch: F64, s: F64, prefix: F64) -> F64:
        return self.blend.at(batch, s) * self.scale

    def one(self, batch: float, s: float, prefix: float) -> float:
        return self.blend.one(batch, s) * self.scale

    def parameters(self) -> dict[str, float]:
        return _weights(self.blend)

    def planes(self) -> Sequence[Plane]:
        return [plane for _, plane in self.blend.parts]

    @classmethod
    def read(cls, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> Decode:
        return cls(_blend(parameters, planes), scale)


@dataclass(frozen=True, eq=False)
class DecodeMean:
    """Decode measured over (batch, cache length), averaged over lengths around the asked one."""

    plane: Plane
    scale: float

    evaluator: ClassVar[str] = "decode_mean"

    @cached_property
    def _means(self) -> Averaged:
        return Averaged(self.plane, decode_lengths)

    def at(self, batch: F64, s: F64, prefix: F64) -> F64:
        return self._means.at(batch, s) * self.scale

    def one(self, batch: float, s: float, prefix: float) -> float:
        return self._means.one(batch, s) * self.scale

    def parameters(self) -> dict[str, float]:
        return {}

    def planes(self) -> Sequence[Plane]:
        return [self.plane]

    @classmethod
    def read(cls, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> DecodeMean:
        return cls(planes[0], scale)


EVALUATORS: Mapping[str, Any] = {kind.evaluator: kind for kind in (Causal, Decode, DecodeMean)}


def _weights(blend: Blend) -> dict[str, float]:
    return {f"weight_{i}": weight for i, (weight, _) in enumerate(blend.parts)}


def _blend(parameters: Mapping[str, float], planes: Sequence[Plane]) -> Blend:
    return Blend(tuple((parameters[f"weight_{i}"], plane) for i, plane in enumerate(planes)))


def plane_arrays(plane: Plane, name: str) -> Iterator[tuple[str, F64]]:
    """A plane as named arrays: its values and the knots of each axis. Blended roots are told by an empty array."""
    yield f"{name}.values", plane.values
    for i, axis in enumerate(plane.axes):
        yield f"{name}.axis{i}", axis.knots
    if plane.roots:
        yield f"{name}.roots", np.zeros(0)


def plane_from(arrays: Mapping[str, F64], name: str) -> Plane:
    values = arrays[f"{name}.values"]
    axes = tuple(Axis(arrays[f"{name}.axis{i}"]) for i in range(values.ndim))
    return Plane(axes, values, f"{name}.roots" in arrays)
