"""Operators without a table: bytes over memory bandwidth (spec/02 section 6)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points
from perfcast_engine.ops.base import Split, TokenOp, memory_bound
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class _MemoryBound(TokenOp):
    @abstractmethod
    def moved_bytes(self, at: Points) -> F64:
        """Bytes read and written."""

    def sol(self, db: Database, at: Points) -> Split:
        return Split.memory(db.system.memory_sol_ms(self.moved_bytes(at)))

    def price(self, db: Database, at: Points) -> Answer:
        return memory_bound(db, self.moved_bytes(at))


@dataclass(frozen=True, kw_only=True)
class Elementwise(_MemoryBound):
    """Norms, activations, residuals: ``bytes_per_token`` read and written for each token."""

    bytes_per_token: float

    def moved_bytes(self, at: Points) -> F64:
        return self.tokens(at) * self.bytes_per_token


@dataclass(frozen=True, kw_only=True)
class Embedding(_MemoryBound):
    """Gather of one row of ``dim`` elements for each token from a resident table of ``rows``."""

    rows: int
    dim: int
    quant: str = "bfloat16"

    def weight_bytes(self) -> float:
        return self.rows * self.dim * quant.GEMM[self.quant].bytes * self.scale

    def moved_bytes(self, at: Points) -> F64:
        return self.tokens(at) * self.dim * quant.GEMM[self.quant].bytes
