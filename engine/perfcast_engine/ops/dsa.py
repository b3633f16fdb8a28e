"""DeepSeek sparse attention: the whole attention block of a layer, measured as one unit (spec/04 section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from perfcast_engine import quant
from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import require
from perfcast_engine.ops.sparse import SparseModule
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, slots=True)
class DsaShape:
    """Structural constants of an architecture; counts of elements."""

    hidden: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    index_topk: int
    index_head_dim: int
    index_heads: int


SHAPES: Mapping[str, DsaShape] = MappingProxyType(
    {
        "DeepseekV32ForCausalLM": DsaShape(7168, 1536, 512, 128, 64, 128, 2048, 128, 64),
        "GlmMoeDsaForCausalLM": DsaShape(6144, 2048, 512, 192, 64, 256, 2048, 128, 32),
    }
)


def dsa_shape(architecture: str) -> DsaShape:
    """Constants of ``architecture``; those of DeepSeek-V3.2 for one that is not listed."""
    return SHAPES.get(architecture, SHAPES["DeepseekV32ForCausalLM"])


@dataclass(frozen=True, kw_only=True)
class _Dsa(SparseModule):
    """What both phases share. heads: per GPU; full_fraction: share of the layers that compute their own top-k index;
    projection_quants: (q, kv, o, indexer) modes of the resident weights, ``gemm_quant`` for all when None."""

    architecture: str
    index_topk: int = 2048
    full_fraction: float = 1.0
    projection_quants: tuple[str, str, str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, index_topk=1)

    def weight_bytes(self) -> float:
        m, n = dsa_shape(self.architecture), self.heads
        modes = self.projection_quants or (self.gemm_quant,) * 4
        q, kv, o, indexer = (quant.mode(quant.GEMM, mode, "projection_quants").bytes for mode in modes)
        return self.scale * (
            (m.hidden * m.q_lora_rank + m.q_lora_rank * n * (m.nope_head_dim + m.rope_head_dim)) * q
            + (m.hidden * (m.kv_lora_rank + m.rope_head_dim) + m.kv_lora_rank * n * (m.nope_head_dim + m.v_head_dim))
            * kv
            + n * m.v_head_dim * m.hidden * o
            + (m.q_lora_rank * m.index_head_dim * m.index_heads + m.hidden * m.index_heads) * indexer
        )


@dataclass(frozen=True, kw_only=True)
class DsaContext(_Dsa):
    """Prefill. cp: context-parallel ranks that share the new tokens."""

    cp: int = 1

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DsaGeneration(_Dsa):
    """Decode; its rows are those of ``fmha_quant`` bfloat16."""

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
