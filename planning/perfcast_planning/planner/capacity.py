"""The request rate that one engine sustains under latency targets (spec/07 section 5.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import InvalidField, check_whole

from perfcast_planning.planner.engine_work import EngineLimits, EngineRole, Passes, price_passes
from perfcast_planning.planner.pass_model import PassModel
from perfcast_planning.planner.telemetry import MAX_COUNT

MAX_CANDIDATES = 128
MAX_KV_HIT_RATE = 0.95
FEW_RANKS = 5


def kv_hit_share(rate: float | None) -> float:
    """The share of prompts that is taken to be in the cache."""
    return min(max(rate, 0.0), MAX_KV_HIT_RATE) if rate is not None and math.isfinite(rate) else 0.0


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
        check_whole(self, ("isl", "osl"), 0, MAX_COUNT)
        for name, target in self.targets().items():
            if not (math.isfinite(target) and target >= 0):
                raise InvalidField(name, f"must be finite and >= 0, not {target!r}", why="range")
        if self.accepted > MAX_COUNT:
            raise InvalidField("accept_length", f"must be less than 2^32, not {self.accepted!r}", why="range")

    def targets(self) -> dict[str, float]:
        pairs = {"ttft_s": self.ttft_s, "itl_s": self.itl_s, "e2e_s": self.e2e_s}
        return {name: value for name, value in pairs.items() if value is not None}

    @property
    def accepted(self) -> float:
        return self.accept_length if math.isfinite(self.accept_length) and self.accept_length > 1 else 1.0

    @property
    def fresh_tokens(self) -> int:
        """Prompt tokens to compute a request, after cache hits."""
        return max(1, math.ceil(self.isl * (1 - kv_hit_share(self.kv_hit_rate))))

    @property
    def context_tokens(self) -> int:
        """Mean KV length of a decoding request."""
        return max(1, min(MAX_COUNT, self.isl + self.osl // 2))


Scan = dict[str, F64]  # batch, rps and the times that the role produces, one value a candidate


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one engine sustains at one batch. Values that the role does not produce are None. ``held_back``: that
    corrections would have moved it too far for the few observations behind them. ``candidates``: all that was scanned.
    """

    batch_total: int
    rps: float
    ttft_s: float | None
    itl_s: float | None
    e2e_s: float | None
    eligible: bool
    violated: tuple[str, ...]
    candidates: Scan = field(default_factory=dict, compare=False, repr=False)
    held_back: bool = False


def capacity(model: PassModel, role: EngineRole, limits: EngineLimits, request: CapacityRequest) -> Capacity | None:
    """The best batch for a request shape under its targets, by a full scan: curves are not monotone (spec/07 5.3).

    None where the shape asks nothing of this role, nothing fits, or the model is not ready. Corrections that rest on
    few observations may not move the rate by more than the model's cold-start factor, nor take it away.
    """
    if request.isl == 0 or (role.decodes and request.osl == 0):
        return None
    batch = _candidates(_largest_batch(role, limits, request))
    if not len(batch):
        return None

    def best(model: PassModel) -> Capacity | None:
        scan = _scan(model, role, limits, request, batch)
        return None if scan is None else _select(request, scan)

    found, bound = best(model), model.options.cold_start_factor if model.is_cold else None
    if bound is not None:
        base = best(model.warm())
        if base is not None and not (found is not None and base.rps / bound <= found.rps <= base.rps * bound):
            return replace(base, held_back=True)
    return found


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


def _scan(
    model: PassModel, role: EngineRole, limits: EngineLimits, request: CapacityRequest, batch: F64
) -> Scan | None:
    """What the role produces at each batch that is a candidate; None where the model knows too little for some."""
    fresh, zero = request.fresh_tokens, np.zeros_like(batch)
    asked: dict[str, Passes] = {}
    if role is EngineRole.PREFILL:
        asked["ttft_s"] = _chunked(limits, request, np.minimum(batch * fresh, MAX_COUNT), zero, batch)
    elif role is EngineRole.DECODE:
        asked["itl_s"] = Passes.of_each(**_split(limits, request, zero, zero, batch))
    else:
        share = np.ceil(batch * request.accepted * fresh / request.osl)
        room = limits.max_num_batched_tokens - batch
        batch, share = (column[(room > 0) & (share <= room)] for column in (batch, share))
        asked["itl_s"] = Passes.of_each(**_split(limits, request, share, np.ceil(share / fresh), batch))
        waiting = np.minimum(share + fresh, MAX_COUNT)
        asked["ttft_s"] = _chunked(limits, request, waiting, batch, np.ceil(waiting / fresh))
    seconds = _seconds(model, request, list(asked.values()))
    if seconds is None:
        return None
    scan = {"batch": batch} | dict(zip(asked, seconds, strict=True))
    if role.decodes:
        scan["itl_s"] = scan["itl_s"] / request.accepted
    busy = scan["itl_s" if role.decodes else "ttft_s"] > 0
    scan = {name: column[busy] for name, column in scan.items()}
    if role.decodes:
        scan["rps"] = scan["batch"] / (request.osl * scan["itl_s"])
    else:
        scan["rps"] = scan["batch"] / scan["ttft_s"]
    if role.prefills:
        scan["e2e_s"] = scan["ttft_s"] + (scan["itl_s"] * (request.osl - 1) if role.decodes else 0)
    return scan


