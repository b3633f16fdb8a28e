"""Questions about the work that an engine has now: queue drain and the next decode iteration (spec/07 section 5).

Every question prices all its hypothetical passes in one vectorised call. Times are seconds; None means that the model
knows too little to answer now.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from perfcast_engine.errors import InvalidField
from perfcast_engine.planner.engine_work import EngineLimits, EngineRole, RankQueue, pass_times_s
from perfcast_engine.planner.pass_model import PassModel


def queue_drain_s(model: PassModel, role: EngineRole, limits: EngineLimits, ranks: Sequence[RankQueue]) -> float | None:
    """Seconds until all queued prompts are prefilled (spec/07 5.1); None for a decode engine or an unready model."""
    _check_ranks(limits, ranks)
    if not role.prefills:
        return None
    chunk = limits.max_num_batched_tokens
    full = np.array([rank.queued_prefill_tokens // chunk for rank in ranks])
    tail = np.array([rank.queued_prefill_tokens % chunk for rank in ranks])
    edges = np.unique(np.concatenate([[0], full, (full + 1)[tail > 0]]))
    if len(edges) == 1:
        return 0.0
    start, duration = edges[:-1, None], np.diff(edges)
    tokens = np.where(start < full, chunk, np.where(start == full, tail, 0))
    requests = np.array([max(1, rank.queued_prefill_requests) for rank in ranks])
    decoding = float(role.decodes)
    times = pass_times_s(
        model,
        prefill_tokens=tokens,
        prefill_requests=np.where(tokens > 0, requests, 0),
        decode_requests=decoding * np.array([rank.decode_requests for rank in ranks]),
        decode_kv_tokens=decoding * np.array([rank.decode_kv_tokens for rank in ranks]),
    )
    return None if np.isnan(times).any() else _duration((times * duration).sum())


def decode_itl_s(
    model: PassModel,
    role: EngineRole,
    limits: EngineLimits,
    ranks: Sequence[RankQueue],
    usual_prefill: tuple[float, float] = (0.0, 0.0),
) -> float | None:
    """Seconds of the next decode iteration (spec/07 5.2). ``usual_prefill``: (tokens, requests) of an average
    iteration, which an aggregated engine is assumed to run beside the decodes where it has none scheduled."""
    _check_ranks(limits, ranks)
    if not role.decodes:
        return None
    tokens = np.zeros(len(ranks))
    requests, cached = np.zeros(len(ranks)), np.zeros(len(ranks))
    if role.prefills:
        usual_tokens = math.ceil(usual_prefill[0])
        usual_requests = max(math.ceil(usual_prefill[1]), 1 if usual_tokens else 0)
        for i, rank in enumerate(ranks):
            scheduled = rank.prefill_requests or rank.prefill_tokens
            tokens[i] = rank.prefill_tokens if scheduled else usual_tokens
            requests[i] = rank.prefill_requests if scheduled else (usual_requests if usual_tokens else 0)
            cached[i] = rank.prefill_kv_tokens if scheduled else 0
    times = pass_times_s(
        model,
        prefill_tokens=tokens[None],
        prefill_requests=requests[None],
        prefill_kv_tokens=cached[None],
        decode_requests=np.array([[rank.decode_requests for rank in ranks]]),
        decode_kv_tokens=np.array([[rank.decode_kv_tokens for rank in ranks]]),
    )
    return None if np.isnan(times[0]) else _duration(times[0])


def _check_ranks(limits: EngineLimits, ranks: Sequence[RankQueue]) -> None:
    if len(ranks) != limits.attention_dp:
        raise InvalidField("ranks", f"needs {limits.attention_dp} attention-DP ranks, got {len(ranks)}", why="ranks")


def _duration(seconds: float) -> float:
    if not math.isfinite(seconds) or seconds >= 2.0**64:
        raise InvalidField("ranks", "ask for a duration beyond any clock", why="duration")
    return float(seconds)
