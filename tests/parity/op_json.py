"""Operators as golden files write them: ``{Variant: {field: value}}`` to our dataclasses, and their answers back.

One row of ``VARIANTS`` a kind: our class, and the fields that we call otherwise ("" for one that means nothing to us).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from perfcast_engine.answer import Points, Source, Tier
from perfcast_engine.ops.attention import ContextAttention, EncoderAttention, GenerationAttention
from perfcast_engine.ops.base import Op, Role
from perfcast_engine.ops.collective import P2P, AllReduce, Nccl
from perfcast_engine.ops.composite import Fallback, Overlap
from perfcast_engine.ops.dsa import DsaContext, DsaGeneration, MsaContext, MsaGeneration
from perfcast_engine.ops.dsv4 import Dsv4Context, Dsv4Generation, Mhc
from perfcast_engine.ops.gemm import Gemm
from perfcast_engine.ops.large_ep import MegaMoe, MoeAllToAll, MoeExperts
from perfcast_engine.ops.memory_bound import Elementwise, Embedding
from perfcast_engine.ops.mla import (
    ContextMla,
    ContextMlaModule,
    GenerationMla,
    GenerationMlaModule,
    MlaBmm,
    WideEpContextMla,
    WideEpGenerationMla,
)
from perfcast_engine.ops.moe import Moe
from perfcast_engine.ops.moe_dispatch import MoeDispatch
from perfcast_engine.ops.state_space import Gdn, Kda, Mamba2
from perfcast_engine.tables.catalog import Catalog
from perfcast_engine.tables.database import TRANSFER_PRESETS, Database, Mode

Run = Mapping[str, Any]

_TOKENS = {"scale_num_tokens": "token_div"}
_HEADS = {
    "n": "heads",
    "n_kv": "kv_heads",
    "head_size": "head_dim",
    "window_size": "window",
    "kv_cache_dtype": "kv_quant",
    "lane_order": "lanes",
}
_EXPERTS = {
    "hidden_size": "hidden",
    "inter_size": "inter",
    "num_experts": "experts",
    "moe_tp_size": "moe_tp",
    "moe_ep_size": "moe_ep",
    "attention_dp_size": "attn_dp",
    "quant_mode": "quant",
    "workload_distribution": "distribution",
}
_LATENT = {
    "num_heads": "heads",
    "native_num_heads": "native_heads",
    "kv_cache_dtype": "kv_quant",
    "fmha_quant_mode": "fmha_quant",
    "gemm_quant_mode": "gemm_quant",
    "cp_size": "cp",
}
_SPARSE = {
    "num_heads": "heads",
    "kv_cache_dtype": "kv_quant",
    "fmha_quant_mode": "fmha_quant",
    "gemm_quant_mode": "gemm_quant",
    "cp_size": "cp",
}
_DSA = {**_SPARSE, "full_frac": "full_fraction", "attn_projection_quant_modes": "projection_quants"}
_SIZES = {"hidden_size": "hidden", "index_n_heads": "index_heads"}
_DSV4 = {**_SPARSE, **_SIZES, "attn_kind": "kind", "tp_size": "tp", "window_size": "window"}
_MSA = {
    **_SPARSE,
    **_SIZES,
    "num_kv_heads": "kv_heads",
    "dsa_architecture": "donor_architecture",
    "dsa_scale_k": "donor_scale",
}
_KERNEL = {"kernel_source": "kernel"}

VARIANTS: dict[str, tuple[type[Op], dict[str, str]]] = {
    "Gemm": (Gemm, {**_TOKENS, "quant_mode": "quant"}),
    "ContextAttention": (
        ContextAttention,
        {**_HEADS, "fmha_quant_mode": "fmha_quant", "use_qk_norm": "qk_norm", "cp_size": "cp"},
    ),
    "GenerationAttention": (GenerationAttention, _HEADS),
    "EncoderAttention": (
        EncoderAttention,
        {**_HEADS, "fmha_quant_mode": "fmha_quant", "partial_rotary_factor": "partial_rotary"},
    ),
    "Elementwise": (Elementwise, _TOKENS),
    "Embedding": (Embedding, {"vocab_size": "rows", "hidden_size": "dim", "quant_mode": "quant"}),
    "CustomAllReduce": (AllReduce, {"hidden_size": "hidden", "tp_size": "gpus"}),
    "Nccl": (Nccl, {"hidden_size": "elements_per_token", "num_gpus": "gpus", "dtype": "quant"}),
    "P2P": (P2P, {"hidden_size": "hidden", "pp_size": "pp"}),
    "Moe": (Moe, {**_EXPERTS, "is_gated": "gated", "enable_eplb": "eplb"}),
    "MoeDispatch": (
        MoeDispatch,
        {
            **_EXPERTS,
            **_TOKENS,
            "moe_quant": "quant",
            "attn_cp_size": "attn_cp",
            "pre_dispatch": "pre",
            "comm_quant": "",
        },
    ),
    "MoeAllToAll": (MoeAllToAll, {**_EXPERTS, "node_num": "nodes", "attention_tp_size": "attn_tp"}),
    "MoeExpertCompute": (
        MoeExperts,
        {
            **_EXPERTS,
            "inference_phase": "phase",
            "num_slots": "slots",
            "kernel_source": "kernel",
            "is_gated": "gated",
            "enable_eplb": "eplb",
        },
    ),
    "Dsv4MegaMoe": (
        MegaMoe,
        {**_EXPERTS, "num_fused_shared_experts": "fused_shared_experts", "kernel_source": "kernel"},
    ),
    "ContextMla": (ContextMla, _LATENT),
    "GenerationMla": (GenerationMla, _LATENT),
    "MlaBmm": (MlaBmm, {"num_heads": "heads", "quant_mode": "quant"}),
    "MlaModuleContext": (ContextMlaModule, _LATENT),
    "MlaModuleGeneration": (GenerationMlaModule, _LATENT),
    "WideEpContextMla": (WideEpContextMla, _LATENT),
    "WideEpGenerationMla": (WideEpGenerationMla, _LATENT),
    "DsaContext": (DsaContext, _DSA),
    "DsaGeneration": (DsaGeneration, {**_DSA, "cp_size": ""}),
    "Dsv4Context": (Dsv4Context, _DSV4),
    "Dsv4Generation": (Dsv4Generation, {**_DSV4, "cp_size": ""}),
    "MsaContext": (MsaContext, _MSA),
    "MsaGeneration": (MsaGeneration, _MSA),
    "Mhc": (Mhc, {"op": "half", "hidden_size": "hidden", "quant_mode": "quant"}),
    "Mamba2": (Mamba2, _KERNEL),
    "Gdn": (Gdn, {**_KERNEL, "mamba_ssm_dtype": "ssm_dtype"}),
    "Kda": (Kda, _KERNEL),
    "Overlap": (Overlap, {"group_a": "a", "group_b": "b"}),
    "Fallback": (Fallback, {}),
}

SPELLINGS = {"Csa": "csa", "Hca": "hca"}
# The reference tells these parts of a step by the operator's name.
ROLES = {"context_attention": Role.ATTENTION, "generation_attention": Role.ATTENTION}


def decode(op: Mapping[str, Any]) -> Op:
    """Our operator for ``{Variant: {fields}}``."""
    ((variant, fields),) = op.items()
    kind, renames = VARIANTS[variant]
    renames = {"scale_factor": "scale", **renames}
    ours = {renames.get(name, name): _value(value) for name, value in fields.items() if renames.get(name, name)}
    role = Role.LOGITS if "logits_gemm" in fields["name"] else ROLES.get(fields["name"], Role.OTHER)
    return kind(**ours, role=role)


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_value(item) for item in value)
    if isinstance(value, dict):
        return decode(value)
    return SPELLINGS.get(value, value) if isinstance(value, str) else value


def points(op: Op, run: Run) -> Points:
    """The one point of a golden query. Without ``x``, the phase says how many tokens there are (spec/02 section 6)."""
    batch, s, x = run.get("batch_size", 1), run.get("s", 1), run.get("x")
    if x is None:
        x = batch * s if run.get("is_context", True) and op.role is not Role.LOGITS else batch
    return Points.of(batch, s, run.get("prefix") or 0, x, run.get("imbalance_correction_scale", 1.0))


@lru_cache(maxsize=1)
def catalog() -> Catalog:
    return Catalog()


@lru_cache(maxsize=64)
def database(system: str, backend: str, version: str, mode: str, policy: str | tuple[str, ...] | None) -> Database:
    if policy is None or isinstance(policy, str):
        tiers = TRANSFER_PRESETS[policy or "aggressive"]
    else:
        tiers = frozenset(Tier[kind.upper()] for kind in policy)
    return catalog().database(system, backend, version, Mode(mode), tiers, allow_unlisted=True)


def database_of(case: Mapping[str, Any]) -> Database:
    policy = case.get("transfer_policy")
    return database(
        case["system"],
        case["backend"],
        case["version"],
        case["mode"],
        tuple(policy) if isinstance(policy, list) else policy,
    )


def answered(case: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """What we answer to one operator query; raises what the point misses with."""
    db, op = database_of(case), decode(case["op"])
    at = points(op, run)
    answer = op.evaluate(db, at).raise_first()
    worst = Tier(int(answer.tier[0])).name.lower()
    out: dict[str, Any] = {
        "latency_ms": float(answer.ms[0]),
        "energy_wms": float(answer.energy[0]),
        "source": Source(int(answer.source[0])).name.lower(),
        "provenance": worst,
    }
    if "provenance" in case["expect"] and case["expect"]["provenance"] is None:
        out["provenance"] = None if worst == "silicon" else worst
    if "sol_ms" in case["expect"]:
        parts = op.sol_split(db, at)
        out |= {"sol_ms": parts.time[0], "sol_math_ms": parts.math[0], "sol_mem_ms": parts.mem[0]}
    return out
