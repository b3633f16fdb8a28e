"""The reference's known faults (specification 08 section 10) are absent outside its own profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from perfcast_deploy.bundle import DirectoryExists, generate, write
from perfcast_deploy.deployment import Cluster
from perfcast_deploy.flags import rows_of
from perfcast_engine.errors import InvalidField, UnknownName, UnsupportedCombination

from tests.deploy.deployments import deployment, graph, moe, role, value, words, worker


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_attention_dp_does_not_multiply_gpus(backend: str) -> None:
    service = worker(generate(moe(backend), "dynamo"))
    assert service["resources"]["limits"]["gpu"] == "8"
    assert "multinode" not in service


def test_gpu_limit_is_per_node_and_nvlink_domains_only_where_they_exist() -> None:
    wide = role("agg", tp=16)
    bundle = generate(deployment("vllm", wide), "dynamo")
    assert worker(bundle)["resources"]["limits"]["gpu"] == "8"
    assert worker(bundle)["multinode"] == {"nodeCount": 2}
    assert b"ComputeDomain" not in bundle.files["k8s_deploy.yaml"]
    grace = deployment("vllm", wide, system="gb200", cluster=Cluster(gpus_per_node=4))
    documents = list(yaml.safe_load_all(generate(grace, "dynamo").files["k8s_deploy.yaml"]))
    assert [d["kind"] for d in documents] == ["DynamoGraphDeployment", "ComputeDomain"]


def test_deployed_limits_are_the_predicted_ones() -> None:
    arguments = words(generate(deployment("vllm", role("agg", chunked_prefill=True)), "dynamo"))
    assert value(arguments, "--max-num-seqs") == "48"
    assert value(arguments, "--max-num-batched-tokens") == "4048"
    assert value(arguments, "--gpu-memory-utilization") == "0.85"
    assert value(arguments, "--max-model-len") == "4756"
    assert "--enable-chunked-prefill" in arguments and "--no-enable-prefix-caching" in arguments


def test_every_role_gets_its_length_and_memory_fraction() -> None:
    pair = deployment("sglang", role("prefill", max_batch=1), role("decode"))
    bundle = generate(pair, "dynamo")
    for name in ("Prefill", "Decode"):
        assert value(words(bundle, name), "--context-length") == "4756"
        assert value(words(bundle, name), "--mem-fraction-static") == "0.85"


def test_sglang_limits_count_all_attention_ranks() -> None:
    d = moe("sglang")
    d = replace(d, roles=(replace(d.roles[0], chunked_prefill=True),))
    arguments = words(generate(d, "dynamo"))
    assert value(arguments, "--max-running-requests") == str(48 * 8)
    assert value(arguments, "--chunked-prefill-size") == str(8000 * 8)
    assert value(arguments, "--tensor-parallel-size") == "8" and value(arguments, "--expert-parallel-size") == "8"


def test_kv_dtype_is_of_its_own_role() -> None:
    pair = (role("prefill", kv_dtype="bfloat16"), role("decode", kv_dtype="fp8"))
    documents = list(yaml.safe_load_all(generate(deployment("trtllm", *pair), "dynamo").files["k8s_deploy.yaml"]))
    engines = {name: yaml.safe_load(text) for name, text in documents[0]["data"].items()}
    assert engines["prefill_config.yaml"]["kv_cache_config"]["dtype"] == "auto"
    assert engines["decode_config.yaml"]["kv_cache_config"]["dtype"] == "fp8"
    with pytest.raises(InvalidField, match="int8"):
        generate(deployment("vllm", role("agg", kv_dtype="int8")), "dynamo")


def test_moe_kernels_are_legal_and_not_chosen_by_hardware() -> None:
    for backend in ("sglang", "trtllm"):
        files = generate(moe(backend, system="b200_sxm"), "dynamo").files["k8s_deploy.yaml"]
        assert b"deepep_moe" not in files and b"WIDEEP" not in files
    wrong = moe("sglang")
    wrong = replace(wrong, roles=(replace(wrong.roles[0], moe_backend="deepep_moe"),))
    with pytest.raises(InvalidField, match="choose from auto, deep_gemm"):
        generate(wrong, "dynamo")


def test_benchmark_reaches_the_service_at_the_predicted_point() -> None:
    data_parallel = role("agg", tp=1, dp=4, pp=2, workers=3, max_batch=10, chunked_prefill=True)
    bundle = generate(deployment("vllm", data_parallel, port=9000, router=True), "dynamo")
    job = yaml.safe_load(bundle.files["k8s_bench.yaml"])
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert job["metadata"] == {"name": "chat-benchmark", "namespace": "serving"}
    assert value(container["command"], "--base-url") == "http://chat-frontend:9000"
    assert value(container["command"], "--max-concurrency") == str(10 * 4 * 2 * 3)
    assert b"None" not in bundle.files["k8s_bench.yaml"] and b"pip install" not in bundle.files["k8s_bench.yaml"]
    nowhere = generate(replace(deployment("vllm"), cluster=Cluster()), "dynamo")
    assert b"namespace" not in nowhere.files["k8s_bench.yaml"]


def test_headroom_still_benchmarks_the_predicted_concurrency() -> None:
    bundle = generate(deployment("sglang"), "dynamo", "headroom")
    assert value(words(bundle), "--max-running-requests") == "512"
    command = yaml.safe_load(bundle.files["k8s_bench.yaml"])["spec"]["template"]["spec"]["containers"][0]["command"]
    assert value(command, "--max-concurrency") == "48"
    change = next(c for c in bundle.changes if c.field == "roles.agg.max_batch")
    assert (change.predicted, change.deployed) == (48, 512) and change.reason


def test_chunking_switched_on_is_on() -> None:
    arguments = words(generate(deployment("sglang", role("agg", chunked_prefill=True)), "dynamo"))
    assert value(arguments, "--chunked-prefill-size") == "4048"
    assert "--enable-mixed-chunk" in arguments


def test_router_and_event_publishers_go_together() -> None:
    bundle = generate(deployment("vllm", role("agg", workers=2), router=True), "dynamo")
    frontend = graph(bundle)["spec"]["services"]["Frontend"]["extraPodSpec"]["mainContainer"]["args"]
    assert value(frontend, "--router-mode") == "kv"
    assert "--kv-events-config" in words(bundle)
    alone = generate(deployment("vllm", role("agg", workers=2)), "dynamo")
    assert "--kv-events-config" not in words(alone)


@pytest.mark.parametrize("version", ["1.0.0", "1.1.0rc5", "1.2.0rc3", "1.3.0rc23"])
def test_trtllm_limits_stand_at_the_top_of_the_engine_file(version: str) -> None:
    bundle = generate(deployment("trtllm", version=version), "engine")
    engine = yaml.safe_load(bundle.files["agg_config.yaml"])
    assert engine["max_batch_size"] == 48 and "build_config" not in engine


@pytest.mark.parametrize(
    ("system", "label"), [("gb300", "NVIDIA-GB300"), ("h100_pcie", "NVIDIA-H100-PCIe"), ("l40s", "NVIDIA-L40S")]
)
def test_node_labels_name_the_gpu(system: str, label: str) -> None:
    services = graph(generate(deployment("vllm", system=system), "dynamo"))["spec"]["services"]
    assert services["VllmWorker"]["extraPodSpec"]["nodeSelector"]["nvidia.com/gpu.product"] == label
    assert "nodeSelector" not in services["Frontend"]["extraPodSpec"]


def test_writing_twice_gives_the_same_bytes_and_changes_nothing() -> None:
    d = deployment("sglang")
    before = d.to_dict()
    first, second = (generate(d, "dynamo", "headroom") for _ in range(2))
    assert first == second and d.to_dict() == before
    assert first.name == second.name and first.name.startswith("qwen-qwen3-32b-fp8-dynamo-")


def test_image_and_flags_are_of_one_version() -> None:
    bundle = generate(deployment("trtllm", version="1.3.0rc20"), "dynamo")
    assert bundle.deployment.version == "1.3.0rc23"
    assert worker(bundle)["extraPodSpec"]["mainContainer"]["image"].endswith("tensorrtllm-runtime:1.3.0")
    assert next(c for c in bundle.changes if c.field == "version").predicted == "1.3.0rc20"
    with pytest.raises(UnsupportedCombination, match=r"cluster\.image"):
        generate(deployment("vllm", version="0.99.0"), "dynamo")
    with pytest.raises(UnknownName):
        rows_of("vllm", "0.9.0")


def test_nothing_is_written_on_failure_or_over_anything(tmp_path: Path) -> None:
    for target in ("llm-d-helm", "llm-d-kustomize", "fpm"):
        with pytest.raises(UnsupportedCombination):
            generate(deployment("trtllm"), target)
    bundle = generate(deployment("vllm"), "engine")
    place = write(bundle.files, tmp_path / "new")
    assert sorted(p.name for p in place.iterdir()) == sorted(bundle.files)
    assert (place / "run_0.sh").stat().st_mode & 0o111
    with pytest.raises(DirectoryExists):
        write(bundle.files, place)
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_a_failing_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = generate(deployment("vllm"), "engine")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.rename", refuse)
    with pytest.raises(OSError, match="disk full"):
        write(bundle.files, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_combinations_no_engine_can_run_are_refused() -> None:
    with pytest.raises(UnsupportedCombination, match="attention DP"):
        deployment("trtllm", role("agg", tp=2, dp=2, moe_ep=4), is_moe=True)
    with pytest.raises(UnsupportedCombination, match="either by tensor or by expert"):
        deployment("vllm", role("agg", tp=4, moe_tp=2, moe_ep=2), is_moe=True)
    with pytest.raises(InvalidField, match="tp \\* dp"):
        deployment("sglang", role("agg", tp=4, moe_ep=2), is_moe=True)
    with pytest.raises(InvalidField, match="isl \\+ osl"):
        deployment("vllm", role("agg", max_seq_len=4000))
    with pytest.raises(InvalidField, match="leave it out"):
        deployment("vllm", cluster=Cluster(env={"CUDA_VISIBLE_DEVICES": "0"}))
