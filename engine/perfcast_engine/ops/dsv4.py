"""DeepSeek-V4 attention, compressed with a learned index (CSA) or heavily compressed (HCA) (spec/04 section 4)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
from perfcast_surface.blend import Held
from perfcast_surface.terms import Decode, Prefixed, Term

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points, Source
from perfcast_engine.errors import InvalidField, PerfDataMissing
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.base import by_mode, measured, no_basis, no_slice, require, slice_of
from perfcast_engine.ops.context_parallel import all_gather, chunk_of, csa_delta
from perfcast_engine.ops.sparse import FP8, SparseModule
from perfcast_engine.ops.topk_calibration import topk_excess
from perfcast_engine.quant import QuantMode
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

COMPRESSION = {"csa": 4, "hca": 128}  # tokens that share one cache entry
BF16 = quant.FMHA["bfloat16"]


@dataclass(frozen=True, kw_only=True)
class _Dsv4(SparseModule):
    """What both phases share. heads and o_groups: per GPU; native_heads: of the model; window: tokens;
    correct_topk: take what unrealistic index scores cost out of measured CSA."""

    kind: Literal["csa", "hca"]
    native_heads: int
    tp: int
    architecture: str
    hidden: int
    q_lora_rank: int
    o_lora_rank: int
    head_dim: int
    rope_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    window: int
    o_groups: int
    correct_topk: bool = True

    phase: ClassVar[str]
    score_variant: ClassVar[str]  # of the top-k calibration

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, native_heads=1, tp=1, hidden=1, q_lora_rank=0, o_lora_rank=0, head_dim=1, rope_head_dim=0)
        require(self, index_heads=0, index_head_dim=0, index_topk=0, window=0, o_groups=0)
        if self.kind not in COMPRESSION:
            raise InvalidField("kind", f"one of {', '.join(COMPRESSION)}, not {self.kind!r}")

    @property
    def learned(self) -> bool:
        """Whether a learned index picks the cache entries to attend (CSA)."""
        return self.kind == "csa"

    @property
    @abstractmethod
    def key(self) -> tuple[Key, ...]:
        """The table key above the heads."""

    @abstractmethod
    def attention(self, system: SystemSpec) -> QuantMode:
        """What attention computes in."""

    @abstractmethod
    def roofline(self, system: SystemSpec, *coords: F64) -> F64:
        """ms at coordinates of the table."""

    def price(self, db: Database, at: Points) -> Answer:
        self.rates(db.system)
        return by_mode(
            db,
            at,
            silicon=lambda at: self._silicon(db, at),
            empirical=lambda at: self._empirical(db, at),
            sol=lambda at: self.roofline(db.system, *self.coords(at)),
        )

    def _silicon(self, db: Database, at: Points) -> Answer:
        answer = measured(self._surface(db), self.coords(at), self.name, self.axes)
        excess = self._excess(db)
        if excess is None:
            return answer
        if self.context:
            off = excess.at(at.batch, at.s, at.prefix)
        else:
            off = excess.at(at.batch, np.ones(len(at)), np.maximum(at.s - 1, 0))
        return replace(answer, ms=np.maximum(answer.ms - off, 0.0))

    def _excess(self, db: Database) -> Held | None:
        wanted = self.learned and self.correct_topk
        return topk_excess(db, self.native_heads, self.score_variant) if wanted else None

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        if not db.mode.shared:
            return None
        self.rates(db.system)
        blend = self._surface(db).blend()
        kind = Prefixed if self.context else Decode
        return None if blend is None else (kind(blend, self.scale, self._excess(db)),)

    def _empirical(self, db: Database, at: Points) -> Answer:
        try:
            surface = self._surface(db)
        except PerfDataMissing as error:
            raise no_basis(self.name) from error
        return self.estimate(db, surface, at)

    def _surface(self, db: Database) -> Surface:
        """The rows of the nearest measured head counts: of the model, then of a GPU."""
        name = f"dsv4_{self.kind}_{self.phase}_module"

        def choose() -> tuple[Key, ...]:
            table = db.table(name)
            if table.rows(*self.key) is None:
                raise no_slice(table, self.key)
            native = _measured_heads(table.children(*self.key), self.native_heads)
            local = _measured_heads(table.children(*self.key, native), self.heads)
            return (*self.key, native, local, COMPRESSION[self.kind])

        key = db.kept(("heads", name, self.key, self.native_heads, self.heads), choose)
        return slice_of(db, name, key, lambda *c: self.roofline(db.system, *c), also=self._shapes)

    @cached_property
    def _shapes(self) -> tuple[Hashable, ...]:
        """What the roofline depends on."""
        other = {"name", "scale", "role", "architecture", "native_heads", "tp", "cp", "correct_topk"}
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in other)

    def rates(self, system: SystemSpec) -> tuple[float, float, float, float]:
        """FLOP/s of (gemm, attention, fp8 indexer, bfloat16); SystemFlopsMissing where the system lacks one."""
        return (
            system.rate(quant.GEMM[self.gemm_quant]),
            system.rate(self.attention(system)),
            system.rate(FP8),
            system.rate(BF16),
        )

    def times(self, system: SystemSpec, tokens: F64, batch: F64, length: F64, pairs: F64) -> F64:
        """Roofline, ms, of ``tokens`` new tokens of ``batch`` requests of ``length`` tokens each that attend ``pairs``
        (query, cache entry) pairs."""
        h, q, o, n, d = self.hidden, self.q_lora_rank, self.o_lora_rank, self.heads, self.head_dim
        groups, index_dims = max(1, self.o_groups), self.index_heads * self.index_head_dim
        gemm_bytes, _, kv_bytes = self.widths
        streams = 2 if self.learned else 1
        projections = h * q + q * n * d + h * d + groups * o * h
        compressor = 2 * h * streams * d
        gemm = 2 * tokens * projections + 2 * tokens * (compressor + streams * d)
        half = 2 * tokens * n * d * o
        weights = (projections + compressor) * gemm_bytes + n * d * o * 2
        moved = tokens * (h + q + n * d + d + groups * o) * gemm_bytes + pairs * d * kv_bytes
        moved += tokens * n * self.rope_head_dim * self.attention(system).bytes
        index: float | F64 = 0.0
        if self.learned:
            entries = np.floor(length / COMPRESSION[self.kind])
            gemm += 2 * tokens * (2 * h * 2 * self.index_head_dim + 2 * self.index_head_dim)
            half += 2 * tokens * h * self.index_heads
            index = 2 * tokens * index_dims * (q + entries)
            weights += q * index_dims * gemm_bytes + h * self.index_heads * 2
            moved += batch * entries * self.index_head_dim / 2
        gemm_rate, attention_rate, index_rate, half_rate = self.rates(system)
        seconds = gemm / gemm_rate + half / half_rate + index / index_rate + 4 * n * d * pairs / attention_rate
        return np.maximum(seconds * 1000, system.memory_sol_ms(weights + moved))

    def weight_bytes(self) -> float:
        h, q, n, d = self.hidden, self.q_lora_rank, self.heads, self.head_dim
        ratio, streams = COMPRESSION[self.kind], 2 if self.learned else 1
        gemm = h * q + q * n * d + h * d + self.o_groups * self.o_lora_rank * h + 2 * h * streams * d
        half = n * d * self.o_lora_rank
        full = n + ratio * streams * d
        if self.learned:
            gemm += q * self.index_heads * self.index_head_dim + 4 * h * self.index_head_dim
            half += h * self.index_heads
            full += 2 * ratio * self.index_head_dim
        return self.scale * (gemm * quant.GEMM[self.gemm_quant].bytes + half * 2 + full * 4)


@dataclass(frozen=True, kw_only=True)
class Dsv4Context(_Dsv4):
    """Prefill. cp: context-parallel ranks that share the new tokens."""

    cp: int = 1

    context: ClassVar[bool] = True
    phase: ClassVar[str] = "context"
    score_variant: ClassVar[str] = "v1"

    @property
    def key(self) -> tuple[Key, ...]:
        return self.fmha_quant, self.kv_quant, self.gemm_quant

    def attention(self, system: SystemSpec) -> QuantMode:
        return quant.FMHA[self.fmha_quant]

    def roofline(self, system: SystemSpec, *coords: F64) -> F64:
        prefix, s, batch = coords
        ratio, total = COMPRESSION[self.kind], prefix + s
        ramp = np.clip(self.window - prefix, 0, s)
        windowed = ramp * prefix + ramp * (ramp + 1) / 2 + (s - ramp) * self.window
        most = np.full(len(s), float(self.index_topk)) if self.learned else np.floor(total / ratio)
        full = most * ratio - 1  # the last position that sees fewer entries than ``most``
        compressed = _sum_of_floors(np.minimum(total, full), ratio) - _sum_of_floors(np.minimum(prefix, full), ratio)
        compressed += np.maximum(0, total - np.maximum(prefix, full)) * most
        pairs = batch * (windowed + compressed)
        return self.times(system, batch * s, batch, total, pairs)

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        return super().terms(db) if self.cp <= 1 else None

    def price(self, db: Database, at: Points) -> Answer:
        if self.cp <= 1:
            return super().price(db, at)
        answer = super().price(db, at.with_(s=chunk_of(at.s, self.cp)))
        if self.learned:
            answer += csa_delta(db, self.native_heads, self.tp, self.cp, at)
            shared = at.s * self.index_head_dim
        else:
            shared = (np.minimum(at.s, self.window) if self.window else at.s) * self.head_dim
        entries = np.floor(at.s / COMPRESSION[self.kind]) * self.head_dim
        for elements in (shared, entries):
            answer += all_gather(db, self.cp, at.batch * elements)
        return answer.tagged(Source.ESTIMATED)


@dataclass(frozen=True, kw_only=True)
class Dsv4Generation(_Dsv4):
    """Decode; attention computes as the cache allows, not in ``fmha_quant``."""

    context: ClassVar[bool] = False
    phase: ClassVar[str] = "generation"
    score_variant: ClassVar[str] = "v2"

    @property
    def key(self) -> tuple[Key, ...]:
        return self.kv_quant, self.gemm_quant

    def attention(self, system: SystemSpec) -> QuantMode:
        return quant.FMHA["fp8"] if self.kv_quant == "fp8" and system.has_fp8_decode_attention else BF16

    def roofline(self, system: SystemSpec, *coords: F64) -> F64:
        batch, s = coords
        length = np.maximum(s - 1, 0)
        entries = np.floor(length / COMPRESSION[self.kind])
        attended = np.minimum(entries, self.index_topk) if self.learned else entries
        return self.times(system, batch, batch, length, batch * (np.minimum(length, self.window) + attended))


def _sum_of_floors(n: F64, ratio: int) -> F64:
    """Sum of floor(t / ratio) for t from 0 to n; 0 for n < 0."""
    n = np.maximum(n, 0)
    k = np.floor(n / ratio)
    total: F64 = ratio * k * (k - 1) / 2 + k * (n - k * ratio + 1)
    return total


def _measured_heads(heads: Sequence[Key], wanted: int) -> int:
    """The largest measured count that is not above ``wanted``, else the smallest."""
    counts = [int(count) for count in heads]
    return max((count for count in counts if count <= wanted), default=min(counts))
