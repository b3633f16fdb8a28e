"""Blocks of latent attention over their coordinates: how any of them answers in each mode (spec/03 sections 8-11)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from perfcast_surface.blend import Blend
from perfcast_surface.terms import Causal, Decode, Term

from perfcast_engine.answer import F64, Answer, Points, total
from perfcast_engine.interp.grid import Query
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.ops.base import (
    Op,
    Reads,
    Split,
    by_mode,
    estimated,
    find_slice,
    measured,
    rank_parts,
    require,
    slice_of,
)
from perfcast_engine.quant import FMHA, KV_CACHE, QuantMode, mode
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

BF16 = FMHA["bfloat16"]


@dataclass(frozen=True, kw_only=True)
class LatentBlock(Op):
    """A kernel or module measured over (heads, ...) in the slice ``key`` of ``table``."""

    heads: int
    kv_quant: str

    reads: ClassVar[Reads] = Reads.SEQUENCE
    table: ClassVar[str]
    axes: ClassVar[tuple[str, ...]]
    sqrt_axis: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        require(self, heads=1)
        mode(KV_CACHE, self.kv_quant, "kv_quant")

    @abstractmethod
    def check_rates(self, system: SystemSpec) -> None:
        """SystemFlopsMissing where ``system`` lacks a rate that the block needs, whatever was measured."""

    @abstractmethod
    def key(self, db: Database) -> tuple[Key, ...]:
        """The slice of the table."""

    @abstractmethod
    def leaf_sol(self, system: SystemSpec, *coords: F64) -> F64:
        """The roofline (ms) in the coordinates of the table."""

    @abstractmethod
    def split(self, system: SystemSpec, at: Points) -> Split:
        """The roofline at points that are computed in one piece."""

    @abstractmethod
    def query(self, at: Points) -> Query:
        """The coordinates of points in the table."""

    def chunks(self, at: Points) -> list[Points]:
        """The pieces that one GPU computes."""
        return [at]

    def corrected(self, answer: Answer, at: Points) -> Answer:
        """The measured latency, carried to what the table does not know of the points."""
        return answer

    def surface(self, db: Database) -> Surface:
        """The measured slice; PerfDataMissing where there is none."""
        system = db.system
        sol = lambda *coords: self.leaf_sol(system, *coords)  # noqa: E731
        return slice_of(db, self.table, self.key(db), sol, sqrt_axis=self.sqrt_axis)

    def samples(self, db: Database) -> UtilGrid | None:
        """Utilisation over the measured slice, None where there is none."""
        system = db.system
        surface = find_slice(
            db, self.table, self.key(db), lambda *coords: self.leaf_sol(system, *coords), sqrt_axis=self.sqrt_axis
        )
        return None if surface is None else surface.util

    def sol(self, db: Database, at: Points) -> Split:
        first, *others = (self.split(db.system, part) for part in self.chunks(at))
        return first.plus(others[0]) if others else first

    def price(self, db: Database, at: Points) -> Answer:
        self.check_rates(db.system)
        return total((self._piece(db, part) for part in self.chunks(at)), len(at))

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        if not db.mode.shared:
            return None
        self.check_rates(db.system)
        blend = self.surface(db).blend(float(self.heads))
        return None if blend is None else (self.term(blend),)

    @abstractmethod
    def term(self, blend: Blend) -> Term:
        """All instances by the planes at the block's heads."""

    def _piece(self, db: Database, at: Points) -> Answer:
        def silicon(at: Points) -> Answer:
            return self.corrected(measured(self.surface(db), self.query(at), self.name, self.axes), at)

        def empirical(at: Points) -> Answer:
            return estimated(self.samples(db), self.query(at), self.split(db.system, at).time, self.name)

        return by_mode(db, at, silicon=silicon, empirical=empirical, sol=lambda at: self.split(db.system, at).time)


@dataclass(frozen=True, kw_only=True)
class ContextBlock(LatentBlock):
    """Prefill, measured without prefix over (heads, length, batch). ``cp``: context-parallel ranks that share it."""

    fmha_quant: str
    cp: int = 1

    axes: ClassVar[tuple[str, ...]] = ("num_heads", "isl", "batch_size")
    sqrt_axis: ClassVar[int | None] = 1  # time grows with the square of the length

    def __post_init__(self) -> None:
        super().__post_init__()
        mode(FMHA, self.fmha_quant, "fmha_quant")

    def check_rates(self, system: SystemSpec) -> None:
        system.rate(FMHA[self.fmha_quant])

    def chunks(self, at: Points) -> list[Points]:
        return rank_parts(at, self.cp)

    def query(self, at: Points) -> Query:
        return float(self.heads), at.s + at.prefix, at.batch

    def corrected(self, answer: Answer, at: Points) -> Answer:
        """A cached prefix saves its share of the causal area."""
        square = (at.s + at.prefix) ** 2
        return answer.scaled((square - at.prefix * at.prefix) / np.maximum(square, 1.0))

    def term(self, blend: Blend) -> Term:
        return Causal(blend, self.scale, ranks=max(self.cp, 1))


@dataclass(frozen=True, kw_only=True)
class GenerationBlock(LatentBlock):
    """Decode, measured over (heads, batch, cache length)."""

    axes: ClassVar[tuple[str, ...]] = ("num_heads", "batch_size", "seq")

    def query(self, at: Points) -> Query:
        return float(self.heads), at.batch, at.s

    def term(self, blend: Blend) -> Term:
        return Decode(blend, self.scale)


def decode_quant(system: SystemSpec, kv_quant: str) -> QuantMode:
    """The mode that decode attention over a ``kv_quant`` cache computes in."""
    return FMHA["fp8"] if kv_quant == "fp8" and system.has_fp8_decode_attention else BF16
