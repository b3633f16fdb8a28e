"""Feed-forward parts: dense, mixture of experts fused or under a large-EP all-to-all, shared experts (spec/05 7-9)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from perfcast_engine.models.attention import split_mode
from perfcast_engine.models.layers import Layer
from perfcast_engine.models.listing import Part, Phase, mlp
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.comm_backends import comm_backend, wire_dtype
from perfcast_engine.ops.composite import Overlap
from perfcast_engine.ops.megamoe import MegaMoe
from perfcast_engine.ops.moe import Moe
from perfcast_engine.ops.moe_a2a import MoeAllToAll
from perfcast_engine.ops.moe_dispatch import MoeDispatch
from perfcast_engine.ops.moe_experts import MoeExperts

GATED = ("gate_ffn1_gemm", "act_gate", "ffn2_gemm")
DENSE = ("gate_up_gemm", "act", "down_gemm")
SHARED = ("shared_gate_up_gemm", "shared_act_gate", "shared_ffn2_gemm")
DISPATCH_FLAVOR = {"trtllm": "TrtllmAlltoall"}  # the others: CustomAllReduce
BASE_DISTRIBUTION = "power_law"
EPLB_PREFILL_ALPHA = "0.6"  # balanced experts load prefill as a flatter power law does


@dataclass(frozen=True, slots=True)
class Routing:
    """How a family routes tokens to its experts.

    ``alpha`` of the power law of expert loads; ``cp_in_decode``: decode dispatch is told of context-parallel ranks;
    ``told_phase``: dispatch is told that a pass is decode, never, always, or only beside context-parallel ranks;
    ``mode``: what the dispatch is told the experts run in, None for their mode.
    """

    alpha: str = "1.01"
    cp_in_decode: bool = False
    told_phase: str = "never"
    mode: str | None = None


def gated_mlp(names: tuple[str, str, str] = GATED, *, low: bool = True, mode: str | None = None) -> Part:
    """A SwiGLU FFN, both projections split over all tensor-parallel ranks at once."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        gemm = split_mode(p, mode) if mode else None
        yield from mlp(p, at, names, 2 * at.ffn // p.tp, at.ffn // p.tp, gemm, low=low)

    return part


def dense_mlp(prefix: str = "", mode: str | None = None) -> Part:
    """A SwiGLU FFN whose width is split before it is doubled."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        gemm, width = split_mode(p, mode) if mode else None, at.ffn // p.tp
        yield from mlp(p, replace(at, prefix=at.prefix + prefix), DENSE, 2 * width, width, gemm)

    return part


def relu2_mlp(p: Phase, at: Layer) -> Iterator[Op]:
    width = at.ffn // p.tp
    yield from mlp(p, at, ("mlp_up_gemm", "mlp_relu2", "mlp_down_gemm"), width, width, low=False)


def distribution(p: Phase, routing: Routing) -> str:
    """The name of the expert load that tables are keyed by."""
    base = p.d.distribution
    if base != BASE_DISTRIBUTION:
        return base
    alpha, balanced = routing.alpha, p.d.eplb and p.comm
    if balanced and p.d.backend == "trtllm":
        return f"{base}_{alpha}_eplb"
    return f"{base}_{EPLB_PREFILL_ALPHA if balanced and p.context else alpha}"


def router(p: Phase, at: Layer) -> Op:
    return p.gemm(at, "router_gemm", p.spec.moe.experts, p.spec.hidden, "bfloat16")


def dispatch(p: Phase, at: Layer, routing: Routing, pre: bool, hidden: int, mode: str, **more: Any) -> Op:
    cp = p.d.parallel.cp
    tells = {"never": False, "always": True, "with_cp": cp > 1}[routing.told_phase]
    fields: dict[str, Any] = {
        "attn_cp": cp if p.context or routing.cp_in_decode else 1,
        "is_context": p.context or not tells,
        "flavor": DISPATCH_FLAVOR.get(p.d.backend, "CustomAllReduce"),
        "backend": p.d.backend,
        "quant": routing.mode or mode,
    }
    name = f"{at.prefix}moe_{'pre' if pre else 'post'}_dispatch"
    return p.op(MoeDispatch, at, name, pre=pre, **placed(p, hidden), attn_dp=p.d.parallel.attn_dp, **(fields | more))


def placed(p: Phase, hidden: int) -> dict[str, int]:
    """The expert layer of the model and its spread over ranks."""
    moe = p.spec.moe
    return {"hidden": hidden, "topk": moe.topk, "experts": moe.experts, "moe_tp": p.d.moe_tp, "moe_ep": p.d.moe_ep}


def experts(p: Phase, at: Layer, routing: Routing, hidden: int, mode: str, **more: Any) -> Op:
    return p.op(
        Moe,
        at,
        f"{at.prefix}moe",
        **placed(p, hidden),
        inter=p.spec.moe.inter,
        attn_dp=p.d.parallel.attn_dp,
        quant=mode,
        distribution=distribution(p, routing),
        **more,
    )


def exchanged(
    p: Phase, at: Layer, routing: Routing, hidden: int | None = None, mode: str | None = None, gated: bool = True
) -> Iterator[Op]:
    """Experts between the two exchanges of their tokens, fused form."""
    hidden, mode = hidden or p.spec.hidden, mode or p.d.modes.moe
    yield dispatch(p, at, routing, True, hidden, mode)
    yield experts(p, at, routing, hidden, mode, gated=gated)
    yield dispatch(p, at, routing, False, hidden, mode)


def routed(p: Phase, at: Layer, routing: Routing) -> Iterator[Op]:
    yield router(p, at)
    yield from exchanged(p, at, routing)


def fused_experts(routing: Routing) -> Part:
    return lambda p, at: routed(p, at, routing)


def beside(p: Phase, routed_ops: Iterable[Op], shared: Iterable[Op]) -> Iterator[Op]:
    """Shared and routed experts: one after the other in prefill, on two streams in decode."""
    if p.context:
        yield from shared
        yield from routed_ops
    else:
        yield Overlap(name=f"{p.tag}moe_overlap", a=tuple(routed_ops), b=tuple(shared))


def with_shared(routing: Routing, *, over: str = "tp", doubled: bool = True, kept: str = "") -> Part:
    """Routed experts and a shared one of the same width, split over the ``over`` ranks.

    ``doubled``: the width is doubled before it is split; ``kept``: when the checkpoint's bfloat16 shared expert counts:
    "always", "unless explicit" (a gemm mode was chosen) or never.
    """

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        ranks = p.tp if over == "tp" else p.d.moe_tp
        width = p.spec.moe.inter
        up = 2 * width // ranks if doubled else 2 * (width // ranks)
        shared = mlp(p, at, SHARED, up, width // ranks, shared_mode(p, kept), low=False)
        yield from beside(p, routed(p, at, routing), shared)

    return part


def shared_mode(p: Phase, kept: str) -> str:
    modes = p.d.modes
    counts = kept == "always" or (kept == "unless explicit" and not modes.gemm_explicit)
    return "bfloat16" if p.spec.quant.keep_shared and counts else modes.gemm


def mega_moe_or(otherwise: Part) -> Part:
    """DeepSeek-V4: exchange and experts in one kernel where that backend was chosen."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        if p.d.moe_backend != "megamoe":
            yield from otherwise(p, at)
            return
        width, dist = p.spec.moe.inter // p.tp, distribution(p, Routing())
        mega = p.op(
            MegaMoe,
            at,
            "moe",
            **placed(p, p.spec.hidden),
            inter=p.spec.moe.inter,
            quant=p.d.modes.moe,
            distribution="balanced" if dist == "uniform" else dist,
            is_context=p.context,
        )
        yield from beside(p, [router(p, at), mega], mlp(p, at, SHARED, 2 * width, width, low=False))

    return part


# --- large expert parallelism ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WideForm:
    """How a framework lowers a MoE layer under large EP. ``shared``: names of the shared expert's operators;
    ``per_rank``: tensor- and context-parallel ranks share its tokens in prefill; ``overlaps``: it runs beside the
    routed experts in decode, an addition joins them; ``routes_inside``: families whose exchange includes the router."""

    shared: tuple[str, str, str] = GATED
    per_rank: bool = True
    overlaps: bool = False
    routes_inside: frozenset[str] = frozenset()


WIDE_FORMS: Mapping[str, WideForm] = {
    "trtllm": WideForm(SHARED, per_rank=False, overlaps=True),
    "sglang": WideForm(routes_inside=frozenset({"DEEPSEEK", "DEEPSEEKV32"})),
    "vllm": WideForm(),
}


def wide_experts(routing: Routing, *, shared: bool = False, kept: str = "") -> Part:
    """A MoE layer of a large-EP deployment; the fused form in a phase that has no all-to-all."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        form, width, h = WIDE_FORMS[p.d.backend], p.spec.moe.inter, p.spec.hidden
        mode = shared_mode(p, kept)
        if p.comm is None:
            yield router(p, at)
            if shared:
                yield from mlp(p, at, SHARED, 2 * width // p.tp, width // p.tp, mode, low=False)
            yield from exchanged(p, at, Routing(routing.alpha))
            return
        divide = form.per_rank and p.context
        dense = mlp(
            p,
            at,
            form.shared,
            2 * width,
            width,
            mode,
            low=False,
            token_div=p.tp if divide else 1,
            split=p.d.parallel.cp if divide else 1,
        )
        own = () if p.spec.family in form.routes_inside and comm_backend(p.comm).deep else (router(p, at),)
        wide = list(all_to_all(p, at, routing))
        if shared and form.overlaps and not p.context:
            yield Overlap(name=f"{p.tag}moe_overlap", a=(*own, *wide), b=tuple(dense))
        else:
            yield from own
            if shared:
                yield from dense
            yield from wide
        if shared and form.overlaps:
            yield p.mem(at, "moe_reduce_add", 2 * h, h, split=1)

    return part


def all_to_all(p: Phase, at: Layer, routing: Routing) -> Iterator[Op]:
    """The steps of the exchange, the experts before the last of them."""
    assert p.comm is not None
    moe, d, backend = p.spec.moe, p.d, comm_backend(p.comm, "moe_comm")
    spread = {"hidden": p.spec.hidden, "topk": moe.topk, "experts": moe.experts, "moe_ep": d.moe_ep}
    for step in backend.steps:
        if step == "combine":
            yield p.op(
                MoeExperts,
                at,
                "moe",
                **spread,
                inter=moe.inter,
                quant=d.modes.moe,
                distribution=distribution(p, routing),
                attn_dp=d.parallel.attn_dp,
                phase=p.name,
                slots=d.slots or moe.experts,
                eplb=d.eplb and backend.deep,
            )
        yield p.op(
            MoeAllToAll,
            at,
            f"moe_{step}",
            **spread,
            phase=step,
            comm_backend=backend.name,
            comm_dtype=wire_dtype(backend, p.name, step, d.modes.moe, d.system),
            nodes=d.nodes,
            sms=backend.sms,
            attn_tp=p.tp * d.parallel.cp if backend.deep and p.context else 1,
        )


# --- families with expert layers of their own ------------------------------------------------------------------------


def gemma_experts(routing: Routing) -> Part:
    """Routed experts beside the dense FFN of Gemma 4; the small variants have no router."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        if not p.spec.moe.experts:
            return
        if p.spec.moe.experts >= ROUTER_FROM:
            yield router(p, at)
        kept = p.spec.quant.keep_mlp and not p.d.modes.gemm_explicit
        mode = "bfloat16" if kept else p.d.modes.moe
        yield from exchanged(p, at, routing, mode=mode)

    return part


ROUTER_FROM = 128  # experts


def latent_relu2_experts(routing: Routing) -> Part:
    """Nemotron-H: a shared expert, and routed ones in a narrower space where the checkpoint has one."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        x, h = p.spec.x, p.spec.hidden
        width, latent = x.moe_shared_expert_intermediate_size // p.tp, x.moe_latent_size
        yield from mlp(p, at, ("shared_up_gemm", "shared_relu2", "shared_down_gemm"), width, width)
        yield router(p, at)
        if latent:
            yield p.gemm(at, "fc1_latent_proj_gemm", latent // p.tp, h)
        yield from exchanged(p, at, routing, hidden=latent or h, gated=False)
        if latent:
            yield p.gemm(at, "fc2_latent_proj_gemm", h, latent // p.tp, low=True)

    return part


def latent_experts(routing: Routing) -> Part:
    """Kimi K3: routed experts in a narrower space, shared ones in the full space, all in bfloat16 but the experts."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        x, h = p.spec.x, p.spec.hidden
        latent, width = x.routed_expert_hidden_size or h, x.num_shared_experts * p.spec.moe.inter
        yield router(p, at)
        yield p.gemm(at, "latent_down_gemm", latent, h, "bfloat16")
        yield p.mem(at, "latent_norm", 2 * latent, 2 * latent)
        yield from exchanged(p, at, routing, hidden=latent)
        yield p.gemm(at, "latent_up_gemm", h, latent, "bfloat16")
        names = ("shared_gate_up_gemm", "shared_act_gate", "shared_down_gemm")
        yield from mlp(p, at, names, 2 * width // p.tp, width // p.tp, "bfloat16", low=False)

    return part


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


def gated_shared_experts(p: Phase, at: Layer, routing: Routing) -> Iterator[Op]:
    """Experts and a gated shared expert in the framework's order."""
    pieces = _gated_shared_pieces(p, at, routing)

    def listed(letters: str) -> tuple[Op, ...]:
        return tuple(op for letter in letters for op in pieces[letter])

    order = PREFILL_ORDER if p.context else GATED_SHARED_FORMS[p.d.backend].decode
    before, _, rest = order.partition("[")
    inner, _, after = rest.partition("]")
    yield from listed(before)
    if inner:
        a, b = inner.split("|")
        yield Overlap(name=f"{p.tag}{at.prefix}moe_overlap", a=listed(a), b=listed(b))
    yield from listed(after)


def _gated_shared_pieces(p: Phase, at: Layer, routing: Routing) -> dict[str, list[Op]]:
    d, h, width, mode = p.d, p.spec.hidden, p.spec.x.shared_expert_inter_size, p.d.modes.moe
    form = GATED_SHARED_FORMS[d.backend]
    exchange: dict[str, Any] = {"sms": 20, "attn_ar_modeled": True, "is_context": p.context, "attn_cp": 1}
    local = form.folds and d.parallel.attn_dp == 1
    names = ("shared_gate_up_gemm", "shared_act_gate", "shared_down_gemm")
    shared = list(mlp(p, at, names, 2 * width // p.tp, width // p.tp, split_mode(p, "shared")))
    if not form.fuses_gate:
        gate = p.gemm(at, "shared_expert_gate_gemm", 1, h, "bfloat16", below_grid_sol=True)
        shared = [gate, *shared, p.mem(at, "shared_expert_gate_mul", h, h)]
    pre = dispatch(p, at, routing, True, h, mode, token_div=p.tp if p.context else 1, **exchange)
    return {
        "R": [router(p, at)] if p.spec.moe.experts >= ROUTER_FROM else [],
        "D": [] if local else [pre],
        "X": [experts(p, at, routing, h, mode, is_context=p.context, moe_backend=d.moe_backend)],
        "P": [dispatch(p, at, routing, False, h, mode, **exchange)],
        "S": shared if width else [],
        "M": [p.mem(at, "shared_merge", (3 if form.fuses_gate else 2) * h, h)] if width else [],
    }


def qwen_ffn(prefix: str, routing: Routing) -> Part:
    """Norm and FFN of a Qwen3.5 layer, dense or of experts."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        at = replace(at, prefix=prefix)
        yield p.norm(at, "ffn_norm")
        if p.spec.moe.experts:
            yield from gated_shared_experts(p, at, routing)
            return
        yield from mlp(p, at, GATED, 2 * at.ffn // p.tp, at.ffn // p.tp, split_mode(p, "dense_ffn"))
        yield p.allreduce(at, "ffn_ar")

    return part


def folded_allreduce(name: str) -> Part:
    """The all-reduce behind attention, unless the dispatch carries it."""

    def part(p: Phase, at: Layer) -> Iterator[Op]:
        if not (GATED_SHARED_FORMS[p.d.backend].folds and p.d.parallel.attn_dp > 1 and p.spec.moe.experts):
            yield p.allreduce(at, name)

    return part
