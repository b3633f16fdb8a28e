"""What the sparse attention modules share: quantisation, axes, kernel buckets, estimates (spec/04 sections 1 to 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
from perfcast_surface.blend import Blend
from perfcast_surface.terms import DECODE, PREFILL, Block, One, Term

from perfcast_engine.answer import F64, Answer, Points, Source, Tier
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.interp.grid import Coords, Grid, Query
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.ops.base import Op, Split
from perfcast_engine.ops.measured import Attention, Basis, estimated, no_basis, no_slice
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key


@dataclass(frozen=True, kw_only=True)
class SparseModule(Attention):
    """A whole attention block of one layer, measured as one unit. heads: per GPU."""

    kv_quant: str
    fmha_quant: str
    gemm_quant: str

    beside_shape = Op.beside_shape | {"heads"}
    context: ClassVar[bool]  # prefill; axes prefix, new tokens, batch. Decode: batch, KV length
    span_without_anchor: ClassVar[bool] = False

    @property
    def phase(self) -> str:
        return "context" if self.context else "generation"

    def sol(self, db: Database, at: Points) -> Split:
        return Op.sol(self, db, at)

    def coords(self, at: Points) -> Coords:
        return (at.prefix, at.s, at.batch) if self.context else (at.batch, at.s)

    def samples(self, db: Database) -> tuple[Surface, Query]:
        """What calibrates an estimate, and the coordinates at which it is asked before those of the points."""
        return self.slice(db).surface(db), ()

    def empirical(self, db: Database, at: Points) -> Answer:
        try:
            surface, lead = self.samples(db)
        except PerfDataMissing as error:
            raise no_basis(self.name) from error
        query = (*lead, *self.coords(at))
        if not self.context:
            return estimated(Basis(surface.util), query, surface.sol(*query), self.name)
        util = _util_with_prefix(db, surface, at, lead, self.span_without_anchor)
        return Answer.of(surface.sol(*query) / util, Source.EMPIRICAL, Tier.EMPIRICAL, miss=no_basis(self.name))

    def outside(self, db: Database) -> One:
        return Op.outside(self, db)

    def term(self, db: Database, blend: Blend) -> Term:
        return Block(PREFILL if self.context else DECODE, blend, self.scale)


@dataclass(frozen=True, kw_only=True)
class BucketedModule(SparseModule):
    """A module whose rows are keyed by kernel bucket and interpolate over heads (DSA, MSA)."""

    @property
    def bucket(self) -> str:
        """The kernels that should answer."""
        return "trtllm"

    def key(self, db: Database) -> tuple[Key, ...]:
        """Of ``bucket``, or of another one where it has no rows (spec/04 3.4)."""
        table = db.table(self.table)
        present = table.children(*self.named_key)
        if not present:
            raise no_slice(table, self.named_key)
        wanted = (self.bucket, "flashmla_kv", "trtllm", *present)
        return *self.named_key, next(bucket for bucket in wanted if bucket in present)

    def samples(self, db: Database) -> tuple[Surface, Query]:
        """Those of exactly this many heads where there are any."""
        surface, lead = self.slice(db).surface(db), self.lead

        def build() -> Surface | None:
            rows = surface.grid.between(self.heads, self.heads)
            return Surface(Grid(rows.coords[1:], rows.ms, None), partial(surface.sol, *lead)) if len(rows) else None

        own = db.kept(("own heads", surface, self.heads), build)
        return (surface, lead) if own is None else (own, ())


def _util_with_prefix(db: Database, surface: Surface, at: Points, lead: Query, span_without_anchor: bool) -> F64:
    """A prefix within the measured range is an axis of its own; any other is folded into the length, on the samples
    without prefix. Where there are none of these, the axis is kept if ``span_without_anchor``, else NaN."""
    axis = len(lead)
    prefixes = surface.grid.coords[axis]
    low, high = prefixes.min(), prefixes.max()
    within = (at.prefix >= low) & (at.prefix <= high) & (low < high)
    if span_without_anchor and low != 0:
        within[:] = True
    util = np.full(len(at), np.nan)
    for mask, spanning in ((within, True), (~within, False)):
        if mask.any():
            part = at.take(mask)
            grid = surface.util if spanning else db.kept(("no prefix", surface), lambda: _without_prefix(surface, axis))
            query = (part.prefix, part.s, part.batch) if spanning else (part.s + part.prefix, part.batch)
            if grid is not None:
                util[mask] = grid.at((*lead, *query))
    return util


def _without_prefix(surface: Surface, axis: int) -> UtilGrid | None:
    rows = surface.grid.coords[axis] == 0
    coords = tuple(c[rows] for i, c in enumerate(surface.grid.floats) if i != axis)
    return UtilGrid.of(coords, surface.grid.ms[rows], surface.leaf_sol[rows]) if rows.any() else None
