"""Matrix multiplication with a weight (spec/02 sections 4, 5.1, 5.2, 6.1, 9.3, 9.4)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points, Source, Tier, or_else
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.interp.sites import GATE, Curves, Sites
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import LogSpace, UtilGrid
from perfcast_engine.ops.base import Split, TokenOp
from perfcast_engine.ops.measured import Basis, Slice, by_mode, estimated, no_basis, no_slice
from perfcast_engine.quant import QuantMode
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode


def measured_as(name: str) -> str:
    """The mode under which a mode's products were measured."""
    return "fp8" if name == "fp8_static" else name


def roofline(system: SystemSpec, mode: QuantMode, m: F64, n: F64 | float, k: F64 | float) -> Split:
    moved = mode.bytes * (m * n + m * k + n * k)
    return Split.of(2 * m * n * k / system.rate(mode) * 1000, system.memory_sol_ms(moved))


@dataclass(frozen=True, kw_only=True)
class Gemm(TokenOp):
    """x' tokens times an (n, k) weight.

    ``low_precision_input``: the activations arrive quantised (fp8_static saves the scaling pass); ``below_grid_sol``: a
    shape that no measured one is near answers with its roofline instead of a miss (SILICON only).
    """

    n: int
    k: int
    quant: str
    low_precision_input: bool = False
    below_grid_sol: bool = False

    positive = ("n", "k")

    def weight_bytes(self) -> float:
        return self.n * self.k * quant.GEMM[self.quant].bytes * self.scale

    def _roofline(self, db: Database, m: F64) -> Split:
        return roofline(db.system, quant.GEMM[measured_as(self.quant)], m, float(self.n), float(self.k))

    def sol(self, db: Database, at: Points) -> Split:
        return self._roofline(db, self.tokens(at))

    def price(self, db: Database, at: Points) -> Answer:
        at = at.with_(x=self.tokens(at))
        db.system.rate(quant.GEMM[self.quant])
        product = self._product(db, at)
        if self.quant != "fp8_static":
            return product
        saved = _quantise(db, at, "computescale", self.k, self.name)
        if self.low_precision_input:
            saved = saved + _quantise(db, at, "scale_matrix", self.k, self.name)
        rest = product + saved.scaled(-1.0)
        floor = np.maximum(rest.ms, self._roofline(db, at.x).time)
        return replace(rest, ms=floor, energy=np.maximum(rest.energy, 0.0)).tagged(Source.ESTIMATED)

    def _product(self, db: Database, at: Points) -> Answer:
        mode = quant.GEMM[measured_as(self.quant)]

        def sol(db: Database, at: Points) -> F64:
            return self._roofline(db, at.x).time

        def silicon(db: Database, at: Points) -> Answer:
            ms = _sites(db, mode).shape(at.x, float(self.n), float(self.k))
            return Answer.of(ms, Source.SILICON, miss=lambda _: self._nothing_near(mode))

        def empirical(db: Database, at: Points) -> Answer:
            basis = db.kept(("gemm basis", mode), lambda: _basis(db, mode))
            return estimated(basis, (at.x, float(self.n), float(self.k)), sol(db, at), self.name)

        if self.below_grid_sol and db.mode is Mode.SILICON and _products(db, mode):
            return or_else(partial(silicon, db), lambda at: Answer.of(sol(db, at), Source.SOL), at, PerfDataMissing)
        return by_mode(db, at, silicon, empirical, sol)

    def _nothing_near(self, mode: QuantMode) -> PerfDataMissing:
        shape = f"n={self.n}, k={self.k}"
        message = f"{self.name}: no measured {mode.name} GEMM within {GATE:g} octaves of {shape}"
        return PerfDataMissing(message, op=self.name, key=shape)


def _products(db: Database, mode: QuantMode) -> Surface | None:
    """The measured products of one mode; latencies below the roofline are lifted to it where its rate is known."""
    system = db.system
    known = system.flops.get(mode.rate, 0.0) > 0
    every = Slice("gemm", (mode.name,), lambda m, n, k: roofline(system, mode, m, n, k).time, clamp=known)
    return db.kept(("gemm products", mode), lambda: every.read(db), for_all=True)


