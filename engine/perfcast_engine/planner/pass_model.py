"""How long an engine's iterations take: the compiled model, corrected by what was observed, or a regression alone.

spec/04 section 11. One object is one engine's state; it changes only by ``tune``, the same observations always lead to
the same state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.errors import InvalidField
from perfcast_engine.planner.fit import Fit, fit
from perfcast_engine.planner.samples import SampleStore
from perfcast_engine.planner.telemetry import Iteration, Kind, heaviest, observed_ms, rank_work
from perfcast_engine.step import RankWork, StepModel

KINDS = tuple(Kind)
COLUMN = {
    "sum_prefill_tokens": "prefill_tokens",
    "num_decode_requests": "decode_requests",
    "sum_decode_kv_tokens": "decode_kv_tokens",
}


POSITIVE = (
    "max_observations",
    "min_observations",
    "bucket_count",
    "max_num_tokens",
    "max_batch_size",
    "max_kv_tokens",
)


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """How observations are kept and used. ``cold_start_factor``: while a kind of work has fewer than
    ``cold_start_observations``, its factors stay within [1/f, f]; None leaves them free as the reference does."""

    max_observations: int = 64
    min_observations: int = 5
    bucket_count: int = 16
    min_faster_correction_factor: float | None = 0.5
    max_slower_correction_factor: float | None = 2.0
    max_num_tokens: int = 8192
    max_batch_size: int = 512
    max_kv_tokens: int = 2_000_000
    cold_start_factor: float | None = None
    cold_start_observations: int = 10

    def __post_init__(self) -> None:
        for name in POSITIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise InvalidField(name, f"must be a whole number above 0, not {value!r}", why="option")
        if self.min_observations > self.max_observations:
            raise InvalidField("min_observations", "exceeds max_observations", why="option")
        if math.isqrt(self.bucket_count) ** 2 != self.bucket_count:
            raise InvalidField("bucket_count", "must be a perfect square", why="option")
        _within("min_faster_correction_factor", self.min_faster_correction_factor, 0, 1)
        _within("max_slower_correction_factor", self.max_slower_correction_factor, 1, math.inf)
        _within("cold_start_factor", self.cold_start_factor, 1, math.inf)

    def buckets_per_axis(self, axes: int) -> int:
        return self.bucket_count if axes == 1 else math.isqrt(self.bucket_count)

    def upper(self, kind: Kind) -> tuple[float, ...]:
        """Bounds of a kind's features in the correction store."""
        bound = {
            "sum_prefill_tokens": self.max_num_tokens,
            "num_decode_requests": self.max_batch_size,
            "sum_decode_kv_tokens": self.max_kv_tokens,
        }
        return tuple(float(bound[name]) for name in kind.value)


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is None:
        return
    if not math.isfinite(value) or not low <= value <= high or value <= 0:
        raise InvalidField(name, f"must be a finite number in [{low:g}, {high:g}] or none, not {value!r}", why="option")


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Where answers come from now. ``source`` (as callers know it): aic, aic_with_correction, fallback_regression."""

    source: str
    readiness: str
    retained_observations: int
    correction_ready_buckets: int
    last_warning: str | None


@dataclass(slots=True)
class PassModel:
    """Iteration times of one engine. ``steps``: its compiled steps, None for a regression; ``warning``: why so."""

    options: LearningOptions = field(default_factory=LearningOptions)
    steps: StepModel | None = None
    warning: str | None = None
    stores: dict[Kind, SampleStore] = field(init=False)
    fits: dict[Kind, Fit | None] = field(init=False)

    def __post_init__(self) -> None:
        self.stores = {
            kind: SampleStore(
                len(kind.value),
                self.options.buckets_per_axis(len(kind.value)),
                self.options.max_observations,
                None if self.steps is None else self.options.upper(kind),
            )
            for kind in KINDS
        }
        self.fits = dict.fromkeys(KINDS)

    def estimate_ms(self, iterations: Sequence[Iteration]) -> list[float | None]:
        """The time of each iteration; None where a regression knows too little. Idle iterations take 0."""
        values = self.estimate_work(*rank_work(iterations), len(iterations))
        return [None if math.isnan(value) else float(value) for value in values]

    def estimate_work(self, work: RankWork, owner: np.ndarray, count: int) -> F64:
        """As ``estimate_ms`` for ranks as columns: ms (count,), the maximum over the ranks that each iteration owns,
        corrected; NaN where unknown. EngineError where the compiled model has no data."""
        kind, features = _heaviest_columns(work, owner, count)
        if self.steps is None:
            return self._regressed(kind, features)
        return self.native_ms(work, owner, count) * self._factors(kind, features)

    def native_ms(self, work: RankWork, owner: np.ndarray, count: int) -> F64:
        """The compiled model's time of each iteration, uncorrected."""
        assert self.steps is not None
        ms = np.zeros(count)
        np.maximum.at(ms, owner, self.steps.observed(work).raise_first().ms)
        return ms

    def tune(self, iterations: Sequence[Iteration]) -> int:
        """Learn from measured iterations, in order; how many were kept. Idle and unmeasured ones teach nothing."""
        kept = 0
        for iteration in iterations:
            work, target = heaviest(iteration), observed_ms(iteration)
            if work is None or target is None:
                continue
            kind, features = work
            if self.steps is None:
                kept += self.stores[kind].add(features, target)
                store = self.stores[kind]
                self.fits[kind] = fit(store.features, store.values, self.options.min_observations)
            else:
                native = float(self.native_ms(*rank_work([iteration]), 1)[0])
                if math.isfinite(native) and native > 0:
                    kept += self.stores[kind].add(features, self._bounded(target / native))
        return kept

    def correction_factors(self) -> list[float]:
        """The factor of every populated bucket of every kind with enough observations; empty for a regression."""
        if self.steps is None:
            return []
        return [
            self._cautious(kind, median)
            for kind in KINDS
            if self._ready(kind)
            for median in self.stores[kind].medians()
        ]

    def diagnostics(self) -> Diagnostics:
        retained = sum(len(store) for store in self.stores.values())
        ready = len(self.correction_factors())
        if self.steps is not None:
            source, readiness = "aic_with_correction" if ready else "aic", "ready"
        else:
            source = "fallback_regression"
            if any(self.fits.values()):
                readiness = "ready"
            else:
                readiness = "unsupported_config" if self.warning else "insufficient_data"
        return Diagnostics(source, readiness, retained, ready, self.warning)

    def _ready(self, kind: Kind) -> bool:
        return len(self.stores[kind]) >= self.options.min_observations

    def _bounded(self, ratio: float) -> float:
        low, high = self.options.min_faster_correction_factor, self.options.max_slower_correction_factor
        ratio = ratio if low is None else max(ratio, low)
        return ratio if high is None else min(ratio, high)

    def _cautious(self, kind: Kind, factor: float) -> float:
        limit = self.options.cold_start_factor
        if limit is None or len(self.stores[kind]) >= self.options.cold_start_observations:
            return factor
        return min(max(factor, 1 / limit), limit)

    def _factors(self, kind: np.ndarray, features: F64) -> F64:
        factors = np.ones(len(kind))
        for code, name in enumerate(KINDS):
            if not self._ready(name):
                continue
            for point in np.flatnonzero(kind == code):
                factors[point] = self._factor(name, tuple(features[point, : len(name.value)]))
        return factors

    def _factor(self, kind: Kind, features: tuple[float, ...]) -> float:
        bucket = self.stores[kind].bucket_of(features)
        values = [] if bucket is None else self.stores[kind].in_bucket(bucket)
        return self._cautious(kind, float(np.median(values))) if values else 1.0

    def _regressed(self, kind: np.ndarray, features: F64) -> F64:
        out = np.where(kind < 0, 0.0, np.nan)
        for code, name in enumerate(KINDS):
            fitted = self.fits[name]
            if fitted is not None:
                for point in np.flatnonzero(kind == code):
                    out[point] = fitted(tuple(features[point, : len(name.value)]))
        return out


def _heaviest_columns(work: RankWork, owner: np.ndarray, count: int) -> tuple[np.ndarray, F64]:
    """Of each iteration, the kind (index into KINDS, -1 idle) and features (count, 2) of its heaviest rank."""
    prefills, decodes = work.prefill_tokens > 0, work.decode_requests > 0
    codes = [KINDS.index(kind) for kind in (Kind.MIXED, Kind.PREFILL, Kind.DECODE)]
    rank_kind = np.select([prefills & decodes, prefills, decodes], codes, -1)
    rank_features = np.zeros((len(work), 2))
    for code, kind in enumerate(KINDS):
        mine = rank_kind == code
        for axis, name in enumerate(kind.value):
            rank_features[mine, axis] = getattr(work, COLUMN[name])[mine]
    weight = np.where(rank_kind < 0, -1.0, rank_features.sum(axis=1))
    last = np.lexsort((np.arange(len(work)), weight, owner))
    chosen = np.full(count, -1)
    chosen[owner[last]] = last  # the last written of each iteration is its heaviest, the later rank on equality
    return np.where(chosen >= 0, rank_kind[chosen], -1), np.where((chosen >= 0)[:, None], rank_features[chosen], 0.0)
