"""A deployment resolved for writing: per worker the flags of its engine version, GPUs per pod, environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from perfcast_engine.errors import InvalidField, UnsupportedCombination

from perfcast_deploy import flags as flag_table
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


def round_up(value: int, step: int) -> int:
    return step * math.ceil(value / step)


def capture_sizes(batch: int) -> list[int]:
    """CUDA-graph batch sizes: fine below 16, coarser above, dense just around ``batch`` (specification 08, 5.2)."""
    spans = ((1, 17, 1), (16, 33, 4), (32, 65, 8), (64, 129, 16), (128, 257, 32), (256, 513, 64))
    low = 1 if batch <= 8 else batch - 8
    return sorted({size for span in spans for size in range(*span)} | set(range(low, batch + 9)))


def _vllm(d: Deployment, role: Role) -> dict[str, Any]:
    sequences = role.max_batch * (d.nextn + 1)
    return {
        "tensor_parallel_size": role.tp,
        "data_parallel_size": role.dp,
        "enable_expert_parallel": role.moe_ep > 1 or None,
        "max_batch_size": role.max_batch,
        "max_num_tokens": role.max_tokens,
        "chunked_prefill": role.chunked_prefill,
        "prefix_caching": role.prefix_caching,
        "disable_cuda_graph": not role.cuda_graphs or None,
        # vLLM captures up to 512 sequences by itself
        "cuda_graph_batch_sizes": capture_sizes(sequences) if sequences > 512 and role.cuda_graphs else None,
        "speculation": {"method": "mtp", "num_speculative_tokens": d.nextn} if d.nextn else None,
    }


def _sglang(d: Deployment, role: Role) -> dict[str, Any]:
    if role.dp > 1 and not d.is_moe:
        raise UnsupportedCombination(f"roles.{role.name}.dp", "SGLang attention DP is for MoE models; use more workers")
    # SGLang divides the request and chunk limits by the number of attention-DP ranks
    return {
        "tensor_parallel_size": role.tp * role.dp,
        "data_parallel_size": role.dp,
        "enable_attention_dp": role.dp > 1 or None,
        "moe_expert_parallel_size": role.moe_ep if d.is_moe else None,
        "max_batch_size": role.max_batch * role.dp,
        "max_prefill_tokens": role.max_tokens,
        "chunked_prefill_tokens": role.max_tokens * role.dp if role.chunked_prefill else -1,
        "enable_mixed_chunk": (role.name == "agg" and role.chunked_prefill) or None,
        "disable_prefix_cache": not role.prefix_caching or None,
        "disable_cuda_graph": not role.cuda_graphs or None,
        "cuda_graph_max_batch_size": role.max_batch if role.cuda_graphs else None,
        "speculative_algorithm": "NEXTN" if d.nextn else None,
        "speculative_steps": d.nextn or None,
        "speculative_topk": 1 if d.nextn else None,
        "speculative_draft_tokens": d.nextn + 1 if d.nextn else None,
        "kv_transfer_backend": None if role.name == "agg" else "nixl",
    }


def _trtllm(d: Deployment, role: Role) -> dict[str, Any]:
    paired = role.name != "agg"
    return {
        "engine_backend": "pytorch",
        "tensor_parallel_size": role.tp * role.dp,
        "enable_attention_dp": role.dp > 1,
        "moe_tensor_parallel_size": role.moe_tp if d.is_moe else None,
        "moe_expert_parallel_size": role.moe_ep if d.is_moe else None,
        "max_batch_size": role.max_batch,
        "max_num_tokens": role.max_tokens,
        "chunked_prefill": role.chunked_prefill,
        "prefix_caching": role.prefix_caching,
        "disable_cuda_graph": not role.cuda_graphs or None,
        "cuda_graph_padding": True if role.cuda_graphs else None,
        "cuda_graph_max_batch_size": role.max_batch if role.cuda_graphs else None,
        "disable_overlap_scheduler": role.name == "prefill",
        "transceiver_backend": "DEFAULT" if paired else None,
        "transceiver_tokens": round_up(role.max_seq_len, role.tokens_per_block or 32) if paired else None,
        "speculative_type": "MTP" if d.nextn else None,
        "speculative_steps": d.nextn or None,
        "gpus_per_node": d.cluster.gpus_per_node if d.nodes(role) > 1 else None,
    }


PARAMS: Mapping[str, Callable[[Deployment, Role], dict[str, Any]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}


def engine_params(d: Deployment, role: Role) -> dict[str, Any]:
    """The parameters an engine is told for ``role``, checked against its version."""
    params = {
        "pipeline_parallel_size": role.pp,
        "max_seq_len": role.max_seq_len,
        "kv_fraction": role.kv_fraction,
        "kv_cache_dtype": role.kv_dtype,
        "tokens_per_block": role.tokens_per_block,
        "moe_backend": role.moe_backend,
        "moe_all_to_all": role.moe_all_to_all,
        "attention_backend": role.attention_backend,
        "trust_remote_code": d.trust_remote_code or None,
    } | PARAMS[d.backend](d, role)
    flag_table.check(d.backend, d.version, params)
    return params


def role_facts(backend: str, params: Mapping[str, Any], is_moe: bool | None) -> dict[str, Any]:
    """The inverse of ``engine_params``: what the parameters say of a role; absent ones are left out.

    ``is_moe`` None (unknown) leaves the expert sizes out.
    """
    tp, dp = params.get("tensor_parallel_size", 1), params.get("data_parallel_size", 1)
    if backend == "trtllm":
        tp, dp = (1, tp) if params.get("enable_attention_dp") else (tp, 1)
    elif backend == "sglang" and params.get("enable_attention_dp"):
        if dp < 1 or tp % dp:
            raise InvalidField(
                "data-parallel-size", f"{dp} must divide the tensor size {tp} under attention DP", "parallel"
            )
        tp //= dp
    expert = params.get("moe_expert_parallel_size", 1)
    if backend == "vllm":
        expert = tp * dp if params.get("enable_expert_parallel") else 1
    scale = dp if backend == "sglang" else 1
    batch, chunk = params.get("max_batch_size"), params.get("chunked_prefill_tokens")
    facts: dict[str, Any] = {
        "tp": tp,
        "pp": params.get("pipeline_parallel_size", 1),
        "dp": dp,
        "moe_ep": None if is_moe is None else expert if is_moe else 1,
        "moe_tp": None if is_moe is None else max(tp * dp // expert, 1) if is_moe else 1,
        "max_batch": batch if batch is None else max(batch // scale, 1),
        "max_tokens": params.get("max_num_tokens", params.get("max_prefill_tokens")),
        "chunked_prefill": params.get("chunked_prefill") if chunk is None else chunk > 0,
        "prefix_caching": not params.get("disable_prefix_cache")
        if backend == "sglang"
        else params.get("prefix_caching"),
        "cuda_graphs": not params.get("disable_cuda_graph"),
        "kv_dtype": params.get("kv_cache_dtype"),
    }
    same = ("max_seq_len", "kv_fraction", "tokens_per_block", "moe_backend", "moe_all_to_all", "attention_backend")
    facts |= {name: params.get(name) for name in same}
    return {name: value for name, value in facts.items() if value is not None}


def nextn_of(params: Mapping[str, Any]) -> int:
    """The speculative depth that parameters say."""
    speculation = params.get("speculation") or {}
    return int(params.get("speculative_steps") or speculation.get("num_speculative_tokens") or 0)


def plan_of(d: Deployment, *, dynamo: bool) -> Plan:
    """Resolve a deployment; ``dynamo`` picks the Dynamo runtime image instead of the engine's own."""
    facts, transport = system_facts(d.system), transport_facts(d.cluster.transport)
    image = d.cluster.image or default_image(d, dynamo)
    env = facts["env"] | (transport["env"] if d.cluster.transport != "nvlink" else {}) | dict(d.cluster.env)
    workers = []
    for role in d.roles:
        params, rows = engine_params(d, role), flag_table.rows_of(d.backend, d.version)
        needs = model_flags(d.backend, d.model, role.name, facts["grace"])
        told = {} if d.backend == "trtllm" else flag_table.command_flags(rows, params)
        workers.append(
            Worker(
                role=role.name,
                count=role.workers,
                gpus=role.gpus,
                nodes=d.nodes(role),
                gpu_limit=role.gpus // d.nodes(role),
                flags=needs | told,
                engine=flag_table.engine_file(rows, params) if d.backend == "trtllm" else None,
                env=env,
                shared_memory=facts.get(
                    "decode_shared_memory" if role.name == "decode" else "", facts.get("shared_memory", "64Gi")
                ),
                parallel=(role.tp, role.pp, role.dp),
            )
        )
    spans = any(worker.nodes > 1 for worker in workers)
    return Plan(
        backend=d.backend,
        version=d.version,
        mode=d.mode,
        model=d.model,
        served_name=d.served_name,
        name=d.cluster.name,
        namespace=d.cluster.namespace,
        image=image,
        workers=tuple(workers),
        port=d.port,
        gpus_per_node=d.cluster.gpus_per_node,
        kv_router=d.router,
        frontend_args=("--router-mode", "kv") if d.router else (),
        placement={
            key: value
            for key, value in (("nodeSelector", facts["selector"]), ("tolerations", facts["tolerations"]))
            if value
        },
        pull_secret=d.cluster.pull_secret,
        pvc=(d.cluster.pvc, d.cluster.pvc_mount) if d.cluster.pvc else None,
        transport=transport,
        compute_domain=spans and bool(facts.get("mnnvl")),
        role_flag_names=dynamo and old_role_flags(d.backend, d.version),
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
