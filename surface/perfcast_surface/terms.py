"""Summands of a step that depend on batch, length and prefix: planes of measurements and the arithmetic around them.

Every term answers arrays (``at``) and single numbers (``one``) with the same digits; NaN outside of its planes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, nan
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import numpy as np

from perfcast_surface.arrays import F64
from perfcast_surface.averaged import Averaged
from perfcast_surface.blend import Blend, Held
from perfcast_surface.plane import Plane

SAMPLES = 5  # decode lengths averaged around the asked one
SHORTEST, LONGEST = 0.9, 1.1  # of the asked length
CHUNK = 64  # tokens between two states that linear attention writes


def decode_lengths(s: F64) -> F64:
    """The cache lengths (SAMPLES, N) that stand for N decode lengths (spec/02 section 5.4)."""
    low = np.maximum(np.trunc(s * SHORTEST), 1.0)
    high = np.maximum(np.trunc(s * LONGEST), low)
    return low + np.floor((high - low) * np.arange(SAMPLES)[:, None] / (SAMPLES - 1))


class Term(Protocol):
    """One summand of a phase. ``scale``: instances. reach: the largest batch and length that are measured, each by
    itself."""

    evaluator: ClassVar[str]

    @property
    def scale(self) -> float: ...
    @property
    def reach(self) -> tuple[float, float]: ...
    def at(self, batch: F64, s: F64, prefix: F64) -> F64: ...
    def one(self, batch: float, s: float, prefix: float) -> float: ...
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

    def at(self, batch: F64, s: F64, prefix: F64) -> F64:
        if self.ranks == 1:
            return (self._kernel(batch, s + prefix, prefix) + self.extra_ms) * self.scale
        part = np.maximum(np.ceil(s / (2 * self.ranks)), 1.0)
        near, far = part + prefix, s + prefix
        kernel = self._kernel(batch, near, prefix) + self._kernel(batch, far, far - part)
        return (kernel + self.extra_ms) * self.scale

    def _kernel(self, batch: F64, full: F64, prefix: F64) -> F64:
        return self.blend.at(full, batch) * ((full * full - prefix * prefix) / (full * full))

    def one(self, batch: float, s: float, prefix: float) -> float:
        if self.ranks == 1:
            return (self._one(batch, s + prefix, prefix) + self.extra_ms) * self.scale
        part = max(ceil(s / (2 * self.ranks)), 1)
        near, far = part + prefix, s + prefix
        return (self._one(batch, near, prefix) + self._one(batch, far, far - part) + self.extra_ms) * self.scale

    def _one(self, batch: float, full: float, prefix: float) -> float:
        return self.blend.one(full, batch) * ((full * full - prefix * prefix) / (full * full)) if full > 0 else nan

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


@dataclass(frozen=True, eq=False)
class Prefixed:
    """Prefill measured over (prefix, new tokens, batch). ``excess``: what measured kernels spend beyond those in use,
    over (batch, new tokens, prefix)."""

    blend: Blend
    scale: float
    excess: Held | None = None

    evaluator: ClassVar[str] = "prefixed"

    @property
    def reach(self) -> tuple[float, float]:
        _, s, batch = self.blend.ends
        return batch, s

    def at(self, batch: F64, s: F64, prefix: F64) -> F64:
        ms = self.blend.at(prefix, s, batch)
        if self.excess is not None:
            ms = np.maximum(ms - self.excess.at(batch, s, prefix), 0.0)
        return ms * self.scale

    def one(self, batch: float, s: float, prefix: float) -> float:
        ms = self.blend.one(prefix, s, batch)
        if self.excess is not None:
            ms = _less(ms, self.excess.one(batch, s, prefix))
        return ms * self.scale

    def parameters(self) -> dict[str, float]:
        return self.blend.parameters()

    def planes(self) -> Sequence[Plane]:
        return _with_excess(self.blend, self.excess)

    @classmethod
    def read(cls, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> Prefixed:
        return cls(Blend.read(parameters, planes[: len(parameters)], 3), scale, _excess(parameters, planes))


@dataclass(frozen=True, eq=False)
class Decode:
    """Decode measured over (batch, cache length). ``excess`` as for prefill, of one new token after the others."""

    blend: Blend
    scale: float
    excess: Held | None = None

    evaluator: ClassVar[str] = "decode"

    @property
    def reach(self) -> tuple[float, float]:
        batch, s = self.blend.ends
        return batch, s

    def at(self, batch: F64, s: F64, prefix: F64) -> F64:
        ms = self.blend.at(batch, s)
        if self.excess is not None:
            ms = np.maximum(ms - self.excess.at(batch, np.ones(1), np.maximum(s - 1, 0.0)), 0.0)
        return ms * self.scale

    def one(self, batch: float, s: float, prefix: float) -> float:
        ms = self.blend.one(batch, s)
        if self.excess is not None:
            ms = _less(ms, self.excess.one(batch, 1, max(s - 1, 0)))
        return ms * self.scale

    def parameters(self) -> dict[str, float]:
        return self.blend.parameters()

    def planes(self) -> Sequence[Plane]:
        return _with_excess(self.blend, self.excess)

    @classmethod
    def read(cls, scale: float, parameters: Mapping[str, float], planes: Sequence[Plane]) -> Decode:
        return cls(Blend.read(parameters, planes[: len(parameters)], 2), scale, _excess(parameters, planes))


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

    def at(self, batch: F64, s: F64, prefix: F64) -> F64:
        return self.means.at(batch, s) * self.scale

    def one(self, batch: float, s: float, prefix: float) -> float:
        return self.means.one(batch, s) * self.scale

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

    def at(self, batch: F64, s: F64, prefix: F64) -> F64:
        if self.draft:
            batch, s = np.maximum(1.0, np.round(batch / self.draft)), np.array([float(self.draft)])
        query = (batch, s) if self._lengthy else (batch,)
        return self.blend.at(*query) * self.scale

    def one(self, batch: float, s: float, prefix: float) -> float:
        if self.draft:
            batch, s = max(1, round(batch / self.draft)), self.draft
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

    def at(self, batch: F64, s: F64, prefix: F64) -> F64:
        if self.draft:
            batch, s = np.maximum(1.0, np.round(batch / self.draft)), np.array([float(self.draft)])
        if not self.lengthy:
            return batch * ((self.per_token + self.per_request) * self.scale)
        chunks = np.floor(s / CHUNK)
        return batch * (self.per_token * s + self.per_request + self.per_chunk * chunks) * self.scale

    def one(self, batch: float, s: float, prefix: float) -> float:
        if self.draft:
            batch, s = max(1, round(batch / self.draft)), self.draft
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


KINDS = (Causal, Prefixed, Decode, DecodeMean, State, Traffic)
EVALUATORS: Mapping[str, Any] = MappingProxyType({kind.evaluator: kind for kind in KINDS})


def _less(ms: float, excess: float) -> float:
    return 0.0 if ms < excess else ms - excess


def _with_excess(blend: Blend, excess: Held | None) -> list[Plane]:
    return blend.planes() if excess is None else [*blend.planes(), excess.plane]


def _excess(parameters: Mapping[str, float], planes: Sequence[Plane]) -> Held | None:
    """The plane after those that have a weight."""
    rest = planes[len(parameters) :]
    if not rest:
        return None
    if len(rest) > 1 or len(rest[0].axes) != 3:
        raise ValueError("needs one plane of excess over 3 axes")
    return Held(rest[0])
