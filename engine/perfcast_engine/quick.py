"""Steps from the surface of an engine as it stands: token tables as far as they are filled in, operators as terms.

A never-seen step costs a microsecond or two this way, and many at once a few hundredths each. NaN means "ask the
operators": outside of the measurements, where counts are not filled in yet, and where data miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from perfcast_surface.arrays import Ints
from perfcast_surface.bands import banded
from perfcast_surface.mixed import StepRules
from perfcast_surface.surface import PhaseSurface, StepSurface, Table, sum_of_one
from perfcast_surface.terms import One, Summand, Term

from perfcast_engine.answer import F64, Points, Source
from perfcast_engine.errors import EngineError
from perfcast_engine.ops.base import Op
from perfcast_engine.origin import Summed
from perfcast_engine.phase import Phase
from perfcast_engine.step_result import StepResult
from perfcast_engine.tables.database import Database
from perfcast_engine.token_table import TokenTable

Ask = Callable[..., Any]  # an unbound method of StepSurface
TABLES = ("tokens", "logits", "requests")


@dataclass(frozen=True, eq=False)
class ShortCut:
    """One operator as a summand: its terms, what answers single points and many where they do not, and the source of
    the terms and of single points."""

    terms: tuple[Term, ...]
    outside: One
    beyond: Callable[[Points], F64]
    source: Source

    def at(self, batch: Ints, s: Ints, prefix: Ints) -> F64:
        ms: F64 = sum((term.at(batch, s, prefix) for term in self.terms), np.zeros(1))
        gone = np.isnan(ms)
        if gone.any():
            b, n, p = ((column + np.zeros(len(ms)))[gone] for column in (batch, s, prefix))
            ms[gone] = self.beyond(Points(b, n, p, b * n, np.ones(len(b))))
        return ms

    @cached_property
    def one(self) -> One:
        inside, outside = sum_of_one([term.one for term in self.terms]), self.outside

        def one(batch: int, s: int, prefix: int) -> float:
            ms = inside(batch, s, prefix)
            return ms if ms == ms else outside(batch, s, prefix)

        return one


def short_cuts(ops: Sequence[Op], db: Database) -> tuple[ShortCut, ...] | None:
    """The short cuts of ``ops``; None where one of them has none."""
    found = []
    for op in ops:
        try:
            terms = op.terms(db)
        except EngineError:  # which ``evaluate`` words, or answers by an estimate
            return None
        if terms is None:
            return None
        found.append(ShortCut(terms, op.outside(db), partial(op.beyond, db), op.terms_source(db)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Summands:
    """One operator list: its tables and its short cuts."""

    tables: tuple[TokenTable, ...]
    attention: tuple[ShortCut, ...]
    others: tuple[ShortCut, ...]

    @classmethod
    def of(cls, phase: Phase) -> _Summands | None:
        attention, others = short_cuts(phase.attention, phase.db), short_cuts(phase.others, phase.db)
        tables = tuple(table for name in TABLES if isinstance(table := getattr(phase, name), TokenTable))
        if attention is None or others is None or len(tables) < len(TABLES):
            return None
        return cls(tables, attention, others)

    def surface(
        self, table: Callable[[TokenTable], Table], share: Callable[[ShortCut], Sequence[Summand]]
    ) -> PhaseSurface:
        """What ``table`` takes of each table, and the summands that are the ``share`` of each short cut."""
        tokens, logits, requests = (table(own) if own.ops else None for own in self.tables)
        attention, others = (tuple(s for cut in cuts for s in share(cut)) for cuts in (self.attention, self.others))
        return PhaseSurface(tokens, logits, requests, attention, others)


class QuickSteps:
    """near: steps inside of the measurements; far: those beyond them too, of which nothing but the latency is told."""

    def __init__(self, context: _Summands, generation: _Summands, rules: StepRules) -> None:
        def surface(*what: Any) -> StepSurface:
            return StepSurface(context.surface(*what), generation.surface(*what), rules)

        def of(source: Source) -> StepSurface:
            return surface(lambda table: table.by_source[source], lambda cut: (cut,) if cut.source is source else ())

        self.near = surface(lambda table: table, lambda cut: cut.terms)
        self.far = surface(lambda table: table, lambda cut: (cut,))
        self._by_source = [of(source) for source in Source]
        self._tables = context.tables + generation.tables
        cuts = context.attention + context.others + generation.attention + generation.others
        self._sources = frozenset[int](cut.source for cut in cuts)
        self._cuts = [sum(cut.source is source for cut in cuts) for source in Source]
        planes = (plane for cut in cuts for term in cut.terms for plane in term.planes())
        self._is_plain = all(plane.power is None for plane in planes)

    @classmethod
    def of(cls, context: Phase, generation: Phase, rules: StepRules) -> QuickSteps | None:
        """None where an operator has no short cut, or where an engine is not asked often enough to keep tables."""
        prefill, decode = _Summands.of(context), _Summands.of(generation)
        return None if prefill is None or decode is None else cls(prefill, decode, rules)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing to say about an answer but its latency and its sources."""
        return self._is_plain and all(table.is_plain for table in self._tables)

    def step(self, ask: Callable[[StepSurface], float]) -> QuickStep | None:
        """One point; None where the operators have to be asked."""
        ms = ask(self.near)
        if ms != ms:
            ms = ask(self.far)
        return QuickStep(ms, self, ask) if ms == ms else None

    def result(self, ms: F64, ask: Ask, counts: Sequence[Ints]) -> StepResult:
        """Steps of which ``near`` answers ``ms`` (N,) to ``ask``."""
        n = len(ms)
        origin = Summed((QuickOrigin(self, ms, ask, counts),), n)
        return StepResult(ms, origin, np.zeros(n, np.uint8), np.zeros(n))

    def by_source(self, ask: Callable[[StepSurface], Any], whole: Any) -> list[Any]:
        """``whole``, which ``ask`` answers, split by Source; the one with most short cuts is what the others leave."""
        sources, parts = self.sources, [0.0 * whole] * len(self._by_source)
        largest = max(sources, key=self._cuts.__getitem__, default=0)
        for source in sources - {largest}:
            parts[source] = ask(self._by_source[source])
        rest = whole - sum(parts)
        parts[largest] = rest * (rest > 0)
        return parts

    @property
    def sources(self) -> frozenset[int]:
        """Those that take part in any step so far."""
        return self._sources.union(*(table.sources for table in self._tables))


class QuickStep:
    """One step; where its latency comes from is worked out when it is asked for."""

    __slots__ = ("_ask", "_steps", "ms")

    def __init__(self, ms: float, steps: QuickSteps, ask: Callable[[StepSurface], float]) -> None:
        self.ms, self._steps, self._ask = ms, steps, ask

    @property
    def by_source(self) -> list[float]:
        """ms per Source."""
        return self._steps.by_source(self._ask, self.ms)


@dataclass(frozen=True, slots=True)
class QuickOrigin:
    """Of steps that ``near`` knows."""

    steps: QuickSteps
    ms: F64
    ask: Ask
    columns: Sequence[Ints]

    def rows(self) -> F64:
        def asked(surface: StepSurface) -> F64:
            return banded(partial(self.ask, surface), self.columns, len(self.ms))

        return np.stack(self.steps.by_source(asked, self.ms), axis=1)

    def total(self, weights: F64) -> F64:
        total: F64 = weights @ self.rows()
        return total
