"""Deployments of a search as flat rows, one column a quantity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perfcast_client.config import PARALLEL
from perfcast_client.deployments import Deployment, Experiment, SearchResult, WorkerGroup

METRICS = (
    "ttft_ms",
    "tpot_ms",
    "request_latency_ms",
    "encode_ms",
    "requests_per_s",
    "requests_per_s_per_gpu",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "tokens_per_s_per_user",
    "concurrency_total",
    "gpus_total",
    "power_w",
)
Row = dict[str, Any]


def flat(result: SearchResult, experiment: Experiment, deployment: Deployment) -> Row:
    """Every column of one deployment: of the search, of the replica, and of each role under a prefix."""
    first = experiment.engines[deployment.workers[0].engine]
    row: Row = {
        "experiment": experiment.name,
        "mode": experiment.mode,
        "model": first.config.model,
        "system": first.stamp.system,
        "backend": experiment.backend,
        "version": first.stamp.version,
        "profile": result.profile,
        "isl": result.isl,
        "osl": result.osl,
        "prefix": result.prefix,
    }
    row |= {name: getattr(deployment, name) for name in METRICS}
    if deployment.ranking is not None:
        row |= deployment.ranking.to_dict()
    for group in deployment.workers:
        row |= _of_group(experiment, group, "" if len(deployment.workers) == 1 else f"{group.role}_")
    if deployment.iterations is not None:
        row |= deployment.iterations.to_dict()
    for prefix, part in (("encode_", deployment.encode), ("afd_", deployment.afd)):
        if part is not None:
            row |= {prefix + name: value for name, value in part.to_dict().items()}
    return row


def _of_group(experiment: Experiment, group: WorkerGroup, prefix: str) -> Row:
    engine = experiment.engines[group.engine]
    row: Row = {
        "workers": group.workers_total,
        "parallel": engine.mapping,
        **{name: getattr(engine.config, name) for name in PARALLEL},
        "batch": group.batch_per_rank,
        "batch_total": group.batch_total,
        "gpus_per_worker": group.gpus_per_worker,
        "memory_gib": group.memory_gib_per_gpu,
        "encoder_memory_gib": group.encoder_memory_gib_per_gpu,
        "requests_per_s_per_worker": group.requests_per_s_per_worker,
        **{f"{name.replace('_', '')}_quant_mode": mode for name, mode in engine.modes.items()},
        "system": engine.stamp.system,
        "version": engine.stamp.version,
    }
    return {prefix + name: value for name, value in row.items()}


def flattened(result: SearchResult, part: str) -> list[Row]:
    """The picks, the front or the rows of all experiments."""
    return [flat(result, e, deployment) for e in result.experiments for deployment in getattr(e, part)]


def columns(rows: Iterable[Row]) -> list[str]:
    """All columns in the order in which they first appear."""
    return list(dict.fromkeys(name for row in rows for name in row))


def label(experiment: Experiment, deployment: Deployment) -> str:
    """A deployment in few words, e.g. "5 x tp4 b1 + 3 x tp4 b64"."""
    words = []
    if (encode := deployment.encode) is not None:
        words.append(f"{encode.workers_total} x encode tp{encode.gpus_per_worker} b{encode.batch}")
    for group in deployment.workers:
        config = experiment.engines[group.engine].config
        named = {"pp": "pp", "attn_dp": "dp", "cp": "cp", "moe_tp": "etp", "moe_ep": "ep"}
        widths = "".join(f" {short}{getattr(config, name)}" for name, short in named.items() if _wide(config, name))
        tokens = f" c{deployment.iterations.ctx_tokens}" if deployment.iterations else ""
        if group.role == "decode" and (afd := deployment.afd) is not None:
            nodes = f"{afd.attention_nodes}A tp{afd.attention_tp} + {afd.ffn_nodes}F ep{afd.ffn_ep}"
            words.append(f"{group.workers_total} x ({nodes} m{afd.microbatches}) b{group.batch_per_rank}")
            continue
        words.append(f"{group.workers_total} x tp{config.tp}{widths} b{group.batch_per_rank}{tokens}")
    return " + ".join(words)


def _wide(config: Any, name: str) -> bool:
    return (getattr(config, name) or 1) > 1
