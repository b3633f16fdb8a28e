"""What calls return: frozen, typed, with ``to_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from perfcast.v1 import admin_pb2, catalog_pb2, common_pb2, prediction_pb2

from perfcast_client.config import EngineConfig, enum_word
from perfcast_client.errors import PerfcastError, from_detail

F64 = NDArray[np.float64]
SHARES = ("silicon_share", "empirical_share", "sol_share", "estimated_share", "mixed_share")


class Result:
    """Base of results."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, ready for JSON."""
        return {key: _plain(value) for key, value in asdict(self).items()}  # type: ignore[call-overload]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [None if isinstance(item, float) and item != item else item for item in value.tolist()]
    if isinstance(value, Mapping):
        return {key: _plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, PerfcastError):
        return {"reason": value.reason, "message": value.message, "details": value.details}
    return value


@dataclass(frozen=True, slots=True)
class EngineStamp(Result):
    """Which engine and which data answered."""

    handle: str
    system: str
    backend: str
    version: str
    database_mode: str
    profile: str
    data_version: str

    @classmethod
    def of(cls, m: common_pb2.EngineStamp) -> EngineStamp:
        mode, profile = enum_word("database_mode", m.database_mode), enum_word("profile", m.profile)
        return cls(m.handle, m.system, m.backend, m.version, mode, profile, m.data_version)


@dataclass(frozen=True, slots=True)
class Provenance(Result):
    """Shares of a latency by origin, and how far the empirical model had to borrow."""

    silicon_share: float
    empirical_share: float
    sol_share: float
    estimated_share: float
    mixed_share: float
    tier: str

    @classmethod
    def of(cls, m: common_pb2.Provenance) -> Provenance:
        return cls(**{name: getattr(m, name) for name in SHARES}, tier=word(common_pb2.Tier, m.tier, "TIER_"))


@dataclass(frozen=True, slots=True)
class OperatorLatency(Result):
    name: str
    latency_ms: float
    source: str

    @classmethod
    def of(cls, m: prediction_pb2.OperatorLatency) -> OperatorLatency:
        return cls(m.name, m.latency_ms, word(common_pb2.Source, m.source, "SOURCE_"))


@dataclass(frozen=True, slots=True)
class Engine(Result):
    """A resolved engine. Questions may name it instead of its configuration."""

    stamp: EngineStamp
    config: EngineConfig
    gpus_total: int
    model_family: str
    notes: tuple[str, ...]
    modes: Mapping[str, str]

    @property
    def handle(self) -> str:
        return self.stamp.handle

    @classmethod
    def of(cls, m: prediction_pb2.ResolveEngineResponse) -> Engine:
        stamp, config = EngineStamp.of(m.engine), EngineConfig.from_message(m.resolved)
        modes = {item.name: value for item, value in m.modes.ListFields()}
        return cls(stamp, config, m.gpus_total, m.model_family, tuple(m.notes), modes)


@dataclass(frozen=True, slots=True)
class Prediction(Result):
    """One step. ``operators`` is empty unless asked for."""

    latency_ms: float
    engine: EngineStamp
    provenance: Provenance
    operators: tuple[OperatorLatency, ...] = ()

    @classmethod
    def of(cls, m: prediction_pb2.PredictStepResponse) -> Prediction:
        operators = tuple(map(OperatorLatency.of, m.operators))
        return cls(m.latency_ms, EngineStamp.of(m.engine), Provenance.of(m.provenance), operators)


@dataclass(frozen=True, slots=True)
class Predictions(Result):
    """Many steps. ``latency_ms`` (N,) is NaN exactly at the points in ``misses``, which only ``allow_misses`` lets
    happen. ``operators`` (N,) ms by name and ``shares`` (N,) by origin are empty unless asked for."""

    latency_ms: F64
    engine: EngineStamp
    provenance: Provenance
    operators: Mapping[str, F64] = field(default_factory=dict)
    shares: Mapping[str, F64] = field(default_factory=dict)
    misses: Mapping[int, PerfcastError] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.latency_ms)

    @classmethod
    def of(cls, m: prediction_pb2.PredictStepsResponse) -> Predictions:
        n = len(m.latency_ms)
        ms = np.fromiter(m.latency_ms, np.float64, n)
        misses = {}
        for group in m.misses:
            error = from_detail(group.error.reason, group.error.message, group.error.metadata)
            misses.update(dict.fromkeys(group.points, error))
        ms[list(misses)] = np.nan
        operators = {o.name: np.fromiter(o.latency_ms, np.float64, n) for o in m.operators}
        columns = ((name, getattr(m.point_provenance, name)) for name in SHARES)
        shares = {name: np.fromiter(column, np.float64, n) for name, column in columns if len(column)}
        return cls(ms, EngineStamp.of(m.engine), Provenance.of(m.provenance), operators, shares, misses)


