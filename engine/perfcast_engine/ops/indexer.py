"""Kernels of the indexer of sparse attention that were measured alone, and what follows for whole modules.

Modules were measured with random index scores, on which the top-k kernel is slower than on those of a real model
(spec/04 section 4.3). And they were measured on one GPU for one rank's tokens: under context parallelism the indexer
sees all tokens, its kernels grow faster than linearly, and each rank's share of the whole costs more than the kernel of
the rank's tokens alone (spec/04 section 9).
"""

from __future__ import annotations

import numpy as np
from perfcast_surface.blend import Held
from perfcast_surface.plane import Plane

from perfcast_engine.answer import F64, Answer, Points, Source
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.interp.grid import Coords, Grid, descend
from perfcast_engine.ops.collective import Nccl
from perfcast_engine.ops.measured import Slice
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

TOPK = "dsv4_csa_topk_calib"
MQA_LOGITS = "dsv4_paged_mqa_logits_module"
MQA_CALL = 8192  # tokens that one call of that kernel takes


def topk_excess(db: Database, heads: int, variant: str) -> Held | None:
    """What the top-k kernel spends on random scores (``flat``) beyond those of a model (``top_last``): ms over (batch,
    new tokens, prefix), held at the ends of what was measured; None where nothing was measured for ``heads``.
    ``variant``: v1 in prefill, v2 in decode."""

    def build() -> Held | None:
        table, modes = db.find(TOPK), ("flat", "top_last")
        flat, last = (None if table is None else table.grid(heads, f"{variant}_{mode}") for mode in modes)
        if flat is None or last is None:
            return None
        here, there = flat.shared(last)
        excess = np.maximum(0.0, flat.ms[here] - last.ms[there])
        grid = reversed_axes(Grid(tuple(c[here] for c in flat.coords), excess))
        plane = Plane.of(grid.coords, grid.ms, held=True) if len(grid) else None
        return None if plane is None else Held(plane)

    return db.kept(("top-k excess", heads, variant), build)


def chunk_of(s: F64, cp: int) -> F64:
    """New tokens of one rank."""
    return np.maximum(1.0, np.ceil(s / cp))


def all_gather(db: Database, gpus: int, elements: F64) -> Answer:
    """NCCL all-gather of half-precision elements over the ranks."""
    op = Nccl(name="all_gather", operation="all_gather", elements_per_token=1, gpus=gpus)
    return op.price(db, Points.of(1, 1, 0, elements))


def dsa_delta(db: Database, kernels: str, heads: int, cp: int, at: Points, skip: bool) -> Answer:
    """Index logits and top-k of all tokens, shared, in place of those of one rank's tokens. Layers that ``skip`` the
    index save nothing but must lie within the measured lengths all the same."""
    logits, topk = f"{kernels}_mqa_logits_module", f"{kernels}_topk_module"
    if skip and (db.find(logits) is None or db.find(topk) is None):
        return Answer.zero(len(at))
    grid = _kernel(db, logits, (heads,))
    last, flat = (_kernel(db, topk, (heads, score)) for score in ("last", "flat"))
    ms = _saved(grid, grid, cp, at) + _saved(last, flat, cp, at)
    return _within(np.where(np.isnan(ms), ms, 0.0) if skip else ms)


def csa_delta(db: Database, heads: int, tp: int, cp: int, at: Points) -> Answer:
    """As ``dsa_delta`` for compressed attention with a learned index."""
    topk = db.kept(("top-k by batch", heads), lambda: reversed_axes(_kernel(db, TOPK, (heads, "v1_top_last"))))
    ms = _saved(topk, topk, cp, at)
    within = ~np.isnan(ms)  # which also bounds the number of calls
    part = at.take(within)
    own = part.with_(s=chunk_of(part.s, cp))
    ms[within] += _mqa_logits(db, heads, tp, part) / cp - _mqa_logits(db, heads, tp, own)
    return _within(ms)


def _kernel(db: Database, name: str, key: tuple[Key, ...]) -> Grid:
    return Slice(name, key, lambda *coords: coords[0]).surface(db).grid


def _saved(whole: Grid, own: Grid, cp: int, at: Points) -> F64:
    """A rank's share of the kernel over all tokens, less the kernel over its own; NaN beyond the longest measured.
    Axes (batch, new tokens, prefix)."""
    share = nearest_curve(whole, (at.batch, at.s, at.prefix)) / cp
    return share - nearest_curve(own, (at.batch, chunk_of(at.s, cp), at.prefix))


def _within(ms: F64) -> Answer:
    miss = PerfDataMissing("context parallelism: more new tokens than the indexer kernels were measured with")
    return Answer.of(ms, Source.SILICON, miss=miss)


def _mqa_logits(db: Database, heads: int, tp: int, at: Points) -> F64:
    """Paged MQA logits of all new tokens, summed over the calls it takes; NaN where nothing anchors one of them."""
    table = db.table(MQA_LOGITS)
    key = (heads, tp if table.rows(heads, tp) is not None else 1)
    kernel = Slice(MQA_LOGITS, key, lambda past, isl, batch: batch * (past * isl + isl * isl / 2))
    calls = np.ceil(at.s / MQA_CALL).astype(np.int64)
    point = np.repeat(np.arange(len(at)), calls)
    done = (np.arange(len(point)) - np.repeat(np.cumsum(calls) - calls, calls)) * float(MQA_CALL)
    each = at.take(point)
    ms = kernel.surface(db).at(each.prefix + done, np.minimum(each.s - done, MQA_CALL), each.batch).ms
    return np.bincount(point, ms, minlength=len(at)).astype(np.float64)


# Nested grids read without rooflines (spec/04 section 9).


def nearest_curve(grid: Grid, query: Coords) -> F64:
    """The nearest key on every axis but the last (the smaller on ties), linear on the last. (Q,) ms, NaN where the
    second axis asks beyond the largest key of its node."""
    nodes = np.zeros(len(query[0]), np.int64)
    beyond = np.zeros(len(nodes), np.bool_)
    for axis, (level, c) in enumerate(zip(grid.levels, query, strict=True)):
        last = level.keys[level.start[nodes + 1] - 1]
        if axis == 1:
            beyond = c > last
        step = descend(level, nodes, np.clip(c, level.keys[level.start[nodes]], last))
        nodes = np.where(step.weight > 0.5, step.high, step.low)
    low, high = grid.ms[step.low], grid.ms[step.high]
    return np.where(beyond, np.nan, low + (high - low) * step.weight)


def reversed_axes(grid: Grid) -> Grid:
    """The same leaves, nested the other way round."""
    order = np.lexsort(grid.coords)
    return Grid(tuple(c[order] for c in reversed(grid.coords)), grid.ms[order])
