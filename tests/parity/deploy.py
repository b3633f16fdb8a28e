"""Deployment files of profile `reference`, read back into the goldens' normal form (specification 08 section 13)."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from perfcast_deploy import reference
from perfcast_deploy.describe import describe

from tests.parity import check

ROLES = {"": "agg", "prefill": "prefill", "decode": "decode"}


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    if case["kind"] == "input":
        return _front_door(case["what"])
    request = reference.Request({key: value for key, value in case.items() if key != "expect"})
    files = reference.render(request.case)
    answer: dict[str, Any] = {"files": sorted(files), "template_version": request.version}
    if case["target"] == "fpm":
        return answer | {"fpm": _fpm(files)}
    plan = reference.plan_of(request)
    answer["worker_args"] = {worker.role: _sorted_sizes(dict(worker.flags)) for worker in plan.workers}
    answer["runs"] = [_run(files[f"run_{i}.sh"]) for i in range(sum(name.startswith("run_") for name in files))]
    if "k8s_deploy.yaml" in files:
        answer["dynamo"] = _dynamo(list(yaml.safe_load_all(files["k8s_deploy.yaml"])))
    if "bench_run.sh" in files:
        answer["bench"] = _bench(files)
    if "llm-d-values.yaml" in files:
        answer["helm"] = _helm(yaml.safe_load(files["llm-d-values.yaml"]))
    if "kustomization.yaml" in files:
        answer["kustomize"] = _kustomize(files)
    return answer


def differences(expected: Any, actual: Any) -> Iterator[tuple[str, float]]:
    """Both ways: nothing of the reference is missing, and nothing of ours is new."""
    yield from check.differences(expected, actual)
    yield from (pair for pair in check.differences(actual, expected) if "missing" in pair[0] and pair[1] == math.inf)


def _front_door(what: str) -> dict[str, Any]:
    service = {"model_path": "m", "served_model_name": "m"}
    if what == "help section":
        return {"help": describe("nosuch")}
    sources: dict[str, Any] = {
        "no model": {"ServiceConfig": {"served_model_name": "m"}},
        "no served name": {"ServiceConfig": {"model_path": "m"}},
        "nothing": None,
        "no file": Path("/nonexistent/generator.yaml"),
    }
    return reference.load(sources.get(what, {"ServiceConfig": service}))


def _value(text: str) -> Any:
    for read in (int, float, json.loads):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def words_to_flags(words: list[str]) -> dict[str, Any]:
    """``--name [value ...]`` words as a map: bare flags true, several integers a sorted set."""
    flags: dict[str, Any] = {}
    name = "<positional>"
    for word in words:
        if word.startswith("--"):
            name, _, inline = word[2:].partition("=")
            flags[name] = [inline] if inline else []
        else:
            flags.setdefault(name, []).append(word)
    result: dict[str, Any] = {}
    for name, values in flags.items():
        typed = [_value(value) for value in values]
        result[name] = (
            values if name == "<positional>" else True if not typed else typed[0] if len(typed) == 1 else typed
        )
    return _sorted_sizes(result)


def _sorted_sizes(flags: dict[str, Any]) -> dict[str, Any]:
    for name in ("cuda-graph-bs", "cudagraph-capture-sizes"):
        if name in flags:
            sizes = flags[name] if isinstance(flags[name], list) else [flags[name]]
            flags[name] = sorted(set(sizes))
    return flags


def _argv(container: Mapping[str, Any]) -> tuple[str | None, list[str], str | None]:
    """(module, words after it, inline engine file) of a container, whether or not a shell stands between."""
    words, engine = [*container.get("command", ()), *container.get("args", ())], None
    if words[:2] == ["/bin/bash", "-c"]:
        script = words[2]
        if "<<'ENGINE'" in script:
            engine = script.split("<<'ENGINE'\n", 1)[1].split("\nENGINE\n", 1)[0]
        words = shlex.split(next(line for line in script.splitlines() if line.startswith("exec ")))[1:]
    module = words[words.index("-m") + 1] if "-m" in words else None
    return module, words[words.index("-m") + 2 :] if module else words, engine


def _dynamo(documents: list[dict[str, Any]]) -> dict[str, Any]:
    graph = next(d for d in documents if d["kind"] == "DynamoGraphDeployment")
    engines: dict[str, str] = next((d["data"] for d in documents if d["kind"] == "ConfigMap"), {})
    services = graph["spec"]["services"]
    answer: dict[str, Any] = {
        "api": graph["apiVersion"],
        "kinds": [d["kind"] for d in documents],
        "name": graph["metadata"]["name"],
        "namespace": graph["metadata"].get("namespace"),
        "roles": {},
    }
    for name, service in services.items():
        if service["componentType"] == "worker":
            role = ROLES[service.get("subComponentType", "")]
            answer["roles"][role] = _service(name, service, engines.get(f"{role}_config.yaml"))
        else:
            answer[service["componentType"]] = _service(name, service, None)
    return answer


def _service(name: str, service: dict[str, Any], mounted: str | None) -> dict[str, Any]:
    pod = service["extraPodSpec"]
    container = pod["mainContainer"]
    module, words, inline = _argv(container)
    env = {e["name"]: e["value"] for e in [*service.get("envs", ()), *container.get("env", ())]}
    claims = {
        v["name"]: v["persistentVolumeClaim"]["claimName"]
        for v in pod.get("volumes", ())
        if "persistentVolumeClaim" in v
    }
    mounts = {m["name"]: m["mountPath"] for m in container.get("volumeMounts", ())}
    limits = service.get("resources", {}).get("limits", {})
    engine = yaml.safe_load(inline or mounted or "")
    answer: dict[str, Any] = {
        "service": name,
        "module": module,
        "flags": words_to_flags(words),
        "replicas": service["replicas"],
        "nodes": service.get("multinode", {}).get("nodeCount", 1),
        "image": container["image"],
        "env": env,
        "secret": service["envFromSecret"],
    }
    optional = {
        "gpus": int(limits["gpu"]) if limits else None,
        "engine_config": engine,
        "engine_from": "configmap" if mounted else None,
        "shared_memory": service.get("sharedMemory", {}).get("size"),
        "node_selector": pod.get("nodeSelector"),
        "tolerations": pod.get("tolerations"),
        "pvc": {claim: mounts[volume] for volume, claim in claims.items()},
        "pull_secrets": pod.get("imagePullSecrets"),
        "custom_resources": limits.get("custom"),
        "host_ipc": pod.get("hostIPC"),
        "privileged": container.get("securityContext", {}).get("privileged"),
        "resource_claims": pod.get("resourceClaims"),
        "probes": {
            key: [
                p["httpGet"]["path"],
                p["httpGet"]["port"],
                p["initialDelaySeconds"],
                p["periodSeconds"],
                p["timeoutSeconds"],
                p["failureThreshold"],
            ]
            for key, p in container.items()
            if key.endswith("Probe")
        },
    }
    return answer | {key: value for key, value in optional.items() if value}


def shell_commands(script: str) -> list[list[str]]:
    """The commands of a generated script as words, continuation lines joined."""
    return [shlex.split(line, comments=True) for line in script.replace("\\\n", " ").splitlines()]


def _run(script: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"frontend": False}
    for words in shell_commands(script):
        if "dynamo.frontend" in words:
            answer["frontend"] = True
        log = next((word for word in words if word.startswith("logs/")), "")
        role = log.removeprefix("logs/").partition("_")[0]
        if role in ROLES.values():
            gpus = next(word for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")).partition("=")[2].split(",")
            count, _, first = answer.get(role, [0, 0, int(gpus[0])])
            answer[role] = [count + 1, len(gpus), first]
    return answer


def _bench(files: dict[str, str]) -> dict[str, Any]:
    runs = [words_to_flags(words[2:]) for words in shell_commands(files["bench_run.sh"]) if words[:1] == ["aiperf"]]
    job = yaml.safe_load(files["k8s_bench.yaml"])
    container = job["spec"]["template"]["spec"]["containers"][0]
    inside = [words_to_flags(w[2:]) for w in shell_commands(container["args"][0]) if w[:1] == ["aiperf"]]
    images = runs[0].get("image-batch-size")
    return {
        "concurrency": [run["concurrency"] for run in runs],
        "isl": runs[0]["isl"],
        "osl": runs[0]["osl"],
        "prefix": runs[0].get("prefix-prompt-length", 0),
        "model": runs[0]["model"],
        "tokenizer": runs[0]["tokenizer"],
        "endpoint": runs[0]["url"],
        "rounds": runs[-1]["num-requests"] // runs[-1]["concurrency"],
        "image_count": None if images is None else str(images),
        "job": {
            "name": job["metadata"]["name"],
            "namespace": job["metadata"]["namespace"],
            "image": container["image"],
            "endpoint": inside[0]["url"],
        },
    }


def _helm(values: dict[str, Any]) -> dict[str, Any]:
    proxy, artifacts = values["routing"]["proxy"], values["modelArtifacts"]
    roles: dict[str, Any] = {}
    for role in ("decode", "prefill"):
        entry = values[role]
        if not entry["create"]:
            roles[role] = {"create": False, "replicas": entry["replicas"]}
            continue
        container = entry["containers"][0]
        roles[role] = {
            "create": True,
            "replicas": entry["replicas"],
            "tensor": entry["parallelism"]["tensor"],
            "data": entry["parallelism"]["data"],
            "flags": words_to_flags(container["args"]),
            "gpus": container["resources"]["limits"]["nvidia.com/gpu"],
            "image": container["image"],
            "model_command": container["modelCommand"],
            "port": container["ports"][0]["containerPort"],
            "monitoring": "monitoring" in entry,
        }
    return {
        "accelerator": values["accelerator"]["type"],
        "auth_secret": artifacts["authSecretName"],
        "cache_size": artifacts["size"],
        "model": artifacts["uri"],
        "mount": artifacts["mountPath"],
        "multinode": values["multinode"],
        "proxy": {key: proxy[key] for key in ("connector", "enabled", "image", "targetPort")},
        "roles": roles,
        "service_port": values["routing"]["servicePort"],
    }


def _kustomize(files: dict[str, str]) -> dict[str, Any]:
    top = yaml.safe_load(files["kustomization.yaml"])
    names = [patch["path"] for patch in top["patches"]]
    roles = {}
    for name in names:
        patch = yaml.safe_load(files[name])
        container = patch["spec"]["template"]["spec"]["containers"][0]
        roles[name] = {
            "name": patch["metadata"]["name"],
            "replicas": patch["spec"]["replicas"],
            "command": container["command"],
            "flags": words_to_flags(container["args"]),
            "image": container["image"],
        }
        if "resources" in container:
            roles[name]["gpus"] = int(container["resources"]["limits"]["nvidia.com/gpu"])
    return {"base": top["resources"], "name_prefix": top.get("namePrefix"), "patches": names, "roles": roles}


def _fpm(files: dict[str, str]) -> dict[str, Any]:
    documents = list(yaml.safe_load_all(files["k8s_deploy.yaml"]))
    main = documents[-1]
    pod, size = main["spec"], None
    if main["kind"] == "LeaderWorkerSet":
        group = main["spec"]["leaderWorkerTemplate"]
        pod, size = group["workerTemplate"]["spec"], group["size"]
    elif main["kind"] == "PodCliqueSet":
        clique = main["spec"]["template"]["cliques"][0]["spec"]
        pod, size = clique["podSpec"], clique["replicas"]
    container = pod["containers"][0]
    line = next(line for line in files["run.sh"].splitlines() if line.startswith("engine=(") and "-m" in line)
    words = shlex.split(line.removeprefix("engine=(").removesuffix(")"))
    exports = [
        line.split()[1]
        for line in files["fpm_env.sh"].splitlines()
        if line.startswith("export FPM_") and "$" not in line
    ]
    answer = {
        "kinds": [d["kind"] for d in documents],
        "name": main["metadata"]["name"],
        "labels": main["metadata"]["labels"],
        "image": container["image"],
        "command": [*container["command"], *container["args"]],
        "resources": container["resources"],
        "module": words[words.index("-m") + 1],
        "flags": words_to_flags(words[words.index("-m") + 2 :]),
        "env_exports": dict(export.split("=", 1) for export in exports),
    }
    return answer | ({"size": size} if size else {})
