"""The large-EP all-to-all: its backends as data, what they carry on the wire, one phase of it (spec/03 5, 13.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from perfcast_engine import data
from perfcast_engine.answer import F64, Answer, Points, Source
from perfcast_engine.errors import InvalidField
from perfcast_engine.interp.grid import Grid
from perfcast_engine.interp.surface import Surface
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.measured import Slice, measured_only, no_slice
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
            both = Grid.of([c[here] for c in own.grid.coords], own.grid.ms[here] + other.grid.ms[there])
            return Surface(both, own.sol) if len(here) else None

        both = db.kept(("both halves", key), build)
        return None if both is None else (other, both)


def _half(key: tuple[Key, ...]) -> Slice:
    """One half of an exchange over (sms, tokens), held in proportion to the tokens."""
    return Slice(TABLE, key, lambda sms, tokens: tokens)
