"""The Serving service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from google.protobuf.message import Message
from perfcast.v1 import common_pb2, serving_pb2
from perfcast_engine.answer import F64
from perfcast_engine.config import FUSED
from perfcast_engine.predictor import Engine, Predictor
from perfcast_engine.profiles import LATENCY_CORRECTIONS
from perfcast_engine.step_result import StepResult
from perfcast_planning.serving.afd import MATCHING
from perfcast_planning.serving.aggregated import aggregated_memory
from perfcast_planning.serving.disaggregated import USUAL_MATCHING
from perfcast_planning.serving.estimate import (
    Estimate,
    Fit,
    Pool,
    estimate_aggregated,
    estimate_disaggregated,
    estimate_static,
    fit_of,
)
from perfcast_planning.serving.static import Phases
from perfcast_planning.serving.worker import Worker, worker_of
from perfcast_planning.serving.workload import EngineLimits, Workload

from perfcast_server import asked, deployments, wire
from perfcast_server.asked import count, factor
from perfcast_server.deployments import Deployed
from perfcast_server.engines import Engines, Ready
from perfcast_server.errors import invalid
from perfcast_server.rpc import Unary
from perfcast_server.settings import Settings

SERVICE = "perfcast.v1.Serving"
STRIDE, MAX_BATCH = 32, 4096
PHASES = (Phases.BOTH, Phases.BOTH, Phases.PREFILL, Phases.DECODE)
MAX_BEAM = 1024
USUAL_TOKENS = 8192  # of one iteration, as the backends have it
UNSAID = (common_pb2.ROLE_UNSPECIFIED, common_pb2.ROLE_BOTH)
Told = dict[str, tuple[Engine, common_pb2.EngineConfig]]  # by role, with the configuration that was asked for
ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}


class Serving:
    """Answers what one deployment delivers and holds."""

    def __init__(self, engines: Engines, settings: Settings) -> None:
        self._engines = engines
        self._settings = settings

    def methods(self) -> tuple[Unary, ...]:
        return (
            Unary("Estimate", serving_pb2.EstimateRequest, self.estimate),
            Unary("EstimateMemory", serving_pb2.EstimateMemoryRequest, self.estimate_memory),
        )

    async def estimate(self, request: serving_pb2.EstimateRequest) -> Message:
        kind = request.WhichOneof("deployment")
        if kind is None:
            raise invalid("deployment", "is missing; give static, aggregated or disaggregated")
        given = getattr(request, kind)
        parts = {"prefill": given.prefill, "decode": given.decode} if kind == "disaggregated" else {"engine": given}
        cut = kind == "disaggregated" and given.HasField("afd")
        if cut:
            del parts["decode"]
        ready = {role: await engine_of(self._engines, part, role, kind) for role, part in parts.items()}
        engines = {role: (one.engine, one.original) for role, one in ready.items()}
        predictor = self._engines.predictor

        def estimated() -> Message:
            with asked.named_as_asked():
                return self._estimated(request, kind, engines | (self._sides(given, predictor) if cut else {}))

        return await self._engines.off_loop(estimated)

    def _sides(self, given: serving_pb2.DisaggregatedDeployment, predictor: Predictor) -> Told:
        """The engines of the attention workers and of the FFN ranks that decode is cut into."""
        original, topology = given.decode.config, asked.topology(given.afd)
        wide = any(width > 1 for _, width in original.parallel.ListFields())
        if given.decode.WhichOneof("engine") != "config" or wide:
            raise invalid("disaggregated.decode.config", "must be given, without parallel sizes: afd has them")
        config = wire.engine_config(original, self._settings.max_config_json_bytes)
        config = replace(config, role="decode", resolution="estimate", moe_comm=FUSED)
        experts, node = predictor.registry.spec(config).moe.experts, predictor.catalog.system(config.system)
        mappings = zip(("decode", "ffn"), topology.mappings(node.gpus_per_node, experts), strict=True)
        return {role: (predictor.engine(replace(config, parallel=at)), original) for role, at in mappings}

    def _estimated(self, request: serving_pb2.EstimateRequest, kind: str, engines: Told) -> Message:
        load = asked.workload(request.workload)
        workers = {role: worker_of(engine) for role, (engine, _) in engines.items()}
        question = _Question(
            getattr(request, kind),
            workers,
            load,
            asked.limits(request.limits, request.nextn_accepted),
            request.include_operators,
        )
        asked.check_length(load, request.static.stride or STRIDE, self._settings)
        found: Estimate = getattr(question, kind)()
        if not request.allow_out_of_memory:
            found.require_fit(kv=False)
        originals = {role: original for role, (_, original) in engines.items()}
        return _told(found, "afd" if "ffn" in engines else kind, workers, originals, load)

    async def estimate_memory(self, request: serving_pb2.EstimateMemoryRequest) -> Message:
        ready = await self._engines.of(request)
        return await self._engines.off_loop(lambda: _memory(request, ready))


async def engine_of(engines: Engines, part: Any, role: str, kind: str) -> Ready:
    """The engine of one role of a deployment; a configuration that does not name one serves that of its pool."""
    if part.WhichOneof("engine") is None:
        path = f"{kind}.{role}" if role in ROLES else kind
        raise invalid(f"{path}.engine", "is missing; give config or handle")
    if role in ROLES and part.HasField("config") and part.config.role in UNSAID:
        asked_for = type(part)(config=part.config)
        asked_for.config.role = ROLES[role]
        part = asked_for
    return await engines.of(part)


@dataclass(frozen=True, slots=True)
class _Question:
    """One deployment to estimate: what the request says of it, and its engines by role."""

    given: Any
    workers: Mapping[str, Worker]
    load: Workload
    limits: EngineLimits
    operators: bool

    def static(self) -> Estimate:
        given = self.given
        if not 0 <= given.phases < len(PHASES):
            raise invalid("static.phases", f"has the unknown value {given.phases}")
        return estimate_static(
            self.workers["engine"],
            self.load,
            count(given.batch_per_rank, "static.batch_per_rank"),
            PHASES[given.phases],
            self.limits,
            correction=factor(given, "latency_correction", "static.latency_correction", 1.0),
            stride=count(given.stride, "static.stride", STRIDE),
            beam=count(given.beam_width, "static.beam_width", 1, most=MAX_BEAM),
            operators=self.operators,
        )

    def aggregated(self) -> Estimate:
        given = self.given
        return estimate_aggregated(
            self.workers["engine"],
            self.load,
            count(given.batch_per_rank, "aggregated.batch_per_rank"),
            count(given.ctx_tokens_per_rank, "aggregated.ctx_tokens_per_rank", 0, least=0) or None,
            self.limits,
            operators=self.operators,
        )

    def disaggregated(self) -> Estimate:
        pools, factors, ffn = [], [], self.workers.get("ffn")
        for number, role in enumerate(ROLES):
            worker, part, path = self.workers[role], getattr(self.given, role), f"disaggregated.{role}"
            usual = worker.profile[LATENCY_CORRECTIONS][number]
            factors.append(factor(part, "latency_correction", f"{path}.latency_correction", usual))
            batch = count(part.batch_per_rank, f"{path}.batch_per_rank")
            workers = count(part.workers_total, f"{path}.workers_total", 1)
            limits = self.limits if role == "decode" else replace(self.limits, accepted=0.0)
            cut = (ffn, asked.topology(self.given.afd)) if ffn is not None and role == "decode" else None
            pools.append(Pool(worker=worker, batch=batch, workers=workers, limits=limits, cut=cut))
        return estimate_disaggregated(
            pools[0],
            pools[1],
            self.load,
            asked.matching(self.given.matching, USUAL_MATCHING if ffn is None else MATCHING),
            asked.kv_transfer(self.given.kv_transfer),
            corrections=(factors[0], factors[1]),
            operators=self.operators,
        )


def _told(
    found: Estimate,
    kind: str,
    workers: Mapping[str, Worker],
    originals: Mapping[str, common_pb2.EngineConfig],
    load: Workload,
) -> Message:
    asked_of = {id(worker): originals[role] for role, worker in workers.items()}
    deployed = Deployed(lambda worker: asked_of[id(worker)], load)
    mode = serving_pb2.ServingMode.Value(f"SERVING_MODE_{kind.upper()}")
    serving = {role: worker for role, worker in workers.items() if role != "ffn"}
    deployment = deployed.message(found.rows.row(0), mode, serving)
    if "ffn" in workers:
        deployed.index(workers["ffn"])
    roles = list(workers)
    return serving_pb2.EstimateResponse(
        deployment=deployment,
        engines=deployed.engines,
        memory=[deployments.memory_message(fit) for fit in found.fit.values()],
        steps=[
            _step(name, roles.index(name) if name in roles else 0, step) for name, step in found.steps.items()
        ],
        profile=wire.PROFILES.index(found.profile, 1),  # type: ignore[arg-type]
        warnings=deployments.warnings(found.fit),
    )  # fmt: skip


def _step(name: str, engine: int, step: StepResult) -> serving_pb2.StepLatency:
    return serving_pb2.StepLatency(
        name=name,
        engine=engine,
        latency_ms=step.ms.item(0),
        provenance=wire.provenance(step.by_source[0], int(step.tier[0])),
        operators=[wire.operator_latency(name, answer) for name, answer in (step.operators or {}).items()],
    )


def _memory(request: serving_pb2.EstimateMemoryRequest, ready: Ready) -> Message:
    worker = worker_of(ready.engine)
    with asked.named_as_asked():
        given = request.memory_fraction if request.HasField("memory_fraction") else None
        fraction = worker.memory.kv_fraction(given)
        capacity = worker.memory.kv_capacity(
            count(request.max_num_tokens_per_rank, "max_num_tokens_per_rank", USUAL_TOKENS),
            fraction,
            tolerance=request.tolerance_fraction if request.HasField("tolerance_fraction") else None,
        )
        usable = capacity.within_tolerance or (capacity.kv_bytes, capacity.kv_tokens)
        held: dict[str, Any] = {f"{name}_bytes": float(size) for name, size in capacity.breakdown.items()}
        answer = serving_pb2.EstimateMemoryResponse(
            engine=deployments.engine_message(worker, ready.original),
            at_start=serving_pb2.GpuMemory(
                **held,
                kv_cache_bytes=capacity.kv_bytes,
                total_bytes=sum(held.values()) + capacity.kv_bytes,
                capacity_bytes=capacity.capacity_bytes,
                kv_budget_bytes=capacity.kv_bytes,
                memory_fraction=fraction,
            ),
            kv_cache_tokens=capacity.kv_tokens,
            kv_cache_bytes_per_token=capacity.bytes_per_token,
            usable_kv_cache_bytes=usable[0],
            usable_kv_cache_tokens=usable[1],
        )
        if request.block_size_tokens:
            answer.kv_cache_blocks = capacity.blocks(count(request.block_size_tokens, "block_size_tokens"))
        if request.HasField("workload"):
            _at_load(answer, worker, asked.workload(request.workload), request.batch_per_rank, given)
    return answer


def _at_load(
    answer: serving_pb2.EstimateMemoryResponse, worker: Worker, load: Workload, batch: int, fraction: float | None
) -> None:
    """The largest batch of in-flight requests that fits, and memory at ``batch``."""
    prompt = worker.prompt_tokens(load)

    def fit(batches: F64) -> Fit:
        memory = aggregated_memory(worker, load, batches, np.full(len(batches), float(prompt)))
        return fit_of(worker, memory, fraction, True)

    whole = fit(np.arange(1.0, MAX_BATCH + 1))
    full = whole.out_of_memory | whole.kv_over_budget
    answer.largest_batch_per_rank = int(np.argmax(full)) if full.any() else MAX_BATCH
    at = count(batch, "batch_per_rank", max(1, answer.largest_batch_per_rank))
    answer.at_batch.CopyFrom(deployments.memory_message(fit(np.array([float(at)]))))
