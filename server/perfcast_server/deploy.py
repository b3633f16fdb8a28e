"""The Deploy service: files from predicted configurations. Nothing is written here; files travel in the answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import Message
from perfcast.v1 import common_pb2, deploy_pb2
from perfcast_deploy import bundle as bundles
from perfcast_deploy.bundle import Bundle
from perfcast_deploy.catalog import system_facts
from perfcast_deploy.choice import Choice
from perfcast_deploy.deployment import Cluster, Deployment
from perfcast_deploy.describe import TARGETS, engines
from perfcast_deploy.policy import POLICIES
from perfcast_engine.errors import EngineError
from perfcast_engine.step import DEFAULT_STRIDE
from perfcast_planning.serving.estimate import Pool
from perfcast_planning.serving.worker import worker_of

from perfcast_server import asked, wire
from perfcast_server.asked import count
from perfcast_server.engines import Engines, Ready
from perfcast_server.errors import ServiceError, invalid, refusal
from perfcast_server.rpc import Unary
from perfcast_server.serving import engine_of
from perfcast_server.settings import Settings

SERVICE = "perfcast.v1.Deploy"
NUMBERED = (POLICIES[0], *POLICIES)  # in order of DeployPolicy
ROLES = {"agg": common_pb2.ROLE_BOTH, "prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
MAX_FILES, MAX_COPIES, MAX_ENTRIES = 1024, 4096, 1024
# Fields of the request -> those of a deployment, where they have other names.
SETTINGS = {
    "model_path": "model",
    "engine_version": "version",
    "kv_router": "router",
    "block_size_tokens": "tokens_per_block",
}
CLUSTER = {"volume_claim": "pvc", "volume_mount": "pvc_mount", "gateway_url": "gateway"}


class Deploy:
    """Answers which files deploy a prediction, and what files deploy."""

    def __init__(self, engines: Engines, settings: Settings) -> None:
        self._engines = engines
        self._settings = settings

    def methods(self) -> tuple[Unary, ...]:
        return (
            Unary("Generate", deploy_pb2.GenerateRequest, self.generate),
            Unary("ListTargets", deploy_pb2.ListTargetsRequest, self.list_targets),
            Unary("Validate", deploy_pb2.ValidateRequest, self.validate, is_large=True),
        )

    async def generate(self, request: deploy_pb2.GenerateRequest) -> Message:
        kind = request.WhichOneof("deployment")
        if kind is None:
            raise invalid("deployment", "is missing; give aggregated or disaggregated")
        if not 0 <= request.policy < len(NUMBERED):
            raise invalid("policy", f"has the unknown value {request.policy}")
        given = getattr(request, kind)
        parts = {"agg": given} if kind == "aggregated" else {"prefill": given.prefill, "decode": given.decode}
        ready = {role: await engine_of(self._engines, part, role, kind) for role, part in parts.items()}
        return await self._engines.off_loop(lambda: self._generated(request, parts, ready))

    async def list_targets(self, request: deploy_pb2.ListTargetsRequest) -> Message:
        return deploy_pb2.ListTargetsResponse(
            targets=[
                deploy_pb2.DeployTarget(name=name, writes=target.writes, backends=target.backends)
                for name, target in TARGETS.items()
            ],
            backends=[deploy_pb2.DeployBackend(**told) for told in engines()],
        )

    async def validate(self, request: deploy_pb2.ValidateRequest) -> Message:
        if len(request.files) > MAX_FILES:
            raise ServiceError("LIMIT", f"more than {MAX_FILES} files", limit="files", retry="no")
        return await self._engines.off_loop(lambda: _validated(request.files))

    def _generated(
        self, request: deploy_pb2.GenerateRequest, parts: Mapping[str, Any], ready: Mapping[str, Ready]
    ) -> deploy_pb2.GenerateResponse:
        with asked.named_as_asked():
            choice = self._chosen(request, parts, ready)
            settings = _settings(request, choice.system)
            made = choice.bundle(request.target, NUMBERED[request.policy], **settings)
        return _answer(made)

    def _chosen(
        self, request: deploy_pb2.GenerateRequest, parts: Mapping[str, Any], ready: Mapping[str, Ready]
    ) -> Choice:
        load, pools = asked.workload(request.workload), {}
        asked.check_length(load, DEFAULT_STRIDE, self._settings)
        for role, part in parts.items():
            path = "aggregated" if role == "agg" else f"disaggregated.{role}"
            if role != "agg" and part.HasField("latency_correction"):
                raise invalid(f"{path}.latency_correction", "is for estimates; nothing deployed is corrected")
            workers = 1 if role == "agg" else count(part.workers_total, f"{path}.workers_total", 1, most=MAX_COPIES)
            pools[role] = Pool(
                worker=worker_of(ready[role].engine),
                batch=count(part.batch_per_rank, f"{path}.batch_per_rank"),
                workers=workers,
                limits=asked.limits(request.limits, 0.0 if role == "prefill" else request.nextn_accepted),
            )
        replicas = count(request.replicas_total, "replicas_total", 1, most=MAX_COPIES)
        ctx_tokens = count(request.aggregated.ctx_tokens_per_rank, "aggregated.ctx_tokens_per_rank", 0) or None
        return Choice(
            pools=pools,
            load=load,
            ctx_tokens=ctx_tokens,
            replicas=replicas,
            matching=asked.matching(request.disaggregated.matching),
            kv_transfer=asked.kv_transfer(request.disaggregated.kv_transfer),
        )


def _answer(made: Bundle) -> deploy_pb2.GenerateResponse:
    return deploy_pb2.GenerateResponse(
        name=made.name,
        files=[
            deploy_pb2.DeployFile(path=path, content=content, executable=path.endswith(".sh"))
            for path, content in made.files.items()
        ],
        summary=_summary(made.deployment, made.target),
        changes=[
            deploy_pb2.DeployChange(
                field=change.field,
                predicted=json.dumps(change.predicted, default=list),
                deployed=json.dumps(change.deployed, default=list),
                reason=change.reason,
            )
            for change in made.changes
        ],
        predicted_as_deployed=_figures(made.predicted) if made.predicted else None,
        notes=made.notes,
    )


def _settings(request: deploy_pb2.GenerateRequest, system: str) -> dict[str, Any]:
    """Fields of a deployment beside those that the prediction says; empty ones are left out."""
    told = _given(request.settings, SETTINGS, "settings")
    if told.pop("disable_cuda_graphs", False):
        told["cuda_graphs"] = False
    cluster = _given(request.cluster, CLUSTER, "cluster")
    cluster |= {name: kind(cluster[name]) for name, kind in (("hosts", tuple), ("env", dict)) if name in cluster}
    return told | {"cluster": Cluster(**{"gpus_per_node": system_facts(system)["gpus_per_node"]} | cluster)}


def _given(message: Message, names: Mapping[str, str], path: str) -> dict[str, Any]:
    found = {}
    for field, value in message.ListFields():
        texts: Iterable[Any] = (value,)
        if isinstance(value, Mapping):
            texts = (*value, *value.values())
        elif not isinstance(value, str | int):
            texts = value
        texts = list(texts)
        if len(texts) > MAX_ENTRIES or any(isinstance(text, str) and len(text) > wire.MAX_NAME for text in texts):
            raise invalid(f"{path}.{field.name}", f"is longer than {wire.MAX_NAME} characters or {MAX_ENTRIES} entries")
        if isinstance(value, int) and not isinstance(value, bool):
            count(value, f"{path}.{field.name}")
        found[names.get(field.name, field.name)] = value
    return found


def _validated(files: Iterable[deploy_pb2.DeployFile]) -> deploy_pb2.ValidateResponse:
    contents = {file.path: file.content for file in files}
    try:
        deployment = bundles.validate(contents)
        target = bundles.manifest_of(contents)["target"]
    except EngineError as error:
        return deploy_pb2.ValidateResponse(valid=False, error=refusal(error).detail())
    return deploy_pb2.ValidateResponse(valid=True, summary=_summary(deployment, target))


def _summary(d: Deployment, target: str) -> deploy_pb2.DeploySummary:
    predicted, profile = d.predicted, d.predicted.profile
    return deploy_pb2.DeploySummary(
        target=target,
        model=d.model,
        system=d.system,
        backend=d.backend,
        version=d.version,
        gpus_total=d.gpus,
        roles=[
            deploy_pb2.DeployedRole(
                role=ROLES[role.name],
                workers_total=role.workers,
                gpus_per_worker=role.gpus,
                nodes_per_worker=d.nodes(role),
                parallel=common_pb2.ParallelConfig(
                    tp=role.tp, pp=role.pp, attn_dp=role.dp, cp=1, moe_tp=role.moe_tp, moe_ep=role.moe_ep
                ),
                max_batch_per_rank=role.max_batch,
                max_num_tokens_per_rank=role.max_tokens,
                max_seq_len_tokens=role.max_seq_len,
                memory_fraction=role.kv_fraction,
                kv_cache_quant=role.kv_dtype,
                chunked_prefill=role.chunked_prefill,
                prefix_caching=role.prefix_caching,
            )
            for role in d.roles
        ],
        predicted=_figures(vars(predicted)) if predicted.ttft_ms is not None else None,
        profile=wire.PROFILES.index(profile, 1) if profile in wire.PROFILES else 0,  # type: ignore[arg-type]
    )


def _figures(told: Mapping[str, Any]) -> deploy_pb2.DeployFigures:
    return deploy_pb2.DeployFigures(
        concurrency_total=told["concurrency"] or 0,
        ttft_ms=told["ttft_ms"] or 0.0,
        tpot_ms=told["tpot_ms"],
        output_tokens_per_s=told["output_tokens_per_s"] or 0.0,
    )
