"""The kinds of steps: which fields each has, what is legal in them, and how the engine is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter, le
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray
from perfcast_engine.quick import QuickStep
from perfcast_engine.step import StepModel
from perfcast_engine.step_result import StepResult

from perfcast_server import packed
from perfcast_server.errors import ServiceError, invalid

MAX_COUNT = 2**31 - 1
MAX_FACTOR = 1e6
MAX_BEAM = 1024


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a step: its name in the contract and in the engine, its least value, its default if it has one."""

    wire: str
    engine: str
    least: int = 0
    default: int | float | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of step. ``call`` is the engine's method for arrays; ``below`` pairs fields of which the first must be
    smaller."""

    call: str
    fields: tuple[Field, ...]
    below: tuple[str, str] | None = None


TRAJECTORY = "decode_trajectory"
PREFIX = Field("prefix_tokens", "prefix", default=0)
IMBALANCE = Field("attention_imbalance", "imbalance", default=1.0)
BATCH = Field("batch_per_rank", "batch", least=1)
ISL = Field("isl_tokens", "isl", least=1)
OSL = Field("osl_tokens", "osl", least=1)
KINDS: Mapping[str, Kind] = {
    "prefill": Kind(
        "prefill",
        (BATCH, ISL, PREFIX, IMBALANCE),
        below=("prefix_tokens", "isl_tokens"),
    ),
    "decode_step": Kind("decode_step", (Field("batch_per_rank", "gen_requests", least=1), ISL, OSL)),
    TRAJECTORY: Kind("decode", (BATCH, ISL, OSL)),
    "mixed": Kind(
        "mixed",
        (Field("ctx_tokens_per_rank", "ctx_tokens"), Field("gen_requests_per_rank", "gen_requests"), ISL, OSL, PREFIX),
        below=("prefix_tokens", "isl_tokens"),
    ),
}


class Query(NamedTuple):
    """One question to an engine. ``points`` it returns; ``weight`` counts every evaluated sample."""

    kind: str
    points: int
    weight: int
    arguments: Mapping[str, Any]

    def ask(self, steps: StepModel, operators: bool = False) -> StepResult:
        result: StepResult = getattr(steps, KINDS[self.kind].call)(**self.arguments, operators=operators)
        return result


QuickAnswer = Callable[[Any], QuickStep | None]


def quick_answers(steps: StepModel) -> dict[str, QuickAnswer]:
    """By kind, what answers a step's message where the engine needs no arrays for it, bit for bit as ``Query.ask``.

    None of anything else, be it out of bounds or out of what was measured.
    """
    return {name: _quick(kind, steps) for name, kind in KINDS.items() if name != TRAJECTORY}


def _quick(kind: Kind, steps: StepModel) -> QuickAnswer:
    counts = [field for field in kind.fields if field is not IMBALANCE]
    read, least = attrgetter(*(field.wire for field in counts)), [field.least for field in counts]
    names, is_even = [field.engine for field in counts], IMBALANCE not in kind.fields

    def answer(message: Any) -> QuickStep | None:
        values = read(message)
        if max(values) > MAX_COUNT or not all(map(le, least, values)):
            return None
        if not is_even and message.attention_imbalance not in (0.0, 1.0):
            return None
        return steps.quick(kind.call, dict(zip(names, values, strict=True)))

    return answer


def query(request: Message, group: str) -> Query:
    """The question in the oneof ``group`` of a request: "step" holds numbers, "steps" holds columns."""
    name = request.WhichOneof(group)
    if name is None:
        raise invalid(group, f"is missing; give one of {', '.join(KINDS)}")
    kind, message = KINDS[name], getattr(request, name)
    if group == "step":
        values, points = _scalars(message, kind.fields, name), 1
    else:
        values = _columns(message, kind.fields, name)
        points = _length(values, name)
    if kind.below is not None:
        small, large = kind.below
        if group == "step":
            at = "" if values[small] >= values[large] else None
        else:
            index = _first(np.atleast_1d(values[small] >= values[large]))
            at = None if index is None else f"[{index}]"
        if at is not None:
            raise invalid(f"{name}.{small}{at}", f"must be smaller than {large}")
    arguments = {field.engine: values[field.wire] for field in kind.fields}
    if name != TRAJECTORY:
        return Query(name, points, points, arguments)
    arguments["beam"] = _scalar(message.beam_width or 1, Field("beam_width", "beam", least=1), f"{name}.beam_width")
    if arguments["beam"] > MAX_BEAM:
        raise invalid(f"{name}.beam_width", f"must be at most {MAX_BEAM}")
    stride = _scalar(message.stride or 32, Field("stride", "stride", least=1), f"{name}.stride")
    samples = np.broadcast_to(np.ceil((np.atleast_1d(values["osl_tokens"]) - 1) / stride), (points,))
    return Query(name, points, max(points, int(samples.sum())), {**arguments, "stride": stride})


def check_size(asked: Query, limit: int) -> None:
    if asked.weight > limit:
        advice = "a larger stride or fewer points" if asked.weight > asked.points else "fewer points"
        raise ServiceError(
            "LIMIT",
            f"{asked.weight} points, more than {limit}; ask for {advice}",
            limit="max_points_per_request",
            retry="no",
        )


def _scalars(message: Message, fields: tuple[Field, ...], name: str) -> dict[str, Any]:
    values = {}
    for field in fields:
        value = getattr(message, field.wire)
        if field.default == 1.0 or not field.least <= value <= MAX_COUNT:
            value = _scalar(value, field, f"{name}.{field.wire}")
        values[field.wire] = value
    return values


def _columns(message: Message, fields: tuple[Field, ...], name: str) -> dict[str, Any]:
    columns = packed.columns(message)
    return {field.wire: _column(columns.get(field.wire), field, f"{name}.{field.wire}") for field in fields}


def _column(column: NDArray[Any] | None, field: Field, path: str) -> Any:
    default = field.default
    if column is None:
        if default is None:
            raise invalid(path, "is empty")
        return default
    if isinstance(default, float):
        column = np.where(column == 0, default, column)
        bad = ~((column >= 1 / MAX_FACTOR) & (column <= MAX_FACTOR))
    else:
        bad = column < field.least
    if (index := _first(bad)) is not None:
        raise invalid(f"{path}[{index}]", _legal(field))
    return column


def _scalar(value: float, field: Field, path: str) -> float | int:
    if isinstance(field.default, float):
        value = value or field.default
        if not 1 / MAX_FACTOR <= value <= MAX_FACTOR:
            raise invalid(path, _legal(field))
    elif not field.least <= value <= MAX_COUNT:
        raise invalid(path, _legal(field))
    return value


def _legal(field: Field) -> str:
    if isinstance(field.default, float):
        return f"must be a number from {1 / MAX_FACTOR:g} to {MAX_FACTOR:g}"
    return f"must be a whole number from {field.least} to {MAX_COUNT}"


def _length(values: Mapping[str, Any], name: str) -> int:
    lengths: dict[str, int] = {
        wire: len(column) for wire, column in values.items() if isinstance(column, np.ndarray) and len(column) != 1
    }
    points = max(lengths.values(), default=1)
    for wire, length in lengths.items():
        if length != points:
            raise invalid(f"{name}.{wire}", f"has {length} values where another column has {points}")
    return points


def _first(bad: NDArray[np.bool_]) -> int | None:
    return int(np.argmax(bad)) if bad.any() else None
