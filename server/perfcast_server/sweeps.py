"""Planner questions that go over an engine as a whole: its self-benchmark, and the straight lines through its times."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from itertools import islice
from typing import Any

from google.protobuf.message import Message
from perfcast.v1 import planner_pb2
from perfcast_planning.planner.bootstrap import Sweep, Swept, sweep_engine
from perfcast_planning.planner.latency_law import LawBox, Line
from perfcast_planning.planner.latency_law import fit_latency_law as fitted

from perfcast_server import loads
from perfcast_server.engines import Engines

RANKS_PER_MESSAGE = 256  # of a bootstrap: others have their turn between messages
LAW_FIELDS = {
    "min_batch": "min_batch_per_rank",
    "max_batch": "max_batch_per_rank",
    "isl": "isl_tokens",
    "osl": "osl_tokens",
    "min_input_tokens": "min_input_tokens",
    "max_input_tokens": "max_input_tokens",
    "max_prompts": "max_prompts_per_rank",
    "max_num_batched_tokens": "max_num_batched_tokens_per_rank",
}
SWEEP_FIELDS = {
    "isl": "isl_tokens",
    "osl": "osl_tokens",
    "max_context_tokens": "max_context_tokens",
    "max_kv_tokens_per_rank": "max_kv_tokens_per_rank",
    "max_concurrency": "max_concurrency_total",
}
BOOTSTRAP_DEFAULTS = {"isl": 3000, "osl": 150, "max_context_tokens": 16384}


async def bootstrap(engines: Engines, request: planner_pb2.BootstrapRequest) -> AsyncGenerator[Message]:
    ready = await engines.of(request)
    sweep = _sweep(request, ready.engine.config.parallel.attn_dp)
    swept = await engines.off_loop(lambda: sweep_engine(ready.engine.steps, ready.engine.memory, sweep))
    yield planner_pb2.BootstrapResponse(
        header=planner_pb2.BootstrapHeader(
            engine=ready.stamp,
            attention_dp=sweep.attention_dp,
            gpus_total=ready.engine.config.parallel.gpus,
            max_kv_tokens_total=swept.max_kv_tokens,
            largest_batch_per_rank=swept.largest_batch_per_rank,
            prefill_points=len(swept.ttft_ms),
            decode_points=len(swept.itl_ms),
        )
    )
    points = _points(swept, sweep.attention_dp)
    while part := list(islice(points, max(1, RANKS_PER_MESSAGE // sweep.attention_dp))):
        yield planner_pb2.BootstrapResponse(points=planner_pb2.BootstrapPoints(points=part))


async def fit_latency_law(engines: Engines, request: planner_pb2.FitLatencyLawRequest) -> Message:
    ready = await engines.of(request)
    given = {name: getattr(request.box, field) for name, field in LAW_FIELDS.items()}
    with loads.named("box", LAW_FIELDS):
        box = LawBox(**{name: value for name, value in given.items() if value})
    law = await engines.off_loop(lambda: fitted(ready.engine.steps, box))
    return planner_pb2.FitLatencyLawResponse(
        engine=ready.stamp,
        box=planner_pb2.LawBox(**{field: getattr(box, name) for name, field in LAW_FIELDS.items()}),
        alpha_ms=law.itl.intercept_ms,
        beta_ms_per_request=law.itl.slope_ms,
        gamma_ms=law.ttft.intercept_ms,
        delta_ms_per_token=law.ttft.slope_ms,
        itl_fit=_quality(law.itl),
        ttft_fit=_quality(law.ttft),
    )


def _sweep(request: planner_pb2.BootstrapRequest, attention_dp: int) -> Sweep:
    given = {name: getattr(request, field) for name, field in SWEEP_FIELDS.items()}
    with loads.named("", SWEEP_FIELDS):
        return Sweep(
            prefill_granularity=request.prefill_granularity,
            decode_granularity=request.decode_granularity,
            attention_dp=attention_dp,
            **(BOOTSTRAP_DEFAULTS | {name: value for name, value in given.items() if value}),
        )


def _points(swept: Swept, ranks: int) -> Iterator[planner_pb2.BootstrapPoint]:
    for isl, ms in zip(swept.prefill_isl.tolist(), swept.ttft_ms.tolist(), strict=True):
        work: dict[str, Any] = {"prefill_requests": 1, "prefill_tokens": int(isl), "wall_time_s": ms / 1000}
        yield _point(planner_pb2.POINT_TYPE_PREFILL, ranks, work)
    columns = (swept.decode_context, swept.decode_requests_per_rank, swept.itl_ms)
    for context, batch, ms in zip(*(column.tolist() for column in columns), strict=True):
        work = {"decode_requests": int(batch), "decode_kv_tokens": int(context * batch), "wall_time_s": ms / 1000}
        yield _point(planner_pb2.POINT_TYPE_DECODE, ranks, work)


def _point(kind: Any, ranks: int, work: dict[str, Any]) -> planner_pb2.BootstrapPoint:
    passes = [planner_pb2.RankPass(dp_rank=rank, **work) for rank in range(ranks)]
    return planner_pb2.BootstrapPoint(type=kind, ranks=passes)


def _quality(line: Line) -> planner_pb2.FitQuality:
    return planner_pb2.FitQuality(
        r_squared=line.r_squared,
        worst_error_ms=line.worst_error_ms,
        worst_relative_error=line.worst_relative_error,
        samples=line.samples,
    )
