"""Expert FFN under a large-EP all-to-all (spec/03 section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.moe import expert_weight_bytes
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class MoeExperts(Op):
    """Experts of one of ``moe_ep`` ranks; ``slots`` counts expert replicas (None: one each), ``phase`` context or
    generation, ``kernel`` None takes the backend's usual one."""

    hidden: int
    inter: int
    topk: int
    experts: int
    moe_ep: int
    quant: str
    distribution: str
    attn_dp: int
    phase: str
    slots: int | None = None
    kernel: str | None = None
    gated: bool = True
    eplb: bool = False

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError

    def weight_bytes(self) -> float:
        return self.scale * expert_weight_bytes(
            self.hidden, self.inter, self.experts, self.quant, self.gated, self.moe_ep
        )
