"""Token mixers with a state of constant size: Mamba2, gated delta net, Kimi delta attention (spec/05 7, 9.9, 9.10)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from perfcast_engine.models.attention import DOWNSCALE, expands_heads, latent_attention, module
from perfcast_engine.models.layers import Layer
from perfcast_engine.models.listing import Phase, logits, mlp, sharded_embedding, split_mode
from perfcast_engine.ops.attention import GenerationAttention
from perfcast_engine.ops.base import Op, Role
from perfcast_engine.ops.state_space import Gdn, Kda, Mamba2

# phase -> (operator, kernel) of the convolution and of the recurrence
MAMBA_KERNELS = {
    "context": (("mamba_conv1d", "causal_conv1d_fn"), ("mamba_ssm", "mamba_chunk_scan_combined")),
    "generation": (("mamba_conv1d", "causal_conv1d_update"), ("mamba_ssm", "selective_state_update")),
}
GDN_KERNELS = {
    "context": (("gdn_conv1d", "causal_conv1d_fn"), ("gdn_scan", "chunk_gated_delta_rule")),
    "generation": (
        ("gdn_conv1d", "causal_conv1d_update"),
        ("gdn_recurrence", "fused_sigmoid_gating_delta_rule_update"),
    ),
}
# (phase, framework), or phase for the frameworks not listed
KDA_KERNELS: Mapping[tuple[str, str] | str, tuple[tuple[str, str], ...]] = {
    "context": (("kda_conv1d", "causal_conv1d_fn_qkv3"), ("kda_scan", "chunk_kda")),
    ("context", "vllm"): (("kda_conv1d", "causal_conv1d_fn_qkv3"), ("kda_scan", "flashkda_fwd")),
    "generation": (("kda_conv1d", "causal_conv1d_update"), ("kda_recurrent", "fused_recurrent_kda_packed_decode")),
    ("generation", "vllm"): (("kda_fused_decode", "fused_kda_decode"),),
    "verify": (("kda_conv1d", "causal_conv1d_update"), ("kda_verify", "fused_sigmoid_gating_delta_rule_update")),
    ("verify", "vllm"): (("kda_conv1d", "causal_conv1d_update"), ("kda_verify", "fused_recurrent_kda")),
}
FUSES_OUTPUT_NORM = "fused_kda_decode"  # needs no norm of its own behind it
# the Kimi K3 draft model (spec/05 9.10)
DRAFT_LAYERS, DRAFT_HEADS, DRAFT_FFN = 5, 64, 14336


def mamba2(p: Phase, at: Layer) -> Iterator[Op]:
    x, h = p.spec.x, p.spec.hidden
    heads, groups = x.mamba_num_heads // p.tp, max(x.n_groups // p.tp, 1)
    inner = heads * x.mamba_head_dim
    yield p.gemm(at, "mamba_in_proj_gemm", 2 * inner + 2 * groups * x.ssm_state_size + heads, h)
    for name, kernel in MAMBA_KERNELS[p.name]:
        yield p.op(
            Mamba2,
            at,
            name,
            kernel=kernel,
            phase=p.name,
            d_model=h,
            d_state=x.ssm_state_size,
            d_conv=x.conv_kernel,
            nheads=x.mamba_num_heads,
            head_dim=x.mamba_head_dim,
            n_groups=x.n_groups,
            chunk_size=x.chunk_size,
        )
    yield p.gemm(at, "mamba_out_proj_gemm", h, inner)


def delta_net(p: Phase, at: Layer) -> Iterator[Op]:
    x, h = p.spec.x, p.spec.hidden
    keys, values = x.linear_num_key_heads, x.linear_num_value_heads
    value_width, gemm = values * x.linear_value_head_dim, split_mode(p, at.parts[0])
    yield p.gemm(at, "gdn_in_proj_gemm", (2 * keys * x.linear_key_head_dim + 2 * value_width) // p.tp, h, gemm)
    yield p.gemm(at, "gdn_in_proj_ba_gemm", 2 * values // p.tp, h, gemm, below_grid_sol=True)
    for name, kernel in GDN_KERNELS[p.name]:
        yield p.op(
            Gdn,
            at,
            name,
            kernel=kernel,
            phase=p.name,
            d_model=h,
            d_conv=x.linear_conv_kernel_dim,
            num_k_heads=keys // p.tp,
            head_k_dim=x.linear_key_head_dim,
            num_v_heads=values // p.tp,
            head_v_dim=x.linear_value_head_dim,
            ssm_dtype=x.ssm_dtype or "float32",
        )
    yield p.gemm(at, "gdn_out_proj_gemm", h, value_width // p.tp, gemm, low=True)


def kda(p: Phase, at: Layer) -> Iterator[Op]:
    x, h, drafted = p.spec.x, p.spec.hidden, p.d.nextn
    heads = x.kda_num_heads // p.tp
    width = heads * x.kda_head_dim
    phase = "verify" if drafted and not p.context else p.name
    kernels = KDA_KERNELS.get((phase, p.d.backend)) or KDA_KERNELS[phase]
    yield p.gemm(at, "kda_qkvg_gemm", 4 * width, h)
    yield p.gemm(at, "kda_bfa_gemm", x.kda_num_heads + x.kda_head_dim, h)
    yield p.gemm(at, "kda_fb_gemm", width, x.kda_head_dim)
    for name, kernel in kernels:
        yield p.op(
            Kda,
            at,
            name,
            kernel=kernel,
            phase=phase,
            d_model=h,
            d_conv=x.kda_conv_kernel,
            num_k_heads=heads,
            head_k_dim=x.kda_head_dim,
            num_v_heads=heads,
            head_v_dim=x.kda_head_dim,
            draft_tokens=drafted + 1 if phase == "verify" else 0,
        )
    if kernels[-1][1] != FUSES_OUTPUT_NORM:
        yield p.mem(at, "kda_onorm", 2 * width, width)
    yield p.gemm(at, "kda_o_gemm", h, width, low=True)


def gated_mla(p: Phase, at: Layer) -> Iterator[Op]:
    """Latent attention of Kimi K3, its output gated; one module where the kernel is a dense one."""
    x, h = p.spec.x, p.spec.hidden
    out = p.spec.heads * x.v_head_dim // p.tp
    yield p.gemm(at, "mla_downscale_gemm", x.q_lora_rank + x.kv_lora_rank + x.qk_rope_head_dim, h)
    parts = gated_mla_parts(p, at, out)
    yield from [module(p, at, p.d.modes.gemm, parts)] if expands_heads(p) else parts
    yield p.gemm(at, "mla_gate_gemm", out, h)
    yield p.mem(at, "mla_gate_mul", 2 * out, out)


def gated_mla_parts(p: Phase, at: Layer, out: int) -> Iterator[Op]:
    x, heads = p.spec.x, p.spec.heads
    yield p.gemm(at, "mla_q_b_gemm", heads * (x.qk_nope_head_dim + x.qk_rope_head_dim) // p.tp, x.q_lora_rank)
    if p.context:
        yield p.gemm(at, "mla_kv_b_gemm", heads * (x.qk_nope_head_dim + x.v_head_dim) // p.tp, x.kv_lora_rank)
    yield from latent_attention(p, at, heads // p.tp, "bfloat16" if p.d.modes.gemm == "bfloat16" else "fp8")
    yield p.gemm(at, "mla_o_gemm", p.spec.hidden, out, low=True)


def attention_residual(p: Phase, at: Layer) -> Iterator[Op]:
    """Kimi K3 mixes the residuals of earlier layers in before each of the two sublayers."""
    if p.spec.x.attn_res_block_size:
        h = p.spec.hidden
        yield p.mem(replace(at, count=2 * at.count), "attn_res", 4 * h, 2 * h)


def draft_model(verifier: Phase, at: Layer) -> Iterator[Op]:
    """The separately trained draft model of Kimi K3: drafts nextn of every nextn + 1 tokens of a decode pass."""
    n, h, tp = verifier.d.nextn, verifier.spec.hidden, verifier.tp
    if verifier.context or not n:
        return
    p = replace(verifier, tag="draft_")
    every, once = n / (n + 1), 1 / (n + 1)
    model, layers, twice = (Layer(count=c * every) for c in (1, DRAFT_LAYERS, 2 * DRAFT_LAYERS))
    yield from sharded_embedding(p, model)
    yield p.norm(twice, "norm")
    if expands_heads(p):
        yield p.gemm(layers, "downscale_gemm", DOWNSCALE, h)
        yield p.gemm(layers, "q_b_gemm", DRAFT_HEADS * 192 // tp, 1536)
        kv_heads, dim, kv_width = DRAFT_HEADS // tp, 128, 576
    else:
        yield p.gemm(layers, "qkv_gemm", (DRAFT_HEADS * 64 + 2 * 16 * 64) // tp, h)
        kv_heads, dim, kv_width = max(1, 16 // tp), 64, 2048 // tp
    shape = {"heads": DRAFT_HEADS // tp, "kv_heads": kv_heads, "head_dim": dim}
    yield p.op(GenerationAttention, layers, "attention", role=Role.OTHER, kv_quant=p.d.modes.kv, **shape)
    yield p.gemm(layers, "proj_gemm", h, DRAFT_HEADS * dim // tp, low=True)
    yield from mlp(p, layers, ("gate_up_gemm", "act_gate", "down_gemm"), 2 * DRAFT_FFN // tp, DRAFT_FFN // tp)
    yield p.allreduce(twice, "ar")
    yield p.gemm(Layer(count=DRAFT_LAYERS * once), "kv_proj_gemm", kv_width, h)
    yield from logits(p, Layer(count=once))


PARTS = (mamba2, delta_net, kda, gated_mla, attention_residual, draft_model)
