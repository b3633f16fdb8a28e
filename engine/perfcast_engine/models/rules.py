"""What makes a deployment impossible: the rules of spec/05 section 4 as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from perfcast_engine.config import ParallelConfig
from perfcast_engine.errors import InvalidField, UnsupportedCombination
from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.families import family_row
from perfcast_engine.models.large_ep import FAMILIES as LARGE_EP_FAMILIES
from perfcast_engine.models.spec import ModelSpec

MOE_FAMILIES = LARGE_EP_FAMILIES | {
    *("DEEPSEEKV4", "KIMIK3", "HYBRIDMOE", "QWEN3VL_MOE", "GEMMA4MIX", "MINIMAXM3", "STEP3P7")
}
CONTEXT_PARALLEL = frozenset({"sglang"})
BLOCK_ALIGNED = frozenset({"MOE", "QWEN3VL_MOE", "HYBRIDMOE", "STEP3P7"})
PATTERNED = frozenset({"HYBRIDMOE", "STEP3P7", "GEMMA4MIX"})
WIDE_MLA = frozenset({"DEEPSEEK", "KIMIK25"})
WIDE_WITH_SHARED = WIDE_MLA | {"DEEPSEEKV32"}


def is_moe(spec: ModelSpec) -> bool:
    """Whether the widths of the experts are checked (spec/05 2.5); for Gemma 4 also where it has none."""
    if spec.family == "NEMOTRONH":
        return "E" in spec.x.hybrid_override_pattern
    return spec.family in MOE_FAMILIES or (spec.family == "QWEN35" and spec.moe.experts > 0)


def complete(spec: ModelSpec, parallel: ParallelConfig) -> ParallelConfig:
    """``parallel`` with both expert widths, which together cover tp x attn_dp x cp. Raises InvalidField."""
    if not is_moe(spec):
        return parallel
    tp, ep, width = parallel.moe_tp, parallel.moe_ep, parallel.width
    if tp is None and ep is None:
        raise InvalidField("parallel.moe_ep", "one of moe_tp and moe_ep is needed for a MoE model", why="moe_unset")
    tp = width // ep if tp is None and ep is not None else tp
    ep = width // tp if ep is None and tp else ep
    if not tp or not ep or tp * ep != width:
        raise InvalidField(
            "parallel.moe_ep",
            f"moe_tp x moe_ep must equal tp x attn_dp x cp = {width}, not {parallel.moe_tp} x {parallel.moe_ep}",
            why="moe_width",
        )
    return replace(parallel, moe_tp=tp, moe_ep=ep)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: which field breaks it, when, and what to say; {d} is the deployment. ``why`` is a stable code."""

    why: str
    field: str
    broken: Callable[[Deployment], bool]
    message: str
    unsupported: bool = False


def _wide(d: Deployment, backend: str, families: frozenset[str]) -> bool:
    return bool(d.comm) and d.backend == backend and d.spec.family in families


