"""What estimates and searches return: frozen, typed, with ``to_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perfcast.v1 import search_pb2

from perfcast_client import serving
from perfcast_client.config import EngineConfig
from perfcast_client.errors import PerfcastError, from_detail, refused
from perfcast_client.reading import Result
from perfcast_client.record import read
from perfcast_client.results import EngineStamp, OperatorLatency, Provenance


@dataclass(frozen=True, slots=True)
class WorkerGroup(Result):
    """Equal workers of one role; ``engine`` is an index into the engines of the same answer."""

    role: str
    engine: int
    workers_total: int
    gpus_per_worker: int
    batch_per_rank: int
    batch_total: int
    requests_per_s_per_worker: float | None
    memory_gib_per_gpu: float
    encoder_memory_gib_per_gpu: float


@dataclass(frozen=True, slots=True)
class Iterations(Result):
    """How an aggregated engine spends its iterations on one batch; counts per attention-DP rank."""

    ctx_tokens: int
    balance: float
    prompts_per_step: float
    decodes_per_step: float
    tokens_per_step: float
    mixed_steps: float
    mixed_step_decodes: float
    mixed_step_ms: float
    decode_steps: float
    decode_step_ms: float


@dataclass(frozen=True, slots=True)
class Ranking(Result):
    """What a search says of a row beside its metrics."""

    tokens_per_s_per_gpu_cluster: float
    replicas_total: int
    gpus_used_total: int
    load_served_percent: float | None
    meets_targets: bool


@dataclass(frozen=True, slots=True)
class EncodeWorkers(Result):
    """Workers that only encode images."""

    workers_total: int
    gpus_per_worker: int
    batch: int
    memory_gib_per_gpu: float


@dataclass(frozen=True, slots=True)
class AfdTopology(Result):
    """How attention and FFN of one decode worker take turns."""

    attention_nodes: int
    ffn_nodes: int
    attention_tp: int
    ffn_ep: int
    microbatches: int
    is_optimistic: bool


@dataclass(frozen=True, slots=True)
class Deployment(Result):
    """One deployment and what it delivers: rates, GPUs and concurrency are those of one replica.

    ``iterations`` of aggregated ones, ``prefill_ms`` and ``decode_ms`` of static ones, ``ranking`` of rows of a search.
    """

    mode: str
    ttft_ms: float
    tpot_ms: float
    request_latency_ms: float
    encode_ms: float
    requests_per_s: float
    requests_per_s_per_gpu: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    concurrency_total: int
    gpus_total: int
    power_w: float | None
    workers: tuple[WorkerGroup, ...]
    prefill_ms: float
    decode_ms: float
    iterations: Iterations | None
    ranking: Ranking | None
    encode: EncodeWorkers | None
    afd: AfdTopology | None


@dataclass(frozen=True, slots=True)
class DeployedEngine(Result):
    """An engine of a deployment; asking for its ``config`` gives the same numbers."""

    stamp: EngineStamp
    config: EngineConfig
    modes: Mapping[str, str]
    gpus_total: int
    mapping: str


@dataclass(frozen=True, slots=True)
class GpuMemory(Result):
    """What one GPU holds."""

    weights_bytes: float
    activations_bytes: float
    kv_cache_bytes: float
    nccl_bytes: float
    others_bytes: float
    total_bytes: float
    capacity_bytes: float
    kv_budget_bytes: float
    memory_fraction: float
    out_of_memory: bool
    kv_over_budget: bool


@dataclass(frozen=True, slots=True)
class StepLatency(Result):
    """One kind of step of a deployment; ``operators`` is empty unless asked for."""

    name: str
    engine: int
    latency_ms: float
    provenance: Provenance
    operators: tuple[OperatorLatency, ...]


@dataclass(frozen=True, slots=True)
class Estimate(Result):
    """One deployment under one load. ``memory`` by the index of ``engines``."""

    deployment: Deployment
    engines: tuple[DeployedEngine, ...]
    memory: tuple[GpuMemory, ...]
    steps: tuple[StepLatency, ...]
    profile: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryEstimate(Result):
    """Memory of one GPU of an engine and the KV cache that it leaves; the last two where a workload is given."""

    engine: DeployedEngine
    at_start: GpuMemory
    kv_cache_tokens: int
    kv_cache_bytes_per_token: int
    usable_kv_cache_bytes: int
    usable_kv_cache_tokens: int
    kv_cache_blocks: int | None
    largest_batch_per_rank: int | None
    at_batch: GpuMemory | None


@dataclass(frozen=True, slots=True)
class FrontPoint(Result):
    tokens_per_s_per_user: float
    tokens_per_s_per_gpu_cluster: float
    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class SearchProgress(Result):
    """How far a search is. ``front`` is empty where it has not changed since the last progress."""

    mode: str
    backend: str
    experiments_done: int
    experiments_total: int
    mappings_done: int
    mappings_total: int
    front: tuple[FrontPoint, ...]


@dataclass(frozen=True, slots=True)
class Violation(Result):
    """How far the closest candidate misses one target."""

    target: str
    limit_ms: float
    value_ms: float
    excess_ms: float
    excess_percent: float


@dataclass(frozen=True, slots=True)
class Experiment(Result):
    """One mode on one backend. ``status``: ok, unmet, no_memory, no_kv, no_data or failed. Where nothing meets the
    targets, ``closest`` misses them least, by ``violations``. ``refused``: mappings without an engine, and why."""

    name: str
    mode: str
    backend: str
    status: str
    eligible: bool
    picks: tuple[Deployment, ...]
    front: tuple[Deployment, ...]
    rows: tuple[Deployment, ...]
    closest: Deployment | None
    violations: tuple[Violation, ...]
    engines: tuple[DeployedEngine, ...]
    refused: tuple[tuple[str, PerfcastError], ...]
    rows_total: int
    mappings_total: int
    points_total: int

    @property
    def best(self) -> Deployment | None:
        return self.picks[0] if self.picks else None

    def configuration(self, row: Deployment, of: SearchResult) -> serving.Aggregated | serving.Disaggregated:
        """A deployment of this experiment, ``of`` that search, as something to estimate or to generate files for."""
        for name in ("encode", "afd"):
            if getattr(row, name) is not None:
                raise refused(name, self.name, "has workers that only a search knows; search without them")
        if row.iterations is not None:
            (group,) = row.workers
            engine = self.engines[group.engine].config
            return serving.Aggregated(engine=engine, batch=group.batch_per_rank, ctx_tokens=row.iterations.ctx_tokens)
        prefill, decode = (
            serving.Pool(engine=self.engines[g.engine].config, batch=g.batch_per_rank, workers=g.workers_total)
            for g in row.workers
        )
        joined: dict[str, Any] = {"kv_transfer": of.kv_transfer, "matching": of.matching}
        return serving.Disaggregated(prefill=prefill, decode=decode, **joined)

    @classmethod
    def of(cls, m: search_pb2.Experiment) -> Experiment:
        refused = ((r.mapping, from_detail(r.error.reason, r.error.message, r.error.metadata)) for r in m.refused)
        return cls.read(m, refused=tuple(refused))


@dataclass(frozen=True, slots=True)
class SearchResult(Result):
    """The experiments of a search. ``best`` names the one with the best pick, ``closest``, where nothing is eligible,
    the one whose closest deployment misses the targets least; the targets are those in force, 0 for none."""

    experiments: tuple[Experiment, ...]
    eligible: bool
    best: str
    closest: str
    profile: str
    workload: serving.Workload
    ttft_ms: float
    tpot_ms: float
    request_latency_ms: float
    total_gpus: int
    limits: serving.Limits
    nextn_accepted: float
    matching: serving.Matching
    kv_transfer: serving.KvTransfer | None

    def experiment(self, name: str) -> Experiment | None:
        return next((e for e in self.experiments if e.name == name), None)

    @property
    def isl(self) -> int:
        return self.workload.isl

    @property
    def osl(self) -> int:
        return self.workload.osl

    @property
    def prefix(self) -> int:
        return self.workload.prefix

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchResult:
        """The inverse of ``to_dict``, but for the refused mappings, which are left out."""
        told = dict(values) if isinstance(values, Mapping) else {}
        if isinstance(told.get("experiments"), list):
            told["experiments"] = [e | {"refused": ()} if isinstance(e, dict) else e for e in told["experiments"]]
        return read(cls, told, "")  # type: ignore[no-any-return]

    @classmethod
    def of(cls, m: search_pb2.SearchResult) -> SearchResult:
        return cls.read(m, m.targets)


def search_event(m: search_pb2.SearchResponse) -> SearchProgress | SearchResult:
    return SearchResult.of(m.result) if m.HasField("result") else SearchProgress.of(m.progress)
