"""A whole forward pass from a measured table of passes (spec/04 section 10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from perfcast_engine.answer import F64, Answer, Mask, Points, Source, total
from perfcast_engine.errors import EngineError, PerfDataMissing
from perfcast_engine.interp.sites import PassSurface
from perfcast_engine.ops.attention import ContextAttention, GenerationAttention
from perfcast_engine.ops.base import Op, Reads, Role
from perfcast_engine.ops.collective import P2P, AllReduce, Nccl
from perfcast_engine.ops.gemm import Gemm
from perfcast_engine.ops.memory_bound import Elementwise, Embedding
from perfcast_engine.ops.moe import Moe
from perfcast_engine.ops.moe_dispatch import MoeDispatch
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.passes import PassTable

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


@dataclass(frozen=True, kw_only=True)
class FpmForward(Op):
    """All of a phase. ``ops``: the operators it stands for, which serve as its roofline and its weights."""

    phase: Literal["prefill", "decode"]
    table: PassTable
    ops: tuple[Op, ...]

    reads = Reads.SEQUENCE

    def weight_bytes(self) -> float:
        return sum(op.weight_bytes() for op in self.ops)

    def price(self, db: Database, at: Points) -> Answer:
        if self.phase == "prefill":
            return self.at_totals(db, at.batch, at.batch * at.s, at.batch * at.prefix)
        return self.at_totals(db, at.batch, np.zeros(len(at)), at.batch * at.s)

    def at_totals(self, db: Database, batch: F64, tokens: F64, kv: F64) -> Answer:
        """``batch`` requests with, in all, ``tokens`` new tokens (prefill) over ``kv`` tokens of cache."""
        ms = self._at(db, kv, batch) if self.phase == "decode" else self._prefill(db, batch, tokens, kv)
        ms = np.where(ms > 0, ms, np.nan)

        def miss(gone: Mask) -> EngineError:
            first = int(np.argmax(gone))
            point = f"batch={batch[first]:g}, tokens={tokens[first]:g}, kv={kv[first]:g}"
            return PerfDataMissing(f"{self.name}: no measured {self.phase} pass near {point}", op=self.name, key=point)

        return Answer.of(ms, Source.SILICON, miss=miss)

    def baseline(self, db: Database, batch: F64) -> Answer:
        """A decode pass of ``batch`` requests over the least cache measured: what any pass costs."""
        curves = self.table.decode
        least = 0.0 if curves is None else float(curves.x.min())
        return self.at_totals(db, batch, np.zeros(len(batch)), np.maximum(batch, least))

    def _prefill(self, db: Database, batch: F64, tokens: F64, kv: F64) -> F64:
        factor, used = np.ones(len(batch)), batch
        if self.table.prefill is not None and self.table.flat_over_batch:
            used = np.minimum(batch, self.table.prefill.sites[-1, 0])
            corrected = (used < batch) & (kv >= LONG_CACHE * tokens)
            if corrected.any():
                true, clamped = (
                    self._roofline(db, b[corrected], tokens[corrected], kv[corrected]) for b in (batch, used)
                )
                factor[corrected] = np.minimum(1.0, true / clamped)
                used = np.where(np.isnan(factor), batch, used)
        return self._at(db, tokens, used, kv) * np.where(np.isnan(factor), 1.0, factor)

    def _at(self, db: Database, x: F64, *site: F64) -> F64:
        curves = self.table.prefill if self.phase == "prefill" else self.table.decode
        if curves is None:
            return np.full(len(x), np.nan)

        def sol(x: F64, batch: F64 | float, kv: F64 | float = 0.0) -> F64:
            return self._roofline(db, batch + 0 * x, *((x, kv) if self.phase == "prefill" else (0 * x, x)))

        return db.kept(("passes", curves, self.ops), lambda: PassSurface(curves, sol)).at(x, *site)

    def _roofline(self, db: Database, batch: F64, tokens: F64, kv: F64 | float) -> F64:
        """ms of the operators at the mean request, whose lengths need not be whole; NaN where they have no roofline."""
        if not all(isinstance(op, ROOFLINES) for op in self.ops):
            return np.full(len(batch), np.nan)
        at = Points.of(batch, np.maximum(kv / batch, 1), 0, batch)
        if self.phase == "prefill":
            at = Points.of(batch, np.maximum(tokens / batch, 1), kv / batch, tokens)
        by_request, sol = at.with_(x=at.batch), db.in_mode(Mode.SOL)
        answers = (op.evaluate(sol, by_request if op.role is Role.LOGITS else at) for op in self.ops)
        return total(answers, len(at)).ms
