"""What the sparse attention modules share: quantisation, axes, kernel buckets, estimates (spec/04 sections 1 to 3)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from perfcast_surface.terms import Decode, Prefixed, Term

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points, Source, Tier
from perfcast_engine.interp.grid import Coords, Grid, Query
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.ops.base import Op, Reads, Split, estimated, measured, no_basis, no_slice, require, slice_of
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

FP8 = quant.GEMM["fp8"]


@dataclass(frozen=True, kw_only=True)
class SparseModule(Op):
    """A whole attention block of one layer, measured as one unit. heads: per GPU."""

    heads: int
    kv_quant: str
    fmha_quant: str
    gemm_quant: str

    context: ClassVar[bool]  # prefill; axes prefix, new tokens, batch. Decode: batch, KV length
    span_without_anchor: ClassVar[bool] = False

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def __post_init__(self) -> None:
        require(self, heads=1)
        quant.mode(quant.KV_CACHE, self.kv_quant, "kv_quant")
        quant.mode(quant.FMHA, self.fmha_quant, "fmha_quant")
        quant.mode(quant.GEMM, self.gemm_quant, "gemm_quant")

    @property
    def axes(self) -> tuple[str, ...]:
        return ("prefix", "s", "batch") if self.context else ("batch", "s")

    def coords(self, at: Points) -> Coords:
        """``at`` in the axes of the module's tables."""
        return (at.prefix, at.s, at.batch) if self.context else (at.batch, at.s)

    @property
    def widths(self) -> tuple[float, float, float]:
        """Bytes per element of (gemm, fmha, kv)."""
        return (
            quant.GEMM[self.gemm_quant].bytes,
            quant.FMHA[self.fmha_quant].bytes,
            quant.KV_CACHE[self.kv_quant].bytes,
        )

    def estimate(self, db: Database, surface: Surface, at: Points, lead: Query = ()) -> Answer:
        """Utilisation estimate over a surface with axes (*lead, *axes); ``lead``: numbers."""
        query = (*lead, *self.coords(at))
        if not self.context:
            return estimated(surface.util, query, surface.sol(*query), self.name)
        util = _util_with_prefix(db, surface, at, lead, self.span_without_anchor)
        return Answer.of(surface.sol(*query) / util, Source.EMPIRICAL, Tier.EMPIRICAL, miss=no_basis(self.name))


@dataclass(frozen=True, kw_only=True)
class BucketedModule(SparseModule):
    """A module whose rows are keyed by kernel bucket and interpolate over heads (DSA, MSA). Layers that reuse the
    top-k index of another layer (``skip``) have a table of their own."""

    table: ClassVar[str]

    @property
    @abstractmethod
    def key(self) -> tuple[Key, ...]:
        """The table key above the bucket."""

    @property
    @abstractmethod
    def shapes(self) -> tuple[Hashable, ...]:
        """What the roofline depends on beside the table's key."""

    @abstractmethod
    def roofline(self, system: SystemSpec, skip: bool, n: F64 | float, *coords: F64) -> Split:
        """At ``n`` heads and the other axes."""

    def rates(self, system: SystemSpec) -> tuple[float, float, float]:
        """FLOP/s of (gemm, attention, fp8 indexer); SystemFlopsMissing where the system lacks one."""
        return system.rate(quant.GEMM[self.gemm_quant]), system.rate(quant.FMHA[self.fmha_quant]), system.rate(FP8)

    def query(self, at: Points) -> Query:
        return (float(self.heads), *self.coords(at))

    def silicon(self, db: Database, at: Points, skip: bool = False, bucket: str = "trtllm") -> Answer:
        """From the measured module as the mode of ``db`` sees it."""
        surface = self.surface(db, skip, bucket)
        return measured(surface, (float(self.heads), *self.coords(at)), self.name, ("heads", *self.axes))

    def surface(self, db: Database, skip: bool, bucket: str) -> Surface:
        """Axes (heads, *axes), kernels of ``bucket`` or of another where it has no rows (spec/04 3.4)."""
        name = f"{self.table}_skip" if skip else self.table

        def choose() -> tuple[Key, ...]:
            table = db.table(name)
            present = table.children(*self.key)
            if not present:
                raise no_slice(table, self.key)
            return (*self.key, next(b for b in (bucket, "flashmla_kv", "trtllm", *present) if b in present))

        key = db.kept(("bucket", name, self.key, bucket), choose)
        return slice_of(db, name, key, lambda *c: self.roofline(db.system, skip, *c).time, also=self.shapes)

    def terms_of(self, parts: Sequence[tuple[Surface, float]]) -> tuple[Term, ...] | None:
        """The weighted sum of surfaces with axes (heads, *axes)."""
        kind: type[Prefixed] | type[Decode] = Prefixed if self.context else Decode
        blends = [(surface.blend(float(self.heads)), share) for surface, share in parts]
        terms = tuple(kind(blend, share * self.scale) for blend, share in blends if blend is not None)
        return terms if len(terms) == len(parts) else None

    def own_surface(self, db: Database, surface: Surface) -> Surface | None:
        """The rows of ``surface`` at exactly this many heads, axes ``axes``; None if there are none."""

        def build() -> Surface | None:
            grid = surface.grid
            rows = grid.coords[0] == self.heads
            if not rows.any():
                return None
            own = Grid(tuple(c[rows] for c in grid.coords[1:]), grid.ms[rows], None)
            return Surface(own, lambda *coords: surface.sol(float(self.heads), *coords))

        return db.kept(("own heads", surface, self.heads), build)


def causal_pairs(batch: F64, s: F64, prefix: F64, topk: int) -> F64:
    """Attended (query, key) pairs of ``s`` new tokens after ``prefix`` when each query sees at most ``topk`` keys."""
    total = s + prefix
    ramp = np.minimum(total, topk)
    causal = (ramp * (ramp + 1) - prefix * (prefix + 1)) / 2 + (total - ramp) * topk
    return batch * np.where(prefix >= topk, s * topk, causal)


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
