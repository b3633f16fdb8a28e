"""What expert operators share: the layer on one rank, its roofline, its measured curves (spec/03 section 3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from perfcast_engine.answer import F64, Answer
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.ops.base import Split, find_slice, measured, slice_of
from perfcast_engine.quant import MOE
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

STANDARD, LOW_LATENCY = "moe", "moe_low_latency"
ANY_DISTRIBUTION = "uniform"  # stands in for a distribution that a quantisation was not measured under


class Shape(NamedTuple):
    """An expert layer and its split over ranks, in the order of the table's key columns."""

    topk: int
    experts: int
    hidden: int
    inter: int
    tp: int
    ep: int

    def roofline(self, tokens: F64, gated: bool, width: float, rate: float, mem_bw: float, slots: int) -> Split:
        """Time to compute ``tokens`` and to move what they touch at ``width`` bytes an element; ``slots`` experts or
        replicas of them are spread over the ranks."""
        matrices = 3 if gated else 2
        ep, tp = max(self.ep, 1), max(self.tp, 1)
        pairs = tokens * self.topk
        local = np.floor(pairs / ep)
        ops = np.floor(np.floor(pairs * (self.hidden * self.inter * matrices * 2) / ep) / tp)
        weights = self.hidden * self.inter * matrices // tp * np.minimum(slots // ep, local)
        moved = local * (self.hidden * 2) + np.floor(local * (self.inter * matrices) / tp) + weights
        return Split.of(ops / rate * 1000, moved * width / mem_bw * 1000)


class Layer(NamedTuple):
    """What a fused expert FFN is measured under."""

    quant: str
    distribution: str
    shape: Shape
    gated: bool

    def roofline(self, system: SystemSpec, tokens: F64) -> Split:
        quant = MOE[self.quant]
        width, rate = quant.bytes, system.rate(quant)
        return self.shape.roofline(tokens, self.gated, width, rate, system.mem_bw, self.shape.experts)

    def key(self, db: Database, table: str) -> tuple[Key, ...]:
        """The key in ``table``, under the distribution that stands in where the layer's own was not measured."""

        def build() -> tuple[Key, ...]:
            found = db.find(table)
            named = found is not None and found.rows(self.quant, self.distribution) is not None
            return self.quant, self.distribution if named else ANY_DISTRIBUTION, *self.shape

        return db.kept(("expert key", table, self), build)

    def curve(self, db: Database, table: str) -> Surface:
        """Latency over tokens; PerfDataMissing where the layer was not measured."""
        system = db.system
        return slice_of(db, table, self.key(db, table), lambda t: self.roofline(system, t).time, also=self.gated)

    def samples(self, db: Database, table: str, under: str | None = None) -> UtilGrid | None:
        """Utilisation over tokens, by the roofline of quantisation ``under`` (its own by default)."""
        system, judged = db.system, self._replace(quant=under or self.quant)
        surface = find_slice(
            db, table, self.key(db, table), lambda t: judged.roofline(system, t).time, also=(self.gated, judged.quant)
        )
        return None if surface is None else surface.util


def token_curve(curve: Surface, tokens: F64, what: str) -> Answer:
    """The measured latency at each token count. A curve of one point says nothing about fewer tokens."""
    answer = measured(curve, (tokens,), what, ("tokens",))
    if len(curve.grid) == 1:
        only = float(curve.grid.floats[0][0])
        below = tokens < only
        if below.any():
            answer.ms[below] = np.nan
            answer.energy[below] = np.nan
            answer.misses.append((below, PerfDataMissing(f"{what}: measured at {only:g} tokens only", op=what)))
    return answer


def expert_weight_bytes(hidden: int, inter: int, experts: int, quant: str, gated: bool, ep: int, tp: int = 1) -> float:
    """Resident expert weights of one rank, floored after each split as the reference does."""
    return (hidden * inter * experts * MOE[quant].bytes * (3 if gated else 2)) // max(ep, 1) // max(tp, 1)
