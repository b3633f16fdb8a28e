"""Token mixers over a KV cache: dense and latent attention (spec/05 7, 9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfcast_engine import quant
from perfcast_engine.models.kv_cache import kv_curve
from perfcast_engine.models.layers import Layer
from perfcast_engine.models.listing import OpT, Phase, split_mode
from perfcast_engine.ops.attention import ContextAttention, GenerationAttention
from perfcast_engine.ops.base import Op, Role
from perfcast_engine.ops.composite import Fallback, Overlap
from perfcast_engine.ops.mla import (
    ContextMla,
    ContextMlaModule,
    GenerationMla,
    GenerationMlaModule,
    MlaBmm,
    WideEpContextMla,
    WideEpGenerationMla,
)
from perfcast_engine.profiles import MLA_OF_128_HEADS

# DeepSeek-V3, whatever the config says (spec/05 9.3)
DOWNSCALE = 2112  # q_lora_rank + kv_lora_rank + rope
Q_LORA, KV_LORA, Q_HEAD, KV_HEAD, V_HEAD, ROPE, NOPE = 1536, 512, 192, 256, 128, 64, 128
EXPANDS_HEADS = frozenset({"vllm"})  # run latent attention by a dense kernel


def dense_attention(p: Phase, at: Layer, cp: int | None = None) -> Iterator[Op]:
    """The attention kernel of ``at``: prefill over all new tokens, decode over the cache."""
    at = replace(at, count=at.count * at.attention_share)
    modes, cp = p.d.modes, p.split if cp is None else cp
    fields = {"heads": at.heads // p.tp, "kv_heads": at.kv_heads, "head_dim": at.kernel_dim or at.qk}
    prefill = {"fmha_quant": modes.fmha, "qk_norm": at.qk_norm, "cp": cp} if p.context else {}
    kind = ContextAttention if p.context else GenerationAttention
    yield attend(p, at, kind, **fields, window=at.window, kv_quant=modes.kv, **prefill)


def attend(p: Phase, at: Layer, kind: type[OpT], /, **fields: Any) -> OpT:
    """The operator that mixed steps price apart."""
    return p.op(kind, at, "attention", role=Role.ATTENTION, **fields)


def gqa(p: Phase, at: Layer) -> Iterator[Op]:
    """Grouped-query attention between its projections."""
    h, heads, mode = p.spec.hidden, at.heads // p.tp, split_mode(p, at.parts[0])
    kv = at.kv_heads * (at.qk if at.keys_are_values else at.qk + at.v)
    queries, out = at.heads * at.qk // p.tp, at.heads * at.v // p.tp
    if at.gated_q:
        queries, out = 2 * heads * at.qk, heads * at.v
    yield p.gemm(at, "qkv_gemm", queries + kv, h, mode)
    yield from dense_attention(p, at)
    if not at.prefix:
        yield from cp_gather(p, at)
    if p.spec.x.use_head_wise_attn_gate:
        yield p.gemm(at, "attn_gate_gemm", heads, h)
        yield p.mem(at, "attn_gate", out + heads, out)
    yield p.gemm(at, "proj_gemm", h, out, mode, low=at.quantised)


def gqa_if_any(p: Phase, at: Layer) -> Iterator[Op]:
    """Norm, attention and all-reduce of a block that may have none."""
    if at.heads:
        yield from (p.norm(at, "add_norm_1"), *gqa(p, at), p.allreduce(at, "ar_1"))


def cp_gather(p: Phase, at: Layer) -> Iterator[Op]:
    """Context-parallel ranks exchange the new KV entries of every layer."""
    if p.context and p.d.parallel.cp > 1:
        per_layer = float(kv_curve(p.d, per_stage=False).bytes(1)) / p.spec.layers
        yield cp_exchange(p, at, "cp_all_gather", per_layer)


def cp_exchange(p: Phase, at: Layer, name: str, kv_bytes: float) -> Op:
    comm = p.d.modes.comm
    return p.collective(at, name, "all_gather", kv_bytes / quant.COMM[comm].bytes, p.d.parallel.cp, comm)


def cp_gather_kind(p: Phase, at: Layer) -> Iterator[Op]:
    """The same for layers of one of several kinds, by their own heads and widths."""
    if p.context and p.d.parallel.cp > 1:
        each = quant.KV_CACHE[p.d.modes.kv].bytes
        yield cp_exchange(p, at, f"cp_all_gather_{at.prefix.rstrip('_')}", at.kv_heads * (at.qk + at.v) * each)


# --- latent attention ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MlaModes:
    """Gemm modes of the projections of DeepSeek attention, by what the checkpoint leaves in bfloat16."""

    q: str
    kv: str
    o: str
    down: str
    bmm: str

    @property
    def uniform(self) -> bool:
        return self.q == self.kv == self.o


def mla_modes(p: Phase) -> MlaModes:
    gemm, keep = p.d.modes.gemm, p.d.keep_attn
    q, kv, o = ("bfloat16" if group in keep else gemm for group in ("q", "kv", "o"))
    down = "bfloat16" if {"q", "kv"} <= keep else gemm
    return MlaModes(q, kv, o, down, "fp8" if "bfloat16" not in (kv, gemm) else "bfloat16")


def kernel_heads(p: Phase) -> int:
    """Query heads that the latent-attention kernels are asked for."""
    return (128 if p.d.profile[MLA_OF_128_HEADS] else p.spec.heads) // p.tp


def latent_kernel(p: Phase, at: Layer, heads: int, bmm: str, pre: Sequence[Op] = ()) -> Iterator[Op]:
    """The attention kernel; in decode between the absorbed projections, the first of which ``pre`` may replace."""
    kv, fmha = p.d.modes.kv, p.d.modes.fmha
    if p.context:
        yield attend(p, at, ContextMla, heads=heads, kv_quant=kv, fmha_quant=fmha, cp=p.split)
        return
    yield from pre or (absorbed(p, at, "bmm_pre", bmm),)
    yield attend(p, at, GenerationMla, heads=heads, kv_quant=kv)
    yield absorbed(p, at, "bmm_post", bmm)


def absorbed(p: Phase, at: Layer, name: str, bmm: str) -> Op:
    return p.op(MlaBmm, at, name, heads=p.spec.heads // p.tp, quant=bmm, is_pre=name == "bmm_pre")


def expanded_kernel(p: Phase, at: Layer) -> Iterator[Op]:
    """Latent attention run by a dense kernel over expanded heads."""
    spec = p.spec
    dim = spec.x.v_head_dim or spec.head_dim
    layer = replace(at, heads=spec.heads, kv_heads=spec.kv_heads // p.tp, qk=dim, gated_q=False, qk_norm=False)
    yield from dense_attention(p, layer, 1)


def module(p: Phase, at: Layer, gemm: str, parts: Iterable[Op]) -> Op:
    """The latent-attention block as one measured unit, or its parts where the unit has no data."""
    modes, heads = p.d.modes, p.spec.heads
    primary = p.op(
        ContextMlaModule if p.context else GenerationMlaModule,
        replace(at, count=at.count / p.split),
        "mla_module",
        heads=heads // p.tp,
        native_heads=heads,
        kv_quant=modes.kv,
        fmha_quant=modes.fmha,
        gemm_quant=gemm,
    )
    return Fallback(name=f"{p.tag}mla_block", primary=primary, fallback=tuple(parts))


def mla(p: Phase, at: Layer) -> Iterator[Op]:
    """DeepSeek attention: one module where all projections run in one mode, else operator by operator."""
    modes = mla_modes(p)
    parts = granular_mla(p, at, modes)
    yield from [module(p, at, modes.q, parts)] if modes.uniform else parts
    yield from cp_gather(p, at)


def granular_mla(p: Phase, at: Layer, modes: MlaModes) -> Iterator[Op]:
    h, heads = p.spec.hidden, p.spec.heads
    yield p.gemm(at, "downscale_gemm", DOWNSCALE, h, modes.down)
    yield p.gemm(at, "q_b_proj_gemm", heads * Q_HEAD // p.tp, Q_LORA, modes.q)
    if p.context:
        yield p.gemm(at, "kv_b_proj_gemm", heads * KV_HEAD // p.tp, KV_LORA, modes.kv)
    yield from latent_attention(p, at, kernel_heads(p), modes.bmm)
    yield p.gemm(at, "proj_gemm", h, heads * V_HEAD // p.tp, modes.o)


def latent_attention(p: Phase, at: Layer, heads: int, bmm: str) -> Iterator[Op]:
    yield from expanded_kernel(p, at) if expands_heads(p) else latent_kernel(p, at, heads, bmm)


def expands_heads(p: Phase) -> bool:
    return p.d.backend in EXPANDS_HEADS


def overlapped_mla(p: Phase, at: Layer) -> Iterator[Op]:
    """DeepSeek attention under large EP of TensorRT-LLM: rotary embedding beside the absorbed projection."""
    h, heads, x, modes = p.spec.hidden, p.spec.heads, p.spec.x, mla_modes(p)
    lora, rope, v = x.kv_lora_rank or KV_LORA, x.qk_rope_head_dim or ROPE, x.v_head_dim or V_HEAD
    yield p.gemm(at, "downscale_gemm", Q_LORA + lora + rope, h, modes.down)
    yield p.mem(at, "q_a_layernorm", Q_LORA, Q_LORA)
    yield p.gemm(at, "q_b_proj_gemm", heads * (NOPE + rope) // p.tp, Q_LORA, modes.q)
    if p.context:
        yield p.gemm(at, "kv_b_proj_gemm", heads * (NOPE + v) // p.tp, lora, modes.kv)
    pre = Overlap(
        name=f"{p.tag}bmm_rope_overlap",
        a=(absorbed(p, at, "bmm_pre", modes.bmm),),
        b=(p.mem(at, "rope_kvcache", lora + rope, lora + rope),),
    )
    yield from latent_kernel(p, at, kernel_heads(p), modes.bmm, (pre,))
    yield p.gemm(at, "proj_gemm", h, heads * v // p.tp, modes.o)


def wide_mla(p: Phase, at: Layer) -> Iterator[Op]:
    """DeepSeek attention under large EP of SGLang, measured as one unit behind the down-projection."""
    backend, modes = p.d.config.attention_backend, p.d.modes
    fields = {
        "heads": 128 // p.tp,
        "kv_quant": modes.kv,
        "fmha_quant": modes.fmha,
        "attn_backend": "flashinfer" if backend in (None, "default") else backend,
    }
    if p.context:
        yield attend(p, at, WideEpContextMla, **fields, cp=p.split)
        yield from cp_gather(p, at)
    else:
        yield attend(p, at, WideEpGenerationMla, **fields)


def wide_projection(p: Phase, at: Layer) -> Iterator[Op]:
    yield p.gemm(at, "qkv_a_proj_gemm", DOWNSCALE, p.spec.hidden, mla_modes(p).down, token_div=p.tp if p.context else 1)


def wide_downscale(p: Phase, at: Layer) -> Iterator[Op]:
    yield p.gemm(at, "downscale_gemm", DOWNSCALE, p.spec.hidden, mla_modes(p).down)


def tp_gather(p: Phase, at: Layer) -> Iterator[Op]:
    """Attention runs tensor-parallel between experts that do not: their tokens are gathered before it."""
    if p.context and p.tp > 1:
        yield p.collective(at, "tp_all_gather", "all_gather", p.spec.hidden, p.tp)


def tp_scatter(p: Phase, at: Layer) -> Iterator[Op]:
    if p.context and p.tp > 1:
        yield p.collective(at, "tp_reduce_scatter", "reduce_scatter", p.spec.hidden, p.tp)


PARTS = (
    *(dense_attention, gqa, gqa_if_any, cp_gather_kind, mla, overlapped_mla, wide_projection, wide_downscale, wide_mla),
    *(tp_gather, tp_scatter),
)
