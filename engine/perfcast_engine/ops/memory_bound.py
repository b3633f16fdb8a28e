"""Operators without a table: bytes over memory bandwidth (spec/02 section 6)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine import quant
from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, require
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class Elementwise(Op):
    """Norms, activations, residuals: ``bytes_per_token`` read and written for each token."""

    bytes_per_token: float
    token_div: int = 1
    seq_split: int = 1

    def __post_init__(self) -> None:
        require(self, bytes_per_token=0, token_div=0, seq_split=0)

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


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

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
