"""What operators take and give: arrays of points in, latencies with their origin and their misses out.

A miss is per point: one query may be answered from measurements for some points and not for others. Evaluation
therefore never raises half-way through an array; ``Answer.misses`` says which points have no value and why, and the
caller decides (``or_else`` for HYBRID and fallback groups, ``raise_first`` at the edge).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from perfcast_engine.errors import EngineError

F64 = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Source(IntEnum):
    """Where a latency comes from, as the reference tags it."""

    SILICON = 0
    EMPIRICAL = 1
    SOL = 2
    ESTIMATED = 3
    MIXED = 4


class Tier(IntEnum):
    """How far the empirical model had to borrow; the worst of all operators is reported."""

    SILICON = 0
    EMPIRICAL = 1
    XSHAPE = 2
    XQUANT = 3
    XPROFILE = 4
    XOP = 5


@dataclass(frozen=True, slots=True)
class Points:
    """Coordinates of N operator queries (spec/06 1.1), every field an array of shape (N,).

    batch: requests; s: new tokens per request (context) or KV length (generation); prefix: cached tokens per
    request; x: tokens of the pass; imbalance: factor on the attention kinds of the phase at hand.
    """

    batch: F64
    s: F64
    prefix: F64
    x: F64
    imbalance: F64

    @classmethod
    def of(cls, batch: Any, s: Any, prefix: Any = 0, x: Any = None, imbalance: Any = 1.0) -> Points:
        """Broadcast scalars and arrays to one shape (N,). ``x`` defaults to batch * s."""
        if x is None:
            x = np.multiply(batch, s, dtype=np.float64)
        fields = np.broadcast_arrays(
            *(np.atleast_1d(np.asarray(v, np.float64)) for v in (batch, s, prefix, x, imbalance))
        )
        return cls(*fields)

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def columns(self) -> tuple[F64, ...]:
        """The fields in their order."""
        return self.batch, self.s, self.prefix, self.x, self.imbalance

    def take(self, which: Mask | NDArray[np.intp] | slice) -> Points:
        return Points(*(column[which] for column in self.columns))

    def with_(self, **fields: F64) -> Points:
        return replace(self, **fields)


Miss = tuple[Mask, EngineError]


def moved(misses: Iterable[Miss], places: NDArray[np.intp], n: int) -> list[Miss]:
    """The misses of points that become those at ``places`` among ``n`` points."""
    out: list[Miss] = []
    for mask, error in misses:
        whole = np.zeros(n, np.bool_)
        whole[places[mask]] = True
        out.append((whole, error))
    return out


class Missing:
    """What can be asked about points that have no value."""

    __slots__ = ()
    misses: list[Miss]

    def first_error(self) -> EngineError | None:
        """The error of the first point that misses (of the first operator, where several miss it)."""
        return min(self.misses, key=lambda miss: int(np.argmax(miss[0])))[1] if self.misses else None

    def raise_first(self) -> Self:
        error = self.first_error()
        if error is not None:
            raise error.anew()
        return self


@dataclass(slots=True)
class Answer(Missing):
    """Latencies (ms) and energies (W ms) of N points with their origin.

    ms, energy: float64 (N,), NaN where missing; source: Source codes (N,) uint8; tier: Tier codes (N,) uint8;
    misses: (mask over the N points, error) pairs, empty when every point has a value.
    """

    ms: F64
    source: NDArray[np.uint8]
    tier: NDArray[np.uint8]
    energy: F64
    misses: list[Miss] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        ms: F64,
        source: Source,
        tier: Tier = Tier.SILICON,
        energy: F64 | None = None,
        miss: EngineError | Callable[[Mask], EngineError] | None = None,
    ) -> Answer:
        """An answer with one tag. Where ``ms`` is NaN points miss with ``miss`` (or what it builds from the mask)."""
        n = len(ms)
        energy = np.zeros(n) if energy is None else energy
        answer = cls(ms, np.full(n, source, np.uint8), np.full(n, tier, np.uint8), energy)
        gone = np.isnan(ms)
        if gone.any():
            assert miss is not None, "an operator left a point without a value and without a reason"
            answer.misses.append((gone, miss if isinstance(miss, EngineError) else miss(gone)))
        return answer

    @classmethod
    def none(cls, n: int, error: EngineError) -> Answer:
        """N points that all miss with ``error``."""
        return cls.of(np.full(n, np.nan), Source.SILICON, miss=error)

    @classmethod
    def zero(cls, n: int, source: Source = Source.SILICON) -> Answer:
        return cls.of(np.zeros(n), source)

    def __len__(self) -> int:
        return len(self.ms)

    def __add__(self, other: Answer) -> Answer:
        """Sum of two operators. A side with no latency and no energy is neutral; unequal tags become MIXED."""
        own = (self.ms != 0) | (self.energy != 0)
        others = (other.ms != 0) | (other.energy != 0)
        unlike = own & others & (self.source != other.source)
        either = np.where(own, self.source, np.where(others, other.source, self.source))
        source, tier = np.where(unlike, np.uint8(Source.MIXED), either), np.maximum(self.tier, other.tier)
        return Answer(self.ms + other.ms, source, tier, self.energy + other.energy, self.misses + other.misses)

    def scaled(self, factor: float | F64) -> Answer:
        return replace(self, ms=self.ms * factor, energy=self.energy * factor)

    def tagged(self, source: Source) -> Answer:
        return replace(self, source=np.full(len(self), source, np.uint8))

    def take(self, which: Mask) -> Answer:
        misses = [(mask[which], error) for mask, error in self.misses if mask[which].any()]
        return Answer(self.ms[which], self.source[which], self.tier[which], self.energy[which], misses)

    def missing(self) -> Mask:
        gone = np.zeros(len(self), np.bool_)
        for mask, _ in self.misses:
            gone |= mask
        return gone


def total(answers: Iterable[Answer], n: int) -> Answer:
    """Left-to-right sum of operators over N points; zero tagged SILICON when there is none."""
    out: Answer | None = None
    for answer in answers:
        out = answer if out is None else out + answer
    return out if out is not None else Answer.zero(n)


def or_else(
    primary: Callable[[Points], Answer],
    secondary: Callable[[Points], Answer],
    at: Points,
    catch: type[EngineError] | tuple[type[EngineError], ...],
) -> Answer:
    """``primary`` where it answers, ``secondary`` for the points that miss with ``catch`` (raised or per point).

    Other errors stay: raised ones propagate, per-point ones remain in ``misses``. What ``secondary`` raises for some of
    the points is the miss of those points.
    """
    try:
        first = primary(at)
    except catch:
        return secondary(at)
    redo = np.zeros(len(at), np.bool_)
    for mask, error in first.misses:
        if isinstance(error, catch):
            redo |= mask
    if not redo.any():
        return first
    if redo.all():
        return secondary(at)
    return gather([(~redo, first.take(~redo)), (redo, attempt(secondary, at.take(redo)))])


def attempt(price: Callable[[Points], Answer], at: Points) -> Answer:
    """``price`` for points that are some of many: what it raises becomes the miss of each of them."""
    try:
        return price(at)
    except EngineError as error:
        return Answer.none(len(at), error.bare())


def choose(which: Mask, yes: Callable[[Points], Answer], no: Callable[[Points], Answer], at: Points) -> Answer:
    """``yes`` for the points of ``which``, ``no`` for the others."""
    if which.all():
        return yes(at)
    if not which.any():
        return no(at)
    return gather([(which, attempt(yes, at.take(which))), (~which, attempt(no, at.take(~which)))])


def gather(parts: Sequence[tuple[Mask, Answer]]) -> Answer:
    """One answer from answers to disjoint parts of the points."""
    n = len(parts[0][0])
    whole = Answer(np.full(n, np.nan), np.zeros(n, np.uint8), np.zeros(n, np.uint8), np.zeros(n))
    for where, part in parts:
        whole.ms[where], whole.energy[where] = part.ms, part.energy
        whole.source[where], whole.tier[where] = part.source, part.tier
        whole.misses.extend(moved(part.misses, np.flatnonzero(where), n))
    return whole
