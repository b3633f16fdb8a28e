"""One deployment, asked once: latencies, rates, memory and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from perfcast_engine.answer import Mask
from perfcast_engine.errors import InvalidField, OutOfMemory
from perfcast_engine.memory import Footprint
from perfcast_engine.profiles import (
    FIRST_TOKEN_FREE,
    FIXED_KV_FRACTION,
    LATENCY_CORRECTIONS,
    ROUNDED_ROWS,
    SINGLE_POINT_TTFT,
)
from perfcast_engine.step import DEFAULT_STRIDE
from perfcast_engine.step_result import StepResult

from perfcast_planning.serving.afd import MATCHING, Topology, afd
from perfcast_planning.serving.aggregated import aggregated
from perfcast_planning.serving.disaggregated import USUAL_MATCHING, Matching, paired, with_transfer
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.static import Phases, speculated, static
from perfcast_planning.serving.worker import Worker
from perfcast_planning.serving.workload import DEFAULTS, NO_TRANSFER, EngineLimits, KvTransfer, Workload


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory of one role: its footprint (N,), the KV budget in bytes (N,), and what it exceeds."""

    capacity_bytes: float
    memory: Footprint
    kv_fraction: float
    kv_budget_bytes: np.ndarray
    out_of_memory: Mask
    kv_over_budget: Mask


@dataclass(frozen=True, slots=True)
class Estimate:
    """What N configurations of one kind achieve. ``fit`` and ``steps`` by role: engine, or prefill and decode."""

    profile: str
    rows: Rows
    fit: Mapping[str, Fit]
    steps: Mapping[str, StepResult]

    def require_fit(self, kv: bool = True) -> Estimate:
        """Raises OutOfMemory where a role does not fit its GPU or, with ``kv``, its KV cache the budget."""
        for role, fit in self.fit.items():
            for what, bad, needed, limit in (
                ("memory", fit.out_of_memory, fit.memory.total, np.full_like(fit.kv_budget_bytes, fit.capacity_bytes)),
                ("KV cache", fit.kv_over_budget & kv, fit.memory.kv, fit.kv_budget_bytes),
            ):
                for at in np.flatnonzero(bad)[:1]:
                    raise OutOfMemory(
                        f"{role}: {what} of {needed[at]:.0f} bytes exceeds {limit[at]:.0f}",
                        role=role,
                        needed_bytes=f"{needed[at]:.0f}",
                        limit_bytes=f"{limit[at]:.0f}",
                    )
        return self


def fit_of(worker: Worker, memory: Footprint, fraction: float | None, aggregated: bool) -> Fit:
    """Whether ``memory`` fits; ``aggregated`` engines of the reference have a KV fraction of their own."""
    model = worker.memory
    share = model.kv_fraction(fraction, fixed=aggregated and worker.profile[FIXED_KV_FRACTION])
    out, over = model.verdict(memory, share)
    return Fit(model.capacity, memory, share, model.kv_budget(memory.fixed, share), out, over)


def estimate_static(
    worker: Worker,
    load: Workload,
    batch: int,
    phases: Phases = Phases.BOTH,
    limits: EngineLimits = DEFAULTS,
    *,
    correction: float = 1.0,
    stride: int = DEFAULT_STRIDE,
    beam: int = 1,
    operators: bool = False,
) -> Estimate:
    """One static batch per rank. Raises InvalidField, PerfDataMissing and what else a step raises."""
    limits.check(worker.step.nextn)
    served = static(
        worker,
        load,
        batch,
        phases,
        correction=correction,
        stride=stride,
        beam=beam,
        max_seq_len=limits.max_seq_len,
        operators=operators,
    ).raise_first()
    rows = speculated(served.rows, phases, load, limits.accepted)
    fit = {"engine": fit_of(worker, served.memory, limits.memory_fraction, False)}
    return Estimate(worker.profile.name, rows, fit, served.steps)


