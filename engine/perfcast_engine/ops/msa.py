"""MiniMax sparse attention (spec/04 section 6)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from perfcast_surface.terms import Term

from perfcast_engine.answer import F64, Answer, Points, Source, Tier
from perfcast_engine.errors import EngineError
from perfcast_engine.ops.base import Split, by_mode, no_basis, require
from perfcast_engine.ops.dsa import DsaContext, DsaGeneration
from perfcast_engine.ops.sparse import BucketedModule, causal_pairs
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

ARCHITECTURE = "MiniMaxM3ForCausalLM"  # of the measured rows


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

    donor: ClassVar[type[DsaContext] | type[DsaGeneration]]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, kv_heads=0, hidden=1, head_dim=1, v_head_dim=0, index_heads=0, index_head_dim=0)
        require(self, index_topk=1, block_size=1, donor_scale=1e-12)

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        return (
            self.fmha_quant,
            self.kv_heads,
            self.hidden,
            self.head_dim,
            self.v_head_dim,
            self.index_heads,
            self.index_head_dim,
            self.index_topk,
            self.block_size,
        )

    def split(self, system: SystemSpec, n: F64 | float, tokens: F64, batch: F64, length: F64, pairs: F64) -> Split:
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

    def price(self, db: Database, at: Points) -> Answer:
        self.rates(db.system)
        return by_mode(
            db,
            at,
            silicon=lambda at: self.silicon(db, at),
            empirical=lambda at: self._borrowed(db, at),
            sol=lambda at: self.roofline(db.system, False, float(self.heads), *self.coords(at)).time,
        )

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        if not db.mode.shared:
            return None
        self.rates(db.system)
        return self.terms_of([(self.surface(db, False, "trtllm"), 1.0)])

    def _borrowed(self, db: Database, at: Points) -> Answer:
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
        own = self.roofline(db.system, False, float(self.heads), *self.coords(at)).time
        theirs = donor.roofline(db.system, False, float(self.heads), *self.coords(at)).time
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

    context: ClassVar[bool] = True
    table: ClassVar[str] = "msa_context"
    donor: ClassVar[type[DsaContext] | type[DsaGeneration]] = DsaContext

    @property
    def key(self) -> tuple[Key, ...]:
        return self.fmha_quant, self.kv_quant, self.gemm_quant, ARCHITECTURE

    def roofline(self, system: SystemSpec, skip: bool, n: F64 | float, *coords: F64) -> Split:
        prefix, s, batch = coords
        return self.split(system, n, batch * s, batch, prefix + s, causal_pairs(batch, s, prefix, self.index_topk))


@dataclass(frozen=True, kw_only=True)
class MsaGeneration(_Msa):
    """Decode; its rows are not told apart by ``fmha_quant``."""

    context: ClassVar[bool] = False
    table: ClassVar[str] = "msa_generation"
    donor: ClassVar[type[DsaContext] | type[DsaGeneration]] = DsaGeneration

    @property
    def key(self) -> tuple[Key, ...]:
        return self.kv_quant, self.gemm_quant, ARCHITECTURE

    def roofline(self, system: SystemSpec, skip: bool, n: F64 | float, *coords: F64) -> Split:
        batch, s = coords
        length = np.maximum(s - 1, 0)
        return self.split(system, n, batch, batch, length, batch * np.minimum(length, self.index_topk))
