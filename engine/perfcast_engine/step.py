"""Steps of one engine: prefill, decode (one step and whole trajectories), mixed (spec/06 section 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np
from perfcast_surface.arrays import Ints
from perfcast_surface.bands import BAND, banded, before_each
from perfcast_surface.lines import Read
from perfcast_surface.mixed import StepRules, middle
from perfcast_surface.surface import Counts, PhaseSurface, StepSurface

from perfcast_engine.answer import F64, Mask, Points
from perfcast_engine.errors import InvalidField
from perfcast_engine.ops.base import Op
from perfcast_engine.phase import Phase, PhaseMaker
from perfcast_engine.profiles import (
    ATTENTION_BY_ROLE,
    CORRECTED,
    MIXED_LOGITS_ROWS,
    MIXED_PREFIX_PER_PROMPT,
    MIXED_WHOLE_PROMPTS,
    Profile,
)
from perfcast_engine.quick import QuickStep, QuickSteps
from perfcast_engine.step_result import StepResult, blanked, gathered, joined
from perfcast_engine.tables.database import Database

MAX_COUNT = 2**32 - 1
MAX_SAMPLES = 1_000_000  # of all trajectories in one call; bounds memory and time
DEFAULT_STRIDE = 32


class MixedWork(NamedTuple):
    """What mixed steps have to do, numbers or arrays (N,): prompt tokens, of prompts of ``isl`` tokens with ``prefix``
    of them cached, and requests in the middle of their ``osl`` output tokens; factors on the attention of both."""

    ctx_tokens: Any
    gen_requests: Any
    isl: Any
    osl: Any
    prefix: Any = 0
    imbalance: Any = 1.0
    gen_imbalance: Any = 1.0


SINGLE = ("prefill", "decode_step", "mixed")  # what answers numbers as it answers arrays
NOTHING = PhaseSurface(Counts.of(np.zeros(0)), None, None, (), ())
UNKNOWN = StepSurface(NOTHING, NOTHING, StepRules())


@dataclass(frozen=True)
class StepModel:
    """The steps of one engine: operator lists of prefill and decode against one database.

    ``nextn``: speculative draft depth; decode steps carry nextn + 1 query tokens per request. ``profile`` says which
    faults of the reference's mixed steps are reproduced. ``phase_of`` makes the phases; the engines of a search
    share them.
    """

    context: tuple[Op, ...]
    generation: tuple[Op, ...]
    db: Database
    nextn: int = 0
    profile: Profile = CORRECTED
    phase_of: PhaseMaker = field(default=Phase, compare=False)

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
        return self.phase_of(ops, self.db, logits_apart, self.profile[ATTENTION_BY_ROLE])

    @property
    def nbytes(self) -> int:
        """Bytes of the tables filled so far; they grow as new token counts are asked for."""
        return self.context_phase.nbytes + self.generation_phase.nbytes

    @cached_property
    def _quick(self) -> QuickSteps | None:
        return QuickSteps.of(self.context_phase, self.generation_phase, self.rules)

    @property
    def _near(self) -> StepSurface:
        return UNKNOWN if self._quick is None else self._quick.near

    @property
    def far(self) -> StepSurface:
        """The surface of the engine, told beyond the measurements too; NaN where the operators have to be asked."""
        return UNKNOWN if self._quick is None else self._quick.far

    def quick(self, kind: str, counts: Mapping[str, int]) -> QuickStep | None:
        """One point of ``kind``, a method for arrays, without arrays; None where these have to be asked."""
        return None if self._quick is None or kind not in SINGLE else self._quick.step(methodcaller(kind, **counts))

    @cached_property
    def prefill_ms(self) -> Read:
        """``prefill`` of one point, ms; EngineError where it misses. So are the next two."""
        return self._near.prefill_or(self.far.prefill_or(self._asks("prefill")))

    @cached_property
    def decode_step_ms(self) -> Read:
        return self._near.decode_step_or(self.far.decode_step_or(self._asks("decode_step")))

    @cached_property
    def mixed_ms(self) -> Read:
        return self._near.mixed_or(self.far.mixed_or(self._asks("mixed")))

    def _asks(self, kind: str) -> Read:
        """Asks a twin, so that these and their functions are no circle, which would free late what they hold."""
        assert self._near is not None  # made once for both
        return partial(copy(self)._asked, kind)

    def _asked(self, kind: str, *counts: int) -> float:
        ms: float = getattr(self, kind)(*counts).raise_first().ms.item()
        return ms

    def prefill(
        self, batch: Any, isl: Any, prefix: Any = 0, imbalance: Any = 1.0, *, operators: bool = False
    ) -> StepResult:
        """One pass over ``batch`` prompts of ``isl`` tokens, ``prefix`` of them cached (spec/06 1.2)."""
        counts = _counts(batch=batch, isl=isl, prefix=prefix)
        _require(counts[2] < counts[1], "prefix", "must be smaller than isl")

        def price(batch: F64, isl: F64, prefix: F64, imbalance: F64) -> StepResult:
            at = Points.of(batch, isl - prefix, prefix, None, imbalance)
            return self.context_phase.price(at, at.batch, operators)

        return self._answered(StepSurface.prefill_many, counts, (imbalance,), price, operators)

    def decode_step(
        self, gen_requests: Any, isl: Any, osl: Any, imbalance: Any = 1.0, *, operators: bool = False
    ) -> StepResult:
        """One decode iteration of ``gen_requests`` requests at the middle of their trajectory (spec/06 1.4)."""
        counts = _counts(gen_requests=gen_requests, isl=isl, osl=osl)

        def price(requests: Ints, isl: Ints, osl: Ints, imbalance: F64) -> StepResult:
            tokens = np.maximum(requests, 1) * (self.nextn + 1)
            at = Points.of(tokens, middle(np.maximum(isl, 1), np.maximum(osl, 1)), 0, tokens, imbalance)
            return blanked(self.generation_phase.price(at, at.x, operators), requests == 0)

        return self._answered(StepSurface.decode_step_many, counts, (imbalance,), price, operators)

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
        counts = _counts(batch=batch, isl=isl, osl=osl, beam=beam)
        stride = max(int(stride), 1)
        samples = np.broadcast_to(-(-np.maximum(counts[2] - 1, 0) // stride), (_length(counts),))
        if samples.sum() > MAX_SAMPLES:
            raise InvalidField("osl", f"needs more than {MAX_SAMPLES} samples; ask fewer points or a larger stride")

        def price(batch: Ints, isl: Ints, osl: Ints, beam: Ints, imbalance: F64) -> StepResult:
            steps = np.maximum(osl - 1, 0)
            samples = -(-steps // stride)
            point = np.repeat(np.arange(len(batch)), samples)
            offset = (np.arange(len(point)) - np.repeat(np.cumsum(samples) - samples, samples)) * stride
            held = np.minimum(stride, steps[point] - offset).astype(np.float64)
            tokens = batch[point] * (self.nextn + 1)
            at = Points.of(tokens, isl[point] + offset + 1, 0, tokens * beam[point], imbalance[point])
            told = StepResult.zero(len(batch), operators)
            for band in (slice(start, start + BAND) for start in range(0, len(at), BAND)):
                before_each.get()()
                part = self.generation_phase.price(at.take(band), at.x[band], operators).scaled(held[band])
                told += gathered(part, point[band], len(batch))
            return told

        return self._answered(partial(StepSurface.decode_many, stride=stride), counts, (imbalance,), price, operators)

    def mixed(self, *work: Any, operators: bool = False, **named: Any) -> StepResult:
        """One iteration that prefills tokens of prompts beside decoding requests (spec/06 1.5). Arguments are the
        fields of MixedWork."""
        *columns, imbalance, gen_imbalance = MixedWork(*work, **named)
        counts = _mixed_counts(*columns)

        def price(*columns: Any) -> StepResult:
            shared, context, decode = self.mixed_parts(MixedWork(*columns), operators=operators)
            return shared + context + decode

        return self._answered(StepSurface.mixed_many, counts, (imbalance, gen_imbalance), price, operators)

    def mixed_parts(self, work: MixedWork, *, operators: bool = False) -> tuple[StepResult, StepResult, StepResult]:
        """The three passes of a mixed step: all but attention, context attention, decode attention."""
        *columns, imbalance, gen_imbalance = work
        tokens, requests, isl, osl, prefix = np.broadcast_arrays(*_mixed_counts(*columns))
        plan = self.rules.plan(tokens, requests, isl, osl, prefix)
        busy = tokens + requests > 0
        one, flat = np.ones_like(tokens), np.where(busy, plan.flat, 1)
        rows = np.maximum(plan.rows, one).astype(np.float64)
        shared = self.context_phase.price_shared(Points.of(one, flat, plan.cached, flat, imbalance), rows, operators)
        fresh, cached = np.where(tokens > 0, isl - prefix, 1), np.where(tokens > 0, prefix, 0)
        context = StepResult.zero(len(tokens), operators)
        for prompts, weight in plan.passes:
            at = Points.of(np.maximum(prompts, 1), fresh, cached, None, imbalance)
            context += _weighed(self.context_phase, at, np.where(prompts > 0, weight, 0.0), operators)
        at = Points.of(np.maximum(plan.decodes, 1), plan.length, 0, np.maximum(plan.decodes, 1), gen_imbalance)
        decode = _weighed(self.generation_phase, at, (requests > 0).astype(np.float64), operators)
        return blanked(shared, ~busy), context, decode

    def _answered(
        self,
        ask: Callable[..., F64],
        counts: Sequence[Ints],
        factors: Sequence[Any],
        price: Callable[..., StepResult],
        operators: bool,
    ) -> StepResult:
        """Points with ``counts``, each (N,) or (1,), and imbalance ``factors``: by ``ask`` where the surface knows
        them and there is no imbalance, by ``price`` from the operators elsewhere. Both take the columns."""
        even = all(factor == 1.0 if isinstance(factor, float) else np.all(factor == 1.0) for factor in factors)
        quick = self._quick if even and not operators else None
        gone: Mask = np.ones(1, np.bool_)
        if quick is not None and quick.is_plain:
            ms = banded(partial(ask, quick.near), counts, _length(counts))
            gone = np.isnan(ms)
            if not gone.any():
                return quick.result(ms, ask, counts)
        columns: list[Any] = [np.broadcast_to(column, (_length(counts),)) for column in (*counts, *factors)]
        if quick is None or gone.all():
            return _in_bands(price, columns, operators)
        known = quick.result(ms[~gone], ask, [column[~gone] for column in columns[: len(counts)]])
        rest = _in_bands(price, [column[gone] for column in columns], operators)
        return known.spread(~gone) + rest.spread(gone)


def _in_bands(price: Callable[..., StepResult], columns: Sequence[Any], operators: bool) -> StepResult:
    """``price`` of columns (N,), BAND points at a time."""
    n = len(columns[0])
    if operators or n <= BAND:
        before_each.get()()
        return price(*columns)
    return joined([_in_bands(price, [column[at : at + BAND] for column in columns], False) for at in range(0, n, BAND)])


def _weighed(phase: Phase, at: Points, weight: F64, operators: bool) -> StepResult:
    """Attention times ``weight`` (N,), nothing where that is 0."""
    live = weight != 0
    if operators or 2 * np.count_nonzero(live) > len(live):
        return phase.price_attention(at, operators).scaled(weight)
    if not live.any():
        return StepResult.zero(len(at))
    return phase.price_attention(at.take(live), False).scaled(weight[live]).spread(live)


def _mixed_counts(*columns: Any) -> list[Ints]:
    counts = _counts(**dict(zip(MixedWork._fields, columns, strict=False)))
    tokens, _, isl, _, prefix = counts
    behind = prefix < isl
    if not behind.all():
        _require(isl > 0, "isl", "must be positive")
        _require(behind | (tokens == 0), "prefix", "must be smaller than isl")
    return counts


def _counts(**fields: Any) -> list[Ints]:
    """The fields as int64, each (N,) or (1,); InvalidField names one that is not a whole number in [0, 2^32)."""
    counts = []
    for name, value in fields.items():
        array = np.atleast_1d(np.asarray(value))
        if array.dtype.kind not in "iuf" or array.ndim != 1:
            raise InvalidField(name, "must be a number or a one-dimensional array of numbers", why="type")
        if array.dtype != np.int64 or array.view(np.uint64).max(initial=0) > MAX_COUNT:
            good = (array >= 0) & (array <= MAX_COUNT) & (array == np.floor(array))
            _require(good, name, "must be a whole number >= 0")
        counts.append(array.astype(np.int64, copy=False))
    if len({len(array) for array in counts} - {1}) > 1:
        lengths = ", ".join(f"{name} has {len(array)}" for name, array in zip(fields, counts, strict=True))
        raise InvalidField(next(iter(fields)), f"arrays differ in length: {lengths}", why="length")
    return counts


def _length(counts: Sequence[Ints]) -> int:
    """Of the points that columns (N,) and (1,) make up."""
    return next((len(column) for column in counts if len(column) != 1), 1)


def _require(holds: Mask, name: str, message: str) -> None:
    if not holds.all():
        bad = np.flatnonzero(~holds)
        raise InvalidField(name, f"{message} (point {bad[0]})", why="range", point=str(bad[0]))
