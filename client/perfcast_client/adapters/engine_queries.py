"""The planner's engine-query layer, answered by a server (spec/07 section 5). Seconds throughout."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from perfcast_client import planner
from perfcast_client.adapters import fpm
from perfcast_client.adapters.asking import Adapter, C, as_value_error, asking
from perfcast_client.adapters.forward_pass import ForwardPassPerfModel
from perfcast_client.errors import NotReady, PerfcastError
from perfcast_client.planner_types import Limits, RankLoad, RankPass
from perfcast_client.turns import Steps

WORKER_TYPES = ("prefill", "decode", "aggregated")


@dataclass(frozen=True)
class EnginePerfLimits:
    """What one engine schedules at most."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_kv_tokens: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value <= fpm.MAX_COUNT:
                raise ValueError(f"{name} must lie in [1, 2^32), not {value}")


class OptimizationTarget(StrEnum):
    THROUGHPUT = "throughput"
    LATENCY = "latency"


@dataclass(frozen=True)
class EngineCapacityRequest:
    """A request shape and its targets."""

    isl: int
    osl: int
    ttft_sla_s: float | None = None
    itl_sla_s: float | None = None
    e2e_latency_sla_s: float | None = None
    accept_length: float = 1.0
    kv_hit_rate: float | None = None
    optimization_target: OptimizationTarget = OptimizationTarget.THROUGHPUT

    def __post_init__(self) -> None:
        for name in ("isl", "osl"):
            if not 0 <= getattr(self, name) <= fpm.MAX_COUNT:
                raise ValueError(f"{name} must lie in [0, 2^32), not {getattr(self, name)}")
        for name in ("ttft_sla_s", "itl_sla_s", "e2e_latency_sla_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {value}")


@dataclass(frozen=True)
class EngineCapacity:
    """The rate that one engine sustains; ``violated`` names the targets that it misses."""

    rps: float
    ttft_s: float | None = None
    itl_s: float | None = None
    e2e_latency_s: float | None = None
    eligible: bool = True
    violated: tuple[str, ...] = ()


class MovingAverage:
    """Of the last ``window`` values, from the first one above zero on."""

    def __init__(self, window: int) -> None:
        self._values: deque[float] = deque(maxlen=max(window, 1))

    def add(self, value: float) -> None:
        if self._values or value > 0:
            self._values.append(max(value, 0.0))

    @property
    def value(self) -> float:
        return math.fsum(self._values) / len(self._values) if self._values else 0.0


