"""MiniMax sparse attention (spec/04 section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.sparse import SparseModule
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class _Msa(SparseModule):
    """What both phases share. heads and kv_heads: per GPU; index_topk and block_size: tokens. Without rows of its own
    the utilisation of the DSA module of ``donor_architecture``, times ``donor_scale``, stands in. Its weights are not
    counted, as in the reference."""

    kv_heads: int
    hidden: int
    head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    block_size: int
    donor_architecture: str
    donor_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MsaContext(_Msa):
    """Prefill."""

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MsaGeneration(_Msa):
    """Decode."""

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
