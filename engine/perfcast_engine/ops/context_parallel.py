"""Sparse attention under context parallelism: gathers, and what sharing the indexer saves (spec/04 section 9).

A module is measured on one GPU for one rank's tokens. The indexer, however, sees all tokens, and its kernels grow
faster than linearly: each rank's share of the whole costs more than the kernel of the rank's tokens alone. The
difference comes from the kernels measured alone.
"""

from __future__ import annotations

import numpy as np

from perfcast_engine.answer import F64, Answer, Points, Source
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.interp import clamped
from perfcast_engine.interp.grid import Grid
from perfcast_engine.ops.base import no_slice, slice_of
from perfcast_engine.ops.collective import Nccl
from perfcast_engine.ops.topk_calibration import TOPK
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

MQA_LOGITS = "dsv4_paged_mqa_logits_module"
MQA_CALL = 8192  # tokens that one call of that kernel takes


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
    chunk = chunk_of(at.s, cp)
    grid = _kernel(db, logits, (heads,))
    last, flat = (_kernel(db, topk, (heads, score)) for score in ("last", "flat"))
    ms = _saved(grid, grid, cp, at, chunk) + _saved(last, flat, cp, at, chunk)
    return _within(np.where(np.isnan(ms), ms, 0.0) if skip else ms)


def csa_delta(db: Database, heads: int, tp: int, cp: int, at: Points) -> Answer:
    """As ``dsa_delta`` for compressed attention with a learned index."""
    chunk = chunk_of(at.s, cp)
    topk = db.kept(("top-k by batch", heads), lambda: clamped.reversed_axes(_kernel(db, TOPK, (heads, "v1_top_last"))))
    ms = _saved(topk, topk, cp, at, chunk)
    within = ~np.isnan(ms)  # which also bounds the number of calls
    part, own = at.take(within), chunk[within]
    ms[within] += _mqa_logits(db, heads, tp, part) / cp - _mqa_logits(db, heads, tp, part.with_(s=own))
    return _within(ms)


def _kernel(db: Database, name: str, key: tuple[Key, ...]) -> Grid:
    grid = db.table(name).grid(*key)
    if grid is None:
        raise no_slice(db.table(name), key)
    return grid


def _saved(whole: Grid, own: Grid, cp: int, at: Points, chunk: F64) -> F64:
    """A rank's share of the kernel over all tokens, less the kernel over its own; NaN beyond the longest measured.
    Axes (batch, new tokens, prefix)."""
    share = clamped.nearest_curve(whole, (at.batch, at.s, at.prefix)) / cp
    return share - clamped.nearest_curve(own, (at.batch, chunk, at.prefix))


def _within(ms: F64) -> Answer:
    miss = PerfDataMissing("context parallelism: more new tokens than the indexer kernels were measured with")
    return Answer.of(ms, Source.SILICON, miss=miss)


def _mqa_logits(db: Database, heads: int, tp: int, at: Points) -> F64:
    """Paged MQA logits of all new tokens, summed over the calls it takes; NaN where nothing anchors one of them."""
    table = db.table(MQA_LOGITS)
    key = (heads, tp if table.rows(heads, tp) is not None else 1)
    surface = slice_of(db, MQA_LOGITS, key, lambda past, isl, batch: batch * (past * isl + isl * isl / 2))
    calls = np.ceil(at.s / MQA_CALL).astype(np.int64)
    point = np.repeat(np.arange(len(at)), calls)
    done = (np.arange(len(point)) - np.repeat(np.cumsum(calls) - calls, calls)) * float(MQA_CALL)
    each = at.take(point)
    ms = surface.at(each.prefix + done, np.minimum(each.s - done, MQA_CALL), each.batch).ms
    return np.bincount(point, ms, minlength=len(at)).astype(np.float64)
