"""Every call once, for the blocking and the asyncio client: path, request, how to read the answer, deadline."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message
from perfcast.v1 import API_REVISION, admin_pb2, catalog_pb2, deploy_pb2, prediction_pb2, search_pb2, serving_pb2

from perfcast_client import deploy, deployments, errors, results, serving
from perfcast_client._version import __version__
from perfcast_client.channel import DEFAULT_DEADLINE_S, RELOAD_DEADLINE_S, SEARCH_DEADLINE_S, SURFACE_DEADLINE_S
from perfcast_client.config import EngineConfig
from perfcast_client.coverage import Coverage, ModelSupport
from perfcast_client.record import EngineLike, put_engine
from perfcast_client.search import SearchTask
from perfcast_client.snapshot import Received
from perfcast_client.steps import Step, put_columns, put_step, whole

T = TypeVar("T")
M = TypeVar("M")
CATALOG, PREDICTION, ADMIN = "/perfcast.v1.Catalog/", "/perfcast.v1.Prediction/", "/perfcast.v1.Admin/"
SERVING, SEARCH = "/perfcast.v1.Serving/", "/perfcast.v1.Search/"
DEPLOY = "/perfcast.v1.Deploy/"
STREAM_STEPS = PREDICTION + "StreamSteps"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One RPC to make. ``inline`` is the same with the configuration instead of the handle, where it is known."""

    path: str
    request: Message
    response: Any
    read: Callable[[Any], T]
    deadline_s: float = DEFAULT_DEADLINE_S
    inline: Message | None = None
    is_stream: bool = False  # the server's answers come one by one, ``read`` gets the list of them


def server_info() -> Call[results.ServerInfo]:
    request, response = catalog_pb2.GetServerInfoRequest(), catalog_pb2.GetServerInfoResponse
    return Call(CATALOG + "GetServerInfo", request, response, results.ServerInfo.of)


def systems() -> Call[tuple[results.System, ...]]:
    request, response = catalog_pb2.ListSystemsRequest(), catalog_pb2.ListSystemsResponse
    return Call(CATALOG + "ListSystems", request, response, lambda m: tuple(map(results.System.of, m.systems)))


def models(contains: str, family: str) -> Call[tuple[results.Model, ...]]:
    request = catalog_pb2.ListModelsRequest(contains=contains, family=family)
    response = catalog_pb2.ListModelsResponse
    return Call(CATALOG + "ListModels", request, response, lambda m: tuple(map(results.Model.of, m.models)))


def versions(system: str, backend: str) -> Call[tuple[results.Version, ...]]:
    request = catalog_pb2.ListVersionsRequest(system=system, backend=backend)
    response = catalog_pb2.ListVersionsResponse
    return Call(CATALOG + "ListVersions", request, response, lambda m: results.versions(m.backends))


def check_support(config: EngineConfig) -> Call[results.Support]:
    request = catalog_pb2.CheckSupportRequest(config=config.to_message())
    return Call(CATALOG + "CheckSupport", request, catalog_pb2.CheckSupportResponse, results.Support.of)


def support(system: str, backend: str, version: str, models: Sequence[str]) -> Call[tuple[ModelSupport, ...]]:
    request = catalog_pb2.ListSupportRequest(system=system, backend=backend, version=version, model_ids=models)
    response = catalog_pb2.ListSupportResponse
    return Call(
        CATALOG + "ListSupport", request, response, lambda m: tuple(map(ModelSupport.of, m.models)), SEARCH_DEADLINE_S
    )


def coverage(engine: EngineLike, choose_parallel: bool) -> Call[Coverage]:
    if choose_parallel and not isinstance(engine, EngineConfig):
        raise errors.refused("engine", engine, "is not a configuration, for which alone a mapping is chosen")
    request, inline = both(catalog_pb2.CoverageRequest(choose_parallel=choose_parallel), engine)
    response = catalog_pb2.CoverageResponse
    return Call(CATALOG + "Coverage", request, response, Coverage.of, SURFACE_DEADLINE_S, inline)


def reload_data() -> Call[results.Reloaded]:
    request, response = admin_pb2.ReloadDataRequest(), admin_pb2.ReloadDataResponse
    return Call(ADMIN + "ReloadData", request, response, results.Reloaded.of, deadline_s=RELOAD_DEADLINE_S)


def resolve(engine: EngineLike) -> Call[results.Engine]:
    request, inline = both(prediction_pb2.ResolveEngineRequest(), engine)
    response = prediction_pb2.ResolveEngineResponse
    return Call(PREDICTION + "ResolveEngine", request, response, results.Engine.of, inline=inline)


