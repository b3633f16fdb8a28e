"""The kinds of layers of a model: how many of each and how wide, on one GPU (spec/05 7, 9; models/layers.yaml)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

from perfcast_engine.data import table
from perfcast_engine.models.formula import Names, compiled, parse, record, value


@dataclass(frozen=True)
class Layer:
    """Equal layers: how many, what their operators are called, and their widths. KV heads are those on one GPU, query
    heads those of the model; ``v`` is the width of a value head; ``ffn`` the width of a dense FFN."""

    count: float = 1.0
    prefix: str = ""
    heads: int = 0
    kv_heads: int = 0
    qk: int = 0
    v: int = 0
    window: int = 0
    ffn: int = 0
    kernel_dim: int = 0  # head width that the attention kernel is asked for, where it is not qk
    keys_are_values: bool = False
    gated_q: bool = False  # queries carry a gate of their width
    qk_norm: bool = False
    quantised: bool = True  # whether the inputs of the output projections arrive quantised
    attention_part: str = ""  # parts of the model whose gemm modes a checkpoint may keep apart
    ffn_part: str = ""
    attention_share: float = 1.0  # of the layers whose attention this describes; their other parts are all of them
    repeated: bool = True  # false for what a pass does once
    ratio: int = 0  # tokens that one compressed KV entry stands for


class _Row(NamedTuple):
    each: CodeType | None
    fields: CodeType


TEXTS = frozenset({"prefix", "attention_part", "ffn_part"})


def layers(selector: str, names: Names) -> list[Layer]:
    """The layers that ``selector`` of layers.yaml stands for; none where it counts none."""
    found = []
    for row in _rows(selector):
        for it in value(row.each, names) if row.each else (None,):
            given = value(row.fields, names, {"it": it})
            if given is not None:
                found.append(Layer(**given))
    return found


@cache
def _rows(selector: str) -> list[_Row]:
    rows = table("models/layers")["layers"][selector]
    return [_row(row) for row in (rows if isinstance(rows, list) else [rows])]


def _row(row: Mapping[str, Any]) -> _Row:
    given = {field.name: parse(row[field.name], field.name in TEXTS) for field in fields(Layer) if field.name in row}
    when = parse(row.get("when", row.get("count", True)))
    return _Row(compiled(row["each"]) if "each" in row else None, record(given, {}, when))
