"""Deployments, their engines and their memory as messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from perfcast.v1 import common_pb2, serving_pb2
from perfcast_engine.backends import GIB
from perfcast_engine.memory import Footprint
from perfcast_planning.serving.estimate import Fit
from perfcast_planning.serving.worker import Worker
from perfcast_planning.serving.workload import Workload

from perfcast_server import wire

AGGREGATED = serving_pb2.SERVING_MODE_AGGREGATED
ROLES = {"engine": common_pb2.ROLE_BOTH, "prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
METRICS = (
    "ttft_ms",
    "tpot_ms",
    "request_latency_ms",
    "encode_ms",
    "requests_per_s",
    "requests_per_s_per_gpu",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "tokens_per_s_per_user",
    "prefill_ms",
    "decode_ms",
)
AFD_WIDTHS = ("attention_nodes", "ffn_nodes", "attention_tp", "ffn_ep", "microbatches")
ITERATIONS = tuple(field.name for field in serving_pb2.Iterations.DESCRIPTOR.fields)


class Deployed:
    """The engines of one answer, each told once, and the deployments on them.

    ``asked_of`` gives the configuration that was asked for a worker.
    """

    def __init__(self, asked_of: Callable[[Worker], common_pb2.EngineConfig], load: Workload) -> None:
        self._asked_of = asked_of
        self._load = load
        self._indices: dict[int, int] = {}
        self.engines: list[serving_pb2.DeployedEngine] = []

    def index(self, worker: Worker) -> int:
        """The number of a worker's engine among ``engines``."""
        known = self._indices.get(id(worker))
        if known is None:
            known = self._indices[id(worker)] = len(self.engines)
            self.engines.append(engine_message(worker, self._asked_of(worker)))
        return known

    def message(self, row: Mapping[str, Any], mode: Any, workers: Mapping[str, Worker]) -> serving_pb2.Deployment:
        """One row of the engine; ``workers`` by role: "engine", or "prefill" and "decode"."""
        message = serving_pb2.Deployment(
            mode=mode,
            concurrency_total=int(row["concurrency"]),
            gpus_total=int(row["gpus"]),
            power_w=row["power_w"] or None,
            workers=[self._group(row, role, worker) for role, worker in workers.items()],
            **{name: row[name] for name in METRICS if name in row},
        )
        if mode == AGGREGATED:
            told = {name: row[name] for name in ITERATIONS}
            message.iterations.CopyFrom(serving_pb2.Iterations(**told | {"ctx_tokens": int(told["ctx_tokens"])}))
        if "encode_workers" in row:
            message.encode.CopyFrom(
                serving_pb2.EncodeWorkers(
                    workers_total=int(row["encode_workers"]),
                    gpus_per_worker=int(row["encode_gpus"]),
                    batch=int(row["encode_batch"]),
                    memory_gib_per_gpu=row["encode_memory_gib"],
                )
            )
        if "afd_ffn_nodes" in row:
            widths = {name: int(row[f"afd_{name}"]) for name in AFD_WIDTHS}
            message.afd.CopyFrom(serving_pb2.AfdTopology(**widths, is_optimistic=bool(row["afd_optimistic"])))
        return message

    def _group(self, row: Mapping[str, Any], role: str, worker: Worker) -> serving_pb2.WorkerGroup:
        prefix = "" if role == "engine" else f"{role}_"
        batch, workers, gpus = int(row[f"{prefix}batch"]), 1, worker.gpus
        if prefix or "cell_engines" in row:
            workers = int(row[f"{prefix}workers" if prefix else "cell_engines"])
        if role == "decode" and "afd_ffn_nodes" in row:
            gpus = int(row["decode_gpus"])
        rate = row[f"{prefix}requests_per_s"]
        if "encode_workers" in row and role != "decode":
            rate /= workers  # of the engines behind the encode workers together
        return serving_pb2.WorkerGroup(
            role=ROLES[role],
            engine=self.index(worker),
            workers_total=workers,
            gpus_per_worker=gpus,
            batch_per_rank=batch,
            batch_total=batch * worker.parallel.attn_dp,
            requests_per_s_per_worker=rate if math.isfinite(rate) else None,
            memory_gib_per_gpu=row[f"{prefix}memory_gib"],
            encoder_memory_gib_per_gpu=self._encoder_gib(worker, batch) if role != "decode" else 0.0,
        )

    def _encoder_gib(self, worker: Worker, batch: int) -> float:
        if worker.encoder is None:
            return 0.0
        weights, activations = worker.encoder_bytes(self._load, np.array([batch], np.float64))
        return float(weights + activations[0]) / GIB


def engine_message(worker: Worker, original: common_pb2.EngineConfig) -> serving_pb2.DeployedEngine:
    engine = worker.engine
    assert engine is not None, "an engine made of tables"
    modes = engine.modes
    return serving_pb2.DeployedEngine(
        stamp=wire.stamp(engine),
        config=wire.config_message(engine.config, original),
        modes=wire.quant_message(modes.gemm, modes.moe, modes.kv, modes.fmha, modes.comm),
        gpus_total=worker.gpus,
        mapping=worker.label,
    )


def memory_message(fit: Fit) -> serving_pb2.GpuMemory:
    """The first point of ``fit``."""
    return serving_pb2.GpuMemory(
        **footprint_fields(fit.memory),
        capacity_bytes=fit.capacity_bytes,
        kv_budget_bytes=max(0.0, float(fit.kv_budget_bytes[0])),
        memory_fraction=fit.kv_fraction,
        out_of_memory=bool(fit.out_of_memory[0]),
        kv_over_budget=bool(fit.kv_over_budget[0]),
    )


def footprint_fields(memory: Footprint) -> dict[str, float]:
    parts = memory._asdict() | {"total": memory.total}
    return {f"{'kv_cache' if name == 'kv' else name}_bytes": float(part[0]) for name, part in parts.items()}


def workload_message(load: Workload) -> serving_pb2.Workload:
    images = load.images
    return serving_pb2.Workload(
        isl_tokens=load.isl,
        osl_tokens=load.osl,
        prefix_tokens=load.prefix,
        images=serving_pb2.Images(
            height_pixels=images.height,
            width_pixels=images.width,
            count_per_request=images.count,
            tokens_per_image=images.tokens,
        )
        if images
        else None,
    )


def warnings(roles: Mapping[str, Fit]) -> list[str]:
    told = []
    for role, fit in roles.items():
        if fit.out_of_memory[0]:
            told.append(f"{role}: the GPU memory does not suffice")
        elif fit.kv_over_budget[0]:
            told.append(f"{role}: the KV cache is over its budget, so fewer requests than asked for will run at once")
    return told
