"""A pool of encode workers in front of aggregated or prefill engines (spec/06 section 7, EPD)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from perfcast_engine.profiles import ROUNDED_ROWS

from perfcast_planning.search.match import MAX_WORKERS
from perfcast_planning.serving.disaggregated import Matching
from perfcast_planning.serving.rows import Rows, concatenated, first_of_group
from perfcast_planning.serving.worker import Worker
from perfcast_planning.serving.workload import Workload

BATCHES = np.array([1.0, 2.0, 4.0, 8.0])
WIDTHS = (1, 2, 4, 8)


def encode_pool(workers: Sequence[Worker], load: Workload) -> Rows:
    """Encode workers to choose from: what each vision tower does by itself, over batches, where it fits the GPU.
    Columns batch, encode_ms, requests_per_s, gpus, memory_gib, engine (N,)."""
    parts = []
    for index, worker in enumerate(workers):
        encoder, memory = worker.encoder, worker.memory
        if encoder is None or not encoder.ops:
            continue
        ms = encoder.ms(load.images, BATCHES)
        ms = np.round(ms, 3) if worker.profile[ROUNDED_ROWS] else ms
        rate = BATCHES * 1000 / ms
        weights, activations = encoder.bytes(load.images, BATCHES)
        held = memory.footprint(0.0 * BATCHES, 0, 0, 1)
        held_bytes = weights + activations + held.nccl + held.others
        faster = np.concatenate([[True], rate[1:] > np.maximum.accumulate(rate)[:-1]])
        rows = Rows(
            {
                "batch": BATCHES,
                "encode_ms": ms,
                "requests_per_s": rate,
                "gpus": np.full(len(BATCHES), float(worker.parallel.tp)),
                "memory_gib": held_bytes / 2**30,
                "engine": np.full(len(BATCHES), index),
            }
        )
        parts.append(rows.take(faster & (held_bytes < memory.capacity)))
    return concatenated(parts)


def cells(rows: Rows, pool: Rows, matching: Matching, waiting: float, degradation: float, budget: float) -> Rows:
    """1..32 engines of each row behind encode workers of each kind, as few as sustain them, as candidates: TTFT, rate
    and GPUs are those of the cell. ``waiting`` multiplies the time to encode, ``degradation`` what an engine sustains.
    Cells beyond the ``budget`` of GPUs are left out."""
    axes = np.arange(len(rows)), np.arange(len(pool)), np.arange(1.0, MAX_WORKERS + 1)
    row, kind, copies = (grid.ravel() for grid in np.meshgrid(*axes, indexing="ij"))
    base, encode = rows.take(row), pool.take(kind)
    each = encode["requests_per_s"] * matching.encoder_degradation / degradation
    workers = np.clip(np.ceil(copies * base["requests_per_s"] / each), 1, MAX_WORKERS)
    rate = np.minimum(copies * base["requests_per_s"], workers * each)
    gpus = copies * base["gpus"] + workers * encode["gpus"]
    share = rate / np.where(base["requests_per_s"] > 0, base["requests_per_s"], 1)
    wait = waiting * encode["encode_ms"]
    columns = {
        "ttft_ms": base["ttft_ms"] + wait,
        "encode_ms": wait,
        "request_latency_ms": base["request_latency_ms"] + wait,
        "concurrency": base["concurrency"] * copies,
        "gpus": gpus,
        "requests_per_s": rate,
        "requests_per_s_per_gpu": rate / gpus,
        "tokens_per_s": base["tokens_per_s"] * share,
        "tokens_per_s_per_gpu": base["tokens_per_s"] * share / gpus,
        "cell_engines": copies,
        "cell_of": row,
        "encode_workers": workers,
        "encode_batch": encode["batch"],
        "encode_gpus": encode["gpus"],
        "encode_memory_gib": encode["memory_gib"],
    }
    return base.with_(**columns).take(gpus <= budget)


def best_cells(found: Rows, ttft: float) -> Rows:
    """Of each row's cells the one with most requests per GPU, within the ``ttft`` limit where one is."""
    late = (found["ttft_ms"] > ttft).astype(np.float64)
    return found.take(first_of_group(found["cell_of"], late, -found["requests_per_s_per_gpu"], found["gpus"]))
