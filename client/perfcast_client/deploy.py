"""Files that deploy a configuration: what is asked and what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from perfcast.v1 import deploy_pb2

from perfcast_client.errors import PerfcastError
from perfcast_client.reading import Result
from perfcast_client.record import Record, wire


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(Record):
    """How engines are run, where a prediction does not say; unset leaves it to the engine.

    The last three are names of the engine's own flags.
    """

    model_path: str = ""
    engine_version: str = ""
    served_name: str = ""
    port: int = 8000
    kv_router: bool = False
    trust_remote_code: bool = False
    disable_cuda_graphs: bool = False
    block_size: int | None = wire("block_size_tokens", None)
    moe_backend: str = ""
    moe_all_to_all: str = ""
    attention_backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Record):
    """Where the engines run; unset takes the default of the target."""

    name: str = ""
    namespace: str = ""
    image: str = ""
    pull_secret: str = ""
    volume_claim: str = ""
    volume_mount: str = ""
    transport: str = ""
    gpus_per_node: int | None = None
    hosts: tuple[str, ...] = ()
    gateway_url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Figures(Result):
    """Of all replicas together."""

    concurrency_total: int
    ttft_ms: float
    tpot_ms: float | None
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class DeployedRole(Result):
    """Equal workers of one role; batches and tokens per attention-DP rank. ``parallel``: widths by name."""

    role: str
    workers_total: int
    gpus_per_worker: int
    nodes_per_worker: int
    parallel: Mapping[str, int]
    max_batch_per_rank: int
    max_num_tokens_per_rank: int
    max_seq_len_tokens: int
    memory_fraction: float
    kv_cache_quant: str
    chunked_prefill: bool
    prefix_caching: bool


@dataclass(frozen=True, slots=True)
class DeploySummary(Result):
    """What files deploy, and the figures that were predicted for it."""

    target: str
    model: str
    system: str
    backend: str
    version: str
    gpus_total: int
    roles: tuple[DeployedRole, ...]
    predicted: Figures | None
    profile: str


@dataclass(frozen=True, slots=True)
class Change(Result):
    """One value that differs from the prediction, and why."""

    field: str
    predicted: Any
    deployed: Any
    reason: str

    @classmethod
    def of(cls, m: deploy_pb2.DeployChange) -> Change:
        return cls.read(m, predicted=json.loads(m.predicted), deployed=json.loads(m.deployed))


@dataclass(frozen=True, slots=True)
class DeployFiles(Result):
    """``files`` by their path below a new folder, for which ``name`` follows from the content; scripts end in .sh.

    ``predicted_as_deployed``: filled, under limits that differ from the predicted ones; None where none differs.
    """

    name: str
    files: Mapping[str, bytes]
    summary: DeploySummary
    changes: tuple[Change, ...]
    predicted_as_deployed: Figures | None
    notes: tuple[str, ...]

    @classmethod
    def of(cls, m: deploy_pb2.GenerateResponse) -> DeployFiles:
        return cls.read(m, files={file.path: file.content for file in m.files})

    def to_dict(self) -> dict[str, Any]:
        told = super(DeployFiles, self).to_dict()
        return told | {"files": {path: content.decode() for path, content in self.files.items()}}


@dataclass(frozen=True, slots=True)
class Validation(Result):
    """Whether files are valid; else the first problem."""

    valid: bool
    error: PerfcastError | None
    summary: DeploySummary | None


@dataclass(frozen=True, slots=True)
class DeployTarget(Result):
    name: str
    writes: str
    backends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DeployBackend(Result):
    """The versions of an engine whose flags are known, and its version in each release of Dynamo."""

    name: str
    first_version: str
    newest_version: str
    version_by_release: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeployTargets(Result):
    """What files can be generated for, and for which engines."""

    targets: tuple[DeployTarget, ...]
    backends: tuple[DeployBackend, ...]
