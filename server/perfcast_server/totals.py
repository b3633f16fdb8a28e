"""The metrics of several processes as those of one; their counters outlive the processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import add
from typing import Any

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

# [[name, kind, help, [[sample, labels, value], ...]], ...]: what fits a line of JSON.
Snapshot = list[list[Any]]
Key = tuple[str, tuple[tuple[str, str], ...]]
GROWING = ("counter", "histogram", "summary")
# Figures that are not sums over processes: how the next process's adds to what was found.
MERGED: Mapping[str, Callable[[float, float], float]] = {
    "process_start_time_seconds": min,
    "correction_factor": lambda had, value: value,
}


def snapshot(registry: CollectorRegistry) -> Snapshot:
    """Every sample now, without the times at which they were created."""
    return [
        [family.name, family.type, family.documentation, samples]
        for family in registry.collect()
        if (samples := [[s.name, s.labels, s.value] for s in family.samples if not s.name.endswith("_created")])
    ]


class Totals:
    """Sums over the living, and what grew in the ones that have ended."""

    def __init__(self) -> None:
        self._living: dict[int, Snapshot] = {}
        self._ended: dict[Key, float] = {}
        self._about: dict[str, tuple[str, str]] = {}
        self._family: dict[Key, str] = {}

    def update(self, process: int, taken: Snapshot) -> None:
        self._living[process] = taken
        for name, kind, text, samples in taken:
            self._about[name] = (kind, text)
            for sample, labels, _ in samples:
                self._family[_key(sample, labels)] = name

    def end(self, process: int) -> None:
        """Keep what ``process`` counted, as far as it was told."""
        for name, _, _, samples in self._living.pop(process, []):
            if self._about[name][0] in GROWING:
                for sample, labels, value in samples:
                    key = _key(sample, labels)
                    self._ended[key] = self._ended.get(key, 0.0) + value

    def families(self) -> list[Metric]:
        sums = dict(self._ended)
        for taken in self._living.values():
            for name, _, _, samples in taken:
                for sample, labels, value in samples:
                    key = _key(sample, labels)
                    merge: Callable[[float, float], float] = MERGED.get(name, add)
                    sums[key] = merge(sums[key], value) if key in sums else value
        found: dict[str, Metric] = {}
        for key, value in sums.items():
            name = self._family[key]
            if name not in found:
                kind, text = self._about[name]
                found[name] = Metric(name, text, kind)
            found[name].add_sample(key[0], dict(key[1]), value)
        return list(found.values())


class Pulled(Collector):
    """A collector that asks ``families`` whenever it is scraped."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return self._families()


def _key(sample: str, labels: dict[str, str]) -> Key:
    return sample, tuple(sorted(labels.items()))
