"""Disaggregated search: which prefill and decode workers go together, and how many of each (spec/06 section 9)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from perfcast_engine.answer import F64, Mask
from perfcast_engine.errors import InvalidField
from perfcast_engine.profiles import LISTED_GPU_COUNTS, ROUNDED_ROWS, STRICT_TARGETS, Profile

from perfcast_planning.search.grids import Pair
from perfcast_planning.search.pick import Load
from perfcast_planning.serving.disaggregated import Matching, matched_rate, paired
from perfcast_planning.serving.rows import DECIMALS, Rows, descending, first_of_group
from perfcast_planning.serving.workload import Workload

Index = NDArray[np.intp]
MAX_WORKERS = 32  # of one role in a replica
MAX_REPLICA_GPUS = 128
LARGE_EP_REPLICA_GPUS = 512
PREFILL_KEPT, DECODE_KEPT, PAIRS_KEPT, SCALED_KEPT = 32, 16, 5, 5
AT_ONCE = 1 << 21  # scores evaluated together


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """What one replica may be made of. ``gpu_counts``: GPUs it may have in all (empty: any); the pool limits apply only
    together; ``same_tp``: prefill and decode need equal tensor-parallel widths."""

    gpu_counts: tuple[int, ...] = ()
    max_gpus: int | None = None
    max_prefill_workers: int = MAX_WORKERS
    max_decode_workers: int = MAX_WORKERS
    max_prefill_gpus: int | None = None
    max_decode_gpus: int | None = None
    same_tp: bool = False

    def __post_init__(self) -> None:
        for name in ("max_prefill_workers", "max_decode_workers"):
            if getattr(self, name) < 1:
                raise InvalidField(f"replica.{name}", "must be at least 1", why="range")

    def counts(self, profile: Profile, total_gpus: int | None, large_ep: bool) -> tuple[int, ...]:
        """GPUs that a replica may have in all."""
        if self.gpu_counts:
            return self.gpu_counts
        bound = MAX_REPLICA_GPUS if self.max_gpus is None else self.max_gpus
        if large_ep:
            bound = LARGE_EP_REPLICA_GPUS
        bound = min(bound, total_gpus or bound)
        if large_ep or not profile[LISTED_GPU_COUNTS]:
            return tuple(range(1, bound + 1))
        return tuple(n for n in (1, 2, 4, *range(8, MAX_REPLICA_GPUS + 1, 8)) if n <= bound)


@dataclass(frozen=True, slots=True)
class Role:
    """Candidate workers of one role. Per row: the group that picks share, its tensor-parallel width, whether
    it is exempt from the same-TP rule."""

    rows: Rows
    group: NDArray[np.intp]
    tp: NDArray[np.intp]
    exempt: Mask

    def take(self, which: Index | Mask) -> Role:
        return Role(self.rows.take(which), self.group[which], self.tp[which], self.exempt[which])


@dataclass(frozen=True, slots=True)
class Matches:
    """Best worker counts of every decode row (D) with every prefill row (P): (D, P), score NaN where there are none."""

    score: F64  # requests per second and GPU
    gpus: F64
    prefill_workers: F64
    decode_workers: F64


def match(
    prefill: Role,
    decode: Role,
    counts: Sequence[int],
    replica: Replica,
    matching: Matching,
    wanted: Load | None = None,
) -> Matches:
    """The worker counts of each pair that serve most requests per GPU, or that carry what is ``wanted`` on the fewest
    GPUs; of equal ones the fewest workers."""
    shape = (len(decode.rows), len(prefill.rows))
    gpus_p, gpus_d = (np.broadcast_to(g, shape) for g in (prefill.rows["gpus"], decode.rows["gpus"][:, None]))
    allowed = np.ones(shape, np.bool_)
    if replica.same_tp:
        allowed = (decode.tp[:, None] == prefill.tp) | decode.exempt[:, None] | prefill.exempt
    found = Matches(*(np.full(shape, np.nan) for _ in range(4)))
    for own_p, own_d in {*zip(gpus_p[allowed].tolist(), gpus_d[allowed].tolist(), strict=True)}:
        n_p, n_d = worker_counts(own_p, own_d, counts, replica)
        if not len(n_p):
            continue
        at_d, at_p = np.nonzero(allowed & (gpus_p == own_p) & (gpus_d == own_d))
        total = own_p * n_p + own_d * n_d
        step = max(1, AT_ONCE // len(n_p))
        for start in range(0, len(at_d), step):
            d, p = at_d[start : start + step], at_p[start : start + step]
            rates = (prefill.rows["requests_per_s"][p][:, None], decode.rows["requests_per_s"][d][:, None])
            score = matched_rate(*rates, n_p, n_d, matching) / total
            if wanted is not None:
                carried = decode.rows["concurrency"][d][:, None] * n_d
                score = _by_load(wanted, score * total, carried, rates, n_p, n_d, matching) / total
            best = np.argmax(score, axis=1)
            top = score[np.arange(len(best)), best]
            found.score[d, p] = np.where(top > 0, top, np.nan)
            found.gpus[d, p], found.prefill_workers[d, p], found.decode_workers[d, p] = (
                values[best] for values in (total, n_p, n_d)
            )
    return found


def _by_load(
    wanted: Load, rate: F64, in_flight: F64, rates: tuple[F64, F64], n_p: F64, n_d: F64, matching: Matching
) -> F64:
    """One over the replicas that carry the load; 0 where prefill cannot feed what is in flight."""
    if wanted.request_rate is not None:
        return 1 / np.maximum(1, np.ceil(np.divide(wanted.request_rate, rate)))
    fed = rates[0] * n_p * matching.prefill_degradation >= rates[1] * n_d * matching.decode_degradation
    assert wanted.concurrency is not None
    return fed / np.maximum(1, np.ceil(wanted.concurrency / in_flight))


def worker_counts(gpus_p: float, gpus_d: float, counts: Sequence[int], replica: Replica) -> tuple[F64, F64]:
    """(prefill, decode) worker counts of replicas that are allowed, fewest decode workers first."""
    n_d, n_p = (
        grid.ravel()
        for grid in np.meshgrid(
            np.arange(1, replica.max_decode_workers + 1),
            np.arange(1, replica.max_prefill_workers + 1),
            indexing="ij",
        )
    )
    keep = np.ones(len(n_d), np.bool_)
    if counts:
        keep &= np.isin(gpus_p * n_p + gpus_d * n_d, counts)
    if replica.max_prefill_gpus is not None and replica.max_decode_gpus is not None:
        keep &= (gpus_p * n_p <= replica.max_prefill_gpus) & (gpus_d * n_d <= replica.max_decode_gpus)
    return n_p[keep].astype(np.float64), n_d[keep].astype(np.float64)


def swept(
    prefill: Role,
    decode: Role,
    counts: Sequence[int],
    replica: Replica,
    load: Workload,
    matching: Matching,
    pairs: Sequence[Pair],
) -> Rows:
    """The reference's sweep: under each target the best pairs of a shortlist, one per decode mapping, five in all."""
    prefill = prefill.take(prefill.rows.order("-requests_per_s_per_gpu", "concurrency"))
    decode = decode.take(np.argsort(decode.group, kind="stable"))
    lists = _shortlists(prefill, decode, pairs)
    if not lists:
        return Rows({})
    all_p, all_d = (np.unique(np.concatenate([chosen[side] for chosen in lists])) for side in (0, 1))
    prefill, decode = prefill.take(all_p), decode.take(all_d)
    found = match(prefill, decode, counts, replica, matching)
    rates = (prefill.rows["requests_per_s"], decode.rows["requests_per_s"][:, None])
    rate = matched_rate(*rates, found.prefill_workers, found.decode_workers, matching)
    value = rate * load.osl / found.gpus
    best_p, best_d = [], []
    for p, d in lists:
        at_d, at_p = (
            grid.ravel() for grid in np.meshgrid(np.searchsorted(all_d, d), np.searchsorted(all_p, p), indexing="ij")
        )
        good = ~np.isnan(value[at_d, at_p])
        at_d, at_p = at_d[good], at_p[good]
        first = first_of_group(decode.group[at_d], -value[at_d, at_p], found.gpus[at_d, at_p])
        kept = first[descending(np.round(value[at_d[first], at_p[first]], DECIMALS))[:PAIRS_KEPT]]
        best_p.append(at_p[kept])
        best_d.append(at_d[kept])
    rows = _pairs(prefill, decode, found, np.concatenate(best_p), np.concatenate(best_d), load, matching)
    return rows.rounded().distinct()


