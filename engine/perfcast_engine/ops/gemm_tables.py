"""The measured products of the GEMM operator and what calibrates an estimate of one (spec/02 sections 4, 5.1, 9.3)."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Mask, Source, Tier
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.interp.grid import Ints
from perfcast_engine.interp.sites import GATE, Sites
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.ops.base import Split, no_slice
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Table

# How well kernels of a (bytes, compute) profile use the GPU, for borrowing across profiles (spec/02 section 9.3).
EFFICIENCY = MappingProxyType(
    {
        (2.0, 1.0): 0.70,
        (1.0, 1.0): 0.55,
        (0.5625, 1.0): 0.45,
        (0.5, 1.0): 0.45,
        (1.0, 2.0): 0.45,
        (0.5, 2.0): 0.35,
        (1.0, 4.0): 0.30,
        (0.5, 4.0): 0.30,
        (0.5625, 4.0): 0.30,
    }
)
USUAL_EFFICIENCY = 0.45


def measured_as(name: str) -> str:
    """The mode under which a mode's products were measured."""
    return "fp8" if name == "fp8_static" else name


@dataclass(frozen=True, slots=True)
class GemmRoofline:
    system: SystemSpec
    quant: quant.QuantMode

    @classmethod
    def of(cls, system: SystemSpec, name: str) -> GemmRoofline:
        return cls(system, quant.GEMM[name])

    def rate(self) -> float:
        return self.system.rate(self.quant)

    def split(self, m: F64, n: F64 | float, k: F64 | float) -> Split:
        moved = self.quant.bytes * (m * n + m * k + n * k)
        return Split.of(2 * m * n * k / self.rate() * 1000, self.system.memory_sol_ms(moved))

    def __call__(self, m: F64, n: F64 | float, k: F64 | float) -> F64:
        return self.split(m, n, k).time


class _Rows(NamedTuple):
    m: Ints
    n: Ints
    k: Ints
    ms: F64

    @property
    def floats(self) -> tuple[F64, F64, F64]:
        return self.m.astype(np.float64), self.n.astype(np.float64), self.k.astype(np.float64)


def has_quant(db: Database, name: str) -> bool:
    table = db.find("gemm")
    return table is not None and table.rows(name) is not None


def _rows(db: Database, table: Table, name: str) -> _Rows | None:
    """The measurements of one mode, latencies below its roofline lifted to it where the system states its rate."""
    rows = table.rows(name)
    if rows is None:
        return None
    m, n, k = (column[rows] for column in table.columns[1:])
    measured = _Rows(m, n, k, table.ms[rows])
    mode = quant.GEMM[name]
    if not db.system.flops.get(mode.rate, 0.0) > 0:
        return measured
    return measured._replace(ms=np.maximum(measured.ms, GemmRoofline(db.system, mode)(*measured.floats)))


def silicon(db: Database, roofline: GemmRoofline, n: int, k: int, m: F64, what: str) -> Answer:
    """Measured (n, k) products at m tokens, or what the measured shapes near it say."""
    name = roofline.quant.name
    shape = db.kept(("gemm shape", name, n, k), lambda: _sites(db, roofline).shape(n, k))

    def miss(gone: Mask) -> PerfDataMissing:
        return PerfDataMissing(
            f"{what}: no measured {name} GEMM within {GATE:g} octaves of n={n}, k={k}", op=what, key=f"n={n}, k={k}"
        )

    return Answer.of(shape.at(m), Source.SILICON, miss=miss)


def _sites(db: Database, roofline: GemmRoofline) -> Sites:
    name = roofline.quant.name

    def build() -> Sites:
        table = db.table("gemm")
        rows = _rows(db, table, name)
        if rows is None:
            raise no_slice(table, (name,))
        return Sites.of(rows.m, rows.n, rows.k, rows.ms, _ranks(db, name), roofline)

    return db.kept(("gemm sites", name), build)


def _ranks(db: Database, name: str) -> dict[tuple[int, int], int]:
    table = db.find("gemm_sites")
    rows = None if table is None else table.rows(name)
    if table is None or rows is None:
        return {}
    n, k = (column[rows].tolist() for column in table.columns[1:])
    return dict(zip(zip(n, k, strict=True), table.ms[rows].astype(int).tolist(), strict=True))


class Basis(NamedTuple):
    """What an estimate is calibrated on: samples (None where there are none), how far borrowed, ratio to divide by."""

    util: UtilGrid | None
    tier: Tier = Tier.EMPIRICAL
    k: float = 1.0


def basis(db: Database, roofline: GemmRoofline) -> Basis:
    """Own samples, else a mode of the same profile, else of the nearest profile (spec/02 section 9.3)."""
    return db.kept(("gemm basis", roofline.quant.name), lambda: _basis(db, roofline))


def _basis(db: Database, roofline: GemmRoofline) -> Basis:
    table = db.find("gemm")
    if table is None:
        return Basis(None)
    own = roofline.quant
    util = _util(db, table, own.name, roofline)
    if util is not None:
        return Basis(util)
    others = [quant.GEMM[str(name)] for name in table.children() if name in quant.GEMM and name != own.name]
    same = [mode for mode in others if mode.profile == own.profile]
    if same and Tier.XQUANT in db.policy:
        util = _util(db, table, same[0].name, roofline)
        if util is not None:
            return Basis(util, Tier.XQUANT)
    if Tier.XPROFILE in db.policy:
        unlike = [mode for mode in others if mode.profile != own.profile]
        for mode in sorted(unlike, key=lambda mode: (abs(mode.compute - own.compute), abs(mode.bytes - own.bytes))):
            util = _util(db, table, mode.name, GemmRoofline(db.system, mode))
            if util is not None:
                return Basis(util, Tier.XPROFILE, _efficiency(own) / _efficiency(mode))
    return Basis(None)


def _util(db: Database, table: Table, name: str, roofline: GemmRoofline) -> UtilGrid | None:
    rows = _rows(db, table, name)
    if rows is None:
        return None
    return UtilGrid.of(rows.floats, rows.ms, roofline(*rows.floats))


def _efficiency(mode: quant.QuantMode) -> float:
    return EFFICIENCY.get(mode.profile, USUAL_EFFICIENCY)
