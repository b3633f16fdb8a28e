"""Forward-pass metrics: what each attention-DP rank ran in each iteration (spec/07 section 4.1, spec/04 11.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from perfcast_engine.answer import F64, Mask
from perfcast_engine.errors import InvalidField

from perfcast_planning.planner.observed import RankWork

MAX_COUNT = 2**32 - 1


class Kind(Enum):
    """What an iteration does; its value names the counts by which it is learned."""

    PREFILL = ("prefill_tokens",)
    DECODE = ("decode_requests", "decode_kv_tokens")
    MIXED = ("prefill_tokens", "decode_kv_tokens")


KINDS = tuple(Kind)


class RankRecord(NamedTuple):
    """One rank of one iteration. ``wall_time_s`` is the measured duration, 0 where unmeasured; ``dp_rank`` decides
    nothing but the order of ranks."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    prefill_kv_tokens: int = 0
    decode_requests: int = 0
    decode_kv_tokens: int = 0
    wall_time_s: float = 0.0
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class Iterations:
    """``count`` iterations: the ranks of all of them as columns (M,), and ``owner`` (M,), the iteration of each."""

    work: RankWork
    owner: np.ndarray
    count: int
    wall_time_s: F64 | float = 0.0

    @classmethod
    def of(cls, iterations: Sequence[Sequence[RankRecord]]) -> Iterations:
        """From the ranks of each iteration, in any order. InvalidField names what no rank could have run."""
        rows = [record for ranks in iterations for record in ranks]
        owner = np.repeat(np.arange(len(iterations)), [len(ranks) for ranks in iterations])
        table = np.array(rows, np.float64).reshape(-1, len(RankRecord._fields)).T
        *counts, wall_time_s, dp_rank = table
        order = np.lexsort((wall_time_s, *reversed(counts), dp_rank, owner))
        work = RankWork(*(column[order] for column in counts))
        for name in RankWork.__slots__:
            column = getattr(work, name)
            whole = (column >= 0) & (column <= MAX_COUNT) & (column == np.floor(column))
            _require(whole, owner, name, "must be a whole number in [0, 2^32)", "fpm_count")
        prompts, decodes = work.prefill_requests > 0, work.decode_requests > 0
        computed = work.prefill_tokens + work.prefill_kv_tokens
        _require(prompts | (computed == 0), owner, "prefill_requests", "is 0 beside prefill tokens", "fpm_inconsistent")
        cached = work.decode_kv_tokens
        _require(decodes | (cached == 0), owner, "decode_requests", "is 0 beside decode KV tokens", "fpm_inconsistent")
        return cls(work, owner, len(iterations), wall_time_s[order])

    def heaviest(self) -> tuple[np.ndarray, F64]:
        """Of each iteration, the kind (index into KINDS, -1 idle) and the counts (N, 2) by which it is learned of the
        rank at which they sum up to the most, the later one on equality. A fully cached prefill counts as idle."""
        work, last = self.work, np.full(self.count, -1)
        prefills, decodes = work.prefill_tokens > 0, work.decode_requests > 0
        codes = [KINDS.index(kind) for kind in (Kind.MIXED, Kind.PREFILL, Kind.DECODE)]
        kind = np.select([prefills & decodes, prefills, decodes], codes, -1)
        features = np.zeros((len(work), 2))
        for code, each in enumerate(KINDS):
            mine = kind == code
            for axis, name in enumerate(each.value):
                features[mine, axis] = getattr(work, name)[mine]
        weight = np.where(kind < 0, -1.0, features.sum(axis=1))
        order = np.lexsort((np.arange(len(work)), weight, self.owner))
        last[self.owner[order]] = order  # what is written last stays
        idle = last < 0
        return np.where(idle, -1, kind[last]), np.where(idle[:, None], 0.0, features[last])

    def measured_ms(self) -> F64:
        """The measured duration of each iteration (N,), that of its slowest rank; 0 where none was measured."""
        slowest, told = np.zeros(self.count), np.broadcast_to(self.wall_time_s, len(self.owner))
        np.maximum.at(slowest, self.owner, np.where(np.isfinite(told), told, 0.0))
        return slowest * 1000


def _require(holds: Mask, owner: np.ndarray, name: str, message: str, why: str) -> None:
    if not holds.all():
        iteration: Any = owner[np.argmin(holds)]
        raise InvalidField(f"iterations[{iteration}].ranks.{name}", message, why=why)
