"""A search from request to result, wherever it runs: in a process of its own behind a server, or in a command."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from perfcast.v1 import common_pb2, search_pb2, serving_pb2
from perfcast_engine.config import EngineConfig
from perfcast_engine.predictor import Predictor
from perfcast_planning.search import recommend as fewest_gpus
from perfcast_planning.search import search as best_deployments
from perfcast_planning.search.grids import DECODE_BATCHES
from perfcast_planning.search.pick import Load, Objective, cluster_throughput, violations
from perfcast_planning.search.task import (
    AFD,
    AGGREGATED,
    DISAGGREGATED,
    MODES,
    Experiment,
    Progress,
    SearchResult,
    SearchTask,
)
from perfcast_planning.search.workshop import TableWorkshop
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.worker import Worker

from perfcast_server import asked, deployments, wire
from perfcast_server.asked import count
from perfcast_server.deployments import Deployed
from perfcast_server.errors import ServiceError, invalid, refusal
from perfcast_server.settings import Settings

MODE_NUMBERS = {
    AGGREGATED: serving_pb2.SERVING_MODE_AGGREGATED,
    DISAGGREGATED: serving_pb2.SERVING_MODE_DISAGGREGATED,
    AFD: serving_pb2.SERVING_MODE_AFD,
}
MODE_NAMES = {number: name for name, number in MODE_NUMBERS.items()}
OBJECTIVES = (None, Objective.THROUGHPUT, Objective.LATENCY)
MAX_BACKENDS, MAX_ROWS = 8, 20_000
STRIDE = 32
TELL_EVERY_S = 0.1

Tell = Callable[[search_pb2.SearchProgress], None]


def search(
    request: search_pb2.SearchRequest, predictor: Predictor, settings: Settings, tell: Tell
) -> search_pb2.SearchResult:
    """Raises what the engine, the checks of the request and ``tell`` raise."""
    with asked.named_as_asked():
        task = task_of(request, settings)
        result = best_deployments.search(task, TableWorkshop(predictor), Teller(task, tell))
    return result_message(result, task, request)


def recommend(
    request: search_pb2.RecommendRequest, predictor: Predictor, settings: Settings
) -> search_pb2.RecommendResponse:
    """As ``search``."""
    if request.search.total_gpus:
        raise invalid("search.total_gpus", "is not for a recommendation; give max_gpus_total")
    for name in ("requests_per_s", "concurrency_total"):
        if not getattr(request, name) <= asked.MAX_COUNT:
            raise invalid(name, f"must be at most {asked.MAX_COUNT}")
    with asked.named_as_asked():
        load = Load(
            request.requests_per_s if request.HasField("requests_per_s") else None,
            request.concurrency_total if request.HasField("concurrency_total") else None,
            count(request.max_gpus_total, "max_gpus_total", 0) or None,
        )
        task = replace(task_of(request.search, settings), match_load=load)
        result = fewest_gpus.recommend(task, TableWorkshop(predictor))
    return search_pb2.RecommendResponse(result=result_message(result, task, request.search))


def task_of(request: search_pb2.SearchRequest, settings: Settings) -> SearchTask:
    """The search that ``request`` asks for; refuses what is malformed, by field."""
    engine = _config(request.engine, request, settings, "engine")
    decode = None
    if request.HasField("decode_engine"):
        decode = _config(request.decode_engine, request, settings, "decode_engine")
    if request.max_rows > MAX_ROWS:
        raise ServiceError("LIMIT", f"{request.max_rows} rows, more than {MAX_ROWS}", limit="max_rows", retry="no")
    count(request.max_rows, "max_rows", 0)
    if not 0 <= request.objective < len(OBJECTIVES):
        raise invalid("objective", f"has the unknown value {request.objective}")
    task = SearchTask(
        engine=engine,
        load=asked.workload(request.workload),
        targets=asked.targets(request.targets),
        total_gpus=count(request.total_gpus, "total_gpus", 0) or None,
        modes=_modes(request),
        backends=tuple(request.backends),
        decode_engine=decode,
        space=asked.space(request.space, "space"),
        prefill_space=asked.space(request.prefill_space, "prefill_space"),
        decode_space=asked.space(request.decode_space, "decode_space"),
        limits=asked.limits(request.limits, request.nextn_accepted),
        chunked_prefill=request.chunked_prefill,
        prefill_max_batch=request.prefill_max_batch_per_rank or 1,
        decode_max_batch=request.decode_max_batch_per_rank or 512,
        replica=asked.replica(request.replica),
        matching=asked.matching(request.matching),
        kv_transfer=asked.kv_transfer(request.kv_transfer),
        autoscale=request.autoscale,
        encode_pool=request.encode_pool,
        swept=not request.skip_sweep,
        strict_sla=request.strict_sla,
        top=request.top or 5,
        objective=OBJECTIVES[request.objective],
    )
    points, most = math.ceil(task.load.osl / STRIDE) * len(DECODE_BATCHES), settings.max_points_per_request
    if points > most:
        raise ServiceError(
            "LIMIT",
            f"workload.osl_tokens: {points} points of one mapping, more than {most}; ask for fewer output tokens",
            limit="max_points_per_request",
            field="workload.osl_tokens",
            retry="no",
        )
    return task


def _config(
    given: common_pb2.EngineConfig, request: search_pb2.SearchRequest, settings: Settings, path: str
) -> EngineConfig:
    message = common_pb2.EngineConfig()
    message.CopyFrom(given)
    if any(width > 1 for _, width in message.parallel.ListFields()):
        raise invalid(f"{path}.parallel", "is what a search tries; narrow it by space")
    message.ClearField("parallel")
    if not message.backend:
        message.backend = request.engine.backend or next(iter(request.backends), "")
    if message.WhichOneof("model") is None and request.engine.HasField("inline_model"):
        message.inline_model.CopyFrom(request.engine.inline_model)
    elif message.WhichOneof("model") is None:
        message.model_id = request.engine.model_id
    message.profile = message.profile or request.engine.profile
    if message.profile != request.engine.profile:
        raise invalid(f"{path}.profile", "must be that of engine")
    try:
        return wire.engine_config(message, settings.max_config_json_bytes)
    except ServiceError as error:
        field, _, text = error.message.partition(": ")
        if not field.startswith("config."):
            raise
        raise invalid(field.replace("config", path, 1), text) from None


def _modes(request: search_pb2.SearchRequest) -> tuple[str, ...]:
    for number, mode in enumerate(request.modes):
        if mode not in MODE_NAMES:
            raise invalid(f"modes[{number}]", "must be AGGREGATED, DISAGGREGATED or AFD")
    for name, values in (("modes", request.modes), ("backends", request.backends)):
        if len(set(values)) != len(values) or len(values) > MAX_BACKENDS:
            raise invalid(name, "holds one twice, or too many")
    return tuple(MODE_NAMES[mode] for mode in request.modes) or MODES


class Teller:
    """Turns the engine's progress into messages, no more of them than somebody can read."""

    def __init__(self, task: SearchTask, tell: Tell) -> None:
        self._task = task
        self._tell = tell
        backends = task.backends or (task.engine.backend,)
        self._order = [(m, b) for b in backends for m in task.modes if m == AGGREGATED or task.total_gpus != 1]
        self._told_at = -math.inf
        self._front: list[tuple[float, float]] = []

    def __call__(self, progress: Progress) -> None:
        now = perf_counter()
        if progress.done < progress.total and now - self._told_at < TELL_EVERY_S:
            return
        self._told_at = now
        self._tell(
            search_pb2.SearchProgress(
                mode=MODE_NUMBERS[progress.mode],
                backend=progress.backend,
                experiments_done=self._order.index((progress.mode, progress.backend)),
                experiments_total=len(self._order),
                mappings_done=progress.done,
                mappings_total=progress.total,
                front=self._points(progress.rows.take(progress.front) if len(progress.front) else Rows({})),
            )
        )

    def _points(self, front: Rows) -> list[search_pb2.FrontPoint]:
        """The front unless it is what was told last."""
        if not len(front):
            return []
        columns = (front["tokens_per_s_per_user"], self._task.score(front), front["ttft_ms"], front["tpot_ms"])
        points = list(zip(*(column.tolist() for column in columns), strict=True))
        known = [point[:2] for point in points]
        if known == self._front:
            return []
        self._front = known
        return [
            search_pb2.FrontPoint(
                tokens_per_s_per_user=user, tokens_per_s_per_gpu_cluster=cluster, ttft_ms=ttft, tpot_ms=tpot
            )
            for user, cluster, ttft, tpot in points
        ]


