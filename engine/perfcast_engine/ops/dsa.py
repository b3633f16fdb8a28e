"""DeepSeek sparse attention: the whole attention block of a layer, measured as one unit (spec/04 section 3)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from perfcast_surface.terms import Term

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points, Source
from perfcast_engine.errors import InvalidField, PerfDataMissing
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.base import Split, by_mode, no_basis, require
from perfcast_engine.ops.context_parallel import all_gather, chunk_of, dsa_delta
from perfcast_engine.ops.sparse import BucketedModule, causal_pairs
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key

BF16 = quant.FMHA["bfloat16"]


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

    def weights(self, heads: F64 | float) -> F64 | float:
        """Elements of all projections, the indexer included."""
        shared = self.hidden * (self.q_lora_rank + self.latent + self.index_head_dim + self.index_heads)
        shared += self.q_lora_rank * self.index_heads * self.index_head_dim
        return shared + heads * (self.q_lora_rank * self.qk_head_dim + self.v_head_dim * self.hidden)

    def gemm_flops(self, tokens: F64, heads: F64 | float) -> F64:
        """All projections and the absorbed products of ``tokens``."""
        absorbed = heads * self.kv_lora_rank * (self.nope_head_dim + self.v_head_dim)
        return 2 * tokens * (self.weights(heads) + absorbed)


SHAPES: Mapping[str, DsaShape] = MappingProxyType(
    {
        "DeepseekV32ForCausalLM": DsaShape(7168, 1536, 512, 128, 64, 128, 2048, 128, 64),
        "GlmMoeDsaForCausalLM": DsaShape(6144, 2048, 512, 192, 64, 256, 2048, 128, 32),
    }
)
KERNELS = {"DeepseekV32ForCausalLM": "dsv32"}  # tables of kernels measured alone; glm5 for any other architecture


@dataclass(frozen=True, kw_only=True)
class _Dsa(BucketedModule):
    """What both phases share. full_fraction: share of the layers that compute their own top-k index, the others reuse
    it; projection_quants: (q, kv, o, indexer) modes of the resident weights, ``gemm_quant`` for all when None."""

    architecture: str
    index_topk: int = 2048
    full_fraction: float = 1.0
    projection_quants: tuple[str, str, str, str] | None = None

    span_without_anchor: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, index_topk=1, full_fraction=0)

    @property
    def shape(self) -> DsaShape:
        """Constants of the architecture; those of DeepSeek-V3.2 for one that is not listed."""
        return SHAPES.get(self.architecture, SHAPES["DeepseekV32ForCausalLM"])

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        return (self.index_topk,)

    def price(self, db: Database, at: Points) -> Answer:
        return self.blended(db, lambda skip: self.layer(db, at, skip, "trtllm"))

    def sol(self, db: Database, at: Points) -> Split:
        def split(skip: bool) -> Split:
            return self.roofline(db.system, skip, float(self.heads), *self.coords(at))

        share = self.full_fraction
        return split(False) if share >= 1 else split(False).scaled(share).plus(split(True).scaled(1 - share))

    def blended(self, db: Database, layer: Callable[[bool], Answer]) -> Answer:
        """Layers with an index of their own and layers that reuse one, as their shares demand; all of the first kind
        where the phase was never measured otherwise (spec/04 3.6)."""
        share = self.share(db)
        full = layer(False)
        return full if share >= 1 else full.scaled(share) + layer(True).scaled(1 - share)

    def share(self, db: Database) -> float:
        """The share of layers that are priced with an index of their own."""
        told_apart = db.mode is Mode.SOL or db.find(f"{self.table}_skip") is not None
        return self.full_fraction if told_apart else 1.0

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        return self.terms_of(self._layers(db)) if db.mode.shared else None

    def _layers(self, db: Database) -> list[tuple[Surface, float]]:
        """What was measured of each kind of layer, with the share of layers of that kind."""
        self.rates(db.system)
        share = self.share(db)
        full = (self.surface(db, False, "trtllm"), min(share, 1.0))
        return [full] if share >= 1 else [full, (self.surface(db, True, "trtllm"), 1 - share)]

    def layer(self, db: Database, at: Points, skip: bool, bucket: str) -> Answer:
        """One layer that computes (or, ``skip``, reuses) its index."""
        self.rates(db.system)

        def empirical(at: Points) -> Answer:
            try:
                surface = self.surface(db, skip, bucket)
            except PerfDataMissing as error:
                raise no_basis(self.name) from error
            own = self.own_surface(db, surface)
            return self.estimate(db, surface, at, (float(self.heads),)) if own is None else self.estimate(db, own, at)

        return by_mode(
            db,
            at,
            silicon=lambda at: self.silicon(db, at, skip, bucket),
            empirical=empirical,
            sol=lambda at: self.roofline(db.system, skip, float(self.heads), *self.coords(at)).time,
        )

    def weight_bytes(self) -> float:
        m, n = self.shape, self.heads
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

    context: ClassVar[bool] = True
    table: ClassVar[str] = "dsa_context"

    @property
    def key(self) -> tuple[Key, ...]:
        return self.fmha_quant, self.kv_quant, self.gemm_quant, self.architecture

    def roofline(self, system: SystemSpec, skip: bool, n: F64 | float, *coords: F64) -> Split:
        prefix, s, batch = coords
        m, topk = self.shape, self.index_topk
        gemm_bytes, fmha_bytes, kv_bytes = self.widths
        tokens, total = batch * s, s + prefix
        searched = np.where(total <= topk, 0.0, 0.0 if skip else 1.0)
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

    def price(self, db: Database, at: Points) -> Answer:
        return super().price(db, at) if self.cp <= 1 else self.blended(db, lambda skip: self._shared(db, at, skip))

    def evaluate(self, db: Database, at: Points) -> Answer:
        # the deltas of context parallelism may make a sum negative; the reference lets it stand
        return super().evaluate(db, at) if self.cp <= 1 else self.price(db, at).scaled(self.scale)

    def _shared(self, db: Database, at: Points, skip: bool) -> Answer:
        """A rank's tokens, its share of the indexer, and the gathers (spec/04 section 9)."""
        m, elements = self.shape, at.batch * at.s
        # before all else, as in the reference: kernels that were never measured alone are told first
        delta = dsa_delta(db, KERNELS.get(self.architecture, "glm5"), self.heads, self.cp, at, skip)
        answer = self.layer(db, at.with_(s=chunk_of(at.s, self.cp)), skip, "flashmla_kv") + delta
        if not skip:
            answer += all_gather(db, self.cp, elements * m.index_head_dim)
        answer += all_gather(db, self.cp, elements * m.latent)
        return answer.tagged(Source.ESTIMATED)