class EngineQueries(Adapter[C]):
    """Queue drain, decode ITL and capacity of one engine, from live metrics. None: not ready, or not of this role.

    ``legacy`` answers as the reference does where that is known to be wrong: the worst point where targets cannot be
    met, requests and KV tokens split over ranks apart, batched prompts priced as one.
    """

    def __init__(
        self,
        *,
        model: ForwardPassPerfModel[C],
        worker_type: str,
        limits: EnginePerfLimits,
        attention_dp_size: int = 1,
        max_observations: int = 64,
        legacy: bool = False,
    ) -> None:
        if worker_type not in WORKER_TYPES:
            raise ValueError(f"worker_type must be one of {', '.join(WORKER_TYPES)}, not {worker_type!r}")
        if attention_dp_size <= 0:
            raise ValueError(f"attention_dp_size must be positive, not {attention_dp_size}")
        super().__init__(model._client)
        self.model = model
        self.worker_type = worker_type
        self.limits = limits
        self.attention_dp_size = attention_dp_size
        self.legacy = legacy
        self._usual_tokens, self._usual_requests = MovingAverage(max_observations), MovingAverage(max_observations)

    @classmethod
    def best_available(
        cls,
        client: C,
        *,
        aic_config: Mapping[str, Any] | None,
        worker_type: str,
        limits: EnginePerfLimits,
        options: Mapping[str, Any],
        attention_dp_size: int = 1,
        state: str = "",
        profile: str = "corrected",
        legacy: bool = False,
    ) -> Any:
        """From a configuration record, else from observations alone."""

        def over(model: ForwardPassPerfModel[C]) -> EngineQueries[C]:
            return cls(
                model=model,
                worker_type=worker_type,
                limits=limits,
                attention_dp_size=attention_dp_size,
                max_observations=options.get("max_observations", 64),
                legacy=legacy,
            )

        if aic_config is None:
            made = ForwardPassPerfModel.from_regression(client, options, state=state)
        else:
            made = ForwardPassPerfModel.best_available(client, aic_config, options, state=state, profile=profile)
        return over(made) if isinstance(made, ForwardPassPerfModel) else _awaited(made, over)

    def tuning(self, iterations: Sequence[Sequence[Any]]) -> Steps[None]:
        """Learn from iterations, each with all ranks."""
        learned = [self._passes(ranks) for ranks in iterations]
        yield from self.model.tuning([list(ranks) for ranks in iterations])
        for ranks in learned:
            heaviest = max(ranks, key=lambda rank: rank.prefill_tokens + rank.decode_kv_tokens + rank.decode_requests)
            self._usual_tokens.add(float(heaviest.prefill_tokens))
            self._usual_requests.add(float(heaviest.prefill_requests))

    def diagnosing(self) -> Steps[dict[str, Any]]:
        return (yield from self.model.diagnosing())

    tune_with_fpms = asking(tuning)
    diagnostics = asking(diagnosing)

    @property
    def usual_prefill(self) -> tuple[float, float]:
        """Tokens and requests that an average iteration prefills."""
        return self._usual_tokens.value, self._usual_requests.value

    def draining(self, metrics_by_rank: Sequence[Any]) -> Steps[float | None]:
        """Seconds until all queued prompts are prefilled."""
        if self.worker_type == "decode":
            return None
        loads = self._loads(metrics_by_rank)
        if not any(load.queued_prefill_tokens for load in loads):
            return 0.0
        return (yield from self._ask(planner.queue_drain, loads))

    def decoding(self, metrics_by_rank: Sequence[Any]) -> Steps[float | None]:
        """Seconds of the next decode iteration."""
        if self.worker_type == "prefill":
            return None
        loads = self._loads(metrics_by_rank)
        return (yield from self._ask(planner.decode_itl, loads, usual_prefill=self.usual_prefill))

    def capacity(self, request: EngineCapacityRequest) -> Steps[EngineCapacity | None]:
        """The rate that one engine sustains under the targets."""
        if request.isl == 0 or (request.osl == 0 and self.worker_type != "prefill"):
            return None
        finite = math.isfinite(request.accept_length)
        found = yield from self._answered(
            planner.capacity,
            isl=request.isl,
            osl=request.osl,
            ttft_s=request.ttft_sla_s,
            itl_s=request.itl_sla_s,
            e2e_s=request.e2e_latency_sla_s,
            accept_length=request.accept_length if finite else 1.0,
            kv_hit_rate=min(max(request.kv_hit_rate or 0.0, 0.0), 1.0),
            objective=OptimizationTarget(request.optimization_target).value,
            on_infeasible="max_rps" if self.legacy else "closest",
            legacy_rank_split=self.legacy,
            legacy_single_request=self.legacy,
        )
        if found is None:
            return None
        return EngineCapacity(found.rps, found.ttft_s, found.itl_s, found.e2e_s, found.eligible, found.violated_targets)

    get_queued_prefill_time = asking(draining)
    get_scheduled_decode_itl = asking(decoding)
    find_engine_capacity_rps = asking(capacity)

    def _ask(self, question: Any, loads: Sequence[RankLoad], **more: Any) -> Steps[float | None]:
        told = yield from self._answered(question, loads, **more)
        return None if told is None else told.seconds

    def _answered(self, question: Any, *arguments: Any, **more: Any) -> Steps[Any]:
        """The answer to a question about the engine; None while it is not ready."""
        model, limits = self.model, self.limits
        if model.engine is None and not model._asked_state:
            return None
        ranks = self.attention_dp_size if model.engine is None else 0
        call = question(
            model.engine,
            *arguments,
            role=self.worker_type,
            limits=Limits(limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_kv_tokens, ranks),
            state=model._asked_state,
            **more,
        )
        try:
            return (yield call)
        except NotReady:
            return None
        except PerfcastError as error:
            raise as_value_error(error) from None

    def _loads(self, metrics_by_rank: Sequence[Any]) -> list[RankLoad]:
        loads = [fpm.rank_load(record) for record in metrics_by_rank]
        self._check(metrics_by_rank)
        return loads

    def _passes(self, metrics_by_rank: Sequence[Any]) -> list[RankPass]:
        passes = fpm.iteration(list(metrics_by_rank))
        self._check(metrics_by_rank)
        return passes

    def _check(self, metrics_by_rank: Sequence[Any]) -> None:
        count = self.attention_dp_size
        if len(metrics_by_rank) != count:
            raise ValueError(f"needs the metrics of all {count} attention-DP ranks, not of {len(metrics_by_rank)}")
        numbers = [fpm.member(record, "dp_rank") for record in metrics_by_rank]
        if count > 1 and sorted(numbers) != list(range(count)):
            raise ValueError(f"dp_rank must be each of 0 to {count - 1} once")


async def _awaited(made: Any, over: Any) -> Any:
    return over(await made)
