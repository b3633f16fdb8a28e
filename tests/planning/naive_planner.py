"""Planner questions written out scalar by scalar from spec/07 section 5, to hold the vectorised ones against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that it also runs where they are not, beside the reference engine
    from perfcast_planning.planner.capacity import CapacityRequest
    from perfcast_planning.planner.engine_work import EngineLimits, EngineRole

U32 = 2**32 - 1
Rank = tuple[int, int, int, int]  # prefill requests, prefill tokens, decode requests, decode KV tokens
Tau = Callable[[list[Rank]], float]


def split(total: int, ranks: int) -> list[int]:
    return [total // ranks + (1 if rank < total % ranks else 0) for rank in range(ranks)]


def one_pass(tau: Tau, request: CapacityRequest, ranks: int, tokens: int, prompts: int, decodes: int) -> float:
    rows = []
    decode_split, token_split, prompt_split = split(decodes, ranks), split(tokens, ranks), split(prompts, ranks)
    kv_split = split(min(decodes * request.context_tokens, U32), ranks)
    for rank in range(ranks):
        count = (1 if request.legacy_single_request else max(prompt_split[rank], 1)) if token_split[rank] else 0
        kv = kv_split[rank] if request.legacy_rank_split else min(decode_split[rank] * request.context_tokens, U32)
        if kv and not decode_split[rank]:
            return math.nan
        rows.append((count, token_split[rank], decode_split[rank], kv))
    return tau(rows)


def chunked(tau: Tau, request: CapacityRequest, limits: EngineLimits, tokens: int, prompts: int, decodes: int) -> float:
    limit, fresh, total = limits.max_num_batched_tokens, request.fresh_tokens, 0.0
    if tokens // limit:
        count = min(math.ceil(limit / fresh), prompts)
        total += (tokens // limit) * one_pass(tau, request, limits.attention_dp, limit, count, decodes)
    if tokens % limit:
        count = min(math.ceil(tokens % limit / fresh), prompts)
        total += one_pass(tau, request, limits.attention_dp, tokens % limit, count, decodes)
    return total


def candidates(largest: int) -> list[int]:
    if largest <= 128:
        return list(range(1, largest + 1))
    return [1 + i * (largest - 1) // 127 for i in range(128)]


def values_at(tau: Tau, role: EngineRole, limits: EngineLimits, request: CapacityRequest, b: int) -> dict | None:
    """What the engine does at batch ``b``; None to skip the candidate; NaN times end the search."""
    accepted, fresh, osl, ranks = request.accepted, request.fresh_tokens, request.osl, limits.attention_dp
    if not role.decodes:
        t = chunked(tau, request, limits, min(b * fresh, U32), b, 0)
        return {"rps": b / t, "ttft_s": t, "e2e_s": t} if t else None
    if not role.prefills:
        i = one_pass(tau, request, ranks, 0, 0, b) / accepted
        return {"rps": b / (osl * i), "itl_s": i} if i else None
    q, room = math.ceil(b * accepted * fresh / osl), limits.max_num_batched_tokens - b
    if room <= 0 or q > room:
        return None
    i = one_pass(tau, request, ranks, q, math.ceil(q / fresh), b) / accepted
    if not i:
        return None
    waiting = min(q + fresh, U32)
    ttft = chunked(tau, request, limits, waiting, math.ceil(waiting / fresh), b)
    return {"rps": b / (osl * i), "ttft_s": ttft, "itl_s": i, "e2e_s": ttft + i * (osl - 1)}


def capacity(
    tau: Tau, role: EngineRole, limits: EngineLimits, request: CapacityRequest
) -> tuple[int, dict, bool] | None:
    """(batch, values, eligible) with ``on_infeasible = max_rps`` or, among eligible ones, the objective's best."""
    if request.isl == 0 or (role.decodes and request.osl == 0):
        return None
    m, s, k = limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_kv_tokens
    fresh, length = request.fresh_tokens, request.context_tokens
    if not role.decodes:
        largest = 1 if fresh > m else min(s, m // fresh)
    elif not role.prefills:
        largest = min(s, k // length)
    else:
        largest = min(s, k // length, max(1, m - 1)) if m > 1 else 0
    best: tuple[int, dict, bool] | None = None
    for b in candidates(largest):
        values = values_at(tau, role, limits, request, b)
        if values is None:
            continue
        if any(math.isnan(value) for value in values.values()):
            return None
        eligible = all(name in values and values[name] <= target for name, target in request.targets().items())
        if best is None or eligible > best[2] or (eligible == best[2] and _better(request, values, best[1])):
            best = b, values, eligible
    return best


def _better(request: CapacityRequest, values: dict, best: dict) -> bool:
    if request.objective.name == "THROUGHPUT":
        return values["rps"] > best["rps"]
    name = next(name for name in ("e2e_s", "ttft_s", "itl_s") if name in values)
    return values[name] < best[name]


def drain(tau: Tau, role: EngineRole, limits: EngineLimits, ranks: list[dict[str, int]]) -> float | None:
    if not role.prefills:
        return None
    m = limits.max_num_batched_tokens
    plans = [divmod(rank["queued_prefill_tokens"], m) for rank in ranks]
    if not any(f or t for f, t in plans):
        return 0.0
    edges = sorted({0} | {f for f, _ in plans if f} | {f + 1 for f, t in plans if t})
    total = 0.0
    for start, end in itertools.pairwise(edges):
        rows = []
        for (f, t), rank in zip(plans, ranks, strict=True):
            tokens = m if start < f else t if start == f else 0
            decodes = (rank["decode_requests"], rank["decode_kv_tokens"]) if role.decodes else (0, 0)
            rows.append((max(1, rank["queued_prefill_requests"]) if tokens else 0, tokens, *decodes))
        total += (end - start) * tau(rows)
    return total
