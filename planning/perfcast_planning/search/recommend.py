"""The fewest GPUs for a load: searches with growing workers until one serves it (spec/06 section 11, modes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from perfcast_engine.errors import InvalidField
from perfcast_engine.profiles import REPLICA_WITHIN_NODE, profile_named

from perfcast_planning.search.search import search
from perfcast_planning.search.space import Space, powers_of_two
from perfcast_planning.search.task import Progress, SearchResult, SearchTask, Status, Workshop

MAX_WORKER_GPUS = 64
OUT_OF_MEMORY = (Status.NO_MEMORY, Status.NO_KV)


def recommend(
    task: SearchTask,
    shop: Workshop,
    progress: Callable[[Progress], None] = lambda _: None,
) -> SearchResult:
    """The deployments that serve ``task.match_load`` on the fewest GPUs; ``task.total_gpus`` does not count.

    Workers have at most the GPUs of a node at first, and twice as many as long as that is not enough: in the reference
    while a model does not fit, else while nothing meets the targets.
    """
    if task.match_load is None:
        raise InvalidField("match_load", "is missing; give a request rate or a concurrency", why="load")
    profile, node = profile_named(task.engine.profile), shop.system(task.engine).gpus_per_node
    replica = task.replica
    if profile[REPLICA_WITHIN_NODE] and replica.max_gpus is None:
        replica = replace(replica, max_gpus=node)
    gpus = node
    while True:
        sizes = Space(num_gpu=powers_of_two(1, gpus))
        spaces = {name: getattr(task, name).over(sizes) for name in ("space", "prefill_space", "decode_space")}
        result = search(replace(task, total_gpus=None, replica=replica, **spaces), shop, progress)
        enough = not any(e.status in OUT_OF_MEMORY for e in result.experiments)
        if not profile[REPLICA_WITHIN_NODE]:
            enough = result.eligible
        if enough or gpus >= MAX_WORKER_GPUS:
            return result
        gpus *= 2
