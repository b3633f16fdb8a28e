"""Rooflines of dense attention, of measured slices and of queries alike (spec/02 sections 5.3, 5.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from perfcast_engine import quant
from perfcast_engine.answer import F64
from perfcast_engine.ops.base import Split
from perfcast_engine.system import SystemSpec

T = TypeVar("T", float, F64)
BF16 = quant.FMHA["bfloat16"]


@dataclass(frozen=True, slots=True)
class ContextRoofline:
    """Causal attention of one slice: query heads n come with the query, KV heads are n where ``kv_heads`` is 0."""

    system: SystemSpec
    fmha: quant.QuantMode
    kv: quant.QuantMode
    kv_heads: int
    head_dim: int
    window: int

    def split(self, n: F64 | float, s: F64, b: F64, prefix: F64 | float = 0.0) -> Split:
        """n query heads, s tokens in all, ``prefix`` of them cached, b requests."""
        new, h = s - prefix, self.head_dim
        area = (s * s - prefix * prefix) / 2
        if self.window > 0:
            area = np.where(s > self.window, new * self.window, area)
        flops = 4 * b * area * n * h
        moved = 2 * b * (2 * n * new * h) + self.kv.bytes * b * 2 * (self.kv_heads or n) * s * h
        return Split.of(flops / self.system.rate(self.fmha) * 1000, self.system.memory_sol_ms(moved))

    def __call__(self, n: F64, s: F64, b: F64) -> F64:
        return self.split(n, s, b).time


@dataclass(frozen=True, slots=True)
class GenerationRoofline:
    """Attention of one token a request over s - 1 cached ones, or over the window."""

    system: SystemSpec
    kv: quant.QuantMode
    kv_heads: int
    head_dim: int
    window: int

    def split(self, n: F64 | float, b: F64, s: F64) -> Split:
        h, kv_heads = self.head_dim, self.kv_heads or n
        length = s - 1 if self.window == 0 else np.minimum(s - 1, self.window)
        moved = b * (4 * n * h + 2 * kv_heads * length * h * self.kv.bytes)
        return Split.of(4 * b * n * h * length / self.rate() * 1000, self.system.memory_sol_ms(moved))

    def __call__(self, n: F64, b: F64, s: F64) -> F64:
        return self.split(n, b, s).time

    def rate(self) -> float:
        low = self.kv.rate == "fp8" and self.system.has_fp8_decode_attention
        return self.system.rate(self.kv if low else BF16)


def causal_share(full: T, prefix: T) -> T:
    """The share of the causal area of ``full`` tokens that is left to compute behind a cached prefix; 0 of nothing."""
    square = full * full
    share: T = (square - prefix * prefix) / (square + (square == 0))
    return share
