"""The Planner service."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import numpy as np
from google.protobuf.message import Message
from perfcast.v1 import common_pb2, planner_pb2
from perfcast_engine.answer import F64
from perfcast_engine.errors import EngineError
from perfcast_planning.planner.capacity import Capacity, CapacityRequest, Objective, OnInfeasible, capacity
from perfcast_planning.planner.pass_model import PassModel
from perfcast_planning.planner.queries import Outlook, Scenario, outlooks

from perfcast_server import loads, sweeps
from perfcast_server.engines import Engines, Ready
from perfcast_server.errors import ServiceError, invalid, refusal
from perfcast_server.rpc import Method, ServerStream, Unary
from perfcast_server.settings import Settings
from perfcast_server.states import States

SERVICE = "perfcast.v1.Planner"
OBJECTIVES = (Objective.THROUGHPUT, Objective.THROUGHPUT, Objective.LATENCY)
INFEASIBLE = (OnInfeasible.CLOSEST, OnInfeasible.CLOSEST, OnInfeasible.MAX_RPS, OnInfeasible.NONE)
USUAL = ("usual_prefill_tokens_per_rank", "usual_prefill_requests_per_rank")
MAX_GROUPS, MAX_WORKERS, MAX_SCENARIOS = 4096, 65_536, 65_536  # of a tick


@dataclass(frozen=True, slots=True)
class Timed:
    """What answers a question: a pass model, and where it is from. ``ready``: None for a regression."""

    model: PassModel
    ready: Ready | None
    version: int

    @property
    def stamp(self) -> common_pb2.EngineStamp | None:
        return None if self.ready is None else self.ready.stamp


def _stateless(request: Any) -> bool:
    return not request.state_name


class Planner:
    """Answers what planners ask of engines, corrected by what a calibration state learned where one is named."""

    def __init__(self, engines: Engines, states: States, settings: Settings) -> None:
        self._engines = engines
        self._states = states
        self._settings = settings
        self._warm: WeakSet[Ready] = WeakSet()  # engines that have answered before, so that their tables are filled

    def methods(self) -> tuple[Method, ...]:
        p = planner_pb2
        return (
            Unary("EstimatePasses", p.EstimatePassesRequest, self.estimate_passes, pure=_stateless),
            self._question("QueueDrain", p.QueueDrainRequest, _queue_drain),
            self._question("DecodeItl", p.DecodeItlRequest, _decode_itl),
            self._question("Capacity", p.CapacityRequest, _capacity),
            Unary("EvaluateTick", p.EvaluateTickRequest, self.evaluate_tick, pure=lambda request: False),
            ServerStream("Bootstrap", p.BootstrapRequest, partial(sweeps.bootstrap, self._engines)),
            Unary("FitLatencyLaw", p.FitLatencyLawRequest, partial(sweeps.fit_latency_law, self._engines)),
        )

    def _question(self, name: str, request: type[Message], answer: Callable[[Any, Timed], Message]) -> Unary:
        """An RPC that ``answer`` answers: small questions at once where the engine is warm and nothing is learned."""

        async def in_turn(request: Any) -> Message:
            asked = await self.timed(request)
            told = await self._engines.lanes.questions.run(lambda: answer(request, asked))
            if asked.ready is not None:
                self._warm.add(asked.ready)
            return told

        def at_once(request: Any) -> Message | None:
            small = request.ByteSize() <= 8 * self._settings.inline_points
            ready = self._engines.ready(request) if small and _stateless(request) else None
            if ready is None or ready not in self._warm:
                return None
            return self._engines.lanes.questions.at_once(lambda: answer(request, Timed(ready.passes, ready, 0)))

        return Unary(name, request, in_turn, at_once, pure=_stateless)

    async def timed(self, request: Any) -> Timed:
        """The pass model that a request's engine and state name."""
        ready = None if request.WhichOneof("engine") is None else await self._engines.of(request)
        name: str = request.state_name
        if not name:
            if ready is None:
                raise invalid("engine", "is missing, and there is no state_name either; give config or handle")
            return Timed(ready.passes, ready, 0)
        key, steps = (ready.engine.handle, ready.engine.steps) if ready else ("", None)
        version, model = await self._engines.lanes.states.run(lambda: self._states.model((key, name), steps))
        return Timed(model, ready, version)

    async def estimate_passes(self, request: planner_pb2.EstimatePassesRequest) -> Message:
        loads.check_points(len(request.iterations), self._settings)
        asked = await self.timed(request)

        def answer() -> Message:
            loads.check_points(sum(len(iteration.ranks) for iteration in request.iterations), self._settings)
            ms = asked.model.estimate(loads.iterations_of(request.iterations))
            unknown = np.flatnonzero(np.isnan(ms))
            return planner_pb2.EstimatePassesResponse(
                engine=asked.stamp,
                state_version=asked.version,
                latency_ms=np.nan_to_num(ms).tolist(),
                not_ready=unknown.tolist(),
            )

        return await self._engines.lanes.questions.run(answer)

    async def evaluate_tick(self, request: planner_pb2.EvaluateTickRequest) -> Message:
        loads.check_count(len(request.groups), MAX_GROUPS, "groups")
        loads.check_count(sum(len(group.workers) for group in request.groups), MAX_WORKERS, "workers")
        loads.check_count(sum(len(group.scenarios) for group in request.groups), MAX_SCENARIOS, "scenarios")
        sizes = (
            sum(len(worker.ranks) for worker in group.workers) * max(1, len(group.scenarios))
            for group in request.groups
        )
        loads.check_points(sum(sizes), self._settings)
        answers = []
        for group in request.groups:
            try:
                asked = await self.timed(group)
                answers.append(await self._engines.lanes.questions.run(lambda g=group, a=asked: _tick(g, a)))  # type: ignore[misc]
            except (EngineError, ServiceError) as error:
                answers.append(planner_pb2.TickAnswer(error=refusal(error).detail()))
        return planner_pb2.EvaluateTickResponse(groups=answers)


