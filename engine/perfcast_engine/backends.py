"""What is assumed about each serving framework: the constants of backends.yaml, which tells their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.data import table
from perfcast_engine.errors import Reason, UnknownName

MIB = 2.0**20
GIB = 2.0**30

Coefficients = tuple[float, float, float, float]  # at a tensor-parallel width of 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class LinearQueue:
    """TTFT over prefill time, growing with the iterations that the prompts of a batch need."""

    base: float
    free_steps: int
    share: float  # of the steps ahead that a request waits for
    slope: float
    cap: float

    def __call__(self, steps: F64, batch: F64) -> F64:
        return np.minimum(self.base + (steps - self.free_steps) / self.share / self.slope, self.cap)


@dataclass(frozen=True, slots=True)
class LogQueue:
    """TTFT over prefill time, growing with the logarithm of the batch."""

    slope: float
    cap: float

    def __call__(self, steps: F64, batch: F64) -> F64:
        return np.minimum(1.0 + np.log2(np.maximum(batch, 1.0)) / self.slope, self.cap)


@dataclass(frozen=True, slots=True)
class StaticFraction:
    """How SGLang derives mem_fraction_static (MiB throughout): what chunks, parallelism and CUDA graphs reserve."""

    tiers: Sequence[tuple[float, int, int, int]]  # memory below, prefill chunk, graph batch, the same from tp 4 on
    base: float
    per_chunk_token: float
    per_eight_ranks: float
    per_graph_entry: float
    per_dp_graph_entry: float
    large_dp_graph: tuple[int, float]
    large_memory: tuple[float, float]  # above this memory reserve at least that

    def __call__(self, mem_capacity: float, tp: int, pp: int, dp: int) -> float:
        mib = mem_capacity / MIB
        _, chunk, graph, wide_graph = next(tier for tier in self.tiers if mib < tier[0])
        graph = wide_graph if tp >= 4 else graph
        reserved = self.base + self.per_chunk_token * chunk
        reserved += tp * pp / 8 * self.per_eight_ranks + self.per_graph_entry * graph
        if dp > 1:
            reserved += self.per_dp_graph_entry * graph * dp
            if graph > self.large_dp_graph[0]:
                reserved += self.large_dp_graph[1] * graph * dp
        if mib > self.large_memory[0]:
            reserved = max(reserved, self.large_memory[1])
        return round((mib - reserved) / mib, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One serving framework: its scheduler, its memory and what it can deploy."""

    name: str
    # scheduler (spec/06 section 3)
    queue: LinearQueue | LogQueue
    decode_saturates: bool  # prefill-bound iterations decode only what the prompts feed them
    ramp_steps: int  # mixed steps of a batch that no decode sees
    dispatch_ms_per_layer: float
    littles_law: bool  # throughput capped by batch over latency
    # memory (spec/06 section 4)
    activation: Mapping[str, Coefficients]  # bytes per token and attention width, by family; "" is any other
    activation_floor: float
    activation_overhead: float
    other_overhead: float
    workspace_by_hidden: frozenset[str]  # families whose routing workspace is as wide as the hidden state; "" is all
    token_budget: int | None  # activations of an aggregated engine are sized for this many tokens, whatever the step
    # KV cache (spec/06 section 4.2)
    kv_of_free: bool  # the fraction is of what weights leave free, not of the whole memory
    kv_reserved: float
    kv_fraction: Mapping[str, float]  # by version prefix; the first that fits
    kv_derived: StaticFraction | None  # instead of kv_fraction, but for aggregated engines in the reference
    # deployment (spec/06 sections 9 and 10)
    excludes: Sequence[tuple[str, str]]  # parallel widths that may not both exceed one
    context_parallel: bool
    same_tp: bool  # prefill and decode workers need equal tensor-parallel widths


def _backend(name: str, row: dict[str, Any]) -> Backend:
    queue, derived = row["queue"], row["kv_derived"]
    made: dict[str, Any] = {
        "queue": LinearQueue(**queue) if "free_steps" in queue else LogQueue(**queue),
        "kv_derived": StaticFraction(**derived) if derived else None,
        "workspace_by_hidden": frozenset(row["workspace_by_hidden"]),
    }
    return Backend(name=name, **(row | made))


KV_TOLERANCE: float = table("backends")["kv_tolerance"]
WORKSPACE_FAMILIES: frozenset[str] = frozenset(table("backends")["workspace_families"])
BACKENDS = MappingProxyType({name: _backend(name, row) for name, row in table("backends")["backends"].items()})


def backend_named(name: str) -> Backend:
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS, Reason.UNKNOWN_BACKEND)
    return BACKENDS[name]
