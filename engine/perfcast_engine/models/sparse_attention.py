"""Token mixers that read a part of their cache, each measured as one unit (spec/05 9.4-9.6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from perfcast_engine.models.attention import attend
from perfcast_engine.models.layers import Layer
from perfcast_engine.models.listing import Part, Phase
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.dsa import DsaContext, DsaGeneration
from perfcast_engine.ops.dsv4 import Dsv4Context, Dsv4Generation
from perfcast_engine.ops.mhc import Mhc
from perfcast_engine.ops.msa import MsaContext, MsaGeneration

MSA_SHAPE = {
    "v_head_dim": 128,
    "index_heads": 4,
    "index_head_dim": 128,
    "index_topk": 2048,
    "block_size": 128,
    "donor_architecture": "GlmMoeDsaForCausalLM",
}
FULL_INDEXER_ONLY = frozenset({"trtllm", "vllm"})  # price every DSA layer with its own top-k index


def dsa(p: Phase, at: Layer) -> Iterator[Op]:
    """DeepSeek sparse attention, one unit."""
    gemm, keep, modes = p.d.modes.gemm, p.d.keep_attn, p.d.modes
    groups = tuple("bfloat16" if group in keep else gemm for group in ("q", "kv", "o", "indexer"))
    fields = {
        "heads": p.spec.heads // p.tp,
        "kv_quant": modes.kv,
        "gemm_quant": groups[0] if len(set(groups)) == 1 else groups[2],
        "architecture": p.spec.arch,
        "full_fraction": 1.0 if p.d.backend in FULL_INDEXER_ONLY else p.spec.indexer_full_fraction,
        "projection_quants": groups,
    }
    if p.context:
        yield attend(p, at, DsaContext, **fields, fmha_quant=modes.fmha, cp=p.d.parallel.cp)
    else:
        yield attend(p, at, DsaGeneration, **fields, fmha_quant="bfloat16")


def msa(p: Phase, at: Layer) -> Iterator[Op]:
    """MiniMax sparse attention, one unit (spec/05 9.6)."""
    spec, modes = p.spec, p.d.modes
    yield attend(
        p,
        at,
        MsaContext if p.context else MsaGeneration,
        **MSA_SHAPE,
        heads=max(1, spec.heads // p.tp),
        kv_heads=max(1, spec.kv_heads // p.tp),
        hidden=spec.hidden,
        head_dim=spec.head_dim,
        kv_quant=modes.kv,
        fmha_quant=modes.fmha,
        gemm_quant=modes.gemm,
    )


def dsv4(p: Phase, at: Layer) -> Iterator[Op]:
    """DeepSeek-V4 attention, one unit a compression ratio; layers without compression count as the stronger one."""
    spec, x, modes = p.spec, p.spec.x, p.d.modes
    counts: dict[int, int] = {ratio: 0 for ratio, _ in x.compress_runs if ratio}
    for ratio, n in x.compress_runs:
        counts[ratio or 128] = counts.get(ratio or 128, 0) + n
    fields = {
        "heads": spec.heads // p.tp,
        "native_heads": spec.heads,
        "tp": p.tp,
        "kv_quant": modes.kv,
        "fmha_quant": modes.fmha,
        "gemm_quant": modes.gemm,
        "architecture": spec.arch,
        "hidden": spec.hidden,
        "q_lora_rank": x.q_lora_rank,
        "o_lora_rank": x.o_lora_rank,
        "head_dim": x.head_dim,
        "rope_head_dim": x.qk_rope_head_dim,
        "index_heads": x.index_n_heads,
        "index_head_dim": x.index_head_dim,
        "index_topk": x.index_topk,
        "window": x.sliding_window,
        "o_groups": max(1, x.o_groups // p.tp),
    }
    for ratio, n in counts.items():
        kind, layers = {4: "csa", 128: "hca"}[ratio], replace(at, count=n)
        if p.context:
            yield attend(p, layers, Dsv4Context, **fields, kind=kind, cp=p.split)
        else:
            yield attend(p, layers, Dsv4Generation, **fields, kind=kind)


def mhc_pre(p: Phase, at: Layer) -> Iterator[Op]:
    yield hyper_connection(p, at, "pre")


def mhc_post(p: Phase, at: Layer) -> Iterator[Op]:
    yield hyper_connection(p, at, "post")


def hyper_connection(p: Phase, at: Layer, half: Literal["pre", "post"]) -> Op:
    x, h, arch = p.spec.x, p.spec.hidden, p.spec.arch
    shape = {"hc_mult": x.hc_mult, "hidden": h, "architecture": arch, "sinkhorn_iters": x.hc_sinkhorn_iters}
    return p.op(Mhc, at, f"mhc_{half}", half=half, seq_split=p.split, **shape)


def narrow_norm(name: str) -> Part:
    """A norm that reads and writes the hidden state once."""
    return lambda p, at: [p.mem(at, name, p.spec.hidden, p.spec.hidden)]


def shared_norm(name: str) -> Part:
    """A norm whose tokens context-parallel ranks share though other operators see all of them."""
    return lambda p, at: [p.norm(at, name, p.d.parallel.cp if p.context else 1)]


PARTS = (dsa, msa, dsv4, mhc_pre, mhc_post)
