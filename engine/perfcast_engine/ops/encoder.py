"""Bidirectional attention of a vision encoder (spec/02 section 5.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points
from perfcast_engine.errors import InvalidField
from perfcast_engine.ops.base import (
    Op,
    Reads,
    Split,
    by_mode,
    estimated,
    find_slice,
    measured,
    memory_bound,
    require,
    slice_of,
)
from perfcast_engine.tables.database import Database

ROTARY_OVERHEAD = 1.1


@dataclass(frozen=True, kw_only=True)
class EncoderAttention(Op):
    """Full attention of s patches in each of batch images. ``partial_rotary``: share of a head that is rotated."""

    heads: int
    head_dim: int
    fmha_quant: str = "bfloat16"
    partial_rotary: float = 0.0

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def __post_init__(self) -> None:
        require(self, heads=1, head_dim=1, partial_rotary=0)
        if self.fmha_quant != "bfloat16":
            raise InvalidField("fmha_quant", f"encoder attention knows bfloat16 only, not {self.fmha_quant!r}")

    def _kernel(self, db: Database, n: F64 | float, s: F64, b: F64) -> Split:
        flops = 4 * b * s * s * n * self.head_dim
        moved = 2 * b * (4 * n * s * self.head_dim)
        rate = db.system.rate(quant.FMHA[self.fmha_quant])
        return Split.of(flops / rate * 1000, db.system.memory_sol_ms(moved))

    def _rotary_bytes(self, at: Points) -> F64:
        return 4.0 * self.heads * self.head_dim * at.batch * at.s

    def sol(self, db: Database, at: Points) -> Split:
        kernel = self._kernel(db, self.heads, at.s, at.batch)
        rotary = Split.memory(db.system.memory_sol_ms(self._rotary_bytes(at)))
        return kernel.plus(rotary.scaled(ROTARY_OVERHEAD * 2 * self.partial_rotary))

    def price(self, db: Database, at: Points) -> Answer:
        db.system.rate(quant.FMHA[self.fmha_quant])
        key = (self.fmha_quant, self.head_dim)

        def query(part: Points) -> tuple[float, F64, F64]:
            return float(self.heads), part.s, part.batch

        def roofline(n: F64 | float, s: F64, b: F64) -> F64:
            return self._kernel(db, n, s, b).time

        def silicon(part: Points) -> Answer:
            surface = slice_of(db, "encoder_attention", key, roofline, sqrt_axis=1)
            return measured(surface, query(part), self.name, ("num_heads", "isl", "batch_size"))

        def empirical(part: Points) -> Answer:
            surface = find_slice(db, "encoder_attention", key, roofline, sqrt_axis=1)
            return estimated(None if surface is None else surface.util, query(part), sol(part), self.name)

        def sol(part: Points) -> F64:
            return roofline(*query(part))

        answer = by_mode(db, at, silicon=silicon, empirical=empirical, sol=sol)
        if self.partial_rotary == 0:
            return answer
        rotary = memory_bound(db, self._rotary_bytes(at))
        return answer + rotary.scaled(ROTARY_OVERHEAD * 2 * self.partial_rotary)
