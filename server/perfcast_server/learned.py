"""Between pass models and the messages that states are kept and exported as."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from perfcast.v1 import calibration_pb2
from perfcast_engine.step import StepModel
from perfcast_planning.planner.pass_model import LearningOptions, PassModel
from perfcast_planning.planner.samples import Features, Samples, SampleStore
from perfcast_planning.planner.telemetry import MAX_COUNT, Kind

from perfcast_server.errors import invalid
from perfcast_server.loads import named

FORMAT = 1
COLD_START_FACTOR = 1.15
MAX_VERSION = 2**62
MAX_CLIENTS = 256
MAX_OBSERVATIONS = MAX_BUCKETS = 4096
DIGEST_BYTES = 32
OPTIONAL = ("min_faster_correction_factor", "max_slower_correction_factor", "cold_start_factor")
DEFAULTS = LearningOptions(cold_start_factor=COLD_START_FACTOR)
KIND_FIELDS = {Kind.PREFILL: "prefill", Kind.DECODE: "decode", Kind.MIXED: "mixed"}


def options_of(message: calibration_pb2.LearningOptions) -> LearningOptions:
    """The options in force: what the message leaves out, the service's defaults."""
    values: dict[str, Any] = {}
    told = {field.name for field, _ in message.ListFields()}
    for item in fields(LearningOptions):
        given = getattr(message, item.name)
        if item.name in OPTIONAL:
            values[item.name] = (given or None) if item.name in told else getattr(DEFAULTS, item.name)
        else:
            values[item.name] = given or getattr(DEFAULTS, item.name)
    for name, most in (("max_observations", MAX_OBSERVATIONS), ("bucket_count", MAX_BUCKETS)):
        if values[name] > most:
            raise invalid(f"options.{name}", f"must be at most {most}")
    with named("options"):
        return LearningOptions(**values)


def options_message(options: LearningOptions) -> calibration_pb2.LearningOptions:
    values = {item.name: getattr(options, item.name) for item in fields(LearningOptions)}
    return calibration_pb2.LearningOptions(**{name: value or 0 for name, value in values.items()})


def snapshot(
    model: PassModel, handle: str, version: int, clients: Sequence[calibration_pb2.ClientProgress]
) -> calibration_pb2.CalibrationState:
    return calibration_pb2.CalibrationState(
        format=FORMAT,
        engine_handle=handle,
        version=version,
        options=options_message(model.options),
        clients=clients,
        **{name: _samples(model.stores[kind]) for kind, name in KIND_FIELDS.items()},
    )


def _samples(store: SampleStore) -> calibration_pb2.KindSamples:
    return calibration_pb2.KindSamples(
        features=[value for features in store.features for value in features],
        values=store.values,
        lower_seen=store.lower_seen or (),
        upper_seen=store.upper_seen or (),
    )


def model_of(state: calibration_pb2.CalibrationState, steps: StepModel | None) -> PassModel:
    """The model that a state describes; InvalidField where no model could have come to be in it."""
    if state.format != FORMAT:
        raise invalid("state.format", f"must be {FORMAT}")
    if not 1 <= state.version <= MAX_VERSION:
        raise invalid("state.version", f"must lie in [1, {MAX_VERSION}]")
    model = PassModel(options_of(state.options), steps)
    for kind, name in KIND_FIELDS.items():
        told = getattr(state, name)
        axes = len(kind.value)
        if len(told.features) != axes * len(told.values) or not all(map(_is_count, told.features)):
            raise invalid(f"state.{name}.features", f"must be {axes} whole numbers for each value")
        columns = [iter(told.features)] * axes
        points: list[Features] = list(zip(*columns, strict=True))
        lower, upper = _bounds(told.lower_seen, axes, name), _bounds(told.upper_seen, axes, name)
        with named(f"state.{name}"):
            model.restore(kind, Samples(points, list(told.values), lower, upper))
    _check_clients(state)
    return model


def _bounds(values: Sequence[float], axes: int, name: str) -> Features | None:
    if len(values) not in (0, axes) or not all(map(_is_count, values)):
        raise invalid(f"state.{name}", f"must tell {axes} bounds or none")
    return tuple(values) or None


def _is_count(value: float) -> bool:
    return 0 <= value <= MAX_COUNT and value == int(value)


def _check_clients(state: calibration_pb2.CalibrationState) -> None:
    names = [client.client_id for client in state.clients]
    if len(names) > MAX_CLIENTS or len(set(names)) != len(names):
        raise invalid("state.clients", f"must be at most {MAX_CLIENTS}, each once")
    for client in state.clients:
        if not (
            0 < len(client.client_id) <= 128
            and client.sequence > 0
            and len(client.digest) == DIGEST_BYTES
            and 0 < client.state_version <= state.version
            and client.kept_iterations >= 0
        ):
            raise invalid("state.clients", "holds one that no call could have left")
