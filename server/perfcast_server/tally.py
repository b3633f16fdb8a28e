"""Counters and histograms for Prometheus that cost a call little: plain numbers, told when they are scraped.

Additions are single statements without a call in between, which CPython's interpreter lock makes whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Count:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, by: float = 1.0) -> None:
        self.value += by


class Spread:
    """How many values lie at or below each of ``bounds``, the last of which is infinite."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.total += value
        self.counts[bisect_left(self.bounds, value)] += 1


class Counter(Collector):
    """Counts by label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), *, registry: CollectorRegistry) -> None:
        self._about = name, text
        self._names = tuple(labels)
        self._kept: dict[tuple[str, ...], Count] = {}
        if not labels:
            self.inc = self.labels().inc
        registry.register(self)

    def labels(self, *values: str) -> Count:
        return self._kept.setdefault(values, Count())

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(*self._about, labels=self._names)
        for values, count in list(self._kept.items()):
            family.add_metric(values, count.value)
        yield family


class Histogram(Collector):
    """Spreads by label values."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._about = name, text
        self._names = tuple(labels)
        self._bounds = (*buckets, float("inf"))
        self._kept: dict[tuple[str, ...], Spread] = {}
        if not labels:
            self.observe = self.labels().observe
        registry.register(self)

    def labels(self, *values: str) -> Spread:
        return self._kept.setdefault(values, Spread(self._bounds))

    @contextmanager
    def time(self) -> Iterator[None]:
        """Observe how long the block takes, in s."""
        began = perf_counter()
        try:
            yield
        finally:
            self.labels().observe(perf_counter() - began)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(*self._about, labels=self._names)
        bounds = [floatToGoString(bound) for bound in self._bounds]  # type: ignore[no-untyped-call]
        for values, spread in list(self._kept.items()):
            family.add_metric(values, list(zip(bounds, accumulate(spread.counts), strict=True)), spread.total)
        yield family
