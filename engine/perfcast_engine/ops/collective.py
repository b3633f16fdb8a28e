"""Communication between the GPUs of one engine (spec/02 sections 5.7, 5.8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfcast_engine.answer import F64, Answer, Points, Source, Tier, choose
from perfcast_engine.ops.base import Op, Split, split_tokens
from perfcast_engine.ops.measured import Slice, by_mode, estimated, no_slice
from perfcast_engine.quant import COMM
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key

NVL72 = 72  # GPUs per node of a rack-scale system, where NCCL takes over from the custom kernel above 4
NVL72_CUSTOM_GPUS = 4
PASSES = {"all_reduce": 2, "all_gather": 1, "alltoall": 1, "reduce_scatter": 1}


@dataclass(frozen=True, slots=True)
class _Curves:
    """The measured curves (ms over elements, one a group size) of one collective, in ``tables`` by preference.

    ``head`` and ``tail`` are the key parts before and after the group size.
    """

    what: str
    tables: tuple[str, ...]
    head: tuple[Key, ...]
    tail: tuple[Key, ...]
    operation: str
    gpus: int
    bytes_each: float

    def sol(self, system: SystemSpec, elements: F64, gpus: int) -> F64:
        """Ring time in ms; 0 for one GPU or an unknown operation."""
        if gpus <= 1 or self.operation not in PASSES:
            return np.zeros(len(elements))
        passes = PASSES[self.operation]
        return passes * elements * self.bytes_each / gpus * (gpus - 1) / system.group_bw(gpus) * 1000

    def price(self, db: Database, elements: F64) -> Answer:
        return by_mode(
            db,
            Points.of(1, 1, x=elements),
            silicon=lambda at: self._silicon(db, at.x),
            empirical=lambda at: self._empirical(db, at),
            sol=lambda at: self.sol(db.system, at.x, self.gpus),
        )

    def _silicon(self, db: Database, elements: F64) -> Answer:
        largest = self._largest(db, self.tables)
        key = (*self.head, min(self.gpus, largest), *self.tail)
        # a curve is held in proportion to the message size, which the roofline is too
        curves = [Slice(table, key, lambda size: size) for table in self.tables]
        held = next((curve for curve in curves if curve.find(db) is not None), None)
        if held is None:
            raise no_slice(next(filter(None, map(db.find, self.tables)), None) or db.table(self.tables[0]), key)
        return held.measured(db, (elements,), self.what).scaled(self._beyond(db.system, largest))

    def _beyond(self, system: SystemSpec, largest: int) -> float:
        """The factor from the largest measured group to a larger one: ring share and bandwidth per GPU."""
        if self.gpus <= largest:
            return 1.0
        share = (self.gpus - 1) / self.gpus * largest / max(largest - 1, 1)
        return share * system.group_bw(largest) / system.group_bw(self.gpus)

    def _empirical(self, db: Database, at: Points) -> Answer:
        sol = self.sol(db.system, at.x, self.gpus)
        return choose(
            sol > 0, lambda some: self._estimate(db, some.x), lambda none: Answer.zero(len(none), Source.EMPIRICAL), at
        )

    def _estimate(self, db: Database, elements: F64) -> Answer:
        table = next((table for table in self.tables if db.find(table) is not None), self.tables[0])
        group = min(self.gpus, self._largest(db, (table,)))
        key = (*self.head, group, *self.tail)
        curve = Slice(table, key, lambda size: self.sol(db.system, size, group), also="util")
        basis = curve.basis(db)._replace(tier=Tier.EMPIRICAL if group == self.gpus else Tier.XSHAPE)
        return estimated(basis, (elements,), self.sol(db.system, elements, self.gpus), self.what)

    def _largest(self, db: Database, names: tuple[str, ...]) -> int:
        """The largest measured group; the asked one where none was measured."""
        tables = [table for table in map(db.find, names) if table is not None]
        return max((int(gpus) for table in tables for gpus in table.children(*self.head)), default=self.gpus)


def _custom(what: str, gpus: int) -> _Curves:
    return _Curves(what, ("custom_allreduce",), ("half",), ("AUTO",), "all_reduce", gpus, 2)


def _nccl(what: str, operation: str, comm_quant: str, gpus: int) -> _Curves:
    bytes_each = COMM[comm_quant].bytes
    return _Curves(what, ("nccl", "oneccl"), (comm_quant, operation), (), operation, gpus, bytes_each)


@dataclass(frozen=True, kw_only=True)
class AllReduce(Op):
    """The framework's own all-reduce of ``hidden`` elements per token over ``gpus`` ranks."""

    hidden: int
    gpus: int
    quant: str = "half"
    seq_split: int = 1

    quants = COMM

    def _elements(self, at: Points) -> F64:
        return split_tokens(at.x, 1, self.seq_split) * self.hidden

    def sol(self, db: Database, at: Points) -> Split:
        time = _custom(self.name, self.gpus).sol(db.system, self._elements(at), self.gpus)
        return Split(time, np.zeros(len(time)), np.zeros(len(time)))

    def price(self, db: Database, at: Points) -> Answer:
        if self.gpus <= 1:
            return Answer.zero(len(at), Source.EMPIRICAL)
        rack_scale = db.mode.shared and db.system.gpus_per_node == NVL72 and self.gpus > NVL72_CUSTOM_GPUS
        curves = _nccl(self.name, "all_reduce", "half", self.gpus) if rack_scale else _custom(self.name, self.gpus)
        return curves.price(db, self._elements(at))


@dataclass(frozen=True, kw_only=True)
class Nccl(Op):
    """An NCCL (or oneCCL) collective: ``operation`` is all_reduce, all_gather, reduce_scatter or alltoall."""

    operation: str
    elements_per_token: float
    gpus: int
    quant: str = "half"
    seq_split: int = 1

    quants = COMM

    def _elements(self, at: Points) -> F64:
        return split_tokens(at.x, 1, self.seq_split) * self.elements_per_token

    def _curves(self) -> _Curves:
        return _nccl(self.name, self.operation, self.quant, self.gpus)

    def sol(self, db: Database, at: Points) -> Split:
        return Split.memory(self._curves().sol(db.system, self._elements(at), self.gpus))

    def price(self, db: Database, at: Points) -> Answer:
        if self.gpus <= 1:
            return Answer.zero(len(at), Source.SOL if db.mode is Mode.SOL else Source.EMPIRICAL)
        return self._curves().price(db, self._elements(at))


@dataclass(frozen=True, kw_only=True)
class P2P(Op):
    """The hand-over of ``hidden`` elements per token between the stages of a pipeline of depth ``pp``."""

    hidden: int
    pp: int
    seq_split: int = 1

    def sol(self, db: Database, at: Points) -> Split:
        moved = 2 * split_tokens(at.x, 1, self.seq_split) * self.hidden * (self.pp > 1)
        return Split.memory(moved / db.system.inter_node_bw * 1000)

    def price(self, db: Database, at: Points) -> Answer:
        if self.pp <= 1:
            return Answer.zero(len(at), Source.SILICON)
        time = self.sol(db, at).time
        if db.mode is Mode.SOL:
            return Answer.of(time, Source.SOL)
        return Answer.of(time + db.system.p2p_latency_s * 1000, Source.EMPIRICAL)
