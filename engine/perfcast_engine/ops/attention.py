"""Dense attention kernels of prefill, decode and vision encoders (spec/02 sections 5.3 to 5.6, 6.2, 9.5)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from perfcast_surface.averaged import Averaged
from perfcast_surface.blend import Blend
from perfcast_surface.terms import SAMPLES, Causal, DecodeMean, One, Term, decode_lengths, decode_lengths_one

from perfcast_engine import data, quant
from perfcast_engine.answer import F64, Answer, Miss, Points, Source, Tier, choose
from perfcast_engine.errors import InvalidField
from perfcast_engine.interp.grid import Query
from perfcast_engine.interp.surface import Everywhere
from perfcast_engine.ops.base import Role, Split, memory_bound
from perfcast_engine.ops.measured import Attention, Basis, Generation, Prefill, no_slice
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key, Table

OVERHEAD = 1.1  # on the memory-bound steps around a kernel
USUAL_HEAD_DIM = 128


@dataclass(frozen=True, kw_only=True)
class _Dense(Attention):
    """``window``: sliding window in tokens, 0 for full attention; ``lanes``: kernels in order of preference, the table
    has rows of each (``tables.lanes.lane_order``), keyed by head size and window last."""

    kv_heads: int
    head_dim: int
    window: int = 0
    lanes: tuple[str, ...] = ("default",)
    role: Role = Role.ATTENTION

    positive = ("heads", "kv_heads", "head_dim", "cp")

    @property
    def grouped(self) -> int:
        """KV heads as tables key them: 0 where every query head has its own."""
        return 0 if self.kv_heads == self.heads else self.kv_heads

    @cached_property
    def shape(self) -> tuple[Hashable, ...]:
        return self.lanes, *self.named_key

    def key(self, db: Database) -> tuple[Key, ...]:
        """Of the first of ``lanes`` that holds the slice, else of the table's first lane that does."""
        table = db.table(self.table)
        for lane in (*self.lanes, *_others(table, self.lanes)):
            if table.rows(lane, *self.named_key) is not None:
                return lane, *self.named_key
        raise no_slice(table, (table.children()[0], *self.named_key))

    def basis(self, db: Database) -> Basis:
        """Its own slice, else that of the nearest head size; of its window first, then of full attention."""
        return db.kept((type(self), "basis", self.shape), lambda: self._basis(db))

    def _basis(self, db: Database) -> Basis:
        for window in dict.fromkeys((self.window, 0)):
            near = replace(self, window=window)
            for donor in (near, *(near._donors(db) if Tier.XSHAPE in db.policy else ())):
                util = Attention.basis(donor, db).util
                if util is not None:
                    tier = Tier.EMPIRICAL if donor is near else Tier.XSHAPE
                    return Basis(util, tier, self._relative_util(db.backend) / donor._relative_util(db.backend))
        return Basis(None)

    def _donors(self, db: Database) -> Iterator[_Dense]:
        """The same at the usual head size, or at the nearest measured one, in each lane."""
        table = db.find(self.table)
        if table is None:
            return
        for lane in (*self.lanes, *sorted(_others(table, self.lanes))):
            sizes = [int(size) for size in table.children(lane, *self.named_key[:-2]) if size != 0]
            if sizes:
                nearest = min(sizes, key=lambda size: abs(math.log(size / self.head_dim)))
                donor = replace(self, head_dim=USUAL_HEAD_DIM if USUAL_HEAD_DIM in sizes else nearest, lanes=(lane,))
                if table.rows(lane, *donor.named_key) is not None:
                    yield donor

    def _relative_util(self, backend: str) -> float:
        """Utilisation relative to that at the usual head size; 1 where nobody measured it."""
        rows = data.table("kernels")["head_dim_ratio"]
        curve = rows.get(self.table, {}).get(backend)
        return 1.0 if curve is None else float(np.interp(math.log2(self.head_dim), np.log2(rows["sizes"]), curve))

    def extra_ms(self, db: Database) -> float:
        """What the kernel's measurement leaves out."""
        return 0.0

    def sol(self, db: Database, at: Points) -> Split:
        extra = Split.memory(np.full(len(at), self.extra_ms(db)))
        return super().sol(db, at).plus(extra).scaled(at.imbalance)

    def price(self, db: Database, at: Points) -> Answer:
        answer, extra = super().price(db, at), self.extra_ms(db)
        if extra:
            answer += Answer.of(np.full(len(at), extra), Source.SOL if db.mode is Mode.SOL else Source.EMPIRICAL)
        return answer.scaled(at.imbalance)


def _others(table: Table, lanes: tuple[str, ...]) -> list[str]:
    """The table's lanes beside ``lanes``, in order of first appearance."""
    return [str(lane) for lane in table.children() if lane not in lanes]


