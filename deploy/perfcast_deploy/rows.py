"""Rows of a search, read back into what was predicted. Columns: specification 06 section 13, or our own search's."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfcast_engine.errors import InvalidField, UnsupportedCombination

from perfcast_deploy.validate import read_json, read_yaml

UNDEPLOYED = ("(e)", "encode_workers", "afd_")
PARALLEL = re.compile(r"tp(\d+)pp(\d+)dp(\d+)etp(\d+)ep(\d+)(?:cp(\d+))?$")
WIDTHS = ("tp", "pp", "attn_dp", "moe_tp", "moe_ep", "cp")
PREFIXES = {"agg": ("",), "prefill": ("(p)", "prefill_"), "decode": ("(d)", "decode_")}
NAMES = {"batch": ("bs", "batch"), "attn_dp": ("dp", "attn_dp"), "replicas": ("replicas", "replicas_total")}
KNOWN = {"model": str, "system": str, "backend": str, "version": str, "profile": str, "isl": int, "osl": int}


@dataclass(frozen=True)
class RoleRow:
    """Workers of one role: parallel widths in the words of EngineConfig, requests per attention-DP rank."""

    widths: Mapping[str, int]
    batch: int
    workers: int

    @property
    def gpus(self) -> int:
        return math.prod(self.widths[name] for name in ("tp", "pp", "attn_dp", "cp")) * self.workers


@dataclass(frozen=True)
class Row:
    """One replica, of role agg or of prefill and decode. ``known``: what the row says of the engine and the load."""

    roles: Mapping[str, RoleRow]
    ctx_tokens: int | None
    replicas: int | None
    known: Mapping[str, Any]

    @property
    def gpus(self) -> int:
        return sum(role.gpus for role in self.roles.values())


def parse(columns: Mapping[str, Any]) -> Row:
    """Raises InvalidField and UnsupportedCombination by the name of the column."""
    if any(name.startswith(UNDEPLOYED) and columns[name] not in (None, "", 0) for name in columns):
        raise UnsupportedCombination("row", "rows with an encode pool or AFD have no deployment; search without them")
    names = ("agg",) if _find(columns, "agg", "batch") is not None else ("prefill", "decode")
    known: dict[str, Any] = {}
    for name, kind in (*KNOWN.items(), ("prefix", int)):
        value = next((v for role in ("agg", *names) if (v := _find(columns, role, name)) is not None), None)
        if value is not None:
            known[name] = _whole(name, value, 0) if kind is int else str(value)
    chunk, replicas = columns.get("ctx_tokens"), _find(columns, "agg", "replicas")
    return Row(
        roles={name: _role(columns, name) for name in names},
        ctx_tokens=None if chunk in (None, "") else _whole("ctx_tokens", chunk),
        replicas=None if replicas is None else _whole("replicas", replicas),
        known=known,
    )


def _role(columns: Mapping[str, Any], name: str) -> RoleRow:
    workers = _find(columns, name, "workers")
    return RoleRow(
        widths=_widths(columns, name),
        batch=_whole(f"{name}.bs", _find(columns, name, "batch")),
        workers=1 if workers is None else _whole(f"{name}.workers", workers),
    )


def _widths(columns: Mapping[str, Any], role: str) -> dict[str, int]:
    label = _find(columns, role, "parallel")
    if label is not None:
        match = PARALLEL.match(str(label))
        if not match:
            raise InvalidField(f"{role}.parallel", f"{label!r:.40} is not of the form tp4pp1dp1etp1ep1", "type")
        return {name: int(size or 1) for name, size in zip(WIDTHS, match.groups(), strict=True)}
    found = {name: _find(columns, role, name) for name in WIDTHS}
    if found["tp"] is None:
        raise InvalidField(f"{role}.tp", "the row names no parallel sizes", "missing")
    return {name: 1 if size is None else _whole(f"{role}.{name}", size) for name, size in found.items()}


def _find(columns: Mapping[str, Any], role: str, name: str) -> Any:
    spelled = (f"{prefix}{own}" for prefix in PREFIXES[role] for own in NAMES.get(name, (name,)))
    return next((columns[key] for key in spelled if columns.get(key) not in (None, "")), None)


def _whole(name: str, value: Any, least: int = 1) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidField(name, f"{value!r:.40} is no whole number", "missing" if value is None else "type") from None
    if isinstance(value, bool) or not math.isfinite(number) or number != int(number) or number < least:
        raise InvalidField(name, f"{value!r:.40} is no whole number of at least {least}", "range")
    return int(number)


def read_row(path: Path, index: int = 0) -> dict[str, Any]:
    """Row ``index`` of a JSON, YAML or CSV file (an object, or a list of them)."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("row", f"{path} cannot be read: {error}", "missing") from error
    if path.suffix == ".csv":
        rows: Any = list(csv.DictReader(io.StringIO(text)))
    elif path.suffix in (".yaml", ".yml"):
        rows = read_yaml(path.name, text)
    else:
        rows = read_json(path.name, text)
    rows = rows if isinstance(rows, list) else [rows]
    if not 0 <= index < len(rows):
        raise InvalidField("index", f"{path} has {len(rows)} rows, numbered from 0", "range")
    if not isinstance(rows[index], dict) or not rows[index] or None in rows[index]:
        shown = json.dumps(rows[index], default=str)[:60]
        raise InvalidField("row", f"{path} holds no mapping of columns at {index}: {shown}", "type")
    return dict(rows[index])
