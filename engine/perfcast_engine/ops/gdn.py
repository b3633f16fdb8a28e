"""Gated delta net kernels (spec/04 section 7.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class Gdn(Op):
    """One kernel of a gated delta net layer. Heads are per GPU; ssm_dtype: of the recurrent state."""

    kernel: str
    phase: Literal["context", "generation"]
    d_model: int
    d_conv: int
    num_k_heads: int
    head_k_dim: int
    num_v_heads: int
    head_v_dim: int
    ssm_dtype: str = "float32"

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
