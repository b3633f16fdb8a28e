"""The surface of one engine: prefill, decode and mixed steps from arrays alone, with the engine's own digits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, partial
from itertools import chain
from math import floor, inf, nan
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from perfcast_surface.arrays import F64, Ints, Mask
from perfcast_surface.bands import BAND, before_each, in_bands
from perfcast_surface.lines import Read
from perfcast_surface.mixed import ONE, StepRules, middle
from perfcast_surface.terms import Causal, One, Summand, Term

FEW = 8  # samples of a trajectory that are quicker one by one
ZERO = np.zeros(1, np.int64)
DEFAULT_STRIDE = 32
LONGEST = 2**31 - 1


class Domain(NamedTuple):
    """The largest counts that the tables and measurements behind a surface reach, each by itself."""

    pass_tokens: int
    prefill_batch: int
    prompt_tokens: int
    decode_batch: int
    kv_tokens: int


class Table(Protocol):
    """ms at 0, 1, 2 ... of what is counted, NaN where it is not known, and a NaN at the end that stands for all counts
    beyond. ``view``: the same, for single counts."""

    @property
    def ms(self) -> F64: ...
    @property
    def view(self) -> memoryview: ...


class Counts:
    """A table that stays as it is."""

    def __init__(self, ms: F64) -> None:
        self.ms, self.view = ms, ms.data

    @classmethod
    def of(cls, known: F64) -> Counts:
        return cls(np.append(known, nan))


@dataclass(frozen=True, eq=False)
class PhaseSurface:
    """One operator list. tokens, logits, requests: tables over tokens of the pass, rows of the vocabulary projection,
    requests; None where nothing depends on them. attention: terms that mixed steps price apart."""

    tokens: Table | None
    logits: Table | None
    requests: Table | None
    attention: tuple[Summand, ...]
    others: tuple[Summand, ...]

    @property
    def terms(self) -> tuple[Term, ...]:
        """All summands of a surface that can leave its process."""
        return cast("tuple[Term, ...]", self.attention + self.others)

    @property
    def reach(self) -> tuple[int, int]:
        """The largest batch and the longest sequence of the measurements behind all terms."""
        batch = min((term.reach[0] for term in self.terms), default=inf)
        tokens = min((term.reach[1] for term in self.terms), default=inf)
        counts = (len(table.ms) - 2 for table in (self.tokens, self.logits, self.requests) if table is not None)
        return int(min(batch, *counts, LONGEST)), int(min(tokens, LONGEST))

    def shared(self, batch: Ints, s: Ints, prefix: Ints, x: Ints, rows: Ints) -> F64:
        """Everything but attention; NaN outside. Points are broadcast against each other."""
        counted = ((self.tokens, x), (self.logits, rows), (self.requests, batch))
        sums = (table.ms.take(counts, mode="clip") for table, counts in counted if table is not None)
        return _sum(chain(sums, (term.at(batch, s, prefix) for term in self.others)))

    def whole(self, batch: Ints, s: Ints, prefix: Ints, x: Ints, rows: Ints) -> F64:
        """A pass; NaN outside."""
        return _weighed(self.attention, self.shared(batch, s, prefix, x, rows), None, batch, s, prefix)

    def attended(self, batch: Ints, s: Ints, prefix: Ints, x: Ints) -> F64:
        """Attention, which tokens of the pass make no difference to here; NaN outside."""
        return _sum(term.at(batch, s, prefix) for term in self.attention)

    @cached_property
    def attention_one(self) -> One:
        return sum_of_one([term.one for term in self.attention])

    @cached_property
    def rest_one(self) -> One | None:
        """All else that depends on requests, None where nothing does. Raises IndexError beyond its table."""
        each, requests = [term.one for term in self.others], self.requests
        if requests is not None:
            each.append(lambda batch, s, prefix: requests.view[batch])
        return sum_of_one(each) if each else None

    @cached_property
    def whole_one(self) -> Callable[[int, int, int, int, int], float]:
        tokens, logits, rest, attention = self.tokens, self.logits, self.rest_one, self.attention_one

        def one(batch: int, s: int, prefix: int, x: int, rows: int) -> float:
            try:
                ms: float = 0.0 if tokens is None else tokens.view[x]
                if logits is not None:
                    ms += logits.view[rows]
                if rest is not None:
                    ms += rest(batch, s, prefix)
            except IndexError:
                return nan
            return ms + attention(batch, s, prefix)

        return one


def sum_of_one(each: Sequence[One]) -> One:
    if len(each) == 1:
        return each[0]

    def one(batch: int, s: int, prefix: int) -> float:
        ms = 0.0
        for summand in each:
            ms += summand(batch, s, prefix)
        return ms

    return one


def _unknown(*_: int) -> float:
    return nan


def _sum(parts: Iterable[F64]) -> F64:
    ms: F64 | None = None
    for part in parts:
        if ms is None or len(ms) == 1:
            ms = part if ms is None else ms + part
        else:
            ms += part  # over the first, so that all stay in the processor's cache
    return np.zeros(1) if ms is None else ms


def _weighed(terms: tuple[Summand, ...], ms: F64, weight: F64 | None, batch: Ints, s: Ints, prefix: Ints) -> F64:
    """``ms`` plus the sum of ``terms``, times ``weight`` if there is one, where there is any ``batch``."""
    if not terms:
        return ms
    if _least(batch) > 0:
        found = _where_known(terms, batch, s, prefix)
        return _sum((ms, found if weight is None else found * weight))
    live = np.flatnonzero(batch != 0)
    if not len(live):
        return ms
    found = np.zeros(len(batch))
    some: Any = (c if c is None or len(c) == 1 else c.take(live) for c in (weight, batch, s, prefix))
    found[live] = _weighed(terms, np.zeros(1), *some)
    return ms + found


def _where_known(terms: tuple[Summand, ...], batch: Ints, s: Ints, prefix: Ints) -> F64:
    """The sum of ``terms``, of which the others are only asked where the first knows few points."""
    ms = terms[0].at(batch, s, prefix)
    if len(terms) == 1 or 2 * np.count_nonzero(ms == ms) > len(ms):
        return _sum(chain((ms,), (term.at(batch, s, prefix) for term in terms[1:])))
    known = np.flatnonzero(ms == ms)
    some = [c if len(c) == 1 else c.take(known) for c in (batch, s, prefix)]
    ms[known] = _sum((ms[known], *(term.at(*some) for term in terms[1:])))
    return ms


@dataclass(frozen=True, eq=False)
class StepSurface:
    """Steps of one engine. Arguments are ints, or arrays (N,) of whole numbers broadcast against each other; answers
    are ms, a float or (N,). NaN where the surface does not reach. What ends in ``_one`` takes ints and what ends in
    ``_many`` takes int64 arrays, (N,) or (1,)."""

    context: PhaseSurface
    generation: PhaseSurface
    rules: StepRules

    @property
    def domain(self) -> Domain:
        rows = self.rules.nextn + 1
        (prefills, prompt), (decodes, kv) = self.context.reach, self.generation.reach
        tokens = self.context.tokens
        return Domain(LONGEST if tokens is None else len(tokens.ms) - 2, prefills, prompt, decodes // rows, kv)

    def prefill(self, batch: Any, isl: Any, prefix: Any = 0) -> Any:
        """One pass over ``batch`` prompts of ``isl`` tokens, ``prefix`` of them cached."""
        if type(batch) is type(isl) is type(prefix) is int:
            return self.prefill_one(batch, isl, prefix)
        return in_bands(self.prefill_many, batch, isl, prefix)

    @cached_property
    def prefill_one(self) -> Read:
        return self.prefill_or(_unknown)

    def prefill_or(self, other: Read) -> Read:
        """``prefill`` of numbers; ``other`` of the same ones where that is NaN. So are the next two."""
        whole = self.context.whole_one

        def ms(batch: int, isl: int, prefix: int = 0) -> float:
            s, found = isl - prefix, nan
            if batch > 0 and s > 0 and prefix >= 0:
                found = whole(batch, s, prefix, batch * s, batch)
            return found if found == found else other(batch, isl, prefix)

        return ms

    def prefill_many(self, batch: Ints, isl: Ints, prefix: Ints) -> F64:
        s = isl - prefix if prefix.any() else isl
        if _least(s) < 1 or _least(batch) < 1 or _least(prefix) < 0:
            return _where((batch >= 1) & (s >= 1) & (prefix >= 0), self.prefill_many, batch, isl, prefix)
        return self.context.whole(batch, s, prefix, batch * s, batch)

    def decode_step(self, gen_requests: Any, isl: Any, osl: Any) -> Any:
        """One decode iteration of ``gen_requests`` requests in the middle of their generation."""
        if type(gen_requests) is type(isl) is type(osl) is int:
            return self.decode_step_one(gen_requests, isl, osl)
        return in_bands(self.decode_step_many, gen_requests, isl, osl)

    @cached_property
    def decode_step_one(self) -> Read:
        return self.decode_step_or(_unknown)

    def decode_step_or(self, other: Read) -> Read:
        whole, rows = self.generation.whole_one, self.rules.nextn + 1

        def ms(gen_requests: int, isl: int, osl: int) -> float:
            found = nan
            if gen_requests > 0 and isl > 0 and osl > 0:
                tokens, length = gen_requests * rows, isl + (osl >> 1) + 1
                found = whole(tokens, length, 0, tokens, tokens)
            return found if found == found else other(gen_requests, isl, osl)

        return ms

    def decode_step_many(self, gen_requests: Ints, isl: Ints, osl: Ints) -> F64:
        if min(_least(gen_requests), _least(isl), _least(osl)) < 1:
            good = (gen_requests >= 1) & (isl >= 1) & (osl >= 1)
            return _where(good, self.decode_step_many, gen_requests, isl, osl)
        tokens = gen_requests * (self.rules.nextn + 1)
        return self.generation.whole(tokens, middle(isl, osl), ZERO, tokens, tokens)

    def decode(self, batch: Any, isl: Any, osl: Any, beam: Any = 1, stride: int = DEFAULT_STRIDE) -> Any:
        """The whole generation of ``batch`` requests: every ``stride``-th of the osl - 1 iterations, held over its
        stride; the sum over all iterations."""
        stride = max(int(stride), 1)
        if type(batch) is type(isl) is type(osl) is type(beam) is int:
            if min(batch, isl, osl, beam) < 1:
                return nan
            if osl - 1 <= FEW * stride:
                return self._decode_one(batch, isl, osl, beam, stride)
            return self.decode(np.array([batch]), isl, osl, beam, stride).item()
        return in_bands(partial(self.decode_many, stride=stride), batch, isl, osl, beam)

    def _decode_one(self, batch: int, isl: int, osl: int, beam: int, stride: int) -> float:
        tokens, ms = batch * (self.rules.nextn + 1), 0.0
        for offset in range(0, osl - 1, stride):
            step = self.generation.whole_one(tokens, isl + offset + 1, 0, tokens * beam, tokens * beam)
            ms += step * min(stride, osl - 1 - offset)
        return ms

    def decode_many(self, batch: Ints, isl: Ints, osl: Ints, beam: Ints, *, stride: int) -> F64:
        batch, isl, osl, beam = np.broadcast_arrays(batch, isl, osl, beam)
        good = (batch >= 1) & (isl >= 1) & (osl >= 1) & (beam >= 1)
        if not good.all():
            return _where(good, partial(self.decode_many, stride=stride), batch, isl, osl, beam)
        samples = (osl + (stride - 2)) // stride  # of osl - 1 steps
        ends, ms = np.cumsum(samples), np.zeros(len(batch))
        total = int(samples.sum())
        for start in range(0, total, BAND):
            before_each.get()()
            index = np.arange(start, min(start + BAND, total))
            point = ends.searchsorted(index, "right")
            offset = (index - (ends - samples)[point]) * stride
            rows = batch[point] * (self.rules.nextn + 1)
            x = rows * beam[point]
            step = self.generation.whole(rows, isl[point] + offset + 1, ZERO, x, x)
            part = np.bincount(point - point[0], step * np.minimum(stride, osl[point] - 1 - offset))
            ms[point[0] : point[0] + len(part)] += part
        return ms

    def mixed(self, ctx_tokens: Any, gen_requests: Any, isl: Any, osl: Any, prefix: Any = 0) -> Any:
        """One iteration that prefills ``ctx_tokens`` prompt tokens beside ``gen_requests`` decoding requests."""
        if type(ctx_tokens) is type(gen_requests) is type(isl) is type(osl) is type(prefix) is int:
            return self.mixed_one(ctx_tokens, gen_requests, isl, osl, prefix)
        return in_bands(self.mixed_many, ctx_tokens, gen_requests, isl, osl, prefix)

    @cached_property
    def mixed_one(self) -> Read:
        return self.mixed_or(_unknown)

    def mixed_or(self, other: Read) -> Read:
        """What ``StepRules.plan`` has for arrays, for numbers."""
        tokens, logits, rest = self.context.tokens, self.context.logits, self.context.rest_one
        context, generation = self.context.attention_one, self.generation.attention_one
        nextn, one_row, per_prompt, whole = astuple(self.rules)

        def ms(ctx_tokens: int, gen_requests: int, isl: int, osl: int, prefix: int = 0) -> float:
            if osl < 1 or ctx_tokens < 0 or gen_requests < 0 or prefix < 0 or prefix >= isl:
                return other(ctx_tokens, gen_requests, isl, osl, prefix)
            decodes = gen_requests * (nextn + 1) if nextn else gen_requests
            lower, flat = ctx_tokens // isl, ctx_tokens + decodes
            weight = ctx_tokens / isl - lower
            upper = lower + 1 if weight else lower
            fresh, cached = isl, 0
            if prefix:
                cached = prefix * lower if per_prompt else floor(prefix * (ctx_tokens / isl))
                flat, fresh = flat - cached, isl - prefix
            if whole:
                lower, weight = 0, 1 / -(-isl // ctx_tokens) if ctx_tokens else 0.0
            try:
                found: float = 0.0 if tokens is None else tokens.view[flat]
                if logits is not None:
                    found += logits.view[1 if one_row else upper + decodes]
                if rest is not None:
                    found += rest(1, flat, cached)
            except IndexError:
                return other(ctx_tokens, gen_requests, isl, osl, prefix)
            if weight:
                found += context(upper, fresh, prefix) * weight
            if lower:
                found += context(lower, fresh, prefix) * (1 - weight)
            if gen_requests:
                found += generation(decodes, isl + (osl >> 1) + 1, 0)
            elif not ctx_tokens:
                found = nan
            return found if found == found else other(ctx_tokens, gen_requests, isl, osl, prefix)

        return ms

    def mixed_many(self, ctx_tokens: Ints, gen_requests: Ints, isl: Ints, osl: Ints, prefix: Ints) -> F64:
        fresh, prefix = (isl - prefix, prefix) if prefix.any() else (isl, ZERO)
        tokens, requests = _least(ctx_tokens), _least(gen_requests)
        busy = tokens + requests > 0 or _least(ctx_tokens + gen_requests) > 0
        if min(tokens, requests, _least(osl) - 1, _least(prefix)) < 0 or _least(fresh) < 1 or not busy:
            good = (ctx_tokens >= 0) & (gen_requests >= 0) & (osl >= 1) & (prefix >= 0) & (fresh > 0)
            good = good & (ctx_tokens + gen_requests > 0)
            return _where(good, self.mixed_many, ctx_tokens, gen_requests, isl, osl, prefix)
        plan = self.rules.plan(ctx_tokens, gen_requests, isl, osl, prefix)
        ms = self.context.shared(ONE, plan.flat, plan.cached, plan.flat, plan.rows)
        terms = self.context.attention
        causal = [term for term in terms if isinstance(term, Causal) and term.rows]
        if plan.share is None and len(causal) == len(terms) and not prefix.any():
            ms = _sum([ms, *(term.short_of(plan.upper, plan.short, fresh) for term in causal)])
            terms = ()
        for prompts, weight in plan.passes if terms else ():
            ms = _weighed(terms, ms, weight, prompts, fresh, prefix)
        return _weighed(self.generation.attention, ms, None, plan.decodes, plan.length, ZERO)


def _least(counts: Ints) -> int:
    return int(counts.min(initial=LONGEST))


def _where(good: Mask, evaluate: Callable[..., F64], *columns: Ints) -> F64:
    """``evaluate`` where the points are ``good``, NaN elsewhere."""
    columns = np.broadcast_arrays(*columns)
    ms = np.full(columns[0].shape, nan)
    if good.any():
        ms[good] = evaluate(*(column[good] for column in columns))
    return ms