def predict(engine: EngineLike, step: Step, operators: bool) -> Call[results.Prediction]:
    request = prediction_pb2.PredictStepRequest(include_operators=operators)
    put_step(request, step)
    request, inline = both(request, engine)
    response = prediction_pb2.PredictStepResponse
    return Call(PREDICTION + "PredictStep", request, response, results.Prediction.of, inline=inline)


def predict_many(
    engine: EngineLike, steps: Step, operators: bool, provenance: bool, allow_misses: bool
) -> Call[results.Predictions]:
    request = prediction_pb2.PredictStepsRequest(
        include_operators=operators, include_provenance=provenance, allow_misses=allow_misses
    )
    put_columns(request, steps)
    request, inline = both(request, engine)
    response = prediction_pb2.PredictStepsResponse
    return Call(PREDICTION + "PredictSteps", request, response, results.Predictions.of, inline=inline)


def surface(engine: EngineLike, max_pass_tokens: int, known_hash: str) -> Call[Received]:
    request, inline = both(
        prediction_pb2.GetSurfaceRequest(
            max_pass_tokens=whole("max_pass_tokens", max_pass_tokens), known_surface_hash=known_hash
        ),
        engine,
    )
    response = prediction_pb2.GetSurfaceResponse
    path = PREDICTION + "GetSurface"
    return Call(path, request, response, Received.of, SURFACE_DEADLINE_S, inline, is_stream=True)


def both(request: Any, engine: EngineLike) -> tuple[Any, Any]:
    """The request as it goes out, and for a resolved engine the one that does not need the server's memory."""
    if not isinstance(engine, results.Engine):
        return put_engine(request, engine), None
    inline = type(request)()
    inline.CopyFrom(request)
    return put_engine(request, engine.handle), put_engine(inline, engine.config)


def estimate(
    deployment: serving.Deployment,
    workload: serving.Workload,
    limits: serving.Limits | None,
    nextn_accepted: float,
    operators: bool,
    allow_out_of_memory: bool,
) -> Call[deployments.Estimate]:
    kind = serving.KINDS.get(type(deployment))
    if kind is None:
        raise errors.refused("deployment", deployment, "is not Static, Aggregated or Disaggregated")

    def made(inline: bool) -> serving_pb2.EstimateRequest:
        request = serving_pb2.EstimateRequest(
            nextn_accepted=nextn_accepted, include_operators=operators, allow_out_of_memory=allow_out_of_memory
        )
        workload.put(request.workload, "workload")
        if limits is not None:
            limits.put(request.limits, "limits")
        deployment.put(getattr(request, kind), kind, inline)
        return request

    response = serving_pb2.EstimateResponse
    return Call(
        SERVING + "Estimate", made(False), response, deployments.Estimate.of, SEARCH_DEADLINE_S, made(True)
    )  # fmt: skip


def estimate_memory(
    engine: EngineLike,
    workload: serving.Workload | None,
    batch: int | None,
    max_num_tokens: int | None,
    memory_fraction: float | None,
    tolerance: float | None,
    block_size: int | None,
) -> Call[deployments.MemoryEstimate]:
    request = serving_pb2.EstimateMemoryRequest(
        batch_per_rank=batch or 0,
        max_num_tokens_per_rank=max_num_tokens or 0,
        memory_fraction=memory_fraction,
        tolerance_fraction=tolerance,
        block_size_tokens=block_size or 0,
    )
    if workload is not None:
        workload.put(request.workload, "workload")
    request, inline = both(request, engine)
    response = serving_pb2.EstimateMemoryResponse
    return Call(SERVING + "EstimateMemory", request, response, deployments.MemoryEstimate.of, inline=inline)


def search(task: SearchTask) -> Call[deployments.SearchProgress | deployments.SearchResult]:
    """A call with many answers, each of which is read by itself."""
    request, response = task.put(search_pb2.SearchRequest()), search_pb2.SearchResponse
    return Call(SEARCH + "Search", request, response, deployments.search_event, SEARCH_DEADLINE_S, is_stream=True)


def recommend(
    task: SearchTask, requests_per_s: float | None, concurrency: float | None, max_gpus: int | None
) -> Call[deployments.SearchResult]:
    if (requests_per_s is None) == (concurrency is None):
        raise errors.refused("load", (requests_per_s, concurrency), "give exactly one of a request rate, a concurrency")
    if max_gpus == 0:
        raise errors.refused("max_gpus", max_gpus, "must be above 0; leave it out for no ceiling")
    load: dict[str, Any] = {"requests_per_s": requests_per_s, "concurrency_total": concurrency}
    request = search_pb2.RecommendRequest(max_gpus_total=max_gpus or 0, **load)
    task.put(request.search, "search")
    response = search_pb2.RecommendResponse
    return Call(
        SEARCH + "Recommend", request, response, lambda m: deployments.SearchResult.of(m.result), SEARCH_DEADLINE_S
    )  # fmt: skip


