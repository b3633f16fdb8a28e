"""Plain engine commands with one run script per node, and the front that joins the workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perfcast_engine.errors import UnsupportedCombination

from perfcast_deploy.catalog import version_key
from perfcast_deploy.deployment import Deployment
from perfcast_deploy.emit import render, yaml_text
from perfcast_deploy.flags import argv
from perfcast_deploy.plan import Placed, Plan, joint_flags, place

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
    led = [(placed, host) for host, node in zip(hosts, nodes, strict=True) for placed in node if placed.rank == 0]
    leaders = {(p.worker.role, p.index): Leader(host, number) for number, (p, host) in enumerate(led)}
    front, written = _front(plan, leaders)
    for number, (host, node) in enumerate(zip(hosts, nodes, strict=True)):
        commands = []
        for placed in node:
            leader, peers = leaders[placed.worker.role, placed.index], hosts[number : number + placed.worker.nodes]
            commands += _command(plan, placed, leader, peers)
        written[f"run_{number}.sh"] = run_script(plan, host, commands + ([front] if front and number == 0 else []))
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


@dataclass(frozen=True)
class Leader:
    """The first process of a worker: its node, and the worker's number, which decides its ports."""

    host: str
    number: int

    def port(self, kind: str, block: int = 1) -> int:
        return PORTS[kind] + self.number * block


def _engine_port(plan: Plan, leader: Leader) -> int:
    """A single aggregated worker serves the public port itself."""
    alone = plan.mode == "agg" and plan.workers[0].count == 1
    return plan.port if alone else leader.port("engine")


def _command(plan: Plan, placed: Placed, leader: Leader, peers: Sequence[str]) -> list[Command]:
    """What a node runs of a worker that spans ``peers``, this node first."""
    worker, rank = placed.worker, placed.rank
    share, several = worker.gpus // worker.nodes, worker.nodes > 1
    gpus = ",".join(str(gpu) for gpu in range(placed.first_gpu, placed.first_gpu + share))
    env = {"CUDA_VISIBLE_DEVICES": gpus} | dict(worker.env)
    log = f"{worker.role}_{placed.index}" + (f"_rank{rank}" if several else "")
    serve: dict[str, Any] = {"host": "0.0.0.0", "port": _engine_port(plan, leader)}
    named = {"served-model-name": plan.served_name} | serve | dict(worker.flags)
    joined = joint_flags(plan, worker, f"tcp://*:{leader.port('events', NIXL_BLOCK)}")
    if plan.backend == "trtllm":
        words = ["trtllm-serve", plan.model, "--backend", "pytorch", *argv(serve)]
        words += ["--extra_llm_api_options", f"{worker.role}_config.yaml"]
        if several:  # the leader starts the ranks of all its nodes
            slots = ",".join(f"{peer}:{share}" for peer in peers)
            words = ["mpirun", "-n", str(worker.gpus), "-H", slots, "trtllm-llmapi-launch", *words]
        return [] if rank else [Command(words, log, env)]
    if plan.backend == "sglang":
        joined |= {} if worker.role == "agg" else {"disaggregation-bootstrap-port": leader.port("bootstrap")}
        if several:
            joined |= {"nnodes": worker.nodes, "node-rank": rank}
            joined["dist-init-addr"] = f"{leader.host}:{leader.port('rendezvous')}"
        words = ["python3", "-m", "sglang.launch_server", *argv({"model-path": plan.model} | named | joined)]
        return [Command(words, log, env)]
    if worker.role != "agg":
        env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = peers[0]
        env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(leader.port("nixl", NIXL_BLOCK))
    joined |= _vllm_ranks(plan, placed, leader) if several else {}
    return [Command(["vllm", "serve", plan.model, *argv(named | joined)], log, env)]


def _vllm_ranks(plan: Plan, placed: Placed, leader: Leader) -> dict[str, Any]:
    """Data-parallel ranks are dealt to the nodes; without them tensor and pipeline ranks are."""
    nodes, data = placed.worker.nodes, placed.worker.parallel[2]
    if data == 1:
        if version_key(plan.version) < version_key(MULTI_NODE_VLLM):
            words = f"vLLM spans nodes by itself from {MULTI_NODE_VLLM}; use target dynamo"
            raise UnsupportedCombination("version", words)
        flags: dict[str, Any] = {"nnodes": nodes, "node-rank": placed.rank, "master-addr": leader.host}
        flags["master-port"] = leader.port("rendezvous")
    elif data % nodes:
        raise UnsupportedCombination("roles", f"vLLM deals whole data-parallel ranks to nodes: {data} over {nodes}")
    else:
        flags = {"data-parallel-size-local": data // nodes, "data-parallel-address": leader.host}
        flags["data-parallel-rpc-port"] = leader.port("rpc")
        flags |= {"data-parallel-start-rank": placed.rank * data // nodes} if placed.rank else {}
    return flags | ({"headless": True} if placed.rank else {})


def _front(plan: Plan, leaders: Mapping[tuple[str, int], Leader]) -> tuple[Command | None, dict[str, str]]:
    """The process that joins several workers behind the public port, and its configuration files."""
    by_role = {w.role: [leader for (role, _), leader in leaders.items() if role == w.role] for w in plan.workers}
    urls = {role: [f"{one.host}:{_engine_port(plan, one)}" for one in found] for role, found in by_role.items()}
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
        words = ["trtllm-serve", "disaggregated", "-c", "front.yaml"]
        return Command(words, "front"), {"front.yaml": yaml_text(config)}
    policy, vllm = "cache_aware" if plan.kv_router else "round_robin", plan.backend == "vllm"
    words = ["vllm-router"] if vllm else ["python3", "-m", "sglang_router.launch_router"]
    words += argv({"host": "0.0.0.0", "port": plan.port, "policy": policy})
    if plan.mode == "agg":
        return Command([*words, "--worker-urls", *(f"http://{url}" for url in urls["agg"])], "front"), {}
    words.append("--vllm-pd-disaggregation" if vllm else "--pd-disaggregation")
    for url, leader in zip(urls["prefill"], by_role["prefill"], strict=True):
        words += ["--prefill", f"http://{url}", *([] if vllm else [str(leader.port("bootstrap"))])]
    for url in urls["decode"]:
        words += ["--decode", f"http://{url}"]
    return Command(words, "front"), {}
