"""One batch in, one batch out: prefill alone, decode alone, or both (spec/06 section 2)."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.memory import Footprint
from perfcast_engine.profiles import CP_RANKS_FREE, MEASURED_DIPS
from perfcast_engine.step import DEFAULT_STRIDE

from perfcast_planning.serving.rising import batches_to, rising
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.worker import Served, Worker
from perfcast_planning.serving.workload import Workload


class Phases(Enum):
    BOTH = "static"
    PREFILL = "static_ctx"
    DECODE = "static_gen"


def static_memory(
    worker: Worker, load: Workload, batch: F64, phases: Phases, max_seq_len: int | None = None, beam: int = 1
) -> Footprint:
    """Memory of a static batch (N,)."""
    decode = phases is Phases.DECODE
    return worker.memory.footprint(
        batch,
        worker.prompt_tokens(load),
        1 if phases is Phases.PREFILL else load.osl,
        batch * beam if decode else 0,
        load.prefix,
        beam=beam,
        max_seq_len=max_seq_len,
        drafted=None if decode else 0,
        encoder=(0.0, 0.0) if decode else worker.encoder_bytes(load, batch),
    )


def static(
    worker: Worker,
    load: Workload,
    batch: Any,
    phases: Phases = Phases.BOTH,
    *,
    correction: float = 1.0,
    stride: int = DEFAULT_STRIDE,
    beam: int = 1,
    max_seq_len: int | None = None,
    memory: Footprint | None = None,
    operators: bool = False,
) -> Served:
    """Batches (N,) per rank through the ``phases``. ``correction`` multiplies every latency. NaN where data miss."""
    batch = np.atleast_1d(np.asarray(batch, np.float64))
    isl, rest, zero = worker.prompt_tokens(load), max(load.osl - 1, 0), np.zeros(len(batch))
    memory = static_memory(worker, load, batch, phases, max_seq_len, beam) if memory is None else memory
    steps, encode, prefill, decode = {}, zero, zero, zero
    if phases is not Phases.DECODE:
        steps["prefill"] = worker.step.prefill(batch, isl, load.prefix, operators=operators)
        encode = worker.encode_ms(load, batch) * correction
        prefill = steps["prefill"].ms * correction
    if phases is not Phases.PREFILL:
        dips = worker.profile[MEASURED_DIPS]
        if dips or operators:
            steps["decode"] = worker.step.decode(batch, isl, load.osl, beam, stride, operators=operators)
            decode = steps["decode"].ms * correction
        if not dips:
            grid = batches_to(batch.max())
            priced = worker.step.decode(grid[1:], isl, load.osl, beam, stride)
            decode = rising(grid, np.concatenate([[0.0], priced.ms])[None], batch) * correction
            steps.setdefault("decode", priced)
    ttft = encode + prefill
    tpot = decode / rest if rest else zero
    latency = ttft + tpot * rest
    latency = np.where(latency == 0, encode + prefill + decode, latency)
    p = worker.parallel
    per_s = np.divide(batch * p.attn_dp, latency, out=zero.copy(), where=latency != 0) * 1000 * p.pp
    tokens = {Phases.BOTH: load.osl, Phases.DECODE: rest, Phases.PREFILL: 1}[phases]
    ranks = p.tp * p.pp * p.attn_dp if worker.profile[CP_RANKS_FREE] else p.gpus
    energy = np.sum([step.energy for step in steps.values() if len(step) == len(batch)] or [zero], axis=0)
    rows = Rows(
        {
            "batch": batch,
            "concurrency": batch * p.attn_dp,
            "ttft_ms": ttft,
            "tpot_ms": tpot,
            "request_latency_ms": latency,
            "encode_ms": encode,
            "prefill_ms": prefill,
            "decode_ms": decode,
            "requests_per_s": per_s,
            "requests_per_s_per_gpu": per_s / ranks,
            "tokens_per_s": per_s * tokens,
            "tokens_per_s_per_gpu": per_s * tokens / ranks,
            "tokens_per_s_per_user": np.divide(1000.0, tpot, out=zero.copy(), where=tpot != 0),
            "gpus": np.full(len(batch), p.gpus),
            "memory_gib": memory.gib,
            "power_w": np.divide(energy, latency, out=zero.copy(), where=latency != 0),
        }
    )
    return Served(rows, memory, steps)


def speculated(rows: Rows, phases: Phases, load: Workload, accepted: float) -> Rows:
    """Static rows when each decode step yields ``accepted`` draft tokens on top of its own (spec/06 section 5)."""
    if accepted == 0 or phases is Phases.PREFILL:
        return rows
    tokens = 1 + accepted
    tpot = rows["tpot_ms"] / tokens
    latency = rows["ttft_ms"] + tpot * max(load.osl - 1, 0)
    faster: F64 = np.full(len(rows), tokens)
    if phases is Phases.BOTH:
        faster = np.divide(rows["request_latency_ms"], latency, out=np.ones(len(rows)), where=latency > 0)
    rates = ("requests_per_s", "requests_per_s_per_gpu", "tokens_per_s", "tokens_per_s_per_gpu")
    return rows.with_(
        tpot_ms=tpot,
        decode_ms=rows["decode_ms"] / tokens,
        request_latency_ms=latency,
        tokens_per_s_per_user=rows["tokens_per_s_per_user"] * tokens,
        **{name: rows[name] * faster for name in rates},
    )
