"""What calls return: frozen, typed, with ``to_dict``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from perfcast.v1 import catalog_pb2, prediction_pb2

from perfcast_client.config import EngineConfig
from perfcast_client.errors import PerfcastError, from_detail
from perfcast_client.reading import Result

F64 = NDArray[np.float64]
SHARES = ("silicon_share", "empirical_share", "sol_share", "estimated_share", "mixed_share")


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


@dataclass(frozen=True, slots=True)
class Provenance(Result):
    """Shares of a latency by origin, and how far the empirical model had to borrow."""

    silicon_share: float
    empirical_share: float
    sol_share: float
    estimated_share: float
    mixed_share: float
    tier: str


@dataclass(frozen=True, slots=True)
class OperatorLatency(Result):
    name: str
    latency_ms: float
    source: str


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
        return cls.read(m, stamp=EngineStamp.of(m.engine), config=EngineConfig.from_message(m.resolved))


@dataclass(frozen=True, slots=True)
class Prediction(Result):
    """One step. ``operators`` is empty unless asked for."""

    latency_ms: float
    engine: EngineStamp
    provenance: Provenance
    operators: tuple[OperatorLatency, ...] = ()


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
        return cls.read(m, m.limits)


@dataclass(frozen=True, slots=True)
class Reloaded(Result):
    """What a reload has done. data_version: content hash of all data; workers: processes that answer from them."""

    data_version: str
    changed: bool
    packs: int
    workers: int


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
        return cls.read(m, versions=versions(m.backends))


@dataclass(frozen=True, slots=True)
class Model(Result):
    renamed: ClassVar[Mapping[str, str]] = {"model": "model_id"}

    model: str
    family: str
    architecture: str
    layers: int
    hidden_size: int
    context_tokens: int
    experts: int
    quant: Mapping[str, str]


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


def versions(backends: Iterable[catalog_pb2.BackendVersions]) -> tuple[Version, ...]:
    return tuple(Version(b.backend, v.version, v.slot) for b in backends for v in b.versions)
