"""Plain engine commands with one run script per node, and the front that joins the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfcast_engine.errors import UnsupportedCombination

from perfcast_deploy.catalog import backend_facts, version_key
from perfcast_deploy.deployment import Deployment
from perfcast_deploy.emit import render, yaml_text
from perfcast_deploy.flags import argv
from perfcast_deploy.plan import NIXL, Placed, Plan, place

# first port of each range; a worker takes one port of its range, or a block where it needs several
PORTS = {"engine": 8100, "bootstrap": 9100, "nixl": 10000, "rendezvous": 12000, "rpc": 14000, "events": 20000}
NIXL_BLOCK = 64
MULTI_NODE_VLLM = "0.12.0"


@dataclass(frozen=True)
class Command:
    """One process: environment assignments and words; ``log`` names its log file."""

    words: Sequence[str]
    log: str
    env: Mapping[str, str] = field(default_factory=dict)


def files(d: Deployment, plan: Plan) -> dict[str, str]:
    """run_<node>.sh per node, the front's files, and the engine files of TRT-LLM."""
    nodes = place(plan)
    hosts = hosts_of(d, len(nodes))
    numbers = {id(placed): number for number, placed in enumerate(p for node in nodes for p in node if p.rank == 0)}
    leaders: dict[tuple[str, int], tuple[str, int]] = {}
    for host, node in zip(hosts, nodes, strict=True):
        for placed in node:
            if placed.rank == 0:
                leaders[placed.worker.role, placed.index] = (host, numbers[id(placed)])
    front, written = _front(d, plan, leaders)
    for number, (host, node) in enumerate(zip(hosts, nodes, strict=True)):
        commands = []
        for placed in node:
            leader, worker_number = leaders[placed.worker.role, placed.index]
            peers = hosts[number : number + placed.worker.nodes]
            commands += _command(d, plan, placed, leader, worker_number, peers, host)
        commands += [front] if front and number == 0 else []
        written[f"run_{number}.sh"] = run_script(plan, host, commands)
    if plan.backend == "trtllm":
        written |= {f"{worker.role}_config.yaml": yaml_text(worker.engine) for worker in plan.workers}
    return written


def run_script(plan: Plan, host: str, commands: Sequence[Command]) -> str:
    """The script that starts the processes of one node."""
    about = {"host": host, "backend": plan.backend, "version": plan.version, "gpus_per_node": plan.gpus_per_node}
    return render("run.sh.j2", commands=commands, **about)


def hosts_of(d: Deployment, count: int) -> tuple[str, ...]:
    """Addresses of the nodes: given ones, the loopback for one node, else names that must resolve."""
    if d.cluster.hosts and len(d.cluster.hosts) != count:
        raise UnsupportedCombination(
            "cluster.hosts", f"names {len(d.cluster.hosts)} nodes, the deployment needs {count}"
        )
    return d.cluster.hosts or (("127.0.0.1",) if count == 1 else tuple(f"node-{i}" for i in range(count)))


def service_url(d: Deployment, plan: Plan) -> str:
    return f"http://{hosts_of(d, len(place(plan)))[0]}:{plan.port}"


def _port(kind: str, number: int, block: int = 1) -> int:
    return PORTS[kind] + number * block


def _engine_port(plan: Plan, number: int) -> int:
    """A single aggregated worker serves the public port itself."""
    alone = plan.mode == "agg" and plan.workers[0].count == 1
    return plan.port if alone else _port("engine", number)


def _command(
    d: Deployment, plan: Plan, placed: Placed, leader: str, number: int, peers: Sequence[str], host: str
) -> list[Command]:
    worker = placed.worker
    share = worker.gpus // worker.nodes
    gpus = ",".join(str(gpu) for gpu in range(placed.first_gpu, placed.first_gpu + share))
    env = {"CUDA_VISIBLE_DEVICES": gpus} | dict(worker.env)
    serve = {"host": "0.0.0.0", "port": _engine_port(plan, number)}
    log = f"{worker.role}_{placed.index}" + (f"_rank{placed.rank}" if worker.nodes > 1 else "")
    flags = dict(worker.flags)
    if plan.backend == "trtllm":
        if placed.rank:
            return []
        words = ["trtllm-serve", plan.model, "--backend", "pytorch", *argv(serve)]
        words += ["--extra_llm_api_options", f"{worker.role}_config.yaml"]
        if worker.nodes > 1:  # the leader starts the ranks of all its nodes
            slots = ",".join(f"{peer}:{share}" for peer in peers)
            words = ["mpirun", "-n", str(worker.gpus), "-H", slots, "trtllm-llmapi-launch", *words]
        return [Command(words, log, env)]
    if plan.backend == "sglang":
        flags = {"model-path": plan.model, "served-model-name": plan.served_name} | serve | flags
        if worker.role != "agg":
            flags["disaggregation-mode"] = worker.role
            flags["disaggregation-bootstrap-port"] = _port("bootstrap", number)
        if worker.nodes > 1:
            flags |= {"nnodes": worker.nodes, "node-rank": placed.rank}
            flags["dist-init-addr"] = f"{leader}:{_port('rendezvous', number)}"
        return [Command(["python3", "-m", "sglang.launch_server", *argv(flags)], log, env)]
    flags = {"served-model-name": plan.served_name} | serve | flags
    if worker.role != "agg":
        flags["kv-transfer-config"] = NIXL
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_port("nixl", number, NIXL_BLOCK)),
        }
    if plan.kv_router:
        port = _port("events", number, NIXL_BLOCK)
        flags["kv-events-config"] = backend_facts("vllm")["kv_events"] | {"endpoint": f"tcp://*:{port}"}
    if worker.nodes > 1:
        flags |= _vllm_ranks(plan, placed, leader, number)
    return [Command(["vllm", "serve", plan.model, *argv(flags)], log, env)]


