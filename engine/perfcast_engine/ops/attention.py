"""Dense attention kernels of prefill and decode (spec/02 sections 5.3, 5.4, 5.6, 6.2, 9.5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfcast_engine import quant
from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, Reads, Role, require
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class ContextAttention(Op):
    """Causal attention of the new tokens over prefix and themselves, with rotary embedding and cache write.

    ``window``: sliding window in tokens, 0 for full attention; ``cp``: context-parallel GPUs that share the sequence;
    ``lanes``: kernels in order of preference (``tables.lanes.lane_order``).
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_quant: str
    fmha_quant: str
    window: int = 0
    qk_norm: bool = False
    cp: int = 1
    lanes: tuple[str, ...] = ("default",)
    role: Role = Role.ATTENTION

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def __post_init__(self) -> None:
        require(self, heads=1, kv_heads=1, head_dim=1, window=0, cp=1)
        quant.mode(quant.KV_CACHE, self.kv_quant, "kv_quant")
        quant.mode(quant.FMHA, self.fmha_quant, "fmha_quant")

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GenerationAttention(Op):
    """Attention of one new token per request over its cache; fields as in ``ContextAttention``."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_quant: str
    window: int = 0
    lanes: tuple[str, ...] = ("default",)
    role: Role = Role.ATTENTION

    reads: ClassVar[Reads] = Reads.SEQUENCE

    def __post_init__(self) -> None:
        require(self, heads=1, kv_heads=1, head_dim=1, window=0)
        quant.mode(quant.KV_CACHE, self.kv_quant, "kv_quant")

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
