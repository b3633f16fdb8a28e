"""What the passes of a mixed step run (spec/06 1.5), written once for arrays and for numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Rounding = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]  # floor of what is not negative, maximum
ARRAYS: Rounding = (lambda values: values.astype(np.int64), np.maximum)
NUMBERS: Rounding = (math.floor, max)


def middle(isl: Any, osl: Any) -> Any:
    """KV length of a decode iteration in the middle of the generation."""
    return isl + (osl >> 1) + 1


class MixedPlan(NamedTuple):
    """flat, cached: tokens of the shared pass, run as one sequence; rows: of the vocabulary projection; each of two
    context-attention passes over so many prompts, which may be none, counts with its weight; decodes, length: query
    tokens and KV length of decode attention."""

    flat: Any
    cached: Any
    rows: Any
    upper: Any
    upper_weight: Any
    lower: Any
    lower_weight: Any
    decodes: Any
    length: Any


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

    def mixed(self, tokens: Any, requests: Any, isl: Any, osl: Any, prefix: Any, of: Rounding) -> tuple[Any, ...]:
        """The fields of a MixedPlan for ``tokens`` prompt tokens beside ``requests`` decoding requests: counts, int64
        where they are arrays. ``prefix``: the number 0 where there is none. Not made a MixedPlan, which takes as long
        as all of it does for numbers."""
        floor, maximum = of
        decodes, prompts = requests * (self.nextn + 1) if self.nextn else requests, tokens / isl
        lower = floor(prompts)
        part = prompts - lower
        upper = lower + (part > 0)
        flat, rows, length = tokens + decodes, upper + decodes, isl + (osl >> 1) + 1
        cached = prefix
        if type(prefix) is not int or prefix:
            cached = prefix * lower if self.prefix_per_prompt else floor(prefix * prompts)
            flat = flat - cached
        if self.one_logits_row:
            rows = rows * 0 + 1
        if self.whole_prompts:
            chunks = -(-isl // maximum(tokens, 1))
            return flat, cached, rows, upper, 1 / chunks, lower * 0, part * 0.0, decodes, length
        return flat, cached, rows, upper, part, lower, 1 - part, decodes, length
