"""Passes of an engine that was measured as a whole (spec/04 sections 10.3 and 11.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perfcast_engine.answer import F64, Answer, Mask, Source, gather, total
from perfcast_engine.errors import InvalidField
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

    def mixed(self, ctx_tokens: F64, gen_requests: F64, isl: F64, osl: F64, prefix: F64) -> Answer:
        """An iteration that prefills ``ctx_tokens`` tokens of prompts and decodes ``gen_requests``: whole prompts at
        their totals, the chunks of a longer prompt on average. The prefill pass carries the decoded tokens."""
        if not (prefix < isl).all():
            raise InvalidField("prefix", "must be smaller than isl")
        kv = gen_requests * (isl + np.floor(osl / 2) + 1)
        prefills, whole = ctx_tokens > 0, ctx_tokens >= isl - prefix

        def prompts(at: Ints) -> Answer:
            count = np.ceil(ctx_tokens[at] / (isl - prefix)[at])
            return self.prefill.at_totals(self.db, count, ctx_tokens[at] + gen_requests[at], count * prefix[at])

        def chunks(at: Ints) -> Answer:
            return self._chunks(ctx_tokens[at], gen_requests[at], (isl - prefix)[at], prefix[at])

        return total(
            (
                _part(prefills & whole, prompts),
                _part(prefills & ~whole, chunks),
                _part(gen_requests > 0, lambda at: self._decode(gen_requests[at], kv[at], prefills[at])),
            ),
            len(ctx_tokens),
        )

    def _chunks(self, size: F64, decodes: F64, new: F64, prefix: F64) -> Answer:
        """The mean pass of a prompt of ``new`` tokens that is prefilled ``size`` tokens at a time."""
        count = np.ceil(new / size).astype(np.int64)
        point = np.repeat(np.arange(len(size)), count)
        done = (np.arange(len(point)) - np.repeat(np.cumsum(count) - count, count)) * size[point]
        tokens = np.minimum(size[point], new[point] - done) + decodes[point]
        each = self.prefill.at_totals(self.db, np.ones(len(point)), tokens, prefix[point] + done)
        ms = np.bincount(point, each.ms, minlength=len(size)) / count
        return Answer.of(ms, Source.SILICON, miss=each.first_error())

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
