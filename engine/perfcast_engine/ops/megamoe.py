"""DeepSeek-V4 routed MegaMoE module: exchange and experts in one kernel (spec/03 section 7)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine.answer import F64, Answer, Points
from perfcast_engine.errors import PerfDataMissing, UnsupportedCombination
from perfcast_engine.ops.base import Op, measured, require, slice_of
from perfcast_engine.ops.comm_backends import CONTEXT, GENERATION
from perfcast_engine.ops.experts import expert_weight_bytes
from perfcast_engine.quant import MOE, mode
from perfcast_engine.tables.database import Database

TABLE = "dsv4_megamoe_module"
FIRST_SM = 100
SAME_DISTRIBUTION = {"uniform": "balanced"}


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

    def __post_init__(self) -> None:
        require(self, hidden=0, inter=0, topk=0, experts=0, moe_tp=0, moe_ep=0, fused_shared_experts=0)
        mode(MOE, self.quant, "quant")

    def weight_bytes(self) -> float:
        return self.scale * expert_weight_bytes(
            self.hidden, self.inter, self.experts, self.quant, True, self.moe_ep, self.moe_tp
        )

    def price(self, db: Database, at: Points) -> Answer:
        if (db.system.sm_version or -1) < FIRST_SM:
            raise UnsupportedCombination("megamoe", f"{db.system.name} is older than sm {FIRST_SM}", why="sm_version")
        if not db.mode.shared:
            raise PerfDataMissing(
                f"{self.name}: MegaMoE is known from measurements only, not in {db.mode}", op=self.name
            )
        key = (
            CONTEXT if self.is_context else GENERATION,
            self.kernel,
            self.kernel_dtype,
            self.quant,
            self.pre_dispatch,
            self.source_policy,
            SAME_DISTRIBUTION.get(self.distribution, self.distribution),
            self.topk,
            self.experts,
            self.fused_shared_experts,
            self.hidden,
            self.inter,
            self.moe_tp,
            self.moe_ep,
        )
        return measured(slice_of(db, TABLE, key, _per_token), (at.x,), self.name, ("tokens",))


def _per_token(tokens: F64) -> F64:
    """Beyond the measured tokens latency grows with their number."""
    return tokens