def _shortlists(prefill: Role, decode: Role, pairs: Sequence[Pair]) -> list[tuple[Index, Index]]:
    """Per target the best prefill rows and, of every group, the best decode rows that meet it; repetitions left out."""
    bounds = np.flatnonzero(np.diff(decode.group, prepend=-1, append=decode.group[-1] + 1))
    rate, tpot = decode.rows["requests_per_s_per_gpu"], decode.rows["tpot_ms"]
    lists: list[tuple[Index, Index]] = []
    best: dict[bytes, Index] = {}  # of a group, by which of its rows meet the target
    for ttft_limit, tpot_limit in pairs:
        p = np.flatnonzero(prefill.rows["ttft_ms"] < ttft_limit)[:PREFILL_KEPT]
        fits = (tpot > 0) & (tpot < tpot_limit)
        chosen = []
        for low, high in pairwise(bounds):
            key = low.tobytes() + fits[low:high].tobytes()
            if key not in best:
                members = low + np.flatnonzero(fits[low:high])
                best[key] = members[descending(rate[members])[:DECODE_KEPT]]
            chosen.append(best[key])
        d = np.concatenate(chosen)
        if len(p) and len(d) and not (lists and all(map(np.array_equal, lists[-1], (p, d)))):
            lists.append((p, d))
    return lists


