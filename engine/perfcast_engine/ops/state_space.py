"""What the kernels of state-space and linear attention share (spec/04 section 7).

The reference never misses here: without a measurement a kernel costs its memory roofline, in every mode, and with one
it costs the measurement, even in SOL mode. ``Answer.source`` tells which.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import numpy as np

from perfcast_engine.answer import F64, Answer, Points, Source
from perfcast_engine.interp.grid import Grid
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key, Table


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
    def moved_bytes(self, kernel: str, batch: F64, s: F64, tokens: F64) -> F64:
        """Bytes read and written."""

    def serving_kernel(self, db: Database) -> str | None:
        """The kernel whose rows answer; None for none, which is the roofline."""
        return self.kernel

    def extent(self, at: Points) -> tuple[F64, F64]:
        """Sequences and new tokens each of them, as the kernel counts them."""
        return at.batch, at.s if self.lengthy else np.zeros(len(at))

    @property
    def lengthy(self) -> bool:
        return self.phase != "generation"

    def price(self, db: Database, at: Points) -> Answer:
        return self.price_as(db, at, self.kernel, self.serving_kernel(db))

    def price_as(self, db: Database, at: Points, kernel: str, rows_of: str | None) -> Answer:
        """Priced with the roofline of ``kernel`` and, where they answer, the rows of ``rows_of``."""
        batch, s = self.extent(at)
        answer = Answer.of(self._roofline(db, kernel, batch, s), Source.SOL)
        surface = None if rows_of is None else self._surface(db, kernel, rows_of)
        if surface is None:
            return answer
        resolved = surface.at(batch, s) if self.lengthy else surface.at(batch)
        known = ~np.isnan(resolved.ms) & (s > 0 if self.lengthy else True)
        answer.ms[known] = resolved.ms[known]
        answer.source[known] = Source.SILICON
        if resolved.energy is not None:
            answer.energy[known] = resolved.energy[known]
        return answer

    def _roofline(self, db: Database, kernel: str, batch: F64, s: F64) -> F64:
        tokens = np.where(s > 0, batch * s, batch)
        return db.system.memory_sol_ms(self.moved_bytes(kernel, batch, s, tokens))

    def _surface(self, db: Database, kernel: str, rows_of: str) -> Surface | None:
        def build() -> Surface | None:
            table = db.find(self.table)
            key = None if table is None else self.key(table, rows_of)
            grid = None if table is None or key is None else table.grid(*key)
            if grid is None:
                return None
            if self.lengthy:
                return Surface(grid, lambda batch, s: self._roofline(db, kernel, batch, s))
            curve = Grid.of(grid.coords[:1], grid.ms, grid.power)
            return Surface(curve, lambda batch: self._roofline(db, kernel, batch, np.zeros(len(batch))))

        return db.kept((self.table, kernel, rows_of, self._shapes), build)

    @cached_property
    def _shapes(self) -> tuple[Hashable, ...]:
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in ("name", "scale", "role"))
