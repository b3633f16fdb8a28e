"""Reading system descriptions: our YAML schema (system_fields.yaml), checked on load (spec/01 section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfcast_engine.data import read_yaml, table
from perfcast_engine.errors import DataCorrupt, InvalidField
from perfcast_engine.system import SystemSpec

LARGEST = 1e30  # of any figure


def read_spec(path: Path) -> SystemSpec:
    """The system described by ``path``, named by its stem.

    DataCorrupt when the file is no YAML mapping; InvalidField (field ``<system>.<section>.<key>``) when a figure is
    missing, unknown or out of range.
    """
    content = read_yaml(path, "system description ")
    if not isinstance(content, dict):
        raise DataCorrupt(f"system description {path.name} is not a mapping", file=str(path))
    return spec_of(path.stem, content)


def spec_of(name: str, content: Mapping[str, Any]) -> SystemSpec:
    """The system ``name`` from the parsed YAML."""
    fields: dict[str, Any] = {"flops": {}}
    known: Mapping[str, Mapping[str, Any]] = table("system_fields")
    for section, entries in content.items():
        if section not in known:
            raise InvalidField(f"{name}.{section}", "unknown section", why="unknown_key")
        if not isinstance(entries, dict):
            raise InvalidField(f"{name}.{section}", "must be a mapping", why="type")
        for key, value in entries.items():
            rule = known[section].get(key)
            if rule is None:
                raise InvalidField(f"{name}.{section}.{key}", "unknown key", why="unknown_key")
            fields[rule["field"]] = _value(f"{name}.{section}.{key}", rule, value)
    for section, rules in known.items():
        for key, rule in rules.items():
            if rule.get("required") and rule["field"] not in fields:
                raise InvalidField(f"{name}.{section}.{key}", "is required", why="missing")
    return SystemSpec(name=name, **fields)


def _value(where: str, rule: Mapping[str, Any], value: Any) -> Any:
    if rule.get("text"):
        if not isinstance(value, str) or not value:
            raise InvalidField(where, "must be a text", why="type")
        return value
    if "by" not in rule:
        return _figure(where, rule, value)
    if not isinstance(value, dict):
        raise InvalidField(where, "must be a mapping", why="type")
    for key in value:
        if rule["by"] == "ranks":
            if not isinstance(key, int) or isinstance(key, bool) or key < 1:
                raise InvalidField(f"{where}.{key}", "ranks must be a positive integer", why="type")
        elif key not in rule["by"]:
            raise InvalidField(f"{where}.{key}", f"unknown rate; one of {', '.join(rule['by'])}", why="unknown_key")
    return {key: _figure(f"{where}.{key}", rule, entry) for key, entry in value.items()}


def _figure(where: str, rule: Mapping[str, Any], value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise InvalidField(where, f"must be a number up to {LARGEST:g}", why="type")
    if value < 0 or (value == 0 and not rule.get("zero")):
        raise InvalidField(where, "must be positive", why="range")
    if not rule.get("whole"):
        return float(value)
    if value != int(value):
        raise InvalidField(where, "must be a whole number", why="type")
    return int(value)
