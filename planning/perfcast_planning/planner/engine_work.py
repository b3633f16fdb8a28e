"""Engines as planners see them: roles, limits, live ranks, and the time of hypothetical passes (spec/07 section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import EngineError, InvalidField, check_whole
from perfcast_engine.observed import Priced, RankWork

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

    @property
    def shape(self) -> tuple[int, int]:
        engines, ranks = self.decode_requests.shape
        return engines, ranks


@dataclass(frozen=True, slots=True)
class Passes:
    """Hypothetical passes of several engines. ``work``: columns of RankWork, each (P, R) or broadcasting to it;
    ``owner``: (P,) index of the engine; ``repeats``: (P,) how often it runs the pass; ``engines``: how many."""

    work: dict[str, F64]
    shape: tuple[int, int]
    owner: np.ndarray
    repeats: F64
    engines: int

    @classmethod
    def of_each(cls, work: dict[str, F64], shape: tuple[int, int]) -> Passes:
        """One pass of each engine."""
        return cls(work, shape, np.arange(shape[0]), np.ones(shape[0]), shape[0])

    def column(self, name: str) -> F64:
        column = self.work.get(name)
        return np.zeros(self.shape).ravel() if column is None else np.broadcast_to(column, self.shape).ravel()


def price_passes(model: PassModel, questions: Sequence[Passes]) -> list[Priced]:
    """Milliseconds that each engine of each question spends on its passes, all of them in one evaluation.

    NaN where the model knows too little; an engine that misses data has its error beside.
    """
    *starts, count = np.cumsum([0, *(asked.shape[0] for asked in questions)]).tolist()
    work = RankWork(*(np.concatenate([asked.column(name) for asked in questions]) for name in RankWork.__slots__))
    ranks = np.repeat([asked.shape[1] for asked in questions], [asked.shape[0] for asked in questions])
    priced = model.price(Iterations(work, np.repeat(np.arange(count), ranks), count))
    times = np.maximum(priced.ms, 0)
    answers = []
    for asked, start in zip(questions, starts, strict=True):
        own = times[start : start + asked.shape[0]]
        spent = np.bincount(asked.owner, own * asked.repeats, asked.engines).astype(np.float64, copy=False)
        errors: dict[int, EngineError] = {}
        for index in sorted(priced.errors):
            if start <= index < start + len(own):
                errors.setdefault(int(asked.owner[index - start]), priced.errors[index])
        answers.append(Priced(spent, errors))
    return answers
