"""The families: what their layers are made of, as rows of models/families.yaml (spec/05 2.5, 7, 9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from perfcast_engine.data import table
from perfcast_engine.formula import compiled, scope, value
from perfcast_engine.models.parts import PartBook, common_parts
from perfcast_engine.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One row. ``segments``: which layers, and the names of the parts of each of them, in order; ``let``: figures that
    its formulas name; ``parts``: those that it has of its own. families.yaml tells the others."""

    segments: tuple[tuple[str, str], ...]
    cp: str | None
    draft_in_layers: bool
    decode_factor: float
    let: Mapping[str, Any]
    parts: Mapping[str, Any]
    _books: dict[bool, PartBook] = field(init=False, default_factory=dict, repr=False)

    def book(self, context: bool) -> PartBook:
        """The parts of one phase."""
        if not self.parts:
            return common_parts(context)
        return self._books.setdefault(context, PartBook(self.parts, context))


@cache
def family_row(family: str, backend: str, large_ep: bool) -> Family:
    """The most special row there is for the family on the backend."""
    families = table("models/families")
    family = families["same_as"].get(family, family)
    keys = ([f"{family}/{backend}/large"] if large_ep else []) + [f"{family}/{backend}", family]
    return row(next(key for key in keys if key in families["rows"]))


@cache
def row(key: str) -> Family:
    """The row called ``key``, with what it takes over from others."""
    families = table("models/families")
    own, chain = families["rows"][key], []
    while own is not None:
        chain.append(own)
        own = families["rows"].get(own.get("like"))
    merged: dict[str, Any] = {}
    for layer in (families["defaults"], *reversed(chain)):
        joined = {name: merged.get(name, {}) | layer.get(name, {}) for name in ("let", "parts")}
        merged |= layer | joined
    segments = tuple(_segments(merged.pop("lists")))
    merged.pop("like", None)
    return Family(segments=segments, **merged)


def _segments(lists: list[Any]) -> Iterator[tuple[str, str]]:
    for entry in lists:
        if isinstance(entry, list):
            yield from _segments(entry)
        else:
            selector, _, parts = entry.partition(":")
            yield selector, parts


def is_moe(spec: ModelSpec) -> bool:
    """Whether the widths of the experts are checked (spec/05 2.5); for Gemma 4 also where it has none."""
    formula = table("models/families")["moe"].get(spec.family, False)
    return bool(value(compiled(formula), scope(spec=spec, x=spec.x)))


def runs_large_ep(family: str) -> bool:
    """Whether the experts of the family may exchange tokens by an all-to-all of their own."""
    return family in table("models/families")["large_ep"]
