"""Token exchange before and after a fused expert FFN, composed of collectives (spec/03 section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class MoeDispatch(Op):
    """One exchange; ``pre`` before the experts. ``sms`` and ``token_div`` are carried and priced by nothing."""

    hidden: int
    topk: int
    experts: int
    moe_tp: int
    moe_ep: int
    attn_dp: int
    pre: bool
    backend: str
    flavor: str
    quant: str
    is_context: bool = True
    attn_cp: int = 1
    sms: int = 12
    token_div: int = 1
    attn_ar_modeled: bool = False

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
