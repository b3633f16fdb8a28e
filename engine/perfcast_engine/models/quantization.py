"""Which quantisation modes a run uses: asked for, implied by the checkpoint, allowed by the data (spec/05 3.7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from perfcast_engine.config import QuantOverrides
from perfcast_engine.errors import InvalidField
from perfcast_engine.models.spec import ModelSpec

# fmha modes that a context table holds jointly with a KV mode (None: with any); empty where it records none
ContextFmha = Callable[[str, str | None], frozenset[str]]

HOPPER = "hopper"
BLACKWELL = "blackwell"
NO_NATIVE_FP4 = {"nvfp4": "nvfp4_wo"}  # below Blackwell FP4 weights are widened on the fly
NATIVE_FP4_EXPERTS = ("w4a8_mxfp4_mxfp8", "nvfp4")


def generation(sm: int | None) -> str:
    return BLACKWELL if (sm or 0) >= 100 else HOPPER if sm == 90 else ""


@dataclass(frozen=True, slots=True)
class QuantModes:
    """The modes of a run. ``gemm_explicit`` overrules what the checkpoint keeps in other modes."""

    gemm: str
    moe: str
    kv: str
    fmha: str
    comm: str
    gemm_explicit: bool = False


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """Expert weights of a model that a backend runs in another mode than the checkpoint states, unless told."""

    backend: str
    generation: str
    mode: str
    family: str
    inferred: str | None = None  # only for this mode of the checkpoint
    arch: str | None = None
    only: str | None = None  # resolution
    not_on: str | None = None  # MoE backend


EXPERT_RULES = (
    ExpertRule("trtllm", BLACKWELL, "w4a8_mxfp4_mxfp8", "MOE", arch="GptOssForCausalLM", only="search"),
    ExpertRule(
        "sglang", BLACKWELL, "w4a8_mxfp4_mxfp8_trtllm", "DEEPSEEKV4", inferred="w4a8_mxfp4_mxfp8", not_on="megamoe"
    ),
    ExpertRule("sglang", HOPPER, "w4a16_mxfp4_cutlass", "DEEPSEEKV4", inferred="w4a8_mxfp4_mxfp8", not_on="megamoe"),
    ExpertRule("sglang", BLACKWELL, "w4a8_mxfp4_mxfp8", "KIMIK3", inferred="w4a16_mxfp4"),
)
EXPERT_REMAP = {("vllm", "NEMOTRONH", "w4a16_nvfp4"): "nvfp4"}

# (family, backend) whose inferred fp8 attention a single estimate runs in bfloat16; "" is any
BFLOAT16_ATTENTION = {("DEEPSEEKV32", "trtllm"), ("DEEPSEEKV32", "sglang"), ("DEEPSEEKV4", ""), ("", "vllm")}

# (family, backend) -> context table that says which fmha modes are measured; "" is any
CONTEXT_TABLES = {
    ("DEEPSEEKV4", ""): "deepseek_v4_context_module",
    ("DEEPSEEKV32", ""): "dsa_context_module",
    ("DEEPSEEK", "vllm"): "context_attention",
    ("KIMIK25", "vllm"): "context_attention",
    ("KIMIK3", "vllm"): "context_attention",
    ("DEEPSEEK", ""): "context_mla",
    ("KIMIK25", ""): "context_mla",
    ("KIMIK3", ""): "context_mla",
}
LARGE_EP_CONTEXT_TABLES = {
    (family, backend): table
    for family in ("DEEPSEEK", "KIMIK25")
    for backend, table in (("sglang", "wideep_context_mla"), ("trtllm", "context_mla_granular"))
}


def context_table(family: str, backend: str) -> str:
    return CONTEXT_TABLES.get((family, backend)) or CONTEXT_TABLES.get((family, "")) or "context_attention"


def context_tables(spec: ModelSpec, backend: str, fused: bool, large_ep: bool) -> list[str]:
    """The tables that prefill attention may read over a set of candidates, some fused, some with large EP."""
    table = context_table(spec.family, backend)
    if table == "context_mla" and _mixes_attention_modes(spec):
        table = "context_mla_granular"
    tables = [table] if fused else []
    if large_ep:
        tables.append(LARGE_EP_CONTEXT_TABLES.get((spec.family, backend), table))
    return list(dict.fromkeys(tables))


def _mixes_attention_modes(spec: ModelSpec) -> bool:
    keep = spec.quant.keep_attn & {"q", "kv", "o"}
    return 0 < len(keep) < 3 and spec.quant.gemm not in (None, "bfloat16")


@dataclass(frozen=True, slots=True)
class Situation:
    """What the choice depends on beside the checkpoint and the overrides."""

    backend: str
    sm: int | None
    resolution: Literal["estimate", "search"] = "estimate"
    moe_backend: str | None = None
    decode_only: bool = False
    large_ep: bool = False  # a large-EP backend is set already
    tables: Sequence[str] = ()  # context tables that the candidates reach; the family's own when empty


def choose(spec: ModelSpec, asked: QuantOverrides, where: Situation, measured: ContextFmha) -> QuantModes:
    """The modes of a run. Raises InvalidField where an explicit mode has no data or the GPU no such arithmetic."""
    if where.resolution == "search":
        return _for_search(spec, asked, where, measured)
    return _for_estimate(spec, asked, where, measured)


def settled(spec: ModelSpec, asked: QuantOverrides, where: Situation) -> QuantOverrides:
    """``asked`` with every open mode filled, so that each counts as asked for from here on."""
    modes = _with_defaults(spec, asked, where)
    return QuantOverrides(modes.gemm, modes.moe, modes.kv, modes.fmha, modes.comm)


def _for_estimate(spec: ModelSpec, asked: QuantOverrides, where: Situation, measured: ContextFmha) -> QuantModes:
    implied = spec.quant
    table = context_table(spec.family, where.backend)
    if not where.large_ep and not where.decode_only:
        known = measured(table, asked.kv_cache or implied.kv)
        if known and "fp8" not in known:
            if asked.fmha == "fp8":
                raise InvalidField(
                    "quant.fmha",
                    f"{table} has no fp8 rows here; measured: {', '.join(sorted(known))}",
                    why="fmha_no_data",
                )
            if asked.fmha is None and implied.fmha == "fp8" and "bfloat16" in known:
                asked = replace(asked, fmha="bfloat16")
    if asked.moe is None:
        asked = replace(asked, moe=_expert_rule(spec, where))
    if generation(where.sm) != BLACKWELL:
        asked = replace(
            asked,
            gemm=NO_NATIVE_FP4.get(asked.gemm or implied.gemm or "", asked.gemm),
            moe=NO_NATIVE_FP4.get(asked.moe or _remapped(spec, where) or "", asked.moe),
        )
    return _with_defaults(spec, asked, where)


def _with_defaults(spec: ModelSpec, asked: QuantOverrides, where: Situation) -> QuantModes:
    modes = _filled(asked, spec, _remapped(spec, where))
    keys = {(spec.family, where.backend), (spec.family, ""), ("", where.backend)}
    if asked.fmha is None and modes.fmha == "fp8" and keys & BFLOAT16_ATTENTION:
        return replace(modes, fmha="bfloat16")
    return modes


def _for_search(spec: ModelSpec, asked: QuantOverrides, where: Situation, measured: ContextFmha) -> QuantModes:
    if spec.family == "DEEPSEEKV4" and spec.quant.moe in NATIVE_FP4_EXPERTS and generation(where.sm) == HOPPER:
        raise InvalidField(
            "model",
            f"{spec.id} stores FP4 experts, which Hopper GPUs do not run; take an FP8 checkpoint",
            why="hopper_fp4",
        )
    modes = _filled(asked, spec, _expert_rule(spec, where) or _remapped(spec, where))
    if generation(where.sm) != BLACKWELL:
        modes = replace(
            modes, gemm=NO_NATIVE_FP4.get(modes.gemm, modes.gemm), moe=NO_NATIVE_FP4.get(modes.moe, modes.moe)
        )
    if asked.fmha is None and modes.fmha == "fp8" and not where.decode_only:
        tables = where.tables or context_tables(spec, where.backend, fused=True, large_ep=False)
        known = [measured(table, modes.kv) for table in tables]
        if sum("bfloat16" in modes for modes in known) > sum("fp8" in modes for modes in known):
            modes = replace(modes, fmha="bfloat16")
    return modes


def _filled(asked: QuantOverrides, spec: ModelSpec, moe: str | None) -> QuantModes:
    implied = spec.quant
    return QuantModes(
        gemm=asked.gemm or implied.gemm or "bfloat16",
        moe=asked.moe or moe or "bfloat16",
        kv=asked.kv_cache or implied.kv or "bfloat16",
        fmha=asked.fmha or implied.fmha or "bfloat16",
        comm=asked.comm or "half",
        gemm_explicit=asked.gemm is not None,
    )


def _expert_rule(spec: ModelSpec, where: Situation) -> str | None:
    for rule in EXPERT_RULES:
        if (
            (rule.backend, rule.generation, rule.family) == (where.backend, generation(where.sm), spec.family)
            and rule.inferred in (None, spec.quant.moe)
            and rule.arch in (None, spec.arch)
            and rule.only in (None, where.resolution)
            and (rule.not_on is None or rule.not_on != where.moe_backend or where.resolution == "estimate")
        ):
            return rule.mode
    return None


def _remapped(spec: ModelSpec, where: Situation) -> str | None:
    moe = spec.quant.moe
    return EXPERT_REMAP.get((where.backend, spec.family, moe or ""), moe)
