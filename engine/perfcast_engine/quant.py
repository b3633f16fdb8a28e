"""Quantisation modes: bytes per element, relative compute rate and which peak rate of the GPU governs (spec/02 1.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from perfcast_engine.errors import InvalidField


@dataclass(frozen=True, slots=True)
class QuantMode:
    """One quantisation mode. ``bytes`` per element, ``compute`` relative to bfloat16, ``rate`` names the peak rate."""

    name: str
    bytes: float
    compute: float = 1.0
    rate: str = "bfloat16"

    @property
    def profile(self) -> tuple[float, float]:
        return self.bytes, self.compute


def _modes(*rows: tuple[str, float, float, str]) -> Mapping[str, QuantMode]:
    return MappingProxyType({row[0]: QuantMode(*row) for row in rows})


GEMM = _modes(
    ("bfloat16", 2, 1, "bfloat16"),
    ("int8_wo", 1, 1, "bfloat16"),
    ("int4_wo", 0.5, 1, "bfloat16"),
    ("fp8", 1, 2, "fp8"),
    ("fp8_static", 1, 2, "fp8"),
    ("sq", 1, 2, "int8"),
    ("fp8_block", 1, 2, "fp8"),
    ("fp8_ootb", 1, 2, "fp8"),
    ("nvfp4", 0.5625, 4, "fp4"),
    ("nvfp4_wo", 0.5625, 1, "bfloat16"),
    ("w4a16_nvfp4", 0.5625, 1, "bfloat16"),
)
MOE = _modes(
    ("bfloat16", 2, 1, "bfloat16"),
    ("fp8", 1, 2, "fp8"),
    ("int4_wo", 0.5, 1, "bfloat16"),
    ("fp8_block", 1, 2, "fp8"),
    ("w4afp8", 0.5, 2, "fp8"),
    ("nvfp4", 0.5625, 4, "fp4"),
    ("nvfp4_wo", 0.5625, 1, "bfloat16"),
    ("w4a16_mxfp4", 0.5, 1, "bfloat16"),
    ("w4a8_mxfp4_mxfp8", 0.5, 2, "fp8"),
    ("w4a8_mxfp4_mxfp8_trtllm", 0.5, 2, "fp8"),
    ("w4a16_mxfp4_cutlass", 0.5, 1, "bfloat16"),
    ("w4a16_nvfp4", 0.5625, 1, "bfloat16"),
)
FMHA = _modes(
    ("bfloat16", 2, 1, "bfloat16"),
    ("fp8", 1, 2, "fp8"),
    ("fp8_block", 1, 2, "fp8"),
)
KV_CACHE = _modes(("bfloat16", 2, 1, "bfloat16"), ("int8", 1, 1, "bfloat16"), ("fp8", 1, 1, "fp8"))
COMM = _modes(("half", 2, 1, "bfloat16"), ("int8", 1, 1, "bfloat16"), ("fp8", 1, 1, "bfloat16"))


def mode(table: Mapping[str, QuantMode], name: str, field: str) -> QuantMode:
    """The mode called ``name`` of one of the tables above; InvalidField names the legal ones."""
    try:
        return table[name]
    except KeyError:
        raise InvalidField(field, f"unknown mode {name!r}; one of {', '.join(table)}", why="quant_mode") from None
