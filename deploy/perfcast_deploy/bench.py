"""A benchmark at exactly the predicted point, run by the engine's own client. Specification 08 sections 7.3, 11.6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perfcast_deploy.deployment import Deployment
from perfcast_deploy.emit import env_list, render, yaml_text
from perfcast_deploy.flags import argv
from perfcast_deploy.plan import Plan

ROUNDS = 20
RESULT = "result.json"


def _vllm(d: Deployment) -> tuple[list[str], dict[str, Any]]:
    own = {
        "backend": "openai",
        "endpoint": "/v1/completions",
        "dataset-name": "random",
        "random-input-len": d.workload.isl - d.workload.prefix,
        "random-output-len": d.workload.osl,
        "random-prefix-len": d.workload.prefix or None,
        "ignore-eos": True,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "save-result": True,
        "result-filename": RESULT,
    }
    return ["vllm", "bench", "serve"], own


def _trtllm(d: Deployment) -> tuple[list[str], dict[str, Any]]:
    own = _vllm(d)[1]
    # without random-ids the client samples a dataset that it would have to download
    return ["python3", "-m", "tensorrt_llm.serve.scripts.benchmark_serving"], own | {"random-ids": True}


def _sglang(d: Deployment) -> tuple[list[str], dict[str, Any]]:
    own: dict[str, Any] = {"backend": "sglang-oai", "output-file": RESULT}
    if d.workload.prefix:  # one shared prefix for all prompts
        own |= {
            "dataset-name": "generated-shared-prefix",
            "gsp-num-groups": 1,
            "gsp-prompts-per-group": d.concurrency * ROUNDS,
            "gsp-system-prompt-len": d.workload.prefix,
            "gsp-question-len": d.workload.isl - d.workload.prefix,
            "gsp-output-len": d.workload.osl,
        }
    else:  # the client draws lengths from ratio * length up to length: 1 keeps them exact
        own |= {
            "dataset-name": "random-ids",
            "random-input-len": d.workload.isl,
            "random-output-len": d.workload.osl,
            "random-range-ratio": 1.0,
        }
    return ["python3", "-m", "sglang.bench_serving"], own


CLIENTS: Mapping[str, Callable[[Deployment], tuple[list[str], dict[str, Any]]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}


def client_command(d: Deployment, url: str) -> list[str]:
    """The benchmark client's command line against the service at ``url``."""
    command, own = CLIENTS[d.backend](d)
    shared = {
        "base-url": url,
        "model": d.served_name,
        "tokenizer": d.model,
        "max-concurrency": d.concurrency,
        "num-prompts": d.concurrency * ROUNDS,
        "seed": 100,
    }
    return command + argv({name: value for name, value in (shared | own).items() if value is not None})


def job(d: Deployment, plan: Plan, url: str) -> str:
    """A Kubernetes Job that runs the client in the engine's image (nothing is installed at start)."""
    metadata = {"name": f"{plan.name}-benchmark"} | ({"namespace": plan.namespace} if plan.namespace else {})
    container: dict[str, Any] = {
        "name": "client",
        "image": plan.image,
        "command": client_command(d, url),
        "workingDir": "/results",
    }
    container["volumeMounts"] = [{"name": "results", "mountPath": "/results"}]
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": [{"name": "results", "emptyDir": {}}],
    }
    if plan.pvc:
        pod["volumes"].append({"name": "model-cache", "persistentVolumeClaim": {"claimName": plan.pvc[0]}})
        container["volumeMounts"].append({"name": "model-cache", "mountPath": plan.pvc[1]})
        container["env"] = env_list({"HF_HOME": plan.pvc[1]})
    if plan.pull_secret:
        pod["imagePullSecrets"] = [{"name": plan.pull_secret}]
    spec = {"backoffLimit": 0, "template": {"spec": pod}}
    return yaml_text({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})


def script(d: Deployment, url: str) -> str:
    """A shell script that runs the client once."""
    return render("bench.sh.j2", commands=[client_command(d, url)], setup=[])
