"""Engines as planners see them: roles, limits, live ranks, and the time of hypothetical passes (spec/07 section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.errors import InvalidField
from perfcast_engine.planner.pass_model import PassModel
from perfcast_engine.planner.telemetry import MAX_COUNT
from perfcast_engine.step import RankWork

COLUMNS = ("prefill_requests", "prefill_tokens", "prefill_kv_tokens", "decode_requests", "decode_kv_tokens")


class EngineRole(Enum):
    """What an engine serves. prefills, decodes: whether it runs such passes."""

    PREFILL = (True, False)
    DECODE = (False, True)
    AGGREGATED = (True, True)

    @property
    def prefills(self) -> bool:
        return self.value[0]

    @property
    def decodes(self) -> bool:
        return self.value[1]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What one engine schedules at most; the defaults are the planner's when a worker publishes none."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 512
    max_kv_tokens: int = 2_000_000
    attention_dp: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_kv_tokens", "attention_dp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_COUNT:
                raise InvalidField(name, f"must be a whole number in [1, 2^32), not {value!r}", why="limit")


@dataclass(frozen=True, slots=True)
class RankQueue:
    """One attention-DP rank of a live engine: what waits and what decodes."""

    queued_prefill_requests: int = 0
    queued_prefill_tokens: int = 0
    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    decode_requests: int = 0
    decode_kv_tokens: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                raise InvalidField(name, f"must be a whole number in [0, 2^32), not {value!r}", why="fpm_count")


def pass_times_s(model: PassModel, **columns: np.ndarray) -> F64:
    """Seconds of passes given as (passes, ranks) columns; NaN where the model knows too little."""
    shape = columns["prefill_tokens"].shape
    flat = {name: np.broadcast_to(columns.get(name, np.zeros(1)), shape).astype(np.float64).ravel() for name in COLUMNS}
    owner = np.repeat(np.arange(shape[0]), shape[1])
    return np.maximum(model.estimate_work(RankWork(**flat), owner, shape[0]), 0) / 1000
