"""Quantisation modes: bytes per element, relative compute rate and which peak rate of the GPU governs (spec/02 1.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from perfcast_engine.data import table
from perfcast_engine.errors import InvalidField


@dataclass(frozen=True, slots=True)
class QuantMode:
    """One quantisation mode. ``bytes`` per element, ``compute`` relative to bfloat16, ``rate`` names the peak rate;
    ``efficiency``: share of the roofline that its kernels reach, for estimates that borrow from another mode."""

    name: str
    bytes: float
    compute: float = 1.0
    rate: str = "bfloat16"
    efficiency: float = 1.0

    @property
    def profile(self) -> tuple[float, float]:
        return self.bytes, self.compute


def _modes(name: str) -> Mapping[str, QuantMode]:
    return MappingProxyType({mode: QuantMode(mode, *row) for mode, row in table("quant")[name].items()})


GEMM, MOE, FMHA, KV_CACHE, COMM = map(_modes, ("gemm", "moe", "fmha", "kv_cache", "comm"))


def mode(modes: Mapping[str, QuantMode], name: str, field: str) -> QuantMode:
    """The mode called ``name`` of one of the tables above; InvalidField names the legal ones."""
    try:
        return modes[name]
    except KeyError:
        raise InvalidField(field, f"unknown mode {name!r}; one of {', '.join(modes)}", why="quant_mode") from None
