"""Kernels of state-space and linear attention: Mamba2, gated delta net, Kimi delta attention (spec/04 section 7).

The reference never misses here: without a measurement a kernel costs its memory roofline, in every mode, and with one
it costs the measurement, even in SOL mode. ``Answer.source`` tells which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from perfcast_surface.terms import CHUNK, State, Term, Traffic

from perfcast_engine import data
from perfcast_engine.answer import F64, Answer, Points, Source
from perfcast_engine.formula import compiled, let, scope, value
from perfcast_engine.interp.grid import Grid, Sol
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key, Table

KERNELS = data.table("kernels")


class Bytes(NamedTuple):
    """What a kernel reads and writes for each token, request, and chunk of CHUNK tokens of a request."""

    token: float = 0.0
    request: float = 0.0
    chunk: float = 0.0


class Route(NamedTuple):
    """What prices a kernel: the kernel whose traffic it has, and the one whose rows answer (None: the roofline)."""

    kernel: str
    rows_of: str | None


@dataclass(frozen=True, kw_only=True)
class StateKernel(Op):
    """One kernel of a layer. ``phase`` names the pass (context, generation, of Kda also verify); only generation has no
    length axis. ``keyed_by``: the sizes of the layer, ``d_model`` first."""

    kernel: str
    phase: str
    d_model: int
    d_conv: int

    reads = Reads.SEQUENCE
    table: ClassVar[str]

    @property
    def draft(self) -> int:
        """Tokens that make one request of a batch that counts them all; 0 where it counts requests."""
        return 0

    @property
    def lengthy(self) -> bool:
        return self.phase != "generation"

    def route(self, db: Database) -> Route | None:
        """What prices this kernel; None where another one does it along and it costs nothing."""
        return Route(self.kernel, self.kernel)

    def stand_in(self, table: Table, rows: slice) -> int | None:
        """The one of ``rows`` of the same ``d_model`` that answers for a shape that was not measured."""
        return None

    def key(self, table: Table, kernel: str) -> tuple[Key, ...] | None:
        """The table key of the rows that serve ``kernel``; None where none do."""
        head = (kernel, self.phase)
        if table.rows(*head, *self.named_key) is not None:
            return *head, *self.named_key
        rows = table.rows(*head, self.d_model)
        row = None if rows is None else self.stand_in(table, rows)
        return None if row is None else (*head, *(int(c[row]) for c in table.columns[2 : 2 + len(self.named_key)]))

    def moved(self, kernel: str) -> Bytes:
        """The traffic of ``kernel``, from its formulas over the fields."""
        known = KERNELS["state_space"][self.table]
        names = let(known["sizes"], scope(**vars(self)))
        return Bytes(*(value(compiled(formula), names) for formula in known.get(kernel, known["others"])))

    def extent(self, at: Points) -> tuple[F64, F64]:
        """Sequences and new tokens each of them, as the kernel counts them."""
        if self.draft:
            return np.maximum(1.0, np.round(at.batch / self.draft)), np.full(len(at), float(self.draft))
        return at.batch, at.s if self.lengthy else np.zeros(len(at))

    def price(self, db: Database, at: Points) -> Answer:
        route = self.route(db)
        if route is None:
            return Answer.zero(len(at))
        batch, s = self.extent(at)
        answer = Answer.of(self._roofline(db.system, route.kernel)(batch, s), Source.SOL)
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
            token, request, chunk = map(db.system.memory_sol_ms, self.moved(route.kernel))
            return (Traffic(self.scale, token, request, chunk, self.lengthy, self.draft),)
        blend = surface.sheets().blend
        return None if blend is None else (State(blend, self.scale, self.draft),)

    def terms_source(self, db: Database) -> Source:
        route = self.route(db)
        return Source.SOL if route is not None and self._surface(db, route) is None else Source.SILICON

    def _roofline(self, system: SystemSpec, kernel: str) -> Sol:
        per = self.moved(kernel)

        def ms(batch: F64, s: F64 | float = 0.0) -> F64:
            tokens = np.where(s > 0, batch * s, batch)
            return system.memory_sol_ms(per.token * tokens + per.request * batch + per.chunk * (s // CHUNK) * batch)

        return ms

    def _surface(self, db: Database, route: Route) -> Surface | None:
        system = db.system

        def build() -> Surface | None:
            table = db.find(self.table)
            key = None if table is None or route.rows_of is None else self.key(table, route.rows_of)
            grid = None if table is None or key is None else table.grid(*key)
            if grid is not None and not self.lengthy:
                grid = Grid(grid.coords[:1], grid.ms, grid.power)
            return None if grid is None else Surface(grid, self._roofline(system, route.kernel))

        return db.kept((self.table, route, self.shape), build)


@dataclass(frozen=True, kw_only=True)
class Mamba2(StateKernel):
    """One kernel of a Mamba2 layer. Sizes are those of the model, not divided by tensor parallelism."""

    d_state: int
    nheads: int
    head_dim: int
    n_groups: int
    chunk_size: int

    table = "mamba2"
    keyed_by = ("d_model", "d_state", "d_conv", "nheads", "head_dim", "n_groups", "chunk_size")

    def route(self, db: Database) -> Route | None:
        return Route(self.kernel, self.kernel if self.lengthy else None)

    def stand_in(self, table: Table, rows: slice) -> int:
        """The first."""
        return int(rows.start)


@dataclass(frozen=True, kw_only=True)
class _DeltaNet(StateKernel):
    """Heads are per GPU."""

    num_k_heads: int
    head_k_dim: int
    num_v_heads: int
    head_v_dim: int

    keyed_by = ("d_model", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "d_conv")


FULL_STATE = "float32"  # of the measured recurrent kernels


def _row(rows: Sequence[Mapping[str, Any]], **known: str) -> Mapping[str, Any]:
    """The first of ``rows`` that contradicts nothing known; empty where all do."""
    return next((row for row in rows if all(row.get(name, value) == value for name, value in known.items())), {})


@dataclass(frozen=True, kw_only=True)
class Gdn(_DeltaNet):
    """One kernel of a gated delta net layer. ssm_dtype: of the recurrent state."""

    ssm_dtype: str = FULL_STATE

    table = "gdn"

    def route(self, db: Database) -> Route | None:
        return Route(self.kernel, self._rows_of(db))

    def _rows_of(self, db: Database) -> str | None:
        run = {"backend": db.backend, "version": db.version, "kernel": self.kernel, "phase": self.phase}
        if self.moved(self.kernel).request and self.ssm_dtype != FULL_STATE:
            row = _row(KERNELS["gdn"]["narrow_state"], state=self.ssm_dtype, **run)
            return str(row["rows_of"]) if row and row["sm"][0] <= (db.system.sm_version or -1) <= row["sm"][1] else None
        row, table = _row(KERNELS["gdn"]["variants"], **run), db.find(self.table)
        present = [name for name in row.get("rows_of", ()) if table is not None and self.key(table, name) is not None]
        if len(present) > 1:  # which of them serves is not known
            return None
        return str(present[0]) if present else self.kernel


@dataclass(frozen=True, kw_only=True)
class Kda(_DeltaNet):
    """One kernel of a Kimi delta attention layer. draft_tokens: verified per request in one pass of phase "verify"
    (accepted and drafted)."""

    draft_tokens: int = 0

    table = "kda"

    @property
    def draft(self) -> int:
        return self.draft_tokens if self.phase == "verify" else 0

    def route(self, db: Database) -> Route | None:
        fused, *replaced = KERNELS["kda"]["fused"].get(self.phase, ("",))
        if self.kernel not in replaced or not self._is_fused(db, fused):
            return Route(self.kernel, self.kernel)
        return Route(fused, fused) if self.kernel == replaced[0] else None

    def _is_fused(self, db: Database, fused: str) -> bool:
        """Whether only the fused kernel was measured: at all in verification, in this shape in decode."""
        table = db.find(self.table)
        if table is None:
            return False
        dims = () if self.phase == "verify" else self.named_key
        rows = [table.rows(kernel, self.phase, *dims) for kernel in (self.kernel, fused)]
        return rows[0] is None and rows[1] is not None

    def stand_in(self, table: Table, rows: slice) -> int:
        """The nearest number of value heads."""
        heads = table.columns[table.key.index("num_v_heads")][rows].astype(np.int64)
        return int(rows.start + np.argmin(np.abs(heads - self.num_v_heads)))
