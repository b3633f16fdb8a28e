"""MiniMax sparse attention (spec/04 section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.quant import QuantMode
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class _Msa(Op):
    """What both phases share. heads and kv_heads: per GPU; index_topk and block_size: tokens. Without rows of its own
    the utilisation of the DSA module of ``donor_architecture``, times ``donor_scale``, stands in. Its weights are not
    counted, as in the reference."""

    heads: int
    kv_heads: int
    hidden: int
    head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    block_size: int
    kv_quant: QuantMode
    fmha_quant: QuantMode
    gemm_quant: QuantMode
    donor_architecture: str
    donor_scale: float = 1.0

    reads: ClassVar[Reads] = Reads.SEQUENCE


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
