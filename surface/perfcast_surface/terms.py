"""Summands of a step that depend on batch, length and prefix: planes of measurements and the arithmetic around them.

Every term answers arrays of counts (``at``) and single counts (``one``) alike; NaN outside of its planes. Lengths are
positive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from perfcast_surface.arrays import F64, Ints
from perfcast_surface.averaged import Averaged
from perfcast_surface.blend import Blend, Held
from perfcast_surface.lines import Lines
from perfcast_surface.plane import Plane

SAMPLES = 5  # decode lengths averaged around the asked one
SHORTEST, LONGEST = 0.9, 1.1  # of the asked length
CHUNK = 64  # tokens between two states that linear attention writes
One = Callable[[int, int, int], float]  # batch, s, prefix to ms


def decode_lengths(s: F64) -> F64:
    """The cache lengths (SAMPLES, N) that stand for N decode lengths (spec/02 section 5.4)."""
    low = np.maximum(np.trunc(s * SHORTEST), 1.0)
    high = np.maximum(np.trunc(s * LONGEST), low)
    return low + np.floor((high - low) * np.arange(SAMPLES)[:, None] / (SAMPLES - 1))


def decode_lengths_one(s: int) -> list[int]:
    """``decode_lengths`` of a single length."""
    low = max(int(s * SHORTEST), 1)
    high = max(int(s * LONGEST), low)
    return [low + (high - low) * k // (SAMPLES - 1) for k in range(SAMPLES)]


class Summand(Protocol):
    """One summand of a phase, ms. at: of arrays (N,) or (1,)"""

    @property
    def one(self) -> One: ...
    def at(self, batch: Ints, s: Ints, prefix: Ints) -> F64: ...


class Term(Summand, Protocol):
    """A summand that can leave its process. ``scale``: instances. reach: the largest batch and length that are
    measured, each by itself."""

    @property
    def evaluator(self) -> str: ...
    @property
    def scale(self) -> float: ...
    @property
    def reach(self) -> tuple[float, float]: ...
    def parameters(self) -> dict[str, float]: ...
    def planes(self) -> Sequence[Plane]: ...


@dataclass(frozen=True, eq=False)
class Causal:
    """Context attention measured without prefix over (length, batch); a cached prefix saves its share of the causal
    area. ``ranks``: context-parallel GPUs, each of which computes the first and the last of twice as many parts.
    ``extra_ms``: memory-bound steps around each kernel."""

    blend: Blend
    scale: float
    extra_ms: float = 0.0
    ranks: int = 1

    evaluator: ClassVar[str] = "causal"

    @property
    def reach(self) -> tuple[float, float]:
        length, batch = self.blend.ends
        return batch, length

    def at(self, batch: Ints, s: Ints, prefix: Ints) -> F64:
        if self.ranks == 1:
            ms = self._kernel(batch, s, prefix)
        else:
            part = -(-s // (2 * self.ranks))
            ms = self._kernel(batch, part, prefix) + self._kernel(batch, part, prefix + s - part)
        if self.extra_ms:
            ms += self.extra_ms
        ms *= self.scale
        return ms

    def _kernel(self, batch: Ints, s: Ints, prefix: Ints) -> F64:
        if not prefix.any():
            return self.blend.at(s, batch)
        full = s + prefix
        kernel: F64 = self.blend.at(full, batch) * ((s / full) * ((full + prefix) / full))
        return kernel

    @property
    def rows(self) -> Lines | None:
        """Lines along the length for each batch, where one of them is all that it takes."""
        lines = self.blend.lines
        return lines if lines is not None and lines.squared and self.ranks == 1 else None

    def short_of(self, batch: Ints, short: F64, s: Ints) -> F64:
        """``at`` without prefix for a fraction ``short`` of a request less, straight between whole ones; of none 0."""
        assert self.rows is not None
        ms = self.rows.short_of(batch, short, s)
        if self.extra_ms:
            ms += np.minimum(batch - short, 1) * self.extra_ms
        ms *= self.scale
        return ms

    @cached_property
    def one(self) -> One:
        read, lines, extra_ms, scale, ranks = self.blend.one, self.blend.lines, self.extra_ms, self.scale, self.ranks

        def one(batch: int, s: int, prefix: int) -> float:
            if not prefix:
                return (read(s, batch) + extra_ms) * scale
            full = s + prefix
            return (read(full, batch) * ((s / full) * ((full + prefix) / full)) + extra_ms) * scale

        def shared(batch: int, s: int, prefix: int) -> float:
            part = -(-s // (2 * ranks))
            return one(batch, part, prefix) + one(batch, part, prefix + s - part) - extra_ms * scale

        return shared if ranks > 1 else one if lines is None else lines.one(scale, extra_ms, one)

    def parameters(self) -> dict[str, float]:
        return {"extra_ms": float(self.extra_ms), "ranks": float(self.ranks), **self.blend.parameters()}

    def planes(self) -> Sequence[Plane]:
        return self.blend.planes()

    @classmethod
    def read(cls, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> Causal:
        ranks = int(parameters["ranks"])
        if ranks < 1:
            raise ValueError("ranks must be positive")
        return cls(Blend.read(parameters, planes, 2), scale, parameters["extra_ms"], ranks)


class Layout(NamedTuple):
    """Which axes a block was measured over: the coordinates of a point in its planes, and in those of its excess."""

    axes: int
    query: Callable[[Any, Any, Any], tuple[Any, ...]]
    excess: Callable[[Any, Any, Any], tuple[Any, ...]]
    batch: int  # which axis counts requests; the one before or after it counts tokens
    tokens: int


PREFILL, DECODE = "prefixed", "decode"
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        PREFILL: Layout(3, lambda batch, s, prefix: (prefix, s, batch), lambda *at: at, 2, 1),
        # one new token after the others
        DECODE: Layout(2, lambda batch, s, _: (batch, s), lambda batch, s, _: (batch, s * 0 + 1, s - 1), 0, 1),
    }
)


@dataclass(frozen=True, eq=False)
class Block:
    """Attention measured over the axes that LAYOUTS has under ``evaluator``: prefill over (prefix, new tokens, batch),
    decode over (batch, cache length). ``excess``: what measured kernels spend beyond those in use, over (batch, new
    tokens, prefix)."""

    evaluator: str
    blend: Blend
    scale: float
    excess: Held | None = None

    @property
    def _layout(self) -> Layout:
        return LAYOUTS[self.evaluator]

    @property
    def reach(self) -> tuple[float, float]:
        ends, layout = self.blend.ends, self._layout
        return ends[layout.batch], ends[layout.tokens]

    def at(self, batch: Ints, s: Ints, prefix: Ints) -> F64:
        ms = self.blend.at(*self._layout.query(batch, s, prefix))
        if self.excess is not None:
            ms = np.maximum(ms - self.excess.at(*self._layout.excess(batch, s, prefix)), 0.0)
        ms *= self.scale
        return ms

    @cached_property
    def one(self) -> One:
        read, scale, excess, layout = self.blend.one, self.scale, self.excess, self._layout
        if excess is None:
            if self.evaluator == DECODE:
                lines = self.blend.lines
                return (lambda batch, s, _: read(batch, s) * scale) if lines is None else lines.one(scale)
            return lambda batch, s, prefix: read(prefix, s, batch) * scale

        def one(*at: int) -> float:
            ms = read(*layout.query(*at)) - excess.one(*layout.excess(*at))
            return 0.0 if ms < 0 else ms * scale

        return one

    def parameters(self) -> dict[str, float]:
        return self.blend.parameters()

    def planes(self) -> Sequence[Plane]:
        return self.blend.planes() if self.excess is None else [*self.blend.planes(), self.excess.plane]

    @classmethod
    def read(cls, evaluator: str, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> Block:
        """The plane after those that have a weight is the excess."""
        own, rest = planes[: len(parameters)], planes[len(parameters) :]
        if len(rest) > 1 or any(len(plane.axes) != 3 for plane in rest):
            raise ValueError("needs one plane of excess over 3 axes")
        blend = Blend.read(parameters, own, LAYOUTS[evaluator].axes)
        return cls(evaluator, blend, scale, Held(rest[0]) if rest else None)


@dataclass(frozen=True, eq=False)
class DecodeMean:
    """Decode measured over (batch, cache length), averaged over lengths around the asked one."""

    means: Averaged
    scale: float

    evaluator: ClassVar[str] = "decode_mean"

    @property
    def reach(self) -> tuple[float, float]:
        batch, s = self.means.plane.ends
        return batch, s

    def at(self, batch: Ints, s: Ints, prefix: Ints) -> F64:
        return self.means.at(batch, s) * self.scale

    @cached_property
    def one(self) -> One:
        return self.means.one(self.scale)

    def parameters(self) -> dict[str, float]:
        return {}

    def planes(self) -> Sequence[Plane]:
        return [self.means.plane]

    @classmethod
    def read(cls, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> DecodeMean:
        (plane,) = Blend.read({"weight_0": 0.0}, planes, 2).planes()
        return cls(Averaged(plane, decode_lengths), scale)


@dataclass(frozen=True, eq=False)
class State:
    """A state kernel measured over (batch, new tokens), or over the batch alone. ``draft``: new tokens of each request
    in a batch that counts them all; 0 where the batch counts requests."""

    blend: Blend
    scale: float
    draft: int = 0

    evaluator: ClassVar[str] = "state"

    @cached_property
    def _lengthy(self) -> bool:
        return len(self.blend.ends) == 2

    @property
    def reach(self) -> tuple[float, float]:
        ends = self.blend.ends
        return (ends[0] * max(self.draft, 1), inf if self.draft or len(ends) == 1 else ends[1])

    def at(self, batch: Ints, s: Ints, prefix: Ints) -> F64:
        batch, s = drafted(batch, s, self.draft)
        return (self.blend.at(batch, s) if self._lengthy else self.blend.at(batch)) * self.scale

    def one(self, batch: int, s: int, prefix: int) -> float:
        batch, s = drafted_one(batch, s, self.draft)
        return (self.blend.one(batch, s) if self._lengthy else self.blend.one(batch)) * self.scale

    def parameters(self) -> dict[str, float]:
        return {"draft": float(self.draft), **self.blend.parameters()}

    def planes(self) -> Sequence[Plane]:
        return self.blend.planes()

    @classmethod
    def read(cls, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> State:
        axes = len(planes[0].axes)
        if axes > 2 or not 0 <= parameters["draft"] <= 1 << 16:
            raise ValueError("a state kernel is measured over batch and length")
        return cls(Blend.read(parameters, planes, axes), scale, int(parameters["draft"]))


@dataclass(frozen=True, eq=False)
class Traffic:
    """A kernel that costs what it moves: ms per token, per request, and per request and chunk of CHUNK tokens.
    ``lengthy``: it runs over all new tokens; otherwise over one a request. ``draft`` as for ``State``."""

    scale: float
    per_token: float
    per_request: float
    per_chunk: float
    lengthy: bool
    draft: int = 0

    evaluator: ClassVar[str] = "traffic"
    reach: ClassVar[tuple[float, float]] = (inf, inf)

    def at(self, batch: Ints, s: Ints, prefix: Ints) -> F64:
        ms: F64 = self._moved(*drafted(batch, s, self.draft))
        return ms

    def one(self, batch: int, s: int, prefix: int) -> float:
        ms: float = self._moved(*drafted_one(batch, s, self.draft))
        return ms

    def _moved(self, batch: Any, s: Any) -> Any:
        if not self.lengthy:
            return batch * ((self.per_token + self.per_request) * self.scale)
        return batch * (self.per_token * s + self.per_request + self.per_chunk * (s // CHUNK)) * self.scale

    def parameters(self) -> dict[str, float]:
        ms = {name: float(getattr(self, name)) for name in ("per_token", "per_request", "per_chunk")}
        return {**ms, "lengthy": float(self.lengthy), "draft": float(self.draft)}

    def planes(self) -> Sequence[Plane]:
        return []

    @classmethod
    def read(cls, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> Traffic:
        per_token, per_request, per_chunk = (parameters[f"per_{unit}"] for unit in ("token", "request", "chunk"))
        return cls(scale, per_token, per_request, per_chunk, bool(parameters["lengthy"]), int(parameters["draft"]))


def drafted(batch: Ints, s: Ints, draft: int) -> tuple[Ints, Ints]:
    """Requests of ``draft`` new tokens each in a batch that counts the tokens; 0 leaves both as they are."""
    if not draft:
        return batch, s
    return np.maximum(1, np.round(batch / draft).astype(np.int64)), np.array([draft])


def drafted_one(batch: int, s: int, draft: int) -> tuple[int, int]:
    return (max(1, round(batch / draft)), draft) if draft else (batch, s)


Reader = Callable[[float, Mapping[str, float], Sequence[Plane]], Term]
EVALUATORS: Mapping[str, Reader] = MappingProxyType(
    {kind.evaluator: kind.read for kind in (Causal, DecodeMean, State, Traffic)}
    | {evaluator: partial(Block.read, evaluator) for evaluator in LAYOUTS}
)
