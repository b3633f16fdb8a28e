"""Where latencies come from, worked out only when it is asked: sums by source over operators, passes and samples.

An origin answers two questions about N latencies: ``rows``, ms (N, 5) per Source, and ``total``, its sum (5,) under
weights (N,). Weights of 0 leave a latency out, also one that misses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from perfcast_engine.answer import F64, Source

KINDS = len(Source)
FEW = 8  # times as many columns, and most are not asked for


class Origin(Protocol):
    def rows(self) -> F64: ...
    def total(self, weights: F64) -> F64: ...


@dataclass(frozen=True, slots=True)
class Tagged:
    """Of one operator, whose whole latency counts under its own tag. source: (N,) codes."""

    ms: F64
    source: np.ndarray

    def rows(self) -> F64:
        out = np.zeros((KINDS, len(self.ms)))
        for source in np.flatnonzero(np.bincount(self.source)):
            out[source] = np.where(self.source == source, self.ms, 0.0)
        return out.T

    def total(self, weights: F64) -> F64:
        ms = np.where(weights != 0, self.ms, 0.0)
        ms *= weights
        total: F64 = np.bincount(self.source, ms, KINDS).astype(np.float64, copy=False)
        return total


@dataclass(frozen=True, slots=True)
class Listed:
    """Columns ``which`` (N,) of a list of columns (5, M)."""

    by_source: F64
    which: np.ndarray

    def rows(self) -> F64:
        rows: F64 = self.by_source[:, self.which].T
        return rows

    def total(self, weights: F64) -> F64:
        if FEW * len(self.which) < self.by_source.shape[1]:
            return self.by_source.take(self.which, axis=1) @ weights
        counts = np.bincount(self.which, weights)
        asked = np.flatnonzero(counts)
        total: F64 = self.by_source[:, asked] @ counts[asked]
        return total


@dataclass(frozen=True, slots=True)
class Summed:
    """Of latencies that are added up; nothing at all where there are none."""

    parts: tuple[Origin, ...]
    n: int

    def rows(self) -> F64:
        return sum((part.rows() for part in self.parts), np.zeros((KINDS, self.n)).T)

    def total(self, weights: F64) -> F64:
        return sum((part.total(weights) for part in self.parts), np.zeros(KINDS))

    def plus(self, other: Summed) -> Summed:
        return Summed(self.parts + other.parts, self.n)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Of latencies times ``factor`` (N,); 0 leaves one out."""

    inner: Origin
    factor: F64

    def rows(self) -> F64:
        factor = self.factor[:, None]
        return np.where(factor != 0, self.inner.rows() * factor, 0.0)

    def total(self, weights: F64) -> F64:
        return self.inner.total(weights * self.factor)


@dataclass(frozen=True, slots=True)
class Joined:
    """Of latencies one after another; ends: how many there are up to the end of each part."""

    parts: tuple[Origin, ...]
    ends: tuple[int, ...]

    def rows(self) -> F64:
        return np.concatenate([part.rows() for part in self.parts])

    def total(self, weights: F64) -> F64:
        pieces = zip(self.parts, np.split(weights, self.ends[:-1]), strict=True)
        return sum((part.total(piece) for part, piece in pieces), np.zeros(KINDS))


@dataclass(frozen=True, slots=True)
class Gathered:
    """Of samples summed over the ``n`` points that they belong to."""

    inner: Origin
    point: np.ndarray
    n: int

    def rows(self) -> F64:
        columns = (np.bincount(self.point, column, self.n) for column in self.inner.rows().T)
        return np.stack(list(columns), axis=1).astype(np.float64, copy=False)

    def total(self, weights: F64) -> F64:
        return self.inner.total(weights[self.point])
