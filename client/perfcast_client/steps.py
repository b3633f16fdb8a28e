"""The steps that can be asked about, with numbers for one or arrays for many."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike
from perfcast.v1 import prediction_pb2

from perfcast_client.errors import refused

INT32 = 2**31


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prefill pass of ``batch`` prompts of ``isl`` tokens each, of which ``prefix`` are cached already."""

    kind: ClassVar[str] = "prefill"
    wire: ClassVar[Mapping[str, str]] = {
        "batch": "batch_per_rank",
        "isl": "isl_tokens",
        "prefix": "prefix_tokens",
        "imbalance": "attention_imbalance",
    }

    batch: ArrayLike
    isl: ArrayLike
    prefix: ArrayLike = 0
    imbalance: ArrayLike = 1.0


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode iteration of ``batch`` requests in the middle of their ``osl`` output tokens."""

    kind: ClassVar[str] = "decode_step"
    wire: ClassVar[Mapping[str, str]] = {"batch": "batch_per_rank", "isl": "isl_tokens", "osl": "osl_tokens"}

    batch: ArrayLike
    isl: ArrayLike
    osl: ArrayLike


@dataclass(frozen=True, slots=True)
class DecodeTrajectory:
    """The whole generation of ``osl`` tokens for ``batch`` requests; every ``stride``-th iteration is evaluated."""

    kind: ClassVar[str] = "decode_trajectory"
    wire: ClassVar[Mapping[str, str]] = DecodeStep.wire

    batch: ArrayLike
    isl: ArrayLike
    osl: ArrayLike
    beam_width: int = 1
    stride: int = 32


@dataclass(frozen=True, slots=True)
class Mixed:
    """One iteration with ``ctx_tokens`` prefill tokens and ``gen_requests`` decoding requests."""

    kind: ClassVar[str] = "mixed"
    wire: ClassVar[Mapping[str, str]] = {
        "ctx_tokens": "ctx_tokens_per_rank",
        "gen_requests": "gen_requests_per_rank",
        "isl": "isl_tokens",
        "osl": "osl_tokens",
        "prefix": "prefix_tokens",
    }

    ctx_tokens: ArrayLike
    gen_requests: ArrayLike
    isl: ArrayLike
    osl: ArrayLike
    prefix: ArrayLike = 0


Step = Prefill | DecodeStep | DecodeTrajectory | Mixed
LEAST = {"batch": 1, "isl": 1, "osl": 1, "beam_width": 1, "stride": 1}  # of counts; 0 of the others
MOST_IMBALANCE = 1e6  # and the least is one over it


def refuse_illegal(step: Step, columns: Mapping[str, np.ndarray]) -> None:
    """InvalidRequest, as a server answers, for the first of the points ``columns`` (N,) that is no step at all."""
    for name, column in columns.items():
        if name == "imbalance":
            good = (column == 0) | ((column >= 1 / MOST_IMBALANCE) & (column <= MOST_IMBALANCE))
            rule = f"must lie from {1 / MOST_IMBALANCE:g} to {MOST_IMBALANCE:g}"
        else:
            good, rule = column >= LEAST.get(name, 0), f"must be at least {LEAST.get(name, 0)}"
        if name == "prefix" and good.all():
            good, rule = column < columns["isl"], "must be smaller than isl"
        if not good.all():
            field = f"{step.kind}.{step.wire.get(name, name)}"
            raise refused(field, column[~good][0].item(), rule)


def put_step(request: prediction_pb2.PredictStepRequest | prediction_pb2.StreamStepsRequest, step: Step) -> None:
    """Write a scalar step into the oneof of ``request``."""
    message: Any = getattr(request, step.kind)
    message.SetInParent()
    for item in fields(step):
        name = step.wire.get(item.name, item.name)
        value = getattr(step, item.name)
        number = real(item.name, value) if item.name == "imbalance" else whole(item.name, value)
        setattr(message, name, number)


def put_columns(request: prediction_pb2.PredictStepsRequest, step: Step) -> None:
    """Write a step of arrays into the columns of ``request``."""
    message: Any = getattr(request, step.kind)
    message.SetInParent()
    for item in fields(step):
        value = getattr(step, item.name)
        if item.name in step.wire:
            column = reals(item.name, value) if item.name == "imbalance" else wholes(item.name, value)
            getattr(message, step.wire[item.name]).extend(column.tolist())
        else:
            setattr(message, item.name, whole(item.name, value))


def whole(name: str, value: Any) -> int:
    if isinstance(value, bool | np.bool_):
        raise refused(name, value, "is not a whole number")
    try:
        number = operator.index(value)
    except TypeError:
        if not isinstance(value, float | np.floating) or not float(value).is_integer():
            raise refused(name, value, "is not a whole number") from None
        number = int(value)
    if not -INT32 <= number < INT32:
        raise refused(name, value, "is too large")
    return number


def real(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise refused(name, value, "is not a number") from None


def wholes(name: str, values: Any) -> np.ndarray:
    column = _column(name, values)
    if column.dtype.kind == "f":
        if not np.equal(column, np.floor(column)).all():
            raise refused(name, values, "holds numbers that are not whole")
    elif column.dtype.kind not in "iu":
        raise refused(name, values, "does not hold whole numbers")
    if len(column) and not -INT32 <= column.min() <= column.max() < INT32:
        raise refused(name, values, "holds numbers that are too large")
    return column.astype(np.int64, copy=False)


def reals(name: str, values: Any) -> np.ndarray:
    column = _column(name, values)
    if column.dtype.kind not in "iuf":
        raise refused(name, values, "does not hold numbers")
    return column.astype(np.float64)


def _column(name: str, values: Any) -> np.ndarray:
    try:
        column = np.atleast_1d(np.asarray(values))
    except ValueError:
        raise refused(name, values, "is not an array of numbers") from None
    if column.ndim != 1:
        raise refused(name, values, "is not one-dimensional")
    return column
