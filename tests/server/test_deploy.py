"""Deployment files over loopback, from what a search or an estimate says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from perfcast.v1 import deploy_pb2
from perfcast_client import (
    Aggregated,
    AsyncClient,
    Client,
    Cluster,
    Disaggregated,
    EngineConfig,
    EngineSettings,
    Limits,
    Pool,
    SearchTask,
    Targets,
    Workload,
)
from perfcast_client.deployments import EncodeWorkers, SearchResult
from perfcast_client.errors import InvalidRequest, LimitExceeded, NotFound, OutOfMemory
from perfcast_deploy.bundle import parse

from tests.server.running import SEARCH_PATIENCE_S, Running

MODEL = "Qwen/Qwen3-32B-FP8"
CONFIG = EngineConfig(model=MODEL, system="h200_sxm", backend="vllm", tp=4)
LOAD = Workload(isl=4000, osl=500, prefix=500)
AGGREGATED = Aggregated(engine=CONFIG, batch=16)
CONFIG_TO_SEARCH = EngineConfig(model=MODEL, system="h200_sxm", backend="vllm")


@pytest.fixture(scope="module")
def client(served: Running) -> Iterator[Client]:
    with Client(served.address, deadline_s=SEARCH_PATIENCE_S) as client:
        yield client


def test_files_deploy_what_was_estimated(client: Client) -> None:
    engine = client.resolve(CONFIG)
    told = client.estimate(Aggregated(engine=engine, batch=16), LOAD)
    made = client.generate(Aggregated(engine=engine, batch=16), LOAD, "dynamo", replicas=3)
    d = parse(made.files)
    (role,) = d.roles
    assert (role.workers, role.tp, role.max_batch, role.max_tokens, role.kv_fraction) == (3, 4, 16, 4756, 0.92)
    assert (role.kv_dtype, role.prefix_caching, d.version) == (engine.modes["kv_cache"], True, engine.config.version)
    assert d.predicted.ttft_ms == pytest.approx(told.deployment.ttft_ms, rel=1e-5)
    assert d.predicted.output_tokens_per_s == pytest.approx(3 * told.deployment.tokens_per_s, rel=1e-5)
    assert d.predicted.concurrency == 48 and d.predicted.profile == "corrected"
    assert made.summary.predicted is not None and made.summary.predicted.ttft_ms == d.predicted.ttft_ms
    assert made.summary.gpus_total == 12 and made.summary.roles[0].parallel["tp"] == 4
    assert made.name.startswith("qwen-qwen3-32b-fp8-dynamo-")


def test_a_disaggregated_pick_of_a_search_is_deployed(client: Client) -> None:
    task = SearchTask(
        engine=EngineConfig(model=MODEL, system="h200_sxm", backend="trtllm"),
        workload=LOAD,
        targets=Targets(ttft_ms=300, tpot_ms=10),
        total_gpus=32,
        modes=("disaggregated",),
    )
    result = client.search_result(task)
    assert SearchResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result
    (found,) = result.experiments
    pick = found.best
    assert pick is not None and pick.ranking is not None
    made = client.generate(found.configuration(pick, result), LOAD, "engine", replicas=pick.ranking.replicas_total)
    d = parse(made.files)
    assert d.gpus == pick.ranking.gpus_used_total
    assert d.predicted.ttft_ms == pytest.approx(pick.ttft_ms, rel=1e-5)
    assert d.predicted.tpot_ms == pytest.approx(pick.tpot_ms, rel=1e-5)
    for role, group in zip(d.roles, pick.workers, strict=True):
        assert (role.gpus, role.max_batch) == (group.gpus_per_worker, group.batch_per_rank)
        assert role.workers == group.workers_total * pick.ranking.replicas_total


def test_a_pick_with_encode_workers_is_refused(client: Client) -> None:
    task = SearchTask(engine=CONFIG_TO_SEARCH, workload=LOAD, total_gpus=8, modes=("aggregated",), skip_sweep=True)
    result = client.search_result(task)
    (found,) = result.experiments
    encoded = replace(found.picks[0], encode=EncodeWorkers(1, 1, 1, 1.0))
    with pytest.raises(InvalidRequest, match="search without them"):
        found.configuration(encoded, result)


def test_headroom_lists_what_it_changes_and_what_that_does(client: Client) -> None:
    made = client.generate(AGGREGATED, LOAD, "dynamo", policy="headroom")
    change = next(change for change in made.changes if change.field == "roles.agg.max_batch")
    assert (change.predicted, change.deployed) == (16, 512) and change.reason
    figures = made.predicted_as_deployed
    assert figures is not None and figures.concurrency_total == 512
    assert figures.ttft_ms > made.summary.predicted.ttft_ms


def test_settings_and_cluster_reach_the_files(client: Client) -> None:
    settings = EngineSettings(served_name="chat", port=9000, engine_version="0.20.1", kv_router=True, block_size=32)
    cluster = Cluster(name="chat", namespace="serving", volume_claim="models", env={"HF_HUB_OFFLINE": "1"})
    limits = Limits(memory_fraction=0.8, max_seq_len=9000)
    made = client.generate(AGGREGATED, LOAD, "dynamo", settings=settings, cluster=cluster, limits=limits)
    d = parse(made.files)
    assert (d.served_name, d.port, d.version, d.router) == ("chat", 9000, "0.20.1", True)
    assert (d.cluster.namespace, d.cluster.pvc, d.cluster.env) == ("serving", "models", {"HF_HUB_OFFLINE": "1"})
    assert (d.roles[0].kv_fraction, d.roles[0].max_seq_len, d.roles[0].tokens_per_block) == (0.8, 9000, 32)


def test_targets_are_listed(client: Client) -> None:
    told = client.deploy_targets()
    assert {t.name: t.backends for t in told.targets}["llm-d-kustomize"] == ("vllm",)
    (vllm,) = (b for b in told.backends if b.name == "vllm")
    assert vllm.version_by_release["1.3.0"] == vllm.newest_version == "0.24.0"


def test_validation_is_an_answer(client: Client) -> None:
    files = client.generate(AGGREGATED, LOAD, "llm-d-kustomize").files
    told = client.validate_files(files)
    assert told.valid and told.error is None and told.summary is not None
    assert (told.summary.target, told.summary.backend, told.summary.gpus_total) == ("llm-d-kustomize", "vllm", 4)
    changed = dict(files) | {"patch-vllm.yaml": files["patch-vllm.yaml"].replace(b"16", b"61")}
    told = client.validate_files(changed)
    assert not told.valid and told.error is not None and told.error.reason == "DATA_CORRUPT"
    assert "patch-vllm.yaml was changed" in told.error.message
    bomb = b"a: &a [" + b"1," * 50_000 + b"1]\nb: [" + b"*a," * 50_000 + b"1]"
    for content in (b"", b"\xff", b"{}", bomb):
        assert not client.validate_files({"perfcast.json": content, "a.yaml": bomb}).valid
    with pytest.raises(LimitExceeded):
        client.validate_files({str(i): b"" for i in range(2000)})


@pytest.mark.parametrize(
    ("deployment", "given", "error", "message"),
    [
        (AGGREGATED, {"target": "helm"}, InvalidRequest, "helm"),
        (AGGREGATED, {"policy": "hope"}, InvalidRequest, "hope"),
        (AGGREGATED, {"replicas": 100_000}, InvalidRequest, "replicas_total"),
        (AGGREGATED, {"workload": Workload(isl=0, osl=1)}, InvalidRequest, "isl_tokens"),
        (AGGREGATED, {"workload": Workload(isl=8, osl=1 << 30)}, LimitExceeded, "osl_tokens"),
        (AGGREGATED, {"cluster": Cluster(namespace="Not A Name")}, InvalidRequest, "Kubernetes name"),
        (AGGREGATED, {"cluster": Cluster(env={"A": "x" * 999})}, InvalidRequest, "cluster.env"),
        (AGGREGATED, {"cluster": Cluster(env={"CUDA_VISIBLE_DEVICES": "1"})}, InvalidRequest, "leave it out"),
        (AGGREGATED, {"cluster": Cluster(gpus_per_node=-1)}, InvalidRequest, "gpus_per_node"),
        (AGGREGATED, {"cluster": Cluster(transport="carrier")}, InvalidRequest, "transport"),
        (AGGREGATED, {"settings": EngineSettings(port=1 << 20)}, InvalidRequest, "port"),
        (AGGREGATED, {"settings": EngineSettings(engine_version="0.0.1"), "target": "engine"}, NotFound, "version"),
        (AGGREGATED, {"settings": EngineSettings(moe_backend="magic")}, InvalidRequest, "moe_backend"),
        (AGGREGATED, {"limits": Limits(max_seq_len=100)}, InvalidRequest, "max_seq_len"),
        (AGGREGATED, {"nextn_accepted": 1.0}, InvalidRequest, "nextn_accepted"),
        (Aggregated(engine=CONFIG, batch=0), {}, InvalidRequest, "batch_per_rank"),
        (Aggregated(engine=CONFIG, batch=4000), {}, OutOfMemory, "exceeds"),
        (Aggregated(engine=CONFIG, batch=870), {}, OutOfMemory, "KV cache holds"),
        (Aggregated(engine=EngineConfig(model=MODEL, system="mars", backend="vllm"), batch=1), {}, NotFound, "mars"),
        (Aggregated(engine="0" * 32, batch=1), {}, NotFound, "handle"),
    ],
)
def test_what_cannot_be_deployed_is_refused_by_field(
    client: Client, deployment: Any, given: dict[str, Any], error: Any, message: str
) -> None:
    asked: dict[str, Any] = {"workload": LOAD, "target": "dynamo"} | given
    with pytest.raises(error, match=message):
        client.generate(deployment, **asked)


def test_a_mixed_pair_is_refused(client: Client) -> None:
    other = EngineConfig(model=MODEL, system="h100_sxm", backend="vllm", tp=4)
    pair = Disaggregated(prefill=Pool(engine=CONFIG, batch=1), decode=Pool(engine=other, batch=8))
    with pytest.raises(InvalidRequest, match=r"decode\.system"):
        client.generate(pair, LOAD, "dynamo")
    corrected = Pool(engine=CONFIG, batch=1, latency_correction=1.1)
    with pytest.raises(InvalidRequest, match="latency_correction"):
        client.generate(Disaggregated(prefill=corrected, decode=Pool(engine=CONFIG, batch=8)), LOAD, "dynamo")


def test_nothing_named_is_nothing_made(served: Running) -> None:
    import grpc

    with grpc.insecure_channel(served.address) as channel:
        call = channel.unary_unary(
            "/perfcast.v1.Deploy/Generate",
            deploy_pb2.GenerateRequest.SerializeToString,
            deploy_pb2.GenerateResponse.FromString,
        )
        for request in (deploy_pb2.GenerateRequest(), deploy_pb2.GenerateRequest(policy=9)):  # type: ignore[arg-type]
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=60)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_from_an_event_loop(served: Running) -> None:
    async with AsyncClient(served.address) as client:
        made = await client.generate(AGGREGATED, LOAD, "dynamo")
        assert (await client.validate_files(made.files)).valid
        assert len((await client.deploy_targets()).targets) == 5
