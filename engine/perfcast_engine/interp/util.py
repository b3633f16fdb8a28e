"""The utilisation-space model: latency = roofline / utilisation of the nearest measured samples (spec/02 section 9)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Coords, Query
from perfcast_engine.interp.nearest import Samples

FLOOR = 1e-9


@dataclass(frozen=True, slots=True)
class LogSpace:
    """Samples in min-max normalised log space. low, span: (A, 1)."""

    z: Samples
    low: F64
    span: F64

    @classmethod
    def of(cls, coords: Coords) -> LogSpace:
        """From one array (N,) per axis, N > 0."""
        logs = _logs(coords)
        low = logs.min(axis=1, keepdims=True)
        span = logs.max(axis=1, keepdims=True) - low
        span[span == 0] = 1.0
        return cls(Samples((logs - low) / span), low, span)

    def nearest(self, query: Query, count: int, *, clip: bool) -> tuple[NDArray[np.intp], F64]:
        """Indices and distances (count, Q) of the nearest samples, ties by sample order. ``clip``: a query outside the
        samples' box counts as the nearest point of the box."""
        z = (_logs(query) - self.low) / self.span
        return self.z.nearest(np.clip(z, 0.0, 1.0) if clip else z, count)


def _logs(coords: Query) -> F64:
    logs: F64 = np.log(np.maximum(np.stack(np.broadcast_arrays(*coords)), FLOOR))
    return logs


@dataclass(frozen=True, slots=True)
class UtilGrid:
    """Samples with their utilisation, util (N,) = roofline / measured."""

    space: LogSpace
    util: F64

    @classmethod
    def of(cls, coords: Coords, ms: F64, sol: F64) -> UtilGrid | None:
        """From samples in traversal order (keys ascending, outermost first); None when no sample is usable."""
        keep = (ms > 0) & (sol > 0)
        if not keep.any():
            return None
        return cls(LogSpace.of(tuple(axis[keep] for axis in coords)), sol[keep] / ms[keep])

    def at(self, query: Query) -> F64:
        """Utilisation at each query: the sample at distance zero, else the two nearest weighted by 1/distance."""
        index, distance = self.space.nearest(query, 2, clip=True)
        util = self.util[index]
        hit = distance[0] == 0
        weight = 1 / np.where(hit, 1.0, distance)
        mean: F64 = np.where(hit, util[0], (util * weight).sum(axis=0) / weight.sum(axis=0))
        return mean