def _seconds(model: PassModel, request: CapacityRequest, questions: list[Passes]) -> list[F64] | None:
    """Seconds of each candidate in each question; None where the model knows too little for some.

    None as well where a rank got KV tokens without a request, which the reference's engine refuses.
    """
    if request.legacy_rank_split and any(
        ((asked.work.decode_kv_tokens > 0) & (asked.work.decode_requests == 0)).any() for asked in questions
    ):
        return None
    times = [priced.raise_first() / 1000 for priced in price_passes(model, questions)]
    return None if any(np.isnan(seconds).any() for seconds in times) else times


def _chunked(limits: EngineLimits, request: CapacityRequest, tokens: F64, decodes: F64, prompts: F64) -> Passes:
    """The prefill of ``tokens`` in passes of at most the token limit, each beside ``decodes`` decoding requests."""
    limit = float(limits.max_num_batched_tokens)
    full, tail = np.divmod(tokens, limit)
    whole, last = np.flatnonzero(full), np.flatnonzero(tail)
    owner = np.concatenate([whole, last])
    size = np.concatenate([np.full(len(whole), limit), tail[last]])
    repeats = np.concatenate([full[whole], np.ones(len(last))])
    started = np.minimum(np.ceil(size / request.fresh_tokens), prompts[owner])
    return Passes.of(owner, repeats, len(tokens), **_split(limits, request, size, started, decodes[owner]))


def _split(limits: EngineLimits, request: CapacityRequest, tokens: F64, prompts: F64, decodes: F64) -> dict[str, F64]:
    """Passes whose totals are spread over the ranks, columns (P, R): the quotient everywhere, one more for the first.

    Of many ranks only those are laid out at which the share of some total steps down; the others repeat them.
    """
    ranks, length = limits.attention_dp, request.context_tokens
    kv = np.minimum(decodes * length, MAX_COUNT)
    at: F64 = np.arange(float(ranks))
    if ranks > FEW_RANKS:
        at = np.sort(np.stack([np.zeros_like(tokens), *(total % ranks for total in (tokens, prompts, decodes, kv))], 1))

    def share(total: F64) -> F64:
        return total[:, None] if ranks == 1 else np.ceil((total[:, None] - at) / ranks)

    own_tokens, own_decodes = share(tokens), share(decodes)
    own_prompts = 1.0 if request.legacy_single_request else np.maximum(share(prompts), 1)
    return {
        "prefill_tokens": own_tokens,
        "prefill_requests": np.where(own_tokens > 0, own_prompts, 0),
        "decode_requests": own_decodes,
        "decode_kv_tokens": share(kv) if request.legacy_rank_split else np.minimum(own_decodes * length, MAX_COUNT),
    }


def _select(request: CapacityRequest, scan: Scan) -> Capacity | None:
    """The best candidate: eligible before ineligible, then by objective, the first on equality."""
    if not len(scan["batch"]):
        return None
    every = np.ones(len(scan["batch"]), np.bool_)
    missed = {name: scan[name] > target if name in scan else every for name, target in request.targets().items()}
    eligible = ~np.logical_or.reduce([~every, *missed.values()])
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
    violated = tuple(name for name, mask in missed.items() if mask[chosen])

    def value(name: str) -> float | None:
        return float(scan[name][chosen]) if name in scan else None

    return Capacity(
        int(scan["batch"][chosen]),
        float(scan["rps"][chosen]),
        value("ttft_s"),
        value("itl_s"),
        value("e2e_s"),
        eligible=bool(eligible[chosen]),
        violated=violated,
        candidates=scan,
    )


def _excess(request: CapacityRequest, scan: Scan) -> F64:
    """The largest ratio of a value to its target, per candidate."""
    worst = np.zeros(len(scan["batch"]))
    for name, target in request.targets().items():
        if name in scan:
            with np.errstate(over="ignore"):
                ratio = scan[name] / target if target > 0 else np.where(scan[name] > 0, np.inf, 0)
            worst = np.maximum(worst, ratio)
    return worst
