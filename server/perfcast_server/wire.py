"""Between the messages of perfcast.v1 and the engine's own types: configurations, stamps, provenance."""

from __future__ import annotations

from typing import Any, TypeVar

from perfcast.v1 import common_pb2, prediction_pb2
from perfcast_engine.answer import F64, Answer, Source
from perfcast_engine.config import EngineConfig, MoeComm, ParallelConfig, QuantOverrides
from perfcast_engine.errors import InvalidField
from perfcast_engine.models import config_json
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.predictor import Engine
from perfcast_engine.tables.database import Mode

from perfcast_server.errors import ServiceError, invalid

MAX_NAME = 256
E = TypeVar("E")

# Each tuple in the order of the enum's values; UNSPECIFIED (0) is the default.
MODES = (Mode.SILICON, Mode.SILICON, Mode.HYBRID, Mode.EMPIRICAL, Mode.SOL)
POLICIES = ("aggressive", "off", "conservative", "balanced", "aggressive")
PROFILES = ("corrected", "corrected", "reference", "calibrated")
RESOLUTIONS = ("estimate", "estimate", "search")
ROLES = ("both", "both", "prefill", "decode")
FIELDS = {  # of the engine's configuration, where the contract calls them otherwise
    "model": "model_id",
    "slots": "expert_slots",
    "eplb": "enable_eplb",
    "cp": "parallel.cp",
    "fmha_quant": "quant.fmha",
    "moe_quant": "quant.moe",
    "attn_backend": "attention_backend",
    "megamoe": "moe_backend",
}
SHARES = ("silicon_share", "empirical_share", "sol_share", "estimated_share", "mixed_share")  # in order of Source


def engine_config(message: common_pb2.EngineConfig, max_config_json_bytes: int) -> EngineConfig:
    """The engine's configuration that ``message`` asks for; refuses what is malformed, by field."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING and len(value) > MAX_NAME:
            raise invalid(f"config.{field.name}", f"is longer than {MAX_NAME} characters")
    for name in ("system", "backend"):
        if not getattr(message, name):
            raise invalid(f"config.{name}", "is missing")
    comm = MoeComm(message.moe_comm_context or None, message.moe_comm_generation or None)
    return EngineConfig(
        model=_model(message, max_config_json_bytes),
        system=message.system,
        backend=message.backend,
        version=message.version or "current",
        parallel=_parallel(message.parallel),
        quant=_quant(message.quant),
        database_mode=_member(MODES, message.database_mode, "database_mode"),
        transfer_policy=_member(POLICIES, message.transfer_policy, "transfer_policy"),
        profile=_member(PROFILES, message.profile, "profile"),
        resolution=_member(RESOLUTIONS, message.resolution, "resolution"),  # type: ignore[arg-type]
        role=_member(ROLES, message.role, "role"),  # type: ignore[arg-type]
        nextn=message.nextn,
        attention_backend=message.attention_backend or None,
        moe_backend=message.moe_backend or None,
        eplb=message.enable_eplb,
        slots=message.expert_slots or None,
        workload_distribution=message.workload_distribution or "power_law",
        encoder_dp=message.encoder_dp if message.HasField("encoder_dp") else True,
        language_only=message.language_only,
        moe_comm=comm or None,
        allow_unlisted_version=message.allow_unlisted_version,
    )


def in_request(error: InvalidField) -> ServiceError:
    """``error`` with the path of its field in the request rather than in the engine's configuration."""
    field = error.details["field"]
    head, dot, rest = field.partition(".")
    if field.startswith("config.json"):
        path = "inline_model.config_json" + field.removeprefix("config.json")
    else:
        path = FIELDS.get(head, head) + dot + rest
    told = error.message.removeprefix(f"{field}: ")
    details = {**error.details, "field": f"config.{path}"}
    return ServiceError(str(error.reason), f"config.{path}: {told}", **details)


def _model(message: common_pb2.EngineConfig, max_bytes: int) -> str | ModelSpec:
    if message.model_id:
        return message.model_id
    inline = message.inline_model
    if not inline.config_json:
        raise invalid("config.model_id", "is missing, and there is no inline_model.config_json either")
    if len(inline.config_json) + len(inline.hf_quant_config_json) > max_bytes:
        raise ServiceError(
            "LIMIT", f"inline_model has more than {max_bytes} bytes", limit="max_config_json_bytes", retry="no"
        )
    if len(inline.name) > MAX_NAME:
        raise invalid("config.inline_model.name", f"is longer than {MAX_NAME} characters")
    return config_json.from_text(inline.config_json, inline.hf_quant_config_json or None, inline.name or "inline")


