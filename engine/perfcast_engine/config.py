"""EngineConfig: everything that decides which engine is asked, validated, hashable, with a content handle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

from perfcast_engine import quant
from perfcast_engine.errors import InvalidField, check_whole
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.profiles import profile_named
from perfcast_engine.tables.database import TRANSFER_PRESETS, Mode

MAX_WIDTH = 4096
MAX_NEXTN = 64
CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "resolution": ("estimate", "search"),
    "role": ("both", "prefill", "decode"),
    "moe_backend": (None, "megamoe", "deepep_moe"),
    "database_mode": tuple(Mode),
    "transfer_policy": tuple(TRANSFER_PRESETS),
}


def _stated(record: object, *names: str) -> list[str]:
    return [name for name in names if getattr(record, name) is not None]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Parallel widths of one engine. Of moe_tp and moe_ep one may be None: it follows from the other."""

    tp: int = 1
    pp: int = 1
    attn_dp: int = 1
    cp: int = 1
    moe_tp: int | None = None
    moe_ep: int | None = None

    def __post_init__(self) -> None:
        names = ("tp", "pp", "attn_dp", "cp", *_stated(self, "moe_tp", "moe_ep"))
        check_whole(self, names, 1, MAX_WIDTH, path="parallel.")

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.attn_dp * self.cp

    @property
    def width(self) -> int:
        """GPUs of one pipeline stage, which the experts share."""
        return self.tp * self.attn_dp * self.cp


@dataclass(frozen=True, slots=True)
class QuantOverrides:
    """Explicit modes; None takes what the checkpoint implies."""

    gemm: str | None = None
    moe: str | None = None
    kv_cache: str | None = None
    fmha: str | None = None
    comm: str | None = None

    def __post_init__(self) -> None:
        for name in _stated(self, *self.__slots__):
            quant.mode(getattr(quant, name.upper()), getattr(self, name), f"quant.{name}")


@dataclass(frozen=True, slots=True)
class MoeComm:
    """All-to-all backend of each phase under large expert parallelism; None keeps the fused form."""

    context: str | None = None
    generation: str | None = None

    def __bool__(self) -> bool:
        return self.context is not None or self.generation is not None


FUSED = MoeComm()


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine: model x system x backend x parallel widths x modes.

    ``model`` is a registry id or a ModelSpec (``models.config_json``). ``moe_comm`` None lets the resolver decide.
    ``resolution`` picks the quantisation rules of a single estimate or of a search; ``role`` the phases it must serve.
    Raises InvalidField naming the field.
    """

    model: str | ModelSpec
    system: str
    backend: str
    version: str = "current"
    parallel: ParallelConfig = ParallelConfig()
    quant: QuantOverrides = QuantOverrides()
    database_mode: Mode = Mode.SILICON
    transfer_policy: str = "aggressive"
    nextn: int | Literal["auto"] = 0
    attention_backend: str | None = None
    moe_backend: str | None = None
    eplb: bool = False
    slots: int | None = None
    workload_distribution: str = "power_law"
    encoder_dp: bool = True
    language_only: bool = False
    layers: int | None = None
    moe_comm: MoeComm | None = None
    resolution: Literal["estimate", "search"] = "estimate"
    role: Literal["both", "prefill", "decode"] = "both"
    profile: str = "corrected"
    allow_unlisted_version: bool = False

    def __post_init__(self) -> None:
        for name in ("system", "backend", "version", "workload_distribution"):
            value = getattr(self, name)
            if not isinstance(value, str) or not 0 < len(value) <= 128:
                raise InvalidField(name, "must be a name of 1 to 128 characters", why="name")
        if not isinstance(self.model, ModelSpec) and not (isinstance(self.model, str) and 0 < len(self.model) <= 256):
            raise InvalidField("model", "must be a model id of 1 to 256 characters or a ModelSpec", why="name")
        if self.nextn != "auto":
            check_whole(self, ("nextn",), 0, MAX_NEXTN)
        check_whole(self, _stated(self, "slots", "layers"), 1, 65536)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise InvalidField(name, f"must be one of {', '.join(entry for entry in known if entry)}", why="choice")
        if self.attention_backend is not None and not isinstance(self.attention_backend, str):
            raise InvalidField("attention_backend", "must be a kernel name", why="choice")
        object.__setattr__(self, "database_mode", Mode(self.database_mode))
        profile_named(self.profile)

    @cached_property
    def handle(self) -> str:
        """Content hash of the whole configuration, the same in every process."""
        # of what it holds, JSON has no form for sets only
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), default=sorted)
        return hashlib.sha256(text.encode()).hexdigest()[:32]
