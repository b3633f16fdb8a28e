"""The engine that a question is about, and its messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from perfcast.v1 import common_pb2

from perfcast_client.errors import refused

ENUMS = {
    "database_mode": common_pb2.DatabaseMode,
    "transfer_policy": common_pb2.TransferPolicy,
    "profile": common_pb2.Profile,
    "resolution": common_pb2.Resolution,
    "role": common_pb2.Role,
}
PARALLEL = ("tp", "pp", "attn_dp", "cp", "moe_tp", "moe_ep")
QUANT = {f"{mode}_quant": mode for mode in ("gemm", "moe", "kv_cache", "fmha", "comm")}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Model, system, backend and how the engine is run; what is left out, the server fills in.

    ``model`` is an identifier of the registry, or a name for the checkpoint whose ``config_json`` is given. Names of
    modes and policies are those of the contract in lower case ("silicon", "hybrid", ...).
    """

    model: str
    system: str
    backend: str
    version: str = "current"
    config_json: str = ""
    hf_quant_config_json: str = ""
    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    cp: int = 1
    moe_tp: int | None = None
    moe_ep: int | None = None
    gemm_quant: str = ""
    moe_quant: str = ""
    kv_cache_quant: str = ""
    fmha_quant: str = ""
    comm_quant: str = ""
    database_mode: str = "silicon"
    transfer_policy: str = "aggressive"
    profile: str = "corrected"
    resolution: str = "estimate"
    role: str = "both"
    nextn: int = 0
    attention_backend: str = ""
    moe_backend: str = ""
    enable_eplb: bool = False
    expert_slots: int | None = None
    workload_distribution: str = ""
    encoder_dp: bool | None = None
    language_only: bool = False
    moe_comm_context: str = ""
    moe_comm_generation: str = ""
    allow_unlisted_version: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Strict: an unknown member is refused, not ignored."""
        known = [item.name for item in fields(cls)]
        for name in values:
            if name not in known:
                raise refused("config", name, f"is no member; known are {', '.join(known)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise refused("config", dict(values), str(error).partition(" ")[2]) from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_message(self) -> common_pb2.EngineConfig:
        message = common_pb2.EngineConfig()
        if self.config_json:
            inline = message.inline_model
            _set(inline, "name", self.model, "model")
            _set(inline, "config_json", self.config_json)
            _set(inline, "hf_quant_config_json", self.hf_quant_config_json)
        else:
            _set(message, "model_id", self.model, "model")
        for name in PARALLEL:
            if getattr(self, name) == 0:
                raise refused(f"config.parallel.{name}", 0, "is not a width; the least is 1")
            _set(message.parallel, name, getattr(self, name))
        for name, mode in QUANT.items():
            _set(message.quant, mode, getattr(self, name), name)
        for name, enum in ENUMS.items():
            _set(message, name, _enum(name, enum, getattr(self, name)))
        for name in message.DESCRIPTOR.fields_by_name:
            if name in _PLAIN:
                _set(message, name, getattr(self, name))
        return message

    @classmethod
    def from_message(cls, message: common_pb2.EngineConfig) -> Self:
        inline = message.inline_model
        values: dict[str, Any] = {name: getattr(message, name) for name in _PLAIN}
        values |= {name: getattr(message.parallel, name) or None for name in PARALLEL}
        values |= {name: getattr(message.quant, mode) for name, mode in QUANT.items()}
        values |= {name: enum_word(name, getattr(message, name)) for name in ENUMS}
        values["expert_slots"] = message.expert_slots or None
        values["encoder_dp"] = message.encoder_dp if message.HasField("encoder_dp") else None
        return cls(
            model=message.model_id or inline.name,
            config_json=inline.config_json,
            hf_quant_config_json=inline.hf_quant_config_json,
            **values,
        )


_PLAIN = frozenset(item.name for item in fields(EngineConfig)) & set(common_pb2.EngineConfig.DESCRIPTOR.fields_by_name)
_PLAIN -= set(ENUMS)


def enum_word(name: str, number: int) -> str:
    """The lower-case word of an enum value, e.g. "silicon"."""
    enum = ENUMS[name]
    return enum.Name(number).removeprefix(f"{name.upper()}_").lower()  # type: ignore[arg-type]


def _enum(name: str, enum: Any, word: Any) -> int:
    prefix = f"{name.upper()}_"
    known = {value.removeprefix(prefix).lower(): number for value, number in enum.items()}
    if not isinstance(word, str) or word.lower() not in known:
        words = ", ".join(word for word in known if word != "unspecified")
        raise refused(f"config.{name}", word, f"is not one of {words}")
    return int(known[word.lower()])


def _set(message: Any, field: str, value: Any, name: str = "") -> None:
    """Assign, refusing what the field cannot hold; None and "" leave it unset."""
    if value is None or value == "":
        return
    try:
        if isinstance(value, bool) and not isinstance(getattr(message, field), bool):
            raise TypeError
        setattr(message, field, value)
    except (TypeError, ValueError):
        raise refused(f"config.{name or field}", value, "is not legal here") from None
