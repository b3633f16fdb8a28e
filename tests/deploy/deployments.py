"""Deployments that the tests start from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml
from perfcast_deploy.bundle import Bundle
from perfcast_deploy.deployment import Cluster, Deployment, Predicted, Role, Workload

VERSIONS = {"vllm": "0.24.0", "sglang": "0.5.16", "trtllm": "1.3.0rc23"}


def role(name: str, **changes: Any) -> Role:
    base = Role(
        name=name, workers=1, tp=2, max_batch=48, max_tokens=4048, max_seq_len=4500, kv_fraction=0.85, kv_dtype="fp8"
    )
    return replace(base, **changes)


def deployment(backend: str, *roles: Role, **changes: Any) -> Deployment:
    fields: dict[str, Any] = {
        "model": "Qwen/Qwen3-32B-FP8",
        "backend": backend,
        "version": VERSIONS[backend],
        "system": "h200_sxm",
        "roles": roles or (role("agg"),),
        "workload": Workload(isl=4000, osl=500),
        "predicted": Predicted(ttft_ms=200.0, tpot_ms=10.0, output_tokens_per_s=5000.0),
        "cluster": Cluster(name="chat", namespace="serving"),
    }
    return Deployment(**fields | changes)


def moe(backend: str, **changes: Any) -> Deployment:
    """An attention-DP worker of 8 GPUs."""
    experts = role("agg", tp=1, dp=8, moe_ep=8, max_tokens=8000)
    return deployment(backend, experts, model="deepseek-ai/DeepSeek-V3", is_moe=True, **changes)


def graph(bundle: Bundle) -> dict[str, Any]:
    documents = yaml.safe_load_all(bundle.files["k8s_deploy.yaml"])
    found: dict[str, Any] = next(d for d in documents if d["kind"] == "DynamoGraphDeployment")
    return found


def worker(bundle: Bundle, name: str = "") -> dict[str, Any]:
    """The (first) worker service whose name holds ``name``."""
    services = graph(bundle)["spec"]["services"]
    found: dict[str, Any] = next(s for key, s in services.items() if s["componentType"] == "worker" and name in key)
    return found


def words(bundle: Bundle, name: str = "") -> list[str]:
    found: list[str] = worker(bundle, name)["extraPodSpec"]["mainContainer"]["args"]
    return found


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]
