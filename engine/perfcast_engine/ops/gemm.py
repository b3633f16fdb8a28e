"""Matrix multiplication with a weight (spec/02 sections 4, 5.1, 5.2, 6.1)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine import quant
from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, require
from perfcast_engine.tables.database import Database


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

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
