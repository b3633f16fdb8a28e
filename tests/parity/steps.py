"""Golden file steps: prefill, decode, decode step, mixed, with per-operator lists; builds that must fail."""

from __future__ import annotations

from functools import cache
from typing import Any

from perfcast_engine import EngineConfig, MoeComm, ParallelConfig, Predictor, QuantOverrides
from perfcast_engine.answer import Answer, Source
from perfcast_engine.step import MixedWork, StepModel
from perfcast_engine.step_result import StepResult

predictor = cache(Predictor)
QUANT = {
    "gemm_quant_mode": "gemm",
    "moe_quant_mode": "moe",
    "kvcache_quant_mode": "kv_cache",
    "fmha_quant_mode": "fmha",
    "comm_quant_mode": "comm",
}
PARALLEL = {"dp": "attn_dp"}


def config_of(case: dict[str, Any]) -> EngineConfig:
    comm = case.get("moe_comm_backend")
    return EngineConfig(
        model=case["model"],
        system=case["system"],
        backend=case["backend"],
        version=case["version"],
        parallel=ParallelConfig(**{PARALLEL.get(name, name): size for name, size in case.get("parallel", {}).items()}),
        quant=QuantOverrides(**{QUANT[name]: value for name, value in case.get("quant", {}).items()}),
        database_mode=case.get("mode", "SILICON"),
        nextn=case["nextn"],
        moe_comm=MoeComm(**comm) if comm else (MoeComm() if "quant" in case else None),
        resolution="estimate" if "parallel" in case else "search",
        profile="reference",
        allow_unlisted_version=True,
    )


def steps_of(case: dict[str, Any]) -> StepModel:
    return predictor().engine(config_of(case)).steps


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    steps, inputs = steps_of(case), dict(case["inputs"])
    if case["kind"] == "build":
        return {}
    return {"prefill": prefill, "decode": decode, "decode_step": decode_step, "mixed": mixed}[case["kind"]](
        steps, inputs
    )


def listed(result: StepResult) -> list[list[Any]]:
    assert result.operators is not None
    return [[name, float(a.ms[0]), source_of(a)] for name, a in result.operators.items()]


def source_of(answer: Answer) -> str:
    return Source(int(answer.source[0])).name.lower()


def prefill(steps: StepModel, inputs: dict[str, Any]) -> dict[str, Any]:
    names = {"batch_size": "batch", "seq_imbalance_correction_scale": "imbalance"}
    result = steps.prefill(**{names.get(k, k): v for k, v in inputs.items()}, operators=True).raise_first()
    return {"latency_ms": float(result.ms[0]), "ops": listed(result)}


def decode(steps: StepModel, inputs: dict[str, Any]) -> dict[str, Any]:
    names = {"batch_size": "batch", "beam_width": "beam", "gen_seq_imbalance_correction_scale": "imbalance"}
    result = steps.decode(**{names.get(k, k): v for k, v in inputs.items()}, operators=True).raise_first()
    ms = float(result.ms[0])
    tpot = ms / (inputs["osl"] - 1) if inputs["osl"] > 1 else 0.0
    return {"latency_ms": ms, "tpot_ms": tpot, "ops": listed(result)}


def decode_step(steps: StepModel, inputs: dict[str, Any]) -> dict[str, Any]:
    result = steps.decode_step(**inputs, operators=True).raise_first()
    return {"latency_ms": float(result.ms[0]), "ops": listed(result)}


def mixed(steps: StepModel, inputs: dict[str, Any]) -> dict[str, Any]:
    shared, context, decoding = steps.mixed_parts(MixedWork(**inputs), operators=True)
    total = (shared + context + decoding).raise_first()
    return {
        "latency_ms": float(total.ms[0]),
        "shared_ms": float(shared.ms[0]),
        "context_attention_ms": float(context.ms[0]),
        "decode_attention_ms": float(decoding.ms[0]),
        "shared_ops": listed(shared),
        "context_attention_ops": listed(context),
        "decode_attention_ops": listed(decoding),
    }
