"""Matrix multiplication with a weight (spec/02 sections 4, 5.1, 5.2, 6.1, 9.3, 9.4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points, Source, or_else
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.ops import gemm_tables
from perfcast_engine.ops.base import Op, Split, by_mode, estimated, require, split_tokens
from perfcast_engine.ops.gemm_tables import GemmRoofline
from perfcast_engine.ops.quantise import compute_scale, scale_matrix
from perfcast_engine.tables.database import Database, Mode


@dataclass(frozen=True, kw_only=True)
class Gemm(Op):
    """x' tokens times an (n, k) weight. ``token_div`` and ``seq_split`` divide the tokens of the pass.

    ``low_precision_input``: the activations arrive quantised (fp8_static saves the scaling pass); ``below_grid_sol``: a
    shape that no measured one is near answers with its roofline instead of a miss (SILICON only).
    """

    n: int
    k: int
    quant: str
    token_div: int = 1
    seq_split: int = 1
    low_precision_input: bool = False
    below_grid_sol: bool = False

    def __post_init__(self) -> None:
        require(self, n=1, k=1, token_div=0, seq_split=0)
        quant.mode(quant.GEMM, self.quant, "quant")

    def weight_bytes(self) -> float:
        return self.n * self.k * quant.GEMM[self.quant].bytes * self.scale

    def sol(self, db: Database, at: Points) -> Split:
        m = split_tokens(at.x, self.token_div, self.seq_split)
        return GemmRoofline.of(db.system, self.quant).split(m, float(self.n), float(self.k))

    def price(self, db: Database, at: Points) -> Answer:
        at = at.with_(x=split_tokens(at.x, self.token_div, self.seq_split))
        roofline = GemmRoofline.of(db.system, gemm_tables.measured_as(self.quant))
        roofline.rate()
        n, k = float(self.n), float(self.k)
        product = self._product(db, at, roofline)
        if self.quant != "fp8_static":
            return product
        saved = compute_scale(db, at, self.k, self.name)
        if self.low_precision_input:
            saved = saved + scale_matrix(db, at, self.k, self.name)
        rest = product + saved.scaled(-1.0)
        floor = np.maximum(rest.ms, roofline(at.x, n, k))
        return replace(rest, ms=floor, energy=np.maximum(rest.energy, 0.0)).tagged(Source.ESTIMATED)

    def _product(self, db: Database, at: Points, roofline: GemmRoofline) -> Answer:
        n, k = float(self.n), float(self.k)

        def sol(part: Points) -> F64:
            return roofline(part.x, n, k)

        def silicon(part: Points) -> Answer:
            return gemm_tables.silicon(db, roofline, self.n, self.k, part.x, self.name)

        def empirical(part: Points) -> Answer:
            basis = gemm_tables.basis(db, roofline)
            query = part.x, n, k
            return estimated(basis.util, query, sol(part), self.name, basis.tier, basis.k)

        if self.below_grid_sol and db.mode is Mode.SILICON and gemm_tables.has_quant(db, roofline.quant.name):
            return or_else(silicon, lambda part: Answer.of(sol(part), Source.SOL), at, PerfDataMissing)
        return by_mode(db, at, silicon=silicon, empirical=empirical, sol=sol)
