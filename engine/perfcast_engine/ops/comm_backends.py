"""The large-EP all-to-all backends as data, and what each carries on the wire (spec/03 sections 5, 13.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from perfcast_engine.errors import InvalidField
from perfcast_engine.tables.database import Database

CONTEXT, GENERATION = "context", "generation"
PHASES = (CONTEXT, GENERATION)
MEASURED_NODE = MappingProxyType({"sglang": 8})  # ranks of the node whose exchange stands in for one over several
HOPPER = frozenset({"h100_sxm", "h200_sxm"})
NORMAL = MappingProxyType({"none": "bfloat16", "fp8_block": "fp8"})  # MoE mode -> how the wire calls it


@dataclass(frozen=True, slots=True)
class CommBackend:
    """One way to exchange tokens between experts. ``frameworks`` and ``phases`` it serves, ``steps`` it consists of;
    ``deep`` is the DeepEP of SGLang and vLLM; ``one_node_stands_in``: where a spread over several nodes was not
    measured, that of one node is taken; ``sms`` it occupies by default."""

    name: str
    frameworks: tuple[str, ...]
    phases: tuple[str, ...]
    steps: tuple[str, ...] = ("dispatch", "combine")
    min_sm: int = 0
    max_topk: int = 8
    min_attn_dp: int = 1
    deep: bool = False
    one_node_stands_in: bool = False
    sms: int = 0
    wire: str = "default"


def _backends(*rows: CommBackend) -> Mapping[str, CommBackend]:
    return MappingProxyType({row.name: row for row in rows})


_OPEN = ("sglang", "vllm")
_TRTLLM = ("trtllm",)
_THREE = ("prepare", "dispatch", "combine")
# The order is the order of preference.
BACKENDS = _backends(
    CommBackend("deepep_ht", _OPEN, (CONTEXT,), deep=True, one_node_stands_in=True, sms=20),
    CommBackend("deepep_ll", _OPEN, (GENERATION,), deep=True, one_node_stands_in=True),
    CommBackend("deepep_v2_context", ("vllm",), (CONTEXT,), deep=True),
    CommBackend("deepep_v2_generation", ("vllm",), (GENERATION,), deep=True),
    CommBackend("trtllm_deepep_ht", _TRTLLM, (CONTEXT,), min_attn_dp=2, one_node_stands_in=True, wire="ht"),
    CommBackend("trtllm_deepep_ll", _TRTLLM, (GENERATION,), min_attn_dp=2, one_node_stands_in=True, wire="ll"),
    CommBackend("nvlink_two_sided", _TRTLLM, PHASES, _THREE, min_sm=100, min_attn_dp=2, wire="nvlink"),
    CommBackend("nvlink_one_sided", _TRTLLM, PHASES, min_sm=100, min_attn_dp=2, wire="nvlink"),
)

# (wire, MoE mode) -> dtype of dispatch and combine; modes a wire does not list cannot travel on it.
_WIRES: Mapping[tuple[str, str], tuple[str, str]] = MappingProxyType(
    {
        ("ht", "bfloat16"): ("bfloat16", "bfloat16"),
        ("ht", "fp8"): ("bfloat16", "bfloat16"),
        ("ht", "nvfp4"): ("nvfp4", "nvfp4"),
        ("ll", "bfloat16"): ("bfloat16", "bfloat16"),
        ("ll", "fp8"): ("fp8", "fp8"),
        ("ll", "nvfp4"): ("nvfp4", "fp4"),
    }
)


def comm_backend(name: str, field: str = "comm_backend") -> CommBackend:
    """The backend called ``name``; InvalidField lists the known ones."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise InvalidField(field, f"unknown all-to-all {name!r}; one of {', '.join(BACKENDS)}", why="enum") from None


def wire_dtype(backend: CommBackend, phase: str, step: str, moe_quant: str, system: str) -> str:
    """What ``backend`` sends in ``step`` of ``phase`` for experts in ``moe_quant``; InvalidField where it cannot."""
    mode = NORMAL.get(moe_quant, moe_quant)
    if backend.wire == "default":
        return "default"
    if backend.wire == "nvlink":
        return "fp4" if (mode, phase, step) == ("nvfp4", GENERATION, "combine") else mode
    sent = _WIRES.get((backend.wire, mode))
    if sent is None or ((backend.wire, mode) == ("ll", "nvfp4") and system in HOPPER):
        raise InvalidField("moe_quant", f"{backend.name} cannot carry {moe_quant} on {system}", why="wire_dtype")
    return sent[step == "combine"]


def measured_node(db: Database) -> int:
    """Ranks of the single node whose exchange stands in for an unmeasured one over several nodes."""
    return MEASURED_NODE.get(db.backend, db.system.gpus_per_node)
