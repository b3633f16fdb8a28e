"""Forward-pass metrics: the records of the ecosystem, as mappings or objects, checked as their consumers do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def rank_pass(record: Any, position: int = 0) -> RankPass:
    """What a record says was run. Unknown members are ignored; ValueError for whatever cannot be."""
    _check(record)
    counts = _counts(member(record, "scheduled_requests", {}), SCHEDULED)
    if (counts["prefill_tokens"] or counts["prefill_kv_tokens"]) and not counts["prefill_requests"]:
        raise ValueError("invalid forward pass metrics: prefill tokens without a prefill request")
    if counts["decode_kv_tokens"] and not counts["decode_requests"]:
        raise ValueError("invalid forward pass metrics: decode KV tokens without a decode request")
    wall = member(record, "wall_time", 0.0)
    if isinstance(wall, bool) or not isinstance(wall, int | float):
        raise ValueError(f"wall_time must be a number of seconds, not {wall!r}")
    return RankPass(**counts, wall_time_s=float(wall), dp_rank=position)


def iteration(records: Any) -> list[RankPass]:
    """The ranks of one iteration, given as one record or a list. Ranks that do not number themselves apart are numbered
    by their place."""
    ranks = list(records) if isinstance(records, Sequence) and not isinstance(records, str | bytes) else [records]
    if not ranks:
        raise ValueError("an iteration needs at least one rank")
    passes = [rank_pass(record, place) for place, record in enumerate(ranks)]
    numbers = [member(record, "dp_rank") for record in ranks]
    if len(set(numbers)) == len(numbers) and all(isinstance(n, int) and 0 <= n <= MAX_COUNT for n in numbers):
        passes = [rank_pass(record, number) for record, number in zip(ranks, numbers, strict=True)]
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
    if not isinstance(record, Mapping) and not hasattr(record, "scheduled_requests"):
        raise ValueError(f"forward pass metrics must be an object, not {record!r:.60}")
    if member(record, "version", VERSION) != VERSION:
        raise ValueError(f"forward pass metrics of version {member(record, 'version')!r}; this is {VERSION}")


def _counts(part: Any, names: Mapping[str, str]) -> dict[str, int]:
    if isinstance(part, str | bytes | int | float | Sequence):
        raise ValueError("the requests of forward pass metrics must be an object")
    counts = {}
    for name, field in names.items():
        value = member(part, name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
            raise ValueError(f"{name} must be a whole number in [0, 2^32), not {value!r}")
        counts[field] = value
    return counts
