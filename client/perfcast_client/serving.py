"""What an estimate is asked with: a load, and a deployment to carry it."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast.v1 import serving_pb2

from perfcast_client.record import EngineLike, Record, wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Images(Record):
    """Images of each request; without a size, ``tokens`` of each apply."""

    count: int = wire("count_per_request")
    height: int = wire("height_pixels", 0)
    width: int = wire("width_pixels", 0)
    tokens: int = wire("tokens_per_image", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Record):
    """Every request alike: ``isl`` prompt tokens, ``prefix`` of them cached, ``osl`` generated tokens."""

    isl: int = wire("isl_tokens")
    osl: int = wire("osl_tokens")
    prefix: int = wire("prefix_tokens", 0)
    images: Images | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer(Record):
    """Hand-over of the uncached prompt's KV cache from prefill to decode, over one link per prefill GPU."""

    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    concurrent: int = wire("concurrent_transfers", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching(Record):
    """How rates and latencies of separate pools combine; None takes the reference's fitted factor."""

    prefill_degradation: float | None = None
    decode_degradation: float | None = None
    encoder_degradation: float | None = None
    ttft_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Record):
    """How engines are set up, where that is not their framework's default."""

    memory_fraction: float | None = None
    max_seq_len: int | None = wire("max_seq_len_tokens", None)
    max_num_tokens: int | None = wire("max_num_tokens_per_rank", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Static(Record):
    """One batch per rank in, one batch out. ``phases``: both, prefill or decode."""

    engine: EngineLike
    batch: int = wire("batch_per_rank")
    phases: str = wire("phases", "both", enum=serving_pb2.StaticPhases, prefix="STATIC_PHASES_")
    beam_width: int = 1
    stride: int = 32
    latency_correction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated(Record):
    """``batch`` requests per rank in flight, ``ctx_tokens`` prefill tokens an iteration (None: a whole prompt)."""

    engine: EngineLike
    batch: int = wire("batch_per_rank")
    ctx_tokens: int | None = wire("ctx_tokens_per_rank", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool(Record):
    """Equal workers of one role. ``latency_correction`` None: as the profile says."""

    engine: EngineLike
    batch: int = wire("batch_per_rank")
    workers: int = wire("workers_total", 1)
    latency_correction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Afd(Record):
    """How a decode worker is cut: nodes of attention workers, each ``attention_tp`` wide, and nodes of FFN ranks, which
    share experts by ``ffn_ep``. Transfers hide behind three and more micro-batches where ``optimistic``."""

    attention_nodes: int
    ffn_nodes: int
    attention_tp: int
    ffn_ep: int = 1
    microbatches: int = 3
    optimistic: bool = wire("is_optimistic", True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregated(Record):
    """Prefill and decode on workers of their own. ``afd`` cuts decode in two: its engine then has no parallel sizes."""

    prefill: Pool
    decode: Pool
    kv_transfer: KvTransfer | None = None
    matching: Matching | None = None
    afd: Afd | None = None


Deployment = Static | Aggregated | Disaggregated
"""What can be estimated."""

KINDS: dict[type[Record], str] = {Static: "static", Aggregated: "aggregated", Disaggregated: "disaggregated"}
