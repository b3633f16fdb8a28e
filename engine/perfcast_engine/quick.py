"""Steps one at a time, without arrays: the same tables and slices, read as numbers.

A never-seen step costs a few microseconds this way, where a numpy call on one point costs that much by itself. NaN
means "ask the arrays": outside of the measurements, in modes without a short cut, and where data miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perfcast_surface.terms import Term

from perfcast_engine.answer import Source
from perfcast_engine.errors import EngineError
from perfcast_engine.ops.base import Op, Quick
from perfcast_engine.tables.database import Database
from perfcast_engine.token_table import CountTable


class ShortCut(NamedTuple):
    """One operator: its terms, what answers where they do not, and the source of both."""

    read: Quick
    outside: Quick
    source: Source


Terms = tuple[ShortCut, ...]


class QuickStep:
    """One step, summed up in place; where its latency comes from is worked out when it is asked for."""

    __slots__ = ("_counts", "_terms", "ms")

    def __init__(self) -> None:
        self.ms = 0.0
        self._counts: list[tuple[CountTable, int]] = []
        self._terms: list[tuple[Source, float]] = []

    def add(self, table: CountTable, count: int) -> None:
        self.ms += table.one(count)
        self._counts.append((table, count))

    def add_terms(self, terms: Terms, batch: float, s: float, prefix: float, weight: float = 1.0) -> None:
        for read, outside, source in terms:
            ms = read(batch, s, prefix)
            if ms != ms:
                ms = outside(batch, s, prefix)
            ms *= weight
            self.ms += ms
            self._terms.append((source, ms))

    @property
    def by_source(self) -> list[float]:
        """ms per Source."""
        shares = [0.0] * len(Source)
        for table, count in self._counts:
            for source, ms in enumerate(table.shares(count)):
                shares[source] += ms
        for source, ms in self._terms:
            shares[source] += ms
        return shares


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
        step = QuickStep()
        step.add(self.tokens, x)
        if self.logits.ops:
            step.add(self.logits, logits_x)
        if self.requests.ops:
            step.add(self.requests, batch)
        if self.others:
            step.add_terms(self.others, batch, s, prefix)
        return step


def quick_terms(ops: Sequence[Op], db: Database) -> Terms | None:
    """The short cuts of ``ops``; None where one of them has none."""
    found = []
    for op in ops:
        try:
            terms = op.terms(db)
        except EngineError:  # which ``evaluate`` words, or answers by an estimate
            return None
        if terms is None:
            return None
        found.append(ShortCut(_summed(terms), op.outside(db), op.terms_source(db)))
    return tuple(found)


def _summed(terms: Sequence[Term]) -> Quick:
    reads = [term.one for term in terms]
    return reads[0] if len(reads) == 1 else lambda *at: sum(read(*at) for read in reads)