def _parallel(message: common_pb2.ParallelConfig) -> ParallelConfig:
    widths = {name: getattr(message, name) for name in ("tp", "pp", "attn_dp", "cp")}
    return ParallelConfig(
        **{name: 1 if width == 0 else width for name, width in widths.items()},
        moe_tp=message.moe_tp or None,
        moe_ep=message.moe_ep or None,
    )


def parallel_message(parallel: ParallelConfig) -> common_pb2.ParallelConfig:
    return common_pb2.ParallelConfig(
        tp=parallel.tp,
        pp=parallel.pp,
        attn_dp=parallel.attn_dp,
        cp=parallel.cp,
        moe_tp=parallel.moe_tp or 0,
        moe_ep=parallel.moe_ep or 0,
    )


def mode_number(mode: Mode | None) -> Any:
    """Unspecified for None."""
    return 0 if mode is None else MODES.index(mode, 1)


def _quant(message: common_pb2.QuantConfig) -> QuantOverrides:
    return QuantOverrides(
        message.gemm or None, message.moe or None, message.kv_cache or None, message.fmha or None, message.comm or None
    )


def _member(values: tuple[E, ...], number: int, field: str) -> E:
    if not 0 <= number < len(values):
        raise invalid(f"config.{field}", f"has the unknown value {number}")
    return values[number]


def quant_message(
    gemm: str | None, moe: str | None, kv_cache: str | None, fmha: str | None, comm: str | None = None
) -> common_pb2.QuantConfig:
    """Modes by name; None is the empty name."""
    return common_pb2.QuantConfig(
        gemm=gemm or "", moe=moe or "", kv_cache=kv_cache or "", fmha=fmha or "", comm=comm or ""
    )


def config_message(config: EngineConfig, original: common_pb2.EngineConfig) -> common_pb2.EngineConfig:
    """``config`` as a message; an inline model is taken from the ``original`` that it came from."""
    quant, comm = config.quant, config.moe_comm or MoeComm()
    message = common_pb2.EngineConfig(
        system=config.system,
        backend=config.backend,
        version=config.version,
        parallel=parallel_message(config.parallel),
        quant=quant_message(quant.gemm, quant.moe, quant.kv_cache, quant.fmha, quant.comm),
        database_mode=mode_number(config.database_mode),
        transfer_policy=POLICIES.index(config.transfer_policy, 1),  # type: ignore[arg-type]
        profile=PROFILES.index(config.profile, 1),  # type: ignore[arg-type]
        resolution=RESOLUTIONS.index(config.resolution, 1),  # type: ignore[arg-type]
        role=ROLES.index(config.role, 1),  # type: ignore[arg-type]
        nextn=config.nextn if isinstance(config.nextn, int) else 0,
        attention_backend=config.attention_backend or "",
        moe_backend=config.moe_backend or "",
        enable_eplb=config.eplb,
        expert_slots=config.slots or 0,
        workload_distribution=config.workload_distribution,
        encoder_dp=config.encoder_dp,
        language_only=config.language_only,
        moe_comm_context=comm.context or "",
        moe_comm_generation=comm.generation or "",
        allow_unlisted_version=config.allow_unlisted_version,
    )
    if original.HasField("inline_model"):
        message.inline_model.CopyFrom(original.inline_model)
    else:
        message.model_id = original.model_id
    return message


def stamp(engine: Engine) -> common_pb2.EngineStamp:
    config = engine.config
    return common_pb2.EngineStamp(
        handle=engine.handle,
        system=config.system,
        backend=config.backend,
        version=config.version,
        database_mode=mode_number(config.database_mode),
        profile=PROFILES.index(config.profile, 1),  # type: ignore[arg-type]
        data_version=engine.data_version,
    )


def provenance(by_source: F64, tier: int) -> common_pb2.Provenance:
    """Shares of a latency. by_source: (5,) ms per Source."""
    parts: list[float] = by_source.tolist()
    whole = sum(parts) or 1.0
    silicon, empirical, sol, estimated, mixed = (part / whole for part in parts)
    return common_pb2.Provenance(
        silicon_share=silicon,
        empirical_share=empirical,
        sol_share=sol,
        estimated_share=estimated,
        mixed_share=mixed,
        tier=tier_number(tier),
    )


def operator_latency(name: str, answer: Answer) -> prediction_pb2.OperatorLatency:
    source = source_number(int(answer.source[0]))
    return prediction_pb2.OperatorLatency(name=name, latency_ms=answer.ms.item(0), source=source)


def source_number(source: int) -> Any:
    """The engine counts sources from 0, the contract from 1."""
    return source + 1


def tier_number(tier: int) -> Any:
    return tier + 1


assert len(SHARES) == len(Source), "the contract lacks a source of the engine"
