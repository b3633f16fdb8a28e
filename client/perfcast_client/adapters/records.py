"""Configuration records of the ecosystem (spec/07 section 4.5), flat and canonical, as an EngineConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from perfcast_client.adapters.asking import PerfDataNotAvailable
from perfcast_client.calibration import LearningOptions
from perfcast_client.config import EngineConfig
from perfcast_client.errors import InvalidRequest, PerfcastError

BACKENDS = ("trtllm", "sglang", "vllm")
UNSET = (None, "", "auto", "none")
GEMM = (
    "bfloat16", "int8_wo", "int4_wo", "fp8", "fp8_static", "sq", "fp8_block", "fp8_ootb", "nvfp4", "nvfp4_wo",
    "w4a16_nvfp4",
)  # fmt: skip
MOE = (
    "bfloat16", "fp8", "int4_wo", "fp8_block", "w4afp8", "nvfp4", "nvfp4_wo", "w4a16_mxfp4", "w4a8_mxfp4_mxfp8",
    "w4a8_mxfp4_mxfp8_trtllm", "w4a16_mxfp4_cutlass", "w4a16_nvfp4",
)  # fmt: skip
FMHA = ("bfloat16", "fp8", "fp8_block")
KV_CACHE = ("bfloat16", "int8", "fp8")
COMM = ("half", "int8", "fp8")
WEIGHTS = {"int8": "int8_wo", "int4": "int4_wo"}
DTYPES = {"float16", "float32", "float8", "int8", "int4", *GEMM, *MOE, *FMHA, *KV_CACHE}
# member of a flat record -> field of EngineConfig, modes, names that differ
RECORD_DTYPES: Mapping[str, tuple[str, tuple[str, ...], Mapping[str, str]]] = {
    "weight_dtype": ("gemm_quant", GEMM, WEIGHTS),
    "moe_dtype": ("moe_quant", MOE, WEIGHTS),
    "activation_dtype": ("fmha_quant", FMHA, {}),
    "kv_cache_dtype": ("kv_cache_quant", KV_CACHE, {}),
}
# canonical name -> flat name
CANONICAL = {
    "model": "model_name",
    "system": "system_name",
    "tp": "tp_size",
    "pp": "pp_size",
    "attention_dp": "attention_dp_size",
}
BY_OPERATORS = ("op_level", "auto")
OF_WHOLE_PASSES = ("fpm", "fpm_interpolation", "fpm_regression")
ROLES = {"aggregated": "both", "prefill": "prefill", "decode": "decode"}


def engine_of(record: Mapping[str, Any], **changes: Any) -> EngineConfig:
    """The engine of a flat or canonical record. As the reference does, members that a native model makes no use of are
    ignored, and a legal dtype that an operator has no mode for means "as the checkpoint says". ValueError otherwise;
    PerfDataNotAvailable where whole passes shall be looked up."""
    if not isinstance(record, Mapping):
        raise ValueError("a configuration must be a mapping")
    flat = {CANONICAL.get(name, name): value for name, value in record.items()}
    if flat.get("backend") not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {flat.get('backend')!r}")
    for name in ("model_name", "system_name"):
        if not isinstance(flat.get(name), str):
            raise ValueError(f"{name} is missing")
    if flat.get("tp_size") is None:
        raise ValueError("tp_size is missing")
    way = flat.get("forward_model") or flat.get("estimation_mode") or "op_level"
    if way in OF_WHOLE_PASSES:
        raise PerfDataNotAvailable(
            f"{way}: there are no tables of whole passes; op_level answers from those of operators"
        )
    if way not in BY_OPERATORS:
        raise ValueError(
            f"forward_model must be one of {', '.join((*BY_OPERATORS, *OF_WHOLE_PASSES))}, not {way!r:.60}"
        )
    sizes = {"pp": "pp_size", "attn_dp": "attention_dp_size", "moe_tp": "moe_tp_size", "moe_ep": "moe_ep_size"}
    given = {name: flat[member] for name, member in sizes.items() if flat.get(member) is not None}
    worker = flat.get("worker_type")
    if worker is not None and worker not in ROLES:
        raise ValueError(f"worker_type must be one of {', '.join(ROLES)}, not {worker!r}")
    try:
        config = EngineConfig(
            model=flat["model_name"],
            system=flat["system_name"],
            backend=flat["backend"],
            version=flat.get("backend_version") or "current",
            tp=flat["tp_size"],
            nextn=flat.get("nextn") or 0,
            role=ROLES[worker or "aggregated"],
            **given,
            **_modes(flat),
            **changes,
        )
        config.to_message()
    except (InvalidRequest, TypeError) as error:
        raise ValueError(str(error)) from None
    return config


def _modes(record: Mapping[str, Any]) -> dict[str, Any]:
    modes: dict[str, Any] = {}
    for name, (target, known, renamed) in RECORD_DTYPES.items():
        value = record.get(name)
        if value in UNSET:
            continue
        if value not in DTYPES:
            raise ValueError(f"{name}: unknown dtype {value!r}; one of {', '.join(sorted(DTYPES))}")
        mode = renamed.get(value, value)
        if mode in known:
            modes[target] = mode
    return modes


def session_modes(**dtypes: str | None) -> dict[str, Any]:
    """Explicit modes of a mocker session, by field of EngineConfig; ValueError lists the known names."""
    tables = {"gemm": GEMM, "moe": MOE, "fmha": FMHA, "kv_cache": KV_CACHE, "comm": COMM}
    modes: dict[str, Any] = {}
    for name, value in dtypes.items():
        if value in UNSET:
            continue
        mode = "int4_wo" if value == "int4" else value
        if mode not in tables[name]:
            raise ValueError(f"{name}_dtype {value!r} is not one of {', '.join(tables[name])}")
        modes[f"{name}_quant"] = str(mode)
    return modes


def options_of(options: Mapping[str, Any] | None, **defaults: Any) -> LearningOptions:
    """Learning options from a mapping; unknown members are ignored as the reference does. ValueError where one is
    malformed. Without a word about it there is no cold-start guard: the reference has none."""
    known = {item.name for item in fields(LearningOptions)}
    given = {name: value for name, value in (options or {}).items() if name in known}
    made = LearningOptions(**({"cold_start_factor": None} | defaults | given))
    try:
        made.message()
    except PerfcastError as error:
        raise ValueError(error.message) from None
    return made