RULES = (
    Rule(
        "cp_unsupported",
        "parallel.cp",
        lambda d: (
            d.parallel.cp > 1
            and (d.backend not in CONTEXT_PARALLEL or family_row(d.spec.family, d.backend, False).cp is None)
        ),
        "{d.spec.family} on {d.backend} does not run context-parallel",
        unsupported=True,
    ),
    Rule(
        "cp_mix",
        "parallel.cp",
        lambda d: d.parallel.cp > 1 and (d.tp > 1 or d.parallel.attn_dp > 1),
        "context parallelism needs tp 1 and attn_dp 1",
    ),
    Rule("heads_tp", "parallel.tp", lambda d: d.spec.heads % d.tp > 0, "must divide {d.spec.heads} attention heads"),
    Rule(
        "mtp_unsupported",
        "nextn",
        lambda d: d.nextn > 0 and d.spec.family == "NEMOTRONNAS",
        "this family has no speculative decoding",
        unsupported=True,
    ),
    Rule(
        "ep_experts",
        "parallel.moe_ep",
        lambda d: is_moe(d.spec) and 0 < d.spec.moe.experts < d.moe_ep and d.spec.family != "NEMOTRONH",
        "must not exceed the {d.spec.moe.experts} experts",
    ),
    Rule(
        "block_align",
        "parallel.moe_tp",
        lambda d: (
            d.modes.moe == "fp8_block"
            and d.spec.family in BLOCK_ALIGNED
            and d.spec.moe.inter // d.moe_tp % (d.spec.quant.block_n or 128) > 0
        ),
        "an expert of width {d.spec.moe.inter} over {d.moe_tp} ranks does not divide into quantisation blocks",
    ),
    Rule(
        "dense_ep",
        "parallel.moe_ep",
        lambda d: d.spec.family == "GEMMA4MIX" and not d.spec.moe.experts and d.moe_ep > 1,
        "must be 1 for a dense model",
    ),
    Rule(
        "linear_heads_tp",
        "parallel.tp",
        lambda d: d.spec.x.linear_num_key_heads % d.tp + d.spec.x.linear_num_value_heads % d.tp > 0,
        "must divide the linear-attention heads",
    ),
    Rule(
        "kda_heads_tp",
        "parallel.tp",
        lambda d: d.spec.x.kda_num_heads % d.tp > 0,
        "must divide the {d.spec.x.kda_num_heads} KDA heads",
    ),
    Rule(
        "moe_backend",
        "moe_backend",
        lambda d: d.spec.family == "QWEN35" and d.config.moe_backend == "megamoe",
        "megamoe does not run this family",
        unsupported=True,
    ),
    Rule(
        "retired_deepep",
        "moe_backend",
        lambda d: d.spec.family == "QWEN35" and d.spec.moe.experts > 0 and d.config.moe_backend == "deepep_moe",
        "deepep_moe is retired",
        unsupported=True,
    ),
    Rule(
        "megamoe",
        "moe_backend",
        lambda d: (
            d.spec.family == "DEEPSEEKV4"
            and d.config.moe_backend == "megamoe"
            and (d.backend != "sglang" or d.moe_tp != 1 or d.moe_ep <= 1)
        ),
        "megamoe needs SGLang, moe_tp 1 and moe_ep above 1",
    ),
    Rule(
        "large_ep_unwired",
        "moe_comm",
        lambda d: bool(d.comm) and d.spec.family not in LARGE_EP_FAMILIES,
        "{d.spec.family} does not run under a large-EP all-to-all",
        unsupported=True,
    ),
    Rule(
        "wideep_adp",
        "parallel.attn_dp",
        lambda d: _wide(d, "trtllm", WIDE_WITH_SHARED) and (d.parallel.attn_dp <= 1 or d.moe_ep <= 1),
        "large EP of TensorRT-LLM needs attn_dp and moe_ep above 1",
    ),
    Rule(
        "wideep_slots",
        "slots",
        lambda d: (
            _wide(d, "trtllm", WIDE_WITH_SHARED)
            and d.config.slots is not None
            and (d.config.slots < d.spec.moe.experts or (d.config.slots > d.spec.moe.experts and not d.config.eplb))
        ),
        "must be at least the {d.spec.moe.experts} experts, and more only with eplb",
    ),
    Rule(
        "wideep_tp",
        "parallel.tp",
        lambda d: _wide(d, "sglang", WIDE_MLA) and 128 % d.tp > 0,
        "large EP of SGLang needs a tp that divides 128",
    ),
    Rule(
        "vit_tp",
        "encoder_dp",
        lambda d: (
            d.spec.x.num_heads > 0
            and not (d.config.encoder_dp or d.config.language_only)
            and d.spec.x.num_heads % d.tp + d.spec.x.intermediate_size % d.tp > 0
        ),
        "without encoder_dp tp must divide the heads and the FFN of the vision tower",
    ),
    Rule(
        "pattern_len",
        "layers",
        lambda d: d.spec.family in PATTERNED and sum(n for _, n in d.spec.x.layer_runs) != d.spec.layers,
        "the layer pattern of this model does not have {d.spec.layers} layers",
    ),
)


def check(d: Deployment) -> None:
    """Raises InvalidField, or UnsupportedCombination, for the first rule that ``d`` breaks."""
    for rule in RULES:
        if rule.broken(d):
            error = UnsupportedCombination if rule.unsupported else InvalidField
            raise error(rule.field, rule.message.format(d=d), why=rule.why)
