"""Which quantisation modes a run uses: asked for, implied by the checkpoint, allowed by the data (spec/05 3.7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from perfcast_engine.config import QuantOverrides
from perfcast_engine.data import table
from perfcast_engine.errors import InvalidField
from perfcast_engine.models.spec import ModelSpec

# fmha modes that a context table holds jointly with a KV mode (None: with any); empty where it records none
ContextFmha = Callable[[str, str | None], frozenset[str]]

HOPPER, BLACKWELL = "hopper", "blackwell"


def generation(sm: int | None) -> str:
    return BLACKWELL if (sm or 0) >= 100 else HOPPER if sm == 90 else ""


def rows(name: str) -> Any:
    """One table of models/quantisation.yaml."""
    return table("models/quantisation")[name]


def fitting(name: str, **case: str | None) -> Mapping[str, Any]:
    """The first row of a table of which every column that ``case`` knows is as there; an empty one where none is."""
    return next((row for row in rows(name) if all(row.get(key, value) == value for key, value in case.items())), {})


@dataclass(frozen=True, slots=True)
class QuantModes:
    """The modes of a run. ``gemm_explicit`` overrules what the checkpoint keeps in other modes."""

    gemm: str
    moe: str
    kv: str
    fmha: str
    comm: str
    gemm_explicit: bool = False


def context_table(family: str, backend: str) -> str:
    """The context table that says which attention modes are measured."""
    found: str = fitting("context_tables", family=family, backend=backend).get("table", "context_attention")
    return found


def context_tables(spec: ModelSpec, backend: str, fused: bool, large_ep: bool) -> list[str]:
    """The tables that prefill attention may read over a set of candidates, some fused, some with large EP."""
    table = context_table(spec.family, backend)
    if table == "context_mla" and _mixes_attention_modes(spec):
        table = "context_mla_granular"
    tables = [table] if fused else []
    if large_ep:
        tables.append(fitting("large_ep_context_tables", family=spec.family, backend=backend).get("table", table))
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
        widened, gemm, moe = rows("without_native_fp4"), asked.gemm or implied.gemm, asked.moe or _remapped(spec, where)
        asked = replace(asked, gemm=widened.get(gemm, asked.gemm), moe=widened.get(moe, asked.moe))
    return _with_defaults(spec, asked, where)


def _with_defaults(spec: ModelSpec, asked: QuantOverrides, where: Situation) -> QuantModes:
    modes = _filled(asked, spec, _remapped(spec, where))
    widened = fitting("bfloat16_attention", family=spec.family, backend=where.backend)
    if asked.fmha is None and modes.fmha == "fp8" and widened:
        return replace(modes, fmha="bfloat16")
    return modes


def _for_search(spec: ModelSpec, asked: QuantOverrides, where: Situation, measured: ContextFmha) -> QuantModes:
    if spec.family == "DEEPSEEKV4" and spec.quant.moe in rows("native_fp4_experts") and generation(where.sm) == HOPPER:
        raise InvalidField(
            "model",
            f"{spec.id} stores FP4 experts, which Hopper GPUs do not run; take an FP8 checkpoint",
            why="hopper_fp4",
        )
    modes = _filled(asked, spec, _expert_rule(spec, where) or _remapped(spec, where))
    if generation(where.sm) != BLACKWELL:
        widened = rows("without_native_fp4")
        modes = replace(modes, gemm=widened.get(modes.gemm, modes.gemm), moe=widened.get(modes.moe, modes.moe))
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
    case = {"family": spec.family, "arch": spec.arch, "stated": spec.quant.moe, "backend": where.backend}
    row = fitting("expert_rules", **case, generation=generation(where.sm), resolution=where.resolution)
    barred = where.moe_backend is not None and row.get("not_on") == where.moe_backend
    return None if barred and where.resolution == "search" else row.get("mode")


def _remapped(spec: ModelSpec, where: Situation) -> str | None:
    moe = spec.quant.moe
    mode: str | None = fitting("expert_remap", family=spec.family, backend=where.backend, stated=moe).get("mode", moe)
    return mode
