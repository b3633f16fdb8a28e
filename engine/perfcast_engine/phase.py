"""One operator list of an engine, priced as passes: the token-only part by table, attention apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from perfcast_engine.answer import F64, Answer, Miss, Points, attempt, moved
from perfcast_engine.errors import EngineError
from perfcast_engine.ops.base import Op, Reads, Role
from perfcast_engine.origin import Summed
from perfcast_engine.step_result import StepResult, combined
from perfcast_engine.tables.database import Database
from perfcast_engine.token_table import CountTable, TokenTable


@dataclass(frozen=True)
class Phase:
    """One operator list, sorted by what its operators read so that the token-only part is one table look-up.

    ``logits_apart``: the logits operator has a token count of its own (prefill). ``split_by_role``: attention is what
    plays Role.ATTENTION (the reference); otherwise it is every operator that reads the sequence. ``table`` keeps the
    token-only part; ``evaluate`` prices an operator that is not in it.
    """

    ops: tuple[Op, ...]
    db: Database
    logits_apart: bool
    split_by_role: bool
    table: Callable[[Sequence[Op], Database], CountTable] = TokenTable
    evaluate: Callable[[Op, Database, Points], Answer] = Op.evaluate

    def _is_attention(self, op: Op) -> bool:
        return op.role is Role.ATTENTION if self.split_by_role else op.reads is Reads.SEQUENCE

    def _is_logits(self, op: Op) -> bool:
        return self.logits_apart and op.role is Role.LOGITS

    @cached_property
    def attention(self) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if self._is_attention(op))

    @cached_property
    def others(self) -> tuple[Op, ...]:
        """What reads the sequence and is not attention."""
        rest = (op for op in self.ops if op.reads is Reads.SEQUENCE and not self._is_logits(op))
        return tuple(op for op in rest if not self._is_attention(op))

    @cached_property
    def tokens(self) -> CountTable:
        ops = (op for op in self.ops if op.reads is Reads.TOKENS and not self._is_attention(op))
        return self.table([op for op in ops if not self._is_logits(op)], self.db)

    @cached_property
    def logits(self) -> CountTable:
        return self.table([op for op in self.ops if self._is_logits(op)], self.db)

    @cached_property
    def requests(self) -> CountTable:
        """What depends on the request count alone, over that count."""
        ops = [op for op in self.ops if op.reads is Reads.BATCH and not self._is_attention(op)]
        return self.table(ops, self.db)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables filled so far."""
        return self.tokens.nbytes + self.logits.nbytes + self.requests.nbytes

    def price_shared(self, at: Points, logits_x: F64, operators: bool) -> StepResult:
        """Everything but attention."""
        if operators:
            return self._listed([op for op in self.ops if not self._is_attention(op)], at, logits_x)
        result = _looked_up(self.tokens, at.x)
        if self.logits.ops:
            result += _looked_up(self.logits, logits_x)
        if self.requests.ops:
            result += _looked_up(self.requests, at.batch)
        return result + self._summed(self.others, at) if self.others else result

    def price_attention(self, at: Points, operators: bool) -> StepResult:
        return self._listed(self.attention, at, at.x) if operators else self._summed(self.attention, at)

    def price(self, at: Points, logits_x: F64, operators: bool) -> StepResult:
        if operators:
            return self._listed(self.ops, at, logits_x)
        return self.price_shared(at, logits_x, False) + self.price_attention(at, False)

    def shared(self, batch: Any, s: Any, prefix: Any, x: Any, rows: Any) -> StepResult:
        """``price_shared`` at counts, as the surface of a phase takes them; so is the next."""
        at = Points.of(batch, s, prefix, x)
        return self.price_shared(at, np.broadcast_to(rows, len(at)).astype(np.float64), False)

    def attended(self, batch: Any, s: Any, prefix: Any, x: Any) -> StepResult:
        return self.price_attention(Points.of(batch, s, prefix, x), False)

    def _listed(self, ops: Iterable[Op], at: Points, logits_x: F64) -> StepResult:
        parts = ((op, at.with_(x=logits_x) if self._is_logits(op) else at) for op in ops)
        return combined([(op.name, self._evaluate(op, where)) for op, where in parts], len(at), listed=True)

    def _summed(self, ops: Sequence[Op], at: Points) -> StepResult:
        return combined([(op.name, self._evaluate(op, at)) for op in ops], len(at), listed=False)

    def _evaluate(self, op: Op, at: Points) -> Answer:
        """An operator's answer; an error that it raises is a miss of every point."""
        return attempt(lambda at: self.evaluate(op, self.db, at), at)


PhaseMaker = Callable[[tuple[Op, ...], Database, bool, bool], Phase]


def _looked_up(table: CountTable, x: F64) -> StepResult:
    try:
        column = table(x)
    except EngineError as error:
        n, misses = len(x), [(np.ones(len(x), np.bool_), error.bare())]
        return StepResult(np.full(n, np.nan), Summed((), n), np.zeros(n, np.uint8), np.zeros(n), misses)
    column.misses.extend(_missed(table, x, column.ms))
    return column


def _missed(table: CountTable, x: F64, ms: F64) -> list[Miss]:
    """Why points have no sum, asking the operators about those only, which may be all that one misses."""
    gone = np.flatnonzero(np.isnan(ms))
    if not len(gone):
        return []
    counts, back = np.unique(x[gone], return_inverse=True)
    at = Points.of(counts, 1, 0, counts)
    answers = (attempt(partial(op.evaluate, table.db), at) for op in table.ops)
    misses = (miss for answer in answers for miss in answer.misses)
    return moved([(mask[back], error) for mask, error in misses], gone, len(x))
