"""The Prediction service."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message
from perfcast.v1 import common_pb2, prediction_pb2
from perfcast_engine.answer import Answer, Miss, Tier
from perfcast_engine.errors import EngineError
from perfcast_engine.quick import QuickStep
from perfcast_engine.step_result import StepResult

from perfcast_server import packed, single, wire
from perfcast_server.engines import Engines, Ready
from perfcast_server.errors import ServiceError, invalid, refusal
from perfcast_server.metrics import Metrics
from perfcast_server.rpc import Method, Stream, Unary
from perfcast_server.settings import Settings
from perfcast_server.steps import KINDS, Query, check_size, query

SERVICE = "perfcast.v1.Prediction"
SIZE_OF_A_CALL = 1000  # points, or bytes of columns, that take about as long as everything else in a call
T = TypeVar("T")


class Prediction:
    """Answers how long forward passes take. Small questions on a loaded engine are answered on the event loop."""

    def __init__(self, engines: Engines, settings: Settings, metrics: Metrics) -> None:
        self._engines = engines
        self._settings = settings
        self._inline_points = min(settings.inline_points, settings.max_points_per_request)
        self._meters = {kind: (metrics.points.labels(kind), metrics.point_seconds.labels(kind)) for kind in KINDS}

    def methods(self) -> tuple[Method, ...]:
        return (
            Unary("ResolveEngine", prediction_pb2.ResolveEngineRequest, self.resolve_engine),
            Unary("PredictStep", prediction_pb2.PredictStepRequest, self.predict_step, self.predict_step_at_once),
            Unary("PredictSteps", prediction_pb2.PredictStepsRequest, self.predict_steps, is_large=True),
            Stream("StreamSteps", prediction_pb2.StreamStepsRequest, lambda: _Steps(self, self._engines)),
        )

    async def resolve_engine(self, request: prediction_pb2.ResolveEngineRequest) -> Message:
        ready = await self._engines.of(request)
        engine, modes = ready.engine, ready.engine.modes
        return prediction_pb2.ResolveEngineResponse(
            engine=ready.stamp,
            resolved=wire.config_message(engine.config, ready.original),
            gpus_total=engine.config.parallel.gpus,
            model_family=engine.model.family,
            notes=engine.notes,
            modes=wire.quant_message(modes.gemm, modes.moe, modes.kv, modes.fmha, modes.comm),
        )

    async def predict_step(self, request: prediction_pb2.PredictStepRequest) -> Message | bytes:
        asked = self._checked(query(request, "step"))
        ready = await self._engines.of(request)
        if asked.weight <= self._inline_points:
            return self._one(ready, request, asked)
        return await self._in_lane(lambda: self._one(ready, request, asked), asked.weight)

    def predict_step_at_once(self, request: prediction_pb2.PredictStepRequest) -> Message | bytes | None:
        ready = self._engines.ready(request)
        if ready is None:
            return None
        quick = None if request.include_operators else self.quick(ready, request)
        if quick is not None:
            return single.step(ready.head, quick.ms, quick.by_source, Tier.SILICON)
        asked = query(request, "step")
        return self._one(ready, request, asked) if asked.weight <= self._inline_points else None

    def _one(self, ready: Ready, request: prediction_pb2.PredictStepRequest, asked: Query) -> Message | bytes:
        result = self._timed(ready, asked, request.include_operators).raise_first()
        ms, by_source, tier = result.ms.item(0), result.by_source[0], result.tier.item(0)
        if result.operators is None:
            return single.step(ready.head, ms, by_source.tolist(), tier)
        operators = [wire.operator_latency(name, told) for name, told in result.operators.items()]
        provenance = wire.provenance(by_source, tier)
        return prediction_pb2.PredictStepResponse(
            engine=ready.stamp, latency_ms=ms, provenance=provenance, operators=operators
        )

    def quick(self, ready: Ready, request: Any) -> QuickStep | None:
        """The answer to a request's oneof ``step`` where no arrays are needed for it."""
        kind = request.WhichOneof("step")
        if kind not in ready.quick:
            return None
        began = perf_counter()
        quick = ready.quick[kind](getattr(request, kind))
        if quick is not None:
            self._count(kind, 1, perf_counter() - began)
        return quick

    async def predict_steps(self, request: prediction_pb2.PredictStepsRequest) -> Message:
        ready = await self._engines.of(request)
        if self._is_small(request):
            return self._steps(ready, request)
        return await self._in_lane(lambda: self._steps(ready, request), request.ByteSize())

    def _is_small(self, request: prediction_pb2.PredictStepsRequest) -> bool:
        """Whether reading and answering the columns holds up the event loop no longer than a scalar question."""
        return request.ByteSize() <= 8 * self._settings.inline_points and not request.HasField("decode_trajectory")

    def _steps(self, ready: Ready, request: prediction_pb2.PredictStepsRequest) -> Message:
        asked = self._checked(query(request, "steps"))
        result = self._timed(ready, asked, request.include_operators)
        if not request.allow_misses and result.misses:
            point, error = min(result.errors().items(), key=lambda item: item[0])
            raise ServiceError(str(error.reason), f"point {point}: {error.message}", point=str(point), **error.details)
        return _columns(ready, result, request.include_provenance)

    async def latency_ms(self, ready: Ready, request: prediction_pb2.StreamStepsRequest) -> float:
        """Of one point."""
        asked = self._checked(query(request, "step"))

        def number() -> float:
            return self._timed(ready, asked, False).raise_first().ms.item(0)

        return number() if asked.weight <= self._inline_points else await self._in_lane(number, asked.weight)

    async def _in_lane(self, work: Callable[[], T], size: int) -> T:
        return await self._engines.lanes.steps.run(work, 1 + size / SIZE_OF_A_CALL)

    def _checked(self, asked: Query) -> Query:
        check_size(asked, self._settings.max_points_per_request)
        return asked

    def _timed(self, ready: Ready, asked: Query, operators: bool) -> StepResult:
        began = perf_counter()
        result = asked.ask(ready.engine.steps, operators)
        self._count(asked.kind, asked.points, perf_counter() - began)
        return result

    def _count(self, kind: str, points: int, seconds: float) -> None:
        counted, point_seconds = self._meters[kind]
        counted.inc(points)
        point_seconds.observe(seconds / points)


