"""In-flight batching: prefill chunks and decode share the iterations of one engine (spec/06 section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from perfcast_engine.answer import F64
from perfcast_engine.backends import Backend
from perfcast_engine.errors import InvalidField
from perfcast_engine.memory import Footprint
from perfcast_engine.profiles import (
    DECODE_SATURATES,
    FIRST_TOKEN_FREE,
    LONE_REQUEST_QUEUES,
    MEASURED_DIPS,
    SCHEDULE_COUNTS_PREFIX,
    Profile,
)
from perfcast_engine.step_result import StepResult

from perfcast_planning.serving.rising import batches_to, rising
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.worker import Served, Worker
from perfcast_planning.serving.workload import DEFAULTS, EngineLimits, Workload


@dataclass(frozen=True, slots=True)
class Schedule:
    """Iterations that serve one batch, each field (N,): how many mix prefill and decode, how many only decode, and
    how many requests decode in each. ``charged``: mixed iterations that count towards TPOT."""

    prefill_steps: F64
    decode_iterations: F64
    mixed: F64
    mixed_decodes: F64
    charged: F64
    decode_only: F64
    decodes: F64
    chunks: F64  # iterations of one prompt
    prompts: F64  # prompts of one iteration
    queue: F64  # TTFT over the prefill time of a prompt


def schedule(
    backend: Backend, profile: Profile, batch: F64, ctx_tokens: F64, prompt: int, osl: int, accepted: float
) -> Schedule:
    """How ``batch`` requests of ``prompt`` tokens to compute share iterations of ``ctx_tokens`` prefill tokens."""
    iterations = 1 + max(osl - 1, 0) / (1 + accepted)
    steps = np.ceil(prompt * batch / ctx_tokens)
    prompts, chunks = np.ceil(ctx_tokens / prompt), np.ceil(prompt / ctx_tokens)
    lone, bound = batch == 1, steps >= iterations
    rest = np.maximum(1, batch - prompts)
    saturates = backend.decode_saturates and profile[DECODE_SATURATES]
    fed = np.maximum(1, np.floor_divide(batch, steps / iterations)) if saturates else rest
    queue = backend.queue(steps, batch)
    decoding = osl > 1 or profile[FIRST_TOKEN_FREE]  # prefill yields the first token
    return Schedule(
        prefill_steps=steps,
        decode_iterations=np.full(len(batch), iterations),
        mixed=np.where(lone, 1, steps),
        mixed_decodes=np.where(lone, 0, np.where(bound, fed, rest)) * decoding,
        charged=np.where(lone, 0, np.where(bound, steps, np.maximum(1, steps - backend.ramp_steps))) * decoding,
        decode_only=np.where(lone, max(iterations - 1, 0), np.where(bound, 0, iterations - steps)),
        decodes=np.where(lone, 1, np.where(bound, 0, batch)),
        chunks=chunks,
        prompts=prompts,
        queue=queue if profile[LONE_REQUEST_QUEUES] else np.where(lone, 1.0, queue),
    )


def prompt_to_compute(worker: Worker, load: Workload) -> int:
    """Tokens of a prompt that take part of an iteration's budget."""
    return worker.prompt_tokens(load) - (0 if worker.profile[SCHEDULE_COUNTS_PREFIX] else load.prefix)


def aggregated_memory(
    worker: Worker, load: Workload, batch: F64, ctx_tokens: F64, limits: EngineLimits = DEFAULTS
) -> Footprint:
    """Memory of an in-flight batch (N,); that of the longest sequence and most tokens, where the framework builds for
    those."""
    memory, isl, budget = worker.memory, worker.prompt_tokens(load), worker.memory.backend.token_budget
    encoder = worker.encoder_bytes(load, batch)
    if budget is not None:
        tokens, longest = budget if limits.max_num_tokens is None else limits.max_num_tokens, limits.max_seq_len
        return memory.footprint(batch, isl, load.osl, tokens, load.prefix, max_seq_len=longest, encoder=encoder)
    lone = batch == 1
    decodes = np.where(lone, 0, batch - np.ceil(ctx_tokens / prompt_to_compute(worker, load)))
    mixed = memory.footprint(batch, isl, load.osl, decodes + ctx_tokens, load.prefix, drafted=decodes, encoder=encoder)
    if load.osl == 1 or not lone.any():
        return mixed
    return mixed.larger(memory.footprint(batch, isl, load.osl, 1, load.prefix, encoder=encoder), lone)


