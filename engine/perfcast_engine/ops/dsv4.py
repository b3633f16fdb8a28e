"""DeepSeek-V4 attention, compressed with a learned index (CSA) or heavily compressed (HCA) (spec/04 section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfcast_engine import quant
from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.sparse import SparseModule
from perfcast_engine.tables.database import Database

COMPRESSION = {"csa": 4, "hca": 128}  # tokens that share one cache entry


@dataclass(frozen=True, kw_only=True)
class _Dsv4(SparseModule):
    """What both phases share. heads and o_groups: per GPU; native_heads: of the model; window: tokens."""

    kind: Literal["csa", "hca"]
    native_heads: int
    tp: int
    architecture: str
    hidden: int
    q_lora_rank: int
    o_lora_rank: int
    head_dim: int
    rope_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    window: int
    o_groups: int

    def weight_bytes(self) -> float:
        h, q, n, d = self.hidden, self.q_lora_rank, self.heads, self.head_dim
        ratio, learned = COMPRESSION[self.kind], self.kind == "csa"
        compressor = (2 if learned else 1) * d
        gemm = h * q + q * n * d + h * d + self.o_groups * self.o_lora_rank * h + 2 * h * compressor
        half = n * d * self.o_lora_rank
        full = n + ratio * compressor
        if learned:
            gemm += q * self.index_heads * self.index_head_dim + 4 * h * self.index_head_dim
            half += h * self.index_heads
            full += 2 * ratio * self.index_head_dim
        return self.scale * (gemm * quant.GEMM[self.gemm_quant].bytes + half * 2 + full * 4)


@dataclass(frozen=True, kw_only=True)
class Dsv4Context(_Dsv4):
    """Prefill. cp: context-parallel ranks that share the new tokens."""

    cp: int = 1

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Dsv4Generation(_Dsv4):
    """Decode; the attention rate follows the cache, not ``fmha_quant``."""

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
