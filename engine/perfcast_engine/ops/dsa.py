"""Sparse attention of DeepSeek (DSA) and MiniMax (MSA): the attention block of a layer as one unit (spec/04 3, 6)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from perfcast_surface.terms import Term

from perfcast_engine import data, quant
from perfcast_engine.answer import Answer, Points, Source, Tier, total
from perfcast_engine.errors import EngineError, InvalidField, PerfDataMissing
from perfcast_engine.ops.base import Split
from perfcast_engine.ops.indexer import all_gather, chunk_of, dsa_delta
from perfcast_engine.ops.measured import Attention, Coord, no_basis
from perfcast_engine.ops.sparse import BF16, BucketedModule, causal_pairs
from perfcast_engine.quant import QuantMode
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key


@dataclass(frozen=True, slots=True)
class DsaShape:
    """Structural constants of an architecture; counts of elements."""

    hidden: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    index_topk: int
    index_head_dim: int
    index_heads: int

    @property
    def latent(self) -> int:
        """Elements of one cache entry, shared by all heads."""
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.nope_head_dim + self.rope_head_dim

    @property
    def index_entry_bytes(self) -> int:
        """Bytes of one entry of the indexer cache: fp8 values and their scales."""
        return self.index_head_dim + 4 * -(-self.index_head_dim // 128)

    def weights(self, heads: Coord) -> Coord:
        """Elements of all projections, the indexer included."""
        shared = self.hidden * (self.q_lora_rank + self.latent + self.index_head_dim + self.index_heads)
        shared += self.q_lora_rank * self.index_heads * self.index_head_dim
        return shared + heads * (self.q_lora_rank * self.qk_head_dim + self.v_head_dim * self.hidden)

    def gemm_flops(self, tokens: Coord, heads: Coord) -> Coord:
        """All projections and the absorbed products of ``tokens``."""
        absorbed = heads * self.kv_lora_rank * (self.nope_head_dim + self.v_head_dim)
        return 2 * tokens * (self.weights(heads) + absorbed)


SHAPES = {name: DsaShape(**row) for name, row in data.table("kernels")["dsa"].items()}
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
    def dims(self) -> DsaShape:
        """Constants of the architecture; those of DeepSeek-V3.2 for one that is not listed."""
        return SHAPES.get(self.architecture, SHAPES["DeepseekV32ForCausalLM"])

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
        m, n = self.dims, self.heads
        modes = self.projection_quants or (self.gemm_quant,) * 4
        q, kv, o, indexer = (quant.mode(quant.GEMM, mode, "projection_quants").bytes for mode in modes)
        return self.scale * (
            (m.hidden * m.q_lora_rank + m.q_lora_rank * n * m.qk_head_dim) * q
            + (m.hidden * m.latent + m.kv_lora_rank * n * (m.nope_head_dim + m.v_head_dim)) * kv
            + n * m.v_head_dim * m.hidden * o
            + (m.q_lora_rank * m.index_head_dim * m.index_heads + m.hidden * m.index_heads) * indexer
        )


@dataclass(frozen=True, kw_only=True)
class DsaContext(_Dsa):
    """Prefill. cp: context-parallel ranks that share the new tokens."""

    cp: int = 1

    context = True
    keyed_by = ("fmha_quant", "kv_quant", "gemm_quant", "architecture")

    @property
    def bucket(self) -> str:
        return "trtllm" if self.cp <= 1 else "flashmla_kv"

    def roofline(self, system: SystemSpec, n: Coord, prefix: Coord, s: Coord, batch: Coord) -> Split:
        m, topk = self.dims, self.index_topk
        gemm_bytes, fmha_bytes, kv_bytes = self.widths
        tokens, total = batch * s, s + prefix
        searched = np.where(total <= topk, 0.0, 0.0 if self.skip else 1.0)
        index = searched * 2 * tokens * m.index_heads * m.index_head_dim * total
        attention = 2 * n * (m.latent + m.kv_lora_rank) * causal_pairs(batch, s, prefix, topk)
        moved = m.weights(n) * gemm_bytes + batch * n * np.minimum(total, topk) * m.latent * kv_bytes
        moved += searched * batch * total * m.index_entry_bytes + tokens * n * m.qk_head_dim * fmha_bytes * 2
        gemm_rate, fmha_rate, index_rate = self.rates(system)
        seconds = m.gemm_flops(tokens, n) / gemm_rate + index / index_rate + attention / fmha_rate
        return Split.of(seconds * 1000, system.memory_sol_ms(moved))

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
        m, elements = self.dims, at.batch * at.s
        # before all else, as in the reference: kernels that were never measured alone are told first
        delta = dsa_delta(db, KERNELS.get(self.architecture, "glm5"), self.heads, self.cp, at, self.skip)
        answer = super().layer(db, at.with_(s=chunk_of(at.s, self.cp))) + delta
        if not self.skip:
            answer += all_gather(db, self.cp, elements * m.index_head_dim)
        answer += all_gather(db, self.cp, elements * m.latent)
        return answer.tagged(Source.ESTIMATED)


@dataclass(frozen=True, kw_only=True)
class DsaGeneration(_Dsa):
    """Decode; all its rows are measured with ``fmha_quant`` bfloat16."""

    context = False
    keyed_by = ("kv_quant", "gemm_quant", "architecture")

    def computes(self, system: SystemSpec) -> tuple[QuantMode, ...]:
        gemm, _, index = super().computes(system)
        return gemm, BF16, index

    def key(self, db: Database) -> tuple[Key, ...]:
        if self.fmha_quant != BF16.name:
            raise PerfDataMissing(f"decode of {self.table} was measured with fmha_quant bfloat16 only", op=self.name)
        return super().key(db)

    def roofline(self, system: SystemSpec, n: Coord, batch: Coord, s: Coord) -> Split:
        m = self.dims
        gemm_bytes, _, kv_bytes = self.widths
        attended = np.minimum(s, m.index_topk)
        index = 2 * batch * m.index_heads * m.index_head_dim * s
        attention = 2 * batch * n * (m.latent + m.kv_lora_rank) * attended
        moved = m.weights(n) * gemm_bytes + batch * s * m.index_entry_bytes + batch * attended * m.latent * kv_bytes
        gemm_rate, fmha_rate, index_rate = self.rates(system)
        seconds = m.gemm_flops(batch, n) / gemm_rate + index / index_rate + attention / fmha_rate
        return Split.of(seconds * 1000, system.memory_sol_ms(moved))


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

    def times(self, system: SystemSpec, n: Coord, tokens: Coord, batch: Coord, length: Coord, pairs: Coord) -> Split:
        """``tokens`` new tokens of ``batch`` requests over ``length`` keys each attend ``pairs`` (query, key) pairs."""
        h, d, v = self.hidden, self.head_dim, self.v_head_dim
        gemm_bytes, fmha_bytes, kv_bytes = self.widths
        index_dims = self.index_heads * self.index_head_dim
        weights = h * n * d + 2 * h * self.kv_heads * d + n * v * h + h * index_dims
        blocks = np.where(length > self.index_topk, np.ceil(length / self.block_size), 0.0)
        attended = np.minimum(length, self.index_topk)
        moved = weights * gemm_bytes + batch * self.kv_heads * attended * (d + v) * kv_bytes
        moved += batch * blocks * index_dims + 2 * tokens * n * d * fmha_bytes
        gemm_rate, fmha_rate, index_rate = self.rates(system)
        seconds = 2 * tokens * weights / gemm_rate + 2 * tokens * index_dims * blocks / index_rate
        seconds += 2 * n * (d + v) * pairs / fmha_rate
        return Split.of(seconds * 1000, system.memory_sol_ms(moved))

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

    def roofline(self, system: SystemSpec, n: Coord, prefix: Coord, s: Coord, batch: Coord) -> Split:
        return self.times(system, n, batch * s, batch, prefix + s, causal_pairs(batch, s, prefix, self.index_topk))


@dataclass(frozen=True, kw_only=True)
class MsaGeneration(_Msa):
    """Decode; its rows are not told apart by ``fmha_quant``."""

    context = False
    keyed_by = ("kv_quant", "gemm_quant", "measured_in")
    donor = DsaGeneration

    def roofline(self, system: SystemSpec, n: Coord, batch: Coord, s: Coord) -> Split:
        length = np.maximum(s - 1, 0)
        return self.times(system, n, batch, batch, length, batch * np.minimum(length, self.index_topk))
