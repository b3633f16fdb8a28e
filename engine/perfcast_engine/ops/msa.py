"""MiniMax sparse attention (spec/04 section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perfcast_engine.answer import Answer, Points, Source, Tier
from perfcast_engine.errors import EngineError
from perfcast_engine.ops.base import Split
from perfcast_engine.ops.dsa import DsaContext, DsaGeneration
from perfcast_engine.ops.measured import Coord, no_basis
from perfcast_engine.ops.sparse import BucketedModule, causal_pairs
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database


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
