"""What the engines of one search have in common, so that it is priced once: phases, token counts, attention points."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from perfcast_engine.answer import F64, Answer, Mask, Miss, Points
from perfcast_engine.errors import EngineError
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.phase import Phase
from perfcast_engine.step_result import StepResult
from perfcast_engine.tables.database import Database
from perfcast_engine.token_table import CountTable

BITS = 21  # of a coordinate in the key of a point
Keys = np.ndarray


class Shared:
    """Kept for one search. Not for concurrent use."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, object] = {}

    def phase(self, ops: tuple[Op, ...], db: Database, logits_apart: bool, split_by_role: bool) -> Phase:
        key = "phase", ops, id(db), logits_apart, split_by_role
        if key not in self._kept:
            self._kept[key] = Phase(ops, db, logits_apart, split_by_role, self.table, self.evaluate)
        found = self._kept[key]
        assert isinstance(found, Phase)
        return found

    def table(self, ops: Sequence[Op], db: Database) -> CountTable:
        """The counts of ``ops``, in two parts: mappings often differ in how experts are spread and in nothing else."""
        spread = [op for op in ops if hasattr(op, "moe_ep")]
        rest = [op for op in ops if not hasattr(op, "moe_ep")]
        parts = [self._counts(tuple(part), db) for part in (rest, spread) if part]
        return Summed(ops, db, parts) if len(parts) > 1 else parts[0] if parts else CountTable(ops, db)

    def _counts(self, ops: tuple[Op, ...], db: Database) -> CountTable:
        key = "counts", ops, id(db)
        if key not in self._kept:
            self._kept[key] = CountTable(ops, db)
        found = self._kept[key]
        assert isinstance(found, CountTable)
        return found

    def evaluate(self, op: Op, db: Database, at: Points) -> Answer:
        keys = _keys(at) if op.reads is Reads.SEQUENCE else None
        if keys is None:
            return op.evaluate(db, at)
        key = "points", op, id(db)
        if key not in self._kept:
            self._kept[key] = PointTable(op, db)
        found = self._kept[key]
        assert isinstance(found, PointTable)
        return found(keys, at)


class Summed(CountTable):
    """Operators whose counts are kept in several tables."""

    def __init__(self, ops: Sequence[Op], db: Database, parts: Sequence[CountTable]) -> None:
        super().__init__(ops, db)
        self._parts = parts

    def __call__(self, x: F64) -> StepResult:
        first, *others = (part(x) for part in self._parts)
        for other in others:
            first += other
        return first


class PointTable:
    """One operator's answers at the points asked for so far."""

    def __init__(self, op: Op, db: Database) -> None:
        self._op, self._db = op, db
        self._keys: Keys = np.zeros(0, np.int64)
        self._known = Answer.zero(0)
        self._misses: list[tuple[Keys, EngineError]] = []

    def __call__(self, keys: Keys, at: Points) -> Answer:
        asked, first, back = np.unique(keys, return_index=True, return_inverse=True)
        new = ~np.isin(asked, self._keys, assume_unique=True)
        if new.any():
            self._learn(asked[new], at.take(first[new]))
        where = np.searchsorted(self._keys, asked)[back]
        known = self._known
        misses: list[Miss] = []
        for gone, error in self._misses:
            mask: Mask = np.isin(keys, gone)
            if mask.any():
                misses.append((mask, error))
        return Answer(known.ms[where], known.source[where], known.tier[where], known.energy[where], misses)

    def _learn(self, keys: Keys, at: Points) -> None:
        new, old = self._op.evaluate(self._db, at), self._known
        self._misses += [(keys[mask], error) for mask, error in new.misses]
        order = np.argsort(np.concatenate([self._keys, keys]))
        self._keys = np.concatenate([self._keys, keys])[order]
        self._known = Answer(
            np.concatenate([old.ms, new.ms])[order],
            np.concatenate([old.source, new.source])[order],
            np.concatenate([old.tier, new.tier])[order],
            np.concatenate([old.energy, new.energy])[order],
        )


def _keys(at: Points) -> Keys | None:
    """One integer for each point; None where the points do not pack into one."""
    axes = at.batch, at.s, at.prefix
    if any((axis >= 1 << BITS).any() or (axis != np.floor(axis)).any() for axis in axes) or (at.imbalance != 1).any():
        return None
    batch, s, prefix = (axis.astype(np.int64) for axis in axes)
    return (batch << 2 * BITS) | (s << BITS) | prefix
