"""Attention-FFN disaggregation: attention and FFN on nodes of their own, taking turns (spec/06 section 12)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import comb
from typing import Any

import numpy as np
from perfcast_engine.answer import F64, Points
from perfcast_engine.config import ParallelConfig
from perfcast_engine.errors import InvalidField, UnsupportedCombination
from perfcast_engine.memory import Footprint
from perfcast_engine.ops.base import Op, Reads
from perfcast_engine.ops.collective import P2P, AllReduce, Nccl
from perfcast_engine.ops.large_ep import MoeAllToAll
from perfcast_engine.ops.memory_bound import Elementwise
from perfcast_engine.ops.moe_dispatch import MoeDispatch
from perfcast_engine.step import DEFAULT_STRIDE

from perfcast_planning.serving.disaggregated import Matching
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.worker import Worker
from perfcast_planning.serving.workload import Workload

MATCHING = Matching(decode_degradation=0.95)
COLLECTIVES = (AllReduce, Nccl, P2P, MoeDispatch, MoeAllToAll)
ELEMENT_BYTES = 2
ATTENTION, FFN = "attention", "ffn"
# Where an operator runs, by its name; the first pattern that matches decides. None: between the two, priced apart.
PLACES: tuple[tuple[re.Pattern[str], str | None], ...] = tuple(
    (re.compile(pattern), place)
    for pattern, place in (
        (r"_ar(_|$)|_p2p|all_?reduce|all_gather|reduce_scatter|dispatch", None),
        (r"logits_gemm|reduce_add|add_norm_2|_ffn_norm|_moe_norm|_mlp_norm|_combine$", ATTENTION),
        (r"embedding|add_norm_1|_attn_norm|attention|qkv|q_a_layernorm|q_b_proj|kv_b_proj|downscale_gemm", ATTENTION),
        (r"mla|bmm|rope|(?<!down_)(?<!up_)(?<!gate_)proj_gemm", ATTENTION),
        (r"ffn|act|moe|router|shared|gate|mlp|expert|down|up_", FFN),
    )
)
STATEFUL = re.compile(r"mamba|gdn|kda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Nodes of attention and of FFN, and how they take turns. ``optimistic``: three micro-batches hide the transfer."""

    attention_nodes: int
    ffn_nodes: int
    attention_tp: int
    ffn_ep: int = 1
    microbatches: int = 3
    optimistic: bool = True
    overhead: float = 1.0  # factor on transfers

    def __post_init__(self) -> None:
        for name in ("attention_nodes", "ffn_nodes", "attention_tp", "ffn_ep", "microbatches"):
            if getattr(self, name) < 1:
                raise InvalidField(f"afd.{name}", "must be at least 1", why="range")

    def workers(self, gpus_per_node: int) -> int:
        """Attention workers in all."""
        if gpus_per_node % self.attention_tp:
            raise InvalidField("afd.attention_tp", f"must divide the {gpus_per_node} GPUs of a node", why="range")
        return self.attention_nodes * gpus_per_node // self.attention_tp

    def gpus(self, gpus_per_node: int) -> int:
        return (self.attention_nodes + self.ffn_nodes) * gpus_per_node

    def mappings(self, gpus_per_node: int, experts: int) -> tuple[ParallelConfig, ParallelConfig]:
        """The parallel sizes of an attention worker, and of all FFN ranks together."""
        ranks, ep = self.ffn_nodes * gpus_per_node, self.ffn_ep if experts else 1
        if ranks % ep or experts % ep:
            raise InvalidField("afd.ffn_ep", f"must divide {ranks} FFN ranks and {experts} experts", why="range")
        sides = (self.attention_tp, self.attention_tp if experts else 1), (ranks, ep)
        attention, ffn = (ParallelConfig(tp=tp, moe_tp=tp // ep, moe_ep=ep) for tp, ep in sides)
        return attention, ffn

    def columns(self, number: int) -> dict[str, F64]:
        """Every field, for as many rows."""
        return {f"afd_{f.name}": np.full(number, float(getattr(self, f.name))) for f in fields(self)}


def placed(ops: Sequence[Op], place: str) -> list[Op]:
    """The operators that run in ``place``; UnsupportedCombination for a model that cannot be cut."""
    return [op for op in ops if place_of(op) == place]


def place_of(op: Op) -> str | None:
    if isinstance(op, COLLECTIVES):
        return None
    if STATEFUL.search(op.name):
        raise UnsupportedCombination("model", f"{op.name}: layers with a state cannot be cut", op=op.name)
    for pattern, place in PLACES:
        if pattern.search(op.name):
            return place
    raise UnsupportedCombination("model", f"{op.name} belongs neither to attention nor to FFN", op=op.name)


def _price(ops: Sequence[Op], worker: Worker, at: Points) -> F64:
    """Summed latency at N points; operators of the token count alone are asked once for each count."""
    _, first, back = np.unique(at.x, return_index=True, return_inverse=True)
    one = at.take(first)
    total = np.zeros(len(at))
    for op in ops:
        if op.reads is Reads.SEQUENCE:
            total = total + op.evaluate(worker.step.db, at).raise_first().ms
        else:
            total = total + op.evaluate(worker.step.db, one).raise_first().ms[back]
    return total


def _layer_times(attention: Worker, ffn: Worker, topology: Topology, at: Points, decode: bool) -> tuple[F64, F64, F64]:
    """(attention, FFN, transfer one way) of one layer and micro-batch at points of the attention workers, ms."""
    db, layers, spec = attention.step.db, attention.layers, attention.spec
    lists = [w.step.generation if decode else w.step.context for w in (attention, ffn)]
    workers = topology.workers(db.system.gpus_per_node)
    spread = at.with_(batch=at.batch * workers, x=at.x * workers)
    t_a = _price(placed(lists[0], ATTENTION), attention, at) / layers
    t_f = _price(placed(lists[1], FFN), ffn, spread) / layers
    if spec.moe.experts:
        combine = Elementwise(name="combine", bytes_per_token=ELEMENT_BYTES * (spec.moe.topk + 1) * spec.hidden)
        tokens = np.ceil(at.x / topology.attention_tp)
        t_a = t_a + _price([combine], attention, at.with_(x=tokens))
    node, share = db.system.gpus_per_node, _share_sent(spec.moe.experts, spec.moe.topk, topology.ffn_nodes)
    for operation in ("all_gather", "reduce_scatter"):
        gather = Nccl(name=operation, operation=operation, elements_per_token=spec.hidden, gpus=node)
        t_f = t_f + _price([gather], ffn, spread.with_(x=np.ceil(share * spread.x / node)))
    sent = np.floor(share * at.x * spec.hidden * ELEMENT_BYTES)
    hop = P2P(name="hop", hidden=1, pp=2)
    elements = np.ceil(sent / ELEMENT_BYTES)
    return t_a, t_f, _price([hop], attention, at.with_(x=elements)) * topology.overhead


def _share_sent(experts: int, topk: int, nodes: int) -> float:
    """Share of the tokens that some expert of a given FFN node is chosen for."""
    if not experts or nodes == 1:
        return 1 / nodes
    return 1 - comb(experts - experts // nodes, topk) / comb(experts, topk)


def step_ms(t_a: F64, t_f: F64, hop: F64, topology: Topology, layers: int, decode: bool) -> F64:
    """One pass of all micro-batches through all layers. ``hop``: the transfer one way."""
    slowest = np.maximum(t_a, t_f)
    cycle: F64 = np.maximum(t_a + hop, t_f + hop)
    if topology.optimistic:
        hidden = np.maximum(slowest, 2 * hop)
        cycle = np.where(topology.microbatches < 2 + 2 * hop / slowest, cycle, hidden)
    if not decode:
        return layers * cycle
    return (t_a + t_f + 2 * hop) + cycle * (topology.microbatches * layers - 1)


def prefill_ms(attention: Worker, ffn: Worker, topology: Topology, load: Workload, batch: Any) -> F64:
    """Time (N,) to prefill ``batch`` prompts on each attention worker."""
    micro = np.ceil(np.atleast_1d(np.asarray(batch, np.float64)) / topology.microbatches)
    times = _layer_times(attention, ffn, topology, Points.of(micro, load.isl - load.prefix, load.prefix), False)
    return step_ms(*times, topology, attention.layers, False)


def afd(
    attention: Worker, ffn: Worker, topology: Topology, load: Workload, batch: Any, stride: int = DEFAULT_STRIDE
) -> tuple[Rows, Footprint, Footprint]:
    """``batch`` requests (N,) on each attention worker: decode rows, and the memory of an attention and of an FFN GPU.

    ``attention`` has the topology's attention_tp; ``ffn`` spans all FFN ranks. Raises what operators raise.
    """
    batch = np.atleast_1d(np.asarray(batch, np.float64))
    g = attention.step.db.system.gpus_per_node
    micro = np.ceil(batch / topology.microbatches)
    offsets = np.arange(0, max(load.osl - 1, 1), max(stride, 1), dtype=np.float64)
    held = np.minimum(stride, np.maximum(load.osl - 1, 1) - offsets)
    tokens = np.repeat(micro * (attention.step.nextn + 1), len(offsets))
    at = Points.of(tokens, np.tile(load.isl + offsets + 1, len(batch)), 0, tokens)
    steps = step_ms(*_layer_times(attention, ffn, topology, at, True), topology, attention.layers, True)
    tpot: F64 = (steps.reshape(len(batch), -1) * held).sum(axis=1) / held.sum()
    workers, gpus, zero = topology.workers(g), topology.gpus(g), np.zeros(len(batch))
    rate = workers * batch / tpot * 1000
    resident = replace(attention.memory, weight_bytes=_weights(attention, ATTENTION))
    own = resident.footprint(micro * topology.microbatches, load.isl, load.osl, micro)
    shared = replace(ffn.memory, weight_bytes=_weights(ffn, FFN))
    other = shared.footprint(micro, 0, 0, micro)
    rows = Rows(
        {
            "batch": batch,
            "concurrency": workers * batch,
            "ttft_ms": zero,
            "tpot_ms": tpot,
            "encode_ms": zero,
            "tokens_per_s": rate,
            "tokens_per_s_per_gpu": rate / gpus,
            "tokens_per_s_per_user": 1000 / tpot,
            "requests_per_s": rate / load.osl,
            "requests_per_s_per_gpu": rate / load.osl / gpus,
            "gpus": np.full(len(batch), float(gpus)),
            "memory_gib": np.maximum(own.gib, other.gib),
            "power_w": zero,
            **topology.columns(len(batch)),
        }
    )
    return rows, own, other


def _weights(worker: Worker, place: str) -> float:
    return sum(op.weight_bytes() for op in placed(worker.step.generation, place))
