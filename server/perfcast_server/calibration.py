"""The Calibration service."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message
from perfcast.v1 import calibration_pb2, planner_pb2
from perfcast_planning.planner.pass_model import PassModel
from perfcast_planning.planner.telemetry import Kind

from perfcast_server import learned, loads
from perfcast_server.engines import Engines, Ready
from perfcast_server.errors import ServiceError, invalid
from perfcast_server.metrics import Metrics
from perfcast_server.rpc import Method, Unary
from perfcast_server.states import States, check_name, unknown

SERVICE = "perfcast.v1.Calibration"
State = calibration_pb2.CalibrationState
MAX_RANKS = 65_536  # of one Tune, which holds up others while it learns


def _never(request: Any) -> bool:
    return False


class Calibration:
    """Lets callers teach and carry away calibration states."""

    def __init__(self, engines: Engines, states: States, metrics: Metrics) -> None:
        self._engines = engines
        self._states = states
        self._factor = metrics.correction_factor

    def methods(self) -> tuple[Method, ...]:
        c = calibration_pb2
        return (
            Unary("Tune", c.TuneRequest, self.tune, pure=_never, writes=True),
            Unary("Diagnose", c.DiagnoseRequest, self.diagnose, pure=_never),
            Unary("ExportState", c.ExportStateRequest, self.export_state, pure=_never),
            Unary("ImportState", c.ImportStateRequest, self.import_state, pure=_never, writes=True),
        )

    async def _engine(self, request: Any) -> Ready | None:
        self._states.require_on()
        check_name(request.state_name)
        return None if request.WhichOneof("engine") is None else await self._engines.of(request)

    async def tune(self, request: calibration_pb2.TuneRequest) -> Message:
        ready = await self._engine(request)
        loads.check_count(len(request.iterations), MAX_RANKS, "iterations")
        ranks = sum(len(iteration.ranks) for iteration in request.iterations)
        if ranks > MAX_RANKS:
            raise ServiceError(
                "LIMIT", f"{ranks} ranks, more than {MAX_RANKS}; tune in parts", limit="tune", retry="no"
            )
        if not 0 < len(request.client_id) <= 128:
            raise invalid("client_id", "must have 1 to 128 characters")
        if not request.sequence:
            raise invalid("sequence", "must be at least 1")
        return await self._engines.lanes.states.run(lambda: self._tune(request, ready))

    def _tune(self, request: calibration_pb2.TuneRequest, ready: Ready | None) -> calibration_pb2.TuneResponse:
        iterations = loads.iterations_of(request.iterations)
        digest = _digest(request.iterations)
        key, steps = (ready.engine.handle if ready else "", request.state_name), ready.engine.steps if ready else None

        def work(state: State | None, model: PassModel | None) -> tuple[State | None, PassModel | None, Any]:
            clients = list(state.clients) if state is not None else []
            mine = next((client for client in clients if client.client_id == request.client_id), None)
            if mine is not None and request.sequence <= mine.sequence:
                return None, None, _again(mine, request.sequence, digest)
            version = state.version if state is not None else 0
            _require_version(request, version)
            if model is None:
                model = PassModel(learned.options_of(request.options), steps)
            elif request.HasField("options") and learned.options_of(request.options) != model.options:
                raise invalid("options", "differ from those that the state was made with")
            model = model.copy()
            done = calibration_pb2.ClientProgress(
                client_id=request.client_id,
                sequence=request.sequence,
                digest=digest,
                state_version=version + 1,
                kept_iterations=model.tune(iterations),
            )
            others = [client for client in clients if client is not mine]
            kept = [*others, done][-learned.MAX_CLIENTS :]
            return learned.snapshot(model, key[0], version + 1, kept), model, done

        done = self._states.change(key, steps, work)
        self._tell(key)
        return calibration_pb2.TuneResponse(
            engine=ready.stamp if ready else None,
            state_version=done.state_version,
            kept_iterations=done.kept_iterations,
        )

    def _tell(self, key: tuple[str, str]) -> None:
        model = self._states.known(key)
        for kind, name in learned.KIND_FIELDS.items():
            factors = model.correction_factors(kind) if model is not None else []
            if factors:
                self._factor.labels(*key, name).set(sum(factors) / len(factors))

    async def diagnose(self, request: calibration_pb2.DiagnoseRequest) -> Message:
        ready = await self._engine(request)
        key, steps = (ready.engine.handle, ready.engine.steps) if ready else ("", None)
        version, model = await self._engines.lanes.states.run(
            lambda: self._states.model((key, request.state_name), steps)
        )
        if not version:
            raise unknown(request.state_name)
        factors = model.correction_factors()
        summary: dict[str, Any] = {}
        if factors:
            summary = {"min": min(factors), "max": max(factors), "avg": sum(factors) / len(factors)}
        return calibration_pb2.DiagnoseResponse(
            engine=ready.stamp if ready else None,
            state_version=version,
            **asdict(model.diagnostics()),
            kinds=[_diagnosis(model, kind) for kind in Kind],
            options=learned.options_message(model.options),
            **{f"{name}_correction_factor": value for name, value in summary.items()},
        )

    async def export_state(self, request: calibration_pb2.ExportStateRequest) -> Message:
        ready = await self._engine(request)
        key = ready.engine.handle if ready else "", request.state_name
        state = await self._engines.lanes.states.run(lambda: self._states.read(key))
        return calibration_pb2.ExportStateResponse(engine=ready.stamp if ready else None, state=state)

    async def import_state(self, request: calibration_pb2.ImportStateRequest) -> Message:
        ready = await self._engine(request)
        version = await self._engines.lanes.states.run(lambda: self._import(request, ready))
        return calibration_pb2.ImportStateResponse(engine=ready.stamp if ready else None, state_version=version)

    def _import(self, request: calibration_pb2.ImportStateRequest, ready: Ready | None) -> int:
        key, steps = (ready.engine.handle if ready else "", request.state_name), ready.engine.steps if ready else None
        if request.state.engine_handle != key[0]:
            raise invalid("state.engine_handle", "is of another engine, or of other data behind it")
        model = learned.model_of(request.state, steps)

        def work(state: State | None, _: PassModel | None) -> tuple[State, PassModel, int]:
            version = state.version if state is not None else 0
            if state is not None and not request.HasField("expected_version"):
                raise _conflict(f"the state exists already, at version {version}; give expected_version", version)
            _require_version(request, version)
            new = max(request.state.version, version + 1)
            return learned.snapshot(model, key[0], new, request.state.clients), model, new

        return self._states.change(key, steps, work)


def _require_version(request: Any, version: int) -> None:
    if request.HasField("expected_version") and request.expected_version != version:
        raise _conflict(f"the state is at version {version}, not {request.expected_version}", version)


def _conflict(message: str, version: int) -> ServiceError:
    return ServiceError("STATE_CONFLICT", message, version=str(version), field="expected_version")


def _again(mine: calibration_pb2.ClientProgress, sequence: int, digest: bytes) -> calibration_pb2.ClientProgress:
    """The answer to a call that was worked on before."""
    if sequence < mine.sequence:
        raise ServiceError(
            "STATE_CONFLICT",
            f"sequence {sequence} is behind {mine.sequence}, which this client has reached",
            sequence=str(mine.sequence),
        )
    if digest != mine.digest:
        raise ServiceError(
            "STATE_CONFLICT", f"sequence {sequence} was used for other iterations", sequence=str(mine.sequence)
        )
    return mine


def _digest(iterations: Iterable[planner_pb2.Iteration]) -> bytes:
    whole = hashlib.sha256()
    for iteration in iterations:
        data = iteration.SerializeToString(deterministic=True)
        whole.update(len(data).to_bytes(8, "little"))
        whole.update(data)
    return whole.digest()


def _diagnosis(model: PassModel, kind: Kind) -> calibration_pb2.KindDiagnosis:
    count, least = len(model.stores[kind]), model.options.min_observations
    reason = ""
    if not count:
        reason = "nothing was observed"
    elif count < least:
        reason = f"{count} of the {least} observations that are needed"
    elif model.steps is None and model.fit_of(kind) is None:
        reason = "no line that rises with the work fits the observations"
    return calibration_pb2.KindDiagnosis(
        kind=learned.KIND_FIELDS[kind],
        retained_observations=count,
        correction_factors=model.correction_factors(kind),
        no_signal_reason=reason,
        cold=model.is_cold_for(kind),
    )
