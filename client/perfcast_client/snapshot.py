"""A surface as it arrived from a server or came out of a file, and what it says about single steps and arrays."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from perfcast.v1 import prediction_pb2
from perfcast_surface import file, parts
from perfcast_surface.surface import Domain, StepSurface

from perfcast_client.config import EngineConfig
from perfcast_client.errors import DamagedSurface, OutOfSurface, refused
from perfcast_client.results import F64, EngineStamp
from perfcast_client.steps import DecodeTrajectory, Step, reals, refuse_illegal, whole, wholes

LARGEST = file.LARGEST  # bytes of all arrays
METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "prefill": ("prefill", ("batch", "isl", "prefix")),
    "decode_step": ("decode_step", ("batch", "isl", "osl")),
    "decode_trajectory": ("decode", ("batch", "isl", "osl")),
    "mixed": ("mixed", ("ctx_tokens", "gen_requests", "isl", "osl", "prefix")),
}


@dataclass(frozen=True, slots=True)
class Received:
    """What GetSurface answered. steps: None where the surface that the caller holds still holds."""

    stamp: EngineStamp
    surface_hash: str
    steps: StepSurface | None

    @classmethod
    def of(cls, messages: Iterable[prediction_pb2.GetSurfaceResponse]) -> Self:
        """DamagedSurface where the messages do not make up the surface that they announce."""
        first, *rest = list(messages) or [prediction_pb2.GetSurfaceResponse()]
        header = first.header
        if not first.HasField("header") or any(not message.HasField("chunk") for message in rest):
            raise DamagedSurface("the server's answer is not a header with chunks after it")
        stamp = EngineStamp.of(header.engine)
        if header.unchanged:
            return cls(stamp, header.surface_hash, None)
        try:
            told, arrays = _header(header), _arrays(header, [message.chunk for message in rest])
            if parts.content_hash(told, arrays) != header.surface_hash:
                raise parts.SurfaceError("contents do not match their hash")
            return cls(stamp, header.surface_hash, parts.put_together(told, arrays))
        except parts.SurfaceError as error:
            raise DamagedSurface(f"the surface from the server: {error}") from None


def _header(header: prediction_pb2.SurfaceHeader) -> dict[str, Any]:
    rules = {field.name: getattr(header.rules, field.name) for field in header.rules.DESCRIPTOR.fields}
    planes = [{"axes": plane.axes, "roots": plane.roots} for plane in header.planes]
    phases = {name: [_term(term) for term in getattr(header, name).terms] for name in parts.PHASES}
    return {"format": header.format, "rules": rules, "planes": planes, "phases": phases}


def _term(term: prediction_pb2.SurfaceTerm) -> dict[str, Any]:
    return {
        "evaluator": term.evaluator,
        "is_attention": term.is_attention,
        "scale": term.scale,
        "parameters": dict(term.parameters),
        "planes": list(term.planes),
    }


def _arrays(header: prediction_pb2.SurfaceHeader, chunks: list[prediction_pb2.ArraysChunk]) -> dict[str, F64]:
    data = b"".join(chunk.data for chunk in chunks)
    sizes = [prod(array.shape) for array in header.arrays]
    if min((n for array in header.arrays for n in array.shape), default=0) < 0 or 8 * sum(sizes) != len(data):
        raise parts.SurfaceError("the chunks are not the arrays of the header")
    if len(data) > LARGEST:
        raise parts.SurfaceError(f"more than {LARGEST} bytes")
    whole, at, arrays = np.frombuffer(data, "<f8").astype(np.float64), 0, {}
    for array, size in zip(header.arrays, sizes, strict=True):
        arrays[array.name] = whole[at : at + size].reshape(tuple(array.shape))
        at += size
    return arrays


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A surface with what it is the surface of. engine: as it was asked for; fetched_s: seconds since the epoch."""

    steps: StepSurface
    engine: EngineConfig | str
    stamp: EngineStamp
    surface_hash: str
    fetched_s: float

    @classmethod
    def of(cls, received: Received, engine: EngineConfig | str, held: Snapshot | None = None) -> Snapshot:
        """From an answer, which may be that the surface ``held`` still holds."""
        if received.steps is not None:
            return cls(received.steps, engine, received.stamp, received.surface_hash, time.time())
        if held is None or held.surface_hash != received.surface_hash:
            raise DamagedSurface("the server says that a surface is unchanged which was not asked about")
        return replace(held, stamp=received.stamp, fetched_s=time.time())

    @property
    def domain(self) -> Domain:
        return self.steps.domain

    def save(self, path: str | Path) -> None:
        engine = {"handle": self.engine} if isinstance(self.engine, str) else {"config": self.engine.to_dict()}
        file.save(path, self.steps, {"engine": engine, "stamp": asdict(self.stamp), "fetched_s": self.fetched_s})

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """DamagedSurface where the file is not a whole surface; OSError where it cannot be read."""
        try:
            steps, about = file.load(path)
            engine = about["engine"]
            named = str(engine["handle"]) if "handle" in engine else EngineConfig.from_dict(engine["config"])
            stamp = EngineStamp(**{item.name: str(about["stamp"][item.name]) for item in fields(EngineStamp)})
            surface_hash = parts.content_hash(*parts.take_apart(steps))
            return cls(steps, named, stamp, surface_hash, float(about["fetched_s"]))
        except (LookupError, TypeError, ValueError) as error:  # SurfaceError and refused fields are ValueErrors
            raise DamagedSurface(f"{path}: {error}") from None

    def ms(self, step: Step) -> float | F64:
        """The latency of one step, or of each of many (N,); NaN where the surface does not reach."""
        method, names = METHODS[step.kind]
        values = [getattr(step, name) for name in names]
        arguments: dict[str, int] = {}
        if isinstance(step, DecodeTrajectory):
            arguments = {"beam": whole("beam_width", step.beam_width), "stride": whole("stride", step.stride)}
            refuse_illegal(
                step, {"beam_width": np.array([arguments["beam"]]), "stride": np.array([arguments["stride"]])}
            )
        if all(np.ndim(value) == 0 for value in values):
            numbers = [whole(name, value) for name, value in zip(names, values, strict=True)]
            found: float | F64 = getattr(self.steps, method)(*numbers, **arguments)
        else:
            columns = [wholes(name, value) for name, value in zip(names, values, strict=True)]
            _same_length(names, columns)
            found = getattr(self.steps, method)(*columns, **arguments)
        imbalance = getattr(step, "imbalance", 1.0)
        if isinstance(imbalance, float) and imbalance == 1.0:
            return found
        even = reals("imbalance", imbalance) == 1.0  # no surface says which terms it weighs on
        return np.where(even if np.ndim(imbalance) else even[0], found, np.nan)


