"""What one engine can do: its grid of batch and chunk sizes priced at once (spec/06 sections 8.2, 9 step 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from perfcast_engine.answer import F64, Mask
from perfcast_engine.errors import EngineError, PerfDataMissing
from perfcast_engine.memory import Footprint
from perfcast_engine.profiles import FIXED_KV_FRACTION, LATENCY_CORRECTIONS, ROUNDED_ROWS

from perfcast_planning.search.grids import Pair
from perfcast_planning.serving.aggregated import aggregated, aggregated_memory, prompt_to_compute
from perfcast_planning.serving.estimate import side_rows
from perfcast_planning.serving.rows import DECIMALS, Rows, descending
from perfcast_planning.serving.static import Phases, static, static_memory
from perfcast_planning.serving.worker import Served, Worker
from perfcast_planning.serving.workload import EngineLimits, Workload

KEPT_PER_TARGET = 10


@dataclass(frozen=True, slots=True)
class Sweep:
    """What became of one engine's grid. ``rows``: the points to choose from; ``priced``: all that fit and
    have data."""

    rows: Rows | None
    priced: Rows | None = None
    fits_memory: bool = False
    fits_kv: bool = False
    miss: PerfDataMissing | None = None  # of some point
    error: EngineError | None = None  # that condemned the whole engine


def sweep_aggregated(
    worker: Worker, load: Workload, batches: F64, chunks: F64, limits: EngineLimits, pairs: Sequence[Pair]
) -> Sweep:
    """In-flight batching over batches x chunks; in the reference only the best rows under each target of ``pairs``."""
    profile, prompt = worker.profile, prompt_to_compute(worker, load)
    batch, ctx = (grid.ravel() for grid in np.meshgrid(batches, chunks, indexing="ij"))
    asked = batch - np.ceil(ctx / prompt) >= np.where(batch > 1, 1, 0)
    if limits.accepted == 0:
        asked &= _distinct_schedules(asked, batch, ctx, prompt, load.osl)
    return _swept(
        worker,
        aggregated_memory(worker, load, batch, ctx, limits),
        worker.memory.kv_fraction(limits.memory_fraction, profile[FIXED_KV_FRACTION]),
        asked.reshape(len(batches), len(chunks)),
        lambda kept, memory: aggregated(worker, load, batch[kept], ctx[kept], limits, memory=memory),
        lambda rows: _best_under(rows, pairs) if profile[ROUNDED_ROWS] else rows,
    )


def sweep_role(worker: Worker, load: Workload, batches: F64, phases: Phases, limits: EngineLimits) -> Sweep:
    """One role of a disaggregated deployment over ``batches``, up to the first that does not fit."""
    factor = worker.profile[LATENCY_CORRECTIONS][phases is Phases.DECODE]
    return _swept(
        worker,
        static_memory(worker, load, batches, phases),
        worker.memory.kv_fraction(limits.memory_fraction),
        np.ones((1, len(batches)), np.bool_),
        lambda kept, memory: static(worker, load, batches[kept], phases, correction=factor, memory=memory),
        lambda rows: side_rows(rows, worker, load, phases, limits.accepted),
    )


def _swept(
    worker: Worker,
    memory: Footprint,
    kv_fraction: float,
    asked: Mask,
    serve: Callable[[Mask, Footprint], Served],
    chosen: Callable[[Rows], Rows],
) -> Sweep:
    """The ``asked`` points (R, K) of each row up to the first that does not fit ``memory`` (R * K,), as they are
    ``serve``d, and which of them are ``chosen``."""
    out, over = worker.memory.verdict(memory, kv_fraction)
    full = asked & (out | over).reshape(asked.shape)
    kept = (asked & ~np.logical_or.accumulate(full, axis=1)).ravel()
    fits = bool((asked.ravel() & ~out).any()), bool(kept.any())
    if not kept.any():
        return Sweep(None, None, *fits)
    served = serve(kept, memory.take(kept))
    try:
        miss = served.first_miss()
    except EngineError as error:
        return Sweep(None, None, *fits, error=error)
    priced = served.rows.take(~served.missing())
    return Sweep(chosen(priced), priced, *fits, miss)


def _distinct_schedules(asked: Mask, batch: F64, ctx: F64, prompt: int, osl: int) -> Mask:
    """Without the prefill-bound points that repeat the schedule of an earlier one: there only the chunk matters."""
    load = prompt * batch / ctx / osl
    decodes = np.floor_divide(batch, load)
    repeats = asked & (load > 1) & (decodes > 1)
    where = np.flatnonzero(repeats)
    _, first = np.unique(decodes[where], return_index=True)
    keep = ~repeats
    keep[where[first]] = True
    return keep


def _best_under(rows: Rows, pairs: Sequence[Pair]) -> Rows:
    """The union of the best rows by throughput under each target in turn, rounded."""
    rate = np.round(rows["requests_per_s"], DECIMALS)
    limits = np.array(pairs)
    meets = (rows["tpot_ms"] <= limits[:, 1:]) & (rows["ttft_ms"] <= limits[:, :1])
    best: dict[int, None] = {}
    for row in meets[np.concatenate([[True], (meets[1:] != meets[:-1]).any(axis=1)])]:
        where = np.flatnonzero(row)
        best.update(dict.fromkeys(where[descending(rate[where])[:KEPT_PER_TARGET]].tolist()))
    return rows.take(np.fromiter(best, np.intp)).rounded()
