"""What an engine can be answered from, operator by operator."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import partial
from itertools import product
from typing import TypeVar

import numpy as np

from perfcast_engine.answer import F64, Points, Source, Tier, attempt
from perfcast_engine.errors import EngineError
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.ops.base import Op, Role
from perfcast_engine.ops.composite import Overlap
from perfcast_engine.predictor import Engine
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key

T = TypeVar("T")
PREFILL_POINTS = (*product((1, 8), (128, 1024, 8192), (0,)), (1, 8192, 4096))  # batch, isl, prefix
DECODE_POINTS = tuple(product((1, 16, 128), (128, 2048, 16384)))  # batch, KV length
MODES = (Mode.SILICON, Mode.HYBRID, Mode.SOL)  # tried in this order
COMMON_FIELDS = frozenset(item.name for item in fields(Op)) | {"reads"}


class Standing(StrEnum):
    """What answers for an operator."""

    MEASURED = "measured"
    COMPUTED = "computed"  # needs no table: bytes over bandwidth
    ESTIMATED = "estimated"  # from measured neighbours, in HYBRID only
    ROOFLINE = "roofline"  # never measured: speed of light, in SOL only unless the reference takes it for measured
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class OperatorCoverage:
    """One operator over the probed points of a phase.

    works_in: the first of ``MODES`` that answers every point, None where none does; shares: of the points by Source
    in SILICON, and ``missing`` of the others; tier: how far HYBRID borrows; table, key: what was read, or would have
    been; nearest: what was measured instead; error: the first miss in SILICON.
    """

    phase: str
    name: str
    kind: str
    works_in: Mode | None
    shares: tuple[float, ...]
    missing: float
    tier: Tier
    table: str
    key: str
    nearest: str
    error: EngineError | None

    @property
    def standing(self) -> Standing:
        if self.works_in is None:
            return Standing.MISSING
        if self.works_in is Mode.SILICON:
            measured = Standing.MEASURED if self.table else Standing.COMPUTED
            return Standing.ROOFLINE if self.shares[Source.SOL] else measured
        return Standing.ESTIMATED if self.works_in is Mode.HYBRID else Standing.ROOFLINE


@dataclass(frozen=True, slots=True)
class Coverage:
    """The operators of prefill, then those of decode, in the order of their lists."""

    operators: tuple[OperatorCoverage, ...]

    @property
    def works_in(self) -> Mode | None:
        """The first of ``MODES`` that answers every operator everywhere."""
        modes = [operator.works_in for operator in self.operators]
        return None if None in modes else max(filter(None, modes), key=MODES.index, default=MODES[0])


def coverage(engine: Engine) -> Coverage:
    """Every operator of ``engine`` at ``PREFILL_POINTS`` and ``DECODE_POINTS``, whatever mode the engine is in."""
    plan, db = engine.resolved.plan, engine.resolved.db
    watched = Watched(db.system, db.backend, db.version, db.source, Mode.SILICON, db.policy)
    batch, isl, prefix = _points(PREFILL_POINTS, engine.model)
    at = Points.of(batch, isl - prefix, prefix)
    rows = at.with_(x=batch)  # of the vocabulary projection
    context = ((op, rows if op.role is Role.LOGITS else at) for op in _leaves(plan.context))
    operators = [_covered("prefill", op, watched, where) for op, where in context]
    batch, length = _points(DECODE_POINTS, engine.model)
    tokens = batch * (engine.resolved.nextn + 1)
    at = Points.of(tokens, length, 0, tokens)
    operators += [_covered("decode", op, watched, at) for op in _leaves(plan.generation)]
    return Coverage(tuple(operators))


def _points(points: Sequence[tuple[int, ...]], spec: ModelSpec) -> F64:
    """Columns of ``points``, without lengths beyond what the model was made for."""
    rows: F64 = np.array(points, np.float64)
    kept: F64 = rows[(rows[:, 1] <= spec.ctx) | (rows[:, 1] == rows[0, 1])]
    return kept.T


def _leaves(ops: Iterable[Op]) -> Iterator[Op]:
    """Operators one by one, those that run at the same time too."""
    for op in ops:
        yield from _leaves(op.a + op.b) if isinstance(op, Overlap) else (op,)


def _covered(phase: str, op: Op, db: Watched, at: Points) -> OperatorCoverage:
    silicon = attempt(partial(op.evaluate, db), at)
    read, gone, error = db.taken(), silicon.missing(), silicon.first_error()
    counts = np.bincount(silicon.source[~gone], minlength=len(Source)) / len(at)
    mode, tier = (Mode.SILICON, Tier.SILICON) if error is None else _elsewhere(op, db, at)
    told = error.details if error is not None else {}
    table = told.get("table") or ", ".join(dict.fromkeys(table for table, _ in read))
    key = told.get("key") or "; ".join(key for _, key in read if key) or (_shape(op) if table else "")
    return OperatorCoverage(
        phase,
        op.name,
        type(op).__name__,
        mode,
        tuple(counts.tolist()),
        float(gone.mean()),
        tier,
        table,
        key,
        told.get("nearest", ""),
        error,
    )


def _shape(op: Op) -> str:
    """What an operator asks a table for, in words."""
    own = ((item, getattr(op, item.name)) for item in fields(op) if item.name not in COMMON_FIELDS)
    told = ((item.name, value) for item, value in own if isinstance(value, int | str) and value != item.default)
    return ", ".join(f"{name}={value}" for name, value in told)


def _elsewhere(op: Op, db: Watched, at: Points) -> tuple[Mode | None, Tier]:
    """The first other mode that answers all points, and how far it borrows."""
    for mode in MODES[1:]:
        answer = attempt(partial(op.evaluate, db.in_mode(mode)), at)
        db.taken()
        if not answer.misses:
            return mode, Tier(int(answer.tier.max()))
    return None, Tier.SILICON


Read = tuple[str, tuple[Key, ...]]


@dataclass(slots=True)
class Watched(Database):
    """A database that notes the tables and slices that are read, also those behind what it has kept from earlier."""

    _open: list[dict[Read, None]] = field(default_factory=lambda: [{}], repr=False)
    _behind: dict[Hashable, dict[Read, None]] = field(default_factory=dict, repr=False)

    def kept(self, key: Hashable, build: Callable[[], T], for_all: bool = False) -> T:
        self._open.append({})
        try:
            value = Database.kept(self, key, build)
        finally:
            read = self._open.pop()
        behind = self._behind.setdefault(key, {})
        behind |= read
        if value is not None and isinstance(key, tuple) and key[0] in ("table", "slice"):
            behind[key[1], key[2] if key[0] == "slice" else ()] = None
        self._open[-1] |= behind
        return value

    def in_mode(self, mode: Mode) -> Database:
        if mode is self.mode:
            return self
        return self.kept(
            ("mode", mode),
            lambda: Watched(
                self.system, self.backend, self.version, self.source, mode, self.policy, _open=self._open
            ),
        )  # fmt: skip

    def taken(self) -> list[tuple[str, str]]:
        """(table, key in words) of what was read since the last call; a table that slices were taken of counts once."""
        read, self._open[-1] = self._open[-1], {}
        sliced = {table for table, key in read if key}
        return [(table, self._words(table, key)) for table, key in read if key or table not in sliced]

    def _words(self, table: str, key: tuple[Key, ...]) -> str:
        columns = self.source(table, self.mode.shared)
        return ", ".join(f"{c}={v}" for c, v in zip(columns.key if columns else (), key, strict=False))
