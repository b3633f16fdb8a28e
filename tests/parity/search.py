"""Search cases: candidates, rows, picks and fronts of one mode on one backend (spec/06 8-11)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.models.resolve import resolve
from perfcast_engine.tables.database import Mode
from perfcast_planning.search.pick import SCORE, Load
from perfcast_planning.search.search import search
from perfcast_planning.search.task import AGGREGATED, Experiment, SearchTask, Status
from perfcast_planning.search.workshop import TableWorkshop
from perfcast_planning.serving.worker import Worker
from perfcast_planning.serving.workload import EngineLimits, Targets, Workload

from tests.parity import check
from tests.parity.serving import QUANT, predictor

LABELS = {
    "bs": "batch",
    "concurrency": "concurrency",
    "ctx_tokens": "ctx_tokens",
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "request_latency": "request_latency_ms",
    "seq/s": "requests_per_s",
    "tokens/s": "tokens_per_s",
    "tokens/s/gpu": "tokens_per_s_per_gpu",
    "tokens/s/user": "tokens_per_s_per_user",
    "num_total_gpus": "gpus",
    "memory": "memory_gib",
    "tokens/s/gpu_cluster": SCORE,
    "replicas_needed": "replicas",
    "total_gpus_needed": "gpus_needed",
    "load_served_pct": "load_served_pct",
    "(p)workers": "prefill_workers",
    "(d)workers": "decode_workers",
    "(p)bs": "prefill_batch",
    "(d)bs": "decode_batch",
    "(p)memory": "prefill_memory_gib",
    "(d)memory": "decode_memory_gib",
    "(p)seq/s/worker": "prefill_requests_per_s",
    "(d)seq/s/worker": "decode_requests_per_s",
}
ERRORS = {
    Status.UNMET: "NoFeasibleConfigError",
    Status.NO_DATA: "NoFeasibleConfigError",
    Status.NO_MEMORY: "InsufficientMemoryError",
    Status.NO_KV: "KVCacheCapacityError",
    Status.FAILED: "RuntimeError",
}


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    given = case["inputs"]
    engine = EngineConfig(
        model=case["model"],
        system=case["system"],
        backend=case["backend"],
        version=case["version"],
        database_mode=Mode(case["mode"]),
        nextn=given.get("nextn", 0),
        profile="reference",
    )
    decode = None
    if "decode_system" in given:
        decode = EngineConfig(
            **{f: getattr(engine, f) for f in ("model", "backend", "database_mode", "nextn", "profile")},
            system=given["decode_system"],
            version=given.get("decode_version", "current"),
        )
    load = None
    if "target_request_rate" in given or "target_concurrency" in given:
        load = Load(given.get("target_request_rate"), given.get("target_concurrency"), given.get("max_total_gpus"))
    task = SearchTask(
        engine=engine,
        decode_engine=decode,
        load=Workload(given["isl"], given["osl"], given["prefix"]),
        targets=Targets(given["ttft"], given["tpot"], given.get("request_latency")),
        total_gpus=given["total_gpus"],
        modes=(given["serving_mode"],),
        limits=EngineLimits(
            accepted=given.get("nextn_accepted", 0.0),
            memory_fraction=given.get("free_gpu_memory_fraction"),
            max_seq_len=given.get("max_seq_len"),
        ),
        chunked_prefill=given.get("enable_chunked_prefill", False),
        autoscale=given.get("autoscale", False),
        strict_sla=given.get("strict_sla", False),
        match_load=load,
    )
    (found,) = search(task, TableWorkshop(predictor())).experiments
    if not len(found.rows):
        return {"error": ERRORS[found.status]}
    return described(found, task)


def described(found: Experiment, task: SearchTask) -> dict[str, Any]:
    rows = found.rows
    score = task.score(rows)
    speed = rows["tokens_per_s_per_user" if task.targets.request_latency_ms is None else "request_latency_ms"]
    return {
        "parallel_candidates": {role: [widths(p) for p in asked] for role, asked in found.asked.items()},
        "quant": quant(task),
        "n_rows": len(rows),
        "sum_tokens_s_gpu": float(rows["tokens_per_s_per_gpu"].sum()),
        "sum_tpot": float(rows["tpot_ms"].sum()),
        "rows": [labelled(found, row) for row in map(rows.row, range(len(rows)))],
        "best": [labelled(found, row) for row in map(found.pick.rows.row, range(len(found.pick.rows)))],
        "best_throughput": found.pick.score,
        "pareto": [[float(speed[i]), float(score[i])] for i in found.front],
    }


def widths(p: ParallelConfig) -> list[int]:
    return [p.tp, p.pp, p.attn_dp, p.moe_tp or 1, p.moe_ep or 1, p.cp]


def quant(task: SearchTask) -> dict[str, str]:
    """The modes of each role, as a worker of one GPU runs them."""
    roles = {"": ("both", task.engine)}
    if task.modes != (AGGREGATED,):
        roles = {"prefill_": ("prefill", task.engine), "decode_": ("decode", task.decode_engine or task.engine)}
    out = {}
    for prefix, (role, config) in roles.items():
        one = replace(config, role=role, resolution="search", parallel=ParallelConfig(moe_tp=1, moe_ep=1))
        modes = resolve(one, predictor().catalog, predictor().registry).modes
        out |= {f"{prefix}{name}_quant_mode": getattr(modes, own) for name, own in QUANT.items()}
    return out


def labelled(found: Experiment, row: dict[str, Any]) -> dict[str, Any]:
    out = {name: row[own] for name, own in LABELS.items() if own in row}
    sides = {"": "engine"} if found.mode == AGGREGATED else {"(p)": "prefill_engine", "(d)": "decode_engine"}
    for tag, column in sides.items():
        worker: Worker = found.engines[row[column]]
        out[f"{tag}parallel"] = worker.label
    if found.mode == AGGREGATED:
        out["global_bs"] = row["batch"] * worker.parallel.attn_dp
    return out


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """As sets where rows tie: many share one rounded throughput and the reference's sorts are not stable."""
    if "error" in expected or "error" in actual:
        yield f"{expected.get('error')} != {actual.get('error')}", float(expected.get("error") != actual.get("error"))
        return
    for name in ("parallel_candidates", "quant", "n_rows", "sum_tokens_s_gpu", "sum_tpot", "best_throughput"):
        yield from check.differences(expected[name], actual[name], f".{name}")
    yield from check.differences(expected["pareto"], actual["pareto"], ".pareto")
    for name, key, pool in (
        ("top_rows", "tokens/s/gpu", actual["rows"]),
        ("best", "tokens/s/gpu_cluster", actual["best"]),
    ):
        wanted, got = ([row[key] for row in rows] for rows in (expected[name], pool[: len(expected[name])]))
        yield from check.differences(wanted, got, f".{name}.{key}")
        for row in expected[name]:
            yield nearest(row, actual["rows"], f".{name}")


def nearest(row: dict[str, Any], rows: list[dict[str, Any]], path: str) -> tuple[str, float]:
    """The row of ``rows`` that differs least, with its worst difference; what only picks have is not compared."""
    alike = [r for r in rows if all(r[k] == v for k, v in row.items() if k.endswith(("parallel", "bs", "workers")))]
    known = [{k: v for k, v in row.items() if k in r} for r in alike]
    worst = [max(check.differences(k, r, path), key=lambda d: d[1]) for k, r in zip(known, alike, strict=True)]
    return min(worst, key=lambda d: d[1], default=(f"{path} lacks {row}", math.inf))
