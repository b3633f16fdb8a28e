"""Serving cases: one static batch, one in-flight batch, one matched pair, the KV cache of one engine (spec/06 2-6)."""

from __future__ import annotations

from functools import cache
from typing import Any

from perfcast_engine.backends import GIB
from perfcast_engine.config import FUSED, EngineConfig, MoeComm, ParallelConfig, QuantOverrides
from perfcast_engine.predictor import Predictor
from perfcast_engine.step import MixedWork
from perfcast_engine.tables.database import Mode
from perfcast_planning.serving.estimate import (
    Estimate,
    Pool,
    estimate_aggregated,
    estimate_disaggregated,
    estimate_static,
)
from perfcast_planning.serving.static import Phases
from perfcast_planning.serving.worker import Worker, worker_of
from perfcast_planning.serving.workload import EngineLimits, Workload

from tests.parity.check import Incomplete

COLUMNS = {
    "concurrency": "concurrency",
    "bs": "batch",
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "request_latency": "request_latency_ms",
    "encoder_latency": "encode_ms",
    "context_latency": "prefill_ms",
    "generation_latency": "decode_ms",
    "seq/s": "requests_per_s",
    "seq/s/gpu": "requests_per_s_per_gpu",
    "tokens/s": "tokens_per_s",
    "tokens/s/gpu": "tokens_per_s_per_gpu",
    "tokens/s/user": "tokens_per_s_per_user",
    "num_total_gpus": "gpus",
    "memory": "memory_gib",
    "power_w": "power_w",
    "ctx_tokens": "ctx_tokens",
    "balance_score": "balance",
    "num_ctx_reqs": "prompts_per_step",
    "num_gen_reqs": "decodes_per_step",
    "gen_tokens": "decodes_per_step",
    "num_tokens": "tokens_per_step",
}
SCHEDULE = {
    "num_mix_steps": "mixed_steps",
    "num_genonly_steps": "decode_steps",
    "mix_step_latency_ms": "mixed_step_ms",
    "genonly_step_latency_ms": "decode_step_ms",
    "mix_context_tokens": "ctx_tokens",
    "mix_decode_requests": "mixed_step_decodes",
}
ROLE_COLUMNS = {"bs": "batch", "workers": "workers", "memory": "memory_gib", "seq/s/worker": "requests_per_s"}
QUANT = {"gemm": "gemm", "moe": "moe", "kvcache": "kv", "fmha": "fmha", "comm": "comm"}
PARTS = {"weights": "weights", "activations": "activations", "kvcache": "kv", "nccl": "nccl", "others": "others"}


@cache
def predictor() -> Predictor:
    return Predictor()


def config_of(case: dict[str, Any], parallel: ParallelConfig, **fields: Any) -> EngineConfig:
    quant = case.get("quant")
    modes = {name: quant[f"{name}_quant_mode"] for name in QUANT} if quant else {}
    if quant:
        modes["kv_cache"] = modes.pop("kvcache")
    comm = case.get("moe_comm_backend")
    given = {
        "model": case["model"],
        "system": case["system"],
        "backend": case["backend"],
        "version": case["version"],
        "database_mode": Mode(case["mode"]),
        "nextn": case["nextn"],
        "parallel": parallel,
        "quant": QuantOverrides(**modes),
        "moe_comm": MoeComm(comm.get("context"), comm.get("generation")) if comm else FUSED,
        "profile": "reference",
        "allow_unlisted_version": True,
    }
    return EngineConfig(**{**given, **fields})


def worker(config: EngineConfig) -> Worker:
    return worker_of(predictor().engine(config))


def widths(given: dict[str, int]) -> ParallelConfig:
    return ParallelConfig(
        tp=given["tp"],
        pp=given["pp"],
        attn_dp=given["dp"],
        cp=given["cp"],
        moe_tp=given["moe_tp"],
        moe_ep=given["moe_ep"],
    )


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    given = case["inputs"]
    if case["kind"] == "disagg":
        if "isl" not in given:
            raise Incomplete
        return disaggregated(case, given)
    if case["kind"] == "kv_capacity":  # sized for experts that stay on the fused path
        return capacity(worker(config_of(case, widths(case["parallel"]), moe_comm=FUSED)), given)
    engine = worker(config_of(case, widths(case["parallel"])))
    load = Workload(given["isl"], given["osl"], given["prefix"])
    accepted = given.get("decode_tokens_per_iteration", 1.0) - 1
    limits = EngineLimits(
        accepted=accepted,
        memory_fraction=given.get("free_gpu_memory_fraction"),
        max_seq_len=given.get("max_seq_len"),
        max_num_tokens=given.get("max_num_tokens"),
    )
    batch = given.get("batch_size", 1)
    if case["kind"] == "agg":
        found = estimate_aggregated(engine, load, batch, given["ctx_tokens"], limits, operators=True)
        return answer(engine, load, found) | in_flight(engine, load, found, accepted, given)
    correction = given.get("latency_correction_scale", 1.0)
    found = estimate_static(
        engine,
        load,
        batch,
        Phases(case["kind"]),
        limits,
        correction=correction,
        stride=given.get("stride", 32),
        operators=True,
    )
    steps = (("context_ops", "prefill"), ("generation_ops", "decode"))
    return answer(engine, load, found) | {name: operators(found.steps.get(phase), correction) for name, phase in steps}