def generate(
    deployment: serving.Deployment,
    workload: serving.Workload,
    target: str,
    policy: str,
    limits: serving.Limits | None,
    nextn_accepted: float,
    replicas: int,
    settings: deploy.EngineSettings | None,
    cluster: deploy.Cluster | None,
) -> Call[deploy.DeployFiles]:
    kind = serving.KINDS.get(type(deployment))
    if kind is None or isinstance(deployment, serving.Static):
        raise errors.refused("deployment", deployment, "is not Aggregated or Disaggregated")
    policies = {name.removeprefix("DEPLOY_POLICY_").lower(): n for name, n in deploy_pb2.DeployPolicy.items()}
    if policy not in policies:
        raise errors.refused("policy", policy, "is not as_predicted or headroom")
    number: Any = policies[policy]

    def made(inline: bool) -> deploy_pb2.GenerateRequest:
        request = deploy_pb2.GenerateRequest(
            target=target, policy=number, nextn_accepted=nextn_accepted, replicas_total=replicas
        )
        workload.put(request.workload, "workload")
        deployment.put(getattr(request, kind), kind, inline)
        parts = {"limits": limits, "settings": settings, "cluster": cluster}
        for name, part in ((name, part) for name, part in parts.items() if part is not None):
            part.put(getattr(request, name), name)
        return request

    response = deploy_pb2.GenerateResponse
    return Call(DEPLOY + "Generate", made(False), response, deploy.DeployFiles.of, SEARCH_DEADLINE_S, made(True))


def deploy_targets() -> Call[deploy.DeployTargets]:
    request, response = deploy_pb2.ListTargetsRequest(), deploy_pb2.ListTargetsResponse
    return Call(DEPLOY + "ListTargets", request, response, deploy.DeployTargets.of)


def validate_files(files: Mapping[str, bytes]) -> Call[deploy.Validation]:
    told = [deploy_pb2.DeployFile(path=path, content=content) for path, content in files.items()]
    request, response = deploy_pb2.ValidateRequest(files=told), deploy_pb2.ValidateResponse
    return Call(DEPLOY + "Validate", request, response, deploy.Validation.of)


def step_message(sequence: int, step: Step, engine: EngineLike | None) -> prediction_pb2.StreamStepsRequest:
    request = prediction_pb2.StreamStepsRequest(sequence=sequence)
    put_step(request, step)
    if engine is not None:
        put_engine(request, engine.config if isinstance(engine, results.Engine) else engine)
    return request


def stream_answer(message: prediction_pb2.StreamStepsResponse) -> float:
    if message.HasField("error"):
        raise errors.from_detail(message.error.reason, message.error.message, message.error.metadata)
    return message.latency_ms


def check_revision(info: results.ServerInfo, target: str) -> results.ServerInfo:
    if info.api_revision < API_REVISION:
        raise errors.IncompatibleServer(
            f"the server at {target} (perfcast {info.version}) speaks revision {info.api_revision} of perfcast.v1; "
            f"this client (perfcast {__version__}) needs {API_REVISION}: update the server or use an older client"
        )
    return info


def no_contract(target: str) -> errors.IncompatibleServer:
    return errors.IncompatibleServer(f"what listens at {target} does not speak perfcast.v1")


def failure(error: Any) -> errors.PerfcastError:
    """The exception for a grpc.RpcError of either kind of channel."""
    if not isinstance(error, grpc.Call | grpc.aio.AioRpcError):
        return errors.ServerFault(str(error))
    return errors.from_call(error.code(), error.details() or error.code().name, error.trailing_metadata())


def engine_call(
    path: str, request: Any, response: Any, read: Callable[[Any], T], engine: EngineLike | None, stream: bool = False
) -> Call[T]:
    """A call about ``engine``, where there is one."""
    inline = None
    if engine is not None:
        request, inline = both(request, engine)
    return Call(path, request, response, read, inline=inline, is_stream=stream)


def fill(message: M, **values: Any) -> M:
    """Set fields, refusing by name what one cannot hold."""
    for name, value in values.items():
        try:
            if isinstance(value, bool) != isinstance(getattr(message, name), bool):
                raise TypeError
            if isinstance(getattr(message, name), int) and not isinstance(value, bool):
                value = operator.index(value)
            setattr(message, name, value)
        except (AttributeError, TypeError, ValueError):
            raise errors.refused(name, value, "is not legal here") from None
    return message
