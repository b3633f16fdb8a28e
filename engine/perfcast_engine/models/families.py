"""The families: which parts their layers are made of, in the order in which the reference lists them (spec/05 7, 9).

A row is a tuple of segments; a segment selects layers and names their parts. Rows are looked up from the most special
key to the most general: "FAMILY/backend/large" (under a large-EP all-to-all), "FAMILY/backend", "FAMILY".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from perfcast_engine.models import attention as a
from perfcast_engine.models import ffn as f
from perfcast_engine.models import recurrent as r
from perfcast_engine.models.layers import (
    after_dense,
    both_sublayers,
    gemma,
    gemma_attention,
    hybrid,
    hybrid_attention,
    leading_dense,
    nas_blocks,
    of_block,
    of_kind,
    once,
    shared_expert_tail,
    whole,
    windowed_half,
)
from perfcast_engine.models.listing import (
    Part,
    Segment,
    allreduce,
    embedding,
    logits,
    norm,
    p2p,
    unless_forgotten,
    where,
)
from perfcast_engine.profiles import MOE_PREFILL_SKIPS_HEAD, WIDE_SKIPS_HEAD


@dataclass(frozen=True, slots=True)
class Family:
    """One row. ``cp``: what context-parallel ranks share in prefill, every token-wise operator or only what says so;
    None where the family does not run context-parallel. ``draft_in_layers``: speculative decoding is priced as a share
    of the layers; ``decode_factor`` on the layers of decode."""

    segments: tuple[Segment, ...]
    cp: Literal["tokens", "own"] | None = None
    draft_in_layers: bool = True
    decode_factor: float = 1.0


NORM_1, NORM_2 = norm("add_norm_1"), norm("add_norm_2")
PLAIN = f.Routing()
SPREAD = f.Routing("1.2")
TOLD = f.Routing(cp_in_decode=True, told_phase="always")
SILENT = f.Routing(cp_in_decode=True)
HYBRID = f.Routing(cp_in_decode=True, told_phase="with_cp", mode="bfloat16")
GEMMA = f.Routing(cp_in_decode=True, told_phase="with_cp")
"""Expert loads of MOE, QWEN3VL_MOE and QWEN35 are spread wider than those of the other families."""

FULL_HEAD = Segment(once, (embedding(sharded=False),))
SHARDED_HEAD = Segment(once, (embedding(sharded=True),))
TAIL = Segment(once, (logits, p2p(split=False)))
_WIDE_HEAD = Segment(once, (unless_forgotten(WIDE_SKIPS_HEAD, logits, in_decode=True),))


def layers(*parts: Part) -> Segment:
    return Segment(whole, parts)


_DENSE = Family(
    (
        SHARDED_HEAD,
        layers(NORM_1, a.gqa(), NORM_2, f.gated_mlp()),
        Segment(once, (logits, allreduce("embedding_ar"))),
        layers(allreduce("ar_1"), allreduce("ar_2")),
        Segment(once, (p2p(split=True),)),
    ),
    cp="tokens",
)


def _moe(*, sharded: bool, tail: tuple[Part, ...], experts: Part) -> Family:
    return Family(
        (
            Segment(windowed_half, (a.windowed_attention,)),
            Segment(once, (embedding(sharded),)),
            layers(NORM_1, a.gqa(), NORM_2, experts),
            Segment(once, (unless_forgotten(MOE_PREFILL_SKIPS_HEAD, logits, in_decode=False), *tail)),
        ),
        cp="tokens",
    )


_MOE_TAIL = (allreduce("embedding_ar"), p2p(split=True))
_MOE = _moe(sharded=True, tail=_MOE_TAIL, experts=f.fused_experts(SPREAD))
_MOE_LARGE = _moe(sharded=True, tail=_MOE_TAIL, experts=f.wide_experts(SPREAD))
_MOE_LARGE_SGLANG = _moe(sharded=False, tail=(), experts=f.wide_experts(SPREAD))


def _deepseek(mixer: Part, experts: Part, *tail: Segment) -> Family:
    return Family((FULL_HEAD, layers(NORM_1, mixer, NORM_2, experts), *tail), cp="tokens")


_VLLM_TAIL = (
    Segment(once, (logits,)),
    Segment(both_sublayers, (allreduce("tp_allreduce"),)),
    Segment(once, (p2p(split=False),)),
)
_SHARED = f.with_shared(TOLD, kept="unless explicit")
_WIDE_SHARED = f.wide_experts(PLAIN, shared=True, kept="unless explicit")

_DEEPSEEK_ROWS = {
    "": _deepseek(a.mla(dense_kernel=False), _SHARED, TAIL),
    "/vllm": _deepseek(a.mla(dense_kernel=True), _SHARED, *_VLLM_TAIL),
    "/vllm/large": _deepseek(a.mla(dense_kernel=True), _WIDE_SHARED, *_VLLM_TAIL),
    "/trtllm/large": Family(
        (FULL_HEAD, layers(NORM_1, a.overlapped_mla, NORM_2, _WIDE_SHARED), TAIL), cp="tokens", decode_factor=0.9
    ),
    "/sglang/large": Family(
        (
            layers(a.wide_projection, a.tp_exchange("all_gather")),
            FULL_HEAD,
            layers(NORM_1, a.wide_downscale, a.wide_mla, a.tp_exchange("reduce_scatter"), _WIDE_SHARED),
            _WIDE_HEAD,
        ),
        cp="tokens",
    ),
}


def _sparse(experts: Part, decode_factor: float = 1.0, norms: tuple[Part, Part] = (NORM_1, NORM_2)) -> Family:
    return Family((FULL_HEAD, layers(norms[0], a.dsa, norms[1], experts), TAIL), cp="own", decode_factor=decode_factor)


_SPARSE_ROWS = {
    "": _sparse(
        f.with_shared(TOLD, over="moe_tp", kept="always"),
        norms=(a.shared_norm("add_norm_1"), a.shared_norm("add_norm_2")),
    ),
    "/trtllm/large": _sparse(f.wide_experts(PLAIN, shared=True, kept="always"), decode_factor=0.9),
    "/vllm/large": _sparse(f.wide_experts(PLAIN, shared=True)),
    "/sglang/large": Family(
        (
            layers(
                a.tp_exchange("all_gather"), a.dsa, a.tp_exchange("reduce_scatter"), f.wide_experts(PLAIN, shared=True)
            ),
            _WIDE_HEAD,
        ),
        cp="own",
    ),
}

_HYBRID_LAYERS = (
    *(
        Segment(
            hybrid(kind),
            (
                norm("attn_norm"),
                a.gqa(gather=False),
                *((norm("moe_norm"), f.fused_experts(HYBRID)) if kind[1] == "m" else (norm("ffn_norm"), f.dense_mlp())),
            ),
        )
        for kind in ("Gm", "Sm", "Sd", "Gd")
    ),
    Segment(once, (logits, p2p(split=True))),
    Segment(hybrid_attention, (a.cp_gather_kind,)),
)

_GEMMA_LAYERS = tuple(
    Segment(
        gemma(letter),
        (
            norm("attn_norm"),
            a.gqa(gather=False, mode="attn"),
            norm("ffn_norm"),
            f.dense_mlp("shared_mlp_", mode="mlp"),
            f.gemma_experts(GEMMA),
        ),
    )
    for letter in "SF"
)

_GEMMA_TAIL = (Segment(once, (logits, p2p(split=True))), Segment(gemma_attention, (a.cp_gather_kind,)))

_QWEN_LAYERS = (
    Segment(of_kind("L"), (norm("gdn_norm"), r.delta_net, f.folded_allreduce("gdn_ar"), f.qwen_ffn("gdn_", SPREAD))),
    Segment(
        of_kind("F"),
        (
            norm("full_attn_norm"),
            a.gqa(gather=False, gated_q=True, qk_norm=True, mode="projection"),
            f.folded_allreduce("full_ar"),
            f.qwen_ffn("full_", SPREAD),
        ),
    ),
)


def _kimi_k3(expanded: bool) -> Family:
    return Family(
        (
            Segment(once, (embedding(sharded=True), allreduce("embedding_ar"))),
            Segment(of_kind("L"), (norm("kda_norm"), r.kda, allreduce("kda_ar"))),
            Segment(of_kind("F"), (norm("mla_norm"), r.gated_mla(expanded), allreduce("mla_ar"))),
            layers(r.attention_residual, norm("ffn_norm")),
            Segment(
                leading_dense,
                (f.gated_mlp(("dense_gate_up_gemm", "dense_act_gate", "dense_down_gemm")), allreduce("dense_ffn_ar")),
            ),
            Segment(after_dense, (f.latent_experts(PLAIN),)),
            TAIL,
            Segment(once, (r.draft_model(expanded),)),
        ),
        draft_in_layers=False,
    )


_NEMOTRON_H = (
    FULL_HEAD,
    Segment(of_block("M"), (norm("mamba_norm"), r.mamba2, allreduce("mamba_ar"))),
    Segment(of_block("*"), (norm("attn_norm"), a.gqa(gather=False), allreduce("attn_ar"))),
    Segment(of_block("E"), (norm("moe_norm"), f.latent_relu2_experts(PLAIN), allreduce("moe_ar"))),
    Segment(of_block("-"), (norm("mlp_norm"), f.relu2_mlp, allreduce("mlp_ar"))),
    Segment(once, (p2p(split=False), logits)),
)

_NEMOTRON_NAS = (
    FULL_HEAD,
    Segment(
        nas_blocks,
        (
            where(lambda at: at.heads > 0, NORM_1, a.gqa(low=False, gather=False), allreduce("ar_1")),
            where(lambda at: at.ffn > 0, NORM_2, f.gated_mlp(low=False), allreduce("ar_2")),
        ),
    ),
    Segment(once, (p2p(split=False), logits)),
)

_V4_EXPERTS = f.with_shared(SILENT, doubled=False)

ROWS: Mapping[str, Family] = {
    "LLAMA": _DENSE,
    "QWEN3VL": _DENSE,
    **{f"{name}{key}": row for name in ("MOE", "QWEN3VL_MOE") for key, row in {"": _MOE}.items()},
    "MOE/trtllm/large": _MOE_LARGE,
    "MOE/vllm/large": _MOE_LARGE,
    "MOE/sglang/large": _MOE_LARGE_SGLANG,
    **{f"{name}{key}": row for name in ("DEEPSEEK", "KIMIK25") for key, row in _DEEPSEEK_ROWS.items()},
    **{f"DEEPSEEKV32{key}": row for key, row in _SPARSE_ROWS.items()},
    "DEEPSEEKV4": Family(
        (
            FULL_HEAD,
            layers(
                a.hyper_connection("pre"),
                a.narrow_norm("attn_norm"),
                a.dsv4,
                a.hyper_connection("post"),
                a.narrow_norm("ffn_norm"),
                f.mega_moe_or(_V4_EXPERTS),
            ),
            TAIL,
        ),
        cp="tokens",
    ),
    "MINIMAXM3": Family((FULL_HEAD, layers(NORM_1, a.msa, NORM_2, f.with_shared(PLAIN)), TAIL)),
    "HYBRIDMOE": Family((FULL_HEAD, *_HYBRID_LAYERS), cp="tokens"),
    "STEP3P7": Family((FULL_HEAD, *_HYBRID_LAYERS, Segment(shared_expert_tail, (f.dense_mlp(),))), cp="tokens"),
    "GEMMA4MIX": Family((FULL_HEAD, *_GEMMA_LAYERS, *_GEMMA_TAIL), cp="tokens"),
    "QWEN35": Family((Segment(once, (embedding(sharded=True), allreduce("embedding_ar"))), *_QWEN_LAYERS, TAIL)),
    "KIMIK3": _kimi_k3(expanded=False),
    "KIMIK3/vllm": _kimi_k3(expanded=True),
    "NEMOTRONH": Family(_NEMOTRON_H),
    "NEMOTRONNAS": Family(_NEMOTRON_NAS),
}


def family_row(family: str, backend: str, large_ep: bool) -> Family:
    keys = ([f"{family}/{backend}/large"] if large_ep else []) + [f"{family}/{backend}", family]
    return next(ROWS[key] for key in keys if key in ROWS)
