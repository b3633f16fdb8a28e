"""Experts under a large-EP all-to-all, and in one kernel with it (spec/03 sections 6, 7)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from perfcast_engine import data
from perfcast_engine.answer import Answer, Points, or_else
from perfcast_engine.errors import InvalidField, PerfDataMissing, UnsupportedCombination
from perfcast_engine.formula import compiled, scope, value
from perfcast_engine.ops.all_to_all import CONTEXT, GENERATION, PHASES
from perfcast_engine.ops.measured import Slice, measured_only
from perfcast_engine.ops.moe import ANY_DISTRIBUTION, Experts, Moe, token_curve
from perfcast_engine.quant import MOE
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Table

DEEPEP = "deepep_moe"
EPLB_TOKENS = 0.8  # share of the prefill tokens that balanced experts of the DeepEP kernel see
# Frameworks whose ordinary expert table stands in where the large-EP one has no data.
ORDINARY_EXPERTS = frozenset({"vllm", "trtllm"})


KERNELS = data.table("kernels")["expert_kernels"]


@dataclass(frozen=True, kw_only=True)
class MoeExperts(Experts):
    """Experts of one of ``moe_ep`` ranks; ``slots`` counts expert replicas (None: one each), ``phase`` context or
    generation, ``kernel`` None takes the backend's usual one."""

    attn_dp: int
    phase: str
    slots: int | None = None
    kernel: str | None = None
    eplb: bool = False

    table = "moe_expert_compute"
    keyed_by = ("topk", "experts", "replicas", "hidden", "inter", "moe_tp", "moe_ep")

    @property
    def replicas(self) -> int:
        return self.experts if self.slots is None else self.slots

    def rate(self, system: SystemSpec) -> float:
        return system.rate(MOE["bfloat16"]) * MOE[self.quant].compute

    @cached_property
    def ordinary(self) -> Moe:
        """The same experts as a fused FFN."""
        return Moe(**{field.name: getattr(self, field.name) for field in fields(Experts)})

    def price(self, db: Database, at: Points) -> Answer:
        if self.phase not in PHASES:
            raise InvalidField("phase", f"unknown phase {self.phase!r}; one of {', '.join(PHASES)}", why="enum")
        kernel = self.kernel or self._usual_kernel(db)
        tokens = at.x * max(self.attn_dp, 1)
        if self.eplb and self.phase == CONTEXT and kernel == DEEPEP:
            tokens = np.trunc(tokens * EPLB_TOKENS)

        def own(at: Points) -> Answer:
            return token_curve(db, self._curve(db, kernel), at.x, self.name)

        at = at.with_(x=tokens)
        if db.mode.shared and db.backend in ORDINARY_EXPERTS:
            return or_else(own, lambda at: self.ordinary.measured(db, at), at, PerfDataMissing)
        return measured_only(db, at, own, self.name)

    def _usual_kernel(self, db: Database) -> str:
        """The one that the framework runs, or any that was measured where the rule allows it."""
        rule, table = KERNELS.get(db.backend, KERNELS["sglang"]), db.find(self.table)
        wanted = str(value(compiled(rule["kernel"]), scope(quant=self.quant, sm=db.system.sm_version or -1)))
        held = sorted(map(str, table.children())) if rule.get("any_other") and table is not None else [wanted]
        return wanted if wanted in held else held[0]

    def _curve(self, db: Database, kernel: str) -> Slice:
        self.rate(db.system)
        key = (kernel, self.quant, self._distribution(db.table(self.table), kernel), self.phase, *self.named_key)
        return Slice(self.table, key, lambda tokens: self.roofline(db.system, tokens).time, also=self.shape)

    def _distribution(self, table: Table, kernel: str) -> str:
        """The asked one if it was measured in this phase, else the one that stands in, else the first that was."""
        measured = map(str, table.children(kernel, self.quant))
        held = [name for name in measured if table.rows(kernel, self.quant, name, self.phase) is not None]
        return next((name for name in (self.distribution, ANY_DISTRIBUTION, *held) if name in held), self.distribution)


FIRST_SM = 100  # that runs MegaMoE
SAME_DISTRIBUTION = {"uniform": "balanced"}


@dataclass(frozen=True, kw_only=True)
class MegaMoe(Experts):
    """DeepSeek-V4's module of exchange and experts at rank-local tokens, measured under all that it is asked with."""

    is_context: bool
    source_policy: str = "random"
    pre_dispatch: str = "sglang_jit"
    fused_shared_experts: int = 0
    kernel: str = "deepgemm_megamoe"
    kernel_dtype: str = "fp8_fp4"

    keyed_by = (
        *("phase", "kernel", "kernel_dtype", "quant", "pre_dispatch", "source_policy", "measured_distribution"),
        *("topk", "experts", "fused_shared_experts", "hidden", "inter", "moe_tp", "moe_ep"),
    )

    @property
    def phase(self) -> str:
        return CONTEXT if self.is_context else GENERATION

    @property
    def measured_distribution(self) -> str:
        return SAME_DISTRIBUTION.get(self.distribution, self.distribution)

    def price(self, db: Database, at: Points) -> Answer:
        if (db.system.sm_version or -1) < FIRST_SM:
            raise UnsupportedCombination("megamoe", f"{db.system.name} is older than sm {FIRST_SM}", why="sm_version")
        if not db.mode.shared:
            message = f"{self.name}: MegaMoE is known from measurements only, not in {db.mode}"
            raise PerfDataMissing(message, op=self.name)
        # beyond the measured tokens latency grows with their number
        curve = Slice("dsv4_megamoe_module", self.named_key, lambda tokens: tokens)
        return curve.measured(db, (at.x,), self.name)
