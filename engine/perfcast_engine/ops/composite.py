"""Operators made of operators (spec/02 section 6.3)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class Overlap(Op):
    """Two groups that run at the same time on two streams: the longer one counts, both use energy."""

    a: tuple[Op, ...]
    b: tuple[Op, ...]

    def weight_bytes(self) -> float:
        return sum(op.weight_bytes() for op in self.a + self.b)

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Fallback(Op):
    """One measured whole, or the sum of its parts where the whole has no data."""

    primary: Op
    fallback: tuple[Op, ...]

    def weight_bytes(self) -> float:
        return self.primary.weight_bytes() or sum(op.weight_bytes() for op in self.fallback)

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
