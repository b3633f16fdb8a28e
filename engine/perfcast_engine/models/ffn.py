"""Feed-forward parts: dense, mixture of experts with fused exchange, shared experts (spec/05 7-9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from perfcast_engine.models.layers import Layer
from perfcast_engine.models.listing import Phase, mlp, split_mode
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.composite import Overlap
from perfcast_engine.ops.moe import MegaMoe, Moe
from perfcast_engine.ops.moe_dispatch import MoeDispatch

GATED = ("gate_ffn1_gemm", "act_gate", "ffn2_gemm")
DENSE = ("gate_up_gemm", "act", "down_gemm")
SHARED = ("shared_gate_up_gemm", "shared_act_gate", "shared_ffn2_gemm")
SHARED_DOWN = ("shared_gate_up_gemm", "shared_act_gate", "shared_down_gemm")
ROUTER_FROM = 128  # experts; Gemma 4 and Qwen3.5 list no router below
DISPATCH_FLAVOR = {"trtllm": "TrtllmAlltoall"}  # the others: CustomAllReduce
BASE_DISTRIBUTION = "power_law"
EPLB_PREFILL_ALPHA = "0.6"  # balanced experts load prefill as a flatter power law does


def gated_mlp(p: Phase, at: Layer, names: tuple[str, str, str] = GATED) -> Iterator[Op]:
    """A SwiGLU FFN, both projections split over all tensor-parallel ranks at once."""
    mode = split_mode(p, at.parts[1])
    yield from mlp(p, at, names, 2 * at.ffn // p.tp, at.ffn // p.tp, mode, low=at.quantised)


def gated_mlp_if_any(p: Phase, at: Layer) -> Iterator[Op]:
    """Norm, FFN and all-reduce of a block that may have none."""
    if at.ffn:
        yield from (p.norm(at, "add_norm_2"), *gated_mlp(p, at), p.allreduce(at, "ar_2"))


def leading_mlp(p: Phase, at: Layer) -> Iterator[Op]:
    yield from gated_mlp(p, at, ("gate_up_gemm", "act_gate", "down_gemm"))


def dense_mlp(p: Phase, at: Layer) -> Iterator[Op]:
    """A SwiGLU FFN whose width is split before it is doubled."""
    width = at.ffn // p.tp
    yield from mlp(p, at, DENSE, 2 * width, width, split_mode(p, at.parts[1]))


def mlp_beside_experts(p: Phase, at: Layer) -> Iterator[Op]:
    yield from dense_mlp(p, replace(at, prefix=f"{at.prefix}shared_mlp_"))


def relu2_mlp(p: Phase, at: Layer) -> Iterator[Op]:
    width = at.ffn // p.tp
    yield from mlp(p, at, ("mlp_up_gemm", "mlp_relu2", "mlp_down_gemm"), width, width, low=False)


def distribution(p: Phase) -> str:
    """The name of the expert load that tables are keyed by."""
    base, alpha, balanced = p.d.config.workload_distribution, p.row.alpha, p.d.config.eplb and bool(p.d.comm)
    if base != BASE_DISTRIBUTION:
        return base
    if balanced and p.d.backend == "trtllm":
        return f"{base}_{alpha}_eplb"
    return f"{base}_{EPLB_PREFILL_ALPHA if balanced and p.context else alpha}"


def router(p: Phase, at: Layer) -> Op:
    return p.gemm(at, "router_gemm", p.spec.moe.experts, p.spec.hidden, "bfloat16")


def dispatch(p: Phase, at: Layer, pre: bool, hidden: int, mode: str, **more: Any) -> Op:
    row, parallel = p.row, p.d.parallel
    tells = parallel.cp > 1 if row.tells_decode == "cp" else row.tells_decode
    fields: dict[str, Any] = {
        "attn_cp": parallel.cp if p.context or row.cp_in_decode else 1,
        "is_context": p.context or not tells,
        "flavor": DISPATCH_FLAVOR.get(p.d.backend, "CustomAllReduce"),
        "backend": p.d.backend,
        "attn_dp": parallel.attn_dp,
        "quant": row.dispatch_mode or mode,
    }
    name = f"{at.prefix}moe_{'pre' if pre else 'post'}_dispatch"
    return p.op(MoeDispatch, at, name, pre=pre, **placed(p, hidden), **(fields | more))


def placed(p: Phase, hidden: int) -> dict[str, int]:
    """The expert layer of the model and its spread over ranks."""
    moe = p.spec.moe
    return {"hidden": hidden, "topk": moe.topk, "experts": moe.experts, "moe_tp": p.d.moe_tp, "moe_ep": p.d.moe_ep}


def experts(p: Phase, at: Layer, hidden: int, mode: str, **more: Any) -> Op:
    fields = {"inter": p.spec.moe.inter, "attn_dp": p.d.parallel.attn_dp, "distribution": distribution(p)}
    return p.op(Moe, at, f"{at.prefix}moe", **placed(p, hidden), **fields, quant=mode, **more)


def exchanged(
    p: Phase, at: Layer, hidden: int | None = None, mode: str | None = None, gated: bool = True
) -> Iterator[Op]:
    """Experts between the two exchanges of their tokens, fused form."""
    hidden, mode = hidden or p.spec.hidden, mode or p.d.modes.moe
    yield dispatch(p, at, True, hidden, mode)
    yield experts(p, at, hidden, mode, gated=gated)
    yield dispatch(p, at, False, hidden, mode)


def routed_experts(p: Phase, at: Layer) -> Iterator[Op]:
    yield router(p, at)
    yield from exchanged(p, at)


def beside(p: Phase, routed_ops: Iterable[Op], shared: Iterable[Op]) -> Iterator[Op]:
    """Shared and routed experts: one after the other in prefill, on two streams in decode."""
    if p.context:
        yield from shared
        yield from routed_ops
    else:
        yield Overlap(name=f"{p.tag}moe_overlap", a=tuple(routed_ops), b=tuple(shared))


def shared_expert(p: Phase, at: Layer) -> Iterator[Op]:
    """A shared expert as wide as a routed one."""
    ranks, width = p.tp if p.row.shared_over == "tp" else p.d.moe_tp, p.spec.moe.inter
    yield from mlp(p, at, SHARED, 2 * width // ranks, width // ranks, shared_mode(p), low=False)


def shared_mode(p: Phase) -> str:
    asked, keeps = p.d.modes.gemm_explicit, p.row.keeps_shared
    kept = p.spec.quant.keep_shared and (keeps == "always" or (keeps == "unless asked" and not asked))
    return "bfloat16" if kept else p.d.modes.gemm


def experts_and_shared(p: Phase, at: Layer) -> Iterator[Op]:
    yield from beside(p, routed_experts(p, at), shared_expert(p, at))


def mega_experts_and_shared(p: Phase, at: Layer) -> Iterator[Op]:
    """DeepSeek-V4: exchange and experts in one kernel where that backend was chosen."""
    if p.d.config.moe_backend != "megamoe":
        yield from experts_and_shared(p, at)
        return
    dist = distribution(p)
    fields = {"inter": p.spec.moe.inter, "quant": p.d.modes.moe, "is_context": p.context}
    fields["distribution"] = "balanced" if dist == "uniform" else dist
    mega = p.op(MegaMoe, at, "moe", **placed(p, p.spec.hidden), **fields)
    yield from beside(p, [router(p, at), mega], shared_expert(p, at))


# --- families with expert layers of their own ------------------------------------------------------------------------


def experts_if_any(p: Phase, at: Layer) -> Iterator[Op]:
    """Routed experts beside the dense FFN of Gemma 4; the small variants have no router."""
    if p.spec.moe.experts >= ROUTER_FROM:
        yield router(p, at)
    if p.spec.moe.experts:
        kept = p.spec.quant.keep_mlp and not p.d.modes.gemm_explicit
        yield from exchanged(p, at, mode="bfloat16" if kept else p.d.modes.moe)


def latent_relu2_experts(p: Phase, at: Layer) -> Iterator[Op]:
    """Nemotron-H: a shared expert, and routed ones in a narrower space where the checkpoint has one."""
    x, h = p.spec.x, p.spec.hidden
    width, latent = x.moe_shared_expert_intermediate_size // p.tp, x.moe_latent_size
    yield from mlp(p, at, ("shared_up_gemm", "shared_relu2", "shared_down_gemm"), width, width)
    yield router(p, at)
    if latent:
        yield p.gemm(at, "fc1_latent_proj_gemm", latent // p.tp, h)
    yield from exchanged(p, at, hidden=latent or h, gated=False)
    if latent:
        yield p.gemm(at, "fc2_latent_proj_gemm", h, latent // p.tp, low=True)


def latent_experts(p: Phase, at: Layer) -> Iterator[Op]:
    """Kimi K3: routed experts in a narrower space, shared ones in the full space, all in bfloat16 but the experts."""
    x, h = p.spec.x, p.spec.hidden
    latent, width = x.routed_expert_hidden_size or h, x.num_shared_experts * p.spec.moe.inter
    yield router(p, at)
    yield p.gemm(at, "latent_down_gemm", latent, h, "bfloat16")
    yield p.mem(at, "latent_norm", 2 * latent, 2 * latent)
    yield from exchanged(p, at, hidden=latent)
    yield p.gemm(at, "latent_up_gemm", h, latent, "bfloat16")
    yield from mlp(p, at, SHARED_DOWN, 2 * width // p.tp, width // p.tp, "bfloat16", low=False)


@dataclass(frozen=True, slots=True)
class GatedSharedForm:
    """How a framework runs a Qwen3.5 MoE layer.

    ``decode``: order of its pieces: R router, D dispatch, X experts, S shared expert, M merge, P second dispatch;
    [a|b] runs a beside b. ``fuses_gate``: the gate of the shared expert is part of the merge. ``folds``: with attention
    DP the dispatch carries attention's all-reduce, without it there is no dispatch.
    """

    decode: str
    fuses_gate: bool = False
    folds: bool = False


PREFILL_ORDER = "RDXPSM"
GATED_SHARED_FORMS: Mapping[str, GatedSharedForm] = {
    "sglang": GatedSharedForm("D[RX|S]MP", fuses_gate=True, folds=True),
    "vllm": GatedSharedForm("[RDX|S]MP"),
    "trtllm": GatedSharedForm("RDXSMP"),
}


def gated_shared_experts(p: Phase, at: Layer) -> Iterator[Op]:
    """Experts and a gated shared expert in the framework's order."""
    pieces = _gated_shared_pieces(p, at)

    def listed(letters: str) -> tuple[Op, ...]:
        return tuple(op for letter in letters for op in pieces[letter])

    order = PREFILL_ORDER if p.context else GATED_SHARED_FORMS[p.d.backend].decode
    before, _, rest = order.partition("[")
    inner, _, after = rest.partition("]")
    yield from listed(before)
    a, b = map(listed, inner.split("|") if inner else ("", ""))
    if a and b:
        yield Overlap(name=f"{p.tag}{at.prefix}moe_overlap", a=a, b=b)
    else:
        yield from a + b
    yield from listed(after)