class _Steps:
    """One stream of steps: the engine that it is about stays until another is named, with the data of the day. Where it
    was let go of to make room, it is made ready again."""

    def __init__(self, prediction: Prediction, engines: Engines) -> None:
        self._prediction = prediction
        self._engines = engines
        self._about: tuple[str, common_pb2.EngineConfig] | None = None  # handle and configuration

    def at_once(self, request: prediction_pb2.StreamStepsRequest) -> bytes | None:
        ready = None if self._about is None else self._engines.get(self._about[0])
        if ready is None or request.WhichOneof("engine") is not None:
            return None
        quick = self._prediction.quick(ready, request)
        return None if quick is None else single.streamed(request.sequence, quick.ms)

    async def answer(self, request: prediction_pb2.StreamStepsRequest) -> bytes:
        stamp: common_pb2.EngineStamp | None = None
        try:
            if request.WhichOneof("engine") is not None:
                ready = await self._engines.of(request)
                stamp = ready.stamp
            elif self._about is None:
                raise invalid("engine", "is missing in the first message; give config or handle")
            else:
                handle, config = self._about
                ready = self._engines.get(handle) or await self._engines.by_config(config)
                stamp = None if ready.stamp.handle == handle else ready.stamp
            self._about = ready.stamp.handle, ready.original
            quick = self._prediction.quick(ready, request)
            ms = await self._prediction.latency_ms(ready, request) if quick is None else quick.ms
            return single.streamed(request.sequence, ms, stamp)
        except (EngineError, ServiceError) as error:
            detail = refusal(error).detail()
            told = prediction_pb2.StreamStepsResponse(sequence=request.sequence, error=detail, engine=stamp)
            return told.SerializeToString()


def _columns(ready: Ready, result: StepResult, per_point: bool) -> prediction_pb2.PredictStepsResponse:
    missed = np.isnan(result.ms)
    answered = ~missed
    response = prediction_pb2.PredictStepsResponse(
        engine=ready.stamp,
        provenance=wire.provenance(
            result.origin.total(answered.astype(np.float64)), int(result.tier[answered].max(initial=0))
        ),
        operators=[_operator(name, answer) for name, answer in (result.operators or {}).items()],
        misses=_misses(result.misses),
    )
    packed.put(response, "latency_ms", np.where(missed, 0.0, result.ms))
    if per_point:
        response.point_provenance.CopyFrom(_point_provenance(result))
    return response


def _point_provenance(result: StepResult) -> prediction_pb2.ProvenanceColumns:
    by_source = result.by_source
    whole = by_source.sum(axis=1, keepdims=True)
    shares = np.divide(by_source, whole, out=np.zeros_like(by_source), where=whole > 0)
    columns = prediction_pb2.ProvenanceColumns(tier=(result.tier + 1).tolist())
    for name, column in zip(wire.SHARES, shares.T, strict=True):
        packed.put(columns, name, column)
    return columns


def _operator(name: str, answer: Answer) -> prediction_pb2.OperatorColumns:
    source = answer.source[:1] if (answer.source == answer.source[0]).all() else answer.source
    column = prediction_pb2.OperatorColumns(name=name, source=(source + 1).tolist())
    packed.put(column, "latency_ms", np.nan_to_num(answer.ms))
    return column


def _misses(misses: list[Miss]) -> list[prediction_pb2.PointMisses]:
    """Each point once, under the first error that it met."""
    told: list[prediction_pb2.PointMisses] = []
    seen = np.zeros(len(misses[0][0]), np.bool_) if misses else np.zeros(0, np.bool_)
    for mask, error in misses:
        fresh = np.flatnonzero(mask & ~seen)
        if len(fresh):
            told.append(prediction_pb2.PointMisses(points=fresh.tolist(), error=refusal(error).detail()))
            seen |= mask
    return told
