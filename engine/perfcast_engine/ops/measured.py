"""How what was measured, and the roofline of it, answer in every mode (spec/02 sections 2, 3, 9)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from perfcast_surface.blend import Blend
from perfcast_surface.terms import DECODE, Block, Causal, One, Term

from perfcast_engine.answer import F64, Answer, Mask, Points, Source, Tier, or_else, total
from perfcast_engine.errors import EmpiricalBasisMissing, EngineError, PerfDataMissing
from perfcast_engine.interp.grid import Grid, Query, Sol
from perfcast_engine.interp.surface import Everywhere, Surface
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.ops.base import MODES, Op, Reads, Split, rank_parts
from perfcast_engine.ops.roofline import LAWS, Roofline, roofline
from perfcast_engine.quant import FMHA, GEMM, KV_CACHE, QuantMode
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key, Table

Coord = Any  # one axis of a query: an array, or a number that stands for all points


class Basis(NamedTuple):
    """What an estimate is calibrated on: samples (None where there are none), how far borrowed, factor on them."""

    util: UtilGrid | None
    tier: Tier = Tier.EMPIRICAL
    k: float = 1.0


Price = Callable[[Database, Points], Answer]


def by_mode(
    db: Database, at: Points, silicon: Price, empirical: Price, sol: Callable[[Database, Points], F64]
) -> Answer:
    """One table query as the database's mode wants it (spec/02 section 2). Read every rate the query needs BEFORE
    calling this: a missing rate wins over missing data in every mode."""
    if db.mode is Mode.SOL:
        return Answer.of(sol(db, at), Source.SOL)
    if db.mode is Mode.HYBRID:
        return or_else(partial(silicon, db), partial(empirical, db), at, PerfDataMissing)
    return silicon(db, at) if db.mode is Mode.SILICON else empirical(db, at)


def measured_only(db: Database, at: Points, price: Callable[[Points], Answer], what: str) -> Answer:
    """``price`` of an operator that nothing but measurements tells of."""
    if not db.mode.shared:
        raise no_basis(f"{what} (known from measurements only)")
    if db.mode is Mode.SILICON:
        return price(at)
    return or_else(price, lambda at: estimated(Basis(None), (), at.x, what), at, PerfDataMissing)


@dataclass(frozen=True, slots=True)
class Slice:
    """The rows under ``key`` of a table with their roofline.

    ``sol``: ms in the coordinates of the rows; it depends on nothing but system, table, key and ``also``. ``clamp``
    lifts latencies below the roofline to it, at unchanged energy (spec/01 section 7.1). ``beside``: see Attention.
    """

    table: str
    key: tuple[Key, ...]
    sol: Sol
    sqrt_axis: int | None = None
    clamp: bool = False
    also: Hashable = None
    beside: Slice | None = None

    def find(self, db: Database) -> Surface | None:
        """The measurements, kept; None where there are none."""
        return db.kept(("slice", self.table, self.key, self.also), lambda: self.read(db))

    def read(self, db: Database) -> Surface | None:
        table = db.find(self.table)
        grid = None if table is None else table.grid(*self.key)
        if grid is not None and self.clamp:
            ms = np.maximum(grid.ms, self.sol(*grid.floats))
            grid = Grid(grid.coords, ms, None if grid.power is None else grid.power * grid.ms / ms)
        beside = None if self.beside is None else self.beside.find(db)
        return None if grid is None else Surface(grid, self.sol, self.sqrt_axis, beside)

    def surface(self, db: Database) -> Surface:
        """As ``find``; PerfDataMissing, naming what was measured instead, where there are none."""
        surface = self.find(db)
        if surface is None:
            raise no_slice(db.table(self.table), self.key)
        return surface

    def basis(self, db: Database) -> Basis:
        surface = self.find(db)
        return Basis(None if surface is None else surface.util)

    def measured(self, db: Database, query: Query, what: str) -> Answer:
        """The measured latency at each query; points that nothing anchors miss."""
        resolved = self.surface(db).at(*query)

        def miss(gone: Mask) -> EngineError:
            first = int(np.argmax(gone))
            at = (float(c[first]) if isinstance(c, np.ndarray) else c for c in query)
            axes = db.table(self.table).key[-len(query) :]
            point = ", ".join(f"{axis}={c:g}" for axis, c in zip(axes, at, strict=True))
            return PerfDataMissing(f"{what}: no data to anchor {point}", op=what, key=point)

        return Answer.of(resolved.ms, Source.SILICON, energy=resolved.energy, miss=miss)

    def estimated(self, db: Database, query: Query, what: str) -> Answer:
        """The roofline at each query by the utilisation of the nearest measurements."""
        return estimated(self.basis(db), query, self.sol(*query), what)

    def over_tokens(self, db: Database, at: Points, what: str) -> Answer:
        """The latency at the tokens of each point, by the database's mode."""
        return by_mode(
            db,
            at,
            lambda db, at: self.measured(db, (at.x,), what),
            lambda db, at: self.estimated(db, (at.x,), what),
            lambda _, at: self.sol(at.x),
        )


