"""The reference's files: what the shared targets write for its plan, and what only it has. Specification 08, 7."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfcast_engine.errors import InvalidField, UnsupportedCombination

from perfcast_deploy import dynamo, fpm, llmd
from perfcast_deploy.catalog import backend_facts
from perfcast_deploy.commands import Command, run_script
from perfcast_deploy.emit import render as render_template
from perfcast_deploy.emit import yaml_text
from perfcast_deploy.flags import argv, read_argv
from perfcast_deploy.plan import NIXL, Plan, Worker, place
from perfcast_deploy.reference.plan import plan_of
from perfcast_deploy.reference.request import Request

GRID = {1, 2, 8, 16, 32, 64, 128}


def render(case: Mapping[str, Any]) -> dict[str, str]:
    """Files of a request (the fields of the goldens' render cases); refusals are typed and name the field."""
    request = Request(case)
    plan, target, options = plan_of(request), request["target"], request.section("Llmd")
    if target == "fpm":
        return _collection(request, plan)
    files = _scripts(plan) | {"sflow.yaml": _sflow(plan)}
    if plan.backend == "trtllm":
        files |= {f"{worker.role}_config.yaml": yaml_text(worker.engine) for worker in plan.workers}
    if target == "llm-d-helm":
        return files | ({} if plan.backend == "trtllm" else _helm(plan, options))
    if target == "llm-d-kustomize":
        return files | (_kustomize(plan, options) if plan.backend == "vllm" else {})
    # dynamo-python needs the dynamo package to write a manifest
    return files | _benchmark(request, plan) | (dynamo.files(plan) if target == "dynamo-j2" else {})


def _scripts(plan: Plan) -> dict[str, str]:
    """The node plan: Dynamo workers by node, a frontend on the first node (vLLM: on every node)."""
    written = {}
    module = ["python3", "-m", backend_facts(plan.backend)["module"]]
    for number, node in enumerate(place(plan, spread=False)):
        commands = []
        if number == 0 or plan.backend == "vllm":
            words = ["python3", "-m", "dynamo.frontend", "--http-port", str(plan.port), *plan.frontend_args]
            commands.append(Command(words, "frontend"))
        for placed in node:
            gpus = range(placed.first_gpu, placed.first_gpu + placed.worker.gpus)
            env = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} | dict(placed.worker.env)
            words = module + dynamo.worker_words(plan, placed.worker)
            commands.append(Command(words, f"{placed.worker.role}_{placed.index}", env))
        written[f"run_{number}.sh"] = run_script(plan, "0.0.0.0", commands)
    return written


def _sflow(plan: Plan) -> str:
    tasks = []
    for worker in plan.workers:
        task = {"name": f"{worker.role}_server", "replicas": worker.count, "gpus": worker.gpus}
        tasks.append(task | {"script": dynamo.worker_words(plan, worker)})
    variables = {"SLURM_ACCOUNT": "YOUR_ACCOUNT", "SLURM_PARTITION": "YOUR_PARTITION", "IMAGE": plan.image}
    return yaml_text({"version": "0.1", "variables": variables, "workflow": {"name": plan.name, "tasks": tasks}})


def _helm(plan: Plan, options: Mapping[str, Any]) -> dict[str, str]:
    """Values that leave the KV connector and the roles' flags to the chart."""
    facts, roles = backend_facts(plan.backend), {}
    image = options.get(f"{plan.backend}_image", f"{facts['image'].partition(':')[0]}:latest")
    for worker in plan.workers:
        flags = {facts["model_flag"]: plan.model, "served-model-name": plan.served_name} | dict(worker.flags)
        container = {"name": plan.backend, "image": image, "modelCommand": f"{plan.backend}Serve", "args": argv(flags)}
        container["resources"] = {"limits": {"nvidia.com/gpu": worker.gpus}}
        port = 8000 if worker.role == "prefill" else llmd.SIDECAR_PORT
        roles[llmd.role_name(worker.role)] = llmd.helm_role(worker, 1, container, port)
    enabled, sidecar = options.get("routing_proxy_enabled", True), options.get("routing_proxy_image", llmd.SIDECAR)
    proxy = {"enabled": enabled, "image": sidecar, "connector": "nixlv2"}
    secret, size = options.get("hf_token_secret"), options.get("model_cache_size", "100Gi")
    values = llmd.values(plan, roles, plan.model, secret, proxy, size)
    if options.get("monitoring_enabled"):  # beside the roles, where no chart looks
        values["monitoring"] = {"podmonitor": {"enabled": True, "portName": "metrics"}}
    return {"llm-d-values.yaml": yaml_text(values)}


def _kustomize(plan: Plan, options: Mapping[str, Any]) -> dict[str, str]:
    """Patches that forget data parallelism and give aggregated workers a KV connector too."""
    xpu = options.get("accelerator_type") in ("xpu", "intel")
    xpu = xpu or "gpu.intel.com/family" in plan.placement.get("nodeSelector", {})
    rdma = "-rdma" if options.get("rdma_enabled") else ""
    base = f"{llmd.GUIDES[plan.mode]}/modelserver/" + (f"xpu/vllm{rdma}" if xpu else "gpu/vllm/base")
    connector = NIXL | ({"kv_buffer_device": "cpu"} if xpu else {})
    container = {"image": options.get("vllm_image", "vllm/vllm-openai:latest")}
    patches: dict[str, str] = {}
    for worker in plan.workers:
        flags = dict(worker.flags) | {"kv-transfer-config": connector}
        limits = None if xpu else {"nvidia.com/gpu": str(worker.parallel[0] * worker.parallel[1])}
        patches |= llmd.patch(plan, worker, flags, container, limits, {})
    return llmd.overlay(
        [options.get("kustomize_base_path") or base], options.get("kustomize_name_prefix") or None, None, patches
    )


