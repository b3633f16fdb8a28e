"""The kinds of layers of a model: how many of each and how wide, on one GPU (spec/05 7, 9; models/layers.yaml)."""

from __future__ import annotations

from functools import cache
from types import CodeType

from perfcast_engine.data import table
from perfcast_engine.formula import Names, compiled, parse, record, value

TEXTS = frozenset({"prefix", "attention_part", "ffn_part"})


def layers(selector: str, names: Names) -> list[Names]:
    """The figures of each kind of layers that ``selector`` of layers.yaml stands for; none where it counts none."""
    found = []
    for each, row in _rows(selector):
        for it in value(each, names) if each else (None,):
            figures = value(row, names, {"it": it})
            if figures is not None:
                found.append(figures)
    return found


@cache
def _rows(selector: str) -> list[tuple[CodeType | None, CodeType]]:
    told = table("models/layers")
    made = []
    for own in rows if isinstance(rows := told["layers"][selector], list) else [rows]:
        row = told["defaults"] | own
        when, each = parse(row.pop("when", row["count"])), row.pop("each", None)
        figures = {name: parse(formula, name in TEXTS) for name, formula in row.items()}
        made.append((None if each is None else compiled(each), record(figures, {}, when)))
    return made
