"""Multi-head latent attention: kernels, modules, absorbed batched GEMM, blocks of large EP (spec/03 sections 8-11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from perfcast_engine.answer import F64, Answer, Points
from perfcast_engine.errors import UnsupportedCombination
from perfcast_engine.ops.base import Op, Reads, Split
from perfcast_engine.ops.measured import (
    Attention,
    Basis,
    Coord,
    Generation,
    Prefill,
    Slice,
    by_mode,
    nearest_below,
)
from perfcast_engine.ops.roofline import roofline
from perfcast_engine.quant import GEMM
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

HEADS = 128  # of the model whose blocks were measured


@dataclass(frozen=True, kw_only=True)
class ContextMla(Prefill):
    """Prefill MLA kernel at ``heads`` as the table keys them."""

    table = law = "context_mla"
    keyed_by: ClassVar[tuple[str, ...]] = ("fmha_quant", "kv_quant")


@dataclass(frozen=True, kw_only=True)
class ContextMlaModule(ContextMla):
    """Prefill MLA block measured as one unit, judged by the kernel it contains; ``native_heads`` of the unsharded
    model."""

    native_heads: int | None = None
    gemm_quant: str

    table = "mla_context_module"
    keyed_by = ("fmha_quant", "kv_quant", "gemm_quant")

    def key(self, db: Database) -> tuple[Key, ...]:
        return native_key(db, self, self.native_heads)


@dataclass(frozen=True, kw_only=True)
class GenerationMla(Generation):
    """Decode MLA kernel at ``heads`` as the table keys them."""

    table = law = "generation_mla"
    keyed_by: ClassVar[tuple[str, ...]] = ("kv_quant",)


@dataclass(frozen=True, kw_only=True)
class GenerationMlaModule(GenerationMla):
    """Decode MLA block measured as one unit; ``fmha_quant`` is carried and priced by nothing."""

    native_heads: int | None = None
    fmha_quant: str = "bfloat16"
    gemm_quant: str

    table, law = "mla_generation_module", "generation_mla_module"
    keyed_by = ("kv_quant", "gemm_quant")

    def key(self, db: Database) -> tuple[Key, ...]:
        return native_key(db, self, self.native_heads)


def native_key(db: Database, op: Attention, native: int | None) -> tuple[Key, ...]:
    """The key under the measured model size that answers for ``native`` heads: itself, the only one, the largest below,
    the smallest. An unknown size is answered only where there is one."""
    table = db.find(op.table)
    sizes = [] if table is None else table.children(*op.named_key)
    known = len(sizes) == 1 or (native is not None and bool(sizes))
    return *op.named_key, nearest_below(sizes, native or 0) if known else -1


@dataclass(frozen=True, kw_only=True)
class MlaBmm(Op):
    """Absorbed batched GEMM before (``is_pre``) or after decode MLA, at rank-local ``heads``, one row a request."""

    heads: int
    quant: str
    is_pre: bool

    reads = Reads.BATCH
    positive = ("heads",)
    table = "mla_bmm"
    default_quant: ClassVar[str] = "bfloat16"  # where the asked one was not measured

    @property
    def measured_as(self) -> str:
        return "mla_gen_pre" if self.is_pre else "mla_gen_post"

    def _judge(self, db: Database, heads: int) -> Callable[[F64], Split]:
        return partial(roofline("mla_bmm", {}, {"gemm": GEMM[self.quant]}, db.system), float(heads))

    def sol(self, db: Database, at: Points) -> Split:
        return self._judge(db, self.heads)(at.batch)

    def price(self, db: Database, at: Points) -> Answer:
        db.system.rate(GEMM[self.quant])
        heads = db.kept(("bmm heads", self.shape), lambda: self._measured_heads(db))
        share, found, judge = self.heads / heads, db.find(self.table), self._judge(db, heads)

        def curve(*asked: Key) -> Slice:
            """Under the asked quantisation if any row has it under ``asked``, else under the default one."""
            held = found is not None and found.rows(self.quant, *asked) is not None
            key = (self.quant if held else self.default_quant, self.measured_as, heads)
            return Slice(self.table, key, lambda rows: judge(rows).time, also=self.quant)

        return by_mode(
            db,
            at,
            lambda db, at: curve(self.measured_as).measured(db, (at.batch,), self.name).scaled(share),
            lambda db, at: curve().estimated(db, (at.batch,), self.name).scaled(share),
            lambda db, at: self.sol(db, at).time,
        )

    def _measured_heads(self, db: Database) -> int:
        """The heads whose curve answers, scaled: our own if a power of two or measured, else the next power of two."""
        above = 1 << (self.heads - 1).bit_length()
        found = db.find(self.table)
        if above == self.heads or found is None:
            return above
        kept = self.quant if found.rows(self.quant) is not None else self.default_quant
        return self.heads if found.rows(kept, self.measured_as, self.heads) is not None else above


ASKABLE = ("flashinfer", "fa3")
STAND_IN = "trtllm_mla"  # the only kernel measured on Blackwell; not askable itself


@dataclass(frozen=True, kw_only=True)
class _WideEp(Attention):
    """A block as SGLang runs it under large EP. ``attn_backend`` names the kernel; ``heads`` = 128 // tp."""

    attn_backend: str = "flashinfer"

    def rates(self, system: SystemSpec) -> None:
        """A missing table is named before a missing rate here."""

    def sol(self, db: Database, at: Points) -> Split:
        return Op.sol(self, db, at)

    def key(self, db: Database) -> tuple[Key, ...]:
        """Of its kernel; of the one that stands in where only that was measured."""
        found, kernels = db.find(self.table), [self.attn_backend, *([STAND_IN] if self.attn_backend in ASKABLE else [])]
        held = (kernel for kernel in kernels if found and found.rows(kernel, *self.named_key) is not None)
        return next(held, self.attn_backend), *self.named_key

    def slice(self, db: Database) -> Slice:
        db.table(self.table)
        if self.attn_backend not in ASKABLE:
            raise self._unknown()
        return self._judged(db, np.floor)

    def basis(self, db: Database) -> Basis:
        found = db.find(self.table)
        if found is not None and self.attn_backend not in ASKABLE and found.rows(self.attn_backend) is None:
            raise self._unknown()
        return self._judged(db, np.rint).basis(db)

    def _judged(self, db: Database, whole: np.ufunc) -> Slice:
        """The rows by the roofline of the heads that a ``whole`` number of ranks leaves to each of them."""

        def sol(n: Coord, *rest: Coord) -> F64:
            return self.roofline(db.system)(np.floor(HEADS / np.maximum(whole(HEADS / n), 1)), *rest).time

        return Slice(self.table, self.key(db), sol, self.sqrt_axis, also=(whole, self.shape))

    def _unknown(self) -> UnsupportedCombination:
        known = ", ".join(ASKABLE)
        return UnsupportedCombination("attn_backend", f"{self.attn_backend!r} is not one of {known}", why="enum")


@dataclass(frozen=True, kw_only=True)
class WideEpContextMla(_WideEp, Prefill):
    """Prefill block."""

    table = law = "wideep_context_mla"
    keyed_by = ("fmha_quant", "kv_quant")


@dataclass(frozen=True, kw_only=True)
class WideEpGenerationMla(_WideEp, Generation):
    """Decode block; ``fmha_quant`` is carried and priced by nothing."""

    fmha_quant: str

    table = law = "wideep_generation_mla"
    keyed_by = ("kv_quant",)