@dataclass(frozen=True, kw_only=True)
class ContextAttention(_Dense, Prefill):
    """Causal attention of the new tokens over prefix and themselves, with rotary embedding and cache write."""

    qk_norm: bool = False

    table = law = "context_attention"
    keyed_by = ("fmha_quant", "kv_quant", "grouped", "head_dim", "window")

    def extra_ms(self, db: Database) -> float:
        """Rotary embedding, cache write and norms of q and k."""
        cost = db.system.memory_sol_ms if db.mode is Mode.SOL else db.system.memory_ms
        q, k = float(self.heads * self.head_dim), float(self.kv_heads * self.head_dim)
        extra = 2 * cost(2 * q + 2 * k) + 2 * cost(k * quant.FMHA[self.fmha_quant].bytes)
        if self.qk_norm:
            extra += 2 * (2 * cost(2 * q) + 2 * cost(2 * k))
        return OVERHEAD * extra

    def terms_source(self, db: Database) -> Source:
        return Source.MIXED  # the measured kernel and the steps around it

    def term(self, db: Database, blend: Blend) -> Term:
        return Causal(blend, self.scale, self.extra_ms(db), self.cp)


@dataclass(frozen=True, kw_only=True)
class GenerationAttention(_Dense, Generation):
    """Attention of one new token per request over its cache, the mean over lengths around the asked one."""

    table = law = "generation_attention"
    keyed_by = ("kv_quant", "grouped", "head_dim", "window")
    clamp = True

    def silicon(self, db: Database, at: Points) -> Answer:
        """Tabulated inside of the measurements, sampled outside."""
        means = self._means(db)
        if means is None or self.slice(db).surface(db).grid.power is not None:
            return self._sampled(db, at)
        counts = at.batch.astype(np.int64), at.s.astype(np.int64)
        gone = (counts[0] != at.batch) | (counts[1] != at.s) | (at.s < 1)  # are no counts
        ms = np.where(gone, np.nan, means.at(*counts))
        gone = np.isnan(ms)
        return choose(gone, lambda some: self._sampled(db, some), lambda _: Answer.of(ms[~gone], Source.SILICON), at)

    def _means(self, db: Database) -> Averaged | None:
        """None where nothing was measured at such head counts."""
        surface = self.slice(db).surface(db)

        def build() -> Averaged | None:
            blend = surface.sheets(*self.lead).blend
            return None if blend is None else Averaged(blend.parts[0][1], decode_lengths)

        return db.kept(("decode", surface, self.heads), build)

    def _sampled(self, db: Database, at: Points) -> Answer:
        each = at.with_(batch=np.tile(at.batch, SAMPLES), s=decode_lengths(at.s).ravel())
        return _mean(super().silicon(db, each), len(at))

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        if not db.mode.shared:
            return None
        self.rates(db.system)
        means = self._means(db)
        return None if means is None else (DecodeMean(means, self.scale),)

    def outside(self, db: Database) -> One:
        read = Everywhere((), self.slice(db).surface(db), *self.lead).one

        def ms(batch: int, s: int, prefix: int) -> float:
            return sum(read(batch, length) for length in decode_lengths_one(s)) / SAMPLES * self.scale

        return ms

    def beyond(self, db: Database, at: Points) -> F64:
        each = np.tile(at.batch, SAMPLES), decode_lengths(at.s).ravel()
        ms = self.slice(db).surface(db).at(*self.lead, *each).ms.reshape(SAMPLES, len(at))
        mean: F64 = ms.sum(axis=0) / SAMPLES * self.scale
        return mean


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


@dataclass(frozen=True, kw_only=True)
class EncoderAttention(Attention):
    """Full attention of s patches in each of batch images. ``partial_rotary``: share of a head that is rotated."""

    head_dim: int
    fmha_quant: str = "bfloat16"
    partial_rotary: float = 0.0

    positive = ("heads", "head_dim")
    table = law = "encoder_attention"
    keyed_by = ("fmha_quant", "head_dim")
    sqrt_axis = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fmha_quant != "bfloat16":
            raise InvalidField("fmha_quant", f"encoder attention knows bfloat16 only, not {self.fmha_quant!r}")

    def coords(self, at: Points) -> Query:
        return at.s, at.batch

    def _rotary_bytes(self, at: Points) -> F64:
        return 4.0 * self.heads * self.head_dim * at.batch * at.s

    def sol(self, db: Database, at: Points) -> Split:
        rotary = Split.memory(db.system.memory_sol_ms(self._rotary_bytes(at)))
        return super().sol(db, at).plus(rotary.scaled(OVERHEAD * 2 * self.partial_rotary))

    def price(self, db: Database, at: Points) -> Answer:
        rotary = memory_bound(db, self._rotary_bytes(at)).scaled(OVERHEAD * 2 * self.partial_rotary)
        return super().price(db, at) + rotary

    def terms(self, db: Database) -> None:
        return None
