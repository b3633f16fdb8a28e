"""Dynamo on Kubernetes: DynamoGraphDeployment (nvidia.com/v1alpha1) and what it needs. Specification 08, 7.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfcast_deploy import pods
from perfcast_deploy.catalog import backend_facts
from perfcast_deploy.emit import manifest_text, merge, render, yaml_text
from perfcast_deploy.flags import argv
from perfcast_deploy.plan import NIXL, Plan, Worker

ENGINE_DIR = "/workspace/engine_configs"
KVBM = {
    "kv_connector": "DynamoConnector",
    "kv_connector_module_path": "kvbm.vllm_integration.connector",
    "kv_role": "kv_both",
}
SECRET = "hf-token-secret"
PROBES = {"startup": ("/health", 120, 40), "liveness": ("/live", 300, 10), "readiness": ("/live", 300, 10)}


def files(plan: Plan) -> dict[str, str]:
    return {"k8s_deploy.yaml": manifest_text(*manifests(plan))}


def manifests(plan: Plan) -> list[dict[str, Any]]:
    """The documents in the order they are applied."""
    services = {"Frontend": _frontend(plan), "Planner": _planner(plan)}
    services |= {service_name(plan.backend, worker.role): _worker(plan, worker) for worker in plan.workers}
    spec = {"services": services}
    documents = [pods.document("nvidia.com/v1alpha1", "DynamoGraphDeployment", plan.name, plan.namespace, spec=spec)]
    if plan.backend == "trtllm" and plan.engine_configmap:
        engines = {f"{worker.role}_config.yaml": yaml_text(worker.engine) for worker in plan.workers}
        documents.insert(0, pods.document("v1", "ConfigMap", config_name(plan), plan.namespace, data=engines))
    return documents + ([pods.compute_domain(plan)] if plan.compute_domain else [])


def config_name(plan: Plan) -> str:
    return f"{plan.name}-engine-configs"


def service_name(backend: str, role: str) -> str:
    """``VllmDecodeWorker`` and the like."""
    return f"{backend_facts(backend)['service']}{'' if role == 'agg' else role.capitalize()}Worker"


def _service(kind: str, replicas: int, pod: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"componentType": kind, "envFromSecret": SECRET, "replicas": replicas, **fields, "extraPodSpec": pod}


def _container(image: str, command: list[str], words: list[str], **fields: Any) -> dict[str, Any]:
    return {"image": image, "imagePullPolicy": "IfNotPresent", "command": command, "args": words, **fields}


def _frontend(plan: Plan) -> dict[str, Any]:
    volumes, mounts = pods.mounted(plan)
    words = ["--http-port", str(plan.port), *plan.frontend_args]
    env = pods.environment(plan, plan.frontend_env)
    container = _container(plan.image, ["python3", "-m", "dynamo.frontend"], words, env=env, volumeMounts=mounts)
    pod = {"volumes": volumes, "imagePullSecrets": pods.pull_secrets(plan), **plan.frontend_placement}
    return _service("frontend", plan.frontend_replicas, merge(pod | {"mainContainer": container}, plan.frontend_pod))


def _planner(plan: Plan) -> dict[str, Any] | None:
    if plan.planner is None:
        return None
    image, config = plan.planner
    given = {"environment": "kubernetes", "backend": plan.backend, "mode": plan.mode, "model_name": plan.model}
    container = _container(image, ["python3", "-m", "dynamo.planner"], argv({"config": given | dict(config)}))
    placement = {name: plan.frontend_placement.get(name) for name in ("nodeSelector", "tolerations")}
    return _service(
        "planner", 1, {"imagePullSecrets": pods.pull_secrets(plan), **placement, "mainContainer": container}
    )


def worker_words(plan: Plan, worker: Worker) -> list[str]:
    """The engine's command line inside a Dynamo worker."""
    facts, paired = backend_facts(plan.backend), worker.role != "agg"
    flags: dict[str, Any] = {facts["model_flag"]: plan.model, "served-model-name": plan.served_name}
    if plan.backend == "trtllm":
        flags["extra-engine-args"] = f"{ENGINE_DIR}/{worker.role}_config.yaml"
    else:
        flags |= dict(worker.flags)
    if paired:
        flags |= {f"is-{worker.role}-worker": True} if plan.role_flag_names else {"disaggregation-mode": worker.role}
        flags |= {"host": "0.0.0.0"} if plan.backend == "sglang" else {}
    connector = _connector(plan, worker)
    if connector:
        flags["kv-transfer-config"] = connector
    if plan.kv_router:
        told = "kv_events" in facts
        flags |= {"kv-events-config": facts["kv_events"]} if told else {"publish-events-and-metrics": True}
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
        path, engine = f"{ENGINE_DIR}/{worker.role}_config.yaml", yaml_text(worker.engine)
        script = render("inline_engine.sh.j2", path=path, engine=engine, command=command + words)
        command, words = ["/bin/bash", "-c"], [script]
    volumes, mounts = pods.mounted(plan, *(_engine_volumes(plan) if plan.backend == "trtllm" else ()))
    resources, security, shared = pods.fabric(plan, worker.gpu_limit)
    wide = worker.nodes > 1
    claims, pod_claims = pods.claims(plan, wide and plan.compute_domain)
    container = _container(
        plan.image,
        command,
        words,
        env=pods.environment(plan, worker.env),
        workingDir=facts["working_dir"],
        **security,
        volumeMounts=mounts,
        **(_probes() if plan.backend == "trtllm" else {}),
    )
    pod = {"volumes": volumes, "imagePullSecrets": pods.pull_secrets(plan), **plan.placement, **shared}
    pod |= {"resourceClaims": pod_claims, "mainContainer": container}
    return _service(
        "worker",
        worker.count,
        merge(pod, plan.worker_pod),
        subComponentType=None if worker.role == "agg" else worker.role,
        resources={"limits": {"gpu": str(worker.gpu_limit), "custom": resources or None}, "claims": claims},
        sharedMemory={"size": worker.shared_memory} if worker.shared_memory else None,
        multinode={"nodeCount": worker.nodes} if wide else None,
    )


def _engine_volumes(plan: Plan) -> list[tuple[str, dict[str, Any], str]]:
    source: dict[str, Any] = {"configMap": {"name": config_name(plan)}} if plan.engine_configmap else {"emptyDir": {}}
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": "10Gi"}}
    return [("engine-configs", source, ENGINE_DIR), ("tmp", memory, "/tmp")]


def _probes() -> dict[str, Any]:
    return {
        f"{name}Probe": {
            "httpGet": {"path": path, "port": 9090},
            "initialDelaySeconds": delay,
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": failures,
        }
        for name, (path, delay, failures) in PROBES.items()
    }
