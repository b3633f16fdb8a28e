"""DeepSeek-V4: attention compressed with a learned index (CSA) or heavily (HCA), hyper-connections (spec/04 4, 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from perfcast_surface.blend import Blend, Held
from perfcast_surface.terms import Term

from perfcast_engine import quant
from perfcast_engine.answer import Answer, Points, Source, total
from perfcast_engine.errors import InvalidField
from perfcast_engine.interp.grid import Sol
from perfcast_engine.ops.base import Op, TokenOp
from perfcast_engine.ops.dsa import SparseModule
from perfcast_engine.ops.indexer import all_gather, chunk_of, csa_delta, topk_excess
from perfcast_engine.ops.measured import Slice, nearest_below, no_slice
from perfcast_engine.ops.roofline import resident, roofline
from perfcast_engine.quant import QuantMode
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key

COMPRESSION = {"csa": 4, "hca": 128}  # tokens that share one cache entry


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

    positive = ("heads", "native_heads", "tp", "hidden", "head_dim")
    beside_shape = Op.beside_shape | {"cp"}
    family = "dsv4"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in COMPRESSION:
            raise InvalidField("kind", f"one of {', '.join(COMPRESSION)}, not {self.kind!r}")

    @property
    def learned(self) -> bool:
        """Whether a learned index picks the cache entries to attend (CSA)."""
        return self.kind == "csa"

    @property
    def table(self) -> str:
        return f"dsv4_{self.kind}_{self.phase}_module"

    @property
    def lead(self) -> tuple[float, ...]:
        return ()

    def key(self, db: Database) -> tuple[Key, ...]:
        """Of the nearest measured head counts: of the model, then of a GPU."""
        table = db.table(self.table)
        if table.rows(*self.named_key) is None:
            raise no_slice(table, self.named_key)
        native = nearest_below(table.children(*self.named_key), self.native_heads)
        local = nearest_below(table.children(*self.named_key, native), self.heads)
        return *self.named_key, native, local, COMPRESSION[self.kind]

    def beside(self, db: Database) -> Slice | None:
        hca = replace(self, kind="hca")
        table = db.find(hca.table) if self.learned else None
        return None if table is None or table.rows(*self.named_key) is None else hca.slice(db)

    @property
    def figures(self) -> Mapping[str, Any]:
        return {"learned": self.learned, "ratio": COMPRESSION[self.kind], **vars(self)}

    def modes(self, system: SystemSpec) -> dict[str, QuantMode]:
        modes = super().modes(system)
        return {**modes, "attention": modes["fmha" if self.context else "decode"]}

    def silicon(self, db: Database, at: Points) -> Answer:
        answer, excess = super().silicon(db, at), self._excess(db)
        if excess is None:
            return answer
        new, past = (at.s, at.prefix) if self.context else (np.ones(len(at)), np.maximum(at.s - 1, 0))
        return replace(answer, ms=np.maximum(answer.ms - excess.at(at.batch, new, past), 0.0))

    def _excess(self, db: Database) -> Held | None:
        if not (self.learned and self.correct_topk):
            return None
        return topk_excess(db, self.native_heads, "v1" if self.context else "v2")

    def term(self, db: Database, blend: Blend) -> Term:
        return replace(super().term(db, blend), excess=self._excess(db))  # type: ignore[type-var]

    def weight_bytes(self) -> float:
        return resident("dsv4", {**self.figures, "gemm": quant.GEMM[self.gemm_quant].bytes})


@dataclass(frozen=True, kw_only=True)
class Dsv4Context(_Dsv4):
    """Prefill. cp: context-parallel ranks that share the new tokens."""

    cp: int = 1

    context = True
    keyed_by = ("fmha_quant", "kv_quant", "gemm_quant")

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

    context = False
    keyed_by = ("kv_quant", "gemm_quant")


HALVES = {"pre": ("pre",), "post": ("post",), "both": ("pre", "post")}


@dataclass(frozen=True, kw_only=True)
class Mhc(TokenOp):
    """One operator covers both sites of a layer. half: before the sites, after them, or both; hc_mult: residual
    streams."""

    half: Literal["pre", "post", "both"]
    hc_mult: int
    hidden: int
    architecture: str
    sinkhorn_iters: int = 20
    quant: str = "bfloat16"

    positive = ("hc_mult", "hidden")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.half not in HALVES:
            raise InvalidField("half", f"one of {', '.join(HALVES)}, not {self.half!r}")

    def weight_bytes(self) -> float:
        return resident("mhc", {**vars(self), "gemm": quant.GEMM[self.quant].bytes})

    def price(self, db: Database, at: Points) -> Answer:
        db.system.rate(quant.GEMM[self.quant])
        halves, tokens = HALVES[self.half], self.tokens(at)
        if db.mode is Mode.SOL:
            return Answer.of(self._judge(db.system, halves)(tokens), Source.SOL)
        at, slices = at.with_(x=tokens), [self._slice(db.system, half) for half in halves]
        return total((each.over_tokens(db, at, self.name) for each in slices), len(at))

    def _slice(self, system: SystemSpec, half: str) -> Slice:
        return Slice("mhc_module", (half, self.hc_mult, self.hidden), self._judge(system, (half,)), also=self.shape)

    def _judge(self, system: SystemSpec, halves: tuple[str, ...]) -> Sol:
        """ms of the given halves, run as one, over tokens."""
        figures = {**vars(self), **{half: half in halves for half in HALVES["both"]}}
        judge = roofline("mhc", figures, {"gemm": quant.GEMM[self.quant]}, system)
        return lambda tokens: judge(tokens).time
