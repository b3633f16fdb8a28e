"""The sweep that seeds a planner's regressions: prefill and decode times of an engine that does not run yet
(spec/07 sections 6.1 and 8.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import InvalidField, OutOfMemory
from perfcast_engine.memory import MemoryModel
from perfcast_engine.step import StepModel

DECODE_OSL = 500  # output tokens of the swept decode runs
PREFILL_MARGIN = 512
SHORTEST = 100
LEAST_PREFILLS = 3
MAX_GRANULARITY = 1000
MAX_DECODES = 20_000  # points of decode in one sweep
MAX_PASSES = 250_000  # what all ranks run in those


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to sweep. ``isl``, ``osl``: the requests that size the KV cache where ``max_kv_tokens_per_rank`` does not;
    a granularity of 0 leaves its half out; ``max_concurrency`` caps the swept requests of the whole engine."""

    isl: int
    osl: int
    max_context_tokens: int
    prefill_granularity: int
    decode_granularity: int
    attention_dp: int = 1
    max_kv_tokens_per_rank: int | None = None
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("isl", 1, 2**31),
            ("osl", 1, 2**31),
            ("max_context_tokens", 1, 2**31),
            ("prefill_granularity", 0, MAX_GRANULARITY),
            ("decode_granularity", 0, MAX_GRANULARITY),
            ("max_kv_tokens_per_rank", 1, 2**32),
            ("max_concurrency", 1, 2**31),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < most + 1:
                raise InvalidField(name, f"must lie in [{least}, {most}]", why="range")
        if self.prefill_granularity and self.max_context_tokens - PREFILL_MARGIN <= SHORTEST:
            least = SHORTEST + PREFILL_MARGIN
            raise InvalidField("max_context_tokens", f"must exceed {least} for a prefill sweep", why="range")

    def prefill_lengths(self) -> F64:
        """Prompt lengths, ascending."""
        end, parts = self.max_context_tokens - PREFILL_MARGIN, self.prefill_granularity
        if not parts:
            return np.zeros(0)
        return np.arange(SHORTEST, end, max(1, (end - SHORTEST) // parts), dtype=np.float64)

    def decode_points(self, max_kv_tokens: int) -> tuple[F64, F64]:
        """Prompt lengths and requests of the whole engine, for each point of decode."""
        parts, end = self.decode_granularity, self.max_context_tokens - DECODE_OSL
        if not parts:
            return np.zeros(0), np.zeros(0)
        lengths, requests = [], []
        for isl in range(SHORTEST, end, max(1, end // parts)):
            most = max_kv_tokens // (isl + DECODE_OSL)
            most = most if self.max_concurrency is None else min(most, self.max_concurrency)
            if most < 1:
                break
            swept = _spread(most, parts)
            lengths.append(np.full(len(swept), float(isl)))
            requests.append(swept)
        return (np.concatenate(lengths), np.concatenate(requests)) if lengths else (np.zeros(0), np.zeros(0))


def _spread(most: int, parts: int) -> F64:
    """``parts`` whole numbers from 1 to ``most``, as evenly as they go."""
    if parts == 1:
        return np.array([float(most)])
    if most <= parts:
        return np.arange(1.0, most + 1)
    return np.unique(np.linspace(1, most, parts).round())


class Swept(NamedTuple):
    """prefill_isl, ttft_ms: (P,) one prompt on each rank. decode_context, decode_requests_per_rank, itl_ms: (D,).
    max_kv_tokens: of the whole engine; largest_batch_per_rank: None where the KV tokens were given."""

    prefill_isl: F64
    ttft_ms: F64
    decode_context: F64
    decode_requests_per_rank: F64
    itl_ms: F64
    max_kv_tokens: int
    largest_batch_per_rank: int | None


def sweep_engine(steps: StepModel, memory: MemoryModel, sweep: Sweep) -> Swept:
    """All points of a sweep. Points without data are left out; raises the first miss where too few are left, and
    OutOfMemory where not one request fits."""
    largest, per_rank = None, sweep.max_kv_tokens_per_rank
    if per_rank is None:
        largest = memory.most_resident(sweep.isl, sweep.osl)
        per_rank = largest * (sweep.isl + sweep.osl)
        if not per_rank:
            raise OutOfMemory(f"not one request of {sweep.isl} + {sweep.osl} tokens fits beside the weights")
    limit, isl = per_rank * sweep.attention_dp, sweep.prefill_lengths()
    ttft, itl = np.zeros(0), np.zeros(0)
    if len(isl):
        prefill = steps.prefill(1, isl)
        known = np.isfinite(prefill.ms)
        if known.sum() < LEAST_PREFILLS:
            prefill.raise_first()
            raise InvalidField("max_context_tokens", f"leaves fewer than {LEAST_PREFILLS} prefill points", why="range")
        isl, ttft = isl[known], prefill.ms[known]
    length, requests = sweep.decode_points(limit)
    batch = np.maximum(requests // sweep.attention_dp, 1)
    most = min(MAX_DECODES, MAX_PASSES // sweep.attention_dp)
    if len(length) > most:
        raise InvalidField("decode_granularity", f"makes {len(length)} points, more than {most}", why="range")
    if len(length):
        decode = steps.decode(batch, length, DECODE_OSL)
        known = np.isfinite(decode.ms)
        if not known.any():
            decode.raise_first()
        length, batch, itl = length[known], batch[known], decode.ms[known] / (DECODE_OSL - 1)
    return Swept(isl, ttft, length + DECODE_OSL // 2, batch, itl, limit, largest)
