"""Passes as telemetry counts them: what the ranks of an engine have scheduled (spec/04 11.4, spec/06 1.8)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from perfcast_engine.answer import F64, Mask
from perfcast_engine.errors import EngineError
from perfcast_engine.step import StepModel

ONE, ZERO = np.ones(1, np.int64), np.zeros(1, np.int64)


class Priced(NamedTuple):
    """Times of N passes or iterations. ms: (N,), NaN where the model knows too little or data miss; errors: those, by
    index."""

    ms: F64
    errors: dict[int, EngineError]

    def raise_first(self) -> F64:
        if self.errors:
            raise self.errors[min(self.errors)]
        return self.ms


@dataclass(frozen=True, slots=True)
class RankWork:
    """What N attention-DP ranks have scheduled in one pass each: whole numbers, columns (N,) of one type."""

    prefill_requests: Any
    prefill_tokens: Any  # computed in this pass
    prefill_kv_tokens: Any  # in the cache already: prefix hits and earlier chunks
    decode_requests: Any
    decode_kv_tokens: Any  # logical length, summed over the decodes

    def __len__(self) -> int:
        return len(self.prefill_tokens)

    def astype(self, kind: type) -> RankWork:
        return RankWork(*(getattr(self, name).astype(kind) for name in self.__slots__))

    def take(self, which: Mask) -> RankWork:
        return self if which.all() else RankWork(*(getattr(self, name)[which] for name in self.__slots__))


def observed(steps: StepModel, work: RankWork) -> Priced:
    """The pass of each rank. Idle ones take 0 ms. No factor of nextn: the counts are of packed tokens."""
    work, errors = work.astype(np.int64), dict[int, EngineError]()
    ms = np.where((work.prefill_tokens > 0) | (work.decode_requests + work.decode_kv_tokens > 0), np.nan, 0.0)
    far, one_row = steps.far, steps.rules.one_logits_row
    long = (work.prefill_tokens >= work.prefill_requests) & (work.decode_kv_tokens >= work.decode_requests)
    for mine, known in _passes(far.context, far.generation, work, long, one_row):
        ms[mine] = known
    rest = np.isnan(ms)
    if rest.any():
        for mine, result in _passes(steps.context_phase, steps.generation_phase, work, rest, one_row):
            ms[mine] = result.ms
            errors |= {int(np.flatnonzero(mine)[index]): error for index, error in result.errors().items()}
    return Priced(ms, errors)


def _passes(context: Any, generation: Any, work: RankWork, which: Mask, one_row: bool) -> Iterator[tuple[Mask, Any]]:
    """The passes of ``which`` ranks by what they run: which ones, and the sum of what is answered by phases or by the
    surfaces of phases."""
    prefills, decodes = work.prefill_tokens > 0, work.decode_requests + work.decode_kv_tokens > 0
    for mine, price in ((prefills & ~decodes, _prefill), (decodes & ~prefills, _decode), (prefills & decodes, _mixed)):
        mine &= which
        if mine.any():
            yield mine, price(context, generation, work.take(mine), one_row)


def _prefill(context: Any, _: Any, work: RankWork, __: bool) -> Any:
    prompts = np.maximum(work.prefill_requests, 1)
    fresh = work.prefill_tokens // prompts
    each = prompts, fresh, work.prefill_kv_tokens // prompts, prompts * fresh
    return context.shared(*each, prompts) + context.attended(*each)


def _decode(_: Any, generation: Any, work: RankWork, __: bool) -> Any:
    decodes = np.maximum(work.decode_requests, 1)
    each = decodes, work.decode_kv_tokens // decodes, ZERO, decodes
    return generation.shared(*each, decodes) + generation.attended(*each)


def _mixed(context: Any, generation: Any, work: RankWork, one_row: bool) -> Any:
    prompts, decodes = np.maximum(work.prefill_requests, 1), np.maximum(work.decode_requests, 1)
    tokens, cached = work.prefill_tokens, work.prefill_kv_tokens
    flat, fresh = tokens + work.decode_requests, np.maximum(tokens // prompts, 1)
    shared = context.shared(ONE, flat, cached, flat, np.ones_like(flat) if one_row else prompts + decodes)
    prefill = context.attended(-(-tokens // fresh), fresh, cached // prompts, tokens)
    length = np.maximum(work.decode_kv_tokens // decodes, 1)
    return shared + prefill + generation.attended(decodes, length, ZERO, decodes)
