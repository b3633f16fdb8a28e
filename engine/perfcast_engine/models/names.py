"""The figures that formulas of the model tables may name: of one deployment, and of one phase of it."""

from __future__ import annotations

from functools import partial

from perfcast_engine import quant
from perfcast_engine.data import table
from perfcast_engine.formula import Names, scope
from perfcast_engine.models.deployment import Deployment
from perfcast_engine.ops.base import Role
from perfcast_engine.ops.large_ep import comm_backend, wire_dtype
from perfcast_engine.profiles import MODEL_SWITCHES

BASE_DISTRIBUTION = "power_law"
EPLB_PREFILL_ALPHA = 0.6  # balanced experts load prefill as a flatter power law does


def deployment_names(d: Deployment) -> Names:
    """Figures of ``d``; ``spec``, ``x``, ``facts`` and ``config`` as they are, and every switch of its profile."""
    spec, parallel, modes, traits = d.spec, d.parallel, d.modes, table("models/families")["backends"]
    widths = {"tp": d.tp, "pp": parallel.pp, "cp": parallel.cp, "attn_dp": parallel.attn_dp}
    chosen = {"gemm_mode": modes.gemm, "moe_mode": modes.moe, "kv_quant": modes.kv, "fmha_quant": modes.fmha}
    return scope(
        **widths,
        **chosen,
        **{name: d.backend in backends for name, backends in traits.items()},
        **{switch.name: d.profile[switch] for switch in MODEL_SWITCHES},
        **{mode: mode for mode in ("bfloat16", "fp8", "half")},
        spec=spec,
        x=spec.x,
        facts=spec.quant,
        config=d.config,
        backend=d.backend,
        moe_tp=d.moe_tp,
        moe_ep=d.moe_ep,
        nodes=d.nodes,
        nextn=d.nextn,
        comm_mode=modes.comm,
        gemm_explicit=modes.gemm_explicit,
        keep_attn=d.keep_attn,
        kv_bytes=quant.KV_CACHE[modes.kv].bytes,
        comm_bytes=quant.COMM[modes.comm].bytes,
        local_kv_heads=d.kv_heads,
        kinds=d.kinds,
        ratios=d.ratios,
        alternating=table("models/layers")["alternating_window"].get(spec.arch, 0),
    )


def phase_names(d: Deployment, of_deployment: Names, tag: str, context: bool, split: int = 1) -> Names:
    """Figures of one phase, with the defaults of what parts may change. ``tag`` starts the name of every operator,
    ``split``: context-parallel ranks that share the tokens of token-wise operators."""
    spec, moe, gemm = d.spec, d.spec.moe, d.modes.gemm
    phase, exchange = ("context", d.comm.context) if context else ("generation", d.comm.generation)
    comm = comm_backend(exchange, "moe_comm") if exchange else None
    own = {"tag": tag, "context": context, "generation": not context, "phase": phase, "split": split, "comm": comm}
    model = {"h": spec.hidden, "vocab": spec.vocab, "experts": moe.experts, "topk": moe.topk, "inter": moe.inter}
    defaults = {"quant": gemm, "low": False, "token_div": 1, "mode": d.modes.moe, "width": spec.hidden, "gated": True}
    functions = {
        "mode_of": partial(mode_of, d),
        "group_mode": lambda group: "bfloat16" if group in d.keep_attn else gemm,
        "sent_as": lambda step: wire_dtype(comm, phase, step, d.modes.moe, d.config.system) if comm else "",
    }
    flavor = table("models/families")["flavor"][d.backend]
    return of_deployment | own | model | defaults | functions | {"flavor": flavor} | dict(Role.__members__)


def mode_of(d: Deployment, part: str) -> str:
    """The gemm mode of one part of the model: what the checkpoint keeps apart, unless the user chose a mode."""
    facts, modes = d.spec.quant, d.modes
    if modes.gemm_explicit:
        return modes.gemm
    kept = {"attn": bool(facts.keep_attn), "mlp": facts.keep_mlp}
    return "bfloat16" if kept.get(part, False) else dict(facts.split).get(part, modes.gemm)


def distribution(d: Deployment, alpha: float, context: bool) -> str:
    """The name of the expert load that tables are keyed by."""
    base, balanced = d.config.workload_distribution, d.config.eplb and bool(d.comm)
    if base != BASE_DISTRIBUTION:
        return base
    if balanced and d.backend == "trtllm":
        return f"{base}_{alpha}_eplb"
    return f"{base}_{EPLB_PREFILL_ALPHA if balanced and context else alpha}"