def _gated_shared_pieces(p: Phase, at: Layer) -> dict[str, list[Op]]:
    d, h, width, mode = p.d, p.spec.hidden, p.spec.x.shared_expert_inter_size, p.d.modes.moe
    form = GATED_SHARED_FORMS[d.backend]
    exchange: dict[str, Any] = {"sms": 20, "attn_ar_modeled": True, "is_context": p.context, "attn_cp": 1}
    local = form.folds and d.parallel.attn_dp == 1
    shared = list(mlp(p, at, SHARED_DOWN, 2 * width // p.tp, width // p.tp, split_mode(p, "shared"))) if width else []
    if width and not form.fuses_gate:
        gate = p.gemm(at, "shared_expert_gate_gemm", 1, h, "bfloat16", below_grid_sol=True)
        shared = [gate, *shared, p.mem(at, "shared_expert_gate_mul", h, h)]
    pre = dispatch(p, at, True, h, mode, token_div=p.tp if p.context else 1, **exchange)
    return {
        "R": [router(p, at)] if p.spec.moe.experts >= ROUTER_FROM else [],
        "D": [] if local else [pre],
        "X": [experts(p, at, h, mode, is_context=p.context, moe_backend=d.config.moe_backend)],
        "P": [dispatch(p, at, False, h, mode, **exchange)],
        "S": shared,
        "M": [p.mem(at, "shared_merge", (3 if form.fuses_gate else 2) * h, h)] if width else [],
    }


def gdn_ffn(p: Phase, at: Layer) -> Iterator[Op]:
    yield from _prefixed_ffn(p, replace(at, prefix="gdn_"))


def full_ffn(p: Phase, at: Layer) -> Iterator[Op]:
    yield from _prefixed_ffn(p, replace(at, prefix="full_"))


def _prefixed_ffn(p: Phase, at: Layer) -> Iterator[Op]:
    """The all-reduce behind attention unless the dispatch carries it, norm and FFN of a Qwen3.5 layer."""
    sparse = p.spec.moe.experts > 0
    if not (GATED_SHARED_FORMS[p.d.backend].folds and p.d.parallel.attn_dp > 1 and sparse):
        yield p.allreduce(at, "ar")
    yield p.norm(at, "ffn_norm")
    yield from gated_shared_experts(p, at) if sparse else (*gated_mlp(p, at), p.allreduce(at, "ffn_ar"))


PARTS = (
    *(gated_mlp, gated_mlp_if_any, leading_mlp, dense_mlp, mlp_beside_experts, relu2_mlp, routed_experts),
    *(experts_and_shared, mega_experts_and_shared, experts_if_any),
    *(latent_relu2_experts, latent_experts, gdn_ffn, full_ffn),
)
