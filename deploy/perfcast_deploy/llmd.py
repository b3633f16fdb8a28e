"""llm-d: Helm values of the model service chart, and Kustomize overlays. Specification 08 sections 7.4, 7.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfcast_engine.errors import UnsupportedCombination

from perfcast_deploy.catalog import backend_facts
from perfcast_deploy.emit import env_list, yaml_text
from perfcast_deploy.flags import argv
from perfcast_deploy.plan import NIXL, Plan, Worker, fabric

SIDECAR = "ghcr.io/llm-d/llm-d-routing-sidecar:latest"
GATEWAYS = {
    "agg": "http://infra-inference-scheduling-inference-gateway-istio:80",
    "disagg": "http://infra-pd-inference-gateway-istio:80",
}
PORTS = {"prefill": 8000, "decode": 8200, "agg": 8200}
BASES = {
    "agg": "guides/optimized-baseline/modelserver/{}/base",
    "disagg": "guides/pd-disaggregation/modelserver/{}/base",
}


def refuse(plan: Plan, target: str) -> None:
    """What llm-d cannot run."""
    if plan.backend == "trtllm" or (target == "llm-d-kustomize" and plan.backend != "vllm"):
        known = "vllm" if target == "llm-d-kustomize" else "vllm or sglang"
        raise UnsupportedCombination(
            "backend", f"{target} runs {known}; use target dynamo or engine for {plan.backend}"
        )
    if any(worker.nodes > 1 for worker in plan.workers):
        raise UnsupportedCombination(
            "roles", f"{target} is written for workers within a node; use target dynamo or engine"
        )
    if plan.model.startswith(("/", ".")):
        raise UnsupportedCombination("model", f"{target} loads models by hub id, not by path")


def role_name(role: str) -> str:
    """llm-d calls the workers of an aggregated deployment decode."""
    return "prefill" if role == "prefill" else "decode"


def _role_flags(plan: Plan, worker: Worker) -> dict[str, Any]:
    """Engine flags with what joins prefill and decode; the reference leaves that to the chart."""
    flags = dict(worker.flags)
    if worker.role != "agg":
        flags |= {"kv-transfer-config": NIXL} if plan.backend == "vllm" else {"disaggregation-mode": worker.role}
    if plan.kv_router and plan.backend == "vllm":
        flags["kv-events-config"] = backend_facts("vllm")["kv_events"]
    return flags


def values(plan: Plan) -> str:
    """Helm values of the model service chart for a deployment."""
    return yaml_text(_values(plan, {}, reference=False))


def helm(plan: Plan, options: Mapping[str, Any]) -> dict[str, str]:
    """The reference's Helm values."""
    return {"llm-d-values.yaml": yaml_text(_values(plan, options, reference=True))}


def _values(plan: Plan, options: Mapping[str, Any], *, reference: bool) -> dict[str, Any]:
    proxy = options.get("routing_proxy_enabled", True) if reference else plan.mode == "disagg"
    labels = {
        "llm-d.ai/inference-serving": "true",
        "llm-d.ai/model": "".join(c if c.isalnum() else "_" for c in plan.model),
    }
    tree: dict[str, Any] = {
        "enabled": True,
        "modelArtifacts": {
            "name": plan.model if reference else plan.served_name,
            "labels": labels,
            "uri": f"hf://{plan.model}",
            "size": options.get("model_cache_size", "100Gi"),
            "authSecretName": options.get("hf_token_secret") if reference else "llm-d-hf-token",
            "mountPath": "/model-cache",
        },
        "accelerator": {"type": "nvidia", "dra": False},
        "routing": {
            "servicePort": plan.port,
            "proxy": {
                "enabled": proxy,
                "image": options.get("routing_proxy_image", SIDECAR),
                "targetPort": 8200,
                "connector": "nixlv2" if plan.backend == "vllm" or reference else "sglang",
                "zapLogLevel": "info",
            },
        },
        "multinode": False,
        "prefill": {"create": False, "replicas": 0},
    }
    for worker in plan.workers:
        port = PORTS[worker.role] if reference else 8200 if worker.role == "decode" else plan.port
        entry = _helm_role(plan, worker, options, port, reference=reference)
        tree[role_name(worker.role)] = entry
        if options.get("monitoring_enabled"):  # the reference puts it beside the roles
            tree["monitoring"] = {"podmonitor": {"enabled": True, "portName": "metrics"}}
    return tree


