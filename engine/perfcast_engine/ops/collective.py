"""Communication between the GPUs of one engine (spec/02 sections 5.7, 5.8)."""

from __future__ import annotations

from dataclasses import dataclass

from perfcast_engine import quant
from perfcast_engine.answer import Answer, Points
from perfcast_engine.ops.base import Op, require
from perfcast_engine.tables.database import Database


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

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


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

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class P2P(Op):
    """The hand-over of ``hidden`` elements per token between the stages of a pipeline of depth ``pp``."""

    hidden: int
    pp: int
    seq_split: int = 1

    def __post_init__(self) -> None:
        require(self, hidden=0, pp=0, seq_split=0)

    def price(self, db: Database, at: Points) -> Answer:
        raise NotImplementedError