def _sites(db: Database, mode: QuantMode) -> Sites:
    def build() -> Sites:
        surface = _products(db, mode)
        if surface is None:
            raise no_slice(db.table("gemm"), (mode.name,))
        m, n, k = surface.grid.floats
        return Sites(Curves.of([n, k], m, surface.grid.ms, _ranks(db, mode)), surface.sol)

    return db.kept(("gemm sites", mode), build, for_all=True)


def _ranks(db: Database, mode: QuantMode) -> dict[tuple[float, ...], int]:
    table = db.find("gemm_sites")
    rows = None if table is None else table.rows(mode.name)
    if table is None or rows is None:
        return {}
    n, k = (column[rows].tolist() for column in table.columns[1:])
    return dict(zip(zip(n, k, strict=True), table.ms[rows].astype(int).tolist(), strict=True))


def _basis(db: Database, own: QuantMode) -> Basis:
    """Own samples, else a mode of the same profile, else of the nearest profile (spec/02 section 9.3)."""
    table = db.find("gemm")
    known = [quant.GEMM[str(name)] for name in (table.children() if table else ()) if name in quant.GEMM]
    same = [mode for mode in known if mode.profile == own.profile and mode is not own]
    unlike = [mode for mode in known if mode.profile != own.profile]
    unlike.sort(key=lambda mode: (abs(mode.compute - own.compute), abs(mode.bytes - own.bytes)))
    rungs = [(Tier.EMPIRICAL, own, own)] if own in known else []
    rungs += [(Tier.XQUANT, mode, own) for mode in same[:1]]
    rungs += [(Tier.XPROFILE, mode, mode) for mode in unlike]
    for tier, mode, judged_as in rungs:
        util = _util(db, mode, judged_as) if tier in {Tier.EMPIRICAL, *db.policy} else None
        if util is not None:
            return Basis(util, tier, own.efficiency / judged_as.efficiency)
    return Basis(None)


def _util(db: Database, mode: QuantMode, judged_as: QuantMode) -> UtilGrid | None:
    surface = _products(db, mode)
    if surface is None:
        return None
    coords = surface.grid.floats
    return UtilGrid.of(coords, surface.grid.ms, roofline(db.system, judged_as, *coords).time)


STEPS = {"computescale": 2, "scale_matrix": 3}  # quantise steps: bytes read or written an element
FLAT = "computescale"  # a difference of measurements: flat outside of them, and may be 0


def _quantise(db: Database, at: Points, table: str, k: int, what: str) -> Answer:
    """One of ``STEPS`` for at.x tokens of k elements, which an fp8_static product saves. Outside of the measurements it
    is in proportion to its roofline, unless flat."""
    system = db.system
    steps = Slice(table, ("fp8",), lambda m, k: system.memory_sol_ms(STEPS[table] * m * k))

    def silicon(db: Database, at: Points) -> Answer:
        m, depth = steps.surface(db).grid.floats
        inside = np.clip(at.x, m[0], m[-1]), np.clip(np.full(len(at), float(k)), depth.min(), depth.max())
        answer = steps.measured(db, inside, what)
        here, there = steps.sol(at.x, k), steps.sol(*inside)
        usable = (here > 0) & (there > 0) & (table != FLAT)
        return answer.scaled(np.where(usable, here, 1.0) / np.where(usable, there, 1.0))

    def empirical(db: Database, at: Points) -> Answer:
        query = at.x, float(k)
        surface, here = steps.find(db), steps.sol(*query)
        if surface is None or table != FLAT:
            return steps.estimated(db, query, what)
        space = db.kept("computescale space", lambda: LogSpace.of(surface.grid.floats))
        near = space.nearest(query, 1, clip=False)[0][0]
        ms, there = surface.grid.ms[near], surface.leaf_sol[near]
        known = ms > 0
        ratio = np.where(here > 0, here, np.nan) / np.where(known, there, 1.0)
        return Answer.of(np.where(known, ratio * ms, 0.0), Source.EMPIRICAL, Tier.EMPIRICAL, miss=no_basis(what))

    return by_mode(db, at, silicon, empirical, lambda _, at: steps.sol(at.x, k))
