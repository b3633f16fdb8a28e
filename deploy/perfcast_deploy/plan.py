"""A deployment resolved for writing: per worker the flags of its engine version, GPUs per pod, environment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from perfcast_deploy import flags, settings
from perfcast_deploy.catalog import (
    backend_facts,
    catalog,
    model_flags,
    release_of,
    system_facts,
    transport_facts,
    version_key,
)
from perfcast_deploy.deployment import Deployment, Role

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One role: ``flags`` go on its command line, ``engine`` into its engine file (TRT-LLM only)."""

    role: str
    count: int
    gpus: int
    nodes: int
    gpu_limit: int
    flags: Mapping[str, Any]
    engine: Mapping[str, Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    shared_memory: str | None = None
    parallel: tuple[int, int, int] = (1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the targets write. Made from a ``Deployment`` here, or by the rules of the reference in ``reference``."""

    backend: str
    version: str
    mode: str
    model: str
    served_name: str
    name: str
    namespace: str | None
    image: str
    workers: tuple[Worker, ...]
    port: int = 8000
    gpus_per_node: int = 8
    kv_router: bool = False
    frontend_replicas: int = 1
    frontend_args: tuple[str, ...] = ()
    frontend_env: Mapping[str, str] = field(default_factory=dict)
    frontend_placement: Mapping[str, Any] = field(default_factory=dict)
    placement: Mapping[str, Any] = field(default_factory=dict)
    pull_secret: str | None = None
    pvc: tuple[str, str] | None = None
    transport: Mapping[str, Any] = field(default_factory=dict)
    compute_domain: bool = False
    engine_configmap: bool = True
    role_flag_names: bool = False
    planner: tuple[str, Mapping[str, Any]] | None = None
    kvbm: bool = False
    worker_pod: Mapping[str, Any] = field(default_factory=dict)
    frontend_pod: Mapping[str, Any] = field(default_factory=dict)


def plan_of(d: Deployment, *, dynamo: bool) -> Plan:
    """Resolve a deployment; ``dynamo`` picks the Dynamo runtime image instead of the engine's own."""
    facts, cluster = system_facts(d.system), d.cluster
    workers = tuple(_worker(d, role, facts) for role in d.roles)
    placement = {"nodeSelector": facts["selector"], "tolerations": facts["tolerations"]}
    return Plan(
        backend=d.backend,
        version=d.version,
        mode=d.mode,
        model=d.model,
        served_name=d.served_name,
        name=cluster.name,
        namespace=cluster.namespace,
        image=cluster.image or default_image(d, dynamo),
        workers=workers,
        port=d.port,
        gpus_per_node=cluster.gpus_per_node,
        kv_router=d.router,
        frontend_args=("--router-mode", "kv") if d.router else (),
        placement={name: value for name, value in placement.items() if value},
        pull_secret=cluster.pull_secret,
        pvc=(cluster.pvc, cluster.pvc_mount) if cluster.pvc else None,
        transport=transport_facts(cluster.transport),
        compute_domain=any(worker.nodes > 1 for worker in workers) and bool(facts.get("mnnvl")),
        role_flag_names=dynamo and old_role_flags(d.backend, d.version),
    )


def _worker(d: Deployment, role: Role, facts: Mapping[str, Any]) -> Worker:
    told, rows = settings.told(d, role), flags.rows_of(d.backend, d.version)
    filed = d.backend == "trtllm"
    wide_memory = "decode_shared_memory" if role.name == "decode" else ""
    return Worker(
        role=role.name,
        count=role.workers,
        gpus=role.gpus,
        nodes=d.nodes(role),
        gpu_limit=role.gpus // d.nodes(role),
        flags=model_flags(d.backend, d.model, role.name, facts["grace"])
        | ({} if filed else flags.command_flags(rows, told)),
        engine=flags.engine_file(rows, told) if filed else None,
        env=facts["env"] | transport_facts(d.cluster.transport)["env"] | dict(d.cluster.env),
        shared_memory=facts.get(wide_memory, facts.get("shared_memory", "64Gi")),
        parallel=(role.tp, role.pp, role.dp),
    )


def old_role_flags(backend: str, version: str) -> bool:
    """Dynamo's vLLM worker took --is-prefill-worker before release 1.0.0."""
    return backend == "vllm" and version_key(version) < version_key(catalog()["releases"]["1.0.0"]["vllm"])


def default_image(d: Deployment, dynamo: bool) -> str:
    """The image of the engine version: of the Dynamo release that ships it, or the engine's own."""
    facts = backend_facts(d.backend)
    if dynamo:
        return f"{facts['runtime']}:{release_of(d.backend, d.version)[0]}"
    return str(facts["image"]).format(version=d.version)


def joint_flags(plan: Plan, worker: Worker, events: str | None = None) -> dict[str, Any]:
    """What joins prefill with decode, and workers with a router (by ``events``), where Dynamo does not."""
    joined: dict[str, Any] = {}
    if worker.role != "agg":
        joined |= {"kv-transfer-config": NIXL} if plan.backend == "vllm" else {"disaggregation-mode": worker.role}
    if plan.kv_router and plan.backend == "vllm":
        joined["kv-events-config"] = backend_facts("vllm")["kv_events"] | ({"endpoint": events} if events else {})
    return joined


@dataclass(frozen=True)
class Placed:
    """One process of a worker on a node: its number in the role, the node's rank in the worker, its first GPU."""

    worker: Worker
    index: int
    rank: int
    first_gpu: int


def place(plan: Plan, *, spread: bool = True) -> list[list[Placed]]:
    """Which processes run on which node: first fit, in rounds of prefill and decode workers.

    ``spread`` gives a worker wider than a node as many nodes as it spans; without, it opens one and overflows it.
    """
    nodes: list[list[tuple[Worker, int, int]]] = []
    free: list[int] = []
    for worker, index in _rounds(plan.workers):
        parts = worker.nodes if spread else 1
        share = worker.gpus // parts
        fit = next((i for i, gpus in enumerate(free) if gpus >= share), len(nodes)) if parts == 1 else len(nodes)
        for rank in range(parts):
            if fit + rank == len(nodes):
                nodes.append([])
                free.append(plan.gpus_per_node)
            nodes[fit + rank].append((worker, index, rank))
            free[fit + rank] -= share
    placed: list[list[Placed]] = []
    for node in nodes:
        gpu, here = 0, []
        for worker, index, rank in sorted(node, key=lambda item: plan.workers.index(item[0])):
            here.append(Placed(worker, index, rank, gpu))
            gpu += worker.gpus // (worker.nodes if spread else 1)
        placed.append(here)
    return placed


def _rounds(workers: tuple[Worker, ...]) -> Iterator[tuple[Worker, int]]:
    """Placing order: with k = gcd of the counts, k rounds of count / k workers of each role."""
    turns = math.gcd(*(worker.count for worker in workers))
    for turn in range(turns):
        for worker in workers:
            share = worker.count // turns
            yield from ((worker, turn * share + i) for i in range(share))
