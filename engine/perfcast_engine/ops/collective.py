"""Communication between the GPUs of one engine (spec/02 sections 5.7, 5.8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points, Source, Tier, choose
from perfcast_engine.ops.base import (
    Op,
    Split,
    by_mode,
    estimated,
    find_slice,
    measured,
    no_slice,
    require,
    split_tokens,
)
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key

NVL72 = 72  # GPUs per node of a rack-scale system, where NCCL takes over from the custom kernel above 4
NVL72_CUSTOM_GPUS = 4
PASSES = {"all_reduce": 2, "all_gather": 1, "alltoall": 1, "reduce_scatter": 1}


def collective_sol(system: SystemSpec, operation: str, gpus: int, elements: F64, bytes_each: float) -> F64:
    """Ring time in ms of a collective over ``elements``; 0 for one GPU or an unknown operation."""
    if gpus <= 1 or operation not in PASSES:
        return np.zeros(len(elements))
    return PASSES[operation] * elements * bytes_each / gpus * (gpus - 1) / system.group_bw(gpus) * 1000


def beyond(system: SystemSpec, gpus: int, measured_gpus: int) -> float:
    """The factor from the largest measured group to a larger one: ring share and bandwidth per GPU."""
    if gpus <= measured_gpus:
        return 1.0
    share = (gpus - 1) / gpus * measured_gpus / max(measured_gpus - 1, 1)
    return share * system.group_bw(measured_gpus) / system.group_bw(gpus)


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

    def price(self, db: Database, elements: F64) -> Answer:
        return by_mode(
            db,
            Points.of(1, 1, x=elements),
            silicon=lambda at: self._silicon(db, at.x),
            empirical=lambda at: self._empirical(db, at),
            sol=lambda at: self.sol(db, at.x, self.gpus),
        )

    def sol(self, db: Database, elements: F64, gpus: int) -> F64:
        return collective_sol(db.system, self.operation, gpus, elements, self.bytes_each)

    def _silicon(self, db: Database, elements: F64) -> Answer:
        largest = self._largest(db, self.tables)
        key = (*self.head, min(self.gpus, largest), *self.tail)
        for table in self.tables:
            # the curve is held in proportion to the message size, which the roofline is too
            curve = find_slice(db, table, key, lambda size: size)
            if curve is not None:
                answer = measured(curve, (elements,), self.what, ("message_size",))
                return answer.scaled(beyond(db.system, self.gpus, largest))
        loaded = [table for table in map(db.find, self.tables) if table is not None]
        raise no_slice(loaded[0] if loaded else db.table(self.tables[0]), key)

    def _empirical(self, db: Database, at: Points) -> Answer:
        sol = self.sol(db, at.x, self.gpus)
        return choose(
            sol > 0, lambda some: self._estimate(db, some.x), lambda none: Answer.zero(len(none), Source.EMPIRICAL), at
        )

    def _estimate(self, db: Database, elements: F64) -> Answer:
        loaded = tuple(table for table in self.tables if db.find(table) is not None)[:1]
        group = min(self.gpus, self._largest(db, loaded))
        tier = Tier.EMPIRICAL if group == self.gpus else Tier.XSHAPE
        key = (*self.head, group, *self.tail)
        curves = (find_slice(db, t, key, lambda size: self.sol(db, size, group), also="util") for t in loaded)
        util = next((curve.util for curve in curves if curve is not None), None)
        return estimated(util, (elements,), self.sol(db, elements, self.gpus), self.what, tier)

    def _largest(self, db: Database, names: tuple[str, ...]) -> int:
        """The largest measured group; the asked one where none was measured."""
        tables = [table for table in map(db.find, names) if table is not None]
        return max((int(gpus) for table in tables for gpus in table.children(*self.head)), default=self.gpus)


@dataclass(frozen=True, kw_only=True)
class AllReduce(Op):
    """The framework's own all-reduce of ``hidden`` elements per token over ``gpus`` ranks."""

    hidden: int
    gpus: int
    quant: str = "half"
    seq_split: int = 1

    def __post_init__(self) -> None:
        require(self, hidden=0, gpus=0, seq_split=0)
        quant.mode(quant.COMM, self.quant, "quant")

    def _elements(self, at: Points) -> F64:
        return split_tokens(at.x, 1, self.seq_split) * self.hidden

    def sol(self, db: Database, at: Points) -> Split:
        time = collective_sol(db.system, "all_reduce", self.gpus, self._elements(at), 2)
        return Split(time, np.zeros(len(time)), np.zeros(len(time)))

    def price(self, db: Database, at: Points) -> Answer:
        if self.gpus <= 1:
            return Answer.zero(len(at), Source.EMPIRICAL)
        if db.mode.shared and db.system.gpus_per_node == NVL72 and self.gpus > NVL72_CUSTOM_GPUS:
            curves = _nccl(self.name, "all_reduce", "half", self.gpus)
        else:
            curves = _Curves(self.name, ("custom_allreduce",), ("half",), ("AUTO",), "all_reduce", self.gpus, 2)
        return curves.price(db, self._elements(at))


def _nccl(what: str, operation: str, comm_quant: str, gpus: int) -> _Curves:
    bytes_each = quant.COMM[comm_quant].bytes
    return _Curves(what, ("nccl", "oneccl"), (comm_quant, operation), (), operation, gpus, bytes_each)


@dataclass(frozen=True, kw_only=True)
class Nccl(Op):
    """An NCCL (or oneCCL) collective: ``operation`` is all_reduce, all_gather, reduce_scatter or alltoall."""

    operation: str
    elements_per_token: float
    gpus: int
    quant: str = "half"
    seq_split: int = 1

    def __post_init__(self) -> None:
        require(self, elements_per_token=0, gpus=0, seq_split=0)
        quant.mode(quant.COMM, self.quant, "quant")

    def _elements(self, at: Points) -> F64:
        return split_tokens(at.x, 1, self.seq_split) * self.elements_per_token

    def sol(self, db: Database, at: Points) -> Split:
        bytes_each = quant.COMM[self.quant].bytes
        return Split.memory(collective_sol(db.system, self.operation, self.gpus, self._elements(at), bytes_each))

    def price(self, db: Database, at: Points) -> Answer:
        if self.gpus <= 1:
            return Answer.zero(len(at), Source.SOL if db.mode is Mode.SOL else Source.EMPIRICAL)
        return _nccl(self.name, self.operation, self.quant, self.gpus).price(db, self._elements(at))


@dataclass(frozen=True, kw_only=True)
class P2P(Op):
    """The hand-over of ``hidden`` elements per token between the stages of a pipeline of depth ``pp``."""

    hidden: int
    pp: int
    seq_split: int = 1

    def __post_init__(self) -> None:
        require(self, hidden=0, pp=0, seq_split=0)

    def sol(self, db: Database, at: Points) -> Split:
        if self.pp <= 1:
            return Split.memory(np.zeros(len(at)))
        return Split.memory(2 * split_tokens(at.x, 1, self.seq_split) * self.hidden / db.system.inter_node_bw * 1000)

    def price(self, db: Database, at: Points) -> Answer:
        if self.pp <= 1:
            return Answer.zero(len(at), Source.SILICON)
        time = self.sol(db, at).time
        if db.mode is Mode.SOL:
            return Answer.of(time, Source.SOL)
        return Answer.of(time + db.system.p2p_latency_s * 1000, Source.EMPIRICAL)
