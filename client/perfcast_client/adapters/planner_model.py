"""The planner's performance model: policy above the engine queries (spec/07 section 5.4)."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfcast_client.adapters import fpm
from perfcast_client.adapters.asking import Adapter, C, asking
from perfcast_client.adapters.engine_queries import (
    EngineCapacityRequest,
    EnginePerfLimits,
    EngineQueries,
    MovingAverage,
)
from perfcast_client.adapters.forward_pass import ForwardPassPerfModel
from perfcast_client.adapters.records import options_of
from perfcast_client.planner_types import RankLoad
from perfcast_client.turns import Steps

log = logging.getLogger("perfcast.planner")

LIMITS = {"max_num_batched_tokens": 8192, "max_num_seqs": 512, "max_kv_tokens": 2_000_000}
MAX_KV_HIT_RATE = 0.95
COLD_START_FACTOR = 1.15
FAULTS = (ValueError, TypeError, RuntimeError)
PICKS = {"tp_size": "tp", "pp_size": "pp", "moe_tp_size": "moe_tp", "moe_ep_size": "moe_ep", "attention_dp_size": "dp"}
DTYPES = ("weight_dtype", "moe_dtype", "activation_dtype", "kv_cache_dtype")


@dataclass(frozen=True)
class PlannerEngineCapacity:
    rps: float
    ttft_ms: float | None = None
    itl_ms: float | None = None
    e2e_latency_ms: float | None = None
    eligible: bool = True


class PlannerPerfModel(Adapter[C]):
    """What a planner asks of the engines of one role. Every fault is a warning and None: no answer this tick.

    ``config`` and ``capabilities`` are the planner's own, as objects or mappings; without capabilities nothing is
    ready, and when they change, the model is made anew and learns the retained history again. ``state`` names what the
    server keeps of it.
    """

    def __init__(
        self,
        client: C,
        *,
        worker_type: str,
        config: Any,
        capabilities: Any = None,
        state: str = "",
        profile: str = "corrected",
        legacy: bool = False,
    ) -> None:
        super().__init__(client)
        self.worker_type = worker_type
        self._config = config
        self._capabilities = capabilities
        self._state, self._profile, self._legacy = state, profile, legacy
        window = fpm.member(config, "max_num_fpm_samples", 64)
        self._window = window
        self._avg_isl, self._avg_decode_length = MovingAverage(window), MovingAverage(window)
        self._retained: list[list[Any]] = []
        self._queries: EngineQueries[C] | None = None
        self._key: Any = None

    def update_capabilities(self, capabilities: Any) -> None:
        self._capabilities = capabilities

    @property
    def avg_isl(self) -> float:
        return self._avg_isl.value

    @property
    def avg_decode_length(self) -> float:
        return self._avg_decode_length.value

    @property
    def min_observations(self) -> int:
        return int(fpm.member(self._config, "load_min_observations", 5))

    @asking
    def add_observations(self, fpm_stats: Mapping[tuple[str, int], Any]) -> Steps[None]:
        """Learn from the latest metrics by (worker, rank)."""
        told = {key: fpm.stamped(record) for key, record in fpm_stats.items()}
        valid = {key: record for key, record in told.items() if self._observed(record)}
        yield from self._learn(self._groups(valid))

    @asking
    def load_benchmark_fpms(self, fpms: Sequence[Any]) -> Steps[None]:
        """Learn from a bootstrap: flat records, or the rank groups of attention-DP engines. Flat ones cannot say which
        belong together, so an attention-DP engine leaves them out."""
        grouped = [list(map(fpm.stamped, each if isinstance(each, list | tuple) else [each])) for each in fpms]
        kept = [list(group) for group in grouped if all(map(self._observed, group))]
        if self._ranks > 1:
            kept = [group for group in kept if len(group) == self._ranks]
        yield from self._learn(kept)

    @asking
    def has_sufficient_data(self) -> Steps[bool]:
        told = yield from self._diagnosis()
        return told.get("readiness") == "ready"

    @asking
    def num_observations(self) -> Steps[int]:
        told = yield from self._diagnosis()
        return int(told.get("retained_observations", 0))

    def query_groups(self, fpm_stats: Mapping[tuple[str, int], Any]) -> list[tuple[str, list[Any]]]:
        """The metrics of each engine with a name for it: all ranks together under attention-DP."""
        return [(_label(group), group) for group in self._groups(fpm_stats)]

    @asking
    def estimate_queued_prefill_time(
        self,
        metrics_by_rank: Sequence[Any],
        *,
        max_num_batched_tokens: int = 0,
        kv_hit_rate: float | None = None,
        queue_scale: float = 1.0,
        decode_scale: float = 1.0,
        include_queued_decode: bool = False,
        add_next_request: bool = True,
    ) -> Steps[float | None]:
        """Seconds until the next prompt is prefilled, behind what waits already."""
        queries = yield from self._engine()
        hit = kv_hit_rate if kv_hit_rate is not None and math.isfinite(kv_hit_rate) else 0.0
        share = 1.0 - min(max(hit, 0.0), MAX_KV_HIT_RATE)
        next_tokens = self.avg_isl if add_next_request else 0.0

        def waiting(load: RankLoad) -> dict[str, Any]:
            decodes = load.decode_requests + include_queued_decode * load.queued_decode_requests
            kv = load.decode_kv_tokens + include_queued_decode * load.queued_decode_kv_tokens
            tokens = (load.queued_prefill_tokens * queue_scale + next_tokens) * share
            requests = load.queued_prefill_requests * queue_scale + (next_tokens > 0)
            return {
                "scheduled_requests": _scheduled(decodes * decode_scale, kv * decode_scale),
                "queued_requests": {"num_prefill_requests": _up(requests), "sum_prefill_tokens": _up(tokens)},
            }

        return (yield from self._asked(queries, "draining", metrics_by_rank, waiting))

    @asking
    def estimate_scheduled_decode_itl(
        self,
        metrics_by_rank: Sequence[Any],
        *,
        decode_scale: float = 1.0,
        include_queued_decode: bool = True,
        include_queued_prefill_as_kv: bool = False,
        add_next_request: bool = True,
    ) -> Steps[float | None]:
        """Seconds of a decode iteration with the next request in it."""
        queries = yield from self._engine()
        next_kv = self.avg_decode_length if add_next_request else 0.0
        prefills = self.worker_type != "aggregated"  # an aggregated engine is taken to run its usual prefill

        def decoding(load: RankLoad) -> dict[str, Any]:
            decodes = load.decode_requests + include_queued_decode * load.queued_decode_requests
            kv = load.decode_kv_tokens + include_queued_decode * load.queued_decode_kv_tokens
            decodes += include_queued_prefill_as_kv * load.queued_prefill_requests
            kv += include_queued_prefill_as_kv * load.queued_prefill_tokens
            scheduled = _scheduled(decodes * decode_scale + (next_kv > 0), kv * decode_scale + next_kv)
            if prefills:
                scheduled |= {
                    "num_prefill_requests": load.prefill_requests, "sum_prefill_tokens": load.prefill_tokens
                }  # fmt: skip
            return {"scheduled_requests": scheduled}

        return (yield from self._asked(queries, "decoding", metrics_by_rank, decoding))

    @asking
    def find_engine_capacity_rps(
        self,
        *,
        isl: float,
        osl: float,
        ttft_sla_ms: float | None = None,
        itl_sla_ms: float | None = None,
        e2e_latency_sla_ms: float | None = None,
        kv_hit_rate: float | None = None,
        accept_length: float = 1.0,
    ) -> Steps[PlannerEngineCapacity | None]:
        """The rate that one engine sustains for requests of this mean shape."""
        queries = yield from self._engine()
        prefills = self.worker_type == "prefill"
        if queries is None or not isl > 0 or not (prefills or osl > 0):
            return None
        try:
            request = EngineCapacityRequest(
                isl=math.ceil(isl),
                osl=max(1, math.ceil(osl)),
                ttft_sla_s=_scaled(ttft_sla_ms, 0.001),
                itl_sla_s=_scaled(itl_sla_ms, 0.001),
                e2e_latency_sla_s=_scaled(e2e_latency_sla_ms, 0.001),
                accept_length=1.0 if prefills else max(1.0, float(accept_length)),
                kv_hit_rate=kv_hit_rate,
            )
            found = yield from queries.capacity(request)
        except FAULTS as error:
            log.warning("no capacity of %s engines: %s", self.worker_type, error)
            return None
        if found is None:
            return None
        ttft, itl, e2e = (_scaled(value, 1000.0) for value in (found.ttft_s, found.itl_s, found.e2e_latency_s))
        return PlannerEngineCapacity(found.rps, ttft, itl, e2e, found.eligible)

    def _asked(
        self, queries: EngineQueries[C] | None, question: str, metrics_by_rank: Sequence[Any], change: Any
    ) -> Steps[float | None]:
        if queries is None:
            return None
        try:
            records = [
                {"dp_rank": fpm.member(record, "dp_rank"), **change(fpm.rank_load(fpm.stamped(record)))}
                for record in metrics_by_rank
            ]
            seconds: float | None = yield from getattr(queries, question)(records)
            return seconds
        except FAULTS as error:
            log.warning("no estimate for %s engines: %s", self.worker_type, error)
            return None

    def _learn(self, iterations: list[list[Any]]) -> Steps[None]:
        if not iterations:
            return
        queries = yield from self._engine()
        self._retained = [*self._retained, *iterations][-self._window :]
        if queries is not None:
            yield from self._tuned(queries, iterations)

    def _tuned(self, queries: EngineQueries[C], iterations: list[list[Any]]) -> Steps[None]:
        try:
            yield from queries.tuning(iterations)
        except FAULTS as error:
            log.warning("%s engines learned nothing: %s", self.worker_type, error)

    def _observed(self, record: Any) -> bool:
        try:
            run = fpm.rank_pass(record)
        except ValueError as error:
            log.warning("left out metrics: %s", error)
            return False
        self._avg_isl.add(run.prefill_tokens / run.prefill_requests if run.prefill_requests else 0.0)
        if run.decode_requests:
            self._avg_decode_length.add(run.decode_kv_tokens / run.decode_requests)
        return True

    def _groups(self, fpm_stats: Mapping[tuple[str, int], Any]) -> list[list[Any]]:
        if self._ranks == 1:
            return [[record] for _, record in sorted(fpm_stats.items(), key=lambda item: item[0])]
        workers: dict[str, list[Any]] = {}
        for (worker, _), record in fpm_stats.items():
            workers.setdefault(worker, []).append(record)
        return [sorted(group, key=lambda record: fpm.member(record, "dp_rank")) for group in workers.values()]

    def _diagnosis(self) -> Steps[dict[str, Any]]:
        queries = yield from self._engine()
        if queries is None:
            return {}
        try:
            return (yield from queries.diagnosing())
        except FAULTS as error:
            log.warning("no diagnostics of %s engines: %s", self.worker_type, error)
            return {}

    def _engine(self) -> Steps[EngineQueries[C] | None]:
        """The queries of the engine as its capabilities are now; None while they are unknown or it cannot be made."""
        limits, record = self._limits(), self._record()
        if limits is None:
            self._queries = self._key = None
            return None
        key = (self.worker_type, limits, sorted(record.items(), key=str) if record else None)
        if key == self._key:
            return self._queries
        options = {
            "max_observations": self._window,
            "min_observations": self.min_observations,
            "bucket_count": fpm.member(self._config, "fpm_sample_bucket_size", 16),
            "max_num_tokens": limits.max_num_batched_tokens,
            "max_batch_size": limits.max_num_seqs,
            "max_kv_tokens": limits.max_kv_tokens,
            "cold_start_factor": None if self._legacy else COLD_START_FACTOR,
        }
        state = f"{self._state}/{hashlib.sha256(repr(key).encode()).hexdigest()[:12]}" if self._state else ""
        try:
            model = ForwardPassPerfModel(self._client, None, options_of(options), state, None)
            yield from model.making(record, self._profile, fallback=True)
            queries = EngineQueries(
                model=model,
                worker_type=self.worker_type,
                limits=limits,
                attention_dp_size=self._ranks,
                max_observations=self._window,
                legacy=self._legacy,
            )
        except FAULTS as error:
            log.warning("no model of %s engines: %s", self.worker_type, error)
            self._queries = self._key = None
            return None
        self._queries, self._key = queries, key
        if self._retained:
            yield from self._tuned(queries, self._retained)
        return queries

    def _limits(self) -> EnginePerfLimits | None:
        told = self._capabilities
        if told is None:
            return None
        values = {name: fpm.member(told, name, default) for name, default in LIMITS.items()}
        return None if any(value <= 0 for value in values.values()) else EnginePerfLimits(**values)

    @property
    def _pick(self) -> Any:
        spec = fpm.member(self._config, "aic_perf_model", None)
        return spec and fpm.member(spec, "prefill_pick" if self.worker_type == "prefill" else "decode_pick", None)

    @property
    def _ranks(self) -> int:
        return int(fpm.member(self._pick, "dp", 1)) if self._pick else 1

    def _record(self) -> dict[str, Any] | None:
        """The configuration record of the engine; None for a regression."""
        spec, pick = fpm.member(self._config, "aic_perf_model", None), self._pick
        if not spec or not pick:
            return None
        depth = fpm.member(self._capabilities, "speculative_nextn", 0) if self._capabilities is not None else 0
        depth = max(0, int(depth or fpm.member(self._config, "speculative_nextn", 0)))
        record = {
            "model_name": fpm.member(spec, "hf_id", None),
            "system_name": fpm.member(spec, "system", None),
            "backend": fpm.member(spec, "backend", None),
            "backend_version": fpm.member(spec, "backend_version", None),
            "nextn": depth if self.worker_type != "prefill" and depth else None,
        }
        record |= {name: fpm.member(pick, own, None) for name, own in PICKS.items()}
        return record | {name: fpm.member(spec, name, None) for name in DTYPES}


def _label(group: Sequence[Any]) -> str:
    ranks = [str(fpm.member(record, "dp_rank")) for record in group]
    worker = fpm.member(group[0], "worker_id", "")
    return f"{worker}:dp{ranks[0]}" if len(ranks) == 1 else f"{worker}:dp[{','.join(ranks)}]"


def _scheduled(decodes: float, kv: float) -> dict[str, int]:
    return {"num_decode_requests": _up(decodes), "sum_decode_kv_tokens": _up(kv)}


def _up(value: float) -> int:
    return min(math.ceil(max(value, 0.0)), fpm.MAX_COUNT)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