def _same_length(names: tuple[str, ...], columns: list[np.ndarray]) -> None:
    lengths = {name: len(column) for name, column in zip(names, columns, strict=True) if len(column) != 1}
    if len(set(lengths.values())) > 1:
        raise refused(next(iter(lengths)), lengths, "are arrays of different lengths")


def out_of_surface(step: Step, which: np.ndarray, domain: Domain) -> OutOfSurface:
    """For the points ``which`` of ``step``, that are beyond the surface; InvalidRequest where one is no step at all."""
    refuse_illegal(step, {name: column[which] for name, column in _columns(step).items()})
    first = int(which[0])
    reaches = ", ".join(f"{name} {most}" for name, most in domain._asdict().items())
    return OutOfSurface(
        f"the surface does not reach point {first} of this {step.kind}; it reaches at most {reaches}, each by itself, "
        "and only what was measured within: ask the server",
        reason="OUT_OF_SURFACE",
        details={"point": str(first), **{name: str(most) for name, most in domain._asdict().items()}},
    )


def _columns(step: Step) -> dict[str, np.ndarray]:
    """The fields of ``step`` that may differ from point to point, each (N,)."""
    names = [item.name for item in fields(step) if item.name in step.wire]
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(getattr(step, name))) for name in names))
    return dict(zip(names, columns, strict=True))


def some(step: Step, which: np.ndarray) -> Step:
    """The points of ``step`` at the indices ``which``, as arrays."""
    return replace(step, **{name: column[which] for name, column in _columns(step).items()})
