"""Operators without a table: bytes over memory bandwidth (spec/02 section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points
from perfcast_engine.ops.base import Op, Split, memory_bound, require, split_tokens
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class Elementwise(Op):
    """Norms, activations, residuals: ``bytes_per_token`` read and written for each token."""

    bytes_per_token: float
    token_div: int = 1
    seq_split: int = 1

    def __post_init__(self) -> None:
        require(self, bytes_per_token=0, token_div=0, seq_split=0)

    def _bytes(self, at: Points) -> F64:
        return split_tokens(at.x, self.token_div, self.seq_split) * self.bytes_per_token

    def sol(self, db: Database, at: Points) -> Split:
        return Split.memory(db.system.memory_sol_ms(self._bytes(at)))

    def price(self, db: Database, at: Points) -> Answer:
        return memory_bound(db, self._bytes(at))


@dataclass(frozen=True, kw_only=True)
class Embedding(Op):
    """Gather of one row of ``dim`` elements for each token from a resident table of ``rows``."""

    rows: int
    dim: int
    quant: str = "bfloat16"
    seq_split: int = 1

    def __post_init__(self) -> None:
        require(self, rows=0, dim=0, seq_split=0)
        quant.mode(quant.GEMM, self.quant, "quant")

    def weight_bytes(self) -> float:
        return self.rows * self.dim * quant.GEMM[self.quant].bytes * self.scale

    def _bytes(self, at: Points) -> F64:
        return split_tokens(at.x, 1, self.seq_split) * self.dim * quant.GEMM[self.quant].bytes

    def sol(self, db: Database, at: Points) -> Split:
        return Split.memory(db.system.memory_sol_ms(self._bytes(at)))

    def price(self, db: Database, at: Points) -> Answer:
        return memory_bound(db, self._bytes(at))
