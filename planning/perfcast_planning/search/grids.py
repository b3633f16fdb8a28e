"""The batch sizes, chunk sizes and targets that a search tries (spec/06 sections 8.1, 8.3, 9)."""

from __future__ import annotations

import math

import numpy as np
from perfcast_engine.answer import F64
from perfcast_engine.errors import InvalidField

from perfcast_planning.serving.rising import BATCHES
from perfcast_planning.serving.workload import Targets

MAX_BATCH = 512
AGGREGATED_BATCHES = BATCHES
DECODE_BATCHES = (*range(1, 16), *range(16, 32, 2), *range(32, 128, 4), *range(128, 513, 8))
CHUNK, MIN_BUDGET, LARGE_CHUNK = 512, 8192, 1024
SWEPT_TPOTS = (*range(1, 20), *range(20, 300, 5))  # ms
SWEPT_TTFTS = (300, 400, 500, 600, 800, 1000, 1200, 1400, 1600, 2000, 3000, 5000, 8000)  # ms
LATENCY_SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)
DEFAULT_TTFT_SHARE = 0.95

Pair = tuple[float, float]


def up_to(steps: tuple[int, ...], limit: int) -> F64:
    """The steps up to ``limit``, with the limit itself."""
    return np.array([*(step for step in steps if step < limit), limit], np.float64)


def chunk_sizes(prompt: int, chunked: bool) -> F64:
    """Prefill tokens of one iteration, ascending: whole prompts unless ``chunked``."""
    budget = max(MIN_BUDGET, 2 * prompt)
    small = max(CHUNK, MIN_BUDGET // 16)
    large = max(LARGE_CHUNK, small, budget // 8)
    if not chunked:
        small = max(prompt, small)
        large = math.ceil(large / prompt) * prompt
    sizes, size = {prompt, 2 * prompt}, 0
    while (size := size + (small if size < MIN_BUDGET else large)) <= budget:
        sizes.add(size)
    return np.array(sorted(sizes), np.float64)


def target_pairs(targets: Targets, osl: int, swept: bool) -> list[Pair]:
    """(TTFT, TPOT) limits to search under, one after another."""
    if targets.request_latency_ms is None:
        ttft = math.inf if targets.ttft_ms is None else targets.ttft_ms
        return [(ttft, float(tpot)) for tpot in SWEPT_TPOTS] if swept else [(ttft, targets.tpot_ms)]
    if osl < 2:
        raise InvalidField("osl", "must be at least 2 for a request-latency target", why="range")
    whole = targets.request_latency_ms
    own = targets.ttft_ms if targets.ttft_ms is not None else DEFAULT_TTFT_SHARE * whole
    shares = {share * whole for share in LATENCY_SHARES}
    ttfts = {*SWEPT_TTFTS, own, *(t for t in shares if t < SWEPT_TTFTS[0] or t > SWEPT_TTFTS[-1])}
    return [(ttft, (whole - ttft) / (osl - 1)) for ttft in sorted(ttfts) if ttft < whole]
