"""Live ranks, observed iterations, limits and roles: from messages to the planner's types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np
from perfcast.v1 import common_pb2, planner_pb2
from perfcast_engine.errors import InvalidField
from perfcast_planning.planner.engine_work import EngineLimits, EngineRole, RankLoads
from perfcast_planning.planner.queries import Scenario
from perfcast_planning.planner.telemetry import MAX_COUNT, Iterations, RankRecord

from perfcast_server.engines import Ready
from perfcast_server.errors import ServiceError, invalid
from perfcast_server.settings import Settings

MAX_RANKS = 4096
ROLES = {
    common_pb2.ROLE_BOTH: EngineRole.AGGREGATED,
    common_pb2.ROLE_PREFILL: EngineRole.PREFILL,
    common_pb2.ROLE_DECODE: EngineRole.DECODE,
}
OF_CONFIG = {"both": EngineRole.AGGREGATED, "prefill": EngineRole.PREFILL, "decode": EngineRole.DECODE}
LOADS = RankLoads.__slots__
LIMITS = {
    "max_num_batched_tokens": "max_num_batched_tokens_per_rank",
    "max_num_seqs": "max_num_seqs_total",
    "max_kv_tokens": "max_kv_tokens_total",
    "attention_dp": "attention_dp",
}
LOAD, RECORD = attrgetter(*LOADS), attrgetter(*RankRecord._fields)


@contextmanager
def named(path: str, names: Mapping[str, str] = {}) -> Iterator[None]:
    """Tell a field that the engine refuses by its path in the request. ``names``: where the contract's differ."""
    try:
        yield
    except InvalidField as error:
        own = error.details["field"]
        field = f"{path}.{names.get(own, own)}".lstrip(".")
        told = error.message.removeprefix(f"{own}: ").removeprefix(f"{own} ")
        raise invalid(field, told) from None


def role_of(number: int, ready: Ready | None) -> EngineRole:
    if number == common_pb2.ROLE_UNSPECIFIED:
        return EngineRole.AGGREGATED if ready is None else OF_CONFIG[ready.engine.config.role]
    if number not in ROLES:
        raise invalid("role", f"has the unknown value {number}")
    return ROLES[number]  # type: ignore[index]


def limits_of(message: planner_pb2.SchedulerLimits, ready: Ready | None) -> EngineLimits:
    ranks = message.attention_dp
    if ready is not None:
        own = ready.engine.config.parallel.attn_dp
        if ranks not in (0, own):
            raise invalid("limits.attention_dp", f"is {ranks}, but the engine has {own} ranks")
        ranks = own
    elif ranks > MAX_RANKS:
        raise invalid("limits.attention_dp", f"must be at most {MAX_RANKS}")
    given = {name: value for name, field in LIMITS.items() if (value := getattr(message, field))}
    with named("limits", LIMITS):
        return EngineLimits(**given | {"attention_dp": ranks or 1})


def iterations_of(messages: Iterable[planner_pb2.Iteration]) -> Iterations:
    told = []
    for number, message in enumerate(messages):
        if not message.ranks:
            raise invalid(f"iterations[{number}].ranks", "is empty")
        if len({rank.dp_rank for rank in message.ranks}) != len(message.ranks):
            raise invalid(f"iterations[{number}].ranks", "holds a dp_rank twice")
        told.append([RankRecord._make(RECORD(rank)) for rank in message.ranks])
    with named(""):
        return Iterations.of(told)


Rows = list[list[int]]


def rank_rows(ranks: Sequence[planner_pb2.RankLoad], limits: EngineLimits) -> Rows:
    """The loads of one engine's ranks by number, each a row in the order of LOADS; refused if not all are there."""
    count = limits.attention_dp
    if len(ranks) != count:
        raise invalid("ranks", f"needs all {count} attention-DP ranks of an engine, not {len(ranks)}")
    if count > 1:
        ranks = sorted(ranks, key=lambda rank: rank.dp_rank)
        if [rank.dp_rank for rank in ranks] != list(range(count)):
            raise invalid("ranks", f"must have each dp_rank from 0 to {count - 1} once")
    rows = [list(LOAD(rank)) for rank in ranks]
    for number, row in enumerate(rows):
        if not 0 <= min(row) <= max(row) <= MAX_COUNT:
            name = next(name for name, value in zip(LOADS, row, strict=True) if not 0 <= value <= MAX_COUNT)
            raise invalid(f"ranks[{number}].{name}", "must be a whole number in [0, 2^32)")
        if (row[8] and not row[7]) or ((row[5] or row[6]) and not row[4]):
            raise invalid(f"ranks[{number}]", "has tokens without a request")
    return rows


def loads_of(workers: Sequence[Rows]) -> RankLoads:
    table = np.array(workers, np.float64)
    return RankLoads(*(table[:, :, column] for column in range(len(LOADS))))


def scenario_of(message: planner_pb2.Scenario, path: str) -> Scenario:
    given: dict[str, Any] = {
        name: getattr(message, name)
        for name in ("kv_hit_rate", "next_prompt_tokens", "next_decode_kv_tokens", "drain_beside_queued_decodes",
                     "itl_with_queued_decodes", "itl_with_queued_prompts")
    }  # fmt: skip
    for name in ("queue_scale", "decode_scale"):
        if message.HasField(name):
            given[name] = getattr(message, name)
    with named(path):
        return Scenario(**given, itl_with_scheduled_prefill=not message.itl_with_usual_prefill_only)


def check_points(points: int, settings: Settings) -> None:
    limit = settings.max_points_per_request
    if points > limit:
        raise ServiceError("LIMIT", f"{points} ranks, more than {limit}", limit="max_points_per_request", retry="no")


def check_count(count: int, most: int, what: str) -> None:
    if count > most:
        raise ServiceError("LIMIT", f"{count} {what}, more than {most}; ask in parts", limit=what, retry="no")


def usual(value: float, path: str) -> float:
    if not 0 <= value <= MAX_COUNT:
        raise invalid(path, "must be a number in [0, 2^32)")
    return value
