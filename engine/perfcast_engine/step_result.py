"""What a step answers: latencies by source, per-operator answers, misses; and how passes combine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from perfcast_engine.answer import F64, Answer, Mask, Miss, Missing, Source, moved
from perfcast_engine.errors import EngineError
from perfcast_engine.origin import Gathered, Joined, Scaled, Summed, Tagged


@dataclass(frozen=True, slots=True)
class StepResult(Missing):
    """Latencies of N steps. ms: (N,) NaN where data miss; origin: by source; tier: (N,); energy: (N,) W ms; operators:
    per-operator answers, where asked for; misses: (mask, error) pairs."""

    ms: F64
    origin: Summed
    tier: np.ndarray
    energy: F64
    misses: list[Miss] = field(default_factory=list)
    operators: dict[str, Answer] | None = None

    @classmethod
    def zero(cls, n: int, operators: bool = False) -> StepResult:
        listed: dict[str, Answer] | None = {} if operators else None
        return cls(np.zeros(n), Summed((), n), np.zeros(n, np.uint8), np.zeros(n), [], listed)

    @property
    def by_source(self) -> F64:
        """ms (N, 5) per Source."""
        return self.origin.rows()

    def __len__(self) -> int:
        return len(self.ms)

    def __add__(self, other: StepResult) -> StepResult:
        return StepResult(
            self.ms + other.ms,
            self.origin.plus(other.origin),
            np.maximum(self.tier, other.tier),
            self.energy + other.energy,
            self.misses + other.misses,
            _merged(self.operators, other.operators),
        )

    def scaled(self, factor: F64) -> StepResult:
        """Times ``factor`` (N,); 0 leaves a point out and forgets what it misses. No operators where it leaves none."""
        live = factor != 0

        def times(values: F64) -> F64:
            return np.where(live, values * factor, 0.0)

        operators = self.operators
        if operators:
            listed = operators.items() if live.any() else ()
            operators = {name: replace(a, ms=times(a.ms), energy=times(a.energy)) for name, a in listed}
        return StepResult(
            times(self.ms),
            Summed((Scaled(self.origin, factor),), len(factor)),
            np.where(live, self.tier, np.uint8(0)),
            times(self.energy),
            [(mask & live, error) for mask, error in self.misses if (mask & live).any()],
            operators,
        )

    def spread(self, where: Mask) -> StepResult:
        """These points at the True places of ``where``, 0 ms elsewhere."""
        return gathered(self, np.flatnonzero(where), len(where))

    def errors(self) -> dict[int, EngineError]:
        """The first error of each point that has no latency, by point index."""
        found: dict[int, EngineError] = {}
        for mask, error in self.misses:
            for index in np.flatnonzero(mask):
                found.setdefault(int(index), error)
        return found


def joined(results: Sequence[StepResult]) -> StepResult:
    """Results of neighbouring points, without operators, as one."""
    ends = np.cumsum([len(result) for result in results])
    misses: list[Miss] = []
    for result, end in zip(results, ends.tolist(), strict=True):
        misses += moved(result.misses, np.arange(end - len(result), end), ends[-1])
    origin = Joined(tuple(result.origin for result in results), tuple(ends.tolist()))
    ms, tier, energy = (
        np.concatenate([getattr(result, name) for result in results]) for name in ("ms", "tier", "energy")
    )
    return StepResult(ms, Summed((origin,), len(ms)), tier, energy, misses)


def _merged(a: dict[str, Answer] | None, b: dict[str, Answer] | None) -> dict[str, Answer] | None:
    return _folded([*a.items(), *b.items()]) if a is not None and b is not None else a if b is None else b


def _folded(answers: Iterable[tuple[str, Answer]]) -> dict[str, Answer]:
    """Answers of one name added up."""
    out: dict[str, Answer] = {}
    for name, answer in answers:
        out[name] = out[name] + answer if name in out else answer
    return out


def combined(answers: list[tuple[str, Answer]], n: int, listed: bool) -> StepResult:
    """The sum of named operators over N points."""
    ms, energy, tier = np.zeros(n), np.zeros(n), np.zeros(n, np.uint8)
    misses: list[Miss] = []
    for _, answer in answers:
        ms, energy, tier = ms + answer.ms, energy + answer.energy, np.maximum(tier, answer.tier)
        misses += answer.misses
    origin = Summed(tuple(Tagged(answer.ms, answer.source) for _, answer in answers), n)
    return StepResult(ms, origin, tier, energy, misses, _folded(answers) if listed else None)


def blanked(result: StepResult, idle: Any) -> StepResult:
    """Zero latency and no miss where there is nothing to do."""
    idle = np.atleast_1d(idle)
    return result.scaled((~idle).astype(np.float64)) if idle.any() else result


def gathered(samples: StepResult, point: np.ndarray, n: int) -> StepResult:
    """Sums of trajectory samples back onto their points."""

    def summed(values: F64) -> F64:
        return np.bincount(point, values, n).astype(np.float64, copy=False)

    misses = moved(samples.misses, point, n)
    operators = samples.operators
    if operators is not None:
        operators = {name: _fold(answer, point, n) for name, answer in operators.items()} if len(point) else {}
    origin = Summed((Gathered(samples.origin, point, n),), n)
    tier = _largest(samples.tier, point, n)
    return StepResult(summed(samples.ms), origin, tier, summed(samples.energy), misses, operators)


def _largest(tier: np.ndarray, point: np.ndarray, n: int) -> np.ndarray:
    out = np.zeros(n, np.uint8)
    if tier.any():
        np.maximum.at(out, point, tier)
    return out


def _fold(answer: Answer, point: np.ndarray, n: int) -> Answer:
    """One operator's samples summed per point; tags that differ along a trajectory become MIXED."""
    ms, energy = (np.bincount(point, a, n).astype(np.float64, copy=False) for a in (answer.ms, answer.energy))
    live = (answer.ms != 0) | (answer.energy != 0) | np.isnan(answer.ms)
    source = np.zeros(n, np.uint8)
    source[point] = answer.source
    low, high = np.full(n, 255, np.uint8), np.zeros(n, np.uint8)
    np.minimum.at(low, point[live], answer.source[live])
    np.maximum.at(high, point[live], answer.source[live])
    seen = low != 255
    source[seen] = np.where(low[seen] == high[seen], low[seen], np.uint8(Source.MIXED))
    return Answer(ms, source, _largest(answer.tier, point, n), energy)
