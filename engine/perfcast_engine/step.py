"""Steps of one engine: prefill, decode (one step and whole trajectories), mixed (spec/06 section 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from perfcast_surface.mixed import ARRAYS, NUMBERS, StepRules, middle

from perfcast_engine.answer import F64, Mask, Points
from perfcast_engine.errors import InvalidField
from perfcast_engine.ops.base import Op
from perfcast_engine.phase import Phase
from perfcast_engine.profiles import (
    ATTENTION_BY_ROLE,
    CORRECTED,
    MIXED_LOGITS_ROWS,
    MIXED_PREFIX_PER_PROMPT,
    MIXED_WHOLE_PROMPTS,
    Profile,
)
from perfcast_engine.quick import QuickStep
from perfcast_engine.shared import Shared
from perfcast_engine.step_result import StepResult, blanked, gathered, joined
from perfcast_engine.tables.database import Database

MAX_COUNT = 2**32 - 1
MAX_SAMPLES = 1_000_000  # of all trajectories in one call; bounds memory and time
DEFAULT_STRIDE = 32
BAND = 1 << 14  # points priced together, so that what they take stays in the processor's cache


@dataclass(frozen=True, slots=True)
class RankWork:
    """What N attention-DP ranks have scheduled in one pass each: counts, float64 (N,)."""

    prefill_requests: F64
    prefill_tokens: F64  # computed in this pass
    prefill_kv_tokens: F64  # in the cache already: prefix hits and earlier chunks
    decode_requests: F64
    decode_kv_tokens: F64  # logical length, summed over the decodes

    def __len__(self) -> int:
        return len(self.prefill_tokens)

    def take(self, which: Mask) -> RankWork:
        return RankWork(*(getattr(self, name)[which] for name in self.__slots__))


@dataclass(frozen=True)
class StepModel:
    """The steps of one engine: operator lists of prefill and decode against one database.

    ``nextn``: speculative draft depth; decode steps carry nextn + 1 query tokens per request. ``profile`` says which
    faults of the reference's mixed steps are reproduced. ``shared``: what the engines of one search
    have in common.
    """

    context: tuple[Op, ...]
    generation: tuple[Op, ...]
    db: Database
    nextn: int = 0
    profile: Profile = CORRECTED
    shared: Shared | None = field(default=None, compare=False)

    @cached_property
    def rules(self) -> StepRules:
        return StepRules(
            self.nextn,
            self.profile[MIXED_LOGITS_ROWS],
            self.profile[MIXED_PREFIX_PER_PROMPT],
            self.profile[MIXED_WHOLE_PROMPTS],
        )

    @cached_property
    def context_phase(self) -> Phase:
        return self._phase(self.context, logits_apart=True)

    @cached_property
    def generation_phase(self) -> Phase:
        return self._phase(self.generation, logits_apart=False)

    def _phase(self, ops: tuple[Op, ...], logits_apart: bool) -> Phase:
        split = self.profile[ATTENTION_BY_ROLE]
        if self.shared is None:
            return Phase(ops, self.db, logits_apart, split)
        return self.shared.phase(ops, self.db, logits_apart, split)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables filled so far; they grow as new token counts are asked for."""
        return self.context_phase.nbytes + self.generation_phase.nbytes

    def prefill(
        self, batch: Any, isl: Any, prefix: Any = 0, imbalance: Any = 1.0, *, operators: bool = False
    ) -> StepResult:
        """One pass over ``batch`` prompts of ``isl`` tokens, ``prefix`` of them cached (spec/06 1.2)."""
        batch, isl, prefix = _counts(batch=batch, isl=isl, prefix=prefix)
        _require(prefix < isl, "prefix", "must be smaller than isl")
        at = Points.of(batch, isl - prefix, prefix, None, imbalance)
        price = self.context_phase.price
        return _in_bands(lambda *c: price(Points(*c), c[0], operators), at.columns, operators)

    def quick_prefill(self, batch: int, isl: int, prefix: int = 0) -> QuickStep | None:
        """``prefill`` of one point without arrays; None where the arrays have to be asked."""
        phase, s = self.context_phase.quick, isl - prefix
        if phase is None or batch < 1 or s < 1 or prefix < 0:
            return None
        step = phase.shared(batch, s, prefix, batch * s, batch)
        step.add_terms(phase.attention, batch, s, prefix)
        return step if step.ms == step.ms else None

    def quick_decode(self, gen_requests: int, isl: int, osl: int) -> QuickStep | None:
        """``decode_step`` of one point without arrays; None where the arrays have to be asked."""
        phase, tokens = self.generation_phase.quick, gen_requests * (self.nextn + 1)
        if phase is None or tokens < 1 or isl < 1 or osl < 1:
            return None
        length = middle(isl, osl, NUMBERS)
        step = phase.shared(tokens, length, 0, tokens, tokens)
        step.add_terms(phase.attention, tokens, length, 0)
        return step if step.ms == step.ms else None

    def quick_mixed(self, ctx_tokens: int, gen_requests: int, isl: int, osl: int, prefix: int = 0) -> QuickStep | None:
        """``mixed`` of one point without arrays; None where the arrays have to be asked."""
        context, generation = self.context_phase.quick, self.generation_phase.quick
        if context is None or generation is None or min(ctx_tokens, gen_requests) < 0 or not 0 <= prefix < isl:
            return None
        plan = self.rules.mixed(ctx_tokens, gen_requests, isl, osl, prefix, NUMBERS)
        if plan.flat < 1:
            return None
        step = context.shared(1, plan.flat, plan.cached, plan.flat, plan.logits_rows)
        for prompts, weight in plan.prompts:
            if weight:
                step.add_terms(context.attention, prompts, isl - prefix, prefix, weight)
        if gen_requests:
            step.add_terms(generation.attention, plan.decodes, plan.length, 0)
        return step if step.ms == step.ms else None

    def decode_step(
        self, gen_requests: Any, isl: Any, osl: Any, imbalance: Any = 1.0, *, operators: bool = False
    ) -> StepResult:
        """One decode iteration of ``gen_requests`` requests at the middle of their trajectory (spec/06 1.4)."""
        requests, isl, osl = _counts(gen_requests=gen_requests, isl=isl, osl=osl)
        tokens = np.maximum(requests, 1) * (self.nextn + 1)
        length = middle(np.maximum(isl, 1), np.maximum(osl, 1), ARRAYS)
        at = Points.of(tokens, length, 0, tokens, imbalance)
        price = self.generation_phase.price
        result = _in_bands(lambda *c: price(Points(*c), c[3], operators), at.columns, operators)
        return blanked(result, requests == 0)

    def decode(
        self,
        batch: Any,
        isl: Any,
        osl: Any,
        beam: Any = 1,
        stride: int = DEFAULT_STRIDE,
        imbalance: Any = 1.0,
        *,
        operators: bool = False,
    ) -> StepResult:
        """The whole decode of ``batch`` requests: every ``stride``-th of the osl - 1 steps, held over its stride
        (spec/06 1.3). ms is the sum over the trajectory; divide by osl - 1 for the mean TPOT."""
        batch, isl, osl, beam = _counts(batch=batch, isl=isl, osl=osl, beam=beam)
        imbalance = np.broadcast_to(np.asarray(imbalance, np.float64), batch.shape)
        stride = max(int(stride), 1)
        steps = np.maximum(osl - 1, 0)
        samples = np.ceil(steps / stride).astype(np.int64)
        if samples.sum() > MAX_SAMPLES:
            raise InvalidField("osl", f"needs more than {MAX_SAMPLES} samples; ask fewer points or a larger stride")
        point = np.repeat(np.arange(len(batch)), samples)
        offset = (np.arange(len(point)) - np.repeat(np.cumsum(samples) - samples, samples)) * float(stride)
        held = np.minimum(stride, steps[point] - offset)
        tokens = batch[point] * (self.nextn + 1)
        at = Points.of(tokens, isl[point] + offset + 1, 0, tokens * beam[point], imbalance[point])
        return gathered(self.generation_phase.price(at, at.x, operators).scaled(held), point, len(batch))

    def mixed(
        self,
        ctx_tokens: Any,
        gen_requests: Any,
        isl: Any,
        osl: Any,
        prefix: Any = 0,
        imbalance: Any = 1.0,
        gen_imbalance: Any = 1.0,
        *,
        operators: bool = False,
    ) -> StepResult:
        """One iteration that prefills ``ctx_tokens`` tokens of prompts and decodes ``gen_requests`` (spec/06 1.5)."""
        columns = _counts(ctx_tokens=ctx_tokens, gen_requests=gen_requests, isl=isl, osl=osl, prefix=prefix)
        _check_mixed(*columns)
        uneven = (
            np.broadcast_to(np.asarray(value, np.float64), columns[0].shape) for value in (imbalance, gen_imbalance)
        )

        def price(*columns: F64) -> StepResult:
            shared, context, decode = self.mixed_parts(*columns, operators=operators)
            return shared + context + decode

        return _in_bands(price, [*columns, *uneven], operators)

    def mixed_parts(
        self,
        ctx_tokens: Any,
        gen_requests: Any,
        isl: Any,
        osl: Any,
        prefix: Any = 0,
        imbalance: Any = 1.0,
        gen_imbalance: Any = 1.0,
        *,
        operators: bool = False,
    ) -> tuple[StepResult, StepResult, StepResult]:
        """The three passes of a mixed step: all but attention, context attention, decode attention."""
        tokens, requests, isl, osl, prefix = _counts(
            ctx_tokens=ctx_tokens, gen_requests=gen_requests, isl=isl, osl=osl, prefix=prefix
        )
        _check_mixed(tokens, requests, isl, osl, prefix)
        plan = self.rules.mixed(tokens, requests, isl, osl, prefix, ARRAYS)
        busy = tokens + requests > 0
        one, flat = np.ones_like(tokens), np.where(busy, plan.flat, 1)
        rows = np.broadcast_to(plan.logits_rows, flat.shape)
        shared = self.context_phase.price_shared(Points.of(one, flat, plan.cached, flat, imbalance), rows, operators)
        fresh, cached = np.where(tokens > 0, isl - prefix, 1), np.where(tokens > 0, prefix, 0)
        context = StepResult.zero(len(tokens), operators)
        for prompts, weight in plan.prompts:
            at = Points.of(np.maximum(prompts, 1), fresh, cached, None, imbalance)
            context += _weighed(self.context_phase, at, weight, operators)
        at = Points.of(np.maximum(plan.decodes, 1), plan.length, 0, np.maximum(plan.decodes, 1), gen_imbalance)
        decode = _weighed(self.generation_phase, at, (requests > 0).astype(np.float64), operators)
        return blanked(shared, ~busy), context, decode

    def observed(self, work: RankWork, *, operators: bool = False) -> StepResult:
        """The pass of each rank as telemetry counts it (spec/04 11.4, spec/06 1.8). No factor of nextn: the counts are
        of packed tokens. Idle ranks take 0 ms."""
        prefills, decoding = work.prefill_tokens > 0, work.decode_requests + work.decode_kv_tokens > 0
        result = StepResult.zero(len(work), operators)
        kinds = (
            (prefills & ~decoding, self._observed_prefill),
            (decoding & ~prefills, self._observed_decode),
            (prefills & decoding, self._observed_mixed),
        )
        for mine, price in kinds:
            if mine.any():
                result += price(work.take(mine), operators).spread(mine)
        return result

    def _observed_prefill(self, work: RankWork, operators: bool) -> StepResult:
        prompts = np.maximum(work.prefill_requests, 1)
        fresh = work.prefill_tokens // prompts
        at = Points.of(prompts, fresh, work.prefill_kv_tokens // prompts, prompts * fresh)
        return self.context_phase.price(at, prompts, operators)

    def _observed_decode(self, work: RankWork, operators: bool) -> StepResult:
        decodes = np.maximum(work.decode_requests, 1)
        at = Points.of(decodes, work.decode_kv_tokens // decodes, 0, decodes)
        return self.generation_phase.price(at, decodes, operators)

    def _observed_mixed(self, work: RankWork, operators: bool) -> StepResult:
        prompts, decodes = np.maximum(work.prefill_requests, 1), np.maximum(work.decode_requests, 1)
        flat = work.prefill_tokens + work.decode_requests
        rows = np.ones_like(flat) if self.profile[MIXED_LOGITS_ROWS] else prompts + decodes
        shared = self.context_phase.price_shared(Points.of(1, flat, work.prefill_kv_tokens, flat), rows, operators)
        fresh = np.maximum(work.prefill_tokens // prompts, 1)
        cached = work.prefill_kv_tokens // prompts
        at = Points.of(np.ceil(work.prefill_tokens / fresh), fresh, cached, work.prefill_tokens)
        context = self.context_phase.price_attention(at, operators)
        at = Points.of(decodes, np.maximum(work.decode_kv_tokens // decodes, 1), 0, decodes)
        return shared + context + self.generation_phase.price_attention(at, operators)


def _in_bands(price: Callable[..., StepResult], columns: Sequence[F64], operators: bool) -> StepResult:
    """``price`` of columns (N,), BAND points at a time."""
    n = len(columns[0])
    if operators or n <= BAND:
        return price(*columns)
    return joined([price(*(column[start : start + BAND] for column in columns)) for start in range(0, n, BAND)])


def _weighed(phase: Phase, at: Points, weight: F64, operators: bool) -> StepResult:
    """Attention times ``weight`` (N,), nothing where that is 0."""
    live = weight != 0
    if operators or 2 * np.count_nonzero(live) > len(live):
        return phase.price_attention(at, operators).scaled(weight)
    if not live.any():
        return StepResult.zero(len(at))
    return phase.price_attention(at.take(live), False).scaled(weight[live]).spread(live)


def _check_mixed(tokens: F64, requests: F64, isl: F64, osl: F64, prefix: F64) -> None:
    _require(isl > 0, "isl", "must be positive")
    _require((prefix < isl) | (tokens == 0), "prefix", "must be smaller than isl")


def _counts(**fields: Any) -> list[F64]:
    """The fields broadcast to (N,) float64; InvalidField names one that is not a whole number in [0, 2^32)."""
    arrays = []
    for name, value in fields.items():
        array = np.atleast_1d(np.asarray(value))
        if array.dtype.kind not in "iuf" or array.ndim != 1:
            raise InvalidField(name, "must be a number or a one-dimensional array of numbers", why="type")
        array = array.astype(np.float64)
        _require((array >= 0) & (array <= MAX_COUNT) & (array == np.floor(array)), name, "must be a whole number >= 0")
        arrays.append(array)
    try:
        return list(np.broadcast_arrays(*arrays))
    except ValueError:
        lengths = ", ".join(f"{name} has {len(array)}" for name, array in zip(fields, arrays, strict=True))
        raise InvalidField(next(iter(fields)), f"arrays differ in length: {lengths}", why="length") from None


def _require(holds: Any, name: str, message: str) -> None:
    bad = np.flatnonzero(~np.atleast_1d(holds))
    if len(bad):
        raise InvalidField(name, f"{message} (point {bad[0]})", why="range", point=str(bad[0]))
