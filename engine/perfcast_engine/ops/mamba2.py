"""Mamba2 kernels (spec/04 section 7.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class Mamba2(Op):
    """One kernel of a Mamba2 layer. Sizes are those of the model, not divided by tensor parallelism."""

    kernel: str
    phase: Literal["context", "generation"]
    d_model: int
    d_state: int
    d_conv: int
    nheads: int
    head_dim: int
    n_groups: int
    chunk_size: int

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