@dataclass(frozen=True, slots=True)
class ServerInfo(Result):
    """The handshake."""

    version: str
    api_revision: int
    methods: tuple[str, ...]
    max_message_bytes: int
    max_points_per_request: int
    max_concurrent_requests: int

    @classmethod
    def of(cls, m: catalog_pb2.GetServerInfoResponse) -> ServerInfo:
        limits = m.limits
        return cls(
            m.version,
            m.api_revision,
            tuple(m.methods),
            limits.max_message_bytes,
            limits.max_points_per_request,
            limits.max_concurrent_requests,
        )


@dataclass(frozen=True, slots=True)
class Reloaded(Result):
    """What a reload has done. data_version: content hash of all data; workers: processes that answer from them."""

    data_version: str
    changed: bool
    packs: int
    workers: int

    @classmethod
    def of(cls, m: admin_pb2.ReloadDataResponse) -> Reloaded:
        return cls(m.data_version, m.changed, m.packs, m.workers)


@dataclass(frozen=True, slots=True)
class Version(Result):
    backend: str
    version: str
    slot: str


@dataclass(frozen=True, slots=True)
class System(Result):
    """One GPU system; None where its description says nothing."""

    name: str
    gpus_per_node: int
    gpus_per_rack: int | None
    sm_version: int | None
    memory_bytes: float | None
    memory_bandwidth_bytes_per_s: float
    intra_node_bandwidth_bytes_per_s: float
    inter_node_bandwidth_bytes_per_s: float
    power_w: float | None
    flops_per_s: Mapping[str, float]
    versions: tuple[Version, ...]

    @classmethod
    def of(cls, m: catalog_pb2.System) -> System:
        return cls(
            m.name,
            m.gpus_per_node,
            given(m, "gpus_per_rack"),
            given(m, "sm_version"),
            given(m, "memory_bytes"),
            m.memory_bandwidth_bytes_per_s,
            m.intra_node_bandwidth_bytes_per_s,
            m.inter_node_bandwidth_bytes_per_s,
            given(m, "power_w"),
            dict(m.flops_per_s),
            versions(m.backends),
        )


@dataclass(frozen=True, slots=True)
class Model(Result):
    model: str
    family: str
    architecture: str
    layers: int
    hidden_size: int
    context_tokens: int
    experts: int
    quant: Mapping[str, str]

    @classmethod
    def of(cls, m: catalog_pb2.Model) -> Model:
        quant = {item.name: value for item, value in m.quant.ListFields()}
        return cls(m.model_id, m.family, m.architecture, m.layers, m.hidden_size, m.context_tokens, m.experts, quant)


@dataclass(frozen=True, slots=True)
class PhaseSupport(Result):
    phase: str
    supported: bool
    error: PerfcastError | None
    provenance: Provenance | None


@dataclass(frozen=True, slots=True)
class Support(Result):
    """Whether an engine can be answered for; ``error`` when its configuration itself is refused."""

    supported: bool
    engine: EngineStamp | None
    error: PerfcastError | None
    phases: tuple[PhaseSupport, ...]

    @classmethod
    def of(cls, m: catalog_pb2.CheckSupportResponse) -> Support:
        phases = tuple(
            PhaseSupport(
                word(catalog_pb2.Phase, phase.phase, "PHASE_"),
                phase.supported,
                error_of(phase),
                Provenance.of(phase.provenance) if phase.HasField("provenance") else None,
            )
            for phase in m.phases
        )
        stamp = EngineStamp.of(m.engine) if m.HasField("engine") else None
        return cls(m.supported, stamp, error_of(m), phases)


def given(message: Any, name: str) -> Any:
    """An optional field; None where it is absent."""
    return getattr(message, name) if message.HasField(name) else None


def versions(backends: Any) -> tuple[Version, ...]:
    return tuple(Version(b.backend, v.version, v.slot) for b in backends for v in b.versions)


def error_of(m: Any, name: str = "error") -> PerfcastError | None:
    """The exception that an ErrorDetail stands for; None where there is none."""
    told = given(m, name)
    return None if told is None else from_detail(told.reason, told.message, told.metadata)


def word(enum: Any, number: int, prefix: str) -> str:
    return str(enum.Name(number)).removeprefix(prefix).lower()
