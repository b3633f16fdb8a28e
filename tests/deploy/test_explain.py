"""From a command line or a manifest of others to engine facts."""

from __future__ import annotations

import shlex

import pytest
from perfcast_deploy.bundle import generate
from perfcast_deploy.explain import explain_command, explain_manifest
from perfcast_engine.errors import InvalidField, UnknownName

from tests.deploy.deployments import deployment, moe, role


def explained(command: str, **options: bool) -> dict[str, object]:
    facts = explain_command(shlex.split(command), **options)  # type: ignore[arg-type]
    return {**facts["roles"]["agg"], "model": facts["model"], "nextn": facts["nextn"], "gpus": facts["gpus"]}


def test_vllm() -> None:
    line = "CUDA_VISIBLE_DEVICES=0 vllm serve org/m -tp 2 --dp=4 --enable-expert-parallel --max_num_seqs 64"
    facts = explained(f"{line} --kv-cache-dtype fp8 --tool-call-parser hermes --no-enable-prefix-caching", is_moe=True)
    assert (facts["tp"], facts["dp"], facts["moe_ep"], facts["moe_tp"], facts["gpus"]) == (2, 4, 8, 1, 8)
    assert (facts["max_batch"], facts["kv_dtype"], facts["prefix_caching"]) == (64, "fp8", False)
    assert facts["unset"] == ["max_tokens", "max_seq_len", "kv_fraction", "chunked_prefill"]


def test_sglang() -> None:
    line = "python3 -m sglang.launch_server --model-path org/m --tp 8 --dp 8 --enable-dp-attention --ep-size 8"
    facts = explained(
        f"{line} --max-running-requests 512 --chunked-prefill-size -1 --speculative-num-steps 2", is_moe=True
    )
    assert (facts["tp"], facts["dp"], facts["moe_ep"], facts["max_batch"], facts["nextn"]) == (1, 8, 8, 64, 2)
    assert facts["chunked_prefill"] is False and facts["gpus"] == 8


def test_trtllm() -> None:
    engine = "enable_attention_dp: true\ntensor_parallel_size: 4\nkv_cache_config: {free_gpu_memory_fraction: 0.7}\n"
    words = shlex.split("mpirun -n 4 trtllm-llmapi-launch trtllm-serve org/m --extra_llm_api_options conf/e.yaml")
    facts = explain_command(words, engine_files={"e.yaml": engine})
    agg = facts["roles"]["agg"]
    assert (agg["tp"], agg["dp"], agg["kv_fraction"], facts["backend"]) == (1, 4, 0.7, "trtllm")
    with pytest.raises(InvalidField, match="not among the files"):
        explain_command(words)
    with pytest.raises(UnknownName, match="kv_cache"):
        explain_command(words, engine_files={"e.yaml": "kv_cache_conf: {dtype: fp8}"})


@pytest.mark.parametrize("backend", ["vllm", "sglang", "trtllm"])
def test_manifests(backend: str) -> None:
    bundle = generate(moe(backend, nextn=1), "dynamo")
    facts = explain_manifest(bundle.files["k8s_deploy.yaml"].decode(), is_moe=True)
    agg = facts["roles"]["agg"]
    assert (facts["backend"], facts["nextn"], agg["dp"], agg["moe_ep"], agg["max_batch"]) == (backend, 1, 8, 8, 48)
    assert facts["gpus"] == 8 and agg["unset"] == []


def test_a_pair_with_a_router() -> None:
    bundle = generate(deployment("vllm", role("prefill", workers=3), role("decode"), router=True), "dynamo")
    facts = explain_manifest(bundle.files["k8s_deploy.yaml"].decode())
    assert facts["mode"] == "disagg" and facts["router"] and facts["roles"]["prefill"]["workers"] == 3
    assert "moe_ep" not in facts["roles"]["decode"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("vllm serve m --max-num-seq 3", "did you mean .*--max-num-seqs"),
        ("vllm serve m --tensor-parallel-size", "needs a value"),
        ("vllm serve m --tensor-parallel-size two", "is no int"),
        ("vllm serve m --max-num-seqs 1 --max-num-seqs 2", "given twice"),
        ("vllm serve m --enforce-eager=1", "takes no value"),
        ("vllm serve m -x 1", "unknown vllm flag"),
        ("nginx -c conf", "unknown engine command"),
        ("python3 -m sglang.launch_server --model-path m --tp 3 --dp 2 --enable-dp-attention", "must divide"),
        ("", "unknown engine command"),
    ],
)
def test_what_is_not_understood_is_refused(command: str, message: str) -> None:
    with pytest.raises((UnknownName, InvalidField), match=message):
        explained(command)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "kind"),
        ("a: [", "yaml"),
        ("- 1", "shape"),
        ("kind: Pod\nmetadata: {name: x}", "kind"),
        ("kind: DynamoGraphDeployment", "shape"),
        ("kind: DynamoGraphDeployment\nmetadata: {name: x}\nspec: 1", "shape"),
        ("a: &a [1]\n" + "b: " + "[" * 100 + "*a" + "]" * 100, "size"),
    ],
)
def test_manifests_that_are_none_are_errors_of_who_gave_them(text: str, why: str) -> None:
    with pytest.raises(InvalidField) as caught:
        explain_manifest(text)
    assert caught.value.reason == "INVALID_FIELD" and caught.value.details["why"] == why
    assert caught.value.details["field"].startswith("manifest")