def estimate_aggregated(
    worker: Worker,
    load: Workload,
    batch: int,
    ctx_tokens: int | None = None,
    limits: EngineLimits = DEFAULTS,
    *,
    operators: bool = False,
) -> Estimate:
    """One in-flight batch per rank, by default with prefill iterations as long as a prompt."""
    served = aggregated(
        worker,
        load,
        batch,
        worker.prompt_tokens(load) if ctx_tokens is None else ctx_tokens,
        limits,
        told=True,
        operators=operators,
    ).raise_first()
    fit = {"engine": fit_of(worker, served.memory, limits.memory_fraction, True)}
    return Estimate(worker.profile.name, served.rows, fit, served.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The engines of one role: ``workers`` alike, ``batch`` requests per rank on each. A decode pool may be ``cut``:
    each of its workers is then a topology of attention workers (``worker``) and of FFN ranks."""

    worker: Worker
    batch: int
    workers: int
    limits: EngineLimits = DEFAULTS
    cut: tuple[Worker, Topology] | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "workers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidField(name, f"must be a whole number of at least 1, not {value!r:.40}", why="range")


def estimate_disaggregated(
    prefill: Pool,
    decode: Pool,
    load: Workload,
    matching: Matching | None = None,
    kv_transfer: KvTransfer = NO_TRANSFER,
    *,
    corrections: tuple[float, float] | None = None,
    operators: bool = False,
) -> Estimate:
    """One pair of pools. ``corrections`` multiply prefill and decode latencies, ``matching`` joins pools; by default
    both are as the profile has them for a single point."""
    if prefill.worker.layers != decode.worker.layers:
        raise InvalidField("decode.model", "prefill and decode must run the same model", why="model")
    profile = prefill.worker.profile
    prefill_factor, decode_factor = corrections or profile[LATENCY_CORRECTIONS]
    rows: list[Rows] = []
    fit: dict[str, Fit] = {}
    steps: dict[str, StepResult] = {}
    for role, pool, phases, factor in (
        ("prefill", prefill, Phases.PREFILL, prefill_factor),
        ("decode", decode, Phases.DECODE, decode_factor),
    ):
        pool.limits.check(pool.worker.step.nextn)
        if pool.cut is not None:
            if pool.limits.accepted:
                raise InvalidField("nextn_accepted", "is not modelled where attention and FFN decode apart", why="afd")
            ffn, topology = pool.cut
            found, own, other = afd(pool.worker, ffn, topology, load, pool.batch)
            rows.append(found)
            for part, worker, memory in ((role, pool.worker, own), ("ffn", ffn, other)):
                fit[part] = fit_of(worker, memory, pool.limits.memory_fraction, False)
            continue
        served = static(pool.worker, load, pool.batch, phases, correction=factor, operators=operators).raise_first()
        rows.append(side_rows(served.rows, pool.worker, load, phases, pool.limits.accepted))
        fit[role] = fit_of(pool.worker, served.memory, pool.limits.memory_fraction, False)
        steps |= served.steps
    if matching is None and decode.cut is not None:
        matching = MATCHING
    elif matching is None:
        matching = Matching(ttft_factor=1.0) if profile[SINGLE_POINT_TTFT] else USUAL_MATCHING
    first = with_transfer(rows[0], prefill.worker, load, kv_transfer, matching.ttft_factor)
    return Estimate(profile.name, paired(first, rows[1], prefill.workers, decode.workers, load, matching), fit, steps)


def side_rows(rows: Rows, worker: Worker, load: Workload, phases: Phases, accepted: float) -> Rows:
    """Rows of one role as rates are matched on them; the reference rounds before and after draft tokens count.

    Where there is nothing to decode, decode never is the bottleneck.
    """
    if phases is Phases.DECODE and load.osl == 1 and not worker.profile[FIRST_TOKEN_FREE]:
        return rows.with_(requests_per_s=np.full(len(rows), np.inf))
    if not worker.profile[ROUNDED_ROWS]:
        return speculated(rows, phases, load, accepted)
    return speculated(rows.rounded(), phases, load, accepted).rounded()
