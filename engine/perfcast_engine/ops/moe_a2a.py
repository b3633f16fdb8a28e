"""One phase of a large-EP all-to-all (spec/03 section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfcast_engine.answer import F64, Answer, Points, Source, or_else
from perfcast_engine.errors import InvalidField, PerfDataMissing
from perfcast_engine.interp.grid import Grid
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.base import Op, find_slice, measured, no_basis, no_slice, require, slice_of
from perfcast_engine.ops.comm_backends import CommBackend, comm_backend, measured_node
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key, Table

TABLE = "moe_a2a"
OTHER_HALF = {"dispatch": "combine", "combine": "dispatch"}
SAME_DTYPE = {"fp8_block": "fp8"}

Spread = tuple[int, int]  # (EP ranks, nodes)


@dataclass(frozen=True, kw_only=True)
class MoeAllToAll(Op):
    """``phase`` (prepare, dispatch, combine) of the exchange that ``comm_backend`` makes between ``moe_ep`` ranks on
    ``nodes`` nodes, on ``sms`` multiprocessors of each GPU."""

    phase: str
    comm_backend: str
    comm_dtype: str = "default"
    hidden: int
    topk: int
    experts: int
    moe_ep: int
    nodes: int
    sms: int = 0
    attn_tp: int = 1

    def __post_init__(self) -> None:
        require(self, hidden=0, topk=0, experts=0, moe_ep=0, nodes=0, sms=0, attn_tp=0)

    @cached_property
    def backend(self) -> CommBackend:
        return comm_backend(self.comm_backend)

    def price(self, db: Database, at: Points) -> Answer:
        if self.phase not in self.backend.steps:
            steps = ", ".join(self.backend.steps)
            raise InvalidField("phase", f"{self.comm_backend} has {steps}, not {self.phase!r}", why="enum")
        if not db.mode.shared:
            raise no_basis(f"{self.name} (an all-to-all is known from measurements only)")
        at = at.with_(x=np.floor(at.x / max(self.attn_tp, 1)))

        def nothing(at: Points) -> Answer:
            raise no_basis(self.name)

        if db.mode is Mode.HYBRID and db.find(TABLE) is not None:
            return or_else(lambda at: self._measured(db, at.x), nothing, at, PerfDataMissing)
        return self._measured(db, at.x)

    def _measured(self, db: Database, tokens: F64) -> Answer:
        spread = self.measured_spread(db)
        answer = self._exchange(db, spread, tokens)
        return answer if spread == (self.moe_ep, self.nodes) else answer.tagged(Source.ESTIMATED)

    def measured_spread(self, db: Database) -> Spread:
        """The spread whose measurements answer: the asked one, or the single node that stands in for it."""
        asked = (self.moe_ep, self.nodes)
        if self.nodes > 1 and self.backend.one_node_stands_in:
            table = db.table(TABLE)
            if table.rows(*self._key(table, self.phase, asked)) is None:
                return measured_node(db), 1
        return asked

    def _key(self, table: Table, half: str, spread: Spread) -> tuple[Key, ...]:
        shape = (self.hidden, self.topk, self.experts)
        return self.comm_backend, half, self._dtype(table, half), *spread, *shape

    def _dtype(self, table: Table, half: str) -> Key:
        """The measured wire dtype that answers: the asked one, its alias, or the only one where that has no name."""
        held = table.children(self.comm_backend, half)
        if not held:
            raise no_slice(table, (self.comm_backend, half))
        for name in (self.comm_dtype, SAME_DTYPE.get(self.comm_dtype)):
            if name in held:
                return name
        if held == ["default"]:
            return "default"
        raise no_slice(table, (self.comm_backend, half, self.comm_dtype))

    def _exchange(self, db: Database, spread: Spread, tokens: F64) -> Answer:
        key = self._key(db.table(TABLE), self.phase, spread)
        swept = self.backend.sms > 0
        if not swept or (spread[1] == 1 and self.sms == self.backend.sms):
            curve = find_slice(db, TABLE, (*key, self.sms), lambda tokens: tokens)
            if curve is not None:
                return measured(curve, (tokens,), self.name, ("tokens",))
        surface = _surface(db, key)
        query = (np.full(len(tokens), float(self.sms)), tokens)
        answer = measured(surface, query, self.name, ("sms", "tokens"))
        whole = self._both_halves(db, key, spread) if swept else None
        if whole is not None:
            other, both = whole
            parts = answer.ms + other.at(*query).ms
            scaled = parts > 0
            answer.ms[scaled] *= both.at(*query).ms[scaled] / parts[scaled]
        return answer

    def _both_halves(self, db: Database, key: tuple[Key, ...], spread: Spread) -> tuple[Surface, Surface] | None:
        """The other half of the exchange, and the sum of both where both were measured; None without such a point."""
        table = db.table(TABLE)
        half = OTHER_HALF[self.phase]
        if not table.children(self.comm_backend, half):
            return None
        other_key = self._key(table, half, spread)
        if table.rows(*other_key) is None:
            return None
        own, other = _surface(db, key), _surface(db, other_key)
        both = db.kept(("both halves", key), lambda: _sum(own.grid, other.grid))
        return None if both is None else (other, both)


def _surface(db: Database, key: tuple[Key, ...]) -> Surface:
    return slice_of(db, TABLE, key, lambda sms, tokens: tokens)


def _sum(a: Grid, b: Grid) -> Surface | None:
    """The sum of two grids over (sms, tokens) at the points of both."""
    code_a, code_b = (grid.coords[0] << 32 | grid.coords[1] for grid in (a, b))
    _, in_a, in_b = np.intersect1d(code_a, code_b, assume_unique=True, return_indices=True)
    if not len(in_a):
        return None
    return Surface(Grid.of([c[in_a] for c in a.coords], a.ms[in_a] + b.ms[in_b]), lambda sms, tokens: tokens)
