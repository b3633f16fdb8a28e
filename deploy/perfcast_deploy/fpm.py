"""FPM collection: pods that hold the GPUs, and a script that times whole passes with Dynamo's vLLM worker.

Specification 08 section 7.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from perfcast_engine.errors import InvalidField, UnsupportedCombination

from perfcast_deploy import flags as flag_table
from perfcast_deploy.catalog import backend_facts
from perfcast_deploy.dynamo import compute_domain
from perfcast_deploy.emit import render, yaml_text
from perfcast_deploy.plan import Plan, Worker, fabric

OWNED = (
    *("nnodes", "node-rank", "master-addr", "master-port", "headless", "data-parallel-size-local"),
    *("data-parallel-start-rank", "data-parallel-address", "data-parallel-rpc-port", "data-parallel-hybrid-lb"),
)
MODES = ("agg", "prefill", "decode")
OUTPUT = "/results/benchmark.json"
CPUS_PER_GPU, MEMORY_GIB_PER_GPU = 14, 64


def refuse(plan: Plan) -> None:
    """What cannot be collected."""
    if plan.backend != "vllm":
        raise UnsupportedCombination("backend", f"FPM collection runs vllm, not {plan.backend}")


def files(plan: Plan) -> dict[str, str]:
    """Collection files of a deployment: one worker of each role in a folder of its own."""
    refuse(plan)
    written: dict[str, str] = {}
    for worker in plan.workers:
        folder = f"{worker.role}/" if plan.mode == "disagg" else ""
        named = replace(plan, name=f"{plan.name}-{worker.role}")
        written |= {
            f"{folder}{name}": text
            for name, text in role_files(named, worker, ["--benchmark-mode", worker.role], "lws").items()
        }
    return written


def role_files(plan: Plan, worker: Worker, extra: Sequence[str], orchestrator: str) -> dict[str, str]:
    """Manifest, environment and script that collect one worker."""
    if orchestrator not in ("lws", "grove"):
        raise InvalidField("K8sConfig.fpm_orchestrator", f"{orchestrator!r} is neither lws nor grove", "choice")
    if worker.gpus % worker.nodes:
        raise InvalidField("roles", f"{worker.gpus} GPUs do not divide over {worker.nodes} nodes", "nodes")
    if worker.nodes > 1 and len(plan.name) > 50:
        raise InvalidField("cluster.name", "is longer than 50 characters on several nodes", "name")
    data, given = worker.parallel[2], flag_table.read_argv("vllm", extra)[0]
    output = str(given.get("benchmark-output-path", OUTPUT))
    name = output.rpartition("/")[2]
    if not (name.startswith("benchmark") and name.endswith(".json")):
        raise InvalidField(
            "benchmark-output-path", f"{output} is not named benchmark*.json, which collectors look for", "name"
        )
    if data > 1 and data % worker.nodes:
        raise InvalidField("roles", f"{data} data-parallel ranks do not divide over {worker.nodes} nodes", "nodes")
    domain = plan.compute_domain and "NCCL_MNNVL_ENABLE" in worker.env
    flags = {"model": plan.model, "served-model-name": plan.served_name} | dict(worker.flags)
    if data > 1:
        flags["data-parallel-backend"] = "mp"
    if worker.nodes > 1 and not domain:
        fusion = {"pass_config": {"fuse_allreduce_rms": False}}
        flags["compilation-config"] = flags.get("compilation-config", {}) | fusion
    node = "__FPM_NODE_RANK__" if worker.nodes > 1 else "0"
    own = {"dump-config-to": f"/results/resolved-config-node{node}.json", "benchmark-output-path": output}
    own = {name: value for name, value in own.items() if name not in given}
    command = ["python3", "-m", backend_facts("vllm")["module"], *flag_table.argv(flags), *extra, *flag_table.argv(own)]
    limit = given.get("benchmark-timeout")
    wait = 7800 if limit is None else flag_table.typed("benchmark-timeout", "int", limit) + 600
    exports = {
        "FPM_NODE_COUNT": worker.nodes,
        "FPM_DATA_PARALLEL_SIZE": data,
        "FPM_LOCAL_DATA_PARALLEL_SIZE": max(data // worker.nodes, 1),
        "FPM_BENCHMARK_MODE": given["benchmark-mode"],
        "FPM_BENCHMARK_OUTPUT_PATH": output,
        "FPM_WAIT_TIMEOUT_SECONDS": wait,
        "FPM_RESULT_SCHEMA_VERSION": 2,
    }
    documents = ([compute_domain(plan)] if domain else []) + [_resource(plan, worker, orchestrator, domain)]
    return {
        "k8s_deploy.yaml": yaml_text(*documents),
        "fpm_env.sh": render("fpm_env.sh.j2", exports=exports),
        "run.sh": render(
            "fpm_run.sh.j2",
            env=({"HF_HOME": plan.pvc[1]} if plan.pvc else {}) | dict(worker.env),
            output=output,
            command=command,
        ),
    }


def _resource(plan: Plan, worker: Worker, orchestrator: str, domain: bool) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": plan.name, "app.kubernetes.io/component": "fpm-resource"}
    pod, metadata = _pod(plan, worker, domain), {"name": plan.name, "labels": labels}
    if plan.namespace:
        metadata["namespace"] = plan.namespace
    if worker.nodes == 1:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod}
    if orchestrator == "lws":
        group = {
            "size": worker.nodes,
            "restartPolicy": "None",
            "workerTemplate": {"metadata": {"labels": labels}, "spec": pod},
        }
        spec: dict[str, Any] = {"replicas": 1, "leaderWorkerTemplate": group}
        return {
            "apiVersion": "leaderworkerset.x-k8s.io/v1",
            "kind": "LeaderWorkerSet",
            "metadata": metadata,
            "spec": spec,
        }
    clique = {"roleName": "worker", "replicas": worker.nodes, "minAvailable": worker.nodes, "podSpec": pod}
    template = {
        "cliqueStartupType": "CliqueStartupTypeAnyOrder",
        "headlessServiceConfig": {"publishNotReadyAddresses": True},
        "cliques": [{"name": "worker", "labels": labels, "spec": clique}],
    }
    spec = {"replicas": 1, "template": template}
    return {"apiVersion": "grove.io/v1alpha1", "kind": "PodCliqueSet", "metadata": metadata, "spec": spec}


def _pod(plan: Plan, worker: Worker, domain: bool) -> dict[str, Any]:
    gpus = worker.gpus // worker.nodes
    share = {"cpu": str(CPUS_PER_GPU * gpus), "memory": f"{MEMORY_GIB_PER_GPU * gpus}Gi"}
    resources: dict[str, Any] = {"limits": {"nvidia.com/gpu": str(gpus)} | share, "requests": share}
    volumes: list[dict[str, Any]] = [{"name": "results", "emptyDir": {}}]
    mounts = [{"name": "results", "mountPath": "/results"}]
    if worker.shared_memory:
        volumes.append({"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": worker.shared_memory}})
        mounts.append({"name": "dshm", "mountPath": "/dev/shm"})
    if plan.pvc:
        volumes.append({"name": "model-cache", "persistentVolumeClaim": {"claimName": plan.pvc[0]}})
        mounts.append({"name": "model-cache", "mountPath": plan.pvc[1]})
    pod: dict[str, Any] = dict(plan.placement)
    if plan.pull_secret:
        pod["imagePullSecrets"] = [{"name": plan.pull_secret}]
    if domain:
        claim = "compute-domain-channel"
        resources["claims"] = [{"name": claim}]
        pod["resourceClaims"] = [{"name": claim, "resourceClaimTemplateName": f"{plan.name}-{claim}"}]
    fabric_resources, security, shared = fabric(plan, gpus)
    resources["limits"] |= fabric_resources
    container = {
        "name": "fpm-resource",
        "image": plan.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/bash", "-lc"],
        "args": ["exec sleep infinity"],
        "resources": resources,
        "volumeMounts": mounts,
    }
    return pod | shared | {"volumes": volumes, "containers": [container | security], "restartPolicy": "Always"}
