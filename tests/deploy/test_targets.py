"""What the targets write beside flags: fronts, ports, ranks, fabric, collection."""

from __future__ import annotations

import re

import pytest
import yaml
from perfcast_deploy.bundle import generate
from perfcast_deploy.deployment import Cluster, Deployment, Facts
from perfcast_deploy.readback import script_commands
from perfcast_engine.errors import InvalidField, OutOfMemory, UnsupportedCombination

from tests.deploy.deployments import deployment, moe, role, value, worker


def commands(text: bytes, program: str) -> list[list[str]]:
    return [words for words in script_commands(text.decode()) if program in words]


def test_workers_of_a_node_share_no_port_and_no_gpu() -> None:
    pair = (role("prefill", workers=2, tp=1), role("decode", workers=2, tp=2))
    bundle = generate(deployment("vllm", *pair, router=True), "engine")
    started = commands(bundle.files["run_0.sh"], "vllm")
    ports = [value(words, "--port") for words in started]
    side = [word for words in started for word in words if word.startswith("VLLM_NIXL_SIDE_CHANNEL_PORT=")]
    gpus = [g for words in started for g in words[0].removeprefix("CUDA_VISIBLE_DEVICES=").split(",")]
    assert len(set(ports)) == len(set(side)) == 4
    assert sorted(map(int, gpus)) == list(range(6))
    front = commands(bundle.files["run_0.sh"], "vllm-router")[0]
    assert front.count("--prefill") == front.count("--decode") == 2
    assert value(front, "--port") == "8000" and value(front, "--policy") == "cache_aware"


def test_a_lone_worker_serves_the_public_port() -> None:
    bundle = generate(deployment("sglang", port=9000), "engine")
    assert value(commands(bundle.files["run_0.sh"], "sglang.launch_server")[0], "--port") == "9000"
    assert b"router" not in bundle.files["run_0.sh"]


def test_trtllm_front_knows_all_workers() -> None:
    pair = generate(deployment("trtllm", role("prefill", workers=2), role("decode")), "engine")
    front = yaml.safe_load(pair.files["front.yaml"])
    assert front["context_servers"]["num_instances"] == 2 and len(front["generation_servers"]["urls"]) == 1
    several = generate(deployment("trtllm", role("agg", workers=3)), "engine")
    assert len(re.findall(r"server 127.0.0.1:\d+;", several.files["front.conf"].decode())) == 3


def test_ranks_of_a_worker_on_several_nodes() -> None:
    wide = role("agg", tp=16, chunked_prefill=True)
    vllm = generate(deployment("vllm", wide), "engine")
    ranks = [commands(vllm.files[f"run_{i}.sh"], "vllm")[0] for i in range(2)]
    assert [value(words, "--node-rank") for words in ranks] == ["0", "1"]
    assert {value(words, "--master-addr") for words in ranks} == {"node-0"}
    assert "--headless" in ranks[1] and "--headless" not in ranks[0]
    sglang = generate(deployment("sglang", wide), "engine")
    address = [
        value(commands(sglang.files[f"run_{i}.sh"], "sglang.launch_server")[0], "--dist-init-addr") for i in range(2)
    ]
    assert len(set(address)) == 1 and address[0].startswith("node-0:")
    trtllm = generate(deployment("trtllm", wide), "engine")
    launched = commands(trtllm.files["run_0.sh"], "mpirun")[0]
    assert value(launched, "-n") == "16" and value(launched, "-H") == "node-0:8,node-1:8"
    assert commands(trtllm.files["run_1.sh"], "trtllm-serve") == []
    ranked = generate(
        deployment("vllm", role("agg", tp=1, dp=16, moe_ep=16, chunked_prefill=True), is_moe=True), "engine"
    )  # data-parallel ranks are dealt to the nodes
    second = commands(ranked.files["run_1.sh"], "vllm")[0]
    assert value(second, "--data-parallel-size-local") == "8" and value(second, "--data-parallel-start-rank") == "8"


def test_fabric_resources_follow_the_transport() -> None:
    for target in ("dynamo", "llm-d-helm", "llm-d-kustomize"):
        pair = deployment("vllm", role("prefill"), role("decode"), cluster=Cluster(transport="ib"))
        text = b"".join(generate(pair, target).files.values())
        assert b"rdma/ib" in text and b"IPC_LOCK" in text and b"UCX_TLS" in text
    assert worker(generate(pair, "dynamo"))["resources"]["limits"]["custom"] == {"rdma/ib": "2"}


