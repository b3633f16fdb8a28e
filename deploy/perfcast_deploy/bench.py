"""A benchmark at exactly the predicted point, run by the engine's own client. Specification 08 sections 7.3, 11.6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from perfcast_deploy import pods
from perfcast_deploy.deployment import Deployment
from perfcast_deploy.emit import manifest_text, render
from perfcast_deploy.flags import argv
from perfcast_deploy.plan import Plan

ROUNDS = 20
RESULT = "result.json"
Flags = dict[str, Any]


def _vllm(d: Deployment) -> Flags:
    return {
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


def _trtllm(d: Deployment) -> Flags:
    # without random-ids the client samples a dataset that it would have to download
    return _vllm(d) | {"random-ids": True}


def _sglang(d: Deployment) -> Flags:
    own: Flags = {"backend": "sglang-oai", "output-file": RESULT}
    if d.workload.prefix:  # one shared prefix for all prompts
        return own | {
            "dataset-name": "generated-shared-prefix",
            "gsp-num-groups": 1,
            "gsp-prompts-per-group": d.concurrency * ROUNDS,
            "gsp-system-prompt-len": d.workload.prefix,
            "gsp-question-len": d.workload.isl - d.workload.prefix,
            "gsp-output-len": d.workload.osl,
        }
    lengths = {"random-input-len": d.workload.isl, "random-output-len": d.workload.osl}
    # the client draws lengths from ratio * length up to length: 1 keeps them exact
    return own | {"dataset-name": "random-ids", **lengths, "random-range-ratio": 1.0}


CLIENTS: Mapping[str, tuple[list[str], Callable[[Deployment], Flags]]] = {
    "vllm": (["vllm", "bench", "serve"], _vllm),
    "sglang": (["python3", "-m", "sglang.bench_serving"], _sglang),
    "trtllm": (["python3", "-m", "tensorrt_llm.serve.scripts.benchmark_serving"], _trtllm),
}


def client_command(d: Deployment, url: str) -> list[str]:
    """The benchmark client's command line against the service at ``url``."""
    command, own = CLIENTS[d.backend]
    flags = {
        "base-url": url,
        "model": d.served_name,
        "tokenizer": d.model,
        "max-concurrency": d.concurrency,
        "num-prompts": d.concurrency * ROUNDS,
        "seed": 100,
    } | own(d)
    return command + argv({name: value for name, value in flags.items() if value is not None})


def job(d: Deployment, plan: Plan, url: str) -> str:
    """A Kubernetes Job that runs the client in the engine's image (nothing is installed at start)."""
    volumes, mounts = pods.mounted(plan, ("results", {"emptyDir": {}}, "/results"))
    container: dict[str, Any] = {
        "name": "client",
        "image": plan.image,
        "command": client_command(d, url),
        "workingDir": "/results",
    }
    container |= {"env": pods.environment(plan, {}), "volumeMounts": mounts}
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    pod["imagePullSecrets"] = pods.pull_secrets(plan)
    spec = {"backoffLimit": 0, "template": {"spec": pod}}
    return manifest_text(pods.document("batch/v1", "Job", f"{plan.name}-benchmark", plan.namespace, spec=spec))


def script(d: Deployment, url: str) -> str:
    """A shell script that runs the client once."""
    return render("bench.sh.j2", commands=[client_command(d, url)], setup=[])