def no_slice(table: Table, key: tuple[Key, ...]) -> PerfDataMissing:
    """The error for a key that ``table`` does not hold: which part was not measured, and what was in its place."""
    depth = next((i for i in range(len(key)) if table.rows(*key[: i + 1]) is None), len(key) - 1)
    near = ", ".join(str(value) for value in table.children(*key[:depth]))
    wanted = ", ".join(f"{column}={value}" for column, value in zip(table.key, key, strict=False))
    return PerfDataMissing(
        f"{table.name} has no data for {wanted}: {table.key[depth]} was measured at {near}",
        table=table.name,
        key=wanted,
        nearest=near,
    )


def estimated(basis: Basis, query: Query, sol: F64, what: str) -> Answer:
    """Roofline / utilisation of the nearest samples at each query (spec/02 section 9). EmpiricalBasisMissing where
    there are none."""
    if basis.util is None:
        raise no_basis(what)
    return Answer.of(sol / (basis.util.at(query) * basis.k), Source.EMPIRICAL, basis.tier)


def nearest_below(sizes: Sequence[Key], wanted: int) -> int:
    """The largest of the measured sizes that is not above ``wanted``, else the smallest."""
    counts = [int(size) for size in sizes]
    return max((count for count in counts if count <= wanted), default=min(counts))


def no_basis(what: str) -> EmpiricalBasisMissing:
    return EmpiricalBasisMissing(f"{what}: no measurement to calibrate an estimate on", op=what)