def result_message(
    result: SearchResult, task: SearchTask, request: search_pb2.SearchRequest
) -> search_pb2.SearchResult:
    targets = task.targets
    best, closest = result.best, result.closest
    return search_pb2.SearchResult(
        experiments=[experiment_message(e, task, request) for e in result.experiments],
        eligible=result.eligible,
        best=best.name if best else "",
        closest=closest.name if closest and not result.eligible else "",
        profile=wire.PROFILES.index(result.profile, 1),  # type: ignore[arg-type]
        workload=deployments.workload_message(task.load),
        targets=search_pb2.Targets(
            ttft_ms=targets.ttft_ms or 0.0,
            tpot_ms=targets.tpot_ms if targets.request_latency_ms is None else 0.0,
            request_latency_ms=targets.request_latency_ms or 0.0,
        ),
        total_gpus=task.total_gpus or 0,
        limits=request.limits,
        nextn_accepted=request.nextn_accepted,
        matching=request.matching,
        kv_transfer=request.kv_transfer,
    )


def experiment_message(found: Experiment, task: SearchTask, request: search_pb2.SearchRequest) -> search_pb2.Experiment:
    told = _Told(found, task, Deployed(lambda _: request.engine, task.load))
    rows = found.rows
    message = search_pb2.Experiment(
        name=found.name,
        mode=MODE_NUMBERS[found.mode],
        backend=found.backend,
        status=search_pb2.ExperimentStatus.Value(f"EXPERIMENT_STATUS_{found.status.name}"),
        eligible=found.eligible,
        picks=told.deployments(found.pick.rows),
        front=told.deployments(rows.take(found.front) if len(rows) else rows),
        rows=told.deployments(rows.take(slice(request.max_rows)) if len(rows) else rows),
        closest=told.deployments(found.closest)[0] if found.closest is not None else None,
        violations=[
            search_pb2.Violation(
                target=v.target,
                limit_ms=v.limit,
                value_ms=v.value,
                excess_ms=v.value - v.limit,
                excess_percent=100 * v.excess,
            )
            for v in found.missed
        ],
        refused=[
            search_pb2.RefusedMapping(mapping=mapping, error=refusal(error).detail())
            for mapping, error in found.refused
        ],
        rows_total=len(rows),
        mappings_total=sum(map(len, found.asked.values())),
        points_total=found.evaluated,
    )
    message.engines.extend(told.deployed.engines)
    return message


