"""Expert FFN under a large-EP all-to-all (spec/03 section 6)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from perfcast_engine.answer import F64, Answer, Points, or_else
from perfcast_engine.errors import InvalidField, PerfDataMissing
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.base import Op, no_basis, require, slice_of
from perfcast_engine.ops.comm_backends import CONTEXT, PHASES
from perfcast_engine.ops.experts import ANY_DISTRIBUTION, Shape, expert_weight_bytes, token_curve
from perfcast_engine.ops.moe import Moe
from perfcast_engine.quant import MOE, mode
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Table

TABLE = "moe_expert_compute"
DEEPEP = "deepep_moe"
EPLB_TOKENS = 0.8  # share of the prefill tokens that balanced experts of the DeepEP kernel see
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
class MoeExperts(Op):
    """Experts of one of ``moe_ep`` ranks; ``slots`` counts expert replicas (None: one each), ``phase`` context or
    generation, ``kernel`` None takes the backend's usual one."""

    hidden: int
    inter: int
    topk: int
    experts: int
    moe_ep: int
    quant: str
    distribution: str
    attn_dp: int
    phase: str
    slots: int | None = None
    kernel: str | None = None
    gated: bool = True
    eplb: bool = False

    def __post_init__(self) -> None:
        require(self, hidden=0, inter=0, topk=0, experts=0, moe_ep=0, attn_dp=0)
        mode(MOE, self.quant, "quant")

    def weight_bytes(self) -> float:
        return self.scale * expert_weight_bytes(
            self.hidden, self.inter, self.experts, self.quant, self.gated, self.moe_ep
        )

    @property
    def replicas(self) -> int:
        return self.experts if self.slots is None else self.slots

    @cached_property
    def ordinary(self) -> Moe:
        """The same experts as a fused FFN."""
        return Moe(
            name=self.name,
            hidden=self.hidden,
            inter=self.inter,
            topk=self.topk,
            experts=self.experts,
            moe_tp=1,
            moe_ep=self.moe_ep,
            quant=self.quant,
            distribution=self.distribution,
            gated=self.gated,
        )

    def price(self, db: Database, at: Points) -> Answer:
        if self.phase not in PHASES:
            raise InvalidField("phase", f"unknown phase {self.phase!r}; one of {', '.join(PHASES)}", why="enum")
        if not db.mode.shared:
            raise no_basis(f"{self.name}: experts under an all-to-all are known from measurements only;")
        kernel = self._kernel(db)
        tokens = at.x * max(self.attn_dp, 1)
        if self.eplb and self.phase == CONTEXT and kernel == DEEPEP:
            tokens = np.trunc(tokens * EPLB_TOKENS)
        at = at.with_(x=tokens)

        def own(at: Points) -> Answer:
            return token_curve(self._curve(db, kernel), at.x, self.name)

        def nothing(at: Points) -> Answer:
            raise no_basis(self.name)

        if db.backend in ORDINARY_EXPERTS:
            return or_else(own, lambda at: self.ordinary.measured(db, at), at, PerfDataMissing)
        return or_else(own, nothing, at, PerfDataMissing) if db.mode is Mode.HYBRID else own(at)

    def _kernel(self, db: Database) -> str:
        rule = KERNELS.get(db.backend, KERNELS["sglang"])
        return self.kernel or db.kept(
            ("expert kernel", self.quant), lambda: rule.pick(self.quant, db.system.sm_version or -1, db.find(TABLE))
        )

    def _curve(self, db: Database, kernel: str) -> Surface:
        quant, system = MOE[self.quant], db.system
        rate = system.rate(MOE["bfloat16"]) * quant.compute
        table = db.table(TABLE)
        asked = (kernel, self.quant, self.distribution, self.phase)
        distribution = db.kept(("expert distribution", *asked), lambda: self._distribution(table, kernel))
        shape = (self.topk, self.experts, self.replicas, self.hidden, self.inter, 1, self.moe_ep)

        def sol(tokens: F64) -> F64:
            layer = Shape(self.topk, self.experts, self.hidden, self.inter, 1, self.moe_ep)
            return layer.roofline(tokens, self.gated, quant.bytes, rate, system.mem_bw, self.replicas).time

        key = (kernel, self.quant, distribution, self.phase, *shape)
        return slice_of(db, TABLE, key, sol, also=self.gated)

    def _distribution(self, table: Table, kernel: str) -> str:
        """The asked one if it was measured in this phase, else the one that stands in, else the first that was."""
        measured = map(str, table.children(kernel, self.quant))
        held = [name for name in measured if table.rows(kernel, self.quant, name, self.phase) is not None]
        for name in (self.distribution, ANY_DISTRIBUTION, *held):
            if name in held:
                return name
        return self.distribution
