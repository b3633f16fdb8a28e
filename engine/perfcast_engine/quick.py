"""Steps one at a time, without arrays: the same tables and slices, read as numbers.

A never-seen step costs a few microseconds this way, where a numpy call on one point costs that much by itself. NaN
means "ask the arrays": outside of the measurements, in modes without a short cut, and where data miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfcast_engine.answer import F64, Source
from perfcast_engine.errors import EngineError
from perfcast_engine.ops.base import Op, Quick
from perfcast_engine.tables.database import Database
from perfcast_engine.token_table import CountTable

Terms = tuple[tuple[Quick, Source], ...]


@dataclass(slots=True)
class QuickStep:
    """One step. by_source: ms (5,) per Source. Adding is in place."""

    ms: float
    by_source: F64

    def add(self, table: CountTable, count: int) -> None:
        if table.ops:
            ms, shares = table.one(count)
            self.ms += ms
            self.by_source += shares

    def add_terms(self, terms: Terms, batch: float, s: float, prefix: float, weight: float = 1.0) -> None:
        for quick, source in terms:
            ms = quick(batch, s, prefix) * weight
            self.ms += ms
            self.by_source[source] += ms


@dataclass(frozen=True, slots=True)
class QuickPhase:
    """One operator list as tables over counts and short cuts over (batch, s, prefix)."""

    tokens: CountTable
    logits: CountTable
    requests: CountTable
    attention: Terms
    others: Terms

    def shared(self, batch: int, s: int, prefix: int, x: int, logits_x: int) -> QuickStep:
        """Everything but attention."""
        step = QuickStep(0.0, np.zeros(len(Source)))
        step.add(self.tokens, x)
        step.add(self.logits, logits_x)
        step.add(self.requests, batch)
        step.add_terms(self.others, batch, s, prefix)
        return step


def quick_terms(ops: Sequence[Op], db: Database) -> Terms | None:
    """The short cuts of ``ops``; None where one of them has none."""
    terms = []
    for op in ops:
        try:
            quick = op.quick(db)
        except EngineError:
            return None
        if quick is None:
            return None
        terms.append((quick, op.quick_source(db)))
    return tuple(terms)
