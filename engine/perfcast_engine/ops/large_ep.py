"""Experts under a large-EP all-to-all (spec/03 5 to 7, 13.3): its backends, what they carry, its phases, the layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType

import numpy as np

from perfcast_engine import data
from perfcast_engine.answer import F64, Answer, Points, Source, or_else
from perfcast_engine.errors import InvalidField, PerfDataMissing, UnsupportedCombination
from perfcast_engine.formula import compiled, scope, value
from perfcast_engine.interp.grid import Grid
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.measured import Slice, measured_only, no_slice
from perfcast_engine.ops.moe import ANY_DISTRIBUTION, Experts, Moe, token_curve
from perfcast_engine.quant import MOE
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database
from perfcast_engine.tables.table import Key, Table

CONTEXT, GENERATION = "context", "generation"
PHASES = (CONTEXT, GENERATION)
MEASURED_NODE = MappingProxyType({"sglang": 8})  # ranks of the node whose exchange stands in for one over several
HOPPER = frozenset({"h100_sxm", "h200_sxm"})
NORMAL = MappingProxyType({"none": "bfloat16", "fp8_block": "fp8"})  # MoE mode -> how the wire calls it


@dataclass(frozen=True, slots=True)
class CommBackend:
    """One way to exchange tokens between experts. ``frameworks`` and ``phases`` it serves, ``steps`` it consists of;
    ``deep`` is the DeepEP of SGLang and vLLM; ``one_node_stands_in``: where a spread over several nodes was not
    measured, that of one node is taken; ``sms`` it occupies by default."""

    name: str
    frameworks: Sequence[str]
    phases: Sequence[str]
    steps: Sequence[str] = ("dispatch", "combine")
    min_sm: int = 0
    max_topk: int = 8
    min_attn_dp: int = 1
    deep: bool = False
    one_node_stands_in: bool = False
    sms: int = 0
    wire: str = "default"


KERNELS = data.table("kernels")
# In order of preference.
BACKENDS = {name: CommBackend(name, **row) for name, row in KERNELS["all_to_all"].items()}


def comm_backend(name: str, field: str = "comm_backend") -> CommBackend:
    """The backend called ``name``; InvalidField lists the known ones."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise InvalidField(field, f"unknown all-to-all {name!r}; one of {', '.join(BACKENDS)}", why="enum") from None


def wire_dtype(backend: CommBackend, phase: str, step: str, moe_quant: str, system: str) -> str:
    """What ``backend`` sends in ``step`` of ``phase`` for experts in ``moe_quant``; InvalidField where it cannot."""
    mode = NORMAL.get(moe_quant, moe_quant)
    if backend.wire == "default":
        return "default"
    if backend.wire == "nvlink":
        return "fp4" if (mode, phase, step) == ("nvfp4", GENERATION, "combine") else mode
    sent = KERNELS["wires"][backend.wire].get(mode)
    if sent is None or ((backend.wire, mode) == ("ll", "nvfp4") and system in HOPPER):
        raise InvalidField("moe_quant", f"{backend.name} cannot carry {moe_quant} on {system}", why="wire_dtype")
    dispatch, combine = map(str, sent)
    return combine if step == "combine" else dispatch


def measured_node(db: Database) -> int:
    """Ranks of the single node whose exchange stands in for an unmeasured one over several nodes."""
    return MEASURED_NODE.get(db.backend, db.system.gpus_per_node)


TABLE = "moe_a2a"
OTHER_HALF = {"dispatch": "combine", "combine": "dispatch"}
SAME_DTYPE = {"fp8_block": "fp8"}

Spread = tuple[int, int]  # (EP ranks, nodes)


