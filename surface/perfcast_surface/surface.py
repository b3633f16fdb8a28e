"""The surface of one engine: prefill, decode and mixed steps from arrays alone, with the engine's own digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np

from perfcast_surface.arrays import F64, Mask
from perfcast_surface.mixed import ARRAYS, NUMBERS, StepRules, middle
from perfcast_surface.terms import Term

FEW = 8  # samples of a trajectory that are quicker one by one
BAND = 1 << 13  # points evaluated together, so that what they take stays in the processor's cache
ONE, ZERO = np.ones(1), np.zeros(1)
DEFAULT_STRIDE = 32


class Domain(NamedTuple):
    """The largest counts that the tables and measurements behind a surface reach, each by itself."""

    pass_tokens: int
    prefill_batch: int
    prompt_tokens: int
    decode_batch: int
    kv_tokens: int


@dataclass(frozen=True, eq=False)
class PhaseSurface:
    """One operator list. tokens, logits, requests: ms at 0, 1, 2 ... tokens of the pass, rows of the vocabulary
    projection, requests; empty where nothing depends on it. attention: terms that mixed steps price apart."""

    tokens: F64
    logits: F64
    requests: F64
    attention: tuple[Term, ...]
    others: tuple[Term, ...]

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.attention + self.others

    @property
    def reach(self) -> tuple[int, int]:
        """The largest batch and the longest sequence of the measurements behind all terms."""
        batch = min((term.reach[0] for term in self.terms), default=inf)
        tokens = min((term.reach[1] for term in self.terms), default=inf)
        counts = (len(table) - 1 for table in (self.logits, self.requests) if len(table))
        return int(min(batch, *counts, len(self.tokens) - 1)), int(min(tokens, 2**31 - 1))

    def shared(self, batch: F64, s: F64, prefix: F64, x: F64, rows: F64) -> F64:
        """Everything but attention; NaN outside."""
        ms = _look_up(self.tokens, x)
        for table, counts in ((self.logits, rows), (self.requests, batch)):
            if len(table):
                ms = ms + _look_up(table, counts)
        return _summed(self.others, ms, batch, s, prefix)

    def whole(self, batch: F64, s: F64, prefix: F64, x: F64, rows: F64) -> F64:
        """A pass; NaN outside."""
        return _summed(self.attention, self.shared(batch, s, prefix, x, rows), batch, s, prefix)

    def shared_one(self, batch: int, s: int, prefix: int, x: int, rows: int) -> float:
        ms = 0.0
        for table, count in ((self.tokens, x), (self.logits, rows), (self.requests, batch)):
            if len(table):
                ms += table.item(count) if 0 <= count < len(table) else nan
        for term in self.others:
            ms += term.one(batch, s, prefix)
        return ms

    def attention_one(self, batch: int, s: int, prefix: int) -> float:
        ms = 0.0
        for term in self.attention:
            ms += term.one(batch, s, prefix)
        return ms


def _look_up(table: F64, counts: F64) -> F64:
    if not len(table):
        return np.zeros(len(counts))
    index = counts.astype(np.int64)
    known = (index >= 0) & (index < len(table))
    if known.all():
        return table.take(index)
    return np.where(known, table.take(np.where(known, index, 0)), np.nan)


def _summed(terms: tuple[Term, ...], ms: F64, batch: F64, s: F64, prefix: F64) -> F64:
    for term in terms:
        ms = ms + term.at(batch, s, prefix)
    return ms


@dataclass(frozen=True, eq=False)
class StepSurface:
    """Steps of one engine. Arguments are ints, or arrays (N,) of whole numbers broadcast against each other; answers
    are ms, a float or (N,). NaN where the surface does not reach."""

    context: PhaseSurface
    generation: PhaseSurface
    rules: StepRules

    @property
    def domain(self) -> Domain:
        rows = self.rules.nextn + 1
        (prefills, prompt), (decodes, kv) = self.context.reach, self.generation.reach
        return Domain(len(self.context.tokens) - 1, prefills, prompt, decodes // rows, kv)

    def prefill(self, batch: Any, isl: Any, prefix: Any = 0) -> Any:
        """One pass over ``batch`` prompts of ``isl`` tokens, ``prefix`` of them cached."""
        phase = self.context
        if type(batch) is int and type(isl) is int and type(prefix) is int:
            new = isl - prefix
            if batch < 1 or new < 1 or prefix < 0:
                return nan
            return phase.shared_one(batch, new, prefix, batch * new, batch) + phase.attention_one(batch, new, prefix)
        return _in_bands(self._prefills, batch, isl, prefix)

    def _prefills(self, batch: F64, isl: F64, prefix: F64) -> F64:
        s = isl - prefix
        good = (batch >= 1) & (s >= 1) & (prefix >= 0)
        batch, s = _where(good, batch), _where(good, s)
        return _only(good, self.context.whole(batch, s, prefix, batch * s, batch))

    def decode_step(self, gen_requests: Any, isl: Any, osl: Any) -> Any:
        """One decode iteration of ``gen_requests`` requests in the middle of their generation."""
        phase, rows = self.generation, self.rules.nextn + 1
        if type(gen_requests) is int and type(isl) is int and type(osl) is int:
            if gen_requests < 1 or isl < 1 or osl < 1:
                return nan
            tokens, length = gen_requests * rows, middle(isl, osl, NUMBERS)
            return phase.shared_one(tokens, length, 0, tokens, tokens) + phase.attention_one(tokens, length, 0)
        return _in_bands(self._decode_steps, gen_requests, isl, osl)

    def _decode_steps(self, requests: F64, isl: F64, osl: F64) -> F64:
        good = (requests >= 1) & (isl >= 1) & (osl >= 1)
        tokens, length = _where(good, requests) * (self.rules.nextn + 1), middle(isl, osl, ARRAYS)
        return _only(good, self.generation.whole(tokens, length, ZERO, tokens, tokens))

    def decode(self, batch: Any, isl: Any, osl: Any, beam: Any = 1, stride: int = DEFAULT_STRIDE) -> Any:
        """The whole generation of ``batch`` requests: every ``stride``-th of the osl - 1 iterations, held over its
        stride; the sum over all iterations."""
        stride = max(int(stride), 1)
        if type(batch) is int and type(isl) is int and type(osl) is int and type(beam) is int:
            if min(batch, isl, osl, beam) < 1:
                return nan
            if osl - 1 <= FEW * stride:
                return self._decode_one(batch, isl, osl, beam, stride)
            return self.decode(np.array([batch]), isl, osl, beam, stride).item()
        return _in_bands(lambda *columns: self._decodes(stride, *np.broadcast_arrays(*columns)), batch, isl, osl, beam)

    def _decodes(self, stride: int, batch: F64, isl: F64, osl: F64, beam: F64) -> F64:
        good = (batch >= 1) & (isl >= 1) & (osl >= 1) & (beam >= 1)
        batch, osl, beam = _where(good, batch), _where(good, osl), _where(good, beam)
        samples = np.ceil((osl - 1) / stride).astype(np.int64)
        ends, ms = np.cumsum(samples), np.zeros(len(batch))
        total = int(samples.sum())
        for start in range(0, total, BAND):
            index = np.arange(start, min(start + BAND, total))
            point = ends.searchsorted(index, "right")
            offset = (index - (ends - samples)[point]) * float(stride)
            rows = batch[point] * (self.rules.nextn + 1)
            x = rows * beam[point]
            step = self.generation.whole(rows, isl[point] + offset + 1, ZERO, x, x)
            part = np.bincount(point - point[0], step * np.minimum(stride, osl[point] - 1 - offset))
            ms[point[0] : point[0] + len(part)] += part
        return _only(good, ms)

    def _decode_one(self, batch: int, isl: int, osl: int, beam: int, stride: int) -> float:
        tokens, ms = batch * (self.rules.nextn + 1), 0.0
        for offset in range(0, osl - 1, stride):
            step = self.generation.shared_one(tokens, isl + offset + 1, 0, tokens * beam, tokens * beam)
            step += self.generation.attention_one(tokens, isl + offset + 1, 0)
            ms += step * min(stride, osl - 1 - offset)
        return ms

    def mixed(self, ctx_tokens: Any, gen_requests: Any, isl: Any, osl: Any, prefix: Any = 0) -> Any:
        """One iteration that prefills ``ctx_tokens`` prompt tokens beside ``gen_requests`` decoding requests."""
        if (
            type(ctx_tokens) is int
            and type(gen_requests) is int
            and type(isl) is int
            and type(osl) is int
            and type(prefix) is int
        ):
            return self._mixed_one(ctx_tokens, gen_requests, isl, osl, prefix)
        return _in_bands(self._mixes, ctx_tokens, gen_requests, isl, osl, prefix)

    def _mixes(self, tokens: F64, requests: F64, isl: F64, osl: F64, prefix: F64) -> F64:
        good = (tokens >= 0) & (requests >= 0) & (tokens + requests > 0) & (prefix >= 0) & (prefix < isl) & (osl >= 0)
        tokens, isl, prefix = _where(good, tokens), _where(good, isl), _where(good, prefix, 0.0)
        plan = self.rules.mixed(tokens, requests, isl, osl, prefix, ARRAYS)
        flat = _where(good, plan.flat)
        ms = self.context.shared(ONE, flat, plan.cached, flat, np.atleast_1d(plan.logits_rows))
        for prompts, weight in plan.prompts:
            ms = ms + _weighed(self.context.attention, weight, prompts, isl - prefix, prefix)
        decoding = (requests > 0).astype(np.float64)
        return _only(good, ms + _weighed(self.generation.attention, decoding, plan.decodes, plan.length, ZERO))

    def _mixed_one(self, tokens: int, requests: int, isl: int, osl: int, prefix: int) -> float:
        if tokens < 0 or requests < 0 or tokens + requests < 1 or osl < 0 or not 0 <= prefix < isl:
            return nan
        plan = self.rules.mixed(tokens, requests, isl, osl, prefix, NUMBERS)
        ms = self.context.shared_one(1, plan.flat, plan.cached, plan.flat, plan.logits_rows)
        for prompts, weight in plan.prompts:
            if weight:
                ms += self.context.attention_one(prompts, isl - prefix, prefix) * weight
        return ms + self.generation.attention_one(plan.decodes, plan.length, 0) if requests else ms


def _in_bands(evaluate: Callable[..., F64], *values: Any) -> F64:
    """``evaluate`` of columns, BAND points at a time; a single value that holds for all points stays one (1,)."""
    columns = [np.atleast_1d(np.asarray(value)) for value in values]
    (n,) = np.broadcast_shapes(*(column.shape for column in columns))
    ms = np.empty(n)
    for start in range(0, n, BAND):
        band = slice(start, start + BAND)
        parts = (column if len(column) == 1 else column[band] for column in columns)
        ms[band] = evaluate(*(part.astype(np.float64) for part in parts))
    return ms


def _weighed(terms: tuple[Term, ...], weight: F64, batch: F64, s: F64, prefix: F64) -> F64:
    """The sum of ``terms`` times ``weight`` (N,), evaluated where that is not 0 only."""
    live = weight != 0
    if live.all():
        return _summed(terms, ZERO, batch, s, prefix) * weight
    which = np.flatnonzero(live)
    out = np.zeros(len(weight))
    batch, s, prefix = (c if len(c) == 1 else c.take(which) for c in (batch, s, prefix))
    out[which] = _summed(terms, ZERO, batch, s, prefix) * weight.take(which)
    return out


def _where(good: Mask, values: F64, otherwise: float = 1.0) -> F64:
    return values if good.all() else np.where(good, values, otherwise)


def _only(good: Mask, ms: F64) -> F64:
    return ms if good.all() else np.where(good, ms, np.nan)
