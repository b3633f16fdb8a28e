"""Surfaces taken apart into a header that fits into JSON and arrays, and put together again, distrusting both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from perfcast_surface.arrays import F64
from perfcast_surface.mixed import StepRules
from perfcast_surface.plane import Axis, Plane
from perfcast_surface.surface import Counts, PhaseSurface, StepSurface
from perfcast_surface.terms import EVALUATORS, Term

FORMAT = 1
PHASES = ("context", "generation")
TABLES = ("tokens", "logits", "requests")
MOST_KNOTS = 1 << 15
MOST_AXES = 4

Header = Mapping[str, Any]
Arrays = Mapping[str, F64]


class SurfaceError(ValueError):
    """The data are not a surface, are damaged, or are of a format that this version does not read."""


def take_apart(surface: StepSurface) -> tuple[dict[str, Any], dict[str, F64]]:
    """A header that fits into JSON, and the arrays that it names in their order."""
    arrays: dict[str, F64] = {}
    planes: dict[int, Plane] = {}
    phases: dict[str, Any] = {}
    for name in PHASES:
        phase: PhaseSurface = getattr(surface, name)
        tables = {f"{name}.{table}": getattr(phase, table) for table in TABLES}
        arrays |= {key: np.zeros(0) if table is None else table.ms[:-1] for key, table in tables.items()}
        phases[name] = [_described(term, term in phase.attention, planes) for term in phase.terms]
    for i, plane in enumerate(planes.values()):
        arrays[f"plane{i}.values"] = plane.values
        arrays |= {f"plane{i}.axis{k}": axis.knots for k, axis in enumerate(plane.axes)}
    described = [{"axes": len(plane.axes), "roots": plane.roots} for plane in planes.values()]
    return {"format": FORMAT, "rules": asdict(surface.rules), "planes": described, "phases": phases}, arrays


def _described(term: Term, is_attention: bool, planes: dict[int, Plane]) -> dict[str, Any]:
    for plane in term.planes():
        planes.setdefault(id(plane), plane)
    order = list(planes)
    return {
        "evaluator": term.evaluator,
        "is_attention": is_attention,
        "scale": float(term.scale),
        "parameters": term.parameters(),
        "planes": [order.index(id(plane)) for plane in term.planes()],
    }


def content_hash(header: Header, arrays: Arrays) -> str:
    """Of everything that decides an answer."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name], "<f8").tobytes())
    return digest.hexdigest()


def put_together(header: Header, arrays: Arrays) -> StepSurface:
    """The inverse of ``take_apart``. SurfaceError where header and arrays do not fit together."""
    try:
        if header["format"] != FORMAT:
            raise SurfaceError(f"surface format {header['format']!r} is not {FORMAT}; update the older side")
        planes = [_plane(i, about, arrays) for i, about in enumerate(header["planes"])]
        phases = [_phase(name, header["phases"][name], planes, arrays) for name in PHASES]
        return StepSurface(phases[0], phases[1], _rules(header["rules"]))
    except SurfaceError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise SurfaceError(f"not a surface: {type(error).__name__} {error}") from error


def _plane(i: int, about: Mapping[str, Any], arrays: Arrays) -> Plane:
    values = arrays[f"plane{i}.values"]
    knots = [arrays[f"plane{i}.axis{k}"] for k in range(_whole(about["axes"], 1, MOST_AXES))]
    for axis in knots:
        _require(axis.ndim == 1 and 0 < len(axis) <= MOST_KNOTS, f"plane {i}: an axis has no or too many knots")
        _require(bool((np.isfinite(axis) & (axis == np.floor(axis))).all()), f"plane {i}: knots are not whole numbers")
        _require(
            axis[0] >= 0 and axis[-1] < 2**53 and bool((np.diff(axis) > 0).all()), f"plane {i}: knots do not ascend"
        )
    _require(values.shape == tuple(len(axis) + 2 for axis in knots), f"plane {i}: values do not fit the axes")
    _require(not np.isinf(values).any(), f"plane {i}: values are not finite")
    return Plane(tuple(Axis(axis) for axis in knots), values, bool(about["roots"]))


def _phase(name: str, terms: list[Mapping[str, Any]], planes: list[Plane], arrays: Arrays) -> PhaseSurface:
    tables = [arrays[f"{name}.{table}"] for table in TABLES]
    for table in tables:
        _require(table.ndim == 1 and not np.isinf(table).any(), f"{name}: a table is not a row of finite numbers")
    read: dict[bool, list[Term]] = {True: [], False: []}
    for term in terms:
        parameters = {str(key): float(value) for key, value in term["parameters"].items()}
        scale = float(term["scale"])
        _require(bool(np.isfinite([scale, *parameters.values()]).all()), f"{name}: a parameter is not finite")
        own = [planes[_whole(index, 0, len(planes) - 1)] for index in term["planes"]]
        read[bool(term["is_attention"])].append(EVALUATORS[term["evaluator"]](scale, parameters, own))
    tokens, logits, requests = (Counts.of(table) if len(table) else None for table in tables)
    return PhaseSurface(tokens, logits, requests, tuple(read[True]), tuple(read[False]))


def _rules(rules: Mapping[str, Any]) -> StepRules:
    flags = {name: bool(value) for name, value in rules.items() if name != "nextn"}
    return StepRules(_whole(rules["nextn"], 0, 1 << 16), **flags)


def _whole(value: Any, least: int, most: int) -> int:
    _require(type(value) is int and least <= value <= most, f"{value!r} is not a whole number from {least} to {most}")
    return int(value)


def _require(holds: bool, why: str) -> None:
    if not holds:
        raise SurfaceError(f"not a surface: {why}")
