"""Bidirectional attention of a vision encoder (spec/02 section 5.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfcast_engine.answer import Answer, Points
from perfcast_engine.errors import InvalidField
from perfcast_engine.ops.base import Op, Reads, require
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class EncoderAttention(Op):
    """Full attention of s patches in each of batch images. ``partial_rotary``: share of a head that is rotated."""

    heads: int
    head_dim: int
    fmha_quant: str = "bfloat16"
    partial_rotary: float = 0.0

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def __post_init__(self) -> None:
        require(self, heads=1, head_dim=1)
        if self.fmha_quant != "bfloat16":
            raise InvalidField("fmha_quant", f"encoder attention knows bfloat16 only, not {self.fmha_quant!r}")

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
