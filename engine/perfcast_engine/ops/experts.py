"""What expert operators share: the layer on one rank, its roofline, its measured curves, and what a layer without
measurements of its own may borrow from (spec/03 section 3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from perfcast_engine.answer import F64, Answer, Tier
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.interp.util import LogSpace
from perfcast_engine.ops.base import Split
from perfcast_engine.ops.measured import Basis, Slice
from perfcast_engine.quant import MOE
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key

STANDARD, LOW_LATENCY = "moe", "moe_low_latency"
ANY_DISTRIBUTION = "uniform"  # stands in for a distribution that a quantisation was not measured under
# Achieved share of the roofline by (bytes, compute) of a quantisation; a transfer between two is scaled by their ratio.
EFFICIENCY: Mapping[tuple[float, float], float] = MappingProxyType(
    {
        (2.0, 1.0): 0.53,
        (1.0, 1.0): 0.45,
        (0.5625, 1.0): 0.07,
        (0.5, 1.0): 0.07,
        (1.0, 2.0): 0.40,
        (0.5, 2.0): 0.15,
        (1.0, 4.0): 0.30,
        (0.5, 4.0): 0.23,
        (0.5625, 4.0): 0.23,
    }
)
OTHER_EFFICIENCY = 0.30
FEATURES = 4  # of a shape: topk, experts, hidden, inter


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
        mode = MOE[self.quant]
        return self.shape.roofline(tokens, self.gated, mode.bytes, system.rate(mode), system.mem_bw, self.shape.experts)

    def slice(self, db: Database, table: str, judged_as: str | None = None) -> Slice:
        """Its curve in ``table``, under the distribution that stands in where its own was not measured, with the
        roofline of quantisation ``judged_as`` (its own by default)."""
        judged = self._replace(quant=judged_as or self.quant)

        def key() -> tuple[Key, ...]:
            found = db.find(table)
            named = found is not None and found.rows(self.quant, self.distribution) is not None
            return self.quant, self.distribution if named else ANY_DISTRIBUTION, *self.shape

        whole = db.kept(("expert key", table, self), key)
        return Slice(table, whole, lambda t: judged.roofline(db.system, t).time, also=(self.gated, judged.quant))


def token_curve(db: Database, curve: Slice, tokens: F64, what: str) -> Answer:
    """The measured latency at each token count. A curve of one point says nothing about fewer tokens."""
    answer = curve.measured(db, (tokens,), what)
    measured = curve.surface(db).grid.floats[0]
    below = tokens < measured[0]
    if len(measured) == 1 and below.any():
        answer.ms[below] = answer.energy[below] = np.nan
        answer.misses.append((below, PerfDataMissing(f"{what}: measured at {measured[0]:g} tokens only", op=what)))
    return answer


def basis(db: Database, table: str, layer: Layer) -> Basis:
    """The nearest samples that the database's policy allows to borrow (spec/03 section 3.4)."""
    return db.kept(("expert basis", table, layer), lambda: _own_or_borrowed(db, table, layer))


def _own_or_borrowed(db: Database, table: str, layer: Layer) -> Basis:
    """Own samples, else of another shape, else of a quantisation of equal profile, else of the closest profile."""
    found, own = db.find(table), layer.slice(db, table).basis(db)
    if found is None or own.util is not None:
        return own
    profile = MOE[layer.quant].profile
    quants = [name for name in map(str, found.children()) if name in MOE and name != layer.quant]
    near, tier = [], Tier.XSHAPE
    if Tier.XSHAPE in db.policy:
        near = _measured(db, table, layer, [layer.quant])
    if not near and Tier.XQUANT in db.policy:
        near, tier = _measured(db, table, layer, (name for name in quants if MOE[name].profile == profile)), Tier.XQUANT
    if near:
        borrowed = _nearest(layer, near).slice(db, table, judged_as=layer.quant).basis(db)
        if borrowed.util is not None:
            return borrowed._replace(tier=tier)
    others = [name for name in quants if MOE[name].profile != profile] if Tier.XPROFILE in db.policy else []
    for name in sorted(others, key=lambda name: _distance(MOE[name].profile, profile)):
        near = _measured(db, table, layer, [name])
        if near:
            k = _efficiency(layer.quant) / _efficiency(name)
            return _nearest(layer, near).slice(db, table).basis(db)._replace(tier=Tier.XPROFILE, k=k)
    return Basis(None)


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _efficiency(quant: str) -> float:
    return EFFICIENCY.get(MOE[quant].profile, OTHER_EFFICIENCY)


def _measured(db: Database, table: str, layer: Layer, quants: Iterable[str]) -> list[Layer]:
    """The layers of any shape measured in ``quants`` at the same split over ranks, shapes ascending."""
    found, layers = db.table(table), []
    for quant in quants:
        asked = layer._replace(quant=quant)
        rows = found.rows(*asked.slice(db, table).key[:2])
        if rows is None:
            continue
        shapes = np.stack([column[rows] for column in found.columns[2:8]], axis=1)
        same = shapes[(shapes[:, FEATURES] == layer.shape.tp) & (shapes[:, FEATURES + 1] == layer.shape.ep)]
        layers += [asked._replace(shape=Shape(*map(int, shape))) for shape in np.unique(same, axis=0)]
    return layers


def _nearest(layer: Layer, layers: list[Layer]) -> Layer:
    """The most similar by normalised logarithms of topk, experts, hidden and inter; the first of equals."""
    shapes = np.array([other.shape[:FEATURES] for other in layers], np.float64)
    asked = tuple(np.array([float(size)]) for size in layer.shape[:FEATURES])
    return layers[int(LogSpace.of(tuple(shapes.T)).nearest(asked, 1, clip=False)[0][0, 0])]