def _queue_drain(request: planner_pb2.QueueDrainRequest, asked: Timed) -> Message:
    told = _told(request, asked, drain=True)
    return planner_pb2.QueueDrainResponse(engine=asked.stamp, state_version=asked.version, drain_s=_ready(told.drain_s))


def _decode_itl(request: planner_pb2.DecodeItlRequest, asked: Timed) -> Message:
    tokens, requests = (loads.usual(getattr(request, name), name) for name in USUAL)
    told = _told(request, asked, tokens, requests, itl=True)
    return planner_pb2.DecodeItlResponse(engine=asked.stamp, state_version=asked.version, itl_s=_ready(told.itl_s))


def _told(
    request: Any, asked: Timed, tokens: float = 0.0, requests: float = 0.0, drain: bool = False, itl: bool = False
) -> Outlook:
    role, limits = loads.role_of(request.role, asked.ready), loads.limits_of(request.limits, asked.ready)
    live = loads.loads_of([loads.rank_rows(request.ranks, limits)])
    (told,) = outlooks(asked.model, role, limits, live, (Scenario(),), tokens, requests, drain=drain, itl=itl)
    for error in told.errors.values():
        raise error
    return told


def _capacity(request: planner_pb2.CapacityRequest, asked: Timed) -> Message:
    role, limits = loads.role_of(request.role, asked.ready), loads.limits_of(request.limits, asked.ready)
    shape = _capacity_request(request)
    found = capacity(asked.model, role, limits, shape)
    if found is None and asked.ready is None and shape.isl and (shape.osl or not role.decodes):
        raise not_ready()
    response = planner_pb2.CapacityResponse(engine=asked.stamp, state_version=asked.version)
    if found is not None:
        response.capacity.CopyFrom(_capacity_point(found))
        if request.include_candidates:
            response.candidates.CopyFrom(_capacity_columns(found))
    return response


