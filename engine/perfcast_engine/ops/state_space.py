"""What the kernels of state-space and linear attention share (spec/04 section 7).

The reference never misses here: without a measurement a kernel costs its memory roofline, in every mode, and with one
it costs the measurement, even in SOL mode. ``Answer.source`` tells which.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
from perfcast_surface.terms import CHUNK, State, Term, Traffic

from perfcast_engine.answer import F64, Answer, Points, Source
from perfcast_engine.interp.grid import Grid
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key, Table

Number = TypeVar("Number", F64, float)


class Route(NamedTuple):
    """What prices a kernel: the kernel whose traffic it has, and the one whose rows answer (None: the roofline)."""

    kernel: str
    rows_of: str | None


@dataclass(frozen=True, kw_only=True)
class StateKernel(Op):
    """One kernel of a layer. ``phase`` names the pass; only "generation" has no length axis."""

    kernel: str
    phase: str

    table: ClassVar[str]
    reads: ClassVar[Reads] = Reads.SEQUENCE

    @abstractmethod
    def key(self, table: Table, kernel: str) -> tuple[Key, ...] | None:
        """The table key of the rows that serve ``kernel``; None where none do."""

    @abstractmethod
    def moved_bytes(self, kernel: str, batch: Number, s: Number, tokens: Number) -> Number:
        """Bytes read and written."""

    def route(self, db: Database) -> Route | None:
        """What prices this kernel; None where another one does it along and it costs nothing."""
        return Route(self.kernel, self.kernel)

    def extent(self, batch: Number, s: Number) -> tuple[Number, Number]:
        """Sequences and new tokens each of them, as the kernel counts them."""
        return batch, s if self.lengthy else s * 0.0

    @property
    def requests_of(self) -> int:
        """Tokens that make one request of the batch, where ``extent`` counts so; else 0."""
        return 0

    @property
    def lengthy(self) -> bool:
        return self.phase != "generation"

    def price(self, db: Database, at: Points) -> Answer:
        route = self.route(db)
        if route is None:
            return Answer.zero(len(at))
        batch, s = self.extent(at.batch, at.s)
        answer = Answer.of(self._roofline(db, route.kernel, batch, s), Source.SOL)
        surface = self._surface(db, route)
        if surface is None:
            return answer
        resolved = surface.at(batch, s) if self.lengthy else surface.at(batch)
        known = ~np.isnan(resolved.ms) & (s > 0 if self.lengthy else True)
        answer.ms[known] = resolved.ms[known]
        answer.source[known] = Source.SILICON
        if resolved.energy is not None:
            answer.energy[known] = resolved.energy[known]
        return answer

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        route = self.route(db)
        if route is None:
            return ()
        surface = self._surface(db, route)
        if surface is None:
            return (self._traffic(db, route.kernel),)
        blend = surface.blend()
        return None if blend is None else (State(blend, self.scale, self.requests_of),)

    def _traffic(self, db: Database, kernel: str) -> Traffic:
        """``moved_bytes``, which is linear in tokens, requests and chunks, by its slopes."""

        def ms(batch: float, s: float, tokens: float) -> float:
            return db.system.memory_sol_ms(self.moved_bytes(kernel, batch, s, tokens))

        per_request = ms(1.0, 0.0, 0.0)
        per_chunk = ms(1.0, float(CHUNK), 0.0) - per_request
        return Traffic(self.scale, ms(0.0, 0.0, 1.0), per_request, per_chunk, self.lengthy, self.requests_of)

    def terms_source(self, db: Database) -> Source:
        route = self.route(db)
        return Source.SOL if route is not None and self._surface(db, route) is None else Source.SILICON

    def _roofline(self, db: Database, kernel: str, batch: F64, s: F64) -> F64:
        return db.system.memory_sol_ms(self.moved_bytes(kernel, batch, s, np.where(s > 0, batch * s, batch)))

    def _surface(self, db: Database, route: Route) -> Surface | None:
        def build() -> Surface | None:
            table = db.find(self.table)
            key = None if table is None or route.rows_of is None else self.key(table, route.rows_of)
            grid = None if table is None or key is None else table.grid(*key)
            if grid is None:
                return None
            if self.lengthy:
                return Surface(grid, lambda batch, s: self._roofline(db, route.kernel, batch, s))
            curve = Grid.of(grid.coords[:1], grid.ms, grid.power)
            return Surface(curve, lambda batch: self._roofline(db, route.kernel, batch, batch * 0.0))

        return db.kept((self.table, route, self._shapes), build)

    @cached_property
    def _shapes(self) -> tuple[Hashable, ...]:
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in ("name", "scale", "role"))
