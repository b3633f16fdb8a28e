"""A bounded store of observations, spread over buckets of their features so that rare work stays (spec/04 11.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from perfcast_engine.answer import F64, Mask
from perfcast_engine.errors import InvalidField

Features = tuple[float, ...]


class Samples(NamedTuple):
    """What a store holds, and the bounds of all that it ever saw where its buckets follow them."""

    features: Sequence[Features]
    values: Sequence[float]
    lower_seen: Features | None = None
    upper_seen: Features | None = None


@dataclass(slots=True)
class SampleStore:
    """Observations of one workload kind in order of arrival.

    ``upper``: fixed bucket bounds [0, upper] per axis, observations outside are dropped; None: bounds follow the data.
    When there are more than ``capacity``, the oldest of the fullest bucket goes (the smallest bucket on equality), so
    the same observations always leave the same store.
    """

    axes: int
    buckets_per_axis: int
    capacity: int
    upper: Features | None = None
    features: list[Features] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower_seen: Features | None = None  # of all observations ever, also those retired; None with fixed bounds
    upper_seen: Features | None = None
    _buckets: list[int] = field(default_factory=list)
    _medians: F64 | None = None

    def __len__(self) -> int:
        return len(self.values)

    def add(self, features: Features, value: float) -> bool:
        """Whether the observation was kept."""
        point = np.array([features])
        if not self.holds(point)[0]:
            return False
        self.features.append(features)
        self.values.append(value)
        self._medians = None
        if self._widened(features):
            self._buckets = self.buckets_of(np.array(self.features)).tolist()
        else:
            self._buckets += self.buckets_of(point).tolist()
        if len(self) > self.capacity:
            oldest = self._buckets.index(int(np.argmax(np.bincount(self._buckets))))
            for column in (self.features, self.values, self._buckets):
                del column[oldest]
        return True

    def holds(self, features: F64) -> Mask:
        """Whether each of the points (N, axes) lies within fixed bounds; true where there are none."""
        bound = np.inf if self.upper is None else np.array(self.upper)
        inside: Mask = np.logical_and.reduce((features >= 0) & (features <= bound), axis=1)
        return inside

    def buckets_of(self, features: F64) -> np.ndarray:
        """The bucket of each of the points (N, axes), numbered with the last axis fastest."""
        low = np.zeros(self.axes) if self.upper is not None else np.array(self.lower_seen)
        width = np.array(self.upper if self.upper is not None else self.upper_seen) - low
        share = np.divide(features - low, width, out=np.zeros_like(features), where=width > 0)
        index = np.clip(np.trunc(share * self.buckets_per_axis), 0, self.buckets_per_axis - 1).astype(np.intp)
        number: np.ndarray = index @ self.buckets_per_axis ** np.arange(self.axes)[::-1]
        return number

    def medians(self) -> F64:
        """The median of each bucket, NaN where it is empty."""
        if self._medians is None:
            values, buckets = np.array(self.values), np.array(self._buckets, np.intp)
            found = np.full(self.buckets_per_axis**self.axes, np.nan)
            for bucket in np.unique(buckets):
                found[bucket] = np.median(values[buckets == bucket])
            self._medians = found
        return self._medians

    def told(self) -> Samples:
        return Samples(tuple(self.features), tuple(self.values), self.lower_seen, self.upper_seen)

    def restored(self, told: Samples) -> SampleStore:
        """A store of this shape that holds ``told`` and learns on its own; InvalidField where that cannot be."""
        features, values, lower, upper = told
        if len(values) > self.capacity or len(values) != len(features):
            raise InvalidField("samples", f"need at most {self.capacity} values, each with its features", why="state")
        if (lower, upper).count(None) != (0 if self.upper is None and values else 2):
            raise InvalidField("samples", "must tell the bounds seen where, and only where, data set them", why="state")
        points = np.array(features, np.float64).reshape(-1, self.axes)
        inside = self.holds(points)
        if lower is not None:
            inside &= np.all((points >= np.array(lower)) & (points <= np.array(upper)), axis=1)
        if not (inside.all() and np.isfinite(values).all() and np.greater(values, 0).all()):
            raise InvalidField("samples", "holds values that are not positive or lie out of bounds", why="state")
        other = replace(self, features=list(features), values=list(values), lower_seen=lower, upper_seen=upper)
        other._buckets = other.buckets_of(points).tolist() if values else []
        other._medians = None
        return other

    def _widened(self, features: Features) -> bool:
        if self.upper is not None:
            return False
        seen = self.lower_seen, self.upper_seen
        self.lower_seen = features if seen[0] is None else tuple(map(min, seen[0], features))
        self.upper_seen = features if seen[1] is None else tuple(map(max, seen[1], features))
        return seen != (self.lower_seen, self.upper_seen)
