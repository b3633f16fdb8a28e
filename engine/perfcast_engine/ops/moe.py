"""Mixture-of-experts FFN of one rank: fused, under a large-EP all-to-all, as a MegaMoE module (spec/03 3, 6, 7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from perfcast_engine.answer import F64, Answer, Mask, Points, Tier, choose, or_else
from perfcast_engine.errors import InvalidField, PerfDataMissing, UnsupportedCombination
from perfcast_engine.ops.all_to_all import CONTEXT, GENERATION, PHASES
from perfcast_engine.ops.base import Op, Split
from perfcast_engine.ops.experts import ANY_DISTRIBUTION, LOW_LATENCY, STANDARD, Layer, Shape, basis, token_curve
from perfcast_engine.ops.measured import Slice, by_mode, estimated, no_basis
from perfcast_engine.quant import MOE
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Table

LOW_LATENCY_QUANTS, LOW_LATENCY_TOKENS = frozenset({"nvfp4"}), 128
MOST_TOKENS = 2**32 - 1
RETIRED = frozenset({("sglang", "deepep_moe")})  # (framework, moe_backend) without a fused path
EPLB_TOKENS = {"sglang": 0.8}  # share of the prefill tokens that balanced experts see, by framework


@dataclass(frozen=True, kw_only=True)
class _Experts(Op):
    """``inter`` is one expert's unsharded width, ``distribution`` how tokens load the experts."""

    hidden: int
    inter: int
    topk: int
    experts: int
    moe_ep: int
    moe_tp: int = 1
    quant: str
    distribution: str
    gated: bool = True

    quants = MOE

    def weight_bytes(self) -> float:
        """Resident experts of one rank, floored after each split as the reference does."""
        matrices = 3 if self.gated else 2
        whole = self.hidden * self.inter * self.experts * MOE[self.quant].bytes * matrices
        return self.scale * (whole // max(self.moe_ep, 1) // max(self.moe_tp, 1))

    @cached_property
    def layer(self) -> Layer:
        sizes = Shape(self.topk, self.experts, self.hidden, self.inter, self.moe_tp, self.moe_ep)
        return Layer(self.quant, self.distribution, sizes, self.gated)


@dataclass(frozen=True, kw_only=True)
class Moe(_Experts):
    """Fused expert FFN."""

    attn_dp: int = 1
    is_context: bool = True
    moe_backend: str | None = None
    eplb: bool = False

    def sol(self, db: Database, at: Points) -> Split:
        return self.layer.roofline(db.system, self._pooled(at).x)

    def price(self, db: Database, at: Points) -> Answer:
        db.system.rate(MOE[self.quant])
        if (db.backend, self.moe_backend) in RETIRED and db.mode is not Mode.SOL:
            raise PerfDataMissing(f"{self.name}: {db.backend} retired the fused {self.moe_backend} path", op=self.name)
        return by_mode(
            db,
            self._pooled(at),
            silicon=lambda at: self.measured(db, at),
            empirical=lambda at: self._estimated(db, at),
            sol=lambda at: self.layer.roofline(db.system, at.x).time,
        )

    def _pooled(self, at: Points) -> Points:
        """Every attention-DP rank's tokens meet in the shared expert pool."""
        return at.with_(x=np.minimum(at.x * max(self.attn_dp, 1), MOST_TOKENS))

    def measured(self, db: Database, at: Points) -> Answer:
        """The measured latency at ``at.x`` tokens in the expert pool."""
        db.system.rate(MOE[self.quant])
        if self.eplb and self.is_context and db.backend in EPLB_TOKENS:
            at = at.with_(x=np.trunc(at.x * EPLB_TOKENS[db.backend]))
        return self._by_table(db, at, lambda table, at: token_curve(db, self.layer.slice(db, table), at.x, self.name))

    def _estimated(self, db: Database, at: Points) -> Answer:
        def ask(table: str, at: Points) -> Answer:
            sol = self.layer.roofline(db.system, at.x).time
            return estimated(basis(db, table, self.layer), (at.x,), sol, self.name)

        if db.find(STANDARD) is None and db.find(LOW_LATENCY) is None:
            # The reference fails on the data where it would have read several quantisations, on the basis elsewhere.
            reads_several = self._suits_low_latency(at) | bool(db.policy & {Tier.XQUANT, Tier.XPROFILE})
            return choose(reads_several, lambda at: self.measured(db, at), lambda at: ask(STANDARD, at), at)
        return self._by_table(db, at, ask)

    def _by_table(self, db: Database, at: Points, ask: Callable[[str, Points], Answer]) -> Answer:
        """``ask`` the low-latency table for the points it serves where it holds the layer, else the standard one."""
        low = self._suits_low_latency(at)
        if low.any() and self.layer.slice(db, LOW_LATENCY).find(db) is None:
            low = np.zeros(len(at), np.bool_)
        return choose(low, lambda at: ask(LOW_LATENCY, at), lambda at: ask(STANDARD, at), at)

    def _suits_low_latency(self, at: Points) -> Mask:
        suits: Mask = at.x <= (LOW_LATENCY_TOKENS if self.gated and self.quant in LOW_LATENCY_QUANTS else -1)
        return suits


# --- under a large-EP all-to-all -------------------------------------------------------------------------------------

DEEPEP = "deepep_moe"
DEEPEP_EPLB_TOKENS = 0.8  # share of the prefill tokens that balanced experts of the DeepEP kernel see
# Frameworks whose ordinary expert table stands in where the large-EP one has no data.
ORDINARY_EXPERTS = frozenset({"vllm", "trtllm"})


@dataclass(frozen=True, slots=True)
class KernelRule:
    """The kernel a framework runs: ``block_kernel`` for block-scaled fp8 from ``block_sm`` on, else ``kernel``;
    ``any_other``: where the table holds another kernel instead, that one."""

    kernel: str
    block_kernel: str = ""
    block_sm: int = 0
    any_other: bool = False

    def pick(self, quant: str, sm: int, table: Table | None) -> str:
        blocked = bool(self.block_kernel) and sm >= self.block_sm and "fp8_block" in quant
        wanted = self.block_kernel if blocked else self.kernel
        held = sorted(map(str, table.children())) if self.any_other and table is not None else [wanted]
        return wanted if wanted in held else held[0]


KERNELS = {
    "sglang": KernelRule(DEEPEP),
    "vllm": KernelRule(DEEPEP),
    "trtllm": KernelRule("moe_torch_flow", "deepgemm", block_sm=100, any_other=True),
}


@dataclass(frozen=True, kw_only=True)
class MoeExperts(_Experts):
    """Experts of one of ``moe_ep`` ranks; ``slots`` counts expert replicas (None: one each), ``phase`` context or
    generation, ``kernel`` None takes the backend's usual one."""

    attn_dp: int
    phase: str
    slots: int | None = None
    kernel: str | None = None
    eplb: bool = False

    table = "moe_expert_compute"

    @cached_property
    def ordinary(self) -> Moe:
        """The same experts as a fused FFN."""
        return Moe(**{field.name: getattr(self, field.name) for field in fields(_Experts)})

    def price(self, db: Database, at: Points) -> Answer:
        if self.phase not in PHASES:
            raise InvalidField("phase", f"unknown phase {self.phase!r}; one of {', '.join(PHASES)}", why="enum")
        if not db.mode.shared:
            raise no_basis(f"{self.name}: experts under an all-to-all are known from measurements only;")
        kernel = self._kernel(db)
        tokens = at.x * max(self.attn_dp, 1)
        if self.eplb and self.phase == CONTEXT and kernel == DEEPEP:
            tokens = np.trunc(tokens * DEEPEP_EPLB_TOKENS)
        at = at.with_(x=tokens)

        def own(at: Points) -> Answer:
            return token_curve(db, self._slice(db, kernel), at.x, self.name)

        def nothing(at: Points) -> Answer:
            raise no_basis(self.name)

        if db.backend in ORDINARY_EXPERTS:
            return or_else(own, lambda at: self.ordinary.measured(db, at), at, PerfDataMissing)
        return or_else(own, nothing, at, PerfDataMissing) if db.mode is Mode.HYBRID else own(at)

    def _kernel(self, db: Database) -> str:
        rule = KERNELS.get(db.backend, KERNELS["sglang"])
        return self.kernel or rule.pick(self.quant, db.system.sm_version or -1, db.find(self.table))

    def _slice(self, db: Database, kernel: str) -> Slice:
        quant, replicas = MOE[self.quant], self.experts if self.slots is None else self.slots
        rate = db.system.rate(MOE["bfloat16"]) * quant.compute

        def sol(tokens: F64) -> F64:
            sizes, mem_bw = self.layer.shape, db.system.mem_bw
            return sizes.roofline(tokens, self.gated, quant.bytes, rate, mem_bw, replicas).time

        distribution = self._distribution(db.table(self.table), kernel)
        sizes = (self.topk, self.experts, replicas, self.hidden, self.inter, 1, self.moe_ep)
        return Slice(self.table, (kernel, self.quant, distribution, self.phase, *sizes), sol, also=self.gated)

    def _distribution(self, table: Table, kernel: str) -> str:
        """The asked one if it was measured in this phase, else the one that stands in, else the first that was."""
        measured = map(str, table.children(kernel, self.quant))
        held = [name for name in measured if table.rows(kernel, self.quant, name, self.phase) is not None]
        return next((name for name in (self.distribution, ANY_DISTRIBUTION, *held) if name in held), self.distribution)


# --- exchange and experts in one kernel ------------------------------------------------------------------------------

MEGA_FIRST_SM = 100
SAME_DISTRIBUTION = {"uniform": "balanced"}


@dataclass(frozen=True, kw_only=True)
class MegaMoe(_Experts):
    """DeepSeek-V4's module at rank-local tokens; every field but ``name`` and ``scale`` is part of the measured key."""

    is_context: bool
    source_policy: str = "random"
    pre_dispatch: str = "sglang_jit"
    fused_shared_experts: int = 0
    kernel: str = "deepgemm_megamoe"
    kernel_dtype: str = "fp8_fp4"

    def price(self, db: Database, at: Points) -> Answer:
        if (db.system.sm_version or -1) < MEGA_FIRST_SM:
            raise UnsupportedCombination(
                "megamoe", f"{db.system.name} is older than sm {MEGA_FIRST_SM}", why="sm_version"
            )
        if not db.mode.shared:
            raise PerfDataMissing(
                f"{self.name}: MegaMoE is known from measurements only, not in {db.mode}", op=self.name
            )
        key = (
            CONTEXT if self.is_context else GENERATION,
            *(self.kernel, self.kernel_dtype, self.quant, self.pre_dispatch, self.source_policy),
            SAME_DISTRIBUTION.get(self.distribution, self.distribution),
            *(self.topk, self.experts, self.fused_shared_experts, self.hidden, self.inter, self.moe_tp, self.moe_ep),
        )
        # beyond the measured tokens latency grows with their number
        return Slice("dsv4_megamoe_module", key, lambda tokens: tokens).measured(db, (at.x,), self.name)
