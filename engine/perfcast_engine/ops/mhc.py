"""Hyper-connections around the attention and FFN sites of a layer (spec/04 section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points, Source, total
from perfcast_engine.errors import InvalidField
from perfcast_engine.ops.base import TokenOp
from perfcast_engine.ops.measured import Slice
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode

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

    @property
    def _mixes(self) -> int:
        """Mixing coefficients of one token."""
        return (2 + self.hc_mult) * self.hc_mult

    def weight_bytes(self) -> float:
        elements = self._mixes * self.hc_mult * self.hidden + self._mixes + 3
        return self.scale * 2 * elements * quant.GEMM[self.quant].bytes

    def price(self, db: Database, at: Points) -> Answer:
        db.system.rate(quant.GEMM[self.quant])
        halves, tokens = HALVES[self.half], self.tokens(at)
        if db.mode is Mode.SOL:
            return Answer.of(self.roofline(db.system, halves, tokens), Source.SOL)
        at, slices = at.with_(x=tokens), [self._slice(db.system, half) for half in halves]
        return total((each.price(db, at, lambda at: (at.x,), self.name) for each in slices), len(at))

    def _slice(self, system: SystemSpec, half: str) -> Slice:
        key = (half, self.hc_mult, self.hidden)
        return Slice("mhc_module", key, lambda tokens: self.roofline(system, (half,), tokens), also=self.shape)

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
