"""Sparse attention blocks, measured as one unit: DeepSeek's (DSA) and MiniMax's (MSA) (spec/04 sections 1 to 3, 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from perfcast_surface.blend import Blend
from perfcast_surface.terms import DECODE, PREFILL, Block, One, Term

from perfcast_engine import data, quant
from perfcast_engine.answer import F64, Answer, Points, Source, Tier, total
from perfcast_engine.errors import EngineError, InvalidField, PerfDataMissing
from perfcast_engine.interp.grid import Coords, Grid, Query
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.ops.base import Op, Split
from perfcast_engine.ops.indexer import all_gather, chunk_of, dsa_delta
from perfcast_engine.ops.measured import Attention, Basis, estimated, no_basis, no_slice
from perfcast_engine.ops.roofline import resident
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key

SHAPES: Mapping[str, Mapping[str, int]] = data.table("kernels")["dsa"]
KERNELS = {"DeepseekV32ForCausalLM": "dsv32"}  # tables of kernels measured alone; glm5 for any other architecture


@dataclass(frozen=True, kw_only=True)
class SparseModule(Attention):
    """A whole attention block of one layer, measured as one unit. heads: per GPU."""

    kv_quant: str
    fmha_quant: str
    gemm_quant: str

    beside_shape = Op.beside_shape | {"heads"}
    family: ClassVar[str]
    context: ClassVar[bool]  # prefill; axes prefix, new tokens, batch. Decode: batch, KV length
    span_without_anchor: ClassVar[bool] = False

    @property
    def phase(self) -> str:
        return "context" if self.context else "generation"

    @property
    def law(self) -> str:
        return f"{self.family}_{self.phase}"

    @property
    def table(self) -> str:
        return self.law

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
            return Surface(Grid(rows.coords[1:], rows.ms), partial(surface.sol, *lead)) if len(rows) else None

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


@dataclass(frozen=True, kw_only=True)
class _Dsa(BucketedModule):
    """What both phases share. full_fraction: share of the layers that compute their own top-k index, the others reuse
    it (``skip``: priced as one of the others); projection_quants: (q, kv, o, indexer) modes of the resident weights,
    ``gemm_quant`` for all when None."""

    architecture: str
    index_topk: int = 2048
    full_fraction: float = 1.0
    projection_quants: tuple[str, str, str, str] | None = None
    skip: bool = False

    positive = ("heads", "index_topk")
    family, span_without_anchor = "dsa", True

    @property
    def dims(self) -> Mapping[str, int]:
        """Constants of the architecture; those of DeepSeek-V3.2 for one that is not listed."""
        return SHAPES.get(self.architecture, SHAPES["DeepseekV32ForCausalLM"])

    @property
    def figures(self) -> Mapping[str, Any]:
        return {**self.dims, **vars(self)}

    @property
    def table(self) -> str:
        return f"{self.law}_skip" if self.skip else self.law

    def kinds(self, db: Database) -> list[tuple[_Dsa, float]]:
        """Layers with an index of their own and layers that reuse one, with their shares; all of the first kind where
        the phase was never measured otherwise (spec/04 3.6)."""
        reusing, share = replace(self, skip=True), self.full_fraction
        told_apart = db.mode is Mode.SOL or db.find(reusing.table) is not None
        return [(self, share), (reusing, 1 - share)] if share < 1 and told_apart else [(self, 1.0)]

    def price(self, db: Database, at: Points) -> Answer:
        return total((kind.layer(db, at).scaled(share) for kind, share in self.kinds(db)), len(at))

    def layer(self, db: Database, at: Points) -> Answer:
        """One layer of its kind."""
        return super().price(db, at)

    def sol(self, db: Database, at: Points) -> Split:
        first, *others = (kind.split(db.system, at).scaled(share) for kind, share in self.kinds(db.in_mode(Mode.SOL)))
        return first.plus(others[0]) if others else first

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        terms: list[Term] = []
        for kind, share in self.kinds(db):
            own = Attention.terms(replace(kind, scale=kind.scale * share), db)
            if own is None:
                return None
            terms += own
        return tuple(terms)

    def weight_bytes(self) -> float:
        parts = ("q", "kv", "o", "indexer")
        modes = self.projection_quants or (self.gemm_quant,) * len(parts)
        widths = (quant.mode(quant.GEMM, mode, "projection_quants").bytes for mode in modes)
        return resident("dsa", {**self.figures, **dict(zip(parts, widths, strict=True))})


@dataclass(frozen=True, kw_only=True)
class DsaContext(_Dsa):
    """Prefill. cp: context-parallel ranks that share the new tokens."""

    cp: int = 1

    context = True
    keyed_by = ("fmha_quant", "kv_quant", "gemm_quant", "architecture")

    @property
    def bucket(self) -> str:
        return "trtllm" if self.cp <= 1 else "flashmla_kv"

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        return super().terms(db) if self.cp <= 1 else None

    def sol(self, db: Database, at: Points) -> Split:
        if self.cp > 1:
            raise InvalidField("cp", "a context-parallel module exports no roofline split; ask for one GPU")
        return super().sol(db, at)

    def evaluate(self, db: Database, at: Points) -> Answer:
        # the deltas of context parallelism may make a sum negative; the reference lets it stand
        return super().evaluate(db, at) if self.cp <= 1 else self.price(db, at).scaled(self.scale)

    def layer(self, db: Database, at: Points) -> Answer:
        """Under context parallelism: a rank's tokens, its share of the indexer, and the gathers (spec/04 section 9)."""
        if self.cp <= 1:
            return super().layer(db, at)
        elements = at.batch * at.s
        # before all else, as in the reference: kernels that were never measured alone are told first
        delta = dsa_delta(db, KERNELS.get(self.architecture, "glm5"), self.heads, self.cp, at, self.skip)
        answer = super().layer(db, at.with_(s=chunk_of(at.s, self.cp))) + delta
        if not self.skip:
            answer += all_gather(db, self.cp, elements * self.dims["index_head_dim"])
        answer += all_gather(db, self.cp, elements * (self.dims["kv_lora_rank"] + self.dims["rope_head_dim"]))
        return answer.tagged(Source.ESTIMATED)


