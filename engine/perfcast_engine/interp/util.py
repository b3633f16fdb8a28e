"""The utilisation-space model: latency = roofline / utilisation of the nearest measured samples (spec/02 section 9)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.interp.grid import Coords
from perfcast_engine.interp.nearest import nearest

FLOOR = 1e-9


@dataclass(frozen=True, slots=True)
class UtilGrid:
    """Samples in min-max normalised log space. z: (N, A); low, span: (A,); util: (N,) = roofline / measured."""

    z: F64
    low: F64
    span: F64
    util: F64

    @classmethod
    def of(cls, coords: Coords, ms: F64, sol: F64) -> UtilGrid | None:
        """From samples in traversal order (keys ascending, outermost first); None when no sample is usable."""
        keep = (ms > 0) & (sol > 0)
        if not keep.any():
            return None
        logs = np.log(np.maximum(np.stack([axis[keep] for axis in coords], axis=1).astype(np.float64), FLOOR))
        low = logs.min(axis=0)
        span = logs.max(axis=0) - low
        span[span == 0] = 1.0
        return cls((logs - low) / span, low, span, sol[keep] / ms[keep])

    def at(self, query: Coords) -> F64:
        """Utilisation at each query: the sample at distance zero, else the two nearest weighted by 1/distance."""
        logs = np.log(np.maximum(np.stack([np.asarray(a, np.float64) for a in query], axis=1), FLOOR))
        index, distance = nearest(self.z, np.clip((logs - self.low) / self.span, 0, 1), 2)
        util = self.util[index]
        hit = distance[:, 0] == 0
        weight = 1 / np.where(hit[:, None], 1.0, distance)
        return np.where(hit, util[:, 0], (util * weight).sum(axis=1) / weight.sum(axis=1))
