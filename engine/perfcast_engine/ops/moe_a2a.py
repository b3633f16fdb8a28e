"""One phase of a large-EP all-to-all (spec/03 section 5)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class MoeAllToAll(Op):
    """``phase`` (prepare, dispatch, combine) of the exchange that ``comm_backend`` makes between ``moe_ep`` ranks."""

    phase: str
    comm_backend: str
    comm_dtype: str = "default"
    hidden: int
    topk: int
    experts: int
    moe_ep: int
    nodes: int
    sms: int = 0
    attn_tp: int = 1

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
