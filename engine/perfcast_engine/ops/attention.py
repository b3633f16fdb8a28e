"""Dense attention kernels of prefill and decode (spec/02 sections 5.3, 5.4, 5.6, 6.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from perfcast_surface.averaged import Averaged
from perfcast_surface.terms import SAMPLES, Causal, DecodeMean, Term, decode_lengths

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Miss, Points, Source, choose, total
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.attention_kernels import Kernels, head_dim_ratio
from perfcast_engine.ops.attention_roofline import ContextRoofline, GenerationRoofline, causal_share
from perfcast_engine.ops.base import Op, Quick, Reads, Role, Split, by_mode, estimated, measured, rank_parts, require
from perfcast_engine.tables.database import Database, Mode

EXTRA_OVERHEAD = 1.1  # on the memory-bound steps around the kernel


@dataclass(frozen=True, kw_only=True)
class ContextAttention(Op):
    """Causal attention of the new tokens over prefix and themselves, with rotary embedding and cache write.

    ``window``: sliding window in tokens, 0 for full attention; ``cp``: context-parallel GPUs that share the sequence;
    ``lanes``: kernels in order of preference (``tables.lanes.lane_order``).
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_quant: str
    fmha_quant: str
    window: int = 0
    qk_norm: bool = False
    cp: int = 1
    lanes: tuple[str, ...] = ("default",)
    role: Role = Role.ATTENTION

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def __post_init__(self) -> None:
        require(self, heads=1, kv_heads=1, head_dim=1, window=0, cp=1)
        quant.mode(quant.KV_CACHE, self.kv_quant, "kv_quant")
        quant.mode(quant.FMHA, self.fmha_quant, "fmha_quant")

    @property
    def _kv_heads(self) -> int:
        return 0 if self.kv_heads == self.heads else self.kv_heads

    def _roofline(self, db: Database, head_dim: int, window: int) -> ContextRoofline:
        kv, fmha = quant.KV_CACHE[self.kv_quant], quant.FMHA[self.fmha_quant]
        return ContextRoofline(db.system, fmha, kv, self._kv_heads, head_dim, window)

    def _extra_ms(self, db: Database) -> float:
        """Rotary embedding, cache write and norms of q and k, which the kernel's measurement leaves out."""
        cost = db.system.memory_sol_ms if db.mode is Mode.SOL else db.system.memory_ms
        q, k = float(self.heads * self.head_dim), float(self.kv_heads * self.head_dim)
        extra = 2 * cost(2 * q + 2 * k) + 2 * cost(k * quant.FMHA[self.fmha_quant].bytes)
        if self.qk_norm:
            extra += 2 * (2 * cost(2 * q) + 2 * cost(2 * k))
        return EXTRA_OVERHEAD * extra

    def sol(self, db: Database, at: Points) -> Split:
        roofline = self._roofline(db, self.head_dim, self.window)
        out = Split.memory(np.full(len(at), self._extra_ms(db)))
        for part in rank_parts(at, self.cp):
            out = out.plus(roofline.split(self.heads, part.s + part.prefix, part.batch, part.prefix))
        return out.scaled(at.imbalance)

    def _kernels(self, db: Database) -> Kernels:
        return Kernels(
            "context_attention",
            self.lanes,
            (self.fmha_quant, self.kv_quant, self._kv_heads),
            self.head_dim,
            self.window,
            lambda head_dim, window: self._roofline(db, head_dim, window),
            sqrt_axis=1,
        )

    def price(self, db: Database, at: Points) -> Answer:
        db.system.rate(quant.FMHA[self.fmha_quant])
        parts = [self._kernel(db, part) for part in rank_parts(at, self.cp)]
        source = Source.SOL if db.mode is Mode.SOL else Source.EMPIRICAL
        parts.append(Answer.of(np.full(len(at), self._extra_ms(db)), source))
        return total(parts, len(at)).scaled(at.imbalance)

    def _kernel(self, db: Database, at: Points) -> Answer:
        heads = float(self.heads)

        def sol(part: Points) -> F64:
            roofline = self._roofline(db, self.head_dim, self.window)
            return roofline.split(heads, part.s + part.prefix, part.batch, part.prefix).time

        def silicon(part: Points) -> Answer:
            full = part.s + part.prefix
            surface = self._kernels(db).measured(db)
            answer = measured(surface, (heads, full, part.batch), self.name, ("num_heads", "isl", "batch_size"))
            return answer.scaled(causal_share(full, part.prefix))

        def empirical(part: Points) -> Answer:
            basis = self._kernels(db).basis(db)
            k = head_dim_ratio(db.backend, self.head_dim) / head_dim_ratio(db.backend, basis.head_dim)
            query = heads, part.s + part.prefix, part.batch
            return estimated(basis.util, query, sol(part), self.name, basis.tier, k)

        return by_mode(db, at, silicon=silicon, empirical=empirical, sol=sol)

    def terms_source(self, db: Database) -> Source:
        return Source.MIXED  # the measured kernel and the steps around it

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        if not db.mode.shared:
            return None
        db.system.rate(quant.FMHA[self.fmha_quant])
        blend = self._kernels(db).measured(db).blend(float(self.heads))
        return None if blend is None else (Causal(blend, self.scale, self._extra_ms(db), self.cp),)


