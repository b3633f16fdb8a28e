"""What every operator is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import nan
from typing import ClassVar, NamedTuple

import numpy as np
from perfcast_surface.terms import Term

from perfcast_engine.answer import F64, Answer, Mask, Points, Source, Tier, or_else
from perfcast_engine.errors import EmpiricalBasisMissing, EngineError, InvalidField, PerfDataMissing, SolNotDefined
from perfcast_engine.interp.grid import Grid, Query, Sol
from perfcast_engine.interp.surface import Surface
from perfcast_engine.interp.util import UtilGrid
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key, Table


class Reads(Enum):
    """Which coordinate an operator depends on (spec/06 1.1); what lets token-only operators collapse to one table."""

    TOKENS = "x"  # the token count of the pass
    BATCH = "batch"  # the request count
    SEQUENCE = "batch, s, prefix"


class Role(Enum):
    """The part an operator plays in the phases of a step (spec/06 1.1), instead of tests on its name."""

    OTHER = 0
    LOGITS = 1  # prefill gives it one token per request
    ATTENTION = 2  # dense attention that mixed steps price apart


Quick = Callable[[float, float, float], float]  # batch, s, prefix of one point, without imbalance, to ms


class Split(NamedTuple):
    """A roofline taken apart, ms (N,) each: the longer of computing and moving bytes, and both."""

    time: F64
    math: F64
    mem: F64

    @classmethod
    def of(cls, math: F64, mem: F64) -> Split:
        return cls(np.maximum(math, mem), math, mem)

    @classmethod
    def memory(cls, mem: F64) -> Split:
        return cls(mem, np.zeros(len(mem)), mem)

    def clamped(self) -> Split:
        return Split(*(np.maximum(part, 0.0) for part in self))

    def plus(self, other: Split) -> Split:
        return Split(self.time + other.time, self.math + other.math, self.mem + other.mem)

    def scaled(self, factor: float | F64) -> Split:
        return Split(self.time * factor, self.math * factor, self.mem * factor)


@dataclass(frozen=True, kw_only=True)
class Op(ABC):
    """One operator of a forward pass on one GPU. ``scale`` multiplies latency and energy (layers x MTP factor)."""

    name: str
    scale: float = 1.0
    role: Role = Role.OTHER

    reads: ClassVar[Reads] = Reads.TOKENS

    @abstractmethod
    def price(self, db: Database, at: Points) -> Answer:
        """Latency of one instance at N points, before ``scale``. May raise EngineError when no point has an answer."""

    def evaluate(self, db: Database, at: Points) -> Answer:
        """Latency of all instances at N points."""
        priced = self.price(db, at)
        ms, energy = np.maximum(priced.ms, 0.0) * self.scale, np.maximum(priced.energy, 0.0) * self.scale
        return Answer(ms, priced.source, priced.tier, energy, priced.misses)

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        """All instances as summands over (batch, s, prefix), right inside of the measurements: for single points and
        for a surface that leaves this process. None where the kind or the mode has no such form."""
        return None

    def terms_source(self, db: Database) -> Source:
        """Of what ``terms`` answer."""
        return Source.SILICON

    def outside(self, db: Database) -> Quick:
        """``evaluate`` for one point that ``terms`` do not know; NaN where it misses or has another source."""
        source = self.terms_source(db)

        def ms(batch: float, s: float, prefix: float) -> float:
            answer = self.evaluate(db, Points.of(batch, s, prefix))
            return answer.ms.item(0) if answer.source[0] == source else nan

        return ms

    def sol(self, db: Database, at: Points) -> Split:
        """The roofline of one instance at N points; SolNotDefined where the kind exports none."""
        raise SolNotDefined(f"{type(self).__name__} {self.name} exports no roofline split", op=self.name)

    def sol_split(self, db: Database, at: Points) -> Split:
        """The roofline of all instances at N points; no part is negative."""
        return self.sol(db, at).clamped().scaled(self.scale)

    def weight_bytes(self) -> float:
        """Resident bytes of all instances on one GPU."""
        return 0.0


def evaluate_all(ops: Sequence[Op], db: Database, at: Points) -> dict[str, Answer]:
    """Each operator's answer, equal names folded, in order of first appearance."""
    folded: dict[str, Answer] = {}
    for op in ops:
        answer = op.evaluate(db, at)
        folded[op.name] = folded[op.name] + answer if op.name in folded else answer
    return folded


def require(op: Op, **least: float) -> None:
    """InvalidField unless each named field is a finite number of at least that much; for ``__post_init__``."""
    for name, bound in least.items():
        value = getattr(op, name)
        if not (isinstance(value, int | float) and bound <= value < np.inf):
            raise InvalidField(f"{type(op).__name__}.{name}", f"must be a number of at least {bound:g}, not {value!r}")


