"""What a search is asked with."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast.v1 import search_pb2, serving_pb2

from perfcast_client.config import EngineConfig
from perfcast_client.record import Record, wire
from perfcast_client.serving import KvTransfer, Limits, Matching, Workload

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets(Record):
    """Latency limits of the means. ``request_latency_ms`` replaces the TPOT limit; a TTFT limit is then optional."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    request_latency_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Space(Record):
    """Sizes that the parallel widths may take, and GPUs of a worker; an empty list takes the default for the model."""

    num_gpu: Sizes = ()
    tp: Sizes = ()
    pp: Sizes = ()
    attn_dp: Sizes = ()
    moe_tp: Sizes = ()
    moe_ep: Sizes = ()
    cp: Sizes = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica(Record):
    """What one replica of a disaggregated deployment may be made of; the two pool limits apply only together."""

    gpu_counts: Sizes = ()
    max_gpus: int | None = None
    max_prefill_workers: int | None = None
    max_decode_workers: int | None = None
    max_prefill_gpus: int | None = None
    max_decode_gpus: int | None = None
    same_tp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTask(Record):
    """One search: an engine without its parallel sizes, a load, targets, a budget of GPUs.

    ``backends`` are tried side by side (none: the engine's own), ``modes`` are "aggregated", "disaggregated" and "afd"
    (none: the first two). ``decode_engine``: what decode workers run on, where that is not ``engine``. ``encode_pool``:
    images are encoded by workers of their own. ``objective``: "throughput" or "latency" whatever the targets.
    ``max_rows``: also return this many of the best rows of each experiment.
    """

    engine: EngineConfig
    workload: Workload
    targets: Targets = Targets()
    total_gpus: int | None = None
    backends: tuple[str, ...] = ()
    modes: tuple[str, ...] = wire("modes", (), enum=serving_pb2.ServingMode, prefix="SERVING_MODE_")
    decode_engine: EngineConfig | None = None
    space: Space | None = None
    prefill_space: Space | None = None
    decode_space: Space | None = None
    limits: Limits | None = None
    nextn_accepted: float = 0.0
    chunked_prefill: bool = False
    prefill_max_batch: int | None = wire("prefill_max_batch_per_rank", None)
    decode_max_batch: int | None = wire("decode_max_batch_per_rank", None)
    replica: Replica | None = None
    matching: Matching | None = None
    kv_transfer: KvTransfer | None = None
    autoscale: bool = False
    encode_pool: bool = False
    strict_sla: bool = False
    skip_sweep: bool = False
    objective: str = wire("objective", "", enum=search_pb2.Objective, prefix="OBJECTIVE_")
    top: int = 5
    max_rows: int = 0
