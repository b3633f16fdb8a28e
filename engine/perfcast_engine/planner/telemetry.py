"""Forward-pass metrics: what each attention-DP rank ran in one iteration (spec/07 section 4.1, spec/04 11.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np

from perfcast_engine.errors import InvalidField
from perfcast_engine.step import RankWork

VERSION = 1
MAX_COUNT = 2**32 - 1
COUNTS = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
)


class Kind(Enum):
    """What an iteration does; its value names the features by which it is learned."""

    PREFILL = ("sum_prefill_tokens",)
    DECODE = ("num_decode_requests", "sum_decode_kv_tokens")
    MIXED = ("sum_prefill_tokens", "sum_decode_kv_tokens")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank of one iteration. ``wall_time_s`` is the measured duration, 0 where unmeasured; ``dp_rank`` decides
    nothing but the order of ranks (see ``in_rank_order``)."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    wall_time_s: float = 0.0
    dp_rank: int = 0

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                raise InvalidField(name, f"must be a whole number in [0, 2^32), not {value!r}", why="fpm_count")
        if (self.sum_prefill_tokens or self.sum_prefill_kv_tokens) and not self.num_prefill_requests:
            raise InvalidField("num_prefill_requests", "is 0 beside prefill tokens", why="fpm_inconsistent")
        if self.sum_decode_kv_tokens and not self.num_decode_requests:
            raise InvalidField("num_decode_requests", "is 0 beside decode KV tokens", why="fpm_inconsistent")

    @property
    def kind(self) -> Kind | None:
        """None for an idle rank; a fully cached prefill computes nothing and counts as idle."""
        prefills = self.sum_prefill_tokens > 0
        if self.num_decode_requests > 0:
            return Kind.MIXED if prefills else Kind.DECODE
        return Kind.PREFILL if prefills else None

    @classmethod
    def from_mapping(cls, record: Mapping[str, Any]) -> RankRecord:
        """From the JSON form; unknown members are ignored as the telemetry plane demands."""
        if not isinstance(record, Mapping):
            raise InvalidField("metrics", "must be an object", why="fpm_shape")
        if record.get("version", VERSION) != VERSION:
            raise InvalidField("version", f"must be {VERSION}, not {record['version']!r}", why="fpm_version")
        scheduled = record.get("scheduled_requests") or {}
        if not isinstance(scheduled, Mapping):
            raise InvalidField("scheduled_requests", "must be an object", why="fpm_shape")
        wall = record.get("wall_time", 0.0)
        if isinstance(wall, bool) or not isinstance(wall, int | float):
            raise InvalidField("wall_time", "must be a number of seconds", why="fpm_shape")
        return cls(**{name: scheduled.get(name, 0) for name in COUNTS}, wall_time_s=float(wall))


Iteration = Sequence[RankRecord]


def iteration_of(records: Sequence[Mapping[str, Any]]) -> Iteration:
    """The ranks of one iteration from their JSON form; InvalidField when there is none."""
    if not records:
        raise InvalidField("metrics", "needs at least one rank", why="fpm_empty")
    return [RankRecord.from_mapping(record) for record in records]


def in_rank_order(records: Iterable[RankRecord]) -> Iteration:
    """The ranks of one iteration in the order of their number, so that the order in which they arrived changes nothing
    where ranks are equally heavy."""
    return sorted(records, key=attrgetter("dp_rank", *COUNTS, "wall_time_s"))


def heaviest(iteration: Iteration) -> tuple[Kind, tuple[float, ...]] | None:
    """Kind and features of the rank with the largest feature sum (the last on equality); None when all are idle."""
    best: tuple[Kind, tuple[float, ...]] | None = None
    for rank in iteration:
        kind = rank.kind
        if kind is None:
            continue
        features = tuple(float(getattr(rank, name)) for name in kind.value)
        if best is None or sum(features) >= sum(best[1]):
            best = kind, features
    return best


def observed_ms(iteration: Iteration) -> float | None:
    """The measured duration: the longest finite positive wall time of the ranks; None when none was measured."""
    times = [rank.wall_time_s for rank in iteration if math.isfinite(rank.wall_time_s) and rank.wall_time_s > 0]
    return max(times) * 1000 if times else None


def rank_work(iterations: Sequence[Iteration]) -> tuple[RankWork, np.ndarray]:
    """All ranks of all iterations as columns, and the iteration index of each rank."""
    rows = [[getattr(rank, name) for name in COUNTS] for iteration in iterations for rank in iteration]
    columns = np.asarray(rows, np.float64).reshape(-1, len(COUNTS)).T
    owner = np.repeat(np.arange(len(iterations)), [len(iteration) for iteration in iterations])
    return RankWork(*columns), owner
