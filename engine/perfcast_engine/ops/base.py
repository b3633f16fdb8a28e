"""What every operator is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache, cached_property, partial
from math import nan
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
from perfcast_surface.terms import One, Term

from perfcast_engine import quant
from perfcast_engine.answer import F64, Answer, Points, Source, attempt
from perfcast_engine.errors import InvalidField, SolNotDefined
from perfcast_engine.quant import QuantMode
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.table import Key


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


# What the fields of these names hold.
MODES: Mapping[str, Mapping[str, QuantMode]] = MappingProxyType(
    {"kv_quant": quant.KV_CACHE, "fmha_quant": quant.FMHA, "gemm_quant": quant.GEMM}
)


class Split(NamedTuple):
    """A roofline taken apart, ms (N,) each: the longer of computing and moving bytes, and both."""

    time: F64
    math: F64
    mem: F64

    @classmethod
    def of(cls, math: F64, mem: F64) -> Split:
        return cls(max(math, mem) if isinstance(math, float) else np.maximum(math, mem), math, mem)

    @classmethod
    def memory(cls, mem: F64) -> Split:
        return cls(mem, np.zeros(len(mem)), mem)

    def plus(self, other: Split) -> Split:
        return Split(self.time + other.time, self.math + other.math, self.mem + other.mem)

    def scaled(self, factor: float | F64) -> Split:
        return Split(self.time * factor, self.math * factor, self.mem * factor)


@dataclass(frozen=True, kw_only=True)
class Op(ABC):
    """One operator of a forward pass on one GPU. ``scale`` multiplies latency and energy (layers x MTP factor).

    Numbers are at least 0, those named in ``positive`` at least 1; ``quants`` lists what a field ``quant`` may name.
    """

    name: str
    scale: float = 1.0
    role: Role = Role.OTHER

    reads: ClassVar[Reads] = Reads.TOKENS
    positive: ClassVar[tuple[str, ...]] = ()
    quants: ClassVar[Mapping[str, QuantMode]] = quant.GEMM
    beside_shape: ClassVar[frozenset[str]] = frozenset({"name", "scale", "role"})
    keyed_by: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        numbers, modes = _checked(type(self))
        for name, least in numbers:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and least <= value < np.inf):
                where = f"{type(self).__name__}.{name}"
                raise InvalidField(where, f"must be a number of at least {least}, not {value!r}")
        for name, known in modes:
            quant.mode(known, getattr(self, name), name)

    @cached_property
    def shape(self) -> tuple[Hashable, ...]:
        """What tells operators of one kind apart that are measured or judged differently: all fields but those named
        in ``beside_shape``."""
        return tuple(getattr(self, field.name) for field in fields(self) if field.name not in self.beside_shape)

    @property
    def named_key(self) -> tuple[Key, ...]:
        """The part of a table's key that the fields named in ``keyed_by`` make."""
        return tuple(getattr(self, name) for name in self.keyed_by)

    @abstractmethod
    def price(self, db: Database, at: Points) -> Answer:
        """Latency of one instance at N points, before ``scale``. May raise EngineError when no point has an answer."""

    def evaluate(self, db: Database, at: Points) -> Answer:
        """Latency of all instances at N points."""
        priced = self.price(db, at)
        ms, energy = np.maximum(priced.ms, 0.0) * self.scale, np.maximum(priced.energy, 0.0) * self.scale
        return Answer(ms, priced.source, priced.tier, energy, priced.misses)

    def terms(self, db: Database) -> tuple[Term, ...] | None:
        """All instances as summands over (batch, s, prefix), right inside of the measurements: for single points and
        for a surface that leaves this process. None where the kind or the mode has no such form."""
        return None

    def terms_source(self, db: Database) -> Source:
        """Of what ``terms`` answer."""
        return Source.SILICON

    def outside(self, db: Database) -> One:
        """``evaluate`` for one point that ``terms`` do not know; NaN where it misses or has another source."""
        source = self.terms_source(db)

        def ms(batch: int, s: int, prefix: int) -> float:
            answer = self.evaluate(db, Points.of(batch, s, prefix))
            return answer.ms.item(0) if answer.source[0] == source else nan

        return ms

    def beyond(self, db: Database, at: Points) -> F64:
        """ms of points that ``terms`` do not know; NaN where they miss."""
        return attempt(partial(self.evaluate, db), at).ms

    def sol(self, db: Database, at: Points) -> Split:
        """The roofline of one instance at N points; SolNotDefined where the kind exports none."""
        raise SolNotDefined(f"{type(self).__name__} {self.name} exports no roofline split", op=self.name)

    def sol_split(self, db: Database, at: Points) -> Split:
        """The roofline of all instances at N points; no part is negative."""
        return Split(*(np.maximum(part, 0.0) for part in self.sol(db, at))).scaled(self.scale)

    def weight_bytes(self) -> float:
        """Resident bytes of all instances on one GPU."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class TokenOp(Op):
    """An operator over tokens, of which a GPU has a part: floor by ``token_div``, then ceil by the context-parallel
    ``seq_split`` (spec/02 section 6)."""

    token_div: int = 1
    seq_split: int = 1

    def tokens(self, at: Points) -> F64:
        """Tokens of one GPU."""
        return np.ceil(np.floor(at.x / max(self.token_div, 1)) / max(self.seq_split, 1))


@cache
def _checked(kind: type[Op]) -> tuple[list[tuple[str, int]], list[tuple[str, Mapping[str, QuantMode]]]]:
    """The fields that hold numbers, with the least of each, and those that name modes, with the known ones."""
    numbers = [(each.name, int(each.name in kind.positive)) for each in fields(kind) if each.type in ("int", "float")]
    named = [each.name for each in fields(kind) if each.name == "quant" or each.name in MODES]
    return numbers, [(name, MODES.get(name, kind.quants)) for name in named]


def rank_parts(at: Points, ranks: int) -> list[Points]:
    """What one of ``ranks`` context-parallel GPUs computes: the first and the last of twice as many equal parts of the
    new tokens."""
    if ranks <= 1:
        return [at]
    part = np.maximum(np.ceil(at.s / (2 * ranks)), 1.0)
    return [at.with_(s=part), at.with_(s=part, prefix=np.maximum(at.prefix + at.s - part, 0.0))]


def memory_bound(db: Database, bytes_moved: F64) -> Answer:
    """An operator without a table, as its mode prices it: bytes over the achievable memory bandwidth plus a launch."""
    if db.mode is Mode.SOL:
        return Answer.of(db.system.memory_sol_ms(bytes_moved), Source.SOL)
    return Answer.of(db.system.memory_ms(bytes_moved), Source.EMPIRICAL)