@dataclass(frozen=True, kw_only=True)
class DsaGeneration(_Dsa):
    """Decode; all its rows are measured with ``fmha_quant`` bfloat16."""

    context: ClassVar[bool] = False
    table: ClassVar[str] = "dsa_generation"

    @property
    def key(self) -> tuple[Key, ...]:
        return self.kv_quant, self.gemm_quant, self.architecture

    def rates(self, system: SystemSpec) -> tuple[float, float, float]:
        gemm_rate, _, index_rate = super().rates(system)
        return gemm_rate, system.rate(BF16), index_rate

    def surface(self, db: Database, skip: bool, bucket: str) -> Surface:
        if self.fmha_quant != BF16.name:
            raise PerfDataMissing(f"decode of {self.table} was measured with fmha_quant bfloat16 only", op=self.name)
        return super().surface(db, skip, bucket)

    def roofline(self, system: SystemSpec, skip: bool, n: F64 | float, *coords: F64) -> Split:
        batch, s = coords
        m = self.shape
        gemm_bytes, _, kv_bytes = self.widths
        attended = np.minimum(s, m.index_topk)
        index = 2 * batch * m.index_heads * m.index_head_dim * s
        attention = 2 * batch * n * (m.latent + m.kv_lora_rank) * attended
        moved = m.weights(n) * gemm_bytes + batch * s * m.index_entry_bytes + batch * attended * m.latent * kv_bytes
        gemm_rate, fmha_rate, index_rate = self.rates(system)
        seconds = m.gemm_flops(batch, n) / gemm_rate + index / index_rate + attention / fmha_rate
        return Split.of(seconds * 1000, system.memory_sol_ms(moved))
