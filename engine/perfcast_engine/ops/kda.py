"""Kimi delta attention kernels (spec/04 section 7.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class Kda(Op):
    """One kernel of a Kimi delta attention layer. Heads are per GPU; draft_tokens: verified per request in one pass
    of phase "verify" (accepted and drafted)."""

    kernel: str
    phase: Literal["context", "generation", "verify"]
    d_model: int
    d_conv: int
    num_k_heads: int
    head_k_dim: int
    num_v_heads: int
    head_v_dim: int
    draft_tokens: int = 0

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
