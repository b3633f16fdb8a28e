"""Flags as data: our parameter names to the flags and engine-file keys of each engine version, and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from perfcast_engine.errors import InvalidField, Reason, UnknownName, UnsupportedCombination

from perfcast_deploy.catalog import data_file, version_key

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Flag:
    """One row of data/flags.yaml."""

    param: str
    flag: str = ""
    path: str = ""
    type: str = "int"
    since: str = "0"
    reference: str = "0"
    only: str = ""
    default: Any = ...
    choices: tuple[Any, ...] = ()
    alias: tuple[str, ...] = ()
    map: Mapping[Any, Any] = field(default_factory=dict)

    def engine_value(self, value: Any) -> Any:
        return self.map.get(value, value) if isinstance(value, str | bool) else value

    def our_value(self, value: Any) -> Any:
        return {theirs: ours for ours, theirs in self.map.items()}.get(value, value) if self.map else value


@cache
def table(backend: str) -> tuple[Flag, ...]:
    """All rows of an engine."""
    rows = data_file("flags.yaml")
    if backend not in rows:
        raise UnknownName("backend", backend, rows, Reason.INVALID_FIELD)
    return tuple(_row(row) for row in rows[backend]["flags"])


def _row(row: Mapping[str, Any]) -> Flag:
    fields: dict[str, Any] = dict(row)
    for name in ("choices", "alias"):
        fields[name] = tuple(fields.get(name, ()))
    return Flag(**fields)


def rows_of(backend: str, version: str, *, reference: bool = False) -> tuple[Flag, ...]:
    """The rows that a version knows; ``reference``: those of the reference's flag set for it."""
    key, first = version_key(version), version_key(data_file("flags.yaml")[backend]["first"])
    if reference:
        return tuple(
            row
            for row in table(backend)
            if row.reference != "never" and (key < first or version_key(row.reference) <= key)
        )
    if key < first:
        known = [data_file("flags.yaml")[backend][end] for end in ("first", "newest")]
        raise UnknownName(f"{backend} version", version, known, Reason.UNKNOWN_VERSION)
    return tuple(row for row in table(backend) if row.only != "reference" and version_key(row.since) <= key)


def check(backend: str, version: str, params: Params) -> None:
    """Refuse parameters and values that this engine version does not know; names what would work."""
    rows = {row.param: row for row in rows_of(backend, version)}
    for name, value in params.items():
        if value is None:
            continue
        if name not in rows:
            later = next((row for row in table(backend) if row.param == name and row.only != "reference"), None)
            remedy = f"needs {backend} >= {later.since}" if later else f"{backend} has no such setting; leave it unset"
            raise UnsupportedCombination(name, f"{backend} {version} has no flag for it: {remedy}")
        if rows[name].choices and value not in rows[name].choices:
            legal = ", ".join(map(str, rows[name].choices))
            raise InvalidField(name, f"{value!r} is not legal for {backend} {version}; choose from {legal}", "choice")


def command_flags(rows: Sequence[Flag], params: Params) -> dict[str, Any]:
    """Flag name -> typed value for the rows that have a flag and a value."""
    flags: dict[str, Any] = {}
    for row in rows:
        value = params.get(row.param)
        if value is None or not row.flag:
            continue
        value = row.engine_value(value)
        if row.type == "pair":
            flags[row.flag if value else f"no-{row.flag}"] = True
        elif row.type != "bool" or value:
            flags[row.flag] = sorted(set(value)) if row.type == "ints" else value
    return flags


def engine_file(rows: Sequence[Flag], params: Params, *, defaults: bool = False) -> dict[str, Any]:
    """The nested engine file (TRT-LLM) of the rows that have a path; ``defaults`` fills the table's defaults in."""
    tree: dict[str, Any] = {}
    for row in rows:
        value = params.get(row.param, row.default if defaults else ...)
        if not row.path or value is ... or (value is None and row.default is not None):
            continue
        if row.type == "off":
            tree |= {row.path: None} if value else {}
            continue
        value = row.engine_value(value)
        *folders, leaf = row.path.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = sorted(set(value)) if row.type == "ints" else value
    return tree


