"""Hyper-connections around the attention and FFN sites of a layer (spec/04 section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op
from perfcast_engine.quant import GEMM
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class Mhc(Op):
    """One operator covers both sites of a layer. half: before the sites, after them, or both; hc_mult: residual
    streams; seq_split: context-parallel ranks."""

    half: Literal["pre", "post", "both"]
    hc_mult: int
    hidden: int
    architecture: str
    sinkhorn_iters: int = 20
    quant: str = "bfloat16"
    seq_split: int = 1

    @property
    def _mixes(self) -> int:
        """Mixing coefficients of one token."""
        return (2 + self.hc_mult) * self.hc_mult

    def weight_bytes(self) -> float:
        m = self._mixes
        return self.scale * 2 * (m * self.hc_mult * self.hidden + m + 3) * GEMM[self.quant].bytes

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
