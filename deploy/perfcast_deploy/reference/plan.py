"""The plan that the reference's rules, facts and faults lead to. Specification 08 sections 3, 6, 7."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

from perfcast_deploy import flags
from perfcast_deploy.catalog import backend_facts, catalog, model_flags, system_facts, transport_facts, version_key
from perfcast_deploy.emit import merge
from perfcast_deploy.plan import Plan, Worker
from perfcast_deploy.reference.request import Request
from perfcast_deploy.reference.rules import role_params

SPARSE_SYSTEMS = ("b200_sxm", "gb200", "b300_sxm", "gb300")


def plan_of(request: Request) -> Plan:
    """What the targets write for a request."""
    service, k8s, dyn = (request.section(name) for name in ("Service", "K8s", "Dyn"))
    system = system_facts(request["system"], reference=True)
    transport = transport_facts(k8s.get("transport") or "nvlink") if system["known"] else {}
    asked = bool(dyn.get("enable_router"))
    router = asked or bool(request.get("prefix"))
    placement = {"nodeSelector": system["selector"], "tolerations": system["tolerations"]}
    placement = {name: value for name, value in placement.items() if value}
    env = {**transport.get("env", {}), **transport.get("reference", {}), **system["env"]}
    workers = tuple(_worker(request, role, params, system, env) for role, params in role_params(request).items())
    image = k8s.get("k8s_image") or f"{backend_facts(request.backend)['runtime']}:{request.release}"
    mode, planner = request["serving_mode"], dyn.get("planner_config")
    return Plan(
        backend=request.backend,
        version=request.version,
        mode=mode,
        model=service.get("model_path") or request["model"],
        served_name=service.get("served_model_name") or request["model"],
        name=f"{k8s.get('name_prefix') or 'dynamo'}-{mode}{'-router' if asked else ''}",
        namespace=k8s.get("k8s_namespace"),
        image=image,
        workers=workers,
        port=service.get("port") or 8000,
        gpus_per_node=request["gpus_per_node"],
        kv_router=router,
        frontend_replicas=int(service.get("include_frontend", True)),
        frontend_args=_router_args(dyn),
        frontend_env=_common_env(k8s) | ({"DYN_ROUTER_MODE": _router_mode(dyn)} if router else {}),
        frontend_placement=placement,
        placement=placement,
        pull_secret=k8s.get("k8s_image_pull_secret"),
        pvc=_pvc(k8s),
        transport=transport if transport.get("privileged") else {},
        compute_domain=any(worker.nodes > 1 for worker in workers),
        engine_configmap=k8s.get("k8s_engine_mode") == "configmap",
        role_flag_names=request.backend == "vllm" and version_key(request.release) < version_key("1.0.0"),
        planner=(k8s.get("k8s_planner_image") or _planner_image(image), planner) if planner else None,
        kvbm=bool(dyn.get("kvbm_config")),
        worker_pod=k8s.get("worker_extra_pod_spec") or {},
        frontend_pod=k8s.get("frontend_extra_pod_spec") or {},
    )


def _worker(
    request: Request, role: str, params: Mapping[str, Any], system: Mapping[str, Any], env: Mapping[str, str]
) -> Worker:
    k8s, kvbm = request.section("K8s"), request.section("Dyn").get("kvbm_config") or {}
    cached = {f"DYN_KVBM_{name.upper()}": str(value) for name, value in kvbm.items()} if role != "decode" else {}
    own_env = {item["name"]: str(item["value"]) for item in k8s.get("extra_env") or ()}
    engine = _engine(request, role, params, system) if request.backend == "trtllm" else {}
    dotted = _dotted(engine) if request["target"] == "dynamo-python" else {}
    gpus = params["gpus_per_worker"]
    wide = "decode_shared_memory" if role == "decode" else ""
    return Worker(
        role=role,
        count=request.counts[role],
        gpus=gpus,
        nodes=max(math.ceil(gpus / request["gpus_per_node"]), 1),
        gpu_limit=gpus,
        flags=_flags(request, role, params, system) | dotted,
        engine=engine or None,
        env=_common_env(k8s) | cached | dict(env) | own_env,
        shared_memory=system.get(wide, system.get("shared_memory")),
        parallel=(params["tp"], params["pp"], params["dp"]),
    )


@cache
def _rows(backend: str, version: str) -> tuple[flags.Flag, ...]:
    return flags.rows_of(backend, version, reference=True)


def _flags(request: Request, role: str, params: Mapping[str, Any], system: Mapping[str, Any]) -> dict[str, Any]:
    """The version's flag set, then model and hardware needs whatever the set says."""
    told = flags.command_flags(_rows(request.backend, request.version), params)
    if request.backend == "trtllm" or not system["known"]:
        return told
    needs = model_flags(request.backend, request["model"], role, system["grace"])
    if request["is_moe"] and request.backend == "sglang" and "sglang" in system["moe_backend"]:
        needs["moe-runner-backend"] = system["moe_backend"]["sglang"]
    return told | {name: value for name, value in needs.items() if name not in told}


