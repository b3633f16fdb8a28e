"""The surface of one engine: prefill, decode and mixed steps from arrays alone, with the engine's own digits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import nan
from typing import Any

import numpy as np

from perfcast_surface.arrays import F64
from perfcast_surface.mixed import ARRAYS, NUMBERS, StepRules
from perfcast_surface.terms import EVALUATORS, Term, plane_arrays, plane_from

FORMAT = 1
TABLES = ("tokens", "logits", "requests")


class SurfaceError(ValueError):
    """The data are not a surface, or one of a format that this version does not read."""


@dataclass(frozen=True, eq=False)
class PhaseSurface:
    """One operator list. tokens, logits, requests: ms at 0, 1, 2 ... tokens of the pass, rows of the vocabulary
    projection, requests; empty where nothing depends on it. attention: terms that mixed steps price apart."""

    tokens: F64
    logits: F64
    requests: F64
    attention: tuple[Term, ...]
    others: tuple[Term, ...]

    def shared(self, batch: F64, s: F64, prefix: F64, x: F64, rows: F64) -> F64:
        """Everything but attention; NaN outside."""
        ms = _look_up(self.tokens, x) + _look_up(self.logits, rows) + _look_up(self.requests, batch)
        return _summed(self.others, ms, batch, s, prefix)

    def shared_one(self, batch: int, s: int, prefix: int, x: int, rows: int) -> float:
        ms = 0.0
        for table, count in ((self.tokens, x), (self.logits, rows), (self.requests, batch)):
            if len(table):
                ms += table.item(count) if 0 <= count < len(table) else nan
        for term in self.others:
            ms += term.one(batch, s, prefix)
        return ms

    def attention_one(self, batch: int, s: int, prefix: int) -> float:
        return sum(term.one(batch, s, prefix) for term in self.attention)


def _look_up(table: F64, counts: F64) -> F64:
    if not len(table):
        return np.zeros(len(counts))
    index = counts.astype(np.int64)
    known = (index >= 0) & (index < len(table))
    return np.where(known, table.take(np.where(known, index, 0)), np.nan)


def _summed(terms: tuple[Term, ...], ms: F64, batch: F64, s: F64, prefix: F64) -> F64:
    for term in terms:
        ms = ms + term.at(batch, s, prefix)
    return ms


@dataclass(frozen=True, eq=False)
class StepSurface:
    """Steps of one engine. Arguments are whole numbers, or arrays (N,) of them broadcast against each other; answers
    are ms, a float or (N,). NaN where the surface does not reach."""

    context: PhaseSurface
    generation: PhaseSurface
    rules: StepRules

    def prefill(self, batch: Any, isl: Any, prefix: Any = 0) -> Any:
        """One pass over ``batch`` prompts of ``isl`` tokens, ``prefix`` of them cached."""
        phase = self.context
        if _numbers(batch, isl, prefix):
            s = isl - prefix
            if batch < 1 or s < 1 or prefix < 0:
                return nan
            return phase.shared_one(batch, s, prefix, batch * s, batch) + phase.attention_one(batch, s, prefix)
        batch, isl, prefix = _columns(batch, isl, prefix)
        s = isl - prefix
        good = (batch >= 1) & (s >= 1) & (prefix >= 0)
        batch, s = np.where(good, batch, 1.0), np.where(good, s, 1.0)
        ms = phase.shared(batch, s, prefix, batch * s, batch)
        return np.where(good, _summed(phase.attention, ms, batch, s, prefix), np.nan)

    def decode_step(self, gen_requests: Any, isl: Any, osl: Any) -> Any:
        """One decode iteration of ``gen_requests`` requests in the middle of their generation."""
        phase, rows = self.generation, self.rules.nextn + 1
        if _numbers(gen_requests, isl, osl):
            if gen_requests < 1 or isl < 1 or osl < 1:
                return nan
            tokens, length = gen_requests * rows, isl + osl // 2 + 1
            return phase.shared_one(tokens, length, 0, tokens, tokens) + phase.attention_one(tokens, length, 0)
        requests, isl, osl = _columns(gen_requests, isl, osl)
        good = (requests >= 1) & (isl >= 1) & (osl >= 1)
        tokens, length = np.where(good, requests, 1.0) * rows, isl + osl // 2 + 1
        zero = np.zeros_like(tokens)
        ms = phase.shared(tokens, length, zero, tokens, tokens)
        return np.where(good, _summed(phase.attention, ms, tokens, length, zero), np.nan)

    def mixed(self, ctx_tokens: Any, gen_requests: Any, isl: Any, osl: Any, prefix: Any = 0) -> Any:
        """One iteration that prefills ``ctx_tokens`` prompt tokens beside ``gen_requests`` decoding requests."""
        if _numbers(ctx_tokens, gen_requests, isl, osl, prefix):
            return self._mixed_one(ctx_tokens, gen_requests, isl, osl, prefix)
        tokens, requests, isl, osl, prefix = _columns(ctx_tokens, gen_requests, isl, osl, prefix)
        good = (tokens >= 1) & (requests >= 0) & (prefix >= 0) & (prefix < isl) & (osl >= 0)
        tokens, isl, prefix = np.where(good, tokens, 1.0), np.where(good, isl, 1.0), np.where(good, prefix, 0.0)
        requests = np.where(good, requests, 0.0)
        plan = self.rules.mixed(tokens, requests, isl, osl, prefix, ARRAYS)
        one, rows = np.ones_like(tokens), np.broadcast_to(np.asarray(plan.logits_rows, np.float64), tokens.shape)
        good &= plan.flat >= 1
        flat = np.where(good, plan.flat, 1.0)
        ms = self.context.shared(one, flat, plan.cached, flat, rows)
        fresh, zero = isl - prefix, np.zeros_like(tokens)
        for prompts, weight in plan.prompts:
            part = _summed(self.context.attention, zero, np.maximum(prompts, 1.0), fresh, prefix)
            ms = ms + np.where(weight > 0, part * weight, 0.0)
        decode = _summed(self.generation.attention, zero, np.maximum(plan.decodes, 1.0), plan.length, zero)
        return np.where(good, ms + np.where(requests > 0, decode, 0.0), np.nan)

    def _mixed_one(self, tokens: int, requests: int, isl: int, osl: int, prefix: int) -> float:
        if tokens < 1 or requests < 0 or osl < 0 or not 0 <= prefix < isl:
            return nan
        plan = self.rules.mixed(tokens, requests, isl, osl, prefix, NUMBERS)
        if plan.flat < 1:
            return nan
        ms = self.context.shared_one(1, plan.flat, plan.cached, plan.flat, plan.logits_rows)
        for prompts, weight in plan.prompts:
            if weight:
                ms += self.context.attention_one(prompts, isl - prefix, prefix) * weight
        return ms + self.generation.attention_one(plan.decodes, plan.length, 0) if requests else ms

    @cached_property
    def parts(self) -> tuple[dict[str, Any], dict[str, F64]]:
        """A header that fits into JSON, and the arrays that it names."""
        arrays: dict[str, F64] = {}
        header: dict[str, Any] = {"format": FORMAT, "rules": asdict(self.rules), "phases": {}}
        for name, phase in (("context", self.context), ("generation", self.generation)):
            arrays |= {f"{name}.{table}": getattr(phase, table) for table in TABLES}
            header["phases"][name] = list(_terms(name, phase, arrays))
        return header, arrays

    @cached_property
    def content_hash(self) -> str:
        """Of everything that decides an answer."""
        header, arrays = self.parts
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        for name in sorted(arrays):
            digest.update(f"{name}{arrays[name].shape}".encode())
            digest.update(np.ascontiguousarray(arrays[name], "<f8").tobytes())
        return digest.hexdigest()

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], arrays: Mapping[str, F64]) -> StepSurface:
        """The inverse of ``parts``; SurfaceError where they do not fit together."""
        try:
            if header["format"] != FORMAT:
                raise SurfaceError(f"surface format {header['format']!r} is not {FORMAT}")
            phases = {name: _phase(name, header["phases"][name], arrays) for name in ("context", "generation")}
            return cls(phases["context"], phases["generation"], StepRules(**header["rules"]))
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise SurfaceError(f"not a surface: {type(error).__name__} {error}") from error


def _terms(name: str, phase: PhaseSurface, arrays: dict[str, F64]) -> Iterator[dict[str, Any]]:
    for is_attention, terms in ((True, phase.attention), (False, phase.others)):
        for term in terms:
            planes = []
            for plane in term.planes():
                planes.append(f"plane{sum(key.endswith('.values') for key in arrays)}")
                arrays |= dict(plane_arrays(plane, planes[-1]))
            yield {
                "evaluator": term.evaluator,
                "is_attention": is_attention,
                "scale": term.scale,
                "parameters": term.parameters(),
                "planes": planes,
            }


def _phase(name: str, terms: list[dict[str, Any]], arrays: Mapping[str, F64]) -> PhaseSurface:
    tables = [arrays[f"{name}.{table}"] for table in TABLES]
    read: dict[bool, list[Term]] = {True: [], False: []}
    for term in terms:
        planes = [plane_from(arrays, plane) for plane in term["planes"]]
        kind = EVALUATORS[term["evaluator"]]
        read[term["is_attention"]].append(kind.read(term["scale"], term["parameters"], planes))
    return PhaseSurface(tables[0], tables[1], tables[2], tuple(read[True]), tuple(read[False]))


def _numbers(*values: Any) -> bool:
    return all(type(value) is int for value in values)


def _columns(*values: Any) -> list[F64]:
    return list(np.broadcast_arrays(*(np.atleast_1d(np.asarray(value, np.float64)) for value in values)))
