"""How long an engine's iterations take: the compiled model, corrected by what was observed, or a regression alone.

spec/04 section 11. One object is one engine's state; it changes only by ``tune``, the same observations always lead to
the same state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import EngineError, InvalidField, check_whole
from perfcast_engine.step import StepModel

from perfcast_planning.planner.fit import Fit, fit
from perfcast_planning.planner.observed import Priced, observed
from perfcast_planning.planner.samples import Samples, SampleStore
from perfcast_planning.planner.telemetry import KINDS, Iterations, Kind

# count of work -> option that bounds it in the correction store
BOUNDS = {"prefill_tokens": "max_num_tokens", "decode_requests": "max_batch_size", "decode_kv_tokens": "max_kv_tokens"}
NUMBERS = ("max_observations", "min_observations", "bucket_count", *BOUNDS.values(), "cold_start_observations")


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """How observations are kept and used. ``cold_start_factor``: while a kind of work has fewer than
    ``cold_start_observations``, or all that are kept, its factors stay within [1/f, f]; None leaves them free as the
    reference does."""

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
        check_whole(self, NUMBERS, 1, math.inf, why="option")
        if self.min_observations > self.max_observations:
            raise InvalidField("min_observations", "exceeds max_observations", why="option")
        if math.isqrt(self.bucket_count) ** 2 != self.bucket_count:
            raise InvalidField("bucket_count", "must be a perfect square", why="option")
        for name, low, high in (
            ("min_faster_correction_factor", 0, 1),
            ("max_slower_correction_factor", 1, math.inf),
            ("cold_start_factor", 1, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and low <= value <= high and value > 0):
                told = f"must be a finite number in [{low:g}, {high:g}] or none, not {value!r}"
                raise InvalidField(name, told, why="option")

    def store(self, kind: Kind, bounded: bool) -> SampleStore:
        """An empty store for a kind's observations."""
        per_axis = self.bucket_count if len(kind.value) == 1 else math.isqrt(self.bucket_count)
        upper = tuple(float(getattr(self, BOUNDS[name])) for name in kind.value) if bounded else None
        return SampleStore(len(kind.value), per_axis, self.max_observations, upper)


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Where answers come from now. ``source`` (as callers know it): aic, aic_with_correction, fallback_regression."""

    source: str
    readiness: str
    retained_observations: int
    correction_ready_buckets: int


@dataclass(slots=True)
class PassModel:
    """Iteration times of one engine. ``steps``: its compiled steps, None for a regression."""

    options: LearningOptions = field(default_factory=LearningOptions)
    steps: StepModel | None = None
    stores: dict[Kind, SampleStore] = field(default_factory=dict)
    _fits: dict[Kind, Fit | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.stores = self.stores or {kind: self.options.store(kind, self.steps is not None) for kind in KINDS}

    def copy(self) -> PassModel:
        """A model that learns on its own from here on."""
        return replace(self, stores={kind: store.restored(store.told()) for kind, store in self.stores.items()})

    def restore(self, kind: Kind, told: Samples) -> None:
        """Take over what the store of ``kind`` of another such model holds; InvalidField where it could not."""
        if self.steps is not None and not np.array_equal(self._bounded(np.array(told.values)), told.values):
            raise InvalidField("samples", "holds correction factors beyond the bounds of the options", why="state")
        self.stores[kind] = self.stores[kind].restored(told)
        self._fits.clear()

    def warm(self) -> PassModel:
        """The same model before it learned anything of the kinds that it has observed little of."""
        stores = {kind: self.options.store(kind, True) for kind in KINDS if self.is_cold_for(kind)}
        return replace(self, stores=self.stores | stores)

    def estimate(self, iterations: Iterations) -> F64:
        """ms (N,) of each iteration, the maximum over its ranks, corrected; NaN where a regression knows too little.
        Idle ones take 0. EngineError where the compiled model has no data."""
        return self.price(iterations).raise_first()

    def price(self, iterations: Iterations) -> Priced:
        """As ``estimate``, with the errors of single iterations beside the times of the others."""
        if self.steps is not None:
            known, learned = self._native(iterations), self._factors
            if not any(map(self._ready, KINDS)):
                return known
        kind, features = iterations.heaviest()
        if self.steps is None:
            known, learned = Priced(np.where(kind < 0, 0.0, 1.0), {}), self._regressed
        for code, name in enumerate(KINDS):
            mine = kind == code
            if mine.any():
                known.ms[mine] *= learned(name, features[mine, : len(name.value)])
        return known

    def _native(self, iterations: Iterations) -> Priced:
        """The compiled model's time of each iteration, uncorrected."""
        assert self.steps is not None
        ms, errors = np.zeros(iterations.count), dict[int, EngineError]()
        answer = observed(self.steps, iterations.work)
        with np.errstate(invalid="ignore"):
            np.maximum.at(ms, iterations.owner, answer.ms)
        for rank, error in answer.errors.items():
            errors.setdefault(int(iterations.owner[rank]), error)
        return Priced(ms, errors)

    def tune(self, iterations: Iterations) -> int:
        """Learn from measured iterations, in order; how many were kept. Idle and unmeasured ones teach nothing. An
        iteration that the compiled model has no data for raises; the earlier ones are learned by then."""
        kind, features = iterations.heaviest()
        values, errors = iterations.measured_ms(), dict[int, EngineError]()
        useful = (kind >= 0) & (values > 0)
        if self.steps is not None:
            native, errors = self._native(iterations)
            usable = np.isfinite(native) & (native > 0)
            values = self._bounded(np.divide(values, native, out=np.full(len(values), np.nan), where=usable))
        kept = 0
        self._fits.clear()
        for index in np.flatnonzero(useful).tolist():
            if index in errors:
                raise errors[index]
            store, value = self.stores[KINDS[kind[index]]], float(values[index])
            kept += math.isfinite(value) and store.add(tuple(features[index, : store.axes].tolist()), value)
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
        factors = self.correction_factors()
        if self.steps is not None:
            return Diagnostics("aic_with_correction" if factors else "aic", "ready", retained, len(factors))
        ready = any(self.fit_of(kind) for kind in KINDS)
        return Diagnostics("fallback_regression", "ready" if ready else "insufficient_data", retained, 0)

    def fit_of(self, kind: Kind) -> Fit | None:
        """A regression's fit of the retained observations of a kind; None while there is none."""
        if kind not in self._fits:
            store = self.stores[kind]
            self._fits[kind] = fit(store.features, store.values, self.options.min_observations)
        return self._fits[kind]

    @property
    def is_cold(self) -> bool:
        """Whether corrections rest on so few observations of some kind that they are held back."""
        return any(self.is_cold_for(kind) for kind in KINDS)

    def is_cold_for(self, kind: Kind) -> bool:
        options = self.options
        held = self.steps is not None and options.cold_start_factor is not None
        return held and 0 < len(self.stores[kind]) < min(options.cold_start_observations, options.max_observations)

    def _ready(self, kind: Kind) -> bool:
        return len(self.stores[kind]) >= self.options.min_observations

    def _bounded(self, ratio: F64) -> F64:
        low, high = self.options.min_faster_correction_factor, self.options.max_slower_correction_factor
        return np.clip(ratio, low or 0.0, high or math.inf)

    def _factor_table(self, kind: Kind) -> F64:
        """The factor of each bucket, NaN where it is empty."""
        limit, medians = self.options.cold_start_factor, self.stores[kind].medians()
        return np.clip(medians, 1 / limit, limit) if limit is not None and self.is_cold_for(kind) else medians

    def _factors(self, kind: Kind, features: F64) -> F64 | float:
        """The correction of work of one kind (N, axes); 1 where too little like it was observed."""
        store = self.stores[kind]
        if not self._ready(kind):
            return 1.0
        found = self._factor_table(kind)[store.buckets_of(features)]
        return np.where(store.holds(features) & ~np.isnan(found), found, 1.0)

    def _regressed(self, kind: Kind, features: F64) -> F64 | float:
        """ms of work of one kind (N, axes) by its fit; NaN while there is none."""
        fitted = self.fit_of(kind)
        return math.nan if fitted is None else fitted(features)
