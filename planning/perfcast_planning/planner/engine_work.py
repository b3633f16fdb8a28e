"""Engines as planners see them: roles, limits, live ranks, and the time of hypothetical passes (spec/07 section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import InvalidField, check_whole

from perfcast_planning.planner.observed import Priced, RankWork
from perfcast_planning.planner.pass_model import PassModel
from perfcast_planning.planner.telemetry import MAX_COUNT, Iterations


class EngineRole(Enum):
    """What an engine serves. prefills, decodes: whether it runs such passes."""

    PREFILL = (True, False)
    DECODE = (False, True)
    AGGREGATED = (True, True)

    def __init__(self, prefills: bool, decodes: bool) -> None:
        self.prefills = prefills
        self.decodes = decodes


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine schedules at most; the defaults are the planner's when a worker publishes none."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 512
    max_kv_tokens: int = 2_000_000
    attention_dp: int = 1

    def __post_init__(self) -> None:
        check_whole(self, self.__slots__, 1, MAX_COUNT, why="limit")


@dataclass(frozen=True, slots=True)
class RankLoads:
    """What the attention-DP ranks of W live engines have waiting and running: whole numbers, float64 (W, R)."""

    queued_prefill_requests: F64
    queued_prefill_tokens: F64
    queued_decode_requests: F64
    queued_decode_kv_tokens: F64
    prefill_requests: F64
    prefill_tokens: F64
    prefill_kv_tokens: F64
    decode_requests: F64
    decode_kv_tokens: F64

    @classmethod
    def of(cls, engines: int, ranks: int, **columns: Any) -> RankLoads:
        """From columns that broadcast to (engines, ranks), 0 where not given; InvalidField names a bad one."""
        told = {}
        for name in cls.__slots__:
            column = np.asarray(columns.pop(name, 0.0), np.float64)
            if not ((column >= 0) & (column <= MAX_COUNT) & (column == np.floor(column))).all():
                raise InvalidField(name, "must hold whole numbers in [0, 2^32)", why="fpm_count")
            told[name] = np.broadcast_to(column, (engines, ranks))
        if columns:
            raise InvalidField(next(iter(columns)), "is no load of a rank", why="type")
        return cls(**told)


@dataclass(frozen=True, slots=True)
class Passes:
    """Hypothetical passes of several engines. ``work``: columns (P, R); ``owner``: (P,) index of the engine;
    ``repeats``: (P,) how often it runs the pass; ``engines``: how many."""

    work: RankWork
    owner: np.ndarray
    repeats: F64
    engines: int

    @classmethod
    def of(cls, owner: np.ndarray, repeats: F64, engines: int, **work: F64) -> Passes:
        """From some of the columns; the others are 0."""
        none = np.zeros_like(next(iter(work.values())))
        return cls(RankWork(*(work.get(name, none) for name in RankWork.__slots__)), owner, repeats, engines)

    @classmethod
    def of_each(cls, **work: F64) -> Passes:
        """One pass of each engine."""
        engines = len(next(iter(work.values())))
        return cls.of(np.arange(engines), np.ones(engines), engines, **work)


def price_passes(model: PassModel, questions: Sequence[Passes]) -> list[Priced]:
    """Milliseconds that each engine of each question spends on its passes, all of them in one evaluation. All engines
    have the same number of ranks.

    NaN where the model knows too little; an engine that misses data has its error beside.
    """
    table = [_joined([getattr(asked.work, name) for asked in questions]) for name in RankWork.__slots__]
    starts = list(accumulate((asked.engines for asked in questions), initial=0))
    owner = _joined([asked.owner + start for asked, start in zip(questions, starts, strict=False)])
    rank_of, count = np.repeat(np.arange(len(owner)), table[0].shape[1]), len(owner)
    priced = model.price(Iterations(RankWork(*(column.ravel() for column in table)), rank_of, count))
    times = np.maximum(priced.ms, 0) * _joined([asked.repeats for asked in questions])
    spent = np.bincount(owner, times, starts[-1]).astype(np.float64, copy=False)
    errors = {int(owner[index]): priced.errors[index] for index in sorted(priced.errors, reverse=True)}
    return [
        Priced(spent[start:end], {index - start: errors[index] for index in errors if start <= index < end})
        for start, end in pairwise(starts)
    ]


def _joined(columns: list[Any]) -> Any:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)