def split_tokens(x: np.ndarray, token_div: int, seq_split: int) -> np.ndarray:
    """Tokens per GPU: floor by ``token_div``, then ceil by the context-parallel ``seq_split`` (spec/02 section 6)."""
    return np.ceil(np.floor(x / max(token_div, 1)) / max(seq_split, 1))


def rank_parts(at: Points, ranks: int) -> list[Points]:
    """What one of ``ranks`` context-parallel GPUs computes: the first and the last of twice as many equal parts of the
    new tokens."""
    if ranks <= 1:
        return [at]
    part = np.maximum(np.ceil(at.s / (2 * ranks)), 1.0)
    return [at.with_(s=part), at.with_(s=part, prefix=np.maximum(at.prefix + at.s - part, 0.0))]


def by_mode(
    db: Database,
    at: Points,
    *,
    silicon: Callable[[Points], Answer],
    empirical: Callable[[Points], Answer],
    sol: Callable[[Points], F64],
) -> Answer:
    """One table query as the database's mode wants it (spec/02 section 2). Read every rate the query needs BEFORE
    calling this: a missing rate wins over missing data in every mode."""
    if db.mode is Mode.SOL:
        return Answer.of(sol(at), Source.SOL)
    if db.mode is Mode.EMPIRICAL:
        return empirical(at)
    if db.mode is Mode.SILICON:
        return silicon(at)
    return or_else(silicon, empirical, at, PerfDataMissing)


def find_slice(
    db: Database,
    name: str,
    key: tuple[Key, ...],
    sol: Sol,
    *,
    sqrt_axis: int | None = None,
    clamp: bool = False,
    also: Hashable = None,
) -> Surface | None:
    """The measured slice ``key`` of table ``name`` with its roofline, kept; None where table or slice is absent.

    ``sol`` must depend on nothing but the system, the table and the key; name what else it depends on in ``also``.
    ``clamp`` lifts latencies below the roofline to it, at unchanged energy (spec/01 section 7.1).
    """

    def build() -> Surface | None:
        table = db.find(name)
        grid = None if table is None else table.grid(*key)
        if grid is None or not clamp:
            return None if grid is None else Surface(grid, sol, sqrt_axis)
        ms = np.maximum(grid.ms, sol(*grid.floats))
        power = None if grid.power is None else grid.power * grid.ms / ms
        return Surface(Grid(grid.coords, ms, power), sol, sqrt_axis)

    return db.kept(("slice", name, key, also), build)


def slice_of(
    db: Database,
    name: str,
    key: tuple[Key, ...],
    sol: Sol,
    *,
    sqrt_axis: int | None = None,
    clamp: bool = False,
    also: Hashable = None,
) -> Surface:
    """As ``find_slice``; PerfDataMissing, naming what was measured instead, where there is none."""
    surface = find_slice(db, name, key, sol, sqrt_axis=sqrt_axis, clamp=clamp, also=also)
    if surface is None:
        raise no_slice(db.table(name), key)
    return surface


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


def measured(surface: Surface, query: Query, what: str, axes: Sequence[str]) -> Answer:
    """The measured latency at each query; points that nothing anchors miss. ``what`` and ``axes`` word the miss."""
    resolved = surface.at(*query)

    def miss(gone: Mask) -> EngineError:
        first = int(np.argmax(gone))
        at = (float(c[first]) if isinstance(c, np.ndarray) else c for c in query)
        point = ", ".join(f"{axis}={c:g}" for axis, c in zip(axes, at, strict=True))
        return PerfDataMissing(f"{what}: no data to anchor {point}", op=what, key=point)

    return Answer.of(resolved.ms, Source.SILICON, energy=resolved.energy, miss=miss)


def estimated(
    util: UtilGrid | None, query: Query, sol: F64, what: str, tier: Tier = Tier.EMPIRICAL, k: float = 1.0
) -> Answer:
    """Roofline / (utilisation of the nearest samples * k) at each query (spec/02 section 9); all points miss with
    EmpiricalBasisMissing where there is no sample."""
    if util is None:
        return Answer.none(len(sol), no_basis(what))
    return Answer.of(sol / (util.at(query) * k), Source.EMPIRICAL, tier)


def no_basis(what: str) -> EmpiricalBasisMissing:
    return EmpiricalBasisMissing(f"{what}: no measurement to calibrate an estimate on", op=what)


def memory_bound(db: Database, bytes_moved: F64) -> Answer:
    """An operator without a table, as its mode prices it: bytes over the achievable memory bandwidth plus a launch."""
    if db.mode is Mode.SOL:
        return Answer.of(db.system.memory_sol_ms(bytes_moved), Source.SOL)
    return Answer.of(db.system.memory_ms(bytes_moved), Source.EMPIRICAL)
