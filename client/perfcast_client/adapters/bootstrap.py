"""Iterations with their times for a planner that starts, in the form of a worker's own benchmark (spec/07 8.2)."""

from __future__ import annotations

from typing import Any

from perfcast_client import planner
from perfcast_client.adapters import fpm
from perfcast_client.adapters.asking import Adapter, C, as_value_error
from perfcast_client.errors import PerfcastError
from perfcast_client.planner_types import Bootstrap, RankPass
from perfcast_client.record import EngineLike
from perfcast_client.turns import Steps

WORKER = "bootstrap"


def bootstrap_fpms(client: C, engine: EngineLike, *, grouped: bool | None = None, **sweep: Any) -> Any:
    """Forward-pass metrics of a sweep (see ``planner.bootstrap`` for its fields); awaitable with an ``AsyncClient``.

    grouped: a list per iteration with the record of each attention-DP rank, or flat records, which for an attention-DP
    engine are sums over its ranks. None: grouped where there is more than one rank.
    """

    def asked(_: Any) -> Steps[list[Any]]:
        swept = yield from _swept(engine, sweep)
        groups = swept.attention_dp > 1 if grouped is None else grouped
        if groups:
            return [[fpm.record_of(rank, WORKER, number) for rank in point.ranks] for number, point in _numbered(swept)]
        return [fpm.record_of(whole(point.ranks), WORKER, number) for number, point in _numbered(swept)]

    adapter = Adapter(client)
    return adapter._run(asked(adapter))


def benchmark(client: C, engine: EngineLike, **sweep: Any) -> Any:
    """The same as a worker's benchmark endpoint tells it: ``{"results": [{"point": ..., "fpms": [...]}, ...]}``."""

    def asked(_: Any) -> Steps[dict[str, Any]]:
        swept = yield from _swept(engine, sweep)
        return {
            "results": [
                {
                    "point": {"point_type": point.point_type},
                    "fpms": [fpm.record_of(rank, WORKER, number) for rank in point.ranks],
                }
                for number, point in _numbered(swept)
            ]
        }

    adapter = Adapter(client)
    return adapter._run(asked(adapter))


def whole(ranks: tuple[RankPass, ...]) -> RankPass:
    """One record for an iteration: a prompt counts as on one rank, decodes are summed up."""
    first = ranks[0]
    if first.prefill_tokens:
        return first
    return RankPass(
        decode_requests=sum(rank.decode_requests for rank in ranks),
        decode_kv_tokens=sum(rank.decode_kv_tokens for rank in ranks),
        wall_time_s=max(rank.wall_time_s for rank in ranks),
    )


def _swept(engine: EngineLike, sweep: dict[str, Any]) -> Steps[Bootstrap]:
    try:
        swept: Bootstrap = yield planner.bootstrap(engine, **sweep)
    except PerfcastError as error:
        raise as_value_error(error) from None
    return swept


def _numbered(swept: Bootstrap) -> Any:
    return enumerate(swept.points, start=1)
