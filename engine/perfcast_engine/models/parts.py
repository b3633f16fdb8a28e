"""Parts of layers, compiled from the rows of models/parts.yaml to operators (spec/05 5-9)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import import_module
from typing import Any

from perfcast_engine import ops
from perfcast_engine.data import table
from perfcast_engine.errors import DataCorrupt
from perfcast_engine.formula import Names, compiled, parse, record, value
from perfcast_engine.ops.base import Op
from perfcast_engine.ops.composite import Fallback, Overlap

NAME = 'tag + prefix + f"{}"'
SCALE = "count * repeat * (slower if repeated else 1.0)"
TEXTS = frozenset({"prefix", "tag", "name", "step", "operation", "half", "donor_architecture"})  # no formulas

Emit = Callable[[Names, Names], Iterable[Op]]  # figures of a phase and of a layer to operators


@dataclass(frozen=True, slots=True)
class PartBook:
    """Parts of one phase, by name; compiled when they are first asked for. ``own``: those of a family, in the form of
    parts.yaml and before its rows."""

    own: Mapping[str, Any]
    context: bool
    _made: dict[str, Emit] = field(default_factory=dict, repr=False)

    def part(self, name: str) -> Emit:
        """The part called ``name``; what is in no table is a norm or an all-reduce, as its name ends."""
        if name not in self._made:
            rows = self.own.get(name) or table("models/parts")["parts"].get(name)
            rows = rows or {"norm" if "norm" in name else "allreduce": name}
            self._made[name] = self._group(rows)
        return self._made[name]

    def emit(self, parts: str, names: Names, layer: Names) -> Iterator[Op]:
        for name in parts.split():
            yield from self.part(name)(names, dict(layer))

    def _group(self, rows: Any) -> Emit:
        if isinstance(rows, str):
            return lambda names, at: self.emit(rows, names, at)
        if isinstance(rows, Mapping):
            return self._row(rows)
        emits = [self._group(row) for row in rows]
        return lambda names, at: (op for emit in emits for op in emit(names, at))

    def _row(self, row: Mapping[str, Any]) -> Emit:
        kind = next((kind for kind in ("part", "let", "do", "overlap", "fallback") if kind in row), "")
        if not kind:
            return self._operator(row)
        inner: Emit = {
            "part": self._call, "let": _let, "do": lambda row: self._group(row["do"]),
            "overlap": self._overlap, "fallback": self._fallback,
        }[kind](row)  # fmt: skip
        if "when" not in row:
            return inner
        when, other = compiled(row["when"]), self._group(row.get("else", []))
        return lambda names, at: (inner if value(when, names, at) else other)(names, at)

    def _call(self, row: Mapping[str, Any]) -> Emit:
        given = {name: parse(formula, name in TEXTS) for name, formula in row.items() if name not in ("part", "when")}
        arguments = record(given, {})
        return lambda names, at: self.emit(row["part"], names, at | value(arguments, names, at))

    def _overlap(self, row: Mapping[str, Any]) -> Emit:
        name, first, second = compiled(NAME.format(row["overlap"])), self._group(row["a"]), self._group(row["b"])

        def emit(names: Names, at: Names) -> Iterator[Op]:
            a, b = tuple(first(names, at)), tuple(second(names, at))
            yield from [Overlap(name=value(name, names, at), a=a, b=b)] if a and b else a + b

        return emit

    def _fallback(self, row: Mapping[str, Any]) -> Emit:
        name = compiled(NAME.format(row["fallback"]))
        unit, parts = self._group(row["primary"]), self._group(row["rows"])

        def emit(names: Names, at: Names) -> Iterator[Op]:
            (primary,) = unit(names, at)
            yield Fallback(name=value(name, names, at), primary=primary, fallback=tuple(parts(names, at)))

        return emit

    def _operator(self, row: Mapping[str, Any]) -> Emit:
        kind, name = next(iter(row.items()))
        kinds = table("models/parts")["kinds"]
        if kind not in kinds:
            raise DataCorrupt(f"parts.yaml: {kind!r} of {name!r} is no kind of row")
        given = {**kinds[kind], **row}
        operators = [_operator_named(path) for path in given.pop("operator").split()]
        when = parse(given.pop("when", True))
        given = {field: field for field in given.pop("same", ())} | given
        formulas = {field: parse(formula, field in TEXTS) for field, formula in given.items() if field != kind}
        formulas |= {"name": parse(NAME.format(name)), "scale": parse(SCALE)}
        operator = operators[0 if self.context else -1]
        made = {each.name: formulas[each.name] for each in fields(operator) if each.name in formulas}
        used = {node.id for tree in made.values() for node in ast.walk(tree) if isinstance(node, ast.Name)}
        stray = formulas.keys() - used - {each.name for other in operators for each in fields(other)}
        if stray:
            raise DataCorrupt(f"parts.yaml: {kind} {name} has no {', '.join(stray)}")
        code = record(made, {field: tree for field, tree in formulas.items() if field not in made}, when)

        def emit(names: Names, at: Names) -> Iterable[Op]:
            arguments = value(code, names, at)
            return () if arguments is None else (operator(**arguments),)

        return emit


def _operator_named(path: str) -> type[Op]:
    """The class that "module.Class" names in the room of operators."""
    module, name = path.split(".")
    found: type[Op] = getattr(import_module(f"{ops.__name__}.{module}"), name)
    return found


@cache
def common_parts(context: bool) -> PartBook:
    """Those of families without parts of their own."""
    return PartBook({}, context)


def _let(row: Mapping[str, Any]) -> Emit:
    figures = [(name, compiled(formula)) for name, formula in row["let"].items()]

    def emit(names: Names, at: Names) -> Iterable[Op]:
        for name, formula in figures:
            at[name] = value(formula, names, at)
        return ()

    return emit
