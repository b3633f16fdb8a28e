"""Communication between the GPUs of one engine (spec/02 sections 5.7, 5.8)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perfcast_engine.answer import F64, Answer, Points, Source, Tier, choose
from perfcast_engine.ops.base import Split, TokenOp
from perfcast_engine.ops.measured import Slice, by_mode, estimated
from perfcast_engine.quant import COMM
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key

NVL72 = 72  # GPUs per node of a rack-scale system, where NCCL takes over from the custom kernel above 4
NVL72_CUSTOM_GPUS = 4
PASSES = {"all_reduce": 2, "all_gather": 1, "alltoall": 1, "reduce_scatter": 1}


@dataclass(frozen=True, kw_only=True)
class _Collective(TokenOp):
    """Measured as curves (ms over elements), one a group size, in ``tables`` by preference; ``tail`` is the key below
    the group size."""

    gpus: int
    quant: str = "half"

    quants = COMM
    tables: ClassVar[tuple[str, ...]]
    tail: ClassVar[tuple[Key, ...]] = ()

    @property
    @abstractmethod
    def work(self) -> tuple[str, float]:
        """The operation, and the elements a token that each GPU contributes or receives."""

    def elements(self, at: Points) -> F64:
        return self.tokens(at) * self.work[1]

    def ring(self, system: SystemSpec, elements: F64, gpus: int) -> F64:
        """The roofline, ms; 0 for one GPU or an unknown operation."""
        moved = PASSES.get(self.work[0], 0) * (elements * COMM[self.quant].bytes)
        return moved / max(gpus, 1) * max(gpus - 1, 0) / system.group_bw(gpus) * 1000

    def price(self, db: Database, at: Points) -> Answer:
        if self.gpus <= 1:
            return Answer.zero(len(at), Source.SOL if db.mode is Mode.SOL else Source.EMPIRICAL)
        at = Points.of(1, 1, x=self.elements(at))
        return by_mode(db, at, self._silicon, self._empirical, lambda db, at: self.ring(db.system, at.x, self.gpus))

    def _silicon(self, db: Database, at: Points) -> Answer:
        present = self._present(db)
        largest = self._largest(db, present)
        key = (*self.named_key, min(self.gpus, largest), *self.tail)
        # a curve is held in proportion to the message size, which the roofline is too
        curves = [Slice(table, key, lambda size: size) for table in present]
        held = next((curve for curve in curves if curve.find(db) is not None), curves[0])
        return held.measured(db, (at.x,), self.name).scaled(self._beyond(db.system, largest))

    def _beyond(self, system: SystemSpec, largest: int) -> float:
        """The factor from the largest measured group to a larger one: ring share and bandwidth per GPU."""
        if self.gpus <= largest:
            return 1.0
        share = (self.gpus - 1) / self.gpus * largest / max(largest - 1, 1)
        return share * system.group_bw(largest) / system.group_bw(self.gpus)

    def _empirical(self, db: Database, at: Points) -> Answer:
        moves = self.ring(db.system, at.x, self.gpus) > 0
        nothing = Answer.zero(int(np.count_nonzero(~moves)), Source.EMPIRICAL)
        return choose(moves, lambda some: self._estimate(db, some.x), lambda _: nothing, at)

    def _estimate(self, db: Database, elements: F64) -> Answer:
        table = self._present(db)[0]
        system, group = db.system, min(self.gpus, self._largest(db, [table]))
        key = (*self.named_key, group, *self.tail)
        curve = Slice(table, key, lambda size: self.ring(system, size, group), also="util")
        basis = curve.basis(db)._replace(tier=Tier.EMPIRICAL if group == self.gpus else Tier.XSHAPE)
        return estimated(basis, (elements,), self.ring(db.system, elements, self.gpus), self.name)

    def _present(self, db: Database) -> list[str]:
        """The tables that there are, else the preferred one."""
        return [table for table in self.tables if db.find(table) is not None] or [self.tables[0]]

    def _largest(self, db: Database, names: list[str]) -> int:
        """The largest measured group; the asked one where none was measured."""
        tables = filter(None, map(db.find, names))
        return max((int(gpus) for table in tables for gpus in table.children(*self.named_key)), default=self.gpus)


@dataclass(frozen=True, kw_only=True)
class Nccl(_Collective):
    """An NCCL (or oneCCL) collective: ``operation`` is all_reduce, all_gather, reduce_scatter or alltoall."""

    operation: str
    elements_per_token: float

    tables, keyed_by = ("nccl", "oneccl"), ("quant", "operation")

    @property
    def work(self) -> tuple[str, float]:
        return self.operation, self.elements_per_token

    def sol(self, db: Database, at: Points) -> Split:
        return Split.memory(self.ring(db.system, self.elements(at), self.gpus))


@dataclass(frozen=True, kw_only=True)
class AllReduce(_Collective):
    """The framework's own all-reduce of ``hidden`` elements per token over ``gpus`` ranks, in half precision."""

    hidden: int

    tables, keyed_by, tail = ("custom_allreduce",), ("quant",), ("AUTO",)

    @property
    def work(self) -> tuple[str, float]:
        return "all_reduce", self.hidden

    def sol(self, db: Database, at: Points) -> Split:
        time = self.ring(db.system, self.elements(at), self.gpus)
        return Split(time, np.zeros(len(time)), np.zeros(len(time)))

    def price(self, db: Database, at: Points) -> Answer:
        if db.mode.shared and db.system.gpus_per_node == NVL72 and self.gpus > NVL72_CUSTOM_GPUS:
            nccl = Nccl(name=self.name, operation="all_reduce", elements_per_token=1, gpus=self.gpus)
            return nccl.price(db, at.with_(x=self.elements(at)))
        answer = super().price(db, at)
        return answer if self.gpus > 1 else answer.tagged(Source.EMPIRICAL)


@dataclass(frozen=True, kw_only=True)
class P2P(TokenOp):
    """The hand-over of ``hidden`` elements per token between the stages of a pipeline of depth ``pp``."""

    hidden: int
    pp: int

    def sol(self, db: Database, at: Points) -> Split:
        moved = 2 * self.tokens(at) * self.hidden * (self.pp > 1)
        return Split.memory(moved / db.system.inter_node_bw * 1000)

    def price(self, db: Database, at: Points) -> Answer:
        if self.pp <= 1:
            return Answer.zero(len(at), Source.SILICON)
        time = self.sol(db, at).time
        if db.mode is Mode.SOL:
            return Answer.of(time, Source.SOL)
        return Answer.of(time + db.system.p2p_latency_s * 1000, Source.EMPIRICAL)
