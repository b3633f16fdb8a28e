"""The families: which parts their layers are made of, in the order in which the reference lists them (spec/05 7, 9).

A row says which layers a segment is about and names its parts; a name that is not in PARTS is a norm or an all-reduce,
as it ends. Rows are looked up from the most special key to the most general: "FAMILY/backend/large" (under a large-EP
all-to-all), "FAMILY/backend", "FAMILY".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from perfcast_engine.models import attention, ffn, layers, listing, recurrent, sparse_attention, wide_experts
from perfcast_engine.models.layers import Layers
from perfcast_engine.models.listing import Family, Part


def _by_name(*functions: Callable[..., Any]) -> dict[str, Any]:
    return {function.__name__: function for function in functions}


LAYERS: Mapping[str, Layers] = {
    **_by_name(*layers.SELECTORS),
    **{kind: layers.hybrid(kind) for kind in ("Gm", "Sm", "Sd", "Gd")},
    **{f"gemma{letter}": layers.gemma(letter) for letter in "SF"},
    **{letter: layers.of_block(letter) for letter in "M*E-"},
}
PARTS: Mapping[str, Part] = {
    **_by_name(*listing.PARTS, *attention.PARTS, *sparse_attention.PARTS, *recurrent.PARTS),
    **_by_name(*ffn.PARTS, *wide_experts.PARTS),
    **{f"narrow_{name}": sparse_attention.narrow_norm(name) for name in ("attn_norm", "ffn_norm")},
    **{f"shared_{name}": sparse_attention.shared_norm(name) for name in ("add_norm_1", "add_norm_2")},
}

_DENSE = Family(
    "once: sharded_embedding; whole: add_norm_1 gqa add_norm_2 gated_mlp; once: logits embedding_ar;"
    " whole: ar_1 ar_2; once: split_p2p",
    cp="tokens",
)
_MOE = Family(
    "windowed_half: dense_attention; once: sharded_embedding; whole: add_norm_1 gqa add_norm_2 routed_experts;"
    " once: decode_logits embedding_ar split_p2p",
    cp="tokens",
    alpha="1.2",
)
_WIDE_MOE = replace(
    _MOE,
    lists="windowed_half: dense_attention; once: sharded_embedding; whole: add_norm_1 gqa add_norm_2 wide_experts;"
    " once: decode_logits embedding_ar split_p2p",
)
_DEEPSEEK = Family(
    "once: embedding; whole: add_norm_1 mla add_norm_2 experts_and_shared; once: logits p2p",
    cp="tokens",
    cp_in_decode=True,
    tells_decode=True,
    keeps_shared="unless asked",
)
_DEEPSEEK_ROWS = {
    "": _DEEPSEEK,
    "/vllm": replace(
        _DEEPSEEK,
        lists="once: embedding; whole: add_norm_1 mla add_norm_2 experts_and_shared; once: logits;"
        " both_sublayers: tp_allreduce; once: p2p",
    ),
    "/vllm/large": replace(
        _DEEPSEEK,
        lists="once: embedding; whole: add_norm_1 mla add_norm_2 wide_experts_and_shared; once: logits;"
        " both_sublayers: tp_allreduce; once: p2p",
    ),
    "/trtllm/large": replace(
        _DEEPSEEK,
        lists="once: embedding; whole: add_norm_1 overlapped_mla add_norm_2 wide_experts_and_shared; once: logits p2p",
        decode_factor=0.9,
    ),
    "/sglang/large": replace(
        _DEEPSEEK,
        lists="whole: wide_projection tp_gather; once: embedding; whole: add_norm_1 wide_downscale wide_mla tp_scatter"
        " wide_experts_and_shared; once: forgotten_logits",
    ),
}
_SPARSE = Family(
    "once: embedding; whole: add_norm_1 dsa add_norm_2 wide_experts_and_shared; once: logits p2p",
    cp="own",
    cp_in_decode=True,
    tells_decode=True,
)
_SPARSE_ROWS = {
    "": replace(
        _SPARSE,
        lists="once: embedding; whole: shared_add_norm_1 dsa shared_add_norm_2 experts_and_shared; once: logits p2p",
        shared_over="moe_tp",
        keeps_shared="always",
    ),
    "/vllm/large": _SPARSE,
    "/trtllm/large": replace(_SPARSE, decode_factor=0.9, keeps_shared="always"),
    "/sglang/large": replace(
        _SPARSE, lists="whole: tp_gather dsa tp_scatter wide_experts_and_shared; once: forgotten_logits"
    ),
}
_HYBRID = Family(
    "once: embedding; Gm: attn_norm gqa moe_norm routed_experts; Sm: attn_norm gqa moe_norm routed_experts;"
    " Sd: attn_norm gqa ffn_norm dense_mlp; Gd: attn_norm gqa ffn_norm dense_mlp; once: logits split_p2p;"
    " hybrid_attention: cp_gather_kind",
    cp="tokens",
    cp_in_decode=True,
    tells_decode="cp",
    dispatch_mode="bfloat16",
)
_GEMMA_LAYER = "attn_norm gqa ffn_norm mlp_beside_experts experts_if_any"

ROWS: Mapping[str, Family] = {
    "LLAMA": _DENSE,
    "QWEN3VL": _DENSE,
    "MOE": _MOE,
    "QWEN3VL_MOE": _MOE,
    "MOE/trtllm/large": _WIDE_MOE,
    "MOE/vllm/large": _WIDE_MOE,
    "MOE/sglang/large": replace(
        _MOE,
        lists="windowed_half: dense_attention; once: embedding; whole: add_norm_1 gqa add_norm_2 wide_experts;"
        " once: decode_logits",
    ),
    **{f"{family}{key}": row for family in ("DEEPSEEK", "KIMIK25") for key, row in _DEEPSEEK_ROWS.items()},
    **{f"DEEPSEEKV32{key}": row for key, row in _SPARSE_ROWS.items()},
    "DEEPSEEKV4": Family(
        "once: embedding; whole: mhc_pre narrow_attn_norm dsv4 mhc_post narrow_ffn_norm mega_experts_and_shared;"
        " once: logits p2p",
        cp="tokens",
        cp_in_decode=True,
    ),
    "MINIMAXM3": Family("once: embedding; whole: add_norm_1 msa add_norm_2 experts_and_shared; once: logits p2p"),
    "HYBRIDMOE": _HYBRID,
    "STEP3P7": replace(_HYBRID, lists=f"{_HYBRID.lists}; shared_expert_tail: dense_mlp"),
    "GEMMA4MIX": Family(
        f"once: embedding; gemmaS: {_GEMMA_LAYER}; gemmaF: {_GEMMA_LAYER}; once: logits split_p2p;"
        " gemma_attention: cp_gather_kind",
        cp="tokens",
        cp_in_decode=True,
        tells_decode="cp",
    ),
    "QWEN35": Family(
        "once: sharded_embedding embedding_ar; linear: gdn_norm delta_net gdn_ffn; full: full_attn_norm gqa full_ffn;"
        " once: logits p2p",
        alpha="1.2",
    ),
    "KIMIK3": Family(
        "once: sharded_embedding embedding_ar; linear: kda_norm kda kda_ar; full: mla_norm gated_mla mla_ar;"
        " whole: attention_residual ffn_norm; leading_dense: leading_mlp ffn_ar; after_dense: latent_experts;"
        " once: logits p2p draft_model",
        draft_in_layers=False,
    ),
    "NEMOTRONH": Family(
        "once: embedding; M: mamba_norm mamba2 mamba_ar; *: attn_norm gqa attn_ar; E: moe_norm latent_relu2_experts"
        " moe_ar; -: mlp_norm relu2_mlp mlp_ar; once: p2p logits"
    ),
    "NEMOTRONNAS": Family("once: embedding; nas_blocks: gqa_if_any gated_mlp_if_any; once: p2p logits"),
}


def family_row(family: str, backend: str, large_ep: bool) -> Family:
    keys = ([f"{family}/{backend}/large"] if large_ep else []) + [f"{family}/{backend}", family]
    return next(ROWS[key] for key in keys if key in ROWS)


def segments(row: Family) -> Iterator[tuple[Layers, list[Part]]]:
    """Which layers, and the parts of each of them, in order."""
    for segment in row.lists.split(";"):
        select, parts = segment.split(":")
        yield LAYERS[select.strip()], [_part(name) for name in parts.split()]


def _part(name: str) -> Part:
    if name in PARTS:
        return PARTS[name]
    return listing.norm(name) if "norm" in name else listing.allreduce(name)
