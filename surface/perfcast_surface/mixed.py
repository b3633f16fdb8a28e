"""What the passes of a mixed step run (spec/06 1.5), written once for arrays and for numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Rounding(NamedTuple):
    """Functions on arrays, or on numbers."""

    floor: Callable[[Any], Any]
    ceil: Callable[[Any], Any]
    maximum: Callable[[Any, Any], Any]


ARRAYS = Rounding(np.floor, np.ceil, np.maximum)
NUMBERS = Rounding(math.floor, math.ceil, max)


def middle(isl: Any, osl: Any, of: Rounding) -> Any:
    """KV length of a decode iteration in the middle of the generation."""
    return isl + of.floor(osl / 2) + 1  # on arrays // takes ten times as long


class MixedPlan(NamedTuple):
    """flat, cached: tokens of the shared pass, run as one sequence; prompts: (prompts, weight) of the context-attention
    passes; decodes, length: query tokens and KV length of decode attention."""

    flat: Any
    cached: Any
    logits_rows: Any
    prompts: tuple[tuple[Any, Any], ...]
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

    def mixed(self, tokens: Any, requests: Any, isl: Any, osl: Any, prefix: Any, of: Rounding) -> MixedPlan:
        """A step of ``tokens`` prompt tokens beside ``requests`` decoding requests."""
        decodes, prompts = requests * (self.nextn + 1), tokens / isl
        lower, upper = of.floor(prompts), of.ceil(prompts)
        cached = prefix * lower if self.prefix_per_prompt else of.floor(prefix * prompts)
        rows = 1 if self.one_logits_row else of.maximum(upper + decodes, 1)
        if self.whole_prompts:
            chunks = of.maximum(of.ceil(isl / of.maximum(tokens, 1)), 1)
            attention: tuple[tuple[Any, Any], ...] = ((upper, (tokens > 0) / chunks),)
        else:
            part = prompts - lower
            attention = ((upper, part), (lower, (lower > 0) * (1 - part)))
        return MixedPlan(tokens + decodes - cached, cached, rows, attention, decodes, middle(isl, osl, of))