def _engine(request: Request, role: str, params: Mapping[str, Any], system: Mapping[str, Any]) -> dict[str, Any]:
    """TRT-LLM's engine file: the table's defaults, and the limits nested where the reference nests them."""
    told = {name: value for name, value in params.items() if request["is_moe"] or not name.startswith("moe_")}
    if request["is_moe"]:
        told.setdefault("moe_backend", system["moe_backend"].get("trtllm", "CUTLASS"))
    sparse = str(request.get("architecture", "")).startswith("MiniMaxM3") and request["system"] in SPARSE_SYSTEMS
    if sparse and request.rule == "production":
        told.setdefault("sparse_implementation", "msa")
    tree = flags.engine_file(_rows(request.backend, request.version), told, defaults=True)
    if version_key(request.version) < version_key("1.2.0rc5"):
        limits = ("max_batch_size", "max_num_tokens", "max_seq_len")
        tree["build_config"] = {name: tree.pop(name) for name in limits if name in tree}
    return merge(tree, request.worker_overrides(role).get("extra_engine_args") or {})


def _dotted(tree: Mapping[str, Any], prefix: str = "trtllm") -> dict[str, Any]:
    """Scalars of the engine file that have no flag of their own, as the dynamo-python target passes them."""
    direct = {row.path for row in flags.table("trtllm") if row.flag} | {"backend"}
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}"
        if isinstance(value, Mapping):
            found |= _dotted(value, path)
        elif not isinstance(value, list) and path.removeprefix("trtllm.") not in direct and value is not None:
            found[path] = str(value).lower() if isinstance(value, bool) else value
    return found


def _common_env(k8s: Mapping[str, Any]) -> dict[str, str]:
    """Environment of frontend and workers: etcd, and the model volume as HF_HOME."""
    pvc, inner = _pvc(k8s), k8s.get("k8s_model_path_in_pvc") or k8s.get("k8s_pvc_model_path")
    home = k8s.get("k8s_hf_home") or (pvc and f"{pvc[1]}/{inner}" if inner else pvc and pvc[1])
    env = {"ETCD_ENDPOINTS": k8s.get("k8s_etcd_endpoints"), "HF_HOME": home}
    return {name: str(value) for name, value in env.items() if value}


def _pvc(k8s: Mapping[str, Any]) -> tuple[str, str] | None:
    claim = k8s.get("k8s_pvc_name") or k8s.get("k8s_model_cache")
    return (claim, k8s.get("k8s_pvc_mount_path") or "/workspace/model_cache") if claim else None


def _router_mode(dyn: Mapping[str, Any]) -> str:
    return str(dyn.get("router_mode") or "kv").replace("_", "-")


def _router_args(dyn: Mapping[str, Any]) -> tuple[str, ...]:
    config, names = dyn.get("router_config") or {}, catalog()["router"]
    if not config and not dyn.get("router_mode"):
        return ()
    words: dict[str, Any] = {"router-mode": _router_mode(dyn)}
    for key, value in config.items():
        flag = names["renamed"].get(key, key.replace("_", "-") if key in names["same_name"] else None)
        if flag and value is not None:
            words[f"no-{flag}" if value is False else flag] = value is False or value
    return tuple(flags.argv(words))


def _planner_image(image: str) -> str:
    """The planner's image of the same registry and tag, where the image is a Dynamo runtime."""
    folder, slash, leaf = image.rpartition("/")
    name, colon, tag = leaf.partition(":")
    return f"{folder}{slash}{'dynamo-planner' if name.endswith('-runtime') else name}{colon}{tag}"
