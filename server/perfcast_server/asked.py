"""What is asked of deployments, from messages of perfcast.v1 to the engine's own types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from perfcast.v1 import search_pb2, serving_pb2
from perfcast_engine.errors import InvalidField
from perfcast_planning.search.match import Replica
from perfcast_planning.search.space import Space
from perfcast_planning.serving.afd import Topology
from perfcast_planning.serving.disaggregated import USUAL_MATCHING, Matching
from perfcast_planning.serving.workload import EngineLimits, Images, KvTransfer, Targets, Workload

from perfcast_server.errors import ServiceError, invalid
from perfcast_server.settings import Settings

MAX_COUNT = 2**31 - 1
MAX_FACTOR = 1e6
MAX_LATENCY_S = 1e9
LEAST_TIME_MS, LEAST_BYTES_PER_S = 1e-6, 1.0
MAX_WIDTH = 4096
MAX_SIZES, MAX_MAPPINGS = 64, 1 << 20
MAX_WORKERS, MAX_GPU_COUNTS = 512, 4096
DEFAULT_TTFT_MS, DEFAULT_TPOT_MS = 2000.0, 30.0

# The engine's name of a field -> its path in the request, where that is another.
PATHS = {
    "isl": "workload.isl_tokens",
    "osl": "workload.osl_tokens",
    "prefix": "workload.prefix_tokens",
    "images.height": "workload.images.height_pixels",
    "images.width": "workload.images.width_pixels",
    "images.count": "workload.images.count_per_request",
    "images.tokens": "workload.images.tokens_per_image",
    "ttft_ms": "targets.ttft_ms",
    "tpot_ms": "targets.tpot_ms",
    "request_latency_ms": "targets.request_latency_ms",
    "kv_transfer.bandwidth_bytes_s": "kv_transfer.bandwidth_bytes_per_s",
    "kv_transfer.concurrent": "kv_transfer.concurrent_transfers",
    "free_gpu_memory_fraction": "limits.memory_fraction",
    "prefill_max_batch": "prefill_max_batch_per_rank",
    "decode_max_batch": "decode_max_batch_per_rank",
    "load.max_gpus": "max_gpus_total",
} | {f"afd.{field.name}": f"disaggregated.afd.{field.name}" for field in fields(Topology)}


@contextmanager
def named_as_asked() -> Iterator[None]:
    """Fields that the engine refuses are told by their paths in the request."""
    try:
        yield
    except InvalidField as error:
        path = PATHS.get(error.details.get("field", ""))
        if path is None:
            raise
        details = {key: value for key, value in error.details.items() if key != "field"}
        raise type(error)(path, error.message.partition(": ")[2], **details) from None


def count(value: int, path: str, default: int | None = None, least: int = 1, most: int = MAX_COUNT) -> int:
    """A whole number; 0 takes the ``default`` where there is one."""
    if value == 0 and default is not None:
        return default
    if not least <= value <= most:
        raise invalid(path, f"must be a whole number from {least} to {most}, not {value}")
    return value


def factor(message: Any, field: str, path: str, default: float) -> float:
    """An optional positive number."""
    value: float = getattr(message, field) if message.HasField(field) else default
    if not 1 / MAX_FACTOR <= value <= MAX_FACTOR:
        raise invalid(path, f"must be a number from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}")
    return value


def workload(message: serving_pb2.Workload) -> Workload:
    images = message.images
    return Workload(
        isl=message.isl_tokens,
        osl=message.osl_tokens,
        prefix=message.prefix_tokens,
        images=Images(
            images.height_pixels, images.width_pixels, images.count_per_request, images.tokens_per_image
        ),
    )  # fmt: skip


def targets(message: search_pb2.Targets) -> Targets:
    for name in ("ttft_ms", "tpot_ms", "request_latency_ms"):
        value = getattr(message, name)
        if value and not value >= LEAST_TIME_MS:
            raise invalid(f"targets.{name}", f"must be at least {LEAST_TIME_MS:g}, or 0")
    whole = message.request_latency_ms or None
    return Targets(
        ttft_ms=message.ttft_ms or (DEFAULT_TTFT_MS if whole is None else None),
        tpot_ms=message.tpot_ms or DEFAULT_TPOT_MS,
        request_latency_ms=whole,
    )


def check_length(load: Workload, stride: int, settings: Settings) -> None:
    """Refuses outputs whose decode takes more points than a request may."""
    points, most = math.ceil(load.osl / max(1, stride)), settings.max_points_per_request
    if points > most:
        raise ServiceError(
            "LIMIT",
            f"workload.osl_tokens: {points} points of a trajectory, more than {most}; ask for fewer output tokens",
            limit="max_points_per_request",
            field="workload.osl_tokens",
            retry="no",
        )


def limits(message: serving_pb2.EngineLimits, accepted: float) -> EngineLimits:
    return EngineLimits(
        accepted=accepted,
        memory_fraction=message.memory_fraction if message.HasField("memory_fraction") else None,
        max_seq_len=count(message.max_seq_len_tokens, "limits.max_seq_len_tokens", 0) or None,
        max_num_tokens=count(message.max_num_tokens_per_rank, "limits.max_num_tokens_per_rank", 0) or None,
    )


def kv_transfer(message: serving_pb2.KvTransfer) -> KvTransfer:
    if message.bandwidth_bytes_per_s and not message.bandwidth_bytes_per_s >= LEAST_BYTES_PER_S:
        raise invalid("kv_transfer.bandwidth_bytes_per_s", f"must be at least {LEAST_BYTES_PER_S:g}, or 0")
    if not 0 <= message.latency_s <= MAX_LATENCY_S:
        raise invalid("kv_transfer.latency_s", f"must be a number from 0 to {MAX_LATENCY_S:g}")
    return KvTransfer(
        message.bandwidth_bytes_per_s or math.inf, message.latency_s, message.concurrent_transfers or 1
    )  # fmt: skip


def matching(message: serving_pb2.Matching, own: Matching = USUAL_MATCHING) -> Matching:
    return Matching(
        **{f.name: factor(message, f.name, f"matching.{f.name}", getattr(own, f.name)) for f in fields(own)}
    )


def topology(message: serving_pb2.AfdTopology) -> Topology:
    names = ("attention_nodes", "ffn_nodes", "attention_tp", "ffn_ep", "microbatches")
    given = {name: count(getattr(message, name), f"disaggregated.afd.{name}", most=MAX_WIDTH) for name in names}
    return Topology(**given, optimistic=message.is_optimistic)


def space(message: search_pb2.Space, path: str, moe: bool = True) -> Space:
    lists = {field.name: tuple(getattr(message, field.name)) for field in fields(Space)}
    for name, sizes in lists.items():
        if len(sizes) > MAX_SIZES:
            raise ServiceError(
                "LIMIT", f"{path}.{name} has {len(sizes)} sizes, more than {MAX_SIZES}", limit="space", retry="no"
            )
        if len(set(sizes)) != len(sizes):
            raise invalid(f"{path}.{name}", "holds a size twice")
    mappings = math.prod(max(1, len(sizes)) for name, sizes in lists.items() if name != "num_gpu")
    if mappings > MAX_MAPPINGS:
        raise ServiceError("LIMIT", f"{path} spans {mappings} combinations of sizes", limit="space", retry="no")
    try:
        return Space(**lists)
    except InvalidField as error:
        field = error.details["field"].removeprefix("space.")
        raise invalid(f"{path}.{field}", error.message.partition(": ")[2]) from None


def replica(message: search_pb2.Replica) -> Replica:
    if len(message.gpu_counts) > MAX_GPU_COUNTS:
        raise invalid("replica.gpu_counts", f"has more than {MAX_GPU_COUNTS} entries")
    for number, gpus in enumerate(message.gpu_counts):
        count(gpus, f"replica.gpu_counts[{number}]")
    own = Replica()
    workers = ("max_prefill_workers", "max_decode_workers")
    pools = ("max_gpus", "max_prefill_gpus", "max_decode_gpus")
    told: dict[str, Any] = {
        name: count(getattr(message, name), f"replica.{name}", getattr(own, name), most=MAX_WORKERS) for name in workers
    }
    told |= {name: count(getattr(message, name), f"replica.{name}", 0) or None for name in pools}
    return Replica(gpu_counts=tuple(message.gpu_counts), same_tp=message.same_tp, **told)
