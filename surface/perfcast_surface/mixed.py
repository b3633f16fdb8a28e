"""What the passes of a mixed step run (spec/06 1.5), for arrays and for numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from perfcast_surface.arrays import F64, Ints

ONE = np.ones(1, np.int64)


def middle(isl: Any, osl: Any) -> Any:
    """KV length of a decode iteration in the middle of the generation."""
    return isl + (osl >> 1) + 1


class MixedPlan(NamedTuple):
    """flat, cached: tokens of the shared pass, run as one sequence; rows: of the vocabulary projection; each of the
    context-attention passes over so many prompts, which may be none, counts with its weight; decodes, length: query
    tokens and KV length of decode attention."""

    flat: Ints
    cached: Ints
    rows: Ints
    passes: tuple[tuple[Ints, F64], ...]
    decodes: Ints
    length: Ints


@dataclass(frozen=True, slots=True)
class StepRules:
    """How steps are composed. ``nextn``: draft depth of speculative decoding; the others are habits of the reference
    engine: one row for the vocabulary projection, a cached prefix subtracted for whole prompts only, and context
    attention priced for whole prompts, rounded up, over the number of chunks. Without the last, a fraction of a prompt
    costs that fraction of what the next whole prompt adds."""

    nextn: int = 0
    one_logits_row: bool = False
    prefix_per_prompt: bool = False
    whole_prompts: bool = False

    def plan(self, tokens: Ints, requests: Ints, isl: Ints, osl: Ints, prefix: Ints) -> MixedPlan:
        """``tokens`` prompt tokens beside ``requests`` decoding requests."""
        decodes, prompts = requests * (self.nextn + 1) if self.nextn else requests, tokens / isl
        lower = prompts.astype(np.int64)
        part = prompts - lower
        upper = lower + (part > 0)
        flat, rows, cached = tokens + decodes, ONE if self.one_logits_row else upper + decodes, prefix
        if prefix.any():
            cached = prefix * lower if self.prefix_per_prompt else (prefix * prompts).astype(np.int64)
            flat = flat - cached
        passes: tuple[tuple[Ints, F64], ...] = (upper, part), (lower, 1 - part)
        if self.whole_prompts:
            passes = ((upper, 1 / np.ceil(isl / np.maximum(tokens, 1))),)
        return MixedPlan(flat, cached, rows, passes, decodes, middle(isl, osl))
