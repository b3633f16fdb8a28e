"""Token exchange before and after a fused expert FFN, composed of collectives (spec/03 section 4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from perfcast_engine.answer import F64, Answer, Points, Source, total
from perfcast_engine.errors import InvalidField, UnsupportedCombination
from perfcast_engine.ops.base import Op, Split
from perfcast_engine.ops.collective import AllReduce, Nccl
from perfcast_engine.ops.measured import Slice
from perfcast_engine.quant import MOE
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode

TRTLLM_FLAVOR, RETIRED_FLAVOR = "TrtllmAlltoall", "RetiredDeepEp"
PACKED = {"nvfp4": 0.25 + 0.03125, "fp8": 0.5, "fp8_block": 0.5}  # size on the wire relative to half precision
NVLINK_TABLE, NVLINK_KERNEL = "trtllm_alltoall", "NVLinkOneSided"
NVL72 = 72  # GPUs that one NVLink domain must count as a node for the all-to-all to be taken
GPUS_PER_TRAY = 4  # ... and that the table counts as one


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
        if self.backend not in RULES:
            raise InvalidField("backend", f"unknown backend {self.backend!r}; one of {', '.join(RULES)}", why="enum")

    @property
    def ranks(self) -> int:
        return max(self.moe_tp * self.moe_ep, 1)

    @property
    def dp(self) -> int:
        return max(self.attn_dp, 1)

    @property
    def attn_tp(self) -> int:
        return max(self.moe_tp * self.moe_ep // self.dp, 1)

    def price(self, db: Database, at: Points) -> Answer:
        if self.flavor == RETIRED_FLAVOR:
            raise UnsupportedCombination("flavor", f"the fused path of {self.flavor} is retired", why="moe_backend")
        rules = TRTLLM_RULES if self.flavor == TRTLLM_FLAVOR else RULES[self.backend]
        rule = next((rule for rule in rules if rule.applies(self, db.system)), NOTHING)
        steps = rule.pre if self.pre else rule.post
        return total((step.price(self, db, at) for step in steps), len(at)).tagged(Source.SILICON)

    def sol(self, db: Database, at: Points) -> Split:
        """Of an exchange of nothing; SolNotDefined for any other."""
        time = self.price(db.in_mode(Mode.SOL), at).ms
        return super().sol(db, at) if time.any() else Split.memory(time)


class Step(NamedTuple):
    """One collective over all ranks of the experts, or the ``attn_tp`` ranks of one attention group; ``pooled`` moves
    the tokens of all attention-DP ranks, ``packed`` in the experts' own precision."""

    operation: str
    attn_group: bool = False
    pooled: bool = False
    packed: bool = False

    def price(self, op: MoeDispatch, db: Database, at: Points) -> Answer:
        gpus = op.attn_tp if self.attn_group else op.ranks
        if self.operation == "all_reduce":
            return AllReduce(name=op.name, hidden=op.hidden, gpus=gpus).price(db, at)
        elements = op.hidden * (PACKED.get(op.quant, 1.0) if self.packed else 1.0)
        moved = at.with_(x=at.x * op.dp) if self.pooled else at
        return Nccl(name=op.name, operation=self.operation, elements_per_token=elements, gpus=gpus).price(db, moved)


class NvlinkStep(NamedTuple):
    """One half of the measured all-to-all of a rack-scale node; ``packed`` in the experts' own precision."""

    operation: str
    packed: bool

    def price(self, op: MoeDispatch, db: Database, at: Points) -> Answer:
        system, nodes = db.system, max(op.moe_ep // GPUS_PER_TRAY, 1)
        dtype = "fp8" if op.quant == "fp8_block" else op.quant
        key = (NVLINK_KERNEL, self.operation, dtype, nodes, op.hidden, op.topk, op.experts, op.moe_ep)
        peers = min(op.topk, op.experts, op.moe_ep - 1)
        moved = peers * op.hidden * (MOE[op.quant].bytes if self.packed else 2)  # bytes a token

        def sol(tokens: F64) -> F64:
            return tokens * moved / (system.inter_node_bw if nodes > 1 else system.intra_node_bw) * 1000

        curve = Slice(NVLINK_TABLE, key, sol, also=(self.packed, op.quant))
        return curve.price(db, at, lambda at: (at.x,), op.name)


class Rule(NamedTuple):
    """When it holds, and what is exchanged before and after the experts; the first rule of a framework that holds."""

    applies: Callable[[MoeDispatch, SystemSpec], bool]
    pre: tuple[Step | NvlinkStep, ...] = ()
    post: tuple[Step | NvlinkStep, ...] = ()


REDUCE, REDUCE_GROUP = Step("all_reduce"), Step("all_reduce", attn_group=True)
GATHER, SCATTER = Step("all_gather"), Step("reduce_scatter")
GATHER_POOL, SCATTER_POOL = Step("all_gather", pooled=True), Step("reduce_scatter", pooled=True)
GATHER_PACKED = Step("all_gather", pooled=True, packed=True)
GATHER_GROUP, SCATTER_GROUP = Step("all_gather", attn_group=True), Step("reduce_scatter", attn_group=True)


def _blackwell(system: SystemSpec) -> bool:
    """Not its successors: the reference asks for sm 100 exactly."""
    return system.sm_version == 100


NOTHING = Rule(lambda op, system: True)
_SPLIT = Rule(lambda op, system: op.attn_tp > 1, (REDUCE,), (REDUCE,))
_POOLED = Rule(lambda op, system: op.dp > 1, (GATHER_POOL,), (SCATTER_POOL,))

# By the framework that the operator was built for, where it takes its plain path.
RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "vllm": (
            Rule(
                lambda op, system: op.attn_tp > 1 and op.dp > 1 and not (op.pre and op.attn_ar_modeled),
                (REDUCE, GATHER_POOL),
                (REDUCE, SCATTER_POOL),
            ),
            Rule(lambda op, system: op.attn_tp > 1 and not (op.pre and op.attn_ar_modeled), (REDUCE,), (REDUCE,)),
            _POOLED,
        ),
        "sglang": (
            Rule(
                lambda op, system: op.attn_tp > 1 and op.dp > 1,
                (SCATTER_GROUP, GATHER_POOL),
                (SCATTER_POOL, GATHER_GROUP),
            ),
            Rule(lambda op, system: op.attn_cp > 1 and op.is_context, (GATHER,), (SCATTER,)),
            Rule(lambda op, system: op.attn_cp > 1, (), (REDUCE,)),
            _SPLIT,
            _POOLED,
        ),
        "trtllm": (Rule(lambda op, system: True, (REDUCE_GROUP,), (REDUCE_GROUP,)),),
    }
)
TRTLLM_RULES = (
    Rule(
        lambda op, system: _blackwell(system) and op.dp > 1 and op.moe_tp == 1 and system.gpus_per_node >= NVL72,
        (NvlinkStep("alltoall_dispatch", packed=True),),
        (NvlinkStep("alltoall_combine", packed=False),),
    ),
    Rule(lambda op, system: _blackwell(system) and op.dp > 1, (GATHER_PACKED,), (SCATTER_POOL,)),
    _SPLIT,
    _POOLED,
)
