"""Searching attention-FFN disaggregation: topologies as decode candidates beside a pool of prefill workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from perfcast_engine.config import FUSED, EngineConfig, ParallelConfig
from perfcast_engine.errors import EngineError

from perfcast_planning.search.task import SearchTask, Workshop
from perfcast_planning.serving.afd import Topology, afd
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.worker import Worker

MAX_RATIO = 4.0  # attention nodes over FFN nodes
MICROBATCHES = (2, 3, 4)
OPTIMISTIC_FROM = 3  # micro-batches that can hide the transfer
BATCHES = np.array([1, 2, 4, *range(8, 1025, 8)], np.float64)


def topologies(budget: int, gpus_per_node: int, experts: int) -> Iterator[Topology]:
    """Everything that fits ``budget`` GPUs."""
    nodes = budget // gpus_per_node
    for a in range(1, nodes):
        for f in range(1, nodes - a + 1):
            if a / f > MAX_RATIO:
                continue
            for tp in sorted({1, 2, 4, gpus_per_node}):
                for ep in sorted({1, 2, f, f * gpus_per_node}) if experts else [1]:
                    if gpus_per_node % tp or (f * gpus_per_node) % ep or (experts and experts % ep):
                        continue
                    for m in MICROBATCHES:
                        for optimistic in (False, True)[: 1 + (m >= OPTIMISTIC_FROM)]:
                            yield Topology(
                                attention_nodes=a,
                                ffn_nodes=f,
                                attention_tp=tp,
                                ffn_ep=ep,
                                microbatches=m,
                                optimistic=optimistic,
                            )


def candidates(task: SearchTask, config: EngineConfig, shop: Workshop) -> Iterator[tuple[Worker, Rows] | EngineError]:
    """Topology by topology: its attention worker and rows of the batches that fit, in the form of decode rows."""
    experts, g = shop.model(config).moe.experts, shop.system(config).gpus_per_node
    kept: dict[ParallelConfig, Worker | EngineError] = {}

    def engine(at: ParallelConfig) -> Worker:
        if at not in kept:
            (kept[at],) = shop.workers(replace(config, role="decode", resolution="estimate", moe_comm=FUSED), [at])
        found = kept[at]
        if isinstance(found, EngineError):
            raise found
        return found

    for topology in topologies(task.total_gpus or 8 * g, g, experts):
        try:
            attention, ffn = map(engine, topology.mappings(g, experts))
            rows, own, other = afd(attention, ffn, topology, task.load, BATCHES)
        except EngineError as error:
            yield error
            continue
        out, over = attention.memory.verdict(own, attention.memory.kv_fraction(task.limits.memory_fraction))
        fits = ~(out | over | (other.total >= ffn.memory.capacity))
        yield attention, rows.take(fits)