def aggregated(
    worker: Worker,
    load: Workload,
    batch: Any,
    ctx_tokens: Any,
    limits: EngineLimits = DEFAULTS,
    *,
    memory: Footprint | None = None,
    told: bool = False,
    operators: bool = False,
) -> Served:
    """``batch`` requests per rank in flight, ``ctx_tokens`` prefill tokens an iteration; both (N,).

    Latencies are NaN where data miss. ``told``: the steps behind the answer are those of the points; otherwise what was
    priced to find theirs, good for what it misses.
    """
    batch, ctx = (np.atleast_1d(np.asarray(v, np.float64)) for v in (batch, ctx_tokens))
    batch, ctx = np.broadcast_arrays(batch, ctx)
    limits.check(worker.step.nextn)
    for name, values in (("batch", batch), ("ctx_tokens", ctx)):
        if not ((values >= 1) & (values == np.floor(values))).all():
            raise InvalidField(name, "must be whole numbers of at least 1", why="range")
    isl, profile, p = worker.prompt_tokens(load), worker.profile, worker.parallel
    if memory is None:
        memory = aggregated_memory(worker, load, batch, ctx, limits)
    prompt = prompt_to_compute(worker, load)
    plan = schedule(worker.memory.backend, profile, batch, ctx, prompt, load.osl, limits.accepted)
    prompt_tokens = ctx if prompt == isl else np.round(ctx * isl / prompt)  # with what is cached of them
    mixed, decode = _steps(worker, load, prompt_tokens, plan)
    mixed_ms, decode_ms = mixed.ms, decode.ms
    encode, rest, zero = worker.encode_ms(load, batch), max(load.osl - 1, 0), np.zeros(len(batch))
    dispatch = worker.memory.backend.dispatch_ms_per_layer * worker.layers
    ttft = encode + (mixed_ms * plan.chunks + dispatch) * plan.queue
    counted = plan.charged + plan.decode_only
    tpot = _ratio(mixed_ms * plan.charged + decode_ms * plan.decode_only, counted) / (1 + limits.accepted)
    span = encode + plan.mixed * mixed_ms + plan.decode_only * decode_ms
    latency = ttft + tpot * rest
    tokens = rest if profile[FIRST_TOKEN_FREE] else load.osl
    rate = _ratio(1000.0, span) * batch * tokens
    if worker.memory.backend.littles_law:
        rate = np.where(latency > 0, np.minimum(rate, _ratio(batch * tokens * 1000, latency)), rate)
    rate = rate * p.pp * p.attn_dp
    per_s = rate / tokens if tokens else zero
    energy = plan.mixed * mixed.energy + plan.decode_only * decode.energy
    lone = batch == 1
    rows = Rows(
        {
            "batch": batch,
            "concurrency": batch * p.pp * p.attn_dp,
            "ctx_tokens": ctx,
            "ttft_ms": ttft,
            "tpot_ms": tpot,
            "request_latency_ms": latency,
            "encode_ms": encode,
            "requests_per_s": per_s,
            "requests_per_s_per_gpu": per_s / p.gpus,
            "tokens_per_s": rate,
            "tokens_per_s_per_gpu": rate / p.gpus,
            "tokens_per_s_per_user": np.where(rest > 0, _ratio(1000.0, tpot), 0.0),
            "gpus": np.full(len(batch), p.gpus),
            "memory_gib": memory.gib,
            "power_w": _ratio(energy, span),
            "balance": prompt * batch / ctx / plan.decode_iterations,
            "prompts_per_step": np.where(lone, 1, plan.prompts),
            "decodes_per_step": np.where(lone, 1, batch - plan.prompts),
            "tokens_per_step": np.where(lone, ctx, batch - plan.prompts + ctx),
            "mixed_steps": plan.mixed,
            "mixed_step_ms": mixed_ms,
            "mixed_step_decodes": plan.mixed_decodes,
            "decode_steps": plan.decode_only,
            "decode_step_ms": decode_ms,
        }
    )
    steps = {"mixed": mixed.priced, "decode": decode.priced}
    if told and (operators or not profile[MEASURED_DIPS]):  # otherwise those are what was priced
        step, osl = worker.step, load.osl
        steps = {
            "mixed": step.mixed(prompt_tokens, plan.mixed_decodes, isl, osl, load.prefix, operators=operators),
            "decode": step.decode_step(plan.decodes, isl, osl, operators=operators),
        }
    return Served(rows, memory, steps)


class Iteration(NamedTuple):
    """One kind of iteration at N points: its time (N,) and energy (N,) in W ms, and what was priced to find them."""

    ms: F64
    energy: F64
    priced: StepResult


def _steps(worker: Worker, load: Workload, prompt_tokens: F64, plan: Schedule) -> tuple[Iteration, Iteration]:
    """The mixed and the decode-only iteration of each point."""
    step, isl, osl = worker.step, worker.prompt_tokens(load), load.osl
    if worker.profile[MEASURED_DIPS]:
        mixed = step.mixed(prompt_tokens, plan.mixed_decodes, isl, osl, load.prefix)
        decode = step.decode_step(plan.decodes, isl, osl)
        return Iteration(mixed.ms, mixed.energy, mixed), Iteration(decode.ms, decode.energy, decode)
    grid = batches_to(max(plan.mixed_decodes.max(), plan.decodes.max()))
    sizes, row = np.unique(prompt_tokens, return_inverse=True)
    mixed = step.mixed(np.repeat(sizes, len(grid)), np.tile(grid, len(sizes)), isl, osl, load.prefix)
    return (
        _read(grid, mixed, plan.mixed_decodes, row),
        _read(grid, step.decode_step(grid, isl, osl), plan.decodes, np.zeros(len(row), np.intp)),
    )


def _read(grid: F64, priced: StepResult, at: F64, row: NDArray[np.intp]) -> Iteration:
    """Rows of steps over ``grid`` read at ``at`` (N,), each in its ``row`` (N,); power as at the next batch."""
    ms, energy = (values.reshape(-1, len(grid)) for values in (priced.ms, priced.energy))
    read = rising(grid, ms, at, row)
    power_w = _ratio(energy, ms)[row, np.searchsorted(grid, at)] if energy.any() else 0.0
    return Iteration(read, read * power_w, priced)


def _ratio(over: Any, under: F64) -> F64:
    """over / under, 0 where ``under`` is not positive; NaN stays NaN."""
    out: F64 = np.where(np.isnan(under), np.nan, 0.0)
    np.divide(over, under, out=out, where=under > 0)
    return out
