"""Multi-head latent attention: kernels, absorbed batched GEMM, whole module (spec/03 sections 8-10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class ContextMla(Op):
    """Prefill MLA kernel at ``heads`` as the table keys them; ``cp`` context-parallel ranks."""

    heads: int
    kv_quant: str
    fmha_quant: str
    cp: int = 1

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GenerationMla(Op):
    """Decode MLA kernel at ``heads`` as the table keys them."""

    heads: int
    kv_quant: str

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class MlaBmm(Op):
    """Absorbed batched GEMM before (``is_pre``) or after decode MLA, at rank-local ``heads``."""

    heads: int
    quant: str
    is_pre: bool

    reads: ClassVar[Reads] = Reads.BATCH

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ContextMlaModule(Op):
    """Prefill MLA block measured as one unit; ``native_heads`` of the unsharded model."""

    heads: int
    native_heads: int | None = None
    kv_quant: str
    fmha_quant: str
    gemm_quant: str

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GenerationMlaModule(Op):
    """Decode MLA block measured as one unit; ``fmha_quant`` is carried and priced by nothing."""

    heads: int
    native_heads: int | None = None
    kv_quant: str
    fmha_quant: str = "bfloat16"
    gemm_quant: str

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
