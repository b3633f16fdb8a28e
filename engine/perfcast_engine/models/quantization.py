"""Which quantisation modes a run uses: asked for, implied by the checkpoint, allowed by the data (spec/05 3.7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
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


@cache
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


def context_tables(spec: ModelSpec, backend: str, search: bool, large_ep: bool = False) -> list[str]:
    """The tables that prefill attention may read: of a single estimate, or over the candidates of a search, some of
    which may run ``large_ep``."""
    keep = spec.quant.keep_attn & {"q", "kv", "o"}
    table = fitting("context_tables", family=spec.family, backend=backend).get("table", "context_attention")
    if search and table == "context_mla" and 0 < len(keep) < 3 and spec.quant.gemm not in (None, "bfloat16"):
        table = "context_mla_granular"  # projections in several modes are run one by one
    if not large_ep:
        return [table]
    wide = fitting("large_ep_context_tables", family=spec.family, backend=backend).get("table", table)
    return list(dict.fromkeys([table, wide]))


@dataclass(frozen=True, slots=True)
class Situation:
    """What the choice depends on beside the checkpoint and the overrides. ``tables``: the context tables that decide on
    the mode of attention; none where there is no prefill, or its tables are all of large EP."""

    backend: str
    sm: int | None
    tables: Sequence[str]
    resolution: Literal["estimate", "search"] = "estimate"
    moe_backend: str | None = None


def choose(spec: ModelSpec, asked: QuantOverrides, where: Situation, measured: ContextFmha) -> QuantModes:
    """The modes of a run. Raises InvalidField where an explicit mode has no data or the GPU no such arithmetic."""
    search, gpus = where.resolution == "search", generation(where.sm)
    if search and gpus == HOPPER and spec.family == "DEEPSEEKV4" and spec.quant.moe in rows("native_fp4_experts"):
        told = f"{spec.id} stores FP4 experts, which Hopper GPUs do not run; take an FP8 checkpoint"
        raise InvalidField("model", told, why="hopper_fp4")
    modes = QuantModes(
        gemm=asked.gemm or spec.quant.gemm or "bfloat16",
        moe=expert_mode(spec, asked, where),
        kv=asked.kv_cache or spec.quant.kv or "bfloat16",
        fmha=asked.fmha or spec.quant.fmha or "bfloat16",
        comm=asked.comm or "half",
        gemm_explicit=asked.gemm is not None,
    )
    widened = {} if gpus == BLACKWELL else rows("without_native_fp4")
    modes = replace(
        modes,
        gemm=widened.get(modes.gemm, modes.gemm),
        moe=widened.get(modes.moe, modes.moe),
        gemm_explicit=modes.gemm_explicit or (not search and modes.gemm in widened),
    )
    if modes.fmha != "fp8":
        return modes
    known = [measured(table, modes.kv if search else asked.kv_cache or spec.quant.kv) for table in where.tables]
    if asked.fmha is not None:
        if not search and any(found and "fp8" not in found for found in known):
            told = f"{', '.join(where.tables)} has no fp8 rows here; measured: {', '.join(sorted(set().union(*known)))}"
            raise InvalidField("quant.fmha", told, why="fmha_no_data")
        return modes
    widens = not search and fitting("bfloat16_attention", family=spec.family, backend=where.backend)
    more_in_bfloat16 = sum("bfloat16" in found for found in known) > sum("fp8" in found for found in known)
    return replace(modes, fmha="bfloat16") if widens or more_in_bfloat16 else modes


def expert_mode(spec: ModelSpec, asked: QuantOverrides, where: Situation) -> str:
    """The mode of expert weights before a GPU without FP4 arithmetic widens them."""
    case = {"family": spec.family, "backend": where.backend, "stated": spec.quant.moe}
    rule = fitting("expert_rules", **case, arch=spec.arch, generation=generation(where.sm), resolution=where.resolution)
    barred = where.resolution == "search" and where.moe_backend is not None and rule.get("not_on") == where.moe_backend
    ruled = None if barred else rule.get("mode")
    mode: str = asked.moe or ruled or fitting("expert_remap", **case).get("mode") or spec.quant.moe or "bfloat16"
    return mode
