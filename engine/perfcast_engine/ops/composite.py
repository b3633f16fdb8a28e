"""Operators made of operators (spec/02 section 6.3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from perfcast_surface.terms import One, Term

from perfcast_engine.answer import F64, Answer, Points, Source, or_else
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.ops.base import Op, Reads, Split
from perfcast_engine.tables.database import Database, Mode


@dataclass(frozen=True, kw_only=True)
class Overlap(Op):
    """Two groups that run at the same time on two streams: the longer one counts, both use energy."""

    a: tuple[Op, ...]
    b: tuple[Op, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", _reads(self.a + self.b))

    def weight_bytes(self) -> float:
        return sum(op.weight_bytes() for op in self.a + self.b)

    def price(self, db: Database, at: Points) -> Answer:
        a, b = _sum(self.a, db, at), _sum(self.b, db, at)
        return replace(a + b, ms=np.maximum(a.ms, b.ms))


@dataclass(frozen=True, kw_only=True)
class Fallback(Op):
    """One measured whole, or the sum of its parts where the whole has no data."""

    primary: Op
    fallback: tuple[Op, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", _reads((self.primary, *self.fallback)))

    def weight_bytes(self) -> float:
        return self.primary.weight_bytes() or sum(op.weight_bytes() for op in self.fallback)

    def sol(self, db: Database, at: Points) -> Split:
        """Of the primary, which a roofline always answers."""
        return self.primary.sol_split(db, at)

    def price(self, db: Database, at: Points) -> Answer:
        whole = self._measured(db)
        return or_else(
            lambda p: self.primary.evaluate(whole, p), lambda p: _sum(self.fallback, db, p), at, PerfDataMissing
        )

    def _measured(self, db: Database) -> Database:
        """What answers for the whole: measured parts win over an estimated whole."""
        return db.in_mode(Mode.SILICON) if db.mode is Mode.HYBRID else db

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        """The measured whole; none where it is estimated."""
        terms = self.primary.terms(self._measured(db))
        return terms and tuple(replace(term, scale=term.scale * self.scale) for term in terms)  # type: ignore[type-var]

    def outside(self, db: Database) -> One:
        """The measured whole alone: its parts depend on the tokens of the pass too."""
        whole, scale = self.primary.outside(self._measured(db)), self.scale
        return lambda *at: whole(*at) * scale

    def beyond(self, db: Database, at: Points) -> F64:
        return self.primary.beyond(self._measured(db), at) * self.scale


def _sum(ops: Iterable[Op], db: Database, at: Points) -> Answer:
    return sum((op.evaluate(db, at) for op in ops), Answer.zero(len(at), Source.EMPIRICAL))


def _reads(ops: tuple[Op, ...]) -> Reads:
    """What a group depends on: what all its members read, or everything where they differ."""
    kinds = {op.reads for op in ops}
    return kinds.pop() if len(kinds) == 1 else Reads.SEQUENCE if kinds else Reads.TOKENS