def argv(flags: Mapping[str, Any]) -> list[str]:
    """Command-line words of a flag map: True is bare, lists are repeated words, mappings compact JSON."""
    words: list[str] = []
    for name, value in flags.items():
        words.append(f"--{name}")
        if isinstance(value, list):
            words.extend(map(str, value))
        elif isinstance(value, Mapping):
            words.append(json.dumps(value, separators=(",", ":")))
        elif value is not True:
            words.append(str(value))
    return words


@cache
def _readers(backend: str) -> Mapping[str, tuple[str, str, bool]]:
    """Spelling -> (flag, type, value of a bare word) for everything that may stand on a command line."""
    known: dict[str, tuple[str, str, bool]] = {}
    launch = data_file("flags.yaml")[backend]["launch"]
    for name in launch["values"]:
        known[name.replace("_", "-")] = (name, "text", True)
    for name in launch["bare"]:
        known[name.replace("_", "-")] = (name, "bool", True)
    for row in table(backend):
        for name in (row.flag, *row.alias) if row.flag and row.only != "reference" else ():
            known[name.replace("_", "-")] = (row.flag, row.type, True)
            if row.type == "pair":
                known[f"no-{name}"] = (row.flag, row.type, False)
    return known


def read_argv(backend: str, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Command-line words -> (flag -> typed value, positional words). Unknown flags are refused by name."""
    known, short = _readers(backend), data_file("flags.yaml")[backend]["launch"]["short"]
    flags: dict[str, Any] = {}
    positional: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        name, _, inline = word.lstrip("-").partition("=")
        spelled = name if word.startswith("--") else short.get(name, "")
        entry = known.get(spelled.replace("_", "-"))
        if entry is None:
            raise UnknownName(f"{backend} flag", word, (f"--{flag}" for flag in known), Reason.INVALID_FIELD)
        flag, kind, bare = entry
        if flag in flags:
            raise InvalidField(f"--{flag}", "given twice; keep one", "duplicate")
        if kind in ("bool", "pair"):
            if "=" in word:
                raise InvalidField(f"--{name}", "takes no value; write it bare", "value")
            flags[flag] = bare
        elif kind == "ints":
            values = [inline] if inline else []
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
            flags[flag] = [typed(flag, "int", value) for value in values]
        else:
            if "=" not in word and not rest:
                raise InvalidField(f"--{name}", "needs a value", "value")
            flags[flag] = typed(flag, kind, inline if "=" in word else rest.pop(0))
    return flags, positional


def typed(flag: str, kind: str, text: str) -> Any:
    try:
        readers: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "json": json.loads}
        return readers.get(kind, str)(text)
    except ValueError as error:
        raise InvalidField(f"--{flag}", f"{text!r} is no {kind}", "type") from error


def params_of(backend: str, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Our parameters of a flag map (launch flags are passed over)."""
    rows = {row.flag: row for row in table(backend) if row.flag and row.only != "reference"}
    return {rows[name].param: rows[name].our_value(value) for name, value in flags.items() if name in rows}


def params_of_file(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Our parameters of a TRT-LLM engine file; unknown keys are refused by path."""
    rows = {row.path: row for row in table("trtllm") if row.path and row.only != "reference"}
    found: dict[str, Any] = {}

    def walk(node: Mapping[str, Any], prefix: str) -> None:
        for key, value in node.items():
            path = f"{prefix}{key}"
            if isinstance(value, Mapping):
                walk(value, f"{path}.")
            elif path in rows:
                found[rows[path].param] = True if rows[path].type == "off" else rows[path].our_value(value)
            else:
                raise UnknownName(f"key of {source}", path, rows, Reason.INVALID_FIELD)

    walk(tree, "")
    return found
