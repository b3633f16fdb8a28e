"""Token exchange before and after a fused expert FFN, composed of collectives (spec/03 section 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from perfcast_engine import data
from perfcast_engine.answer import F64, Answer, Points, Source, total
from perfcast_engine.errors import InvalidField, UnsupportedCombination
from perfcast_engine.formula import compiled, scope, value
from perfcast_engine.ops.base import Op, Split
from perfcast_engine.ops.collective import AllReduce, Nccl
from perfcast_engine.ops.measured import Slice
from perfcast_engine.quant import MOE
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode

TRTLLM_FLAVOR, RETIRED_FLAVOR = "TrtllmAlltoall", "RetiredDeepEp"
PACKED = {"nvfp4": 0.25 + 0.03125, "fp8": 0.5, "fp8_block": 0.5}  # size on the wire relative to half precision
GPUS_PER_TRAY = 4  # of a rack-scale node, that the table of its all-to-all counts as a node


class Step(NamedTuple):
    """One exchange, as kernels.yaml tells it."""

    operation: str
    attn_group: bool = False
    pooled: bool = False
    packed: bool = False
    nvlink: bool = False


STEPS = {name: Step(**row) for name, row in data.table("kernels")["dispatch"]["steps"].items()}
RULES = data.table("kernels")["dispatch"]["rules"]


@dataclass(frozen=True, kw_only=True)
class MoeDispatch(Op):
    """One exchange; ``pre`` before the experts. ``sms`` and ``token_div`` are carried and priced by nothing."""

    hidden: int
    topk: int
    experts: int
    moe_tp: int
    moe_ep: int
    attn_dp: int
    pre: bool
    backend: str
    flavor: str
    quant: str
    is_context: bool = True
    attn_cp: int = 1
    sms: int = 12
    token_div: int = 1
    attn_ar_modeled: bool = False

    quants = MOE

    def __post_init__(self) -> None:
        super().__post_init__()
        known = [name for name in RULES if name != TRTLLM_FLAVOR]
        if self.backend not in known:
            raise InvalidField("backend", f"unknown backend {self.backend!r}; one of {', '.join(known)}", why="enum")

    @property
    def dp(self) -> int:
        return max(self.attn_dp, 1)

    @property
    def attn_tp(self) -> int:
        return max(self.moe_tp * self.moe_ep // self.dp, 1)

    def steps(self, system: SystemSpec) -> Iterator[Step]:
        """What is exchanged one after the other; nothing where no rule holds."""
        names = scope(**vars(self), tp=self.attn_tp, dp=self.dp, system=system)
        for rule in RULES[TRTLLM_FLAVOR if self.flavor == TRTLLM_FLAVOR else self.backend]:
            if value(compiled(rule["when"]), names):
                return map(STEPS.__getitem__, rule["pre" if self.pre else "post"])
        return iter(())

    def price(self, db: Database, at: Points) -> Answer:
        if self.flavor == RETIRED_FLAVOR:
            raise UnsupportedCombination("flavor", f"the fused path of {self.flavor} is retired", why="moe_backend")
        answers = ((self._nvlink if s.nvlink else self._collective)(s, db, at) for s in self.steps(db.system))
        return total(answers, len(at)).tagged(Source.SILICON)

    def sol(self, db: Database, at: Points) -> Split:
        """Of an exchange of nothing; SolNotDefined for any other."""
        time = self.price(db.in_mode(Mode.SOL), at).ms
        return super().sol(db, at) if time.any() else Split.memory(time)

    def _collective(self, step: Step, db: Database, at: Points) -> Answer:
        gpus = self.attn_tp if step.attn_group else max(self.moe_tp * self.moe_ep, 1)
        if step.operation == "all_reduce":
            return AllReduce(name=self.name, hidden=self.hidden, gpus=gpus).price(db, at)
        elements = self.hidden * (PACKED.get(self.quant, 1.0) if step.packed else 1.0)
        moved = at.with_(x=at.x * self.dp) if step.pooled else at
        return Nccl(name=self.name, operation=step.operation, elements_per_token=elements, gpus=gpus).price(db, moved)

    def _nvlink(self, step: Step, db: Database, at: Points) -> Answer:
        system, nodes = db.system, max(self.moe_ep // GPUS_PER_TRAY, 1)
        dtype = "fp8" if self.quant == "fp8_block" else self.quant
        key = ("NVLinkOneSided", step.operation, dtype, nodes, self.hidden, self.topk, self.experts, self.moe_ep)
        peers = min(self.topk, self.experts, self.moe_ep - 1)
        moved = peers * self.hidden * (MOE[self.quant].bytes if step.packed else 2)  # bytes a token

        def sol(tokens: F64) -> F64:
            return tokens * moved / (system.inter_node_bw if nodes > 1 else system.intra_node_bw) * 1000

        curve = Slice("trtllm_alltoall", key, sol, also=(step.packed, self.quant))
        return curve.over_tokens(db, at, self.name)
