"""What an expert layer without measurements of its own may borrow from (spec/03 section 3.4)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from perfcast_engine.answer import Tier
from perfcast_engine.interp.util import FLOOR, UtilGrid
from perfcast_engine.ops.base import no_basis
from perfcast_engine.ops.experts import Layer, Shape
from perfcast_engine.quant import MOE
from perfcast_engine.tables.database import Database

# Achieved share of the roofline by (bytes, compute) of a quantisation; a transfer between two is scaled by their ratio.
EFFICIENCY = {
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
OTHER_EFFICIENCY = 0.30
FEATURES = 4  # of a shape: topk, experts, hidden, inter


class Basis(NamedTuple):
    """Samples of utilisation, how far they were borrowed, and the factor on them that this calls for."""

    util: UtilGrid
    tier: Tier
    k: float = 1.0


def basis(db: Database, table: str, layer: Layer, what: str) -> Basis:
    """The nearest samples that the database's policy allows to borrow; EmpiricalBasisMissing where there are none."""
    found = db.kept(("expert basis", table, layer), lambda: _own(db, table, layer) or _borrowed(db, table, layer))
    if found is None:
        raise no_basis(what)
    return found


def _own(db: Database, table: str, layer: Layer) -> Basis | None:
    util = layer.samples(db, table)
    return None if util is None else Basis(util, Tier.EMPIRICAL)


def _borrowed(db: Database, table: str, layer: Layer) -> Basis | None:
    """Another shape, else another quantisation of equal profile, else the closest of another profile."""
    found = db.find(table)
    if found is None:
        return None
    own = MOE[layer.quant].profile
    quants = [name for name in map(str, found.children()) if name in MOE and name != layer.quant]
    near, tier = [], Tier.XSHAPE
    if Tier.XSHAPE in db.policy:
        near = _measured(db, table, layer, [layer.quant])
    if not near and Tier.XQUANT in db.policy:
        near, tier = _measured(db, table, layer, (name for name in quants if MOE[name].profile == own)), Tier.XQUANT
    util = _nearest(layer, near).samples(db, table, under=layer.quant) if near else None
    if util is not None:
        return Basis(util, tier)
    if Tier.XPROFILE not in db.policy:
        return None
    others = [name for name in quants if MOE[name].profile != own]
    for name in sorted(others, key=lambda name: sum(abs(a - b) for a, b in zip(MOE[name].profile, own, strict=True))):
        near = _measured(db, table, layer, [name])
        if near:
            util = _nearest(layer, near).samples(db, table)
            return None if util is None else Basis(util, Tier.XPROFILE, _efficiency(layer.quant) / _efficiency(name))
    return None


def _efficiency(quant: str) -> float:
    return EFFICIENCY.get(MOE[quant].profile, OTHER_EFFICIENCY)


def _measured(db: Database, table: str, layer: Layer, quants: Iterable[str]) -> list[Layer]:
    """The layers of any shape measured in ``quants`` at the same split over ranks, shapes ascending."""
    found = db.table(table)
    layers = []
    for quant in quants:
        asked = layer._replace(quant=quant)
        rows = found.rows(*asked.key(db, table)[:2])
        if rows is None:
            continue
        shapes = np.stack([column[rows] for column in found.columns[2:8]], axis=1)
        same = shapes[(shapes[:, FEATURES] == layer.shape.tp) & (shapes[:, FEATURES + 1] == layer.shape.ep)]
        fresh = np.ones(len(same), np.bool_)
        fresh[1:] = (same[1:] != same[:-1]).any(axis=1)
        layers += [asked._replace(shape=Shape(*map(int, shape))) for shape in same[fresh]]
    return layers


def _nearest(layer: Layer, layers: list[Layer]) -> Layer:
    """The most similar by normalised logarithms of topk, experts, hidden and inter; the first of equals."""
    logs = np.log(np.maximum(np.array([other.shape[:FEATURES] for other in layers], np.float64), FLOOR))
    low = logs.min(axis=0)
    span = logs.max(axis=0) - low
    span[span == 0] = 1.0
    asked = np.log(np.maximum(np.array(layer.shape[:FEATURES], np.float64), FLOOR))
    return layers[int(np.argmin((((logs - low) / span - (asked - low) / span) ** 2).sum(axis=1)))]
