"""FPM collection: pods that hold the GPUs, and a script that times whole passes with Dynamo's vLLM worker.

Specification 08 section 7.7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from perfcast_engine.errors import InvalidField, UnsupportedCombination

from perfcast_deploy import pods
from perfcast_deploy.catalog import backend_facts
from perfcast_deploy.emit import manifest_text, render
from perfcast_deploy.flags import argv, read_argv, typed
from perfcast_deploy.plan import Plan, Worker

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
        made = role_files(named, worker, ["--benchmark-mode", worker.role], "lws")
        written |= {f"{folder}{name}": text for name, text in made.items()}
    return written


def role_files(plan: Plan, worker: Worker, extra: Sequence[str], orchestrator: str) -> dict[str, str]:
    """Manifest, environment and script that collect one worker."""
    data, nodes, given = worker.parallel[2], worker.nodes, read_argv("vllm", extra)[0]
    _check(plan, worker, orchestrator, given)
    output = str(given.get("benchmark-output-path", OUTPUT))
    domain = plan.compute_domain and "NCCL_MNNVL_ENABLE" in worker.env
    flags = {"model": plan.model, "served-model-name": plan.served_name} | dict(worker.flags)
    if data > 1:
        flags["data-parallel-backend"] = "mp"
    if nodes > 1 and not domain:
        fusion = {"pass_config": {"fuse_allreduce_rms": False}}
        flags["compilation-config"] = flags.get("compilation-config", {}) | fusion
    rank = "__FPM_NODE_RANK__" if nodes > 1 else "0"
    own = {"dump-config-to": f"/results/resolved-config-node{rank}.json", "benchmark-output-path": output}
    own = {name: value for name, value in own.items() if name not in given}
    limit = given.get("benchmark-timeout")
    exports = {
        "FPM_NODE_COUNT": nodes,
        "FPM_DATA_PARALLEL_SIZE": data,
        "FPM_LOCAL_DATA_PARALLEL_SIZE": max(data // nodes, 1),
        "FPM_BENCHMARK_MODE": given["benchmark-mode"],
        "FPM_BENCHMARK_OUTPUT_PATH": output,
        "FPM_WAIT_TIMEOUT_SECONDS": 7800 if limit is None else typed("benchmark-timeout", "int", limit) + 600,
        "FPM_RESULT_SCHEMA_VERSION": 2,
    }
    command = ["python3", "-m", backend_facts("vllm")["module"], *argv(flags), *extra, *argv(own)]
    env = ({"HF_HOME": plan.pvc[1]} if plan.pvc else {}) | dict(worker.env)
    domains = [pods.compute_domain(plan)] if domain else []
    return {
        "k8s_deploy.yaml": manifest_text(*domains, _resource(plan, worker, orchestrator, domain)),
        "fpm_env.sh": render("fpm_env.sh.j2", exports=exports),
        "run.sh": render("fpm_run.sh.j2", env=env, output=output, command=command),
    }


def _check(plan: Plan, worker: Worker, orchestrator: str, given: dict[str, Any]) -> None:
    if orchestrator not in ("lws", "grove"):
        raise InvalidField("K8sConfig.fpm_orchestrator", f"{orchestrator!r} is neither lws nor grove", "choice")
    for what, count in (("GPUs", worker.gpus), ("data-parallel ranks", worker.parallel[2])):
        if count > 1 and count % worker.nodes:
            raise InvalidField("roles", f"{count} {what} do not divide over {worker.nodes} nodes", "nodes")
    if worker.nodes > 1 and len(plan.name) > 50:
        raise InvalidField("cluster.name", "is longer than 50 characters on several nodes", "name")
    name = str(given.get("benchmark-output-path", OUTPUT)).rpartition("/")[2]
    if not (name.startswith("benchmark") and name.endswith(".json")):
        raise InvalidField("benchmark-output-path", f"{name} is not benchmark*.json, what collectors look for", "name")


def _resource(plan: Plan, worker: Worker, orchestrator: str, domain: bool) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": plan.name, "app.kubernetes.io/component": "fpm-resource"}
    pod, size, named = _pod(plan, worker, domain), worker.nodes, (plan.name, plan.namespace, labels)
    if size == 1:
        return pods.document("v1", "Pod", *named, spec=pod)
    if orchestrator == "lws":
        worker_template = {"metadata": {"labels": labels}, "spec": pod}
        group = {"size": size, "restartPolicy": "None", "workerTemplate": worker_template}
        spec: dict[str, Any] = {"replicas": 1, "leaderWorkerTemplate": group}
        return pods.document("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", *named, spec=spec)
    clique = {"roleName": "worker", "replicas": size, "minAvailable": size, "podSpec": pod}
    template = {
        "cliqueStartupType": "CliqueStartupTypeAnyOrder",
        "headlessServiceConfig": {"publishNotReadyAddresses": True},
        "cliques": [{"name": "worker", "labels": labels, "spec": clique}],
    }
    return pods.document("grove.io/v1alpha1", "PodCliqueSet", *named, spec={"replicas": 1, "template": template})


def _pod(plan: Plan, worker: Worker, domain: bool) -> dict[str, Any]:
    gpus = worker.gpus // worker.nodes
    share = {"cpu": str(CPUS_PER_GPU * gpus), "memory": f"{MEMORY_GIB_PER_GPU * gpus}Gi"}
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": worker.shared_memory}}
    shm = [("dshm", memory, "/dev/shm")] if worker.shared_memory else []
    volumes, mounts = pods.mounted(plan, ("results", {"emptyDir": {}}, "/results"), *shm)
    resources, security, shared = pods.fabric(plan, gpus)
    claims, pod_claims = pods.claims(plan, domain)
    container = {
        "name": "fpm-resource",
        "image": plan.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["/bin/bash", "-lc"],
        "args": ["exec sleep infinity"],
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)} | share | resources, "requests": share, "claims": claims},
        "volumeMounts": mounts,
        **security,
    }
    pod = {**plan.placement, "imagePullSecrets": pods.pull_secrets(plan), "resourceClaims": pod_claims, **shared}
    return pod | {"volumes": volumes, "containers": [container], "restartPolicy": "Always"}
