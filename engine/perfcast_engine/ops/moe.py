"""Fused mixture-of-experts FFN of one rank (spec/03 section 3)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op
from perfcast_engine.quant import MOE
from perfcast_engine.tables.database import Database


def expert_weight_bytes(hidden: int, inter: int, experts: int, quant: str, gated: bool, ep: int, tp: int = 1) -> float:
    """Resident expert weights of one rank, floored after each split as the reference does."""
    return (hidden * inter * experts * MOE[quant].bytes * (3 if gated else 2)) // max(ep, 1) // max(tp, 1)


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

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError

    def weight_bytes(self) -> float:
        return self.scale * expert_weight_bytes(
            self.hidden, self.inter, self.experts, self.quant, self.gated, self.moe_ep, self.moe_tp
        )
