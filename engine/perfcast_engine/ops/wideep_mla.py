"""MLA block of SGLang large expert parallelism (spec/03 section 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class WideEpContextMla(Op):
    """Prefill block; ``heads`` = 128 // tp; ``attn_backend`` names the kernel."""

    heads: int
    kv_quant: str
    fmha_quant: str
    attn_backend: str = "flashinfer"
    cp: int = 1

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class WideEpGenerationMla(Op):
    """Decode block; ``fmha_quant`` is carried and priced by nothing."""

    heads: int
    kv_quant: str
    fmha_quant: str
    attn_backend: str = "flashinfer"

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
