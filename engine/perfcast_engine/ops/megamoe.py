"""DeepSeek-V4 routed MegaMoE module: exchange and experts in one kernel (spec/03 section 7)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.moe import expert_weight_bytes
from perfcast_engine.tables.database import Database


@dataclass(frozen=True, kw_only=True)
class MegaMoe(Op):
    """The module at rank-local tokens; every field but ``name`` and ``scale`` is part of the measured key."""

    hidden: int
    inter: int
    topk: int
    experts: int
    moe_tp: int
    moe_ep: int
    quant: str
    distribution: str
    is_context: bool
    source_policy: str = "random"
    pre_dispatch: str = "sglang_jit"
    fused_shared_experts: int = 0
    kernel: str = "deepgemm_megamoe"
    kernel_dtype: str = "fp8_fp4"

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError

    def weight_bytes(self) -> float:
        return self.scale * expert_weight_bytes(
            self.hidden, self.inter, self.experts, self.quant, True, self.moe_ep, self.moe_tp
        )
