"""Hyper-connections around the attention and FFN sites of a layer (spec/04 section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points, Source, total
from perfcast_engine.errors import InvalidField
from perfcast_engine.ops.base import Op, by_mode, estimated, find_slice, measured, require, slice_of, split_tokens
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode

HALVES = {"pre": ("pre",), "post": ("post",), "both": ("pre", "post")}


@dataclass(frozen=True, kw_only=True)
class Mhc(Op):
    """One operator covers both sites of a layer. half: before the sites, after them, or both; hc_mult: residual
    streams; seq_split: context-parallel ranks."""

    half: Literal["pre", "post", "both"]
    hc_mult: int
    hidden: int
    architecture: str
    sinkhorn_iters: int = 20
    quant: str = "bfloat16"
    seq_split: int = 1

    def __post_init__(self) -> None:
        require(self, hc_mult=1, hidden=1, sinkhorn_iters=0, seq_split=0)
        quant.mode(quant.GEMM, self.quant, "quant")
        if self.half not in HALVES:
            raise InvalidField("half", f"one of {', '.join(HALVES)}, not {self.half!r}")

    @property
    def _mixes(self) -> int:
        """Mixing coefficients of one token."""
        return (2 + self.hc_mult) * self.hc_mult

    def weight_bytes(self) -> float:
        elements = self._mixes * self.hc_mult * self.hidden + self._mixes + 3
        return self.scale * 2 * elements * quant.GEMM[self.quant].bytes

    def price(self, db: Database, at: Points) -> Answer:
        db.system.rate(quant.GEMM[self.quant])
        if db.mode is Mode.SOL:
            return Answer.of(self.roofline(db.system, HALVES[self.half], self._tokens(at)), Source.SOL)
        return total((self._half(db, at, half) for half in HALVES[self.half]), len(at))

    def _tokens(self, at: Points) -> F64:
        return split_tokens(at.x, 1, self.seq_split)

    def _half(self, db: Database, at: Points, half: str) -> Answer:
        key, also = (half, self.hc_mult, self.hidden), (self.quant, self.sinkhorn_iters)

        def sol(tokens: F64) -> F64:
            return self.roofline(db.system, (half,), tokens)

        def silicon(at: Points) -> Answer:
            surface = slice_of(db, "mhc_module", key, sol, also=also)
            return measured(surface, (self._tokens(at),), self.name, ("tokens",))

        def empirical(at: Points) -> Answer:
            surface = find_slice(db, "mhc_module", key, sol, also=also)
            tokens = self._tokens(at)
            return estimated(None if surface is None else surface.util, (tokens,), sol(tokens), self.name)

        return by_mode(db, at, silicon=silicon, empirical=empirical, sol=lambda at: sol(self._tokens(at)))

    def roofline(self, system: SystemSpec, halves: tuple[str, ...], tokens: F64) -> F64:
        """ms of the given halves, run as one."""
        m, h, mixes, mode = self.hc_mult, self.hidden, self._mixes, quant.GEMM[self.quant]
        wide = m * h
        per_token = {
            "pre": 2 * (2 * wide * mixes + 3 * wide + (m * m + 2 * m) * self.sinkhorn_iters + 2 * wide),
            "post": 2 * (2 * m * wide + 2 * wide),
        }
        moved = 2 * (mixes * wide + mixes + 3) * mode.bytes + 2 * tokens * wide * mode.bytes * (1 + len(halves))
        if "pre" in halves:
            moved = moved + 8 * tokens * (2 * m + m * m)
        math = tokens * sum(per_token[half] for half in halves) / system.rate(mode) * 1000
        return np.maximum(math, system.memory_sol_ms(moved))
