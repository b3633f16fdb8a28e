"""Typed errors of the engine. Each carries a stable reason, a message for people and details for machines."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from typing import Self

FEW = 8  # names that a message may list
LONG = 256  # characters of a name that others are compared with


class Reason(StrEnum):
    """Stable reason codes; the server maps them to gRPC codes (spec/07 section 12)."""

    INVALID_FIELD = "INVALID_FIELD"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    UNKNOWN_SYSTEM = "UNKNOWN_SYSTEM"
    UNKNOWN_BACKEND = "UNKNOWN_BACKEND"
    UNKNOWN_VERSION = "UNKNOWN_VERSION"
    PERF_DATA_MISSING = "PERF_DATA_MISSING"
    EMPIRICAL_BASIS_MISSING = "EMPIRICAL_BASIS_MISSING"
    SYSTEM_FLOPS_MISSING = "SYSTEM_FLOPS_MISSING"
    SOL_NOT_DEFINED = "SOL_NOT_DEFINED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NOT_READY = "NOT_READY"
    EXTRAPOLATION = "EXTRAPOLATION"
    DATA_CORRUPT = "DATA_CORRUPT"
    STATE_CONFLICT = "STATE_CONFLICT"
    UNSUPPORTED = "UNSUPPORTED"


class EngineError(Exception):
    """Base of all engine errors.

    ``details`` are short strings keyed by what they name (field, op, key, nearest, mode_that_works ...).
    """

    reason: Reason

    def __init__(self, message: str, **details: str) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def bare(self) -> Self:
        """Without the frames that it and what it came from passed through, which would hold on to the engine."""
        error: BaseException | None = self
        while error is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__
        return self

    def anew(self) -> Self:
        """The same, to be raised while something keeps this one: the frames are behind the new one only."""
        other = type(self).__new__(type(self), *self.args)
        other.__dict__.update(self.__dict__)
        return other


class InvalidField(EngineError, ValueError):
    """A request field is malformed or inconsistent. ``field`` is its path, ``why`` a stable short code."""

    reason = Reason.INVALID_FIELD

    def __init__(self, field: str, message: str, why: str = "", **details: str) -> None:
        super().__init__(f"{field}: {message}", field=field, **({"why": why} if why else {}), **details)


class UnsupportedCombination(InvalidField):
    """A valid field that this model family or backend does not support."""

    reason = Reason.UNSUPPORTED


class UnknownName(EngineError, LookupError):
    """A model, system, backend or version that is not known.

    Names the nearest that are, in whatever case; else all of them if they are FEW; else it gives a ``hint``.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], reason: Reason, hint: str = "") -> None:
        folded = {entry.casefold(): entry for entry in known}
        near = [folded[entry] for entry in get_close_matches(name[:LONG].casefold(), folded, n=3, cutoff=0.4)]
        if near:
            hint = f"; did you mean {', '.join(near)}?"
        elif 0 < len(folded) <= FEW:
            near = list(folded.values())
            hint = f"; known are {', '.join(near)}"
        super().__init__(f"unknown {kind} {name!r}{hint}", kind=kind, name=name, nearest=", ".join(near))
        self.reason = reason


class PerfDataMissing(EngineError):
    """No measured data for an operator and key in the asked database mode."""

    reason = Reason.PERF_DATA_MISSING


class EmpiricalBasisMissing(EngineError):
    """The empirical model found no measurement to calibrate on."""

    reason = Reason.EMPIRICAL_BASIS_MISSING


class SystemFlopsMissing(EngineError):
    """The system description states no peak rate for the compute type of a quantisation mode."""

    reason = Reason.SYSTEM_FLOPS_MISSING


class SolNotDefined(EngineError):
    """The operator exports no math/memory split of its roofline."""

    reason = Reason.SOL_NOT_DEFINED


class OutOfMemory(EngineError):
    """The deployment does not fit the GPU memory or leaves no KV budget."""

    reason = Reason.OUT_OF_MEMORY


class DataCorrupt(EngineError):
    """A data file is truncated, damaged or not what it says."""

    reason = Reason.DATA_CORRUPT


def check_whole(
    record: object, names: Iterable[str], least: int, most: float, why: str = "range", path: str = ""
) -> None:
    """InvalidField for the first of the fields ``names`` of ``record``, at ``path``, that is no whole number from
    ``least`` to ``most``."""
    for name in names:
        value = getattr(record, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise InvalidField(f"{path}{name}", f"must be a whole number from {least} to {most}", why=why)
