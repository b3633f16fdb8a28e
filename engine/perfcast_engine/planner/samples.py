"""A bounded store of observations, spread over buckets of their features so that rare work stays (spec/04 11.5)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

Features = tuple[float, ...]
Bucket = tuple[int, ...]


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
    _buckets: list[Bucket] = field(default_factory=list)
    _bounds: tuple[Features, Features] | None = None

    def __len__(self) -> int:
        return len(self.values)

    def add(self, features: Features, value: float) -> bool:
        """Whether the observation was kept."""
        if self.upper is not None and self.bucket_of(features) is None:
            return False
        self.features.append(features)
        self.values.append(value)
        if self.upper is None and self._widened(features):
            self._buckets = [self._index(sample) for sample in self.features]
        else:
            self._buckets.append(self._index(features))
        if len(self) > self.capacity:
            self._retire()
        return True

    def bucket_of(self, features: Features) -> Bucket | None:
        """The bucket of ``features``; None outside fixed bounds."""
        if self.upper is not None and any(not 0 <= v <= hi for v, hi in zip(features, self.upper, strict=True)):
            return None
        return self._index(features)

    def in_bucket(self, bucket: Bucket) -> list[float]:
        return [value for value, where in zip(self.values, self._buckets, strict=True) if where == bucket]

    def medians(self) -> Iterator[float]:
        """The median of every populated bucket."""
        for bucket in sorted(set(self._buckets)):
            yield float(np.median(self.in_bucket(bucket)))

    def _retire(self) -> None:
        counts: dict[Bucket, int] = {}
        for bucket in self._buckets:
            counts[bucket] = counts.get(bucket, 0) + 1
        fullest = min(counts, key=lambda bucket: (-counts[bucket], bucket))
        oldest = self._buckets.index(fullest)
        for column in (self.features, self.values, self._buckets):
            del column[oldest]

    def _widened(self, features: Features) -> bool:
        if self._bounds is None:
            self._bounds = features, features
            return True
        lo = tuple(map(min, self._bounds[0], features))
        hi = tuple(map(max, self._bounds[1], features))
        if (lo, hi) == self._bounds:
            return False
        self._bounds = lo, hi
        return True

    def _index(self, features: Features) -> Bucket:
        if self.upper is not None:
            bounds: tuple[Features, Features] = (0.0,) * self.axes, self.upper
        else:
            assert self._bounds is not None
            bounds = self._bounds
        return tuple(
            0
            if hi <= lo
            else min(max(math.trunc((v - lo) / (hi - lo) * self.buckets_per_axis), 0), self.buckets_per_axis - 1)
            for v, lo, hi in zip(features, *bounds, strict=True)
        )
