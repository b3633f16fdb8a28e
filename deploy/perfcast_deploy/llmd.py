"""llm-d: Helm values of the model service chart, and Kustomize overlays. Specification 08 sections 7.4, 7.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfcast_engine.errors import UnsupportedCombination

from perfcast_deploy import pods
from perfcast_deploy.emit import env_list, manifest_text
from perfcast_deploy.flags import argv
from perfcast_deploy.plan import Plan, Worker, joint_flags

SIDECAR = "ghcr.io/llm-d/llm-d-routing-sidecar:latest"
GATEWAYS = {
    "agg": "http://infra-inference-scheduling-inference-gateway-istio:80",
    "disagg": "http://infra-pd-inference-gateway-istio:80",
}
GUIDES = {"agg": "guides/optimized-baseline", "disagg": "guides/pd-disaggregation"}
SIDECAR_PORT = 8200  # of a worker behind llm-d's routing sidecar


def refuse(plan: Plan, target: str) -> None:
    """What llm-d cannot run."""
    known = ("vllm",) if target == "llm-d-kustomize" else ("vllm", "sglang")
    if plan.backend not in known:
        words = f"{target} runs {' or '.join(known)}; use target dynamo or engine for {plan.backend}"
        raise UnsupportedCombination("backend", words)
    if any(worker.nodes > 1 for worker in plan.workers):
        words = f"{target} is written for workers within a node; use target dynamo or engine"
        raise UnsupportedCombination("roles", words)
    if plan.model.startswith(("/", ".")):
        raise UnsupportedCombination("model", f"{target} loads models by hub id, not by path")


def role_name(role: str) -> str:
    """llm-d calls the workers of an aggregated deployment decode."""
    return "prefill" if role == "prefill" else "decode"


def helm(plan: Plan) -> dict[str, str]:
    """Values of the model service chart."""
    connector = "nixlv2" if plan.backend == "vllm" else "sglang"
    roles = {role_name(worker.role): _helm_role(plan, worker) for worker in plan.workers}
    proxy = {"enabled": plan.mode == "disagg", "image": SIDECAR, "connector": connector}
    return {"llm-d-values.yaml": manifest_text(values(plan, roles, plan.served_name, "llm-d-hf-token", proxy))}


def values(
    plan: Plan,
    roles: Mapping[str, Any],
    name: str,
    secret: str | None,
    proxy: Mapping[str, Any],
    size: str = "100Gi",
) -> dict[str, Any]:
    """The whole of the values around the entries of the ``roles``."""
    model = "".join(c if c.isalnum() else "_" for c in plan.model)
    return {
        "enabled": True,
        "modelArtifacts": {
            "name": name,
            "labels": {"llm-d.ai/inference-serving": "true", "llm-d.ai/model": model},
            "uri": f"hf://{plan.model}",
            "size": size,
            "authSecretName": secret,
            "mountPath": "/model-cache",
        },
        "accelerator": {"type": "nvidia", "dra": False},
        "routing": {
            "servicePort": plan.port,
            "proxy": {"targetPort": SIDECAR_PORT, "zapLogLevel": "info"} | dict(proxy),
        },
        "multinode": False,
        "prefill": {"create": False, "replicas": 0},
    } | dict(roles)


def helm_role(worker: Worker, local: int, container: Mapping[str, Any], port: int, **more: Any) -> dict[str, Any]:
    """The entry of one role; ``local``: data-parallel ranks of one pod."""
    sizes = {"tensor": worker.parallel[0], "data": worker.parallel[2], "dataLocal": local, "workers": 1}
    ports = [{"containerPort": port, "name": "metrics", "protocol": "TCP"}]
    whole = dict(container) | {"ports": ports, "mountModelVolume": True}
    return {"create": True, "replicas": worker.count, "parallelism": sizes, **more, "containers": [whole]}


def _helm_role(plan: Plan, worker: Worker) -> dict[str, Any]:
    port = SIDECAR_PORT if worker.role == "decode" else plan.port
    flags = dict(worker.flags) | joint_flags(plan, worker)
    if plan.backend == "vllm":  # the chart itself adds the model, its served name and the port
        start: dict[str, Any] = {"modelCommand": "vllmServe", "args": argv(flags)}
    else:
        served = {"model-path": plan.model, "served-model-name": plan.served_name, "host": "0.0.0.0", "port": port}
        start = {"modelCommand": "custom", "command": ["python3", "-m", "sglang.launch_server"]}
        start["args"] = argv(served | flags)
    resources, security, shared = pods.fabric(plan, worker.gpus)
    container = {"name": plan.backend, "image": plan.image, **start}
    container["env"] = env_list(worker.env) + pods.pod_ip(plan, worker)
    container["resources"] = {"limits": {"nvidia.com/gpu": worker.gpus} | resources}
    return helm_role(worker, worker.parallel[2], container | security, port, **plan.placement, **shared)


def kustomize(plan: Plan) -> dict[str, str]:
    """kustomization.yaml and one Deployment patch per role."""
    xpu = "gpu.intel.com/family" in plan.placement.get("nodeSelector", {})
    base = f"{GUIDES[plan.mode]}/modelserver/" + ("xpu/vllm" if xpu else "gpu/vllm/base")
    patches: dict[str, str] = {}
    for worker in plan.workers:
        resources, security, shared = pods.fabric(plan, worker.gpus)
        container = {"image": plan.image, "env": env_list(worker.env) + pods.pod_ip(plan, worker), **security}
        limits = None if xpu else {"nvidia.com/gpu": str(worker.gpus)} | resources  # the XPU base states its own
        patches |= patch(
            plan,
            worker,
            dict(worker.flags) | joint_flags(plan, worker),
            container,
            limits,
            {**plan.placement, **shared},
        )
    return overlay([base], f"{plan.name}-", plan.namespace, patches)


def overlay(
    resources: list[str], prefix: str | None, namespace: str | None, patches: Mapping[str, str]
) -> dict[str, str]:
    """The kustomization of some patches, and these."""
    top: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
    }
    top |= {"namespace": namespace, "namePrefix": prefix, "patches": [{"path": name} for name in sorted(patches)]}
    return {"kustomization.yaml": manifest_text(top)} | dict(patches)


def patch(
    plan: Plan,
    worker: Worker,
    flags: Mapping[str, Any],
    container: Mapping[str, Any],
    limits: Mapping[str, str] | None,
    pod: Mapping[str, Any],
) -> dict[str, str]:
    """The patch of one role, by its file name."""
    port = 8000 if worker.role == "prefill" else SIDECAR_PORT
    whole = {"served-model-name": plan.served_name} | dict(flags) | {"port": port}
    server = {"name": "modelserver", "command": ["vllm", "serve"], "args": [plan.model, *argv(whole)]}
    server |= dict(container) | {"resources": {"limits": limits, "requests": limits} if limits else None}
    spec = {"replicas": worker.count, "template": {"spec": {"containers": [server], **pod}}}
    document = pods.document("apps/v1", "Deployment", role_name(worker.role), None, spec=spec)
    return {f"patch-{'vllm' if worker.role == 'agg' else worker.role}.yaml": manifest_text(document)}
