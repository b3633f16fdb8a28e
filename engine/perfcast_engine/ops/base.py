"""What every operator is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np

from perfcast_engine.answer import Answer, Points
from perfcast_engine.errors import InvalidField
from perfcast_engine.tables.database import Database


class Reads(Enum):
    """Which coordinate an operator depends on (spec/06 1.1); what lets token-only operators collapse to one table."""

    TOKENS = "x"  # the token count of the pass
    BATCH = "batch"  # the request count
    SEQUENCE = "batch, s, prefix"


class Role(Enum):
    """The part an operator plays in the phases of a step (spec/06 1.1), instead of tests on its name."""

    OTHER = 0
    LOGITS = 1  # prefill gives it one token per request
    ATTENTION = 2  # dense attention that mixed steps price apart


@dataclass(frozen=True, kw_only=True)
class Op(ABC):
    """One operator of a forward pass on one GPU. ``scale`` multiplies latency and energy (layers x MTP factor)."""

    name: str
    scale: float = 1.0
    role: Role = Role.OTHER

    reads: ClassVar[Reads] = Reads.TOKENS

    @abstractmethod
    def price(self, db: Database, at: Points) -> Answer:
        """Latency of one instance at N points, before ``scale``. May raise EngineError when no point has an answer."""

    def evaluate(self, db: Database, at: Points) -> Answer:
        """Latency of all instances at N points."""
        return self.price(db, at).clamped().scaled(self.scale)

    def weight_bytes(self) -> float:
        """Resident bytes of all instances on one GPU."""
        return 0.0


def evaluate_all(ops: Sequence[Op], db: Database, at: Points) -> dict[str, Answer]:
    """Each operator's answer, equal names folded, in order of first appearance."""
    folded: dict[str, Answer] = {}
    for op in ops:
        answer = op.evaluate(db, at)
        folded[op.name] = folded[op.name] + answer if op.name in folded else answer
    return folded


def require(op: Op, **least: float) -> None:
    """InvalidField unless each named field is a finite number of at least that much; for ``__post_init__``."""
    for name, bound in least.items():
        value = getattr(op, name)
        if not (isinstance(value, int | float) and bound <= value < np.inf):
            raise InvalidField(f"{type(op).__name__}.{name}", f"must be a number of at least {bound:g}, not {value!r}")


def split_tokens(x: np.ndarray, token_div: int, seq_split: int) -> np.ndarray:
    """Tokens per GPU: floor by ``token_div``, then ceil by the context-parallel ``seq_split`` (spec/02 section 6)."""
    return np.ceil(np.floor(x / max(token_div, 1)) / max(seq_split, 1))