def every_pair(
    prefill: Role,
    decode: Role,
    counts: Sequence[int],
    replica: Replica,
    load: Workload,
    matching: Matching,
    wanted: Load | None = None,
) -> Rows:
    """Every decode row with every prefill row that no other beats in TTFT and rate at the same size."""
    prefill = useful(prefill, "ttft_ms")
    found = match(prefill, decode, counts, replica, matching, wanted)
    at_d, at_p = np.nonzero(~np.isnan(found.score))
    return _pairs(prefill, decode, found, at_p, at_d, load, matching)


def scaled_apart(
    prefill: Role, decode: Role, ttft: float, tpot: float, load: Workload, matching: Matching, profile: Profile
) -> Rows:
    """For pools that an autoscaler sizes by themselves: the best engines of each role by rate per GPU, one of each."""
    chosen = []
    for role, latency, limit, tie in ((prefill, "ttft_ms", ttft, ("concurrency",)), (decode, "tpot_ms", tpot, ())):
        keys = ("-requests_per_s_per_gpu", *tie)
        fits = np.flatnonzero(_below(role.rows[latency], limit, profile))
        if not len(fits):
            fits, keys = np.arange(len(role.rows)), (latency, "-requests_per_s_per_gpu")
        best = role.take(fits)
        best = best.take(best.rows.order(*keys))
        first = np.sort(np.unique(best.group, return_index=True)[1])[:SCALED_KEPT]
        chosen.append(best.take(first))
    p, d = chosen
    at_p, at_d = np.tile(np.arange(len(p.rows)), len(d.rows)), np.repeat(np.arange(len(d.rows)), len(p.rows))
    ones = np.ones((len(d.rows), len(p.rows)))
    found = Matches(ones, ones, ones, ones)
    rows = _pairs(p, d, found, at_p, at_d, load, matching)
    rows = rows.rounded() if profile[ROUNDED_ROWS] else rows
    return rows.take(rows.order("-tokens_per_s_per_gpu")[:SCALED_KEPT])


def _pairs(
    prefill: Role,
    decode: Role,
    found: Matches,
    at_p: Index,
    at_d: Index,
    load: Workload,
    matching: Matching,
) -> Rows:
    p, d = prefill.rows.take(at_p), decode.rows.take(at_d)
    rows = paired(p, d, found.prefill_workers[at_d, at_p], found.decode_workers[at_d, at_p], load, matching)
    extra = {}
    if "cell_engines" in p:
        extra = {name: p[name] for name in p.columns if name.startswith("encode_")}
        extra["prefill_workers"] = p["cell_engines"]
    return rows.with_(prefill_engine=p["engine"], decode_engine=d["engine"], **extra)


def _below(latency: F64, limit: float, profile: Profile) -> Mask:
    return latency < limit if profile[STRICT_TARGETS] else latency <= limit


def useful(role: Role, latency: str) -> Role:
    """Without the rows that another row of equal GPUs and tensor-parallel width beats in both ``latency`` and rate."""
    rate = role.rows["requests_per_s"]
    kind = np.stack([role.rows["gpus"], role.tp, role.exempt], axis=1)
    group = np.unique(kind, axis=0, return_inverse=True)[1].ravel()
    rank = np.unique(rate, return_inverse=True)[1]
    order = np.lexsort((-rank, role.rows[latency], group))
    level = group[order] * len(order) + rank[order]  # rises with every row that is faster than all before in its group
    best = np.maximum.accumulate(level)
    return role.take(np.sort(order[np.concatenate([[True], best[1:] > best[:-1]])]))
