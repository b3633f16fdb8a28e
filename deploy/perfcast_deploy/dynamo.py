"""Dynamo on Kubernetes: DynamoGraphDeployment (nvidia.com/v1alpha1) and what it needs. Specification 08, 7.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfcast_deploy.catalog import backend_facts
from perfcast_deploy.emit import env_list, merge, render, yaml_text
from perfcast_deploy.flags import argv
from perfcast_deploy.plan import NIXL, Plan, Worker, fabric

ENGINE_DIR = "/workspace/engine_configs"
KVBM = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
}
SECRET = "hf-token-secret"


def manifests(plan: Plan) -> list[dict[str, Any]]:
    """The documents in the order they are applied."""
    services: dict[str, Any] = {"Frontend": _frontend(plan)}
    if plan.planner:
        services["Planner"] = _planner(plan)
    for worker in plan.workers:
        services[service_name(plan.backend, worker.role)] = _worker(plan, worker)
    graph = _document("nvidia.com/v1alpha1", "DynamoGraphDeployment", plan.name, plan.namespace)
    graph["spec"] = {"services": services}
    documents = [graph]
    if plan.backend == "trtllm" and plan.engine_configmap:
        config = _document("v1", "ConfigMap", config_name(plan), plan.namespace)
        config["data"] = {f"{w.role}_config.yaml": yaml_text(w.engine) for w in plan.workers}
        documents.insert(0, config)
    if plan.compute_domain:
        documents.append(compute_domain(plan))
    return documents


def config_name(plan: Plan) -> str:
    return f"{plan.name}-engine-configs"


def service_name(backend: str, role: str) -> str:
    """``VllmDecodeWorker`` and the like."""
    return f"{backend_facts(backend)['service']}{'' if role == 'agg' else role.capitalize()}Worker"


def _document(api: str, kind: str, name: str, namespace: str | None) -> dict[str, Any]:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": api, "kind": kind, "metadata": metadata}


def compute_domain(plan: Plan) -> dict[str, Any]:
    """The NVLink domain that workers wider than a node share."""
    name = f"{plan.name}-compute-domain"
    document = _document("resource.nvidia.com/v1beta1", "ComputeDomain", name, plan.namespace)
    document["spec"] = {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": f"{name}-channel"}}}
    return document


def _pod(plan: Plan, placement: Mapping[str, Any], container: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = {}
    if plan.pvc:
        claim, mount = plan.pvc
        pod["volumes"] = [{"name": "model-cache", "persistentVolumeClaim": {"claimName": claim}}]
        container["volumeMounts"] = [{"name": "model-cache", "mountPath": mount}]
    if plan.pull_secret:
        pod["imagePullSecrets"] = [{"name": plan.pull_secret}]
    return merge(pod, placement) | {"mainContainer": container}


def _frontend(plan: Plan) -> dict[str, Any]:
    words = ["--http-port", str(plan.port), *plan.frontend_args]
    container = _container(plan.image, ["python3", "-m", "dynamo.frontend"], words, _hf_home(plan, plan.frontend_env))
    return {
        "componentType": "frontend",
        "envFromSecret": SECRET,
        "replicas": plan.frontend_replicas,
        "extraPodSpec": merge(_pod(plan, plan.frontend_placement, container), plan.frontend_pod),
    }


def _hf_home(plan: Plan, env: Mapping[str, str]) -> dict[str, str]:
    """HF_HOME points to the model volume when there is one."""
    return ({"HF_HOME": plan.pvc[1]} if plan.pvc else {}) | dict(env)


def _planner(plan: Plan) -> dict[str, Any]:
    assert plan.planner is not None
    image, config = plan.planner
    given = {"environment": "kubernetes", "backend": plan.backend, "mode": plan.mode, "model_name": plan.model}
    words = argv({"config": {**config, **{key: value for key, value in given.items() if key not in config}}})
    pod = {"imagePullSecrets": [{"name": plan.pull_secret}]} if plan.pull_secret else {}
    pod = merge(
        pod, {key: value for key, value in plan.frontend_placement.items() if key in ("nodeSelector", "tolerations")}
    )
    container = _container(image, ["python3", "-m", "dynamo.planner"], words, {})
    return {
        "componentType": "planner",
        "envFromSecret": SECRET,
        "replicas": 1,
        "extraPodSpec": pod | {"mainContainer": container},
    }


def _container(image: str, command: list[str], words: list[str], env: Mapping[str, str]) -> dict[str, Any]:
    container: dict[str, Any] = {"image": image, "imagePullPolicy": "IfNotPresent", "command": command, "args": words}
    return container | ({"env": env_list(env)} if env else {})


def worker_words(plan: Plan, worker: Worker) -> list[str]:
    """The engine's command line inside a Dynamo worker."""
    facts, paired = backend_facts(plan.backend), worker.role != "agg"
    flags: dict[str, Any] = {facts["model_flag"]: plan.model, "served-model-name": plan.served_name}
    flags |= {} if plan.backend == "trtllm" else dict(worker.flags)
    if plan.backend == "trtllm":
        flags["extra-engine-args"] = f"{ENGINE_DIR}/{worker.role}_config.yaml"
    if paired:
        flags |= {f"is-{worker.role}-worker": True} if plan.role_flag_names else {"disaggregation-mode": worker.role}
        flags |= {"host": "0.0.0.0"} if plan.backend == "sglang" else {}
    connector = _connector(plan, worker)
    if connector:
        flags["kv-transfer-config"] = connector
    if plan.kv_router:
        flags |= (
            {"kv-events-config": facts["kv_events"]} if "kv_events" in facts else {"publish-events-and-metrics": True}
        )
    if plan.backend == "trtllm" and _kvbm(plan, worker):
        flags["connector"] = "kvbm"
    return argv(flags)


