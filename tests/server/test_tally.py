"""Counters and histograms are those of the Prometheus client, sample by sample."""

from __future__ import annotations

import math

import prometheus_client
from perfcast_server import tally
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    told = (sample for family in families for sample in family.samples if not sample.name.endswith("_created"))
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in told}


def fill(kinds: object, registry: CollectorRegistry) -> None:
    calls = kinds.Counter("calls", "Calls", ("method", "code"), registry=registry)
    calls.labels("a", "OK").inc()
    calls.labels("a", "OK").inc(2.5)
    calls.labels("b", "no").inc()
    kinds.Counter("bytes", "Bytes", registry=registry).inc(7)
    seconds = kinds.Histogram("seconds", "Seconds", ("method",), buckets=(1e-7, 0.5, 1), registry=registry)
    for value in (0, 1e-7, 2e-7, 0.5, 0.75, 1, 3, math.inf):
        seconds.labels("a").observe(value)
    kinds.Histogram("idle", "Idle", buckets=(1, 2), registry=registry)


def test_what_is_told_is_what_the_client_library_tells() -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    fill(tally, own)
    fill(prometheus_client, theirs)
    assert samples(own) == samples(theirs)
    assert own.get_sample_value("calls_total", {"method": "a", "code": "OK"}) == 3.5


def test_a_block_can_be_timed() -> None:
    registry = CollectorRegistry()
    seconds = tally.Histogram("seconds", "Seconds", buckets=(60,), registry=registry)
    with seconds.time():
        pass
    assert registry.get_sample_value("seconds_bucket", {"le": "60.0"}) == 1
