"""Forward-pass metrics: the records of the ecosystem, as mappings or objects, checked as their consumers do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from perfcast_client.planner_types import RankLoad, RankPass

VERSION = 1
MAX_COUNT = 2**32 - 1
# member of the record -> field of RankPass or RankLoad
SCHEDULED = {
    "num_prefill_requests": "prefill_requests",
    "sum_prefill_tokens": "prefill_tokens",
    "sum_prefill_kv_tokens": "prefill_kv_tokens",
    "num_decode_requests": "decode_requests",
    "sum_decode_kv_tokens": "decode_kv_tokens",
}
VARIANCES = ("var_prefill_length", "var_decode_kv_tokens")
QUEUED = {
    "num_prefill_requests": "queued_prefill_requests",
    "sum_prefill_tokens": "queued_prefill_tokens",
    "num_decode_requests": "queued_decode_requests",
    "sum_decode_kv_tokens": "queued_decode_kv_tokens",
}


def member(record: Any, name: str, default: Any = 0) -> Any:
    """A member of a mapping or an object; ``default`` where it is absent."""
    value = record.get(name, default) if isinstance(record, Mapping) else getattr(record, name, default)
    return default if value is None else value


def stamped(record: Any) -> Any:
    """The record as of this version where it was written without one, which planners let pass."""
    if member(record, "version", VERSION) != 0:
        return record
    names = ("worker_id", "dp_rank", "counter_id", "wall_time", "scheduled_requests", "queued_requests")
    told = {name: member(record, name, None) for name in names}
    return {name: value for name, value in told.items() if value is not None}


def rank_pass(record: Any, position: int = 0) -> RankPass:
    """What a record says was run. Unknown members are ignored; ValueError for whatever cannot be."""
    _check(record)
    counts = _counts(member(record, "scheduled_requests", {}), SCHEDULED)
    if (counts["prefill_tokens"] or counts["prefill_kv_tokens"]) and not counts["prefill_requests"]:
        raise ValueError("invalid forward pass metrics: prefill tokens without a prefill request")
    if counts["decode_kv_tokens"] and not counts["decode_requests"]:
        raise ValueError("invalid forward pass metrics: decode KV tokens without a decode request")
    return RankPass(**counts, wall_time_s=float(member(record, "wall_time", 0.0)), dp_rank=position)


def iteration(records: Any) -> list[RankPass]:
    """The ranks of one iteration, given as one record or a list. Ranks that do not number themselves apart are numbered
    by their place."""
    ranks = list(records) if isinstance(records, Sequence) and not isinstance(records, str | bytes) else [records]
    if not ranks:
        raise ValueError("an iteration needs at least one rank")
    passes = [rank_pass(record, place) for place, record in enumerate(ranks)]
    numbers = [member(record, "dp_rank") for record in ranks]
    if len(set(numbers)) == len(numbers):
        passes = [replace(run, dp_rank=number) for run, number in zip(passes, numbers, strict=True)]
    return passes


def rank_load(record: Any) -> RankLoad:
    """What waits in one rank and what it runs, as a record says."""
    run = rank_pass(record)
    queued = _counts(member(record, "queued_requests", {}), QUEUED)
    counts = {field: getattr(run, field) for field in SCHEDULED.values()}
    return RankLoad(**queued, **counts, dp_rank=member(record, "dp_rank"))


def record_of(run: RankPass, worker_id: str = "", counter_id: int = 0) -> dict[str, Any]:
    """The JSON form of what was run."""
    return {
        "version": VERSION,
        "worker_id": worker_id,
        "dp_rank": run.dp_rank,
        "counter_id": counter_id,
        "wall_time": run.wall_time_s,
        "scheduled_requests": {name: getattr(run, field) for name, field in SCHEDULED.items()},
    }


def is_idle(ranks: Sequence[RankPass]) -> bool:
    return not any(rank.prefill_tokens or rank.decode_requests for rank in ranks)


def _check(record: Any) -> None:
    """ValueError where a record is malformed, also in what is made no use of."""
    if not isinstance(record, Mapping) and not hasattr(record, "scheduled_requests"):
        raise ValueError(f"forward pass metrics must be an object, not {record!r:.60}")
    version = _count(record, "version", default=VERSION)
    if version != VERSION:
        raise ValueError(f"forward pass metrics of version {version}; this is {VERSION}")
    if not isinstance(_known(record, "worker_id", ""), str):
        raise ValueError(f"worker_id must be text, not {member(record, 'worker_id')!r:.60}")
    _count(record, "dp_rank")
    _count(record, "counter_id", 2**64 - 1)
    _number(record, "wall_time")
    for name, counts in (("scheduled_requests", SCHEDULED), ("queued_requests", QUEUED)):
        part = _known(record, name, {})
        _counts(part, counts)
        for variance in VARIANCES:
            _number(part, variance)


def _known(part: Any, name: str, default: Any) -> Any:
    """A member that a mapping may leave out, but not set to nothing."""
    if isinstance(part, Mapping) and name in part and part[name] is None:
        raise ValueError(f"{name} must not be null")
    return member(part, name, default)


def _count(part: Any, name: str, most: int = MAX_COUNT, default: int = 0) -> int:
    value = _known(part, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a whole number in [0, 2^{most.bit_length()}), not {value!r:.60}")
    return value


def _number(part: Any, name: str) -> None:
    value = _known(part, name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, not {value!r:.60}")


def _counts(part: Any, names: Mapping[str, str]) -> dict[str, int]:
    if isinstance(part, str | bytes | int | float | Sequence):
        raise ValueError("the requests of forward pass metrics must be an object")
    return {field: _count(part, name) for name, field in names.items()}
