"""Profile `reference`: the reference generator's request, rule sets and known faults. Specification 08 sections 2-7.

Only goldens and comparisons use it. It ends in the same ``Plan`` and the same targets as a ``Deployment``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from perfcast_engine.errors import InvalidField, Reason, UnknownName, UnsupportedCombination

from perfcast_deploy import bench, dynamo, flags, fpm, llmd
from perfcast_deploy.catalog import backend_facts, catalog, model_flags, system_facts, transport_facts, version_key
from perfcast_deploy.commands import reference_scripts
from perfcast_deploy.emit import merge, yaml_text
from perfcast_deploy.plan import Plan, Worker, capture_sizes, round_up

TARGETS = ("dynamo-j2", "dynamo-python", "llm-d-helm", "llm-d-kustomize", "fpm")
RENAMED = {
    "enable_chunked_prefill": "chunked_prefill",
    "kv_cache_free_gpu_memory_fraction": "kv_fraction",
    "cuda_graph_enable_padding": "cuda_graph_padding",
    "moe_all2all_backend": "moe_all_to_all",
}
GRAPH_OF_ROLE = ("agg", "decode")


@dataclass(frozen=True)
class Scope:
    """What a rule sees: the workload and the parameters of its own role, as far as earlier rules set them."""

    role: str
    params: dict[str, Any]
    isl: int
    osl: int
    is_moe: bool
    margin: int

    def __getitem__(self, name: str) -> Any:
        return self.params.get(name) or 0

    @property
    def block(self) -> int:
        return self.params.get("tokens_per_block") or 32

    @property
    def experts(self) -> int:
        return int(self["moe_tensor_parallel_size"] * self["moe_expert_parallel_size"])


@dataclass(frozen=True)
class Rule:
    """``param = value(scope)`` for backends, roles and rule sets; ``limit``: not under preserve_engine_limits."""

    param: str
    backends: str
    roles: str
    value: Callable[[Scope], Any]
    sets: str = "production benchmark"
    limit: bool = False


def _twice_or_512(s: Scope) -> int:
    batch = int(s["max_batch_size"])
    return 512 if batch < 512 else 2 * batch


ALL, PAIR, ANY = "agg prefill decode", "prefill decode", "vllm sglang trtllm"
RULES = (
    Rule(
        "cuda_graph_batch_sizes",
        "trtllm sglang",
        "agg decode",
        lambda s: capture_sizes(s["max_batch_size"]),
        "production",
    ),
    Rule("cuda_graph_padding", "trtllm sglang", "agg decode", lambda s: True, "production"),
    Rule("max_batch_size", ANY, "prefill", lambda s: s["max_batch_size"] or 1, limit=True),
    Rule("max_batch_size", "trtllm", "agg decode", lambda s: s["max_batch_size"] or 128, limit=True),
    Rule("max_batch_size", "vllm sglang", "agg decode", _twice_or_512, "production", limit=True),
    Rule("max_batch_size", "vllm", "decode", lambda s: s["max_batch_size"] or 128, "benchmark", limit=True),
    Rule("max_batch_size", "sglang", "agg decode", lambda s: s["max_batch_size"] or 128, "benchmark", limit=True),
    Rule("cuda_graph_batch_sizes", ANY, ALL, lambda s: list(range(1, s["max_batch_size"] + 1)), "benchmark"),
    Rule("disable_overlap_scheduler", "trtllm", ALL, lambda s: s.role == "prefill"),
    Rule("tokens_per_block", "trtllm", ALL, lambda s: s.block),
    Rule("max_num_tokens", "trtllm", "prefill", lambda s: round_up(s.isl + s.margin, s.block), limit=True),
    Rule("max_num_tokens", "trtllm", "decode", lambda s: round_up(s["max_batch_size"], s.block), limit=True),
    Rule(
        "max_num_tokens",
        "trtllm",
        "agg",
        lambda s: round_up(s["max_batch_size"] + s.isl + s.margin, s.block),
        limit=True,
    ),
    Rule("transceiver_tokens", "trtllm", PAIR, lambda s: round_up(s.isl + s.osl + s.margin, s.block), limit=True),
    Rule("max_num_tokens", "vllm", "prefill", lambda s: s.isl + 1500, limit=True),
    Rule("max_num_tokens", "vllm", "decode", lambda s: s["max_batch_size"], limit=True),
    Rule("max_num_tokens", "vllm", "agg", lambda s: s["max_batch_size"] + s.isl + 1500, limit=True),
    Rule("max_seq_len", "vllm", "agg", lambda s: s.isl + s.osl + 1500, limit=True),
    Rule("max_prefill_tokens", "sglang", ALL, lambda s: s.isl + 1500, limit=True),
    Rule("enable_mixed_chunk", "sglang", "agg", lambda s: True),
    Rule("kv_transfer_backend", "sglang", PAIR, lambda s: s.params.get("kv_transfer_backend") or "nixl"),
    Rule("tensor_parallel_size", "trtllm sglang", ALL, lambda s: s.experts if s.is_moe else s["tensor_parallel_size"]),
    Rule(
        "tensor_parallel_size",
        "vllm",
        ALL,
        lambda s: s.experts // s["data_parallel_size"] if s.is_moe else s["tensor_parallel_size"],
        "production",
    ),
    Rule("enable_attention_dp", "trtllm sglang", ALL, lambda s: s["data_parallel_size"] > 1 and s.is_moe),
    Rule("enable_expert_parallel", "vllm", ALL, lambda s: s["moe_expert_parallel_size"] > 1),
)


def render(request: Mapping[str, Any]) -> dict[str, str]:
    """Files of a request (the fields of the goldens' render cases); refusals are typed and name the field."""
    overrides = request.get("overrides") or {}
    _refuse(request, overrides)
    backend, target = request["backend"], request["target"]
    if backend not in catalog()["backends"]:
        raise UnknownName("backend", backend, catalog()["backends"], Reason.INVALID_FIELD)
    if target not in TARGETS:
        raise UnknownName("target", target, TARGETS, Reason.INVALID_FIELD)
    plan = plan_of(request)
    if target == "fpm":
        return fpm.reference_files(plan, request, overrides)
    files = dict(reference_scripts(plan)) | {"sflow.yaml": _sflow(plan)}
    if backend == "trtllm":
        files |= {f"{worker.role}_config.yaml": yaml_text(worker.engine) for worker in plan.workers}
    if target == "llm-d-helm":
        return files | (llmd.helm(plan, overrides.get("LlmdConfig", {})) if backend != "trtllm" else {})
    if target == "llm-d-kustomize":
        return files | (
            llmd.kustomize(plan, overrides.get("LlmdConfig", {}), reference=True) if backend == "vllm" else {}
        )
    files |= bench.reference_files(plan, request, concurrency(request))
    if target == "dynamo-j2":  # dynamo-python needs the dynamo package to write a manifest
        files |= dynamo.files(plan)
    return files


def load_request(source: Mapping[str, Any] | Path | None) -> dict[str, Any]:
    """The dictionary front door: sections from a mapping or a YAML file; the two required keys must be there."""
    if isinstance(source, Path):
        if not source.is_file():
            raise UnknownName("configuration file", str(source), (), Reason.INVALID_FIELD)
        source = yaml.safe_load(source.read_text())
    if not isinstance(source, Mapping) or not source:
        raise InvalidField("configuration", "must be a mapping of sections such as ServiceConfig", "type")
    service = source.get("ServiceConfig") or {}
    for key in ("model_path", "served_model_name"):
        if not service.get(key):
            raise InvalidField(f"ServiceConfig.{key}", "is required", "missing")
    return dict(source)


def _refuse(request: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    if request.get("enable_epd") or any(
        name.startswith("(e)") and n for name, n in request.get("extra_columns", {}).items()
    ):
        raise UnsupportedCombination("enable_epd", "rows with an encode pool have no deployment; search without it")
    if request["serving_mode"] == "disagg" and request.get("prefill_system", request["system"]) != request.get(
        "decode_system", request["system"]
    ):
        raise UnsupportedCombination("decode_system", "prefill and decode must run on one system")
    if request["backend"] == "sglang" and request.get("attention_backend") == "fla":
        raise UnsupportedCombination("attention_backend", "fla is no SGLang attention backend; use default")
    rule = overrides.get("rule", request.get("rule", "production"))
    if rule not in ("production", "benchmark"):
        raise InvalidField("rule", f"{rule!r} is neither production nor benchmark", "unknown")
    if request["backend"] == "sglang" and overrides.get("DynConfig", {}).get("kvbm_config"):
        raise UnsupportedCombination("DynConfig.kvbm_config", "the block manager works with vllm and trtllm")


def version_of(request: Mapping[str, Any]) -> tuple[str, str]:
    """(release, template version): the explicit version, else the one in the release's images."""
    overrides = request.get("overrides") or {}
    release = overrides.get("generator_dynamo_version")
    if release is not None and not str(release).strip():
        raise InvalidField("generator_dynamo_version", "is blank; leave it out for the default", "empty")
    releases = catalog()["releases"]
    release = str(release).strip() if release is not None else next(iter(releases))
    if release not in releases:
        raise UnknownName("release", release, releases, Reason.UNKNOWN_VERSION)
    version = str(request.get("template_version") or releases[release][request["backend"]])
    return release, version[1:] if version[:1] == "v" and version[1:2].isdigit() else version


def role_params(request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Engine parameters of every role after the rule set."""
    overrides, backend = request.get("overrides") or {}, request["backend"]
    sets = overrides.get("rule", request.get("rule", "production"))
    keep, prefix, nextn = (
        bool(overrides.get("preserve_engine_limits")),
        request.get("prefix") or 0,
        request.get("nextn") or 0,
    )
    margin = 500 if sets == "production" else 1500
    result = {role: _given(request, overrides, role) for role in ALL.split() if role in request["roles"]}
    merged = {name: value for params in result.values() for name, value in params.items()}
    for role, params in result.items():
        scope = Scope(role, params, request["isl"], request["osl"], request["is_moe"], margin)
        for rule in RULES:
            if (
                backend in rule.backends.split()
                and role in rule.roles.split()
                and sets in rule.sets.split()
                and not (rule.limit and keep)
            ):
                params[rule.param] = rule.value(scope)
        params["gpus_per_worker"] = math.prod(
            params.get(f"{name}_parallel_size") or 1 for name in ("tensor", "pipeline", "data")
        )
        if prefix > 0:
            params["disable_prefix_cache"] = False
        if nextn > 0:
            params |= _speculation(backend, nextn)
        # the dtype rule looks at the merged role, so that decode decides for prefill
        if merged.get("kv_cache_dtype") in ("bfloat16", "float16") and (backend == "trtllm" or sets == "benchmark"):
            params["kv_cache_dtype"] = "auto"
        if params.get("disable_prefix_cache") is False and backend == "trtllm":
            params["prefix_caching"] = True
        if params.get("transceiver_tokens"):
            params["transceiver_backend"] = "DEFAULT"
        if backend == "sglang" and params.get("cuda_graph_padding") is False:
            params["disable_cuda_graph_padding"] = True
    return result


def _given(request: Mapping[str, Any], overrides: Mapping[str, Any], role: str) -> dict[str, Any]:
    row = request["roles"][role]
    params: dict[str, Any] = {
        "tensor_parallel_size": row["tp"],
        "pipeline_parallel_size": row["pp"],
        "data_parallel_size": row["dp"],
        "moe_tensor_parallel_size": row.get("moe_tp"),
        "moe_expert_parallel_size": row.get("moe_ep"),
        "max_batch_size": row.get("bs"),
        "kv_cache_dtype": row.get("kvcache"),
    }
    if request.get("image_height") and request.get("image_width"):
        params["encoder_dp"] = True
    if request["backend"] == "sglang" and request.get("attention_backend") not in (None, "default"):
        params["attention_backend"] = request["attention_backend"]
    given = (overrides.get("Workers") or {}).get(role) or {}
    return params | {RENAMED.get(name, name): value for name, value in given.items()}


def _speculation(backend: str, nextn: int) -> dict[str, Any]:
    if backend == "vllm":
        return {"speculation": {"method": "mtp", "num_speculative_tokens": nextn}}
    if backend == "trtllm":
        return {"speculative_type": "MTP", "speculative_steps": nextn}
    draft = {"speculative_topk": 1, "speculative_draft_tokens": nextn + 1}
    return {"speculative_algorithm": "NEXTN", "speculative_steps": nextn} | draft


def worker_counts(request: Mapping[str, Any]) -> dict[str, int]:
    """Workers per role: whole replicas that fit the GPUs, explicit counts first."""
    given = (request.get("overrides") or {}).get("WorkerConfig") or {}
    roles, total = request["roles"], request.get("total_gpus")
    size = {name: row["tp"] * row["pp"] * row["dp"] for name, row in roles.items()}
    counts = {name: max(row.get("workers") or 1, 1) for name, row in roles.items()}
    if total:
        if "agg" in roles:
            counts["agg"] = total // size["agg"]
        else:
            replicas = total // sum(counts[name] * size[name] for name in roles)
            counts = {name: replicas * count for name, count in counts.items()}
    return {name: given.get(f"{name}_workers", count) for name, count in counts.items()}


def concurrency(request: Mapping[str, Any]) -> int:
    """The reference's estimate: decode (or agg) workers times batch, without dp and pp."""
    given = (request.get("overrides") or {}).get("BenchConfig", {}).get("estimated_concurrency")
    role = "agg" if "agg" in request["roles"] else "decode"
    return int(
        given
        or worker_counts(request).get(role, 0)
        * (_given(request, request.get("overrides") or {}, role)["max_batch_size"] or 0)
    )


def engine_of(backend: str, version: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The reference's TRT-LLM engine file: its defaults, and the limits where its versions nest them."""
    tree = flags.engine_file(_rows(backend, version), params, defaults=True)
    if version_key(version) < version_key("1.2.0rc5"):
        tree["build_config"] = {
            name: tree.pop(name) for name in ("max_batch_size", "max_num_tokens", "max_seq_len") if name in tree
        }
    return tree


@cache
def _rows(backend: str, version: str) -> tuple[flags.Flag, ...]:
    return flags.rows_of(backend, version, reference=True)


def worker_flags(request: Mapping[str, Any], role: str, params: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Flags of one role: the version's set, then model and hardware needs whatever the set says."""
    backend, facts = request["backend"], system_facts(request["system"], reference=True)
    told = flags.command_flags(_rows(backend, version), params)
    if backend == "trtllm" or not facts["known"]:
        return told
    needs = model_flags(backend, request["model"], role, facts["grace"])
    if request["is_moe"] and backend == "sglang" and "sglang" in facts["moe_backend"]:
        needs = needs | {"moe-runner-backend": facts["moe_backend"]["sglang"]}
    return told | {name: value for name, value in needs.items() if name not in told}


def plan_of(request: Mapping[str, Any]) -> Plan:
    """The plan that the reference's rules and faults lead to."""
    overrides, backend = request.get("overrides") or {}, request["backend"]
    service, k8s, dyn = (overrides.get(f"{name}Config") or {} for name in ("Service", "K8s", "Dyn"))
    release, version = version_of(request)
    system, counts, prefix = (
        system_facts(request["system"], reference=True),
        worker_counts(request),
        request.get("prefix") or 0,
    )
    transport = transport_facts(k8s.get("transport") or "nvlink") if system["known"] else {}
    env = {**transport.get("env", {}), **transport.get("reference", {}), **system["env"]}
    extra_env = {item["name"]: str(item["value"]) for item in k8s.get("extra_env") or ()}
    kvbm = dyn.get("kvbm_config") or {}
    per_node = request["gpus_per_node"]
    workers = []
    for role, params in role_params(request).items():
        engine_params = {k: v for k, v in params.items() if request["is_moe"] or not k.startswith("moe_")}
        if request["is_moe"] and backend == "trtllm":
            engine_params.setdefault("moe_backend", system["moe_backend"].get("trtllm", "CUTLASS"))
        if _msa(request, version):
            engine_params.setdefault("sparse_implementation", "msa")
        given = ((overrides.get("Workers") or {}).get(role) or {}).get("extra_engine_args") or {}
        cached = {f"DYN_KVBM_{name.upper()}": str(value) for name, value in kvbm.items()} if role != "decode" else {}
        gpus = params["gpus_per_worker"]
        engine = merge(engine_of(backend, version, engine_params), given) if backend == "trtllm" else {}
        workers.append(
            Worker(
                role=role,
                count=counts[role],
                gpus=gpus,
                nodes=max(math.ceil(gpus / per_node), 1),
                gpu_limit=gpus,
                flags=worker_flags(request, role, params, version)
                | (_dotted(engine) if request["target"] == "dynamo-python" else {}),
                engine=engine or None,
                env=_etcd(k8s) | _hf_home(k8s) | cached | env | extra_env,
                shared_memory=system.get(
                    "decode_shared_memory" if role == "decode" else "", system.get("shared_memory")
                ),
                parallel=tuple(params[f"{name}_parallel_size"] for name in ("tensor", "pipeline", "data")),
            )
        )
    asked, placement = (
        bool(dyn.get("enable_router")),
        {k: v for k, v in (("nodeSelector", system["selector"]), ("tolerations", system["tolerations"])) if v},
    )
    router = asked or prefix > 0
    mode, image = request["serving_mode"], k8s.get("k8s_image") or f"{backend_facts(backend)['runtime']}:{release}"
    return Plan(
        backend=backend,
        version=version,
        mode=mode,
        model=service.get("model_path") or request["model"],
        served_name=service.get("served_model_name") or request["model"],
        name=f"{k8s.get('name_prefix') or 'dynamo'}-{mode}{'-router' if asked else ''}",
        namespace=k8s.get("k8s_namespace"),
        image=image,
        workers=tuple(workers),
        port=service.get("port") or 8000,
        gpus_per_node=per_node,
        kv_router=router,
        frontend_replicas=int(service.get("include_frontend", True)),
        frontend_args=_router_args(dyn),
        frontend_env=_etcd(k8s) | ({"DYN_ROUTER_MODE": _router_mode(dyn)} if router else {}) | _hf_home(k8s),
        frontend_placement=placement,
        placement=placement,
        pull_secret=k8s.get("k8s_image_pull_secret"),
        pvc=_pvc(k8s),
        transport={
            k: v for k, v in transport.items() if k not in ("resource", "capabilities") or transport.get("privileged")
        },
        compute_domain=any(worker.nodes > 1 for worker in workers),
        engine_configmap=k8s.get("k8s_engine_mode") == "configmap",
        role_flag_names=backend == "vllm" and version_key(release) < version_key("1.0.0"),
        planner=(k8s.get("k8s_planner_image") or _planner_image(image), dyn["planner_config"])
        if dyn.get("planner_config")
        else None,
        kvbm=bool(kvbm),
        worker_pod=k8s.get("worker_extra_pod_spec") or {},
        frontend_pod=k8s.get("frontend_extra_pod_spec") or {},
    )


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


def _msa(request: Mapping[str, Any], version: str) -> bool:
    return (
        str(request.get("architecture", "")).startswith("MiniMaxM3")
        and request["backend"] == "trtllm"
        and request["system"] in ("b200_sxm", "gb200", "b300_sxm", "gb300")
        and (request.get("overrides") or {}).get("rule", request.get("rule")) == "production"
    )


def _etcd(k8s: Mapping[str, Any]) -> dict[str, str]:
    return {"ETCD_ENDPOINTS": str(k8s["k8s_etcd_endpoints"])} if k8s.get("k8s_etcd_endpoints") else {}


def _pvc(k8s: Mapping[str, Any]) -> tuple[str, str] | None:
    claim = k8s.get("k8s_pvc_name") or k8s.get("k8s_model_cache")
    return (claim, k8s.get("k8s_pvc_mount_path") or "/workspace/model_cache") if claim else None


def _hf_home(k8s: Mapping[str, Any]) -> dict[str, str]:
    pvc, inner = _pvc(k8s), k8s.get("k8s_model_path_in_pvc") or k8s.get("k8s_pvc_model_path")
    home = k8s.get("k8s_hf_home") or (f"{pvc[1]}/{inner}" if pvc and inner else pvc[1] if pvc else None)
    return {"HF_HOME": home} if home else {}


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
    name, separator, tag = image.rpartition(":")
    folder, slash, leaf = (name or tag).rpartition("/")
    leaf = "dynamo-planner" if leaf.endswith("-runtime") else leaf
    return f"{folder}{slash}{leaf}{separator if name else ''}{tag if name else ''}"


def _sflow(plan: Plan) -> str:
    tasks = [
        {"name": f"{w.role}_server", "replicas": w.count, "gpus": w.gpus, "script": dynamo.worker_words(plan, w)}
        for w in plan.workers
    ]
    variables = {"SLURM_ACCOUNT": "YOUR_ACCOUNT", "SLURM_PARTITION": "YOUR_PARTITION", "IMAGE": plan.image}
    return yaml_text({"version": "0.1", "variables": variables, "workflow": {"name": plan.name, "tasks": tasks}})
