"""Fused mixture-of-experts FFN of one rank (spec/03 section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfcast_engine.answer import Answer, Mask, Points, Tier, choose
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.ops.base import Op, Split, by_mode, estimated, require
from perfcast_engine.ops.experts import LOW_LATENCY, STANDARD, Layer, Shape, expert_weight_bytes, token_curve
from perfcast_engine.ops.moe_transfer import basis
from perfcast_engine.quant import MOE, mode
from perfcast_engine.tables.database import Database, Mode

LOW_LATENCY_QUANTS, LOW_LATENCY_TOKENS = frozenset({"nvfp4"}), 128
MOST_TOKENS = 2**32 - 1
RETIRED = frozenset({("sglang", "deepep_moe")})  # (framework, moe_backend) without a fused path
EPLB_TOKENS = {"sglang": 0.8}  # share of the prefill tokens that balanced experts see, by framework


@dataclass(frozen=True, kw_only=True)
class Moe(Op):
    """Expert FFN; ``inter`` is one expert's unsharded width, ``distribution`` how tokens load the experts."""

    hidden: int
    inter: int
    topk: int
    experts: int
    moe_tp: int
    moe_ep: int
    quant: str
    distribution: str
    attn_dp: int = 1
    gated: bool = True
    is_context: bool = True
    moe_backend: str | None = None
    eplb: bool = False

    def __post_init__(self) -> None:
        require(self, hidden=0, inter=0, topk=0, experts=0, moe_tp=0, moe_ep=0, attn_dp=0)
        mode(MOE, self.quant, "quant")

    def weight_bytes(self) -> float:
        return self.scale * expert_weight_bytes(
            self.hidden, self.inter, self.experts, self.quant, self.gated, self.moe_ep, self.moe_tp
        )

    @cached_property
    def layer(self) -> Layer:
        shape = Shape(self.topk, self.experts, self.hidden, self.inter, self.moe_tp, self.moe_ep)
        return Layer(self.quant, self.distribution, shape, self.gated)

    def sol(self, db: Database, at: Points) -> Split:
        return self.layer.roofline(db.system, self._pooled(at).x)

    def price(self, db: Database, at: Points) -> Answer:
        db.system.rate(MOE[self.quant])
        if (db.backend, self.moe_backend) in RETIRED and db.mode is not Mode.SOL:
            raise PerfDataMissing(f"{self.name}: {db.backend} retired the fused {self.moe_backend} path", op=self.name)
        return by_mode(
            db,
            self._pooled(at),
            silicon=lambda at: self.measured(db, at),
            empirical=lambda at: self._estimated(db, at),
            sol=lambda at: self.layer.roofline(db.system, at.x).time,
        )

    def _pooled(self, at: Points) -> Points:
        """Every attention-DP rank's tokens meet in the shared expert pool."""
        return at.with_(x=np.minimum(at.x * max(self.attn_dp, 1), MOST_TOKENS))

    def measured(self, db: Database, at: Points) -> Answer:
        """The measured latency at ``at.x`` tokens in the expert pool."""
        db.system.rate(MOE[self.quant])
        if self.eplb and self.is_context and db.backend in EPLB_TOKENS:
            at = at.with_(x=np.trunc(at.x * EPLB_TOKENS[db.backend]))
        return self._by_table(db, at, lambda table, at: token_curve(self.layer.curve(db, table), at.x, self.name))

    def _estimated(self, db: Database, at: Points) -> Answer:
        def ask(table: str, at: Points) -> Answer:
            found = basis(db, table, self.layer, self.name)
            sol = self.layer.roofline(db.system, at.x).time
            return estimated(found.util, (at.x,), sol, self.name, found.tier, found.k)

        if db.find(STANDARD) is None and db.find(LOW_LATENCY) is None:
            # The reference fails on the data where it would have read several quantisations, on the basis elsewhere.
            reads_several = self._suits_low_latency(at) | bool(db.policy & {Tier.XQUANT, Tier.XPROFILE})
            return choose(reads_several, lambda at: self.measured(db, at), lambda at: ask(STANDARD, at), at)
        return self._by_table(db, at, ask)

    def _by_table(self, db: Database, at: Points, ask: Callable[[str, Points], Answer]) -> Answer:
        """``ask`` the low-latency table for the points it serves where it holds the layer, else the standard one."""
        low = self._suits_low_latency(at)
        if low.any():
            table = db.find(LOW_LATENCY)
            if table is None or table.rows(*self.layer.key(db, LOW_LATENCY)) is None:
                low = np.zeros(len(at), np.bool_)
        return choose(low, lambda at: ask(LOW_LATENCY, at), lambda at: ask(STANDARD, at), at)

    def _suits_low_latency(self, at: Points) -> Mask:
        suits: Mask = at.x <= (LOW_LATENCY_TOKENS if self.gated and self.quant in LOW_LATENCY_QUANTS else -1)
        return suits
