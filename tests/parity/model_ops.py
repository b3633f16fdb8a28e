"""Golden file model_ops: quantisation modes, operator lists, weights, KV cache, lanes and refusals (spec/05 15)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from perfcast_engine.config import EngineConfig, MoeComm, ParallelConfig, QuantOverrides
from perfcast_engine.models.registry import Registry
from perfcast_engine.models.resolve import Engine, resolve
from perfcast_engine.ops.attention import ContextAttention, GenerationAttention
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.composite import Fallback, Overlap
from perfcast_engine.tables.catalog import Catalog

from tests.parity.normal_form import normal

registry = cache(Registry.load)
catalog = cache(Catalog)
RESOLUTIONS = {"estimate": "estimate", "task": "search"}


def config_of(case: dict[str, Any]) -> EngineConfig:
    opt, override = case["opt"], dict(case["override"])
    if "kv" in override:
        override["kv_cache"] = override.pop("kv")
    return EngineConfig(
        model=case["model"],
        system=case["system"],
        backend=case["backend"],
        version=case["version"],
        parallel=ParallelConfig(**case["parallel"]),
        quant=QuantOverrides(**override),
        database_mode=case["mode"],
        nextn=case["nextn"],
        attention_backend=opt.get("attention_backend"),
        moe_backend=opt.get("moe_backend"),
        eplb=opt.get("eplb", False),
        slots=opt.get("slots"),
        workload_distribution=opt.get("dist", "power_law"),
        encoder_dp=opt.get("encoder_dp", True),
        language_only=opt.get("language_only", False),
        layers=opt.get("layers"),
        moe_comm=MoeComm(**opt.get("moe_comm", {})),
        resolution=RESOLUTIONS[case["entry"]],  # type: ignore[arg-type]
        profile="reference",
        allow_unlisted_version=True,
    )


def evaluate(case: dict[str, Any]) -> dict[str, Any]:
    engine, want = resolve(config_of(case), catalog(), registry()), case["expect"]
    plan = engine.plan
    lists = {"context": plan.context, "generation": plan.generation}
    return {
        **lists_of(engine),
        "quant": {name: getattr(engine.modes, name) for name in ("gemm", "moe", "kv", "fmha", "comm")},
        "lanes": {phase: lanes for phase, ops in lists.items() if (lanes := lanes_of(ops))},
        "context_weight_bytes": plan.weight_bytes,
        "kv_elems_per_token": plan.kv.elements,
        "kv_bytes": {s: float(plan.kv.bytes(int(s))) for s in want.get("kv_bytes", ())},
        "kv_max_tokens": {b: plan.kv.tokens(float(b), engine.spec.ctx) for b in want.get("kv_max_tokens", ())},
        "act_width": plan.activation_width,
        "moe_tp": engine.parallel.moe_tp,
        "moe_ep": engine.parallel.moe_ep,
    }


def lists_of(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    plan = engine.plan
    lists = {"context": plan.context, "generation": plan.generation, "encoder": plan.encoder}
    return {name: [normal(op) for op in ops] for name, ops in lists.items()}


def lanes_of(ops: tuple[Op, ...]) -> tuple[str, ...] | None:
    """The lanes of the first attention operator of a list, nested ones included; None where there is none."""
    return next((op.lanes for op in leaves(ops) if isinstance(op, ContextAttention | GenerationAttention)), None)


def leaves(ops: tuple[Op, ...]) -> Iterator[Op]:
    for op in ops:
        parts = (op.a + op.b) if isinstance(op, Overlap) else op.fallback if isinstance(op, Fallback) else ()
        yield from leaves(parts) if parts else (op,)
