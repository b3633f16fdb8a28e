"""Planner questions, as calls for either client: ``client.ask(planner.capacity(engine, isl=3000, osl=150))``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from perfcast.v1 import common_pb2, planner_pb2

from perfcast_client.calls import Call, both, engine_call, fill
from perfcast_client.errors import refused
from perfcast_client.planner_types import (
    Bootstrap,
    BootstrapPoint,
    Capacity,
    Duration,
    Estimates,
    Iteration,
    LatencyLaw,
    Limits,
    RankLoad,
    RankPass,
    TickAnswer,
    TickGroup,
    WorkerLoad,
)
from perfcast_client.reading import given
from perfcast_client.record import EngineLike

PLANNER = "/perfcast.v1.Planner/"
ROLES = {
    "": common_pb2.ROLE_UNSPECIFIED,
    "aggregated": common_pb2.ROLE_BOTH,
    "prefill": common_pb2.ROLE_PREFILL,
    "decode": common_pb2.ROLE_DECODE,
}
OBJECTIVES = {
    "throughput": planner_pb2.CAPACITY_OBJECTIVE_THROUGHPUT,
    "latency": planner_pb2.CAPACITY_OBJECTIVE_LATENCY,
}
INFEASIBLE = {
    "closest": planner_pb2.ON_INFEASIBLE_CLOSEST,
    "max_rps": planner_pb2.ON_INFEASIBLE_MAX_RPS,
    "none": planner_pb2.ON_INFEASIBLE_NONE,
}
DEFAULT_LIMITS = Limits()


def estimate_passes(engine: EngineLike | None, iterations: Iterable[Iteration], state: str = "") -> Call[Estimates]:
    """Time of iterations whose work is counted as telemetry does."""

    def read(m: planner_pb2.EstimatePassesResponse) -> Estimates:
        ms = np.fromiter(m.latency_ms, np.float64, len(m.latency_ms))
        ms[list(m.not_ready)] = np.nan
        return Estimates.read(m, latency_ms=ms)

    request = planner_pb2.EstimatePassesRequest(state_name=state, iterations=map(iteration_message, iterations))
    return engine_call(PLANNER + "EstimatePasses", request, planner_pb2.EstimatePassesResponse, read, engine)


def queue_drain(
    engine: EngineLike | None,
    ranks: Iterable[RankLoad],
    *,
    role: str = "",
    limits: Limits = DEFAULT_LIMITS,
    state: str = "",
) -> Call[Duration]:
    """Seconds until all prompts that wait in an engine are prefilled."""
    request = planner_pb2.QueueDrainRequest(state_name=state, ranks=map(load_message, ranks), **_common(role, limits))

    def read(m: planner_pb2.QueueDrainResponse) -> Duration:
        return Duration.read(m, seconds=given(m, "drain_s"))

    return engine_call(PLANNER + "QueueDrain", request, planner_pb2.QueueDrainResponse, read, engine)


def decode_itl(
    engine: EngineLike | None,
    ranks: Iterable[RankLoad],
    *,
    role: str = "",
    limits: Limits = DEFAULT_LIMITS,
    usual_prefill: tuple[float, float] = (0.0, 0.0),
    state: str = "",
) -> Call[Duration]:
    """Seconds of the next decode iteration. usual_prefill: (tokens, requests) that an average iteration prefills."""
    request = planner_pb2.DecodeItlRequest(state_name=state, ranks=map(load_message, ranks), **_common(role, limits))
    fill(request, usual_prefill_tokens_per_rank=usual_prefill[0], usual_prefill_requests_per_rank=usual_prefill[1])

    def read(m: planner_pb2.DecodeItlResponse) -> Duration:
        return Duration.read(m, seconds=given(m, "itl_s"))

    return engine_call(PLANNER + "DecodeItl", request, planner_pb2.DecodeItlResponse, read, engine)


def capacity(
    engine: EngineLike | None,
    *,
    isl: int,
    osl: int,
    ttft_s: float | None = None,
    itl_s: float | None = None,
    e2e_s: float | None = None,
    accept_length: float = 1.0,
    kv_hit_rate: float = 0.0,
    objective: str = "throughput",
    on_infeasible: str = "closest",
    role: str = "",
    limits: Limits = DEFAULT_LIMITS,
    state: str = "",
    candidates: bool = False,
    legacy_rank_split: bool = False,
    legacy_single_request: bool = False,
) -> Call[Capacity | None]:
    """The request rate that one engine sustains; None where nothing is asked of its role or nothing fits. A target on
    what the role does not produce, such as TTFT of a decode engine, is never met."""
    request = planner_pb2.CapacityRequest(
        state_name=state,
        objective=_word("objective", OBJECTIVES, objective),
        on_infeasible=_word("on_infeasible", INFEASIBLE, on_infeasible),
        legacy_rank_split=legacy_rank_split,
        legacy_single_request=legacy_single_request,
        include_candidates=candidates,
        **_common(role, limits),
    )
    targets = {"ttft_target_s": ttft_s, "itl_target_s": itl_s, "e2e_target_s": e2e_s}
    fill(request, isl_tokens=isl, osl_tokens=osl, accept_length_tokens=accept_length, kv_hit_rate=kv_hit_rate)
    fill(request, **{name: value for name, value in targets.items() if value is not None})
    return engine_call(PLANNER + "Capacity", request, planner_pb2.CapacityResponse, _read_capacity, engine)


def _read_capacity(m: planner_pb2.CapacityResponse) -> Capacity | None:
    if not m.HasField("capacity"):
        return None
    columns = {item.name: np.array(values, np.float64) for item, values in m.candidates.ListFields()}
    return Capacity.read(m.capacity, m, candidates=columns)


def evaluate_tick(groups: Iterable[TickGroup]) -> Call[tuple[TickAnswer, ...]]:
    """Queue drain and decode ITL of many live engines. Handles are sent as they are: resolve again if unknown."""
    request = planner_pb2.EvaluateTickRequest(groups=map(_group_message, groups))

    def read(m: planner_pb2.EvaluateTickResponse) -> tuple[TickAnswer, ...]:
        return tuple(map(TickAnswer.of, m.groups))

    return Call(PLANNER + "EvaluateTick", request, planner_pb2.EvaluateTickResponse, read)


def _group_message(group: TickGroup) -> planner_pb2.TickGroup:
    message = planner_pb2.TickGroup(
        state_name=group.state,
        workers=map(_worker_message, group.workers),
        scenarios=(fill(planner_pb2.Scenario(), **asdict(scenario)) for scenario in group.scenarios),
        **_common(group.role, group.limits),
    )
    if group.engine is not None:
        _, inline = both(message, group.engine)
        message = inline if inline is not None else message
    return message


def _worker_message(worker: WorkerLoad) -> planner_pb2.WorkerLoad:
    return fill(
        planner_pb2.WorkerLoad(worker_id=worker.worker_id, ranks=map(load_message, worker.ranks)),
        usual_prefill_tokens_per_rank=worker.usual_prefill_tokens,
        usual_prefill_requests_per_rank=worker.usual_prefill_requests,
    )


def bootstrap(
    engine: EngineLike,
    *,
    isl: int = 3000,
    osl: int = 150,
    max_context_tokens: int = 16384,
    prefill_granularity: int = 16,
    decode_granularity: int = 6,
    max_kv_tokens_per_rank: int = 0,
    max_concurrency: int = 0,
) -> Call[Bootstrap]:
    """Iterations of an engine with their times, for a planner that has not observed any yet."""
    request = fill(
        planner_pb2.BootstrapRequest(),
        isl_tokens=isl,
        osl_tokens=osl,
        max_context_tokens=max_context_tokens,
        prefill_granularity=prefill_granularity,
        decode_granularity=decode_granularity,
        max_kv_tokens_per_rank=max_kv_tokens_per_rank,
        max_concurrency_total=max_concurrency,
    )

    def read(parts: Sequence[planner_pb2.BootstrapResponse]) -> Bootstrap:
        header = parts[0].header
        points = tuple(BootstrapPoint.of(point) for part in parts[1:] for point in part.points.points)
        return Bootstrap.read(header, points=points)

    return engine_call(PLANNER + "Bootstrap", request, planner_pb2.BootstrapResponse, read, engine, stream=True)


def fit_latency_law(engine: EngineLike, **box: int) -> Call[LatencyLaw]:
    """Straight lines through an engine's latencies. ``box``: fields of the contract's LawBox."""
    request = planner_pb2.FitLatencyLawRequest()
    request.box.SetInParent()
    fill(request.box, **box)

    return engine_call(PLANNER + "FitLatencyLaw", request, planner_pb2.FitLatencyLawResponse, LatencyLaw.of, engine)


def _common(role: str, limits: Limits) -> dict[str, Any]:
    for item in fields(limits):
        value = getattr(limits, item.name)
        if value <= 0 and item.name != "attention_dp":
            raise refused(f"limits.{item.name}", value, "is not positive")
    message = fill(
        planner_pb2.SchedulerLimits(),
        max_num_batched_tokens_per_rank=limits.max_num_batched_tokens,
        max_num_seqs_total=limits.max_num_seqs,
        max_kv_tokens_total=limits.max_kv_tokens,
        attention_dp=limits.attention_dp,
    )
    return {"role": _word("role", ROLES, role), "limits": message}


def iteration_message(iteration: Iteration) -> planner_pb2.Iteration:
    return planner_pb2.Iteration(ranks=(_filled_pass(rank) for rank in iteration))


def _filled_pass(rank: RankPass) -> planner_pb2.RankPass:
    try:
        return planner_pb2.RankPass(
            dp_rank=rank.dp_rank,
            prefill_requests=rank.prefill_requests,
            prefill_tokens=rank.prefill_tokens,
            prefill_kv_tokens=rank.prefill_kv_tokens,
            decode_requests=rank.decode_requests,
            decode_kv_tokens=rank.decode_kv_tokens,
            wall_time_s=rank.wall_time_s,
        )
    except (TypeError, ValueError):
        return fill(planner_pb2.RankPass(), **asdict(rank))


def load_message(rank: RankLoad) -> planner_pb2.RankLoad:
    try:
        return planner_pb2.RankLoad(
            dp_rank=rank.dp_rank,
            queued_prefill_requests=rank.queued_prefill_requests,
            queued_prefill_tokens=rank.queued_prefill_tokens,
            queued_decode_requests=rank.queued_decode_requests,
            queued_decode_kv_tokens=rank.queued_decode_kv_tokens,
            prefill_requests=rank.prefill_requests,
            prefill_tokens=rank.prefill_tokens,
            prefill_kv_tokens=rank.prefill_kv_tokens,
            decode_requests=rank.decode_requests,
            decode_kv_tokens=rank.decode_kv_tokens,
        )
    except (TypeError, ValueError):
        return fill(planner_pb2.RankLoad(), **asdict(rank))


def _word(field_name: str, words: Mapping[str, Any], word: Any) -> Any:
    if word not in words:
        raise refused(field_name, word, f"is not one of {', '.join(filter(None, words))}")
    return words[word]