@dataclass(frozen=True, kw_only=True)
class Attention(Op):
    """An attention kernel, or a block around one, measured as one unit over heads and the coordinates of its phase.

    A kind tells where its rows stand (``table``, ``keyed_by``), at which coordinates (``coords``), and by which row of
    rooflines.yaml they are judged (``law``); the rest follows.
    """

    heads: int

    reads: ClassVar[Reads] = Reads.SEQUENCE
    positive: ClassVar[tuple[str, ...]] = ("heads",)
    beside_shape: ClassVar[frozenset[str]] = Op.beside_shape | {"heads", "cp"}
    sqrt_axis: ClassVar[int | None] = None
    clamp: ClassVar[bool] = False

    @property
    @abstractmethod
    def law(self) -> str:
        """The row of rooflines.yaml."""

    @property
    def figures(self) -> Mapping[str, Any]:
        """What its formulas see."""
        return vars(self)

    def modes(self, system: SystemSpec) -> dict[str, QuantMode]:
        """What the formulas call the modes of elements and of products; ``decode``: over the cache, of a new token."""
        modes = {"fp8": GEMM["fp8"], "bf16": FMHA["bfloat16"]}
        named = [(name, known) for name, known in MODES.items() if hasattr(self, name)]
        modes |= {name.removesuffix("_quant"): known[getattr(self, name)] for name, known in named}
        fp8 = modes.get("kv") is KV_CACHE["fp8"] and system.has_fp8_decode_attention
        return {**modes, "decode": FMHA["fp8" if fp8 else "bfloat16"]}

    def rates(self, system: SystemSpec) -> None:
        """SystemFlopsMissing where the system lacks a rate, which is told before anything else."""
        for name in LAWS[self.law]["flops"]:
            system.rate(self.modes(system)[name])

    def roofline(self, system: SystemSpec) -> Roofline:
        """Over coordinates of the table."""
        return roofline(self.law, self.figures, self.modes(system), system)

    @property
    @abstractmethod
    def table(self) -> str:
        """The table of its rows."""

    def key(self, db: Database) -> tuple[Key, ...]:
        """The key of its rows. PerfDataMissing where it takes a search that finds none."""
        return self.named_key

    @abstractmethod
    def coords(self, at: Points) -> Query:
        """The coordinates of points in the table, behind the heads."""

    @property
    def lead(self) -> tuple[float, ...]:
        """The coordinates that are the same for all points."""
        return (float(self.heads),)

    def query(self, at: Points) -> Query:
        return (*self.lead, *self.coords(at))

    def split(self, system: SystemSpec, at: Points) -> Split:
        """The roofline at points that are computed in one piece."""
        return self.roofline(system)(*self.query(at))

    def parts(self, at: Points) -> list[Points]:
        """The pieces that one GPU computes."""
        return [at]

    def slice(self, db: Database) -> Slice:
        """Where it was measured."""

        def build() -> Slice:
            key, judge = self.key(db), self.roofline(db.system)
            sol: Sol = lambda *coords: judge(*coords).time  # noqa: E731
            return Slice(self.table, key, sol, self.sqrt_axis, self.clamp, (type(self), self.shape), self.beside(db))

        return db.kept((type(self), self.shape), build)

    def beside(self, db: Database) -> Slice | None:
        """Where others were measured at the same points, and at more, that are asked the same just before."""
        return None

    def basis(self, db: Database) -> Basis:
        """What calibrates an estimate."""
        try:
            return self.slice(db).basis(db)
        except PerfDataMissing:
            return Basis(None)

    def sol(self, db: Database, at: Points) -> Split:
        first, *others = (self.split(db.system, part) for part in self.parts(at))
        return first.plus(others[0]) if others else first

    def price(self, db: Database, at: Points) -> Answer:
        self.rates(db.system)
        pieces = (by_mode(db, part, self.silicon, self.empirical, self.sol_ms) for part in self.parts(at))
        return total(pieces, len(at))

    def sol_ms(self, db: Database, at: Points) -> F64:
        return self.split(db.system, at).time

    def silicon(self, db: Database, at: Points) -> Answer:
        return self.slice(db).measured(db, self.query(at), self.name)

    def empirical(self, db: Database, at: Points) -> Answer:
        return estimated(self.basis(db), self.query(at), self.sol_ms(db, at), self.name)

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        if not db.mode.shared:
            return None
        self.rates(db.system)
        blend = self.slice(db).surface(db).sheets(*self.lead).blend
        return None if blend is None else (self.term(db, blend),)

    def outside(self, db: Database) -> One:
        return self.term(db, Everywhere((), self.slice(db).surface(db), *self.lead)).one

    def term(self, db: Database, blend: Blend) -> Term:
        """All instances by the planes at ``lead``; over (batch, s) unless a kind says otherwise."""
        return Block(DECODE, blend, self.scale)


@dataclass(frozen=True, kw_only=True)
class Prefill(Attention):
    """Causal attention measured without prefix over (heads, length, batch). ``cp``: context-parallel GPUs that share
    the sequence. A roofline takes the cached tokens as a last coordinate."""

    kv_quant: str
    fmha_quant: str
    cp: int = 1

    sqrt_axis = 1  # time grows with the square of the length

    def coords(self, at: Points) -> Query:
        return at.s + at.prefix, at.batch

    def split(self, system: SystemSpec, at: Points) -> Split:
        return self.roofline(system)(*self.query(at), at.prefix)

    def parts(self, at: Points) -> list[Points]:
        return rank_parts(at, self.cp)

    def silicon(self, db: Database, at: Points) -> Answer:
        """A cached prefix saves its share of the causal area; nothing is left of nothing."""
        square = (at.s + at.prefix) ** 2
        share = (square - at.prefix * at.prefix) / (square + (square == 0))
        return super().silicon(db, at).scaled(share)

    def term(self, db: Database, blend: Blend) -> Term:
        return Causal(blend, self.scale, ranks=max(self.cp, 1))


@dataclass(frozen=True, kw_only=True)
class Generation(Attention):
    """Attention of one new token a request, measured over (heads, batch, cache length)."""

    kv_quant: str

    def coords(self, at: Points) -> Query:
        return at.batch, at.s
