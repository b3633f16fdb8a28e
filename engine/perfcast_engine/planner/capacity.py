"""The request rate that one engine sustains under latency targets (spec/07 section 5.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.errors import InvalidField
from perfcast_engine.planner.engine_work import EngineLimits, EngineRole, pass_times_s
from perfcast_engine.planner.pass_model import PassModel
from perfcast_engine.planner.telemetry import MAX_COUNT

MAX_CANDIDATES = 128
MAX_KV_HIT_RATE = 0.95


class Objective(Enum):
    THROUGHPUT = 0
    LATENCY = 1


class OnInfeasible(Enum):
    """What a capacity search answers when no candidate meets the targets."""

    CLOSEST = 0  # the least maximum ratio of value to target
    MAX_RPS = 1  # the reference's habit: the highest rate, which is the largest violation
    NONE = 2


@dataclass(frozen=True, slots=True)
class CapacityRequest:
    """A request shape with optional targets in seconds. ``accept_length``: tokens per decode step; ``kv_hit_rate``:
    share of the prompt found in the cache. The ``legacy_*`` options reproduce the reference's defects (spec/07 5.3)."""

    isl: int
    osl: int
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_s: float | None = None
    accept_length: float = 1.0
    kv_hit_rate: float | None = None
    objective: Objective = Objective.THROUGHPUT
    on_infeasible: OnInfeasible = OnInfeasible.CLOSEST
    legacy_rank_split: bool = False
    legacy_single_request: bool = False

    def __post_init__(self) -> None:
        for name in ("isl", "osl"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
                raise InvalidField(name, f"must be a whole number in [0, 2^32), not {value!r}", why="range")
        for name, target in self.targets().items():
            if not (math.isfinite(target) and target >= 0):
                raise InvalidField(name, f"must be finite and >= 0, not {target!r}", why="range")

    def targets(self) -> dict[str, float]:
        pairs = {"ttft_s": self.ttft_s, "itl_s": self.itl_s, "e2e_s": self.e2e_s}
        return {name: value for name, value in pairs.items() if value is not None}

    @property
    def accepted(self) -> float:
        return self.accept_length if math.isfinite(self.accept_length) and self.accept_length > 1 else 1.0

    @property
    def fresh_tokens(self) -> int:
        """Prompt tokens to compute a request, after cache hits."""
        rate = self.kv_hit_rate if self.kv_hit_rate is not None and math.isfinite(self.kv_hit_rate) else 0.0
        return max(1, math.ceil(self.isl * (1 - min(max(rate, 0.0), MAX_KV_HIT_RATE))))

    @property
    def context_tokens(self) -> int:
        """Mean KV length of a decoding request."""
        return max(1, min(MAX_COUNT, self.isl + self.osl // 2))


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one engine sustains at one batch. Values that the role does not produce are None."""

    batch_total: int
    rps: float
    ttft_s: float | None
    itl_s: float | None
    e2e_s: float | None
    eligible: bool
    violated: tuple[str, ...]


def capacity(model: PassModel, role: EngineRole, limits: EngineLimits, request: CapacityRequest) -> Capacity | None:
    """The best batch for a request shape under its targets, by a full scan: curves are not monotone (spec/07 5.3).

    None where the shape asks nothing of this role, nothing fits, or the model is not ready.
    """
    if request.isl == 0 or (role.decodes and request.osl == 0):
        return None
    batch = _candidates(_largest_batch(role, limits, request))
    scan = {EngineRole.PREFILL: _scan_prefill, EngineRole.DECODE: _scan_decode, EngineRole.AGGREGATED: _scan_aggregated}
    if not len(batch):
        return None
    values = scan[role](model, limits, request, batch)
    if values is None:
        return None
    return _select(request, values)


def _largest_batch(role: EngineRole, limits: EngineLimits, request: CapacityRequest) -> int:
    tokens = limits.max_num_batched_tokens
    if role is EngineRole.PREFILL:
        return 1 if request.fresh_tokens > tokens else min(limits.max_num_seqs, tokens // request.fresh_tokens)
    resident = min(limits.max_num_seqs, limits.max_kv_tokens // request.context_tokens)
    if role is EngineRole.DECODE:
        return resident
    return min(resident, tokens - 1)


def _candidates(largest: int) -> F64:
    if largest <= MAX_CANDIDATES:
        return np.arange(1, largest + 1, dtype=np.float64)
    steps = np.arange(MAX_CANDIDATES)
    return (1 + steps * (largest - 1) // (MAX_CANDIDATES - 1)).astype(np.float64)


Scan = dict[str, F64]  # batch, rps and the times that the role produces, one value a candidate


def _scan_prefill(model: PassModel, limits: EngineLimits, request: CapacityRequest, batch: F64) -> Scan | None:
    tokens = np.minimum(batch * request.fresh_tokens, MAX_COUNT)
    times = _chunked(model, limits, request, tokens, np.zeros_like(batch), batch)
    if np.isnan(times).any():
        return None
    kept = times > 0
    batch, times = batch[kept], times[kept]
    return {"batch": batch, "rps": batch / times, "ttft_s": times, "e2e_s": times}


def _scan_decode(model: PassModel, limits: EngineLimits, request: CapacityRequest, batch: F64) -> Scan | None:
    zero = np.zeros_like(batch)
    times = _split_times(model, limits, request, zero, zero, batch) / request.accepted
    if np.isnan(times).any():
        return None
    kept = times > 0
    batch, times = batch[kept], times[kept]
    return {"batch": batch, "rps": batch / (request.osl * times), "itl_s": times}


def _scan_aggregated(model: PassModel, limits: EngineLimits, request: CapacityRequest, batch: F64) -> Scan | None:
    if limits.max_num_batched_tokens <= 1:
        return None
    fresh = request.fresh_tokens
    share = np.ceil(batch * request.accepted * fresh / request.osl)
    room = limits.max_num_batched_tokens - batch
    kept = (room > 0) & (share <= room)
    batch, share = batch[kept], share[kept]
    itl = _split_times(model, limits, request, share, np.ceil(share / fresh), batch) / request.accepted
    if np.isnan(itl).any():
        return None
    batch, share, itl = (values[itl > 0] for values in (batch, share, itl))
    waiting = np.minimum(share + fresh, MAX_COUNT)
    ttft = _chunked(model, limits, request, waiting, batch, np.ceil(waiting / fresh))
    if np.isnan(ttft).any():
        return None
    e2e = ttft + itl * (request.osl - 1)
    return {"batch": batch, "rps": batch / (request.osl * itl), "ttft_s": ttft, "itl_s": itl, "e2e_s": e2e}


def _chunked(
    model: PassModel,
    limits: EngineLimits,
    request: CapacityRequest,
    tokens: F64,
    decodes: F64,
    prompts: F64,
) -> F64:
    """Seconds to prefill ``tokens`` in passes of at most the token limit, each beside ``decodes`` decoding requests."""
    limit = float(limits.max_num_batched_tokens)
    full, tail = np.floor(tokens / limit), tokens % limit
    whole = np.zeros_like(tokens)
    if full.any():
        count = np.minimum(np.ceil(limit / request.fresh_tokens), prompts)
        whole = _split_times(
            model, limits, request, np.where(full > 0, limit, 0), count, np.where(full > 0, decodes, 0)
        )
    left = np.minimum(np.ceil(tail / request.fresh_tokens), prompts)
    last = _split_times(model, limits, request, tail, left, np.where(tail > 0, decodes, 0))
    return np.where(full > 0, full * whole, 0) + np.where(tail > 0, last, 0)


def _split_times(
    model: PassModel, limits: EngineLimits, request: CapacityRequest, tokens: F64, prompts: F64, decodes: F64
) -> F64:
    """Seconds of passes whose totals are spread over the ranks."""
    ranks = limits.attention_dp
    rank_tokens, rank_decodes = _spread(tokens, ranks), _spread(decodes, ranks)
    single = (rank_tokens > 0).astype(np.float64)
    rank_prompts = (
        single if request.legacy_single_request else np.where(single > 0, np.maximum(_spread(prompts, ranks), 1), 0)
    )
    length = request.context_tokens
    kv = _spread(np.minimum(decodes * length, MAX_COUNT), ranks) if request.legacy_rank_split else rank_decodes * length
    if ((kv > 0) & (rank_decodes == 0)).any():
        return np.full(len(tokens), np.nan)  # the reference's engine refuses KV without a request: no capacity
    return pass_times_s(
        model,
        prefill_tokens=rank_tokens,
        prefill_requests=rank_prompts,
        decode_requests=rank_decodes,
        decode_kv_tokens=np.minimum(kv, MAX_COUNT),
    )


def _spread(total: F64, ranks: int) -> F64:
    """(passes, ranks): the quotient everywhere and one more for the first ranks."""
    return np.floor(total / ranks)[:, None] + (np.arange(ranks) < (total % ranks)[:, None])


def _select(request: CapacityRequest, scan: Scan) -> Capacity | None:
    """The best candidate: eligible before ineligible, then by objective, the first on equality."""
    if not len(scan["batch"]):
        return None
    missed = {
        name: scan[name] > target if name in scan else np.ones(len(scan["batch"]), np.bool_)
        for name, target in request.targets().items()
    }
    eligible = ~np.any(list(missed.values()), axis=0) if missed else np.ones(len(scan["batch"]), np.bool_)
    if request.objective is Objective.THROUGHPUT:
        merit = scan["rps"]
    else:
        merit = -next(scan[name] for name in ("e2e_s", "ttft_s", "itl_s") if name in scan)
    if eligible.any():
        chosen = int(np.argmax(np.where(eligible, merit, -np.inf)))
    elif request.on_infeasible is OnInfeasible.NONE:
        return None
    elif request.on_infeasible is OnInfeasible.MAX_RPS:
        chosen = int(np.argmax(merit))
    else:
        chosen = int(np.argmin(_excess(request, scan)))
    picked = {name: float(scan[name][chosen]) if name in scan else None for name in ("ttft_s", "itl_s", "e2e_s")}
    violated = tuple(name for name, mask in missed.items() if mask[chosen])
    return Capacity(
        int(scan["batch"][chosen]),
        float(scan["rps"][chosen]),
        **picked,
        eligible=bool(eligible[chosen]),
        violated=violated,
    )


def _excess(request: CapacityRequest, scan: Scan) -> F64:
    """The largest ratio of a value to its target, per candidate."""
    worst = np.zeros(len(scan["batch"]))
    for name, target in request.targets().items():
        if name in scan:
            worst = np.maximum(worst, scan[name] / target if target > 0 else np.where(scan[name] > 0, np.inf, 0))
    return worst