def _helm_role(plan: Plan, worker: Worker, options: Mapping[str, Any], port: int, *, reference: bool) -> dict[str, Any]:
    tensor, _, data = worker.parallel
    facts = backend_facts(plan.backend)
    if reference:
        flags = {facts["model_flag"]: plan.model, "served-model-name": plan.served_name} | dict(worker.flags)
        image = options.get(f"{plan.backend}_image", f"{facts['image'].partition(':')[0]}:latest")
        start: dict[str, Any] = {"modelCommand": f"{plan.backend}Serve"}
    elif plan.backend == "vllm":  # the chart itself adds the model, its served name and the port
        flags, image, start = _role_flags(plan, worker), plan.image, {"modelCommand": "vllmServe"}
    else:
        served = {"model-path": plan.model, "served-model-name": plan.served_name, "host": "0.0.0.0", "port": port}
        flags, image = served | _role_flags(plan, worker), plan.image
        start = {"modelCommand": "custom", "command": ["python3", "-m", "sglang.launch_server"]}
    container: dict[str, Any] = {"name": plan.backend, "image": image} | start | {"args": argv(flags)}
    fabric_resources, security, shared = ({}, {}, {}) if reference else fabric(plan, worker.gpus)
    if not reference:
        container["env"] = env_list(worker.env) + _pod_ip(plan, worker)
    container |= {
        "ports": [{"containerPort": port, "name": "metrics", "protocol": "TCP"}],
        "resources": {"limits": {"nvidia.com/gpu": worker.gpus} | fabric_resources},
        "mountModelVolume": True,
    }
    sizes = {"tensor": tensor, "data": data, "dataLocal": 1 if reference else data, "workers": 1}
    entry: dict[str, Any] = {"create": True, "replicas": worker.count, "parallelism": sizes}
    if not reference:
        entry |= dict(plan.placement) | shared
    return entry | {"containers": [container | security]}


def _pod_ip(plan: Plan, worker: Worker) -> list[dict[str, Any]]:
    """The NIXL side channel must be reachable from the other pods."""
    if plan.backend != "vllm" or worker.role == "agg":
        return []
    return [{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]


def kustomize(plan: Plan, options: Mapping[str, Any], *, reference: bool = False) -> dict[str, str]:
    """kustomization.yaml and one Deployment patch per role."""
    base = BASES[plan.mode].format("gpu/vllm")
    if _is_xpu(plan, options):
        rdma = "-rdma" if options.get("rdma_enabled") else ""
        base = BASES[plan.mode].format(f"xpu/vllm{rdma}").removesuffix("/base")
    base = options.get("kustomize_base_path") or base
    patches = {
        f"patch-{'vllm' if w.role == 'agg' else w.role}.yaml": _patch(plan, w, options, reference=reference)
        for w in plan.workers
    }
    top: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [base],
    }
    if not reference and plan.namespace:
        top["namespace"] = plan.namespace
    prefix = options.get("kustomize_name_prefix") if reference else f"{plan.name}-"
    top |= {"namePrefix": prefix} if prefix else {}
    top["patches"] = [{"path": name} for name in sorted(patches)]
    return {"kustomization.yaml": yaml_text(top)} | patches


def _is_xpu(plan: Plan, options: Mapping[str, Any]) -> bool:
    return options.get("accelerator_type") in ("xpu", "intel") or "gpu.intel.com/family" in plan.placement.get(
        "nodeSelector", {}
    )


def _patch(plan: Plan, worker: Worker, options: Mapping[str, Any], *, reference: bool) -> str:
    tensor, stages, _ = worker.parallel
    xpu = _is_xpu(plan, options)
    connector = NIXL | ({"kv_buffer_device": "cpu"} if xpu else {})
    flags = dict(worker.flags) | {"kv-transfer-config": connector} if reference else _role_flags(plan, worker)
    flags = {"served-model-name": plan.served_name} | flags | {"port": 8000 if worker.role == "prefill" else 8200}
    gpus = str(tensor * stages if reference else worker.gpus)
    container: dict[str, Any] = {
        "name": "modelserver",
        "image": options.get("vllm_image", "vllm/vllm-openai:latest") if reference else plan.image,
        "command": ["vllm", "serve"],
        "args": [plan.model, *argv(flags)],
    }
    if not xpu:  # the XPU base states its own
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}, "requests": {"nvidia.com/gpu": gpus}}
    pod: dict[str, Any] = {"containers": [container]}
    if not reference:
        fabric_resources, security, shared = fabric(plan, worker.gpus)
        container |= {"env": env_list(worker.env) + _pod_ip(plan, worker)} | security
        pod |= dict(plan.placement) | shared
        for kind in container.get("resources", {}):
            container["resources"][kind] = {"nvidia.com/gpu": gpus} | fabric_resources
    spec = {"replicas": worker.count, "template": {"spec": pod}}
    name = {"name": role_name(worker.role)}
    return yaml_text({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": name, "spec": spec})
