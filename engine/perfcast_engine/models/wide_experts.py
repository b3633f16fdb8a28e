"""Feed-forward parts of a deployment whose experts exchange tokens by an all-to-all of their own (spec/05 8.2-8.5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from perfcast_engine.models.ffn import GATED, SHARED, distribution, exchanged, routed_experts, router, shared_mode
from perfcast_engine.models.layers import Layer
from perfcast_engine.models.listing import Phase, mlp
from perfcast_engine.ops.all_to_all import CommBackend, MoeAllToAll, comm_backend, wire_dtype
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.composite import Overlap
from perfcast_engine.ops.moe import MoeExperts


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


def wide_experts(p: Phase, at: Layer) -> Iterator[Op]:
    """Routed experts of a large-EP deployment; the fused form in a phase that has no all-to-all."""
    if p.comm is None:
        yield from routed_experts(_untold(p), at)
    else:
        yield from _own_router(p, at, comm_backend(p.comm, "moe_comm"))
        yield from all_to_all(p, at)


def wide_experts_and_shared(p: Phase, at: Layer) -> Iterator[Op]:
    """The same with a shared expert, which every rank holds whole."""
    form, width, h, mode = WIDE_FORMS[p.d.backend], p.spec.moe.inter, p.spec.hidden, shared_mode(p)
    if p.comm is None:
        yield router(p, at)
        yield from mlp(p, at, SHARED, 2 * width // p.tp, width // p.tp, mode, low=False)
        yield from exchanged(_untold(p), at)
        return
    div, split = (p.tp, p.d.parallel.cp) if form.per_rank and p.context else (1, 1)
    shared = mlp(p, at, form.shared, 2 * width, width, mode, low=False, token_div=div, split=split)
    own, wide = _own_router(p, at, comm_backend(p.comm, "moe_comm")), all_to_all(p, at)
    if form.overlaps and not p.context:
        yield Overlap(name=f"{p.tag}moe_overlap", a=(*own, *wide), b=tuple(shared))
    else:
        yield from (*own, *shared, *wide)
    if form.overlaps:
        yield p.mem(at, "moe_reduce_add", 2 * h, h, split=1)


def _untold(p: Phase) -> Phase:
    """Beside a phase that has an all-to-all, the dispatch of the other is told nothing about decode."""
    return replace(p, row=replace(p.row, cp_in_decode=False, tells_decode=False))


def _own_router(p: Phase, at: Layer, backend: CommBackend) -> Iterator[Op]:
    if not (backend.deep and p.spec.family in WIDE_FORMS[p.d.backend].routes_inside):
        yield router(p, at)


def all_to_all(p: Phase, at: Layer) -> Iterator[Op]:
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
                distribution=distribution(p),
                attn_dp=d.parallel.attn_dp,
                phase=p.name,
                slots=d.config.slots or moe.experts,
                eplb=d.config.eplb and backend.deep,
            )
        yield p.op(
            MoeAllToAll,
            at,
            f"moe_{step}",
            **spread,
            phase=step,
            comm_backend=backend.name,
            comm_dtype=wire_dtype(backend, p.name, step, d.modes.moe, d.config.system),
            nodes=d.nodes,
            sms=backend.sms,
            attn_tp=p.tp * d.parallel.cp if backend.deep and p.context else 1,
        )


PARTS = (wide_experts, wide_experts_and_shared)
