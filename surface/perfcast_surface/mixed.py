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
    """flat, cached: tokens of the shared pass, run as one sequence; rows: of the vocabulary projection; upper: prompts
    of context attention, counting one of which a fraction is run; short: the rest of that; share: what all of them
    count with, where it is not by that fraction; decodes, length: query tokens and KV length of decode attention."""

    flat: Ints
    cached: Ints
    rows: Ints
    upper: Ints
    short: F64
    share: F64 | None
    decodes: Ints
    length: Ints

    @property
    def passes(self) -> tuple[tuple[Ints, F64], ...]:
        """Context-attention passes over so many prompts, which may be none, and the weight of each."""
        if self.share is not None:
            return ((self.upper, self.share),)
        part = (1 - self.short) * (self.short > 0)
        return (self.upper, part), (self.upper - (part > 0), 1 - part)


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
        ceiled = np.ceil(prompts)
        upper = ceiled.astype(np.int64)
        flat, rows, cached = tokens + decodes, ONE if self.one_logits_row else upper + decodes, prefix
        if prefix.any():
            cached = (prefix * (np.floor(prompts) if self.prefix_per_prompt else prompts)).astype(np.int64)
            flat = flat - cached
        share = 1 / np.ceil(isl / np.maximum(tokens, 1)) if self.whole_prompts else None
        ceiled -= prompts
        return MixedPlan(flat, cached, rows, upper, ceiled, share, decodes, middle(isl, osl))
