"""What is assumed about each serving framework, as one table of constants.

Figures without another source are the reference engine's fitted or transcribed constants (spec/06 sections 3, 4, 9 and
10); their scope is unknown. KV fractions are the frameworks' own defaults: free_gpu_memory_fraction (TensorRT-LLM),
gpu_memory_utilization (vLLM, by version), mem_fraction_static (SGLang, derived from memory, chunk and graph sizes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from perfcast_engine.answer import F64
from perfcast_engine.errors import Reason, UnknownName

MIB = 2.0**20
GIB = 2.0**30

Coefficients = tuple[float, float, float, float]  # at a tensor-parallel width of 1, 2, 4, 8


@dataclass(frozen=True, slots=True)
class LinearQueue:
    """TTFT over prefill time, growing with the iterations that the prompts of a batch need."""

    base: float = 2.0
    free_steps: int = 3
    share: float = 2.0  # of the steps ahead that a request waits for
    slope: float = 10.0
    cap: float = 4.0

    def __call__(self, steps: F64, batch: F64) -> F64:
        return np.minimum(self.base + (steps - self.free_steps) / self.share / self.slope, self.cap)


@dataclass(frozen=True, slots=True)
class LogQueue:
    """TTFT over prefill time, growing with the logarithm of the batch."""

    slope: float = 8.0
    cap: float = 2.0

    def __call__(self, steps: F64, batch: F64) -> F64:
        return np.minimum(1.0 + np.log2(np.maximum(batch, 1.0)) / self.slope, self.cap)


@dataclass(frozen=True, slots=True)
class StaticFraction:
    """How SGLang derives mem_fraction_static (MiB throughout): what chunks, parallelism and CUDA graphs reserve."""

    # memory below, prefill chunk, graph batch, graph batch from a tensor-parallel width of 4 on
    tiers: tuple[tuple[float, int, int, int], ...] = (
        (20480, 2048, 8, 8),
        (35840, 2048, 24, 80),
        (61440, 4096, 32, 160),
        (163840, 8192, 256, 512),
        (np.inf, 16384, 512, 512),
    )
    base: float = 512.0
    per_chunk_token: float = 1.5
    per_eight_ranks: float = 1024.0
    per_graph_entry: float = 2.0
    per_dp_graph_entry: float = 3.0
    large_dp_graph: tuple[int, float] = (300, 1.5)
    large_memory: tuple[float, float] = (61440.0, 10240.0)  # above this memory reserve at least that

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
    kv_fraction: tuple[tuple[str, float], ...]  # version prefix, fraction; first match
    kv_derived: StaticFraction | None  # instead of kv_fraction, but for aggregated engines in the reference
    # deployment (spec/06 sections 9 and 10)
    excludes: tuple[tuple[str, str], ...]  # parallel widths that may not both exceed one
    context_parallel: bool
    same_tp: bool  # prefill and decode workers need equal tensor-parallel widths


def _coefficients(
    other: Coefficients, llama: Coefficients, moe: Coefficients, **more: Coefficients
) -> Mapping[str, Coefficients]:
    wide = ("MOE", "GEMMA4MIX", "STEP3P7", "DEEPSEEK", "DEEPSEEKV32", "DEEPSEEKV4", "KIMIK25")
    return MappingProxyType({"": other, "LLAMA": llama, **dict.fromkeys(wide, moe), **more})


_COMMON_ACTIVATION = _coefficients((10, 6, 5, 5), (11, 6.5, 5, 5), (22, 13, 10, 10))
_SGLANG_ACTIVATION = _coefficients(
    (13, 8, 6.5, 6.5), (14, 8.5, 6.5, 6.5), (28, 17, 13, 13), KIMIK3=(28.0, 17.0, 13.0, 13.0)
)
KV_TOLERANCE = 0.02  # share of the KV budget left unused
WORKSPACE_FAMILIES = frozenset({"GEMMA4MIX", "STEP3P7", "DEEPSEEK", "DEEPSEEKV32", "DEEPSEEKV4", "KIMIK25"})

BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            Backend(
                name="trtllm",
                queue=LinearQueue(),
                decode_saturates=True,
                ramp_steps=3,
                dispatch_ms_per_layer=0.0,
                littles_law=False,
                activation=_COMMON_ACTIVATION,
                activation_floor=70 * MIB,
                activation_overhead=0.0,
                other_overhead=0.0,
                workspace_by_hidden=frozenset({"GEMMA4MIX", "STEP3P7"}),
                token_budget=8192,
                kv_of_free=True,
                kv_reserved=0.015,
                kv_fraction=(("", 0.9),),
                kv_derived=None,
                excludes=(("attn_dp", "tp"),),
                context_parallel=False,
                same_tp=False,
            ),
            Backend(
                name="sglang",
                queue=LinearQueue(),
                decode_saturates=True,
                ramp_steps=3,
                dispatch_ms_per_layer=0.0,
                littles_law=False,
                activation=_SGLANG_ACTIVATION,
                activation_floor=90 * MIB,
                activation_overhead=0.15,
                other_overhead=0.20,
                workspace_by_hidden=frozenset({""}),
                token_budget=None,
                kv_of_free=False,
                kv_reserved=0.0,
                kv_fraction=(("", 0.88),),
                kv_derived=StaticFraction(),
                excludes=(),
                context_parallel=True,
                same_tp=True,
            ),
            Backend(
                name="vllm",
                queue=LogQueue(),
                decode_saturates=False,
                ramp_steps=0,
                dispatch_ms_per_layer=0.8,
                littles_law=True,
                activation=_COMMON_ACTIVATION,
                activation_floor=70 * MIB,
                activation_overhead=0.0,
                other_overhead=0.0,
                workspace_by_hidden=frozenset({"GEMMA4MIX", "STEP3P7"}),
                token_budget=None,
                kv_of_free=False,
                kv_reserved=0.0,
                kv_fraction=(("0.14", 0.90), ("0.19", 0.90), ("", 0.92)),
                kv_derived=None,
                excludes=(("moe_tp", "moe_ep"),),
                context_parallel=False,
                same_tp=False,
            ),
        )
    }
)


def backend_named(name: str) -> Backend:
    if name not in BACKENDS:
        raise UnknownName("backend", name, BACKENDS, Reason.UNKNOWN_BACKEND)
    return BACKENDS[name]
