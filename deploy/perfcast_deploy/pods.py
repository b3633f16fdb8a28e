"""Parts that the Kubernetes objects of several targets share. None stands for a field that is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfcast_deploy.emit import env_list
from perfcast_deploy.plan import Plan, Worker

CHANNEL = "compute-domain-channel"
Tree = dict[str, Any]


def document(api: str, kind: str, name: str, namespace: str | None, labels: Tree | None = None, **body: Any) -> Tree:
    """One object."""
    metadata = {"name": name, "namespace": namespace or None, "labels": labels}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **body}


def mounted(plan: Plan, *volumes: tuple[str, Tree, str]) -> tuple[list[Tree] | None, list[Tree] | None]:
    """Volumes (name, source, path) and their mounts, with that of the models where there is one."""
    if plan.pvc:
        claim, path = plan.pvc
        volumes = (("model-cache", {"persistentVolumeClaim": {"claimName": claim}}, path), *volumes)
    defined = [{"name": name, **source} for name, source, _ in volumes]
    return defined or None, [{"name": name, "mountPath": path} for name, _, path in volumes] or None


def pull_secrets(plan: Plan) -> list[Tree] | None:
    return [{"name": plan.pull_secret}] if plan.pull_secret else None


def environment(plan: Plan, env: Mapping[str, str]) -> list[Tree] | None:
    """``env``, with HF_HOME on the volume of the models where there is one."""
    return env_list(({"HF_HOME": plan.pvc[1]} if plan.pvc else {}) | dict(env)) or None


def fabric(plan: Plan, gpus: int) -> tuple[dict[str, str], Tree, Tree]:
    """What a KV transport asks of a pod with ``gpus``: (resources, container fields, pod fields)."""
    wants = plan.transport
    resources = {wants["resource"]: str(gpus)} if wants.get("resource") else {}
    security: Tree | None = {"capabilities": {"add": wants["capabilities"]}} if wants.get("capabilities") else None
    if security and wants.get("privileged"):
        security["privileged"] = True
    return resources, {"securityContext": security}, {"hostIPC": True if wants.get("host_ipc") else None}


def compute_domain(plan: Plan) -> Tree:
    """The NVLink domain that workers wider than a node share."""
    name = f"{plan.name}-compute-domain"
    spec = {"numNodes": 0, "channel": {"resourceClaimTemplate": {"name": f"{name}-channel"}}}
    return document("resource.nvidia.com/v1beta1", "ComputeDomain", name, plan.namespace, spec=spec)


def claims(plan: Plan, wanted: bool) -> tuple[list[Tree] | None, list[Tree] | None]:
    """A container's and a pod's claims to that domain."""
    if not wanted:
        return None, None
    return [{"name": CHANNEL}], [{"name": CHANNEL, "resourceClaimTemplateName": f"{plan.name}-{CHANNEL}"}]


def pod_ip(plan: Plan, worker: Worker) -> list[Tree]:
    """vLLM's NIXL side channel must be reachable from the other pods."""
    if plan.backend != "vllm" or worker.role == "agg":
        return []
    return [{"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