def test_trtllm_benchmark_needs_no_data_set_and_fits_the_engine() -> None:
    bundle = generate(deployment("trtllm"), "engine")
    assert b"--random-ids" in bundle.files["bench.sh"]
    engine = yaml.safe_load(bundle.files["agg_config.yaml"])
    assert engine["max_seq_len"] == 4756 and engine["max_num_tokens"] == 4256
    long = generate(deployment("trtllm", role("agg", max_seq_len=9000, max_tokens=9000)), "engine")
    assert [change.field for change in long.changes] == ["cluster.name", "cluster.namespace"]


def test_context_of_the_model_is_never_exceeded() -> None:
    facts = Facts(max_context_tokens=4600)
    bundle = generate(deployment("vllm"), "dynamo", "headroom", facts=facts)
    assert bundle.deployment.roles[0].max_seq_len == 4600
    with pytest.raises(InvalidField, match="context of 4400"):
        generate(deployment("vllm"), "dynamo", facts=Facts(max_context_tokens=4400))


def test_model_and_memory_facts_are_held_against_the_deployment() -> None:
    with pytest.raises(InvalidField, match="does not divide"):
        generate(deployment("vllm", role("agg", tp=8)), "dynamo", facts=Facts(num_heads=12))
    with pytest.raises(InvalidField, match="experts"):
        generate(moe("vllm"), "dynamo", facts=Facts(num_experts=1))
    with pytest.raises(OutOfMemory, match="holds 44 of 48 sequences"):
        generate(deployment("vllm"), "dynamo", facts=Facts(kv_capacity_tokens={"agg": 200_000}))
    roomy = generate(deployment("vllm"), "dynamo", "headroom", facts=Facts(kv_capacity_tokens={"agg": 300_000}))
    assert any("holds 66 sequences" in note for note in roomy.notes)


def test_changed_metrics_are_asked_for_and_shown() -> None:
    bundle = generate(
        deployment("vllm"), "dynamo", "headroom", predict=lambda d: {"tpot_ms": d.roles[0].max_batch / 10}
    )
    assert b'"predicted_as_deployed": {\n  "tpot_ms": 51.2\n }' in bundle.files["perfcast.json"]


def test_collection_is_per_role_and_of_one_worker() -> None:
    bundle = generate(deployment("vllm", role("prefill", workers=4), role("decode", tp=16)), "fpm")
    assert {name.partition("/")[0] for name in bundle.files} == {"prefill", "decode", "perfcast.json"}
    assert yaml.safe_load(bundle.files["prefill/k8s_deploy.yaml"])["kind"] == "Pod"
    assert yaml.safe_load(bundle.files["decode/k8s_deploy.yaml"])["kind"] == "LeaderWorkerSet"
    assert b"--benchmark-mode decode" in bundle.files["decode/run.sh"]


def test_llmd_refuses_what_it_cannot_run() -> None:
    with pytest.raises(UnsupportedCombination, match="within a node"):
        generate(deployment("vllm", role("agg", tp=16)), "llm-d-helm")
    with pytest.raises(UnsupportedCombination, match="hub id"):
        generate(deployment("vllm", model="/models/own"), "llm-d-helm")


def test_deployments_as_data() -> None:
    d = deployment("vllm", role("prefill"), role("decode"))
    assert Deployment.from_dict(d.to_dict()) == d
    experts = {"workers": 1, "tp": 2, "dp": 2, "moe_ep": 4, "max_batch": 1, "max_tokens": 4000, "max_seq_len": 4500}
    roles = [experts | {"name": name, "kv_fraction": 0.9} for name in ("prefill", "decode")]
    with pytest.raises(UnsupportedCombination):
        Deployment.from_dict(d.to_dict() | {"backend": "trtllm", "is_moe": True, "roles": roles})
    wrong = (
        {"roles": "none"},
        {"port": True},
        {"port": 1 << 40},
        {"colour": 1},
        {"quant": {"gemm": 8}},
        {"nextn": 0.5},
    )
    for change in (*wrong, {"quant": {"gemm": 8}}, {"nextn": 0.5}):
        with pytest.raises(InvalidField):
            Deployment.from_dict(d.to_dict() | change)
    for whole in ([], {"model": "m"}):
        with pytest.raises(InvalidField):
            Deployment.from_dict(whole)
