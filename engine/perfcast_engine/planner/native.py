"""Pass models from the ecosystem's configuration record (spec/07 section 4.5, spec/04 11.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfcast_engine import quant
from perfcast_engine.config import EngineConfig, ParallelConfig, QuantOverrides
from perfcast_engine.errors import EngineError, InvalidField, Reason
from perfcast_engine.planner.pass_model import LearningOptions, PassModel
from perfcast_engine.predictor import Predictor
from perfcast_engine.tables.catalog import BACKENDS

# dtype of the record -> mode of a table, where the names differ
WEIGHT_NAMES = {"int8": "int8_wo", "int4": "int4_wo"}
DTYPES = frozenset(
    {"float16", "int8", "int4", "float32", "float8"}.union(quant.GEMM, quant.MOE, quant.FMHA, quant.KV_CACHE)
)
# field of the record -> field of QuantOverrides, table of modes, names that differ
DTYPE_FIELDS: Mapping[str, tuple[str, Mapping[str, quant.QuantMode], Mapping[str, str]]] = {
    "weight_dtype": ("gemm", quant.GEMM, WEIGHT_NAMES),
    "moe_dtype": ("moe", quant.MOE, WEIGHT_NAMES),
    "activation_dtype": ("fmha", quant.FMHA, {}),
    "kv_cache_dtype": ("kv_cache", quant.KV_CACHE, {}),
}
UNSET = (None, "", "auto", "none")
# what a caller that takes the best available model gets a regression for
UNAVAILABLE = frozenset(
    {
        Reason.UNKNOWN_MODEL,
        Reason.UNKNOWN_SYSTEM,
        Reason.UNKNOWN_VERSION,
        Reason.PERF_DATA_MISSING,
        Reason.UNSUPPORTED,
        Reason.DATA_CORRUPT,
    }
)


def engine_config(record: Mapping[str, Any]) -> EngineConfig:
    """The engine that a flat configuration record names. Members that a native model ignores are ignored; InvalidField
    for an unknown backend or dtype and for sizes that are not numbers."""
    backend = record.get("backend")
    if backend not in BACKENDS:
        raise InvalidField("backend", f"must be one of {', '.join(BACKENDS)}, not {backend!r}", why="backend")
    for name in ("model_name", "system_name"):
        if not isinstance(record.get(name), str):
            raise InvalidField(name, "is missing", why="missing")
    if record.get("tp_size") is None:
        raise InvalidField("tp_size", "is missing", why="missing")

    def size(name: str) -> int:
        value = record.get(name)
        return 1 if value is None else value

    return EngineConfig(
        model=record["model_name"],
        system=record["system_name"],
        backend=backend,
        version=record.get("backend_version") or "current",
        parallel=ParallelConfig(
            tp=size("tp_size"),
            pp=size("pp_size"),
            attn_dp=size("attention_dp_size"),
            moe_tp=size("moe_tp_size"),
            moe_ep=size("moe_ep_size"),
        ),
        quant=QuantOverrides(**_modes(record)),
        nextn=record.get("nextn") or 0,
    )


def _modes(record: Mapping[str, Any]) -> dict[str, str]:
    """Explicit modes; a legal dtype that its operator has no mode for means "as the checkpoint says"."""
    modes = {}
    for name, (target, table, renamed) in DTYPE_FIELDS.items():
        value = record.get(name)
        if value in UNSET:
            continue
        if value not in DTYPES:
            raise InvalidField(name, f"unknown dtype {value!r}; one of {', '.join(sorted(DTYPES))}", why="quant_mode")
        mode = renamed.get(value, value)
        if mode in table:
            modes[target] = mode
    return modes


def from_native(predictor: Predictor, record: Mapping[str, Any], options: LearningOptions, profile: str) -> PassModel:
    """A model that compiles the engine; EngineError where it cannot."""
    config = engine_config(record)
    return PassModel(options, predictor.engine(_profiled(config, profile)).steps)


def best_available(
    predictor: Predictor, record: Mapping[str, Any], options: LearningOptions, profile: str
) -> PassModel:
    """As ``from_native``; a regression with a warning where model, system, version or data are not available."""
    config = _profiled(engine_config(record), profile)
    try:
        return PassModel(options, predictor.engine(config).steps)
    except EngineError as error:
        if error.reason not in UNAVAILABLE:
            raise
        return PassModel(options, warning=error.message)


def _profiled(config: EngineConfig, profile: str) -> EngineConfig:
    return replace(config, profile=profile)
