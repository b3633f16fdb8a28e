"""Which rows to recommend: fronts, picks by throughput, by load, by objective (spec/06 section 11)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from perfcast_engine.answer import F64, Mask
from perfcast_engine.errors import InvalidField
from perfcast_engine.profiles import VIOLATING_PICKS, Profile

from perfcast_planning.serving.rows import Rows, first_of_group
from perfcast_planning.serving.workload import Targets

Index = NDArray[np.intp]
SCORE = "tokens_per_s_per_gpu_cluster"


class Objective(Enum):
    THROUGHPUT = "throughput"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Load:
    """Traffic to serve: exactly one of requests per second and concurrent requests, on at most ``max_gpus``."""

    request_rate: float | None = None
    concurrency: float | None = None
    max_gpus: int | None = None

    def __post_init__(self) -> None:
        given = [v for v in (self.request_rate, self.concurrency) if v is not None]
        if len(given) != 1 or not 0 < given[0] < math.inf:
            raise InvalidField("load", "give exactly one of a request rate and a concurrency, positive", why="load")
        if self.max_gpus is not None and self.max_gpus < 1:
            raise InvalidField("load.max_gpus", "must be at least 1", why="range")


@dataclass(frozen=True, slots=True)
class Pick:
    """Recommended rows, best first. ``score``: cluster throughput of the first, or the inverse of its GPUs where a load
    is matched; ``eligible``: they meet every target."""

    rows: Rows
    score: float
    eligible: bool


@dataclass(frozen=True, slots=True)
class Violation:
    """How far a row misses one target."""

    target: str
    limit: float
    value: float

    @property
    def excess(self) -> float:
        """Share of the limit by which it is missed."""
        return self.value / self.limit - 1


def cluster_throughput(rows: Rows, total_gpus: int | None) -> F64:
    """Tokens per second and GPU of the whole budget, the GPUs that whole replicas leave idle counted."""
    each, gpus = rows["tokens_per_s_per_gpu"], rows["gpus"]
    return each if total_gpus is None else each * np.floor_divide(total_gpus, gpus) * gpus / total_gpus


def front(rows: Rows, score: F64, targets: Targets, strict: bool = False) -> Index:
    """Rows that no other row equals or beats in both the user's speed (or the request latency) and ``score``, by speed.

    ``strict``: rows beyond the TPOT (or request-latency) target are left out first.
    """
    whole = targets.request_latency_ms is not None
    speed = rows["request_latency_ms"] if whole else rows["tokens_per_s_per_user"]
    keep = np.isfinite(speed) & np.isfinite(score)
    if strict:
        keep &= _meets_speed(rows, targets)
    where = np.flatnonzero(keep)
    good = -speed[where] if whole else speed[where]
    order = where[np.lexsort((-score[where], -good))]  # fastest first, of equally fast ones the best
    best = np.maximum.accumulate(np.concatenate([[-np.inf], score[order]]))
    kept = order[score[order] > best[:-1]]
    return kept if whole else kept[::-1]


def _meets_speed(rows: Rows, targets: Targets) -> Mask:
    if targets.request_latency_ms is not None:
        return rows["request_latency_ms"] <= targets.request_latency_ms
    return rows["tpot_ms"] <= targets.tpot_ms


def violations(rows: Rows, targets: Targets) -> dict[str, F64]:
    """By target, the share of its limit by which each row misses it; 0 where it meets it."""
    limits = {"ttft_ms": targets.ttft_ms}
    if targets.request_latency_ms is None:
        limits["tpot_ms"] = targets.tpot_ms
    else:
        limits["request_latency_ms"] = targets.request_latency_ms
    return {n: np.maximum(rows[n] / limit - 1, 0.0) for n, limit in limits.items() if limit is not None}


def closest(rows: Rows, targets: Targets) -> tuple[int, list[Violation]]:
    """The row that misses the targets least (by the worst share, then by their sum), and what it misses."""
    shares = np.stack(list(violations(rows, targets).values()))
    index = int(np.lexsort((shares.sum(axis=0), shares.max(axis=0)))[0])
    missed = [
        Violation(name, float(getattr(targets, name)), float(rows[name][index]))
        for name, share in violations(rows, targets).items()
        if share[index] > 0
    ]
    return index, missed


def eligible(rows: Rows, targets: Targets, profile: Profile) -> Mask:
    """Rows a pick may choose from; the reference does not look at TTFT again."""
    if profile[VIOLATING_PICKS]:
        return _meets_speed(rows, targets)
    meets = np.ones(len(rows), np.bool_)
    for share in violations(rows, targets).values():
        meets &= share <= 0
    return meets


def pick(rows: Rows, group: Index, targets: Targets, total_gpus: int | None, top: int, profile: Profile) -> Pick:
    """The best rows by cluster throughput that meet the targets, one per ``group``."""
    score = cluster_throughput(rows, total_gpus)
    rows = rows.with_(**{SCORE: score})
    fits, usable = eligible(rows, targets, profile), np.isfinite(score)
    constraint = "tpot_ms" if targets.request_latency_ms is None else "request_latency_ms"
    fallback = not fits.any()
    if fallback and not profile[VIOLATING_PICKS]:
        return Pick(rows.take(fits), 0.0, False)
    where = np.flatnonzero(usable if fallback else usable & fits)
    where = where[first_of_group(group[where], -score[where], rows["gpus"][where], rows["tpot_ms"][where])]
    chosen = rows.take(where)
    if fallback:
        chosen = chosen.sorted(constraint, "gpus")
    else:
        second = "request_latency_ms" if targets.request_latency_ms is not None else "-tokens_per_s_per_user"
        chosen = chosen.sorted("-" + SCORE, second, "gpus", "tpot_ms")
    chosen = chosen.take(slice(top))
    return Pick(chosen, float(chosen[SCORE][0]) if len(chosen) else 0.0, _all_meet(chosen, targets))


def pick_for_load(rows: Rows, group: Index, targets: Targets, load: Load, top: int, profile: Profile) -> Pick:
    """The rows that serve ``load`` on the fewest GPUs, one per ``group``; within ``load.max_gpus`` where that suffices,
    else what serves most of the load on those."""
    per_replica = rows["requests_per_s"] if load.request_rate is not None else rows["concurrency"]
    asked = load.request_rate if load.request_rate is not None else load.concurrency
    assert asked is not None
    fits = eligible(rows, targets, profile) & (per_replica > 0)
    fallback = not fits.any()
    if fallback and not profile[VIOLATING_PICKS]:
        return Pick(rows.take(fits), 0.0, False)
    where = np.flatnonzero(per_replica > 0 if fallback else fits)
    rows, group = rows.take(where), group[where]
    wanted = np.maximum(1, np.ceil(asked / per_replica[where]))
    size, each = rows["gpus"], rows["tokens_per_s_per_gpu"]
    capped = False
    replicas, served, score = wanted, np.full(len(rows), 100.0), each
    if load.max_gpus is not None:
        inside = wanted * size <= load.max_gpus
        capped = not inside.any()
        if capped:
            replicas = np.maximum(1, np.floor_divide(load.max_gpus, size))
            served = np.round(100 * replicas / wanted, 1)
            score = each * replicas * size / load.max_gpus
        else:
            rows, group, replicas = rows.take(inside), group[inside], wanted[inside]
            served, score, size = served[inside], score[inside], size[inside]
    rows = rows.with_(**{SCORE: score, "replicas": replicas, "gpus_needed": replicas * size, "load_served_pct": served})
    if capped:
        rows, group = _within(rows, group, load.max_gpus, profile)
    constraint = "tpot_ms" if targets.request_latency_ms is None else "request_latency_ms"
    keys = [constraint] if fallback else ["-" + SCORE] if capped else ["gpus_needed", "-tokens_per_s_per_gpu"]
    rows = _first(rows, group, (*keys, "gpus", "tpot_ms"), top)
    if not len(rows):
        return Pick(rows, 0.0, False)
    needed = float(rows["gpus_needed"][0])
    at_cap = load.max_gpus is not None and needed >= load.max_gpus
    return Pick(rows, float(rows[SCORE][0]) if at_cap else 1 / needed, _all_meet(rows, targets))


def _within(rows: Rows, group: Index, max_gpus: int | None, profile: Profile) -> tuple[Rows, Index]:
    """Without the rows of which not even one replica fits; the reference keeps them."""
    if profile[VIOLATING_PICKS] or max_gpus is None:
        return rows, group
    keep = rows["gpus"] <= max_gpus
    return rows.take(keep), group[keep]


def pick_by_objective(rows: Rows, group: Index, objective: Objective, total_gpus: int | None, top: int) -> Pick:
    """The best rows by one objective whatever the targets, one per ``group``."""
    rows = rows.with_(**{SCORE: cluster_throughput(rows, total_gpus)})
    keys = ("-" + SCORE, "tpot_ms") if objective is Objective.THROUGHPUT else ("tpot_ms", "-" + SCORE)
    chosen = _first(rows, group, (*keys, "gpus"), top)
    return Pick(chosen, float(chosen[SCORE][0]) if len(chosen) else 0.0, True)


def _first(rows: Rows, group: Index, keys: Sequence[str], top: int) -> Rows:
    """The first ``top`` rows by ``keys``, one of each group."""
    order = rows.order(*keys)
    return rows.take(order[np.sort(np.unique(group[order], return_index=True)[1])[:top]])


def _all_meet(rows: Rows, targets: Targets) -> bool:
    return len(rows) > 0 and all(bool((share <= 0).all()) for share in violations(rows, targets).values())