def _vllm_ranks(plan: Plan, placed: Placed, leader: str, number: int) -> dict[str, Any]:
    """Data-parallel ranks are dealt to the nodes; without them tensor and pipeline ranks are."""
    nodes, data = placed.worker.nodes, placed.worker.parallel[2]
    if data == 1:
        if version_key(plan.version) < version_key(MULTI_NODE_VLLM):
            raise UnsupportedCombination(
                "version", f"vLLM spans nodes by itself from {MULTI_NODE_VLLM}; use target dynamo"
            )
        flags: dict[str, Any] = {"nnodes": nodes, "node-rank": placed.rank, "master-addr": leader}
        flags["master-port"] = _port("rendezvous", number)
    elif data % nodes:
        raise UnsupportedCombination("roles", f"vLLM deals whole data-parallel ranks to nodes: {data} over {nodes}")
    else:
        flags = {"data-parallel-size-local": data // nodes, "data-parallel-address": leader}
        flags["data-parallel-rpc-port"] = _port("rpc", number)
        flags |= {"data-parallel-start-rank": placed.rank * data // nodes} if placed.rank else {}
    return flags | ({"headless": True} if placed.rank else {})


def _front(
    d: Deployment, plan: Plan, leaders: Mapping[tuple[str, int], tuple[str, int]]
) -> tuple[Command | None, dict[str, str]]:
    """The process that joins several workers behind the public port, and its configuration files."""
    addresses: dict[str, list[tuple[str, int]]] = {worker.role: [] for worker in plan.workers}
    for (role, _), (host, number) in leaders.items():
        addresses[role].append((host, number))
    urls = {
        role: [f"{host}:{_engine_port(plan, number)}" for host, number in found] for role, found in addresses.items()
    }
    if plan.backend == "trtllm" and plan.kv_router:
        raise UnsupportedCombination("router", "the plain TRT-LLM front has no KV routing; use target dynamo")
    if plan.mode == "agg" and len(urls["agg"]) == 1:
        return None, {}
    if plan.backend == "trtllm" and plan.mode == "agg":
        conf = render("nginx.conf.j2", port=plan.port, servers=urls["agg"])
        return Command(["nginx", "-p", ".", "-c", "front.conf"], "front"), {"front.conf": conf}
    if plan.backend == "trtllm":
        groups = {"context_servers": "prefill", "generation_servers": "decode"}
        config: dict[str, Any] = {"hostname": "0.0.0.0", "port": plan.port, "backend": "pytorch"}
        config |= {key: {"num_instances": len(urls[role]), "urls": urls[role]} for key, role in groups.items()}
        return Command(["trtllm-serve", "disaggregated", "-c", "front.yaml"], "front"), {
            "front.yaml": yaml_text(config)
        }
    words = ["vllm-router"] if plan.backend == "vllm" else ["python3", "-m", "sglang_router.launch_router"]
    words += [
        "--host",
        "0.0.0.0",
        "--port",
        str(plan.port),
        "--policy",
        "cache_aware" if plan.kv_router else "round_robin",
    ]
    if plan.mode == "agg":
        return Command([*words, "--worker-urls", *(f"http://{url}" for url in urls["agg"])], "front"), {}
    words.append("--vllm-pd-disaggregation" if plan.backend == "vllm" else "--pd-disaggregation")
    for url, (_, number) in zip(urls["prefill"], addresses["prefill"], strict=True):
        words += ["--prefill", f"http://{url}"] + (
            [str(_port("bootstrap", number))] if plan.backend == "sglang" else []
        )
    for url in urls["decode"]:
        words += ["--decode", f"http://{url}"]
    return Command(words, "front"), {}
