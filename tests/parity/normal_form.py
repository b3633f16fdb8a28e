"""Operators in the normal form of the golden files (spec/05 section 5): type, name, scale, fields off their default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from perfcast_engine.ops.base import Op

OUR_OWN = {"lanes", "role", "name", "scale"}
# our class -> (their type, our field -> theirs); "" leaves a field out
KINDS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Gemm": ("gemm", {"quant": "q", "low_precision_input": "lowp"}),
    "Embedding": ("embedding", {"quant": "q"}),
    "Elementwise": ("mem", {}),
    "ContextAttention": ("attn_ctx", {"kv_quant": "kv", "fmha_quant": "fmha"}),
    "GenerationAttention": ("attn_gen", {"kv_quant": "kv"}),
    "EncoderAttention": ("attn_enc", {"fmha_quant": "fmha", "partial_rotary": "partial_rotary_factor"}),
    "ContextMla": ("mla_ctx", {"kv_quant": "kv", "fmha_quant": "fmha"}),
    "GenerationMla": ("mla_gen", {"kv_quant": "kv"}),
    "ContextMlaModule": ("mla_module_ctx", {"kv_quant": "kv", "fmha_quant": "fmha", "gemm_quant": "gemm_q"}),
    "GenerationMlaModule": ("mla_module_gen", {"kv_quant": "kv", "fmha_quant": "fmha", "gemm_quant": "gemm_q"}),
    "MlaBmm": ("mla_bmm", {"quant": "q"}),
    "WideEpContextMla": ("wideep_mla_ctx", {"kv_quant": "kv", "fmha_quant": "fmha"}),
    "WideEpGenerationMla": ("wideep_mla_gen", {"kv_quant": "kv", "fmha_quant": "fmha"}),
    "Moe": ("moe", {"quant": "q", "distribution": "dist", "gated": "is_gated", "eplb": "enable_eplb"}),
    "MoeDispatch": ("moe_dispatch", {"quant": "q"}),
    "MoeAllToAll": ("moe_a2a", {"nodes": "node_num"}),
    "MoeExperts": (
        "moe_expert",
        {
            "quant": "q",
            "distribution": "dist",
            "gated": "is_gated",
            "eplb": "enable_eplb",
            "phase": "inference_phase",
            "slots": "num_slots",
            "kernel": "",
        },
    ),
    "MegaMoe": (
        "megamoe",
        {
            "quant": "q",
            "distribution": "dist",
            "pre_dispatch": "pre",
            "fused_shared_experts": "num_fused_shared_experts",
        },
    ),
    "AllReduce": ("allreduce", {"gpus": "tp"}),
    "Nccl": ("nccl", {"elements_per_token": "hidden", "gpus": "num_gpus", "quant": "dtype"}),
    "P2P": ("p2p", {}),
    "Mhc": ("mhc", {"quant": "q"}),
    "Mamba2": ("mamba2", {}),
    "Gdn": ("gdn", {"ssm_dtype": "mamba_ssm_dtype"}),
    "Kda": ("kda", {}),
    "Overlap": ("overlap", {}),
    "Fallback": ("fallback", {}),
}
_DSA = {
    "kv_quant": "kv",
    "fmha_quant": "fmha",
    "gemm_quant": "gemm_q",
    "full_fraction": "full_frac",
    "projection_quants": "attn_projection_quant_modes",
}
_MSA = {
    "kv_quant": "kv",
    "fmha_quant": "fmha",
    "gemm_quant": "gemm_q",
    "index_heads": "index_n_heads",
    "donor_architecture": "dsa_architecture",
    "donor_scale": "dsa_scale_k",
}
_DSV4 = {
    "kind": "attn_kind",
    "kv_quant": "kv",
    "fmha_quant": "fmha",
    "gemm_quant": "gemm_q",
    "index_heads": "index_n_heads",
}
for _name, _kind, _renamed in (("Dsa", "dsa", _DSA), ("Msa", "msa", _MSA), ("Dsv4", "dsv4", _DSV4)):
    KINDS |= {f"{_name}Context": (f"{_kind}_ctx", _renamed), f"{_name}Generation": (f"{_kind}_gen", _renamed)}  # type: ignore[operator]

# fields that the normal form leaves out at this value
DEFAULTS = {
    "seq_split": 1,
    "token_div": 1,
    "lowp": False,
    "below_grid_sol": False,
    "window": 0,
    "qk_norm": False,
    "cp": 1,
    "attn_cp": 1,
    "attn_ar_modeled": False,
    "is_gated": True,
    "moe_backend": None,
    "enable_eplb": False,
    "partial_rotary_factor": 0,
    "draft_tokens": 0,
}


def normal(op: Op) -> dict[str, Any]:
    kind, renamed = KINDS[type(op).__name__]
    out: dict[str, Any] = {"op": kind, "name": op.name}
    if kind not in ("overlap", "fallback"):
        out["scale"] = op.scale
    for field in fields(op):
        name = renamed.get(field.name, field.name)
        if field.name in OUR_OWN or not name:
            continue
        value = _plain(getattr(op, field.name), name)
        if name not in DEFAULTS or value != DEFAULTS[name]:
            out[name] = value
    if kind == "allreduce":
        out.pop("quant")
    weight = op.weight_bytes()
    if weight:
        out["w"] = weight
    return out


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Op):
        return normal(value)
    if name in ("a", "b", "fallback"):
        return [normal(op) for op in value]
    if name == "attn_projection_quant_modes":
        return dict(zip(("q", "kv", "o", "indexer"), value, strict=True))
    return value.capitalize() if name == "attn_kind" else value
