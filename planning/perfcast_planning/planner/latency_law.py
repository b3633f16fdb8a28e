"""Straight lines through an engine's latencies, for autoscalers that know nothing else (spec/07 section 9).

ITL = alpha + beta * batch and TTFT = gamma + delta * input tokens * batch, in ms, over a stated box.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import InvalidField, check_whole
from perfcast_engine.step import StepModel

from perfcast_planning.planner.telemetry import MAX_COUNT

MAX_SAMPLES = 256  # per axis; wider ranges are sampled evenly


@dataclass(frozen=True, slots=True)
class LawBox:
    """Where the law shall hold: decode batches at a mean KV length of isl + osl / 2, and prefill passes of up to
    ``max_prompts`` prompts of these lengths that fit ``max_num_batched_tokens``. Counts are per rank."""

    min_batch: int = 1
    max_batch: int = 256
    isl: int = 3000
    osl: int = 150
    min_input_tokens: int = 128
    max_input_tokens: int = 8192
    max_prompts: int = 8
    max_num_batched_tokens: int = 8192

    def __post_init__(self) -> None:
        for low, high in (
            ("min_batch", "max_batch"),
            ("min_input_tokens", "max_input_tokens"),
            ("min_input_tokens", "max_num_batched_tokens"),
        ):
            if not 1 <= getattr(self, low) <= getattr(self, high):
                raise InvalidField(low, f"must lie in [1, {high}]", why="range")
        check_whole(self, ("isl", "osl", "max_prompts"), 1, MAX_COUNT)


@dataclass(frozen=True, slots=True)
class Line:
    """ms = intercept + slope * x by least squares, neither negative. r_squared: of the samples' variance, the share
    explained; worst_*: the largest deviation from a sample, and the largest in relation to its sample."""

    intercept_ms: float
    slope_ms: float
    r_squared: float
    worst_error_ms: float
    worst_relative_error: float
    samples: int


@dataclass(frozen=True, slots=True)
class LatencyLaw:
    itl: Line
    ttft: Line


def fit_latency_law(steps: StepModel, box: LawBox) -> LatencyLaw:
    """The lines of ``box``. PerfDataMissing where it reaches beyond what the engine has data for."""
    batch = _between(box.min_batch, box.max_batch)
    itl = steps.decode_step(batch, box.isl, box.osl).raise_first().ms
    length, prompts = (
        axis.ravel()
        for axis in np.meshgrid(
            _between(box.min_input_tokens, box.max_input_tokens, 64), _between(1, box.max_prompts, 16)
        )
    )
    fits = length * prompts <= max(box.max_num_batched_tokens, box.min_input_tokens)
    length, prompts = length[fits], prompts[fits]
    ttft = steps.prefill(prompts, length).raise_first().ms
    return LatencyLaw(fit_line(batch, itl), fit_line(length * prompts, ttft))


def fit_line(x: F64, ms: F64) -> Line:
    """The line through samples (N,)."""
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = max(float(centred @ ms) / spread, 0.0) if spread > 0 else 0.0
    intercept = float(ms.mean() - slope * x.mean())
    if intercept < 0:
        intercept, slope = 0.0, float(x @ ms) / float(x @ x)
    error = np.abs(intercept + slope * x - ms)
    variance = float(((ms - ms.mean()) ** 2).sum())
    explained = 1 - float(error @ error) / variance if variance > 0 else 1.0
    return Line(intercept, slope, explained, float(error.max()), float((error / ms).max()), len(x))


def _between(low: int, high: int, most: int = MAX_SAMPLES) -> F64:
    return np.unique(np.linspace(low, high, min(most, high - low + 1)).round())