def concurrencies(estimated: int) -> list[int]:
    """The grid around the estimate."""
    near = {int(0.95 * estimated), estimated, int(1.05 * estimated)} if estimated > 0 else set()
    return sorted(value for value in GRID | near if value >= 1)


def _benchmark(request: Request, plan: Plan) -> dict[str, str]:
    """bench_run.sh and k8s_bench.yaml, the job's faulty address included."""
    local = f"http://{request.section('Service').get('head_node_ip', '0.0.0.0')}:{plan.port}"
    inside = f"http://dynamo-{plan.mode}-frontend.{plan.namespace}.svc.cluster.local:8000"
    grid, setup = concurrencies(request.concurrency), [["pip", "install", "aiperf"]]
    outside = [_aiperf(request, plan, local, count, 20) for count in grid]
    script = render_template("bench.sh.j2", commands=[_aiperf(request, plan, inside, n, 50) for n in grid], setup=setup)
    container = {"name": "aiperf", "image": request.section("Bench").get("image", "python:3.12-slim")}
    container |= {"command": ["/bin/bash", "-c"], "args": [script]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"dynamo-{plan.mode}-benchmark", "namespace": str(plan.namespace)},
        "spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}},
    }
    return {
        "bench_run.sh": render_template("bench.sh.j2", commands=outside, setup=[]),
        "k8s_bench.yaml": yaml_text(job),
    }


def _aiperf(request: Request, plan: Plan, url: str, count: int, rounds: int) -> list[str]:
    given = request.section("Bench")
    flags: dict[str, Any] = {
        "artifact-dir": f"bench_artifacts/concurrency_{count}",
        "model": plan.served_name,
        "endpoint-type": given.get("endpoint_type", "chat"),
        "url": url,
        "tokenizer": plan.model,
        "isl": request["isl"],
        "isl-stddev": given.get("isl_stddev", 0),
        "osl": request["osl"],
        "osl-stddev": given.get("osl_stddev", 0),
        "extra-inputs": "ignore_eos:true",
        "concurrency": count,
        "num-requests": rounds * count,
        "warmup-request-count": 2 * count,
        "random-seed": 100,
        "ui": given.get("ui", "simple"),
        "streaming": True,
    }
    if request.get("prefix"):
        flags["prefix-prompt-length"] = request["prefix"]
        flags["num-prefix-prompts"] = given.get("prefix_prompt_pool_size", 1)
    if request.get("image_height") and request.get("image_width"):
        flags["image-batch-size"] = request.get("num_images", 1)
        flags |= {"image-height-mean": request["image_height"], "image-width-mean": request["image_width"]}
    return ["aiperf", "profile", *argv(flags)]


def _collection(request: Request, plan: Plan) -> dict[str, str]:
    """FPM collection, after the reference's checks."""
    k8s, dyn, worker = request.section("K8s"), request.section("Dyn"), plan.workers[0]
    fpm.refuse(plan)
    if plan.mode != "agg":
        raise UnsupportedCombination("serving_mode", "FPM collection is aggregated")
    if dyn.get("enable_router") or dyn.get("planner_config") or worker.count != 1:
        raise UnsupportedCombination("DynConfig", "FPM collection runs one worker without router and planner")
    if any("valueFrom" in item for item in k8s.get("extra_env") or ()):
        raise InvalidField("K8sConfig.extra_env", "valueFrom cannot be exported to a script", "env")
    extra = _checked(worker, request.worker_overrides("agg").get("extra_cli_args"))
    return fpm.role_files(plan, worker, extra, k8s.get("fpm_orchestrator") or "lws")


def _checked(worker: Worker, extra: Any) -> list[str]:
    field = "Workers.agg.extra_cli_args"
    if not isinstance(extra, list) or not all(isinstance(word, str) for word in extra):
        raise InvalidField(field, "must be a list of words", "type")
    given = {word.lstrip("-").partition("=")[0].replace("_", "-") for word in extra if word.startswith("--")}
    owned = sorted(given & set(fpm.OWNED))
    if owned:
        raise InvalidField(field, f"--{owned[0]} is set by the collection script; leave it out", "owned")
    flags = read_argv("vllm", extra)[0]
    if flags.get("benchmark-mode") not in fpm.MODES:
        raise InvalidField(field, f"needs --benchmark-mode, one of {', '.join(fpm.MODES)}", "mode")
    sizes = [
        int((dict(worker.flags) | flags).get(f"{name}-parallel-size", 1)) for name in ("tensor", "pipeline", "data")
    ]
    if sizes[0] * sizes[1] * sizes[2] != worker.gpus:
        raise InvalidField(field, f"parallel sizes {sizes} do not fill the worker's {worker.gpus} GPUs", "topology")
    return extra