@dataclass(frozen=True, kw_only=True)
class GenerationAttention(Op):
    """Attention of one new token per request over its cache; fields as in ``ContextAttention``."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_quant: str
    window: int = 0
    lanes: tuple[str, ...] = ("default",)
    role: Role = Role.ATTENTION

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def __post_init__(self) -> None:
        require(self, heads=1, kv_heads=1, head_dim=1, window=0)
        quant.mode(quant.KV_CACHE, self.kv_quant, "kv_quant")

    @property
    def _kv_heads(self) -> int:
        return 0 if self.kv_heads == self.heads else self.kv_heads

    def _roofline(self, db: Database, head_dim: int, window: int) -> GenerationRoofline:
        return GenerationRoofline(db.system, quant.KV_CACHE[self.kv_quant], self._kv_heads, head_dim, window)

    def sol(self, db: Database, at: Points) -> Split:
        roofline = self._roofline(db, self.head_dim, self.window)
        return roofline.split(self.heads, at.batch, at.s).scaled(at.imbalance)

    def _kernels(self, db: Database) -> Kernels:
        return Kernels(
            "generation_attention",
            self.lanes,
            (self.kv_quant, self._kv_heads),
            self.head_dim,
            self.window,
            lambda head_dim, window: self._roofline(db, head_dim, window),
            clamp=True,
        )

    def price(self, db: Database, at: Points) -> Answer:
        roofline = self._roofline(db, self.head_dim, self.window)
        roofline.rate()

        def sol(part: Points) -> F64:
            return roofline.split(self.heads, part.batch, part.s).time

        def empirical(part: Points) -> Answer:
            basis = self._kernels(db).basis(db)
            query = float(self.heads), part.batch, part.s
            return estimated(basis.util, query, sol(part), self.name, basis.tier)

        answer = by_mode(db, at, silicon=lambda part: self._silicon(db, part), empirical=empirical, sol=sol)
        return answer.scaled(at.imbalance)

    def _silicon(self, db: Database, at: Points) -> Answer:
        """The mean over the lengths around the asked one: tabulated inside of the measurements, sampled outside."""
        surface = self._kernels(db).measured(db)
        means = self._means(db, surface)
        if means is None or surface.grid.power is not None:
            return self._sampled(surface, at)
        ms = means.at(at.batch, at.s)
        gone = np.isnan(ms)
        return choose(
            gone, lambda some: self._sampled(surface, some), lambda _: Answer.of(ms[~gone], Source.SILICON), at
        )

    def _means(self, db: Database, surface: Surface) -> Averaged | None:
        """None where nothing was measured at such head counts."""

        def build() -> Averaged | None:
            blend = surface.blend(float(self.heads))
            return None if blend is None else Averaged(blend.parts[0][1], decode_lengths)

        return db.kept(("decode", surface, self.heads), build)

    def _sampled(self, surface: Surface, at: Points) -> Answer:
        lengths = decode_lengths(at.s)
        query = float(self.heads), np.tile(at.batch, SAMPLES), lengths.ravel()
        each = measured(surface, query, self.name, ("num_heads", "batch_size", "seq"))
        return _mean(each, len(at))

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        if not db.mode.shared:
            return None
        self._roofline(db, self.head_dim, self.window).rate()
        means = self._means(db, self._kernels(db).measured(db))
        return None if means is None else (DecodeMean(means, self.scale),)

    def outside(self, db: Database) -> Quick:
        surface, heads = self._kernels(db).measured(db), float(self.heads)

        def ms(batch: float, s: float, prefix: float) -> float:
            lengths = decode_lengths(np.array([float(s)])).ravel()
            each = surface.at(heads, np.full(SAMPLES, float(batch)), lengths).ms
            return float(each.sum()) / SAMPLES * self.scale

        return ms


def _mean(each: Answer, n: int) -> Answer:
    """The mean over the samples of each of ``n`` points; a point misses where any of its samples does."""
    misses: list[Miss] = [(np.any(mask.reshape(SAMPLES, n), axis=0), error) for mask, error in each.misses]
    return Answer(
        each.ms.reshape(SAMPLES, n).sum(axis=0) / SAMPLES,
        each.source[:n],
        each.tier[:n],
        each.energy.reshape(SAMPLES, n).sum(axis=0) / SAMPLES,
        misses,
    )