@dataclass(frozen=True, kw_only=True)
class MoeAllToAll(Op):
    """``phase`` (prepare, dispatch, combine) of the exchange that ``comm_backend`` makes between ``moe_ep`` ranks on
    ``nodes`` nodes, on ``sms`` multiprocessors of each GPU."""

    phase: str
    comm_backend: str
    comm_dtype: str = "default"
    hidden: int
    topk: int
    experts: int
    moe_ep: int
    nodes: int
    sms: int = 0
    attn_tp: int = 1

    @cached_property
    def backend(self) -> CommBackend:
        return comm_backend(self.comm_backend)

    def price(self, db: Database, at: Points) -> Answer:
        if self.phase not in self.backend.steps:
            steps = ", ".join(self.backend.steps)
            raise InvalidField("phase", f"{self.comm_backend} has {steps}, not {self.phase!r}", why="enum")
        if db.mode.shared:
            db.table(TABLE)
        at = at.with_(x=np.floor(at.x / max(self.attn_tp, 1)))
        return measured_only(db, at, lambda at: self._measured(db, at.x), self.name)

    def _measured(self, db: Database, tokens: F64) -> Answer:
        spread = self.measured_spread(db)
        answer = self._exchange(db, spread, tokens)
        return answer if spread == (self.moe_ep, self.nodes) else answer.tagged(Source.ESTIMATED)

    def measured_spread(self, db: Database) -> Spread:
        """The spread whose measurements answer: the asked one, or the single node that stands in for it."""
        asked = (self.moe_ep, self.nodes)
        if self.nodes > 1 and self.backend.one_node_stands_in:
            table = db.table(TABLE)
            if table.rows(*self._key(table, self.phase, asked)) is None:
                return measured_node(db), 1
        return asked

    def _key(self, table: Table, half: str, spread: Spread) -> tuple[Key, ...]:
        shape = (self.hidden, self.topk, self.experts)
        return self.comm_backend, half, self._dtype(table, half), *spread, *shape

    def _dtype(self, table: Table, half: str) -> Key:
        """The measured wire dtype that answers: the asked one, its alias, or the only one where that has no name."""
        held = table.children(self.comm_backend, half)
        if not held:
            raise no_slice(table, (self.comm_backend, half))
        for name in (self.comm_dtype, SAME_DTYPE.get(self.comm_dtype)):
            if name in held:
                return name
        if held == ["default"]:
            return "default"
        raise no_slice(table, (self.comm_backend, half, self.comm_dtype))

    def _exchange(self, db: Database, spread: Spread, tokens: F64) -> Answer:
        key = self._key(db.table(TABLE), self.phase, spread)
        swept = self.backend.sms > 0
        if not swept or (spread[1] == 1 and self.sms == self.backend.sms):
            curve = Slice(TABLE, (*key, self.sms), lambda tokens: tokens)
            if curve.find(db) is not None:
                return curve.measured(db, (tokens,), self.name)
        query = (np.full(len(tokens), float(self.sms)), tokens)
        answer = _half(key).measured(db, query, self.name)
        whole = self._both_halves(db, key, spread) if swept else None
        if whole is not None:
            other, both = whole
            parts = answer.ms + other.at(*query).ms
            scaled = parts > 0
            answer.ms[scaled] *= both.at(*query).ms[scaled] / parts[scaled]
        return answer

    def _both_halves(self, db: Database, key: tuple[Key, ...], spread: Spread) -> tuple[Surface, Surface] | None:
        """The other half of the exchange, and the sum of both where both were measured; None without such a point."""
        table, half = db.table(TABLE), OTHER_HALF[self.phase]
        other = _half(self._key(table, half, spread)).find(db) if table.children(self.comm_backend, half) else None
        if other is None:
            return None
        own = _half(key).surface(db)

        def build() -> Surface | None:
            here, there = own.grid.shared(other.grid)
            both = Grid(tuple(c[here] for c in own.grid.coords), own.grid.ms[here] + other.grid.ms[there])
            return Surface(both, own.sol) if len(here) else None

        both = db.kept(("both halves", key), build)
        return None if both is None else (other, both)


def _half(key: tuple[Key, ...]) -> Slice:
    """One half of an exchange over (sms, tokens), held in proportion to the tokens."""
    return Slice(TABLE, key, lambda sms, tokens: tokens)


DEEPEP = "deepep_moe"
EPLB_TOKENS = 0.8  # share of the prefill tokens that balanced experts of the DeepEP kernel see
# Frameworks whose ordinary expert table stands in where the large-EP one has no data.
ORDINARY_EXPERTS = frozenset({"vllm", "trtllm"})


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
        rules, table = KERNELS["expert_kernels"], db.find(self.table)
        rule = rules.get(db.backend, rules["sglang"])
        wanted = str(value(compiled(rule["kernel"]), scope(quant=self.quant, sm=db.system.sm_version or -1)))
        held = sorted(map(str, table.children())) if rule.get("any_other") and table is not None else [wanted]
        return wanted if wanted in held else held[0]

    def _curve(self, db: Database, kernel: str) -> Slice:
        system = db.system
        self.rate(system)
        key = (kernel, self.quant, self._distribution(db.table(self.table), kernel), self.phase, *self.named_key)
        return Slice(self.table, key, lambda tokens: self.roofline(system, tokens).time, also=self.shape)

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