def not_ready() -> ServiceError:
    return ServiceError("NOT_READY", "too little was observed of such work; tune the state with more iterations")


def _ready(seconds: F64 | None) -> float | None:
    if seconds is None:
        return None
    if np.isnan(seconds[0]):
        raise not_ready()
    return float(seconds[0])


def _has(message: Any, field: str) -> bool:
    return bool(message.HasField(field))


def _capacity_request(request: planner_pb2.CapacityRequest) -> CapacityRequest:
    fields = {f"{name}_s": f"{name}_target_s" for name in ("ttft", "itl", "e2e")}
    targets = {name: getattr(request, field) for name, field in fields.items() if _has(request, field)}
    for name, values in (("objective", OBJECTIVES), ("on_infeasible", INFEASIBLE)):
        if not 0 <= getattr(request, name) < len(values):
            raise invalid(name, f"has the unknown value {getattr(request, name)}")
    names = {"isl": "isl_tokens", "osl": "osl_tokens", "accept_length": "accept_length_tokens", **fields}
    with loads.named("", names):
        return CapacityRequest(
            isl=request.isl_tokens,
            osl=request.osl_tokens,
            **targets,
            accept_length=request.accept_length_tokens,
            kv_hit_rate=request.kv_hit_rate,
            objective=OBJECTIVES[request.objective],
            on_infeasible=INFEASIBLE[request.on_infeasible],
            legacy_rank_split=request.legacy_rank_split,
            legacy_single_request=request.legacy_single_request,
        )


def _capacity_point(found: Capacity) -> planner_pb2.CapacityPoint:
    return planner_pb2.CapacityPoint(
        batch_total=found.batch_total,
        rps=found.rps,
        ttft_s=found.ttft_s,
        itl_s=found.itl_s,
        e2e_s=found.e2e_s,
        eligible=found.eligible,
        violated_targets=found.violated,
        corrections_held_back=found.held_back,
    )


def _capacity_columns(found: Capacity) -> planner_pb2.CapacityColumns:
    columns: dict[str, Any] = {name: column.tolist() for name, column in found.candidates.items() if name != "batch"}
    return planner_pb2.CapacityColumns(batch_total=found.candidates["batch"].astype(np.int64).tolist(), **columns)


def _tick(group: planner_pb2.TickGroup, asked: Timed) -> planner_pb2.TickAnswer:
    """All workers of a group in one evaluation; those whose ranks are refused are told so."""
    role, limits = loads.role_of(group.role, asked.ready), loads.limits_of(group.limits, asked.ready)
    scenarios = [loads.scenario_of(each, f"scenarios[{i}]") for i, each in enumerate(group.scenarios)] or [Scenario()]
    answers = [planner_pb2.WorkerOutlook(worker_id=worker.worker_id) for worker in group.workers]
    good, rows, usual = [], [], []
    for worker, answer in zip(group.workers, answers, strict=True):
        try:
            own = loads.rank_rows(worker.ranks, limits), [loads.usual(getattr(worker, name), name) for name in USUAL]
        except ServiceError as error:
            answer.error.CopyFrom(refusal(error).detail())
        else:
            good.append(answer)
            rows.append(own[0])
            usual.append(own[1])
    if good:
        tokens, requests = np.array(usual).T
        for told in outlooks(asked.model, role, limits, loads.loads_of(rows), scenarios, tokens, requests):
            for index, answer in enumerate(good):
                answer.outlooks.append(_outlook_message(told, index))
    return planner_pb2.TickAnswer(engine=asked.stamp, state_version=asked.version, workers=answers)


def _outlook_message(told: Outlook, index: int) -> planner_pb2.Outlook:
    def value(seconds: F64 | None) -> float | None:
        return None if seconds is None or np.isnan(seconds[index]) else float(seconds[index])

    error = told.errors.get(index)
    return planner_pb2.Outlook(
        drain_s=value(told.drain_s), itl_s=value(told.itl_s), error=None if error is None else refusal(error).detail()
    )
