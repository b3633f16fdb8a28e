"""Passes of an engine that was measured as a whole (spec/04 sections 10.3 and 11.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perfcast_engine.answer import F64, Answer, Mask, gather, total
from perfcast_engine.interp.grid import Ints
from perfcast_engine.ops.fpm_table import FpmForward
from perfcast_engine.tables.database import Database


@dataclass(frozen=True)
class WholePass:
    """One engine's measured prefill and decode passes. Everything takes arrays (N,) and answers ms (N,)."""

    prefill: FpmForward
    decode: FpmForward
    db: Database

    def totals(self, requests: F64, tokens: F64, kv: F64, decodes: F64, decode_kv: F64) -> Answer:
        """A pass with ``requests`` prefills of ``tokens`` new tokens over ``kv`` cached ones, and ``decodes`` decodes
        over ``decode_kv``; all are totals of the pass."""
        prefills = tokens > 0
        return total(
            (
                _part(prefills, lambda at: self.prefill.at_totals(self.db, requests[at], tokens[at], kv[at])),
                _part(decodes > 0, lambda at: self._decode(decodes[at], decode_kv[at], prefills[at])),
            ),
            len(requests),
        )

    def _decode(self, requests: F64, kv: F64, beside_prefill: Mask) -> Answer:
        """Decodes; beside a prefill only what they cost beyond an empty pass, at least 0."""
        answer = self.decode.at_totals(self.db, requests, np.zeros(len(kv)), kv)
        beside = _part(beside_prefill, lambda at: self.decode.baseline(self.db, requests[at]))
        return (answer + beside.scaled(-1.0)).clamped()


def _part(where: Mask, price: Callable[[Ints], Answer]) -> Answer:
    """What ``price`` answers for the points in ``where``; 0 for the others."""
    if not where.any():
        return Answer.zero(len(where))
    return gather([(where, price(np.flatnonzero(where))), (~where, Answer.zero(int((~where).sum())))])
