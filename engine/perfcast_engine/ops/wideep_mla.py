"""MLA block of SGLang large expert parallelism (spec/03 section 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perfcast_engine.answer import F64, Points
from perfcast_engine.errors import UnsupportedCombination
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.ops.base import Op, Split, find_slice
from perfcast_engine.ops.latent import BF16, ContextBlock, GenerationBlock, LatentBlock, decode_quant
from perfcast_engine.quant import FMHA
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

HIDDEN, Q_LATENT, KV_LATENT, ROPE, NOPE, VALUE, HEADS = 7168, 1536, 512, 64, 128, 128, 128
ASKABLE = ("flashinfer", "fa3")
STAND_IN = "trtllm_mla"  # the only kernel measured on Blackwell; not askable itself


@dataclass(frozen=True, kw_only=True)
class _WideEpBlock(LatentBlock):
    """What prefill and decode share: how the name of the attention backend selects the measured kernel."""

    attn_backend: str = "flashinfer"

    def check_rates(self, system: SystemSpec) -> None:
        """A missing table is named before a missing rate here."""

    def sol(self, db: Database, at: Points) -> Split:
        return Op.sol(self, db, at)

    def rest(self) -> tuple[Key, ...]:
        """The part of the key after the kernel."""
        raise NotImplementedError

    def key(self, db: Database) -> tuple[Key, ...]:
        found = db.find(self.table)
        for kernel in (self.attn_backend, STAND_IN) if self.attn_backend in ASKABLE else (self.attn_backend,):
            if found is not None and found.rows(kernel, *self.rest()) is not None:
                return kernel, *self.rest()
        return self.attn_backend, *self.rest()

    def surface(self, db: Database) -> Surface:
        db.table(self.table)
        if self.attn_backend not in ASKABLE:
            raise self._unknown()
        return super().surface(db)

    def samples(self, db: Database) -> UtilGrid | None:
        found, system = db.find(self.table), db.system
        if found is not None and self.attn_backend not in ASKABLE and found.rows(self.attn_backend) is None:
            raise self._unknown()

        def sol(*coords: F64) -> F64:
            heads = np.floor(HEADS / np.rint(HEADS / coords[0]))
            return self.block_split(system, heads, *coords[1:]).time

        surface = find_slice(db, self.table, self.key(db), sol, sqrt_axis=self.sqrt_axis, also="samples")
        return None if surface is None else surface.util

    def leaf_sol(self, system: SystemSpec, *coords: F64) -> F64:
        heads = np.floor(HEADS / np.maximum(np.floor(HEADS / coords[0]), 1))
        return self.block_split(system, heads, *coords[1:]).time

    def block_split(self, system: SystemSpec, m: F64 | float, *rest: F64) -> Split:
        raise NotImplementedError

    def _unknown(self) -> UnsupportedCombination:
        known = ", ".join(ASKABLE)
        return UnsupportedCombination("attn_backend", f"{self.attn_backend!r} is not one of {known}", why="enum")


@dataclass(frozen=True, kw_only=True)
class WideEpContextMla(_WideEpBlock, ContextBlock):
    """Prefill block; ``heads`` = 128 // tp; ``attn_backend`` names the kernel."""

    table: ClassVar[str] = "wideep_context_mla"

    def rest(self) -> tuple[Key, ...]:
        return self.fmha_quant, self.kv_quant

    def split(self, system: SystemSpec, at: Points) -> Split:
        return self.block_split(system, float(self.heads), at.s + at.prefix, at.batch, at.prefix)

    def block_split(self, system: SystemSpec, m: F64 | float, *rest: F64) -> Split:
        total, b = rest[0], rest[1]
        prefix = rest[2] if len(rest) > 2 else np.zeros(len(total))
        s = total - prefix
        query, key, value = ROPE + NOPE, NOPE + VALUE, m * VALUE * HIDDEN
        projections = 2 * b * s * (Q_LATENT * m * query + KV_LATENT * m * key + value)
        attention = np.floor(2 * m * (2 * NOPE + ROPE) * b * (total * total - prefix * prefix) / 2)
        moved = (
            (b * Q_LATENT * s + Q_LATENT * m * query + 2 * b * m * query * s)
            + (b * s * KV_LATENT + m * key * KV_LATENT + 2 * b * m * key * s)
            + 2 * b * m * (s * query + total * query + total * NOPE + s * NOPE)
            + (b * m * VALUE * s + value + 2 * b * HIDDEN * s)
        )
        fmha = FMHA[self.fmha_quant]
        math = projections / system.rate(fmha) * 1000 + attention / system.rate(BF16) * 1000
        return Split.of(math, system.memory_sol_ms(moved * fmha.bytes))


@dataclass(frozen=True, kw_only=True)
class WideEpGenerationMla(_WideEpBlock, GenerationBlock):
    """Decode block; ``fmha_quant`` is carried and priced by nothing."""

    fmha_quant: str

    table: ClassVar[str] = "wideep_generation_mla"

    def rest(self) -> tuple[Key, ...]:
        return (self.kv_quant,)

    def split(self, system: SystemSpec, at: Points) -> Split:
        return self.block_split(system, float(self.heads), at.batch, at.s)

    def block_split(self, system: SystemSpec, m: F64 | float, *rest: F64) -> Split:
        b, s = rest
        query, cached = ROPE + NOPE, KV_LATENT + ROPE
        projections = 2 * b * m * (Q_LATENT * query + NOPE * KV_LATENT + KV_LATENT * VALUE + VALUE * HIDDEN)
        attention = 2 * b * s * m * (ROPE + 2 * KV_LATENT)
        moved = (
            (b * Q_LATENT + Q_LATENT * m * query + 2 * b * m * query)
            + (b * m * NOPE + m * KV_LATENT * NOPE + 2 * b * m * KV_LATENT)
            + 2 * (b * m * cached + b * s * cached + b * m * KV_LATENT)
            + (b * m * KV_LATENT + m * VALUE * KV_LATENT + 2 * b * m * VALUE)
            + (b * m * VALUE + m * VALUE * HIDDEN + 2 * b * HIDDEN)
        )
        mode = decode_quant(system, self.kv_quant)
        math = projections / system.rate(mode) * 1000 + attention / system.rate(BF16) * 1000
        return Split.of(math, system.memory_sol_ms(moved * mode.bytes))
