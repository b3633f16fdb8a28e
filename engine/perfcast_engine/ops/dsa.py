"""Sparse attention of DeepSeek (DSA) and MiniMax (MSA): the attention block of a layer as one unit (spec/04 3, 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from perfcast_surface.terms import Term

from perfcast_engine import data, quant
from perfcast_engine.answer import Answer, Points, Source, Tier, total
from perfcast_engine.errors import EngineError, InvalidField, PerfDataMissing
from perfcast_engine.ops.base import Split
from perfcast_engine.ops.indexer import all_gather, chunk_of, dsa_delta
from perfcast_engine.ops.measured import Attention, no_basis
from perfcast_engine.ops.roofline import resident
from perfcast_engine.ops.sparse import BucketedModule
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key

SHAPES: Mapping[str, Mapping[str, int]] = data.table("kernels")["dsa"]
KERNELS = {"DeepseekV32ForCausalLM": "dsv32"}  # tables of kernels measured alone; glm5 for any other architecture


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
    span_without_anchor = True

    @property
    def dims(self) -> Mapping[str, int]:
        """Constants of the architecture; those of DeepSeek-V3.2 for one that is not listed."""
        return SHAPES.get(self.architecture, SHAPES["DeepseekV32ForCausalLM"])

    @property
    def law(self) -> str:
        return f"dsa_{self.phase}"

    @property
    def figures(self) -> Mapping[str, Any]:
        return {**self.dims, **vars(self)}

    @property
    def table(self) -> str:
        return f"dsa_{self.phase}_skip" if self.skip else f"dsa_{self.phase}"

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
    donor: ClassVar[type[DsaContext] | type[DsaGeneration]]
    measured_in: ClassVar[str] = "MiniMaxM3ForCausalLM"

    @property
    def table(self) -> str:
        return f"msa_{self.phase}"

    @property
    def law(self) -> str:
        return self.table

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
