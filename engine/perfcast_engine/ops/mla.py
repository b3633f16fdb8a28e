"""Multi-head latent attention: kernels, absorbed batched GEMM, whole module (spec/03 sections 8-10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfcast_engine.answer import F64, Answer, Points
from perfcast_engine.ops.base import Op, Reads, Split, by_mode, estimated, find_slice, measured, require, slice_of
from perfcast_engine.ops.latent import ContextBlock, GenerationBlock, decode_quant
from perfcast_engine.quant import FMHA, GEMM, KV_CACHE, mode
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

NOPE, ROPE, LATENT = 128, 64, 512  # sizes of a head without and with rotation, and of what the cache holds of a token
PAIR = NOPE + ROPE + NOPE  # work of one (query, key) pair and head: score and value
ABSORBED = 2 * LATENT + ROPE  # the same on the latent
CACHED = LATENT + ROPE


@dataclass(frozen=True, kw_only=True)
class _ContextKernel(ContextBlock):
    """What kernel and module of prefill share: both are judged by the attention they contain."""

    def leaf_sol(self, system: SystemSpec, *coords: F64) -> F64:
        n, s, b = coords
        return self._split(system, n, s, b, 0.0).time

    def split(self, system: SystemSpec, at: Points) -> Split:
        return self._split(system, float(self.heads), at.s + at.prefix, at.batch, at.prefix)

    def _split(self, system: SystemSpec, n: F64 | float, s: F64, b: F64, prefix: F64 | float) -> Split:
        """s tokens in all, ``prefix`` of them cached."""
        kv, fmha = KV_CACHE[self.kv_quant], FMHA[self.fmha_quant]
        flops = b * n * PAIR * (s * s - prefix * prefix)
        moved = b * n * (kv.bytes * s * PAIR + 2 * (s - prefix) * PAIR)
        return Split.of(flops / system.rate(fmha) * 1000, system.memory_sol_ms(moved))


@dataclass(frozen=True, kw_only=True)
class ContextMla(_ContextKernel):
    """Prefill MLA kernel at ``heads`` as the table keys them."""

    table: ClassVar[str] = "context_mla"

    def key(self, db: Database) -> tuple[Key, ...]:
        return self.fmha_quant, self.kv_quant


@dataclass(frozen=True, kw_only=True)
class ContextMlaModule(_ContextKernel):
    """Prefill MLA block measured as one unit; ``native_heads`` of the unsharded model."""

    native_heads: int | None = None
    gemm_quant: str

    table: ClassVar[str] = "mla_context_module"

    def __post_init__(self) -> None:
        super().__post_init__()
        mode(GEMM, self.gemm_quant, "gemm_quant")

    def key(self, db: Database) -> tuple[Key, ...]:
        return native_key(db, self.table, (self.fmha_quant, self.kv_quant, self.gemm_quant), self.native_heads)


@dataclass(frozen=True, kw_only=True)
class _GenerationKernel(GenerationBlock):
    def check_rates(self, system: SystemSpec) -> None:
        system.rate(decode_quant(system, self.kv_quant))

    def leaf_sol(self, system: SystemSpec, *coords: F64) -> F64:
        n, b, s = coords
        return self._split(system, n, b, s).time

    def split(self, system: SystemSpec, at: Points) -> Split:
        return self._split(system, float(self.heads), at.batch, at.s)

    def _split(self, system: SystemSpec, n: F64 | float, b: F64, s: F64) -> Split:
        flops = 2 * b * n * ABSORBED * s
        moved = b * (n * ABSORBED * 2 + (s - 1) * CACHED * KV_CACHE[self.kv_quant].bytes)
        rate = system.rate(decode_quant(system, self.kv_quant))
        return Split.of(flops / rate * 1000, system.memory_sol_ms(moved))


@dataclass(frozen=True, kw_only=True)
class GenerationMla(_GenerationKernel):
    """Decode MLA kernel at ``heads`` as the table keys them."""

    table: ClassVar[str] = "generation_mla"

    def key(self, db: Database) -> tuple[Key, ...]:
        return (self.kv_quant,)


@dataclass(frozen=True, kw_only=True)
class GenerationMlaModule(_GenerationKernel):
    """Decode MLA block measured as one unit; ``fmha_quant`` is carried and priced by nothing."""

    native_heads: int | None = None
    fmha_quant: str = "bfloat16"
    gemm_quant: str

    table: ClassVar[str] = "mla_generation_module"

    def __post_init__(self) -> None:
        super().__post_init__()
        mode(FMHA, self.fmha_quant, "fmha_quant")
        mode(GEMM, self.gemm_quant, "gemm_quant")

    def check_rates(self, system: SystemSpec) -> None:
        super().check_rates(system)
        system.rate(GEMM[self.gemm_quant])

    def key(self, db: Database) -> tuple[Key, ...]:
        return native_key(db, self.table, (self.kv_quant, self.gemm_quant), self.native_heads)

    def _split(self, system: SystemSpec, n: F64 | float, b: F64, s: F64) -> Split:
        """The kernel, and the projections into and out of the latent."""
        kernel, projections = super()._split(system, n, b, s), _bmm_split(system, n, b, self.gemm_quant)
        return Split.of(kernel.math + 2 * projections.math, kernel.mem + 2 * projections.mem)


def native_key(db: Database, table: str, head: tuple[Key, ...], native: int | None) -> tuple[Key, ...]:
    """``head`` and the measured model size that answers for ``native`` heads: itself, the only one, the largest below,
    the smallest. An unknown size is answered only where there is one."""

    def build() -> int:
        found = db.find(table)
        sizes = [int(size) for size in found.children(*head)] if found is not None else []
        if native in sizes or len(sizes) == 1:
            return native if native in sizes else sizes[0]
        if native is None or not sizes:
            return -1
        return max((size for size in sizes if size <= native), default=min(sizes))

    return *head, db.kept(("native heads", table, head, native), build)


def _bmm_split(system: SystemSpec, n: F64 | float, t: F64, quant: str) -> Split:
    """n small GEMMs of t rows between a head and the latent."""
    q = GEMM[quant]
    math = 2 * t * n * NOPE * LATENT / system.rate(q) * 1000
    return Split.of(math, system.memory_sol_ms(n * (t * (NOPE + LATENT) + NOPE * LATENT) * q.bytes))


@dataclass(frozen=True, kw_only=True)
class MlaBmm(Op):
    """Absorbed batched GEMM before (``is_pre``) or after decode MLA, at rank-local ``heads``, one row a request."""

    heads: int
    quant: str
    is_pre: bool

    reads: ClassVar[Reads] = Reads.BATCH
    table: ClassVar[str] = "mla_bmm"
    default_quant: ClassVar[str] = "bfloat16"  # where the asked one was not measured

    def __post_init__(self) -> None:
        require(self, heads=1)
        mode(GEMM, self.quant, "quant")

    @property
    def measured_as(self) -> str:
        return "mla_gen_pre" if self.is_pre else "mla_gen_post"

    def sol(self, db: Database, at: Points) -> Split:
        return _bmm_split(db.system, float(self.heads), at.batch, self.quant)

    def price(self, db: Database, at: Points) -> Answer:
        db.system.rate(GEMM[self.quant])
        heads = db.kept(("bmm heads", self.quant, self.is_pre, self.heads), lambda: self._measured_heads(db))
        share = self.heads / heads

        def sol(t: F64) -> F64:
            return _bmm_split(db.system, float(heads), t, self.quant).time

        def silicon(at: Points) -> Answer:
            table = db.table(self.table)
            quant = self.quant if table.rows(self.quant, self.measured_as) is not None else self.default_quant
            curve = slice_of(db, self.table, (quant, self.measured_as, heads), sol, also=self.quant)
            return measured(curve, (at.batch,), self.name, ("num_tokens",)).scaled(share)

        def empirical(at: Points) -> Answer:
            curve = find_slice(db, self.table, (self._kept_quant(db), self.measured_as, heads), sol, also=self.quant)
            util = None if curve is None else curve.util
            return estimated(util, (at.batch,), sol(at.batch), self.name).scaled(share)

        return by_mode(db, at, silicon=silicon, empirical=empirical, sol=lambda at: self.sol(db, at).time)

    def _measured_heads(self, db: Database) -> int:
        """The heads whose curve answers, scaled: our own if a power of two or measured, else the next power of two."""
        above = 1 << (self.heads - 1).bit_length()
        found = db.find(self.table)
        own = found is not None and found.rows(self._kept_quant(db), self.measured_as, self.heads) is not None
        return self.heads if above == self.heads or own else above

    def _kept_quant(self, db: Database) -> str:
        """The asked quantisation if any row has it, else the default."""
        found = db.find(self.table)
        return self.quant if found is not None and found.rows(self.quant) is not None else self.default_quant