def _kvbm(plan: Plan, worker: Worker) -> bool:
    return plan.kvbm and worker.role != "decode"


def _connector(plan: Plan, worker: Worker) -> dict[str, Any] | None:
    """vLLM's KV connector: NIXL between prefill and decode, Dynamo's block manager where it is asked for."""
    if plan.backend != "vllm":
        return None
    if not _kvbm(plan, worker):
        return NIXL if worker.role != "agg" else None
    if worker.role == "agg":
        return KVBM
    return KVBM | {"kv_connector": "PdConnector", "kv_connector_extra_config": {"connectors": [KVBM, NIXL]}}


def _worker(plan: Plan, worker: Worker) -> dict[str, Any]:
    facts = backend_facts(plan.backend)
    command, words = ["python3", "-m", facts["module"]], worker_words(plan, worker)
    if plan.backend == "trtllm" and not plan.engine_configmap:
        script = render(
            "inline_engine.sh.j2",
            path=f"{ENGINE_DIR}/{worker.role}_config.yaml",
            engine=yaml_text(worker.engine),
            command=command + words,
        )
        command, words = ["/bin/bash", "-c"], [script]
    container = _container(plan.image, command, words, _hf_home(plan, worker.env))
    container["workingDir"] = facts["working_dir"]
    resources, security, shared = fabric(plan, worker.gpu_limit)
    container |= security
    pod = _pod(plan, plan.placement, container) | shared
    if plan.backend == "trtllm":
        _engine_volumes(plan, pod, container)
    limits: dict[str, Any] = {"gpu": str(worker.gpu_limit)}
    limits |= {"custom": resources} if resources else {}
    service: dict[str, Any] = {"componentType": "worker"}
    if worker.role != "agg":
        service["subComponentType"] = worker.role
    service |= {"envFromSecret": SECRET, "replicas": worker.count, "resources": {"limits": limits}}
    if worker.shared_memory:
        service["sharedMemory"] = {"size": worker.shared_memory}
    if worker.nodes > 1:
        service["multinode"] = {"nodeCount": worker.nodes}
        if plan.compute_domain:
            claim = "compute-domain-channel"
            service["resources"]["claims"] = [{"name": claim}]
            pod["resourceClaims"] = [{"name": claim, "resourceClaimTemplateName": f"{plan.name}-{claim}"}]
    return service | {"extraPodSpec": merge(pod, plan.worker_pod)}


def _engine_volumes(plan: Plan, pod: dict[str, Any], container: dict[str, Any]) -> None:
    source = {"configMap": {"name": config_name(plan)}} if plan.engine_configmap else {"emptyDir": {}}
    volumes = [
        {"name": "engine-configs", **source},
        {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": "10Gi"}},
    ]
    mounts = [{"name": "engine-configs", "mountPath": ENGINE_DIR}, {"name": "tmp", "mountPath": "/tmp"}]
    pod["volumes"] = pod.get("volumes", []) + volumes
    container["volumeMounts"] = container.get("volumeMounts", []) + mounts
    for name, path, delay, failures in (
        ("startup", "/health", 120, 40),
        ("liveness", "/live", 300, 10),
        ("readiness", "/live", 300, 10),
    ):
        container[f"{name}Probe"] = {
            "httpGet": {"path": path, "port": 9090},
            "initialDelaySeconds": delay,
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": failures,
        }


def files(plan: Plan) -> dict[str, str]:
    return {"k8s_deploy.yaml": yaml_text(*manifests(plan))}
