"""Passes of an engine that was measured as a whole (spec/04 sections 10 and 11.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from perfcast_engine.answer import F64, Answer, Mask, Points, Source, gather, total
from perfcast_engine.errors import EngineError, PerfDataMissing
from perfcast_engine.interp.grid import Ints
from perfcast_engine.interp.sites import Sites
from perfcast_engine.ops.attention import ContextAttention, GenerationAttention
from perfcast_engine.ops.base import Op, Role
from perfcast_engine.ops.collective import P2P, AllReduce, Nccl
from perfcast_engine.ops.gemm import Gemm
from perfcast_engine.ops.memory_bound import Elementwise, Embedding
from perfcast_engine.ops.moe import Moe
from perfcast_engine.ops.moe_dispatch import MoeDispatch
from perfcast_engine.tables.database import Database, Mode

from perfcast_planning.planner.pass_table import PassTable

# What a roofline of a pass is made of; a list that holds anything else has none.
ROOFLINES = (
    AllReduce,
    ContextAttention,
    Elementwise,
    Embedding,
    Gemm,
    GenerationAttention,
    Moe,
    MoeDispatch,
    Nccl,
    P2P,
)
LONG_CACHE = 2.0  # KV tokens per new token from which a larger batch is known to shorten attention


@dataclass(frozen=True, eq=False)
class WholePass:
    """One engine's measured passes; ``prefill_ops`` and ``decode_ops``, which they stand for, serve as their roofline.

    Everything takes totals of the pass (or means of them) as arrays (N,) and answers ms (N,).
    """

    table: PassTable
    prefill_ops: tuple[Op, ...]
    decode_ops: tuple[Op, ...]
    db: Database

    def totals(self, requests: F64, tokens: F64, kv: F64, decodes: F64, decode_kv: F64) -> Answer:
        """A pass with ``requests`` prefills of ``tokens`` new tokens over ``kv`` cached ones, and ``decodes`` decodes
        over ``decode_kv``."""
        prefills = tokens > 0
        return total(
            (
                _part(prefills, lambda at: self.prefill(requests[at], tokens[at], kv[at])),
                _part(decodes > 0, lambda at: self._beside(decodes[at], decode_kv[at], prefills[at])),
            ),
            len(requests),
        )

    def prefill(self, batch: F64, tokens: F64, kv: F64) -> Answer:
        """``batch`` requests with ``tokens`` new tokens over ``kv`` cached ones."""
        factor, used = np.ones(len(batch)), batch
        if self.table.prefill is not None and self.table.flat_over_batch:
            used = np.minimum(batch, self.table.prefill.sites[-1, 0])
            corrected = (used < batch) & (kv >= LONG_CACHE * tokens)
            if corrected.any():
                true, clamped = (
                    self._prefill_sol(tokens[corrected], b[corrected], kv[corrected]) for b in (batch, used)
                )
                factor[corrected] = np.minimum(1.0, true / clamped)
                used = np.where(np.isnan(factor), batch, used)
        ms = self._read(self._prefills, tokens, used, kv) * np.where(np.isnan(factor), 1.0, factor)
        return _answer(ms, "prefill", {"batch": batch, "tokens": tokens, "kv": kv})

    def decode(self, batch: F64, kv: F64) -> Answer:
        """``batch`` requests over ``kv`` cached tokens."""
        return _answer(self._read(self._decodes, kv, batch), "decode", {"batch": batch, "kv": kv})

    def baseline(self, batch: F64) -> Answer:
        """A decode pass of ``batch`` requests over the least cache measured: what any pass costs."""
        curves = self.table.decode
        return self.decode(batch, np.maximum(batch, 0.0 if curves is None else curves.first.min()))

    def _beside(self, requests: F64, kv: F64, prefills: Mask) -> Answer:
        """Decodes; beside a prefill only what they cost beyond an empty pass, at least 0."""
        empty = _part(prefills, lambda at: self.baseline(requests[at]))
        rest = self.decode(requests, kv) + empty.scaled(-1.0)
        return replace(rest, ms=np.maximum(rest.ms, 0.0))

    @cached_property
    def _prefills(self) -> Sites | None:
        """Over new tokens, at sites of batch and cached tokens."""
        return None if self.table.prefill is None else Sites(self.table.prefill, self._prefill_sol)

    @cached_property
    def _decodes(self) -> Sites | None:
        """Over cached tokens, at sites of batch."""
        return None if self.table.decode is None else Sites(self.table.decode, self._decode_sol)

    def _prefill_sol(self, tokens: F64, batch: F64 | float, kv: F64 | float) -> F64:
        """ms of the operators at the mean request, whose lengths need not be whole; NaN where they have no roofline."""
        at = Points.of(batch, np.maximum(tokens / batch, 1), kv / batch, tokens)
        return _roofline(self.prefill_ops, self.db, at)

    def _decode_sol(self, kv: F64, batch: F64 | float) -> F64:
        return _roofline(self.decode_ops, self.db, Points.of(batch, np.maximum(kv / batch, 1), 0, batch))

    def _read(self, sites: Sites | None, x: F64, *site: F64) -> F64:
        """ms at each x of each site; NaN outside the measured domain and where nothing is near enough."""
        ms = np.full(len(x), np.nan)
        if sites is None:
            return ms
        curves, asked = sites.curves, np.stack(site, axis=1)
        inside = ((asked >= curves.sites.min(axis=0)) & (asked <= curves.sites.max(axis=0))).all(axis=1)
        inside &= (x >= curves.first.min()) & (x <= curves.last.max())
        for each in np.unique(asked[inside], axis=0):
            at = inside & (asked == each).all(axis=1)
            ms[at] = self._on(sites, curves.find(*each), x[at], *each.tolist())
        return ms

    def _on(self, sites: Sites, own: int | None, x: F64, *site: float) -> F64:
        if own is not None:
            measured = _covered(sites, own, x)
            return np.where(np.isnan(measured), sites.between(x, *site), measured)
        rungs = self._rungs
        if len(site) > 1 or not len(rungs) or site[0] <= rungs[0]:
            return sites.between(x, *site)
        # between the batch just above the last rung and the next rung: one captured graph serves them all
        batches, above = sites.curves.sites[:, 0], np.searchsorted(rungs, site[0])
        ends = rungs[above - 1] + 1, np.append(rungs, batches[-1])[above]
        low, high = (int(np.searchsorted(batches, end)) for end in ends)
        at_low, at_high = _covered(sites, low, x), _covered(sites, high, x)
        both = at_low + (at_high - at_low) * (site[0] - batches[low]) / max(batches[high] - batches[low], 1)
        return np.where(np.isnan(at_low), at_high, np.where(np.isnan(at_high), at_low, both))

    @cached_property
    def _rungs(self) -> F64:
        """Batches of decode measured together with the next larger one, where a captured graph ends."""
        batches = np.zeros(0) if self.table.decode is None else self.table.decode.sites[:, 0]
        return batches[np.isin(batches + 1, batches)]


def _covered(sites: Sites, index: int, x: F64) -> F64:
    """The curve of one site where it was measured around x, else NaN."""
    curve = sites.curve(index)
    return np.interp(x, curve.x, curve.ms, left=np.nan, right=np.nan)


def _roofline(ops: tuple[Op, ...], db: Database, at: Points) -> F64:
    if not all(isinstance(op, ROOFLINES) for op in ops):
        return np.full(len(at), np.nan)
    by_request, sol = at.with_(x=at.batch), db.in_mode(Mode.SOL)
    return total((op.evaluate(sol, by_request if op.role is Role.LOGITS else at) for op in ops), len(at)).ms


def _answer(ms: F64, phase: str, asked: dict[str, F64]) -> Answer:
    """``ms`` where it is positive; PerfDataMissing elsewhere."""

    def miss(gone: Mask) -> EngineError:
        point = ", ".join(f"{name}={values[int(np.argmax(gone))]:g}" for name, values in asked.items())
        return PerfDataMissing(f"no measured {phase} pass near {point}", op=phase, key=point)

    return Answer.of(np.where(ms > 0, ms, np.nan), Source.SILICON, miss=miss)


def _part(where: Mask, price: Callable[[Ints], Answer]) -> Answer:
    """What ``price`` answers for the points in ``where``; 0 for the others."""
    if not where.any():
        return Answer.zero(len(where))
    return gather([(where, price(np.flatnonzero(where))), (~where, Answer.zero(int((~where).sum())))])
