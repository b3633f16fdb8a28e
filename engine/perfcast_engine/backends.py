"""What is assumed about each serving framework: the constants of backends.yaml, which tells their sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from perfcast_engine.answer import F64
from perfcast_engine.data import table
from perfcast_engine.errors import Reason, UnknownName
from perfcast_engine.formula import compiled, let, scope, value

MIB = 2.0**20
GIB = 2.0**30

Coefficients = tuple[float, float, float, float]  # at a tensor-parallel width of 1, 2, 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One serving framework: its scheduler, its memory and what it can deploy."""

    name: str
    # scheduler (spec/06 section 3)
    queue: Callable[[F64, F64], F64]  # (iterations that the prompts of a batch need, batch) to TTFT over prefill time
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
    # (memory capacity, tp, pp, dp) to the fraction, instead of kv_fraction; not for aggregated engines of the reference
    kv_derived: Callable[[float, int, int, int], float] | None
    # deployment (spec/06 sections 9 and 10)
    excludes: Sequence[tuple[str, str]]  # parallel widths that may not both exceed one
    context_parallel: bool
    same_tp: bool  # prefill and decode workers need equal tensor-parallel widths


def _backend(name: str, row: dict[str, Any]) -> Backend:
    queue, derived = row["queue"], row["kv_derived"]

    def kv_derived(mem_capacity: float, tp: int, pp: int, dp: int) -> float:
        return float(let(derived, scope(mem_capacity=mem_capacity, tp=tp, pp=pp, dp=dp))["fraction"])

    made: dict[str, Any] = {
        "queue": lambda steps, batch: value(compiled(queue), scope(steps=steps, batch=batch)),
        "kv_derived": kv_derived if derived else None,
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
