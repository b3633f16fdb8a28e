"""The vision tower in front of a language model and the projectors between them (spec/05 9.2)."""

from __future__ import annotations

from collections.abc import Iterator

from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.layers import Layer
from perfcast_engine.models.listing import Family, Phase
from perfcast_engine.ops.attention import EncoderAttention
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.collective import AllReduce


def encoder_ops(d: Deployment) -> Iterator[Op]:
    """Operators of the tower: layers, then one projector an instance, then the exchange of images that ranks encoded
    apart. Empty for a language model."""
    x = d.spec.x
    if not x.depth or d.config.language_only:
        return
    p, ranks = Phase(d, Family(""), "encoder_", True), 1 if d.config.encoder_dp else d.tp
    yield from _tower(p, Layer(count=x.depth), ranks)
    yield from _projectors(p, Layer(count=x.projector_n_instances), ranks)
    if d.config.encoder_dp and d.tp > 1:
        elements = x.out_hidden_size * x.projector_n_instances * d.tp
        yield p.collective(Layer(), "dp_all_gather", "all_gather", elements, d.tp)


def _tower(p: Phase, at: Layer, ranks: int) -> Iterator[Op]:
    x = p.spec.x
    width, heads, dim, ffn = x.hidden_size, x.num_heads // ranks, x.hidden_size // x.num_heads, x.intermediate_size
    own = x.num_heads * dim
    yield p.mem(at, "add_norm_1", 2 * width, 2 * width)
    yield p.gemm(at, "qkv_gemm", 3 * own // ranks, width, "bfloat16")
    yield p.op(EncoderAttention, at, "attention", heads=heads, head_dim=dim)
    yield p.gemm(at, "proj_gemm", width, own // ranks, "bfloat16", low=True)
    yield _allreduce(p, at, "ar_1", width, ranks)
    yield p.mem(at, "add_norm_2", 2 * width, 2 * width)
    yield p.gemm(at, "ffn1_gemm", ffn // ranks, width, "bfloat16")
    yield p.mem(at, "act", ffn // ranks, ffn // ranks)
    yield p.gemm(at, "ffn2_gemm", width, ffn // ranks, "bfloat16", low=True)
    yield _allreduce(p, at, "ar_2", width, ranks)
    if x.partial_rotary_factor > 0:
        yield p.mem(at, "rope_apply", 6 * heads * dim, 6 * heads * dim)


def _projectors(p: Phase, at: Layer, ranks: int) -> Iterator[Op]:
    (first_in, first_out), (second_in, second_out) = p.spec.x.projector_dims
    yield p.gemm(at, "projector_fc0_gemm", first_out // ranks, first_in, "bfloat16")
    yield p.mem(at, "projector_fc0_act", first_out // ranks, first_out // ranks)
    yield p.gemm(at, "projector_fc1_gemm", second_out, second_in // ranks, "bfloat16")
    yield _allreduce(p, at, "projector_ar", second_out, ranks)


def _allreduce(p: Phase, at: Layer, name: str, width: int, ranks: int) -> Op:
    return p.op(AllReduce, at, name, hidden=width, gpus=ranks)