def in_flight(
    engine: Worker, load: Workload, found: Estimate, accepted: float, given: dict[str, Any]
) -> dict[str, Any]:
    row, mixed, decode = found.rows.row(0), found.steps["mixed"], found.steps["decode"]
    schedule = {name: row[own] for name, own in SCHEDULE.items()} | {
        "mix_efficiency": 1.0,
        "decode_iterations": 1 + max(load.osl - 1, 0) / (1 + accepted),
        "mix_decode_query_tokens": row["mixed_step_decodes"] * (engine.step.nextn + 1),
        "mix_step_energy_wms": float(mixed.energy[0]),
        "genonly_step_energy_wms": float(decode.energy[0]),
    }
    if "decode_tokens_per_iteration" in given:
        schedule["decode_tokens_per_iteration"] = 1 + accepted
    shared, prompts, attention = engine.step.mixed_parts(
        MixedWork(row["ctx_tokens"], row["mixed_step_decodes"], load.isl, load.osl, load.prefix), operators=True
    )
    parts = {"context_attention (scaled)": float(prompts.ms[0]), "generation_attention": float(attention.ms[0])}
    return {
        "scheduling": schedule,
        "mix_step_ops": operators(shared) | parts,
        "genonly_step_ops": operators(decode) if row["decode_step_ms"] else {},
    }


def operators(step: Any, correction: float = 1.0) -> dict[str, float]:
    return {} if step is None else {name: float(a.ms[0]) * correction for name, a in step.operators.items()}


def identity(engine: Worker) -> dict[str, Any]:
    modes, p = engine.engine.modes, engine.parallel
    return {
        "tp": p.tp,
        "pp": p.pp,
        "dp": p.attn_dp,
        "moe_tp": p.moe_tp,
        "moe_ep": p.moe_ep,
        "cp": p.cp,
        "parallel": engine.label,
        **{name: getattr(modes, own) for name, own in QUANT.items()},
        "backend": engine.memory.backend.name,
        "version": engine.memory.version,
        "system": engine.memory.system.name,
    }


def answer(engine: Worker, load: Workload, found: Estimate) -> dict[str, Any]:
    row, fit = found.rows.row(0), found.fit["engine"]
    return {
        "row": {name: row[own] for name, own in COLUMNS.items() if own in row}
        | identity(engine)
        | {
            "model": engine.engine.model.id,
            "isl": load.isl,
            "osl": load.osl,
            "prefix": load.prefix,
            "global_bs": row["batch"] * engine.parallel.attn_dp,
            "request_rate": row["requests_per_s"] if "ctx_tokens" in row else 0.0,
            "encoder_memory": 0.0,
        },
        "memory_gib": {"total": float(fit.memory.gib[0])}
        | {name: float(getattr(fit.memory, own)[0]) / GIB for name, own in PARTS.items()},
        "oom": bool(fit.out_of_memory[0]),
        "kv_oom": bool(fit.kv_over_budget[0]),
    }


def capacity(engine: Worker, given: dict[str, Any]) -> dict[str, Any]:
    found = engine.memory.kv_capacity(
        given.get("max_num_tokens", 8192),
        given.get("memory_fraction_value", 0.9),
        given.get("memory_fraction_kind"),
        given.get("tolerance_fraction"),
    )
    left = found.within_tolerance
    return {
        "total_gpu_capacity_bytes": found.capacity_bytes,
        "total_kv_size_bytes": found.kv_bytes,
        "kv_size_per_token_bytes": found.bytes_per_token,
        "total_kv_size_tokens": found.kv_tokens,
        "source": "native",  # the only one there is: nothing is guessed of a model that cannot be built
        "memory_breakdown": {
            "weights_bytes": found.breakdown["weights"],
            "activations_bytes": found.breakdown["activations"],
            "runtime_overhead_bytes": found.breakdown["others"],
            "comm_overhead_bytes": found.breakdown["nccl"],
        },
        "tolerance_adjusted": left
        and {
            "tolerance_fraction": given["tolerance_fraction"],
            "total_kv_size_bytes": left[0],
            "total_kv_size_tokens": left[1],
        },
    }


def disaggregated(case: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    load, pools = Workload(given["isl"], given["osl"], given["prefix"]), {}
    for role in ("prefill", "decode"):
        asked = given[role]
        tp, pp, dp, moe_tp, moe_ep, *cp = asked["parallel"]
        mapping = ParallelConfig(tp=tp, pp=pp, attn_dp=dp, cp=cp[0] if cp else 1, moe_tp=moe_tp, moe_ep=moe_ep)
        pools[role] = Pool(
            worker=worker(config_of(case, mapping, role=role, resolution="search", moe_comm=None)),
            batch=asked["batch_size"],
            workers=asked["workers"],
            limits=EngineLimits(accepted=given.get("nextn_accepted", 0.0)),
        )
    corrections = given["prefill_latency_correction"], given["decode_latency_correction"]
    found = estimate_disaggregated(pools["prefill"], pools["decode"], load, corrections=corrections).require_fit()
    row = found.rows.row(0)
    out = {name: row[own] for name, own in COLUMNS.items() if own in row}
    for role, pool in pools.items():
        tag = f"({role[0]})"
        out |= {tag + name: value for name, value in identity(pool.worker).items()}
        out |= {tag + name: row[f"{role}_{own}"] for name, own in ROLE_COLUMNS.items()}
        out[tag + "global_bs"] = row[f"{role}_batch"] * pool.worker.parallel.attn_dp
    no_encoders = {"workers": 0, "tp": 0, "pp": 0, "bs": 0, "parallel": "", "memory": 0.0}
    out |= {f"(e){name}": value for name, value in no_encoders.items()}
    out |= {"model": case["model"], "isl": load.isl, "osl": load.osl, "prefix": load.prefix}
    out |= {"request_rate": row["requests_per_s"], "power_coverage": 0.0}
    return {"row": out}