class _Told:
    """The deployments of one experiment as messages."""

    def __init__(self, found: Experiment, task: SearchTask, deployed: Deployed) -> None:
        self._found = found
        self._task = task
        self.deployed = deployed

    def deployments(self, rows: Rows) -> list[Any]:
        if not len(rows):
            return []
        total = None if self._task.match_load is not None else self._task.total_gpus
        cluster = cluster_throughput(rows, total)
        replicas = np.floor_divide(total or rows["gpus"], rows["gpus"])
        used = replicas * rows["gpus"]
        if "replicas" in rows:  # as many as the load needs
            cluster, replicas, used = rows["tokens_per_s_per_gpu_cluster"], rows["replicas"], rows["gpus_needed"]
        met = np.stack(list(violations(rows, self._task.targets).values())).max(axis=0) <= 0
        out = []
        for number in range(len(rows)):
            row = rows.row(number)
            message = self.deployed.message(row, MODE_NUMBERS[self._found.mode], self._workers(row))
            ranking = message.ranking
            ranking.tokens_per_s_per_gpu_cluster = float(cluster[number])
            ranking.replicas_total, ranking.gpus_used_total = int(replicas[number]), int(used[number])
            ranking.meets_targets = bool(met[number])
            if "load_served_pct" in row:
                ranking.load_served_percent = row["load_served_pct"]
            out.append(message)
        return out

    def _workers(self, row: dict[str, Any]) -> dict[str, Worker]:
        engines = self._found.engines
        if self._found.mode == AGGREGATED:
            return {"engine": engines[row["engine"]]}
        return {role: engines[row[f"{role}_engine"]] for role in ("prefill", "decode")}
