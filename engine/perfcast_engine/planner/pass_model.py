"""How long an engine's iterations take: the compiled model, corrected by what was observed, or a regression alone.

spec/04 section 11. One object is one engine's state; it changes only by ``tune``, the same observations always lead to
the same state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.errors import EngineError, InvalidField
from perfcast_engine.planner.fit import Fit, fit
from perfcast_engine.planner.samples import Features, SampleStore
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
    "cold_start_observations",
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


class Priced(NamedTuple):
    """Times of N iterations. ms: (N,), NaN where the model knows too little or data miss; errors: those, by index."""

    ms: F64
    errors: dict[int, EngineError]

    def raise_first(self) -> F64:
        if self.errors:
            raise self.errors[min(self.errors)]
        return self.ms


@dataclass(slots=True)
class PassModel:
    """Iteration times of one engine. ``steps``: its compiled steps, None for a regression; ``warning``: why so."""

    options: LearningOptions = field(default_factory=LearningOptions)
    steps: StepModel | None = None
    warning: str | None = None
    stores: dict[Kind, SampleStore] = field(default_factory=dict)
    _fits: dict[Kind, Fit | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.stores = self.stores or {
            kind: SampleStore(
                len(kind.value),
                self.options.buckets_per_axis(len(kind.value)),
                self.options.max_observations,
                None if self.steps is None else self.options.upper(kind),
            )
            for kind in KINDS
        }

    def copy(self) -> PassModel:
        """A model that learns on its own from here on."""
        return replace(self, stores={kind: store.copy() for kind, store in self.stores.items()})

    def restore(
        self,
        kind: Kind,
        features: Sequence[Features],
        values: Sequence[float],
        lower_seen: Features | None,
        upper_seen: Features | None,
    ) -> None:
        """Take over what the store of ``kind`` of another such model holds; InvalidField where it could not."""
        if self.steps is not None and any(self._bounded(value) != value for value in values):
            raise InvalidField("samples", "holds correction factors beyond the bounds of the options", why="state")
        self.stores[kind] = self.stores[kind].restored(features, values, lower_seen, upper_seen)
        self._fits.clear()

    def uncorrected(self) -> PassModel:
        """The same model before it learned anything."""
        return replace(self, stores={})

    def estimate_ms(self, iterations: Sequence[Iteration]) -> list[float | None]:
        """The time of each iteration; None where a regression knows too little. Idle iterations take 0."""
        values = self.estimate_work(*rank_work(iterations), len(iterations))
        return [None if math.isnan(value) else float(value) for value in values]

    def estimate_work(self, work: RankWork, owner: np.ndarray, count: int) -> F64:
        """As ``estimate_ms`` for ranks as columns: ms (count,), the maximum over the ranks that each iteration owns,
        corrected; NaN where unknown. EngineError where the compiled model has no data."""
        return self.price(work, owner, count).raise_first()

    def price(self, work: RankWork, owner: np.ndarray, count: int) -> Priced:
        """As ``estimate_work``, with the errors of single iterations beside the times of the others."""
        kind, features = _heaviest_columns(work, owner, count)
        if self.steps is None:
            return Priced(self._regressed(kind, features), {})
        native = self._native(work, owner, count)
        return Priced(native.ms * self._factors(kind, features), native.errors)

    def _native(self, work: RankWork, owner: np.ndarray, count: int) -> Priced:
        """The compiled model's time of each iteration, uncorrected."""
        assert self.steps is not None
        ms, errors = np.zeros(count), dict[int, EngineError]()
        answer = self.steps.observed(work)
        with np.errstate(invalid="ignore"):
            np.maximum.at(ms, owner, answer.ms)
        for rank, error in answer.errors().items():
            errors.setdefault(int(owner[rank]), error)
        return Priced(ms, errors)

    def tune(self, iterations: Sequence[Iteration]) -> int:
        """Learn from measured iterations, in order; how many were kept. Idle and unmeasured ones teach nothing. An
        iteration that the compiled model has no data for raises; the earlier ones are learned by then."""
        told = [(i, heaviest(each), observed_ms(each)) for i, each in enumerate(iterations)]
        useful = [(i, work, target) for i, work, target in told if work is not None and target is not None]
        values = [target for *_, target in useful]
        errors: dict[int, EngineError] = {}
        if self.steps is not None:
            native, errors = self._native(*rank_work([iterations[i] for i, *_ in useful]), len(useful))
            usable = np.isfinite(native) & (native > 0)
            ratios = np.divide(values, native, out=np.full(len(values), np.nan), where=usable)
            values = [self._bounded(float(ratio)) for ratio in ratios]
        kept = 0
        self._fits.clear()
        for index, ((_, (kind, features), _), value) in enumerate(zip(useful, values, strict=True)):
            if index in errors:
                raise errors[index]
            kept += math.isfinite(value) and self.stores[kind].add(features, value)
        return kept

    def correction_factors(self, *kinds: Kind) -> list[float]:
        """The factor of every populated bucket of each kind (of all if none is named) with enough observations; empty
        for a regression."""
        if self.steps is None:
            return []
        tables = [self._factor_table(kind) for kind in kinds or KINDS if self._ready(kind)]
        return [float(factor) for table in tables for factor in table[~np.isnan(table)]]

    def diagnostics(self) -> Diagnostics:
        retained = sum(len(store) for store in self.stores.values())
        ready = len(self.correction_factors())
        if self.steps is not None:
            source, readiness = "aic_with_correction" if ready else "aic", "ready"
        else:
            source = "fallback_regression"
            if any(self.fit_of(kind) for kind in KINDS):
                readiness = "ready"
            else:
                readiness = "unsupported_config" if self.warning else "insufficient_data"
        return Diagnostics(source, readiness, retained, ready, self.warning)

    def fit_of(self, kind: Kind) -> Fit | None:
        """A regression's fit of the retained observations of a kind; None while there is none."""
        store = self.stores[kind]
        if kind not in self._fits:
            found = fit(store.features, store.values, self.options.min_observations) if len(store) else None
            self._fits[kind] = found
        return self._fits[kind]

    @property
    def is_cold(self) -> bool:
        """Whether corrections rest on so few observations of some kind that they are held back."""
        return any(self.is_cold_for(kind) for kind in KINDS)

    def is_cold_for(self, kind: Kind) -> bool:
        held = self.steps is not None and self.options.cold_start_factor is not None
        return held and 0 < len(self.stores[kind]) < self.options.cold_start_observations

    def _ready(self, kind: Kind) -> bool:
        return len(self.stores[kind]) >= self.options.min_observations

    def _bounded(self, ratio: float) -> float:
        low, high = self.options.min_faster_correction_factor, self.options.max_slower_correction_factor
        ratio = ratio if low is None else max(ratio, low)
        return ratio if high is None else min(ratio, high)

    def _factor_table(self, kind: Kind) -> F64:
        """The factor of each bucket, NaN where it is empty."""
        limit, medians = self.options.cold_start_factor, self.stores[kind].medians()
        return np.clip(medians, 1 / limit, limit) if limit is not None and self.is_cold_for(kind) else medians

    def _factors(self, kind: np.ndarray, features: F64) -> F64:
        factors = np.ones(len(kind))
        for code, name in enumerate(KINDS):
            mine = kind == code
            if not self._ready(name) or not mine.any():
                continue
            store, points = self.stores[name], features[mine, : len(name.value)]
            found = self._factor_table(name)[store.buckets_of(points)]
            factors[mine] = np.where(store.holds(points) & ~np.isnan(found), found, 1.0)
        return factors

    def _regressed(self, kind: np.ndarray, features: F64) -> F64:
        out = np.where(kind < 0, 0.0, np.nan)
        for code, name in enumerate(KINDS):
            mine = kind == code
            fitted = self.fit_of(name) if mine.any() else None
            if fitted is not None:
                out[mine] = fitted(features[mine, : len(name.value)])
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
