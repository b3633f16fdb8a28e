"""What expert operators share: the layer on one rank, its roofline, its measured curves (spec/03 section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perfcast_engine.answer import F64, Answer
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.ops.base import Op, Split
from perfcast_engine.ops.measured import Slice
from perfcast_engine.quant import MOE
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database

ANY_DISTRIBUTION = "uniform"  # stands in for a distribution that a quantisation was not measured under


@dataclass(frozen=True, kw_only=True)
class Experts(Op):
    """Expert FFNs of one rank. ``inter``: one expert's unsharded width; ``distribution``: how tokens load them."""

    hidden: int
    inter: int
    topk: int
    experts: int
    moe_ep: int
    moe_tp: int = 1
    quant: str
    distribution: str
    gated: bool = True

    quants = MOE
    keyed_by: ClassVar[tuple[str, ...]] = ("topk", "experts", "hidden", "inter", "moe_tp", "moe_ep")

    def weight_bytes(self) -> float:
        """Resident experts of one rank, floored after each split as the reference does."""
        matrices = 3 if self.gated else 2
        whole = self.hidden * self.inter * self.experts * MOE[self.quant].bytes * matrices
        return self.scale * (whole // max(self.moe_ep, 1) // max(self.moe_tp, 1))

    @property
    def replicas(self) -> int:
        """Experts and copies of them that are spread over the ranks."""
        return self.experts

    def rate(self, system: SystemSpec) -> float:
        """FLOP/s of the roofline; SystemFlopsMissing where ``system`` states none."""
        return system.rate(MOE[self.quant])

    def roofline(self, system: SystemSpec, tokens: F64) -> Split:
        """Time to compute ``tokens`` and to move what they touch."""
        matrices = 3 if self.gated else 2
        ep, tp = max(self.moe_ep, 1), max(self.moe_tp, 1)
        pairs = tokens * self.topk
        local = np.floor(pairs / ep)
        ops = np.floor(np.floor(pairs * (self.hidden * self.inter * matrices * 2) / ep) / tp)
        weights = self.hidden * self.inter * matrices // tp * np.minimum(self.replicas // ep, local)
        moved = local * (self.hidden * 2) + np.floor(local * (self.inter * matrices) / tp) + weights
        return Split.of(ops / self.rate(system) * 1000, system.memory_sol_ms(moved * MOE[self.quant].bytes))


def token_curve(db: Database, curve: Slice, tokens: F64, what: str) -> Answer:
    """The measured latency at each token count. A curve of one point says nothing about fewer tokens."""
    answer = curve.measured(db, (tokens,), what)
    measured = curve.surface(db).grid.floats[0]
    below = tokens < measured[0]
    if len(measured) == 1 and below.any():
        answer.ms[below] = answer.energy[below] = np.nan
        answer.misses.append((below, PerfDataMissing(f"{what}: measured at {measured[0]:g} tokens only", op=what)))
    return answer
