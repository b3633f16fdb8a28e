"""Calibration states, as calls for either client: ``client.ask(calibration.tune(engine, "prod", iterations, ...))``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

from google.protobuf.message import DecodeError
from perfcast.v1 import calibration_pb2

from perfcast_client.calls import Call, engine_call, fill
from perfcast_client.errors import refused
from perfcast_client.planner import iteration_message
from perfcast_client.planner_types import Iteration
from perfcast_client.reading import Result
from perfcast_client.record import EngineLike

CALIBRATION = "/perfcast.v1.Calibration/"
OPTIONAL = ("min_faster_correction_factor", "max_slower_correction_factor", "cold_start_factor")


@dataclass(frozen=True, slots=True)
class LearningOptions:
    """How observations are kept and used; None turns a bound or the guard off."""

    max_observations: int = 64
    min_observations: int = 5
    bucket_count: int = 16
    min_faster_correction_factor: float | None = 0.5
    max_slower_correction_factor: float | None = 2.0
    max_num_tokens: int = 8192
    max_batch_size: int = 512
    max_kv_tokens: int = 2_000_000
    cold_start_factor: float | None = 1.15
    cold_start_observations: int = 10

    def message(self) -> calibration_pb2.LearningOptions:
        values = {name: value if value is not None else 0.0 for name, value in asdict(self).items()}
        for name in OPTIONAL:
            if getattr(self, name) == 0:
                raise refused(f"options.{name}", 0, "is no factor; None turns it off")
        for name in set(values) - set(OPTIONAL):
            if not values[name] > 0:
                raise refused(f"options.{name}", values[name], "is not positive")
        return fill(calibration_pb2.LearningOptions(), **values)


@dataclass(frozen=True, slots=True)
class Tuned(Result):
    state_version: int
    kept_iterations: int


@dataclass(frozen=True, slots=True)
class KindDiagnosis(Result):
    kind: str
    retained_observations: int
    correction_factors: tuple[float, ...]
    no_signal_reason: str
    cold: bool


@dataclass(frozen=True, slots=True)
class Diagnosis(Result):
    state_version: int
    source: str
    readiness: str
    retained_observations: int
    correction_ready_buckets: int
    min_correction_factor: float | None
    max_correction_factor: float | None
    avg_correction_factor: float | None
    kinds: tuple[KindDiagnosis, ...]
    options: LearningOptions


def tune(
    engine: EngineLike | None,
    state: str,
    iterations: Iterable[Iteration],
    *,
    client_id: str,
    sequence: int,
    options: LearningOptions | None = None,
    expected_version: int | None = None,
) -> Call[Tuned]:
    """Learn from measured iterations. A repeated (client_id, sequence) is answered again without learning."""
    request = calibration_pb2.TuneRequest(
        state_name=state,
        iterations=map(iteration_message, iterations),
        client_id=client_id,
        expected_version=expected_version,
        options=None if options is None else options.message(),
    )
    fill(request, sequence=sequence)

    return engine_call(CALIBRATION + "Tune", request, calibration_pb2.TuneResponse, Tuned.of, engine)


def diagnose(engine: EngineLike | None, state: str) -> Call[Diagnosis]:
    """What a state has learned."""
    request = calibration_pb2.DiagnoseRequest(state_name=state)
    return engine_call(CALIBRATION + "Diagnose", request, calibration_pb2.DiagnoseResponse, _read_diagnosis, engine)


def _read_diagnosis(m: calibration_pb2.DiagnoseResponse) -> Diagnosis:
    options = {item.name: getattr(m.options, item.name) for item in fields(LearningOptions)}
    options |= {name: options[name] or None for name in OPTIONAL}
    return Diagnosis.read(m, options=LearningOptions(**options))


def export_state(engine: EngineLike | None, state: str) -> Call[bytes]:
    """The whole of a state, as bytes that ``import_state`` takes."""

    def read(m: calibration_pb2.ExportStateResponse) -> bytes:
        return m.state.SerializeToString(deterministic=True)

    request = calibration_pb2.ExportStateRequest(state_name=state)
    return engine_call(CALIBRATION + "ExportState", request, calibration_pb2.ExportStateResponse, read, engine)


def import_state(
    engine: EngineLike | None, state: str, exported: bytes, *, expected_version: int | None = None
) -> Call[int]:
    """Make a state what another was when it was exported; its version now."""
    request = calibration_pb2.ImportStateRequest(state_name=state, expected_version=expected_version)
    try:
        request.state.ParseFromString(exported)
    except DecodeError:
        raise refused("exported", exported, "is not an exported state") from None

    def read(m: calibration_pb2.ImportStateResponse) -> int:
        return m.state_version

    return engine_call(CALIBRATION + "ImportState", request, calibration_pb2.ImportStateResponse, read, engine)
