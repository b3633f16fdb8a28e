"""What a step answers: latencies by source, per-operator answers, misses; and how passes combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from perfcast_engine.answer import F64, Answer, Mask, Miss, Source
from perfcast_engine.errors import EngineError
from perfcast_engine.origin import Gathered, Joined, Scaled, Spread, Summed, Tagged


@dataclass(frozen=True, slots=True)
class StepResult:
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
        operators = self.operators and {name: answer.scaled(factor) for name, answer in self.operators.items()}
        return replace(
            self,
            ms=self.ms * factor,
            origin=Summed((Scaled(self.origin, factor),), len(factor)),
            energy=self.energy * factor,
            operators=operators,
        )

    def spread(self, where: Mask) -> StepResult:
        """These points at the True places of ``where``, 0 ms elsewhere."""

        def over(values: np.ndarray) -> np.ndarray:
            out = np.zeros((len(where), *values.shape[1:]), values.dtype)
            out[where] = values
            return out

        def answer(a: Answer) -> Answer:
            return Answer(over(a.ms), over(a.source), over(a.tier), over(a.energy))

        return StepResult(
            over(self.ms),
            Summed((Spread(self.origin, where),), len(where)),
            over(self.tier),
            over(self.energy),
            [(over(mask), error) for mask, error in self.misses],
            self.operators and {name: answer(a) for name, a in self.operators.items()},
        )

    def errors(self) -> dict[int, EngineError]:
        """The first error of each point that has no latency, by point index."""
        found: dict[int, EngineError] = {}
        for mask, error in self.misses:
            for index in np.flatnonzero(mask):
                found.setdefault(int(index), error)
        return found

    def raise_first(self) -> StepResult:
        errors = self.errors()
        if errors:
            raise errors[min(errors)]
        return self


def joined(results: Sequence[StepResult]) -> StepResult:
    """Results of neighbouring points, without operators, as one."""
    ends = np.cumsum([len(result) for result in results])
    misses: list[Miss] = []
    for result, end in zip(results, ends, strict=True):
        for mask, error in result.misses:
            whole = np.zeros(ends[-1], np.bool_)
            whole[end - len(result) : end] = mask
            misses.append((whole, error))
    origin = Joined(tuple(result.origin for result in results), tuple(ends.tolist()))
    ms, tier, energy = (
        np.concatenate([getattr(result, name) for result in results]) for name in ("ms", "tier", "energy")
    )
    return StepResult(ms, Summed((origin,), len(ms)), tier, energy, misses)


def _merged(a: dict[str, Answer] | None, b: dict[str, Answer] | None) -> dict[str, Answer] | None:
    if a is None or b is None:
        return a if b is None else b
    out = dict(a)
    for name, answer in b.items():
        out[name] = out[name] + answer if name in out else answer
    return out


def combined(answers: list[tuple[str, Answer]], n: int, listed: bool) -> StepResult:
    folded: dict[str, Answer] = {}
    ms, energy, tier = np.zeros(n), np.zeros(n), np.zeros(n, np.uint8)
    misses: list[Miss] = []
    for name, answer in answers:
        ms = ms + answer.ms
        energy = energy + answer.energy
        tier = np.maximum(tier, answer.tier)
        misses += answer.misses
        if listed:
            folded[name] = folded[name] + answer if name in folded else answer
    origin = Summed(tuple(Tagged(answer.ms, answer.source) for _, answer in answers), n)
    return StepResult(ms, origin, tier, energy, misses, folded if listed else None)


def blanked(result: StepResult, idle: Any) -> StepResult:
    """Zero latency and no miss where there is nothing to do; no operators where no point has any."""
    idle = np.atleast_1d(idle)
    if not idle.any():
        return result
    misses = [(mask & ~idle, error) for mask, error in result.misses if (mask & ~idle).any()]
    operators = result.operators
    if operators is not None:
        operators = {} if idle.all() else {name: _blanked(answer, idle) for name, answer in operators.items()}
    return StepResult(
        np.where(idle, 0.0, result.ms),
        Summed((Scaled(result.origin, (~idle).astype(np.float64)),), len(idle)),
        np.where(idle, np.uint8(0), result.tier),
        np.where(idle, 0.0, result.energy),
        misses,
        operators,
    )


def _blanked(answer: Answer, idle: Mask) -> Answer:
    return replace(answer, ms=np.where(idle, 0.0, answer.ms), energy=np.where(idle, 0.0, answer.energy))


def gathered(samples: StepResult, point: np.ndarray, n: int) -> StepResult:
    """Sums of trajectory samples back onto their points."""

    def summed(values: F64) -> F64:
        return np.bincount(point, values, n).astype(np.float64, copy=False)

    tier = np.zeros(n, np.uint8)
    np.maximum.at(tier, point, samples.tier)
    misses: list[Miss] = []
    for mask, error in samples.misses:
        gone = np.zeros(n, np.bool_)
        gone[point[mask]] = True
        misses.append((gone, error))
    operators = samples.operators
    if operators is not None:
        operators = {name: _fold(answer, point, n) for name, answer in operators.items()} if len(point) else {}
    origin = Summed((Gathered(samples.origin, point, n),), n)
    return StepResult(summed(samples.ms), origin, tier, summed(samples.energy), misses, operators)


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
    tier = np.zeros(n, np.uint8)
    np.maximum.at(tier, point, answer.tier)
    return Answer(ms, source, tier, energy)
