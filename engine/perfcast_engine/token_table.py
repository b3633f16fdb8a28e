"""Token-only operators of one engine collapsed to a table over the token count (DESIGN section 3, idea 3)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from perfcast_surface.surface import Counts

from perfcast_engine.answer import F64, Points, Source
from perfcast_engine.ops.base import Op
from perfcast_engine.origin import Listed, Summed
from perfcast_engine.step_result import StepResult, combined
from perfcast_engine.tables.database import Database

BLOCK = 1024  # integers evaluated together; one block costs little more than one integer
LIMIT = 1 << 18  # larger counts are evaluated as asked and not kept
BLOCKS_AT_ONCE = 32  # a query that touches more new blocks evaluates just its own counts; all of them take 20 ms


class Column(NamedTuple):
    """Sums over operators at N counts. ms: (N,) NaN where any operator misses; by_source: (5, N) ms per Source; tier:
    (N,) the worst Tier; energy: (N,) W ms."""

    ms: F64
    by_source: F64
    tier: np.ndarray
    energy: F64

    def take(self, which: np.ndarray) -> StepResult:
        origin = Summed((Listed(self.by_source, which),), len(which))
        return StepResult(self.ms.take(which), origin, self.tier.take(which), self.energy.take(which))


class CountTable:
    """The summed latency of ``ops``, each reading the token count only, at the integer counts asked for so far; small,
    for an engine that is asked a few times.

    Exact by construction: counts are integers and every integer is evaluated by the operators themselves.
    """

    def __init__(self, ops: Sequence[Op], db: Database) -> None:
        self.ops = tuple(ops)
        self.db = db
        self._known = np.zeros(0, np.int64), _empty(0)

    def __call__(self, x: F64) -> StepResult:
        """Sums at counts ``x`` (N,), non-negative integers as float64."""
        counts, kept = self._known
        asked, back = np.unique(x.astype(np.int64), return_inverse=True)
        new = asked[~np.isin(asked, counts, assume_unique=True)]
        if len(new):
            counts, parts = np.concatenate([counts, new]), zip(kept, self.evaluate(new), strict=True)
            order = np.argsort(counts)
            counts, kept = counts[order], Column(*(np.concatenate(pair, axis=-1)[..., order] for pair in parts))
            self._known = counts, kept
        return kept.take(np.searchsorted(counts, asked)[back])

    @property
    def nbytes(self) -> int:
        """Bytes of the sums kept so far."""
        counts, kept = self._known
        return counts.nbytes + sum(array.nbytes for array in kept)

    def evaluate(self, counts: np.ndarray) -> Column:
        """Sums at ``counts`` straight from the operators."""
        x, n = counts.astype(np.float64), len(counts)
        answers = [(op.name, op.evaluate(self.db, Points.of(x, 1, 0, x))) for op in self.ops]
        whole = combined(answers, n, listed=False)
        return Column(whole.ms, whole.by_source.T, whole.tier, whole.energy)


class TokenTable(CountTable):
    """A count table that fills whole blocks ahead and answers by index; for an engine that is asked all the time.

    ms, view: the sums at 0, 1, 2 ..., NaN where they are not filled in and at the end; by_source: the same of each
    Source, 0 where they are not; sources: those that there is any of; is_plain: whether no sum is borrowed or has an
    energy.
    """

    def __init__(self, ops: Sequence[Op], db: Database) -> None:
        super().__init__(ops, db)
        self._lock = threading.Lock()
        self._filled = np.zeros(0, np.bool_)
        self.is_plain, self.sources = True, frozenset[int]()
        self.by_source = tuple(map(Counts, _empty(1).by_source))
        self._keep(_empty(1))

    def _keep(self, kept: Column) -> None:
        self._kept = kept
        for counts, ms in zip(self.by_source, kept.by_source, strict=True):
            counts.ms, counts.view = ms, ms.data
        self.ms, self.view = kept.ms, kept.ms.data

    def __call__(self, x: F64) -> StepResult:
        """Sums at counts ``x`` (N,), non-negative integers as float64."""
        counts = x.astype(np.int64)
        if len(counts) == 1 and counts[0] < len(self._filled) and self._filled[counts[0]]:
            return self._kept.take(counts)
        if counts.max(initial=0) >= LIMIT:
            asked, back = np.unique(counts, return_inverse=True)
            n = np.searchsorted(asked, LIMIT)
            self._fill(asked[:n])
            parts = zip(self._kept, self.evaluate(asked[n:]), strict=True)
            return Column(*(np.concatenate([kept[..., asked[:n]], far], axis=-1) for kept, far in parts)).take(back)
        self._fill(counts)
        return self._kept.take(counts)

    @property
    def nbytes(self) -> int:
        return int(self._filled.nbytes) + sum(array.nbytes for array in self._kept)

    def _fill(self, counts: np.ndarray) -> None:
        with self._lock:
            self._grow(int(counts.max(initial=0)) + 1)
            missing = np.unique(counts[~self._filled[counts]])
            if not len(missing):
                return
            blocks = np.unique(missing // BLOCK)
            if len(blocks) <= BLOCKS_AT_ONCE:
                missing = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
                missing = missing[~self._filled[missing]]
            found = self.evaluate(missing)
            self.sources |= set(np.flatnonzero(found.by_source.any(axis=1)).tolist())
            self.is_plain = self.is_plain and not found.tier.any() and not found.energy.any()
            for kept, new in reversed(list(zip(self._kept, found, strict=True))):  # who sees a sum sees its sources
                kept[..., missing] = new
            self._filled[missing] = True

    def _grow(self, size: int) -> None:
        size = -(-size // BLOCK) * BLOCK
        old = len(self._filled)
        if size <= old:
            return
        size = min(max(size, 2 * old), LIMIT)
        larger, filled = _empty(size + 1), np.zeros(size, np.bool_)
        for new, kept in zip(larger, self._kept, strict=True):
            new[..., :old] = kept[..., :old]
        filled[:old] = self._filled
        self._keep(larger)
        self._filled = filled


def _empty(n: int) -> Column:
    return Column(np.full(n, np.nan), np.zeros((len(Source), n)), np.zeros(n, np.uint8), np.zeros(n))