@dataclass(frozen=True, kw_only=True)
class DsaGeneration(_Dsa):
    """Decode; all its rows are measured with ``fmha_quant`` bfloat16."""

    context = False
    keyed_by = ("kv_quant", "gemm_quant", "architecture")

    def key(self, db: Database) -> tuple[Key, ...]:
        if self.fmha_quant != "bfloat16":
            raise PerfDataMissing(f"decode of {self.table} was measured with fmha_quant bfloat16 only", op=self.name)
        return super().key(db)


@dataclass(frozen=True, kw_only=True)
class _Msa(BucketedModule):
    """What both phases share. kv_heads: per GPU; index_topk and block_size: tokens. Without rows of its own the
    utilisation of the DSA module of ``donor_architecture``, times ``donor_scale``, stands in. Its weights are not
    counted, as in the reference."""

    kv_heads: int
    hidden: int
    head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    block_size: int
    donor_architecture: str
    donor_scale: float = 1.0

    positive = ("heads", "hidden", "head_dim", "index_topk", "block_size")
    family = "msa"
    donor: ClassVar[type[DsaContext] | type[DsaGeneration]]
    measured_in: ClassVar[str] = "MiniMaxM3ForCausalLM"

    def empirical(self, db: Database, at: Points) -> Answer:
        """This module's roofline at the utilisation that the donor's module reaches at the same point."""
        if Tier.XOP not in db.policy:
            raise no_basis(self.name)
        donor = self.donor(
            name=self.donor_architecture,
            heads=self.heads,
            kv_quant=self.kv_quant,
            fmha_quant=self.fmha_quant,
            gemm_quant=self.gemm_quant,
            architecture=self.donor_architecture,
        )
        own, theirs = self.split(db.system, at).time, donor.split(db.system, at).time
        try:
            answer = donor.silicon(db, at)
        except EngineError as error:
            raise no_basis(self.name) from error
        usable = (answer.ms > 0) & (theirs > 0)
        util = np.where(usable, theirs, np.nan) / np.where(usable, answer.ms, 1.0)
        return Answer.of(own / (util * self.donor_scale), Source.EMPIRICAL, Tier.XOP, miss=no_basis(self.name))


@dataclass(frozen=True, kw_only=True)
class MsaContext(_Msa):
    """Prefill."""

    context = True
    keyed_by = ("fmha_quant", "kv_quant", "gemm_quant", "measured_in")
    donor = DsaContext


@dataclass(frozen=True, kw_only=True)
class MsaGeneration(_Msa):
    """Decode; its rows are not told apart by ``fmha_quant``."""

    context = False
    keyed_by = ("kv_quant", "gemm_quant", "measured_in")
    donor = DsaGeneration
