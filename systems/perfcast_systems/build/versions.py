"""Order of framework versions and the queryable slots of a data tree (spec/01 sections 4 and 5)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from perfcast_systems.build.tree import DataTree

Slots = dict[str, str]  # slot name -> literal version


def slot_order(version: str) -> tuple[int, ...]:
    """Sort key by which ``next`` is chosen. Not PEP 440: candidates rank below, trailing integers break ties."""
    text = version.lower()
    if match := re.search(r"(\d+)\.(\d+)\.(\d+)", text):
        release = tuple(int(part) for part in match.groups())
    elif match := re.search(r"v?(\d+)\.(\d+)", text):
        release = (int(match[1]), int(match[2]), 0)
    else:
        release = (0, 0, 0)
    candidate = re.search(r"rc(\d*)", text)
    stage = (0, int(candidate[1] or 0)) if candidate else (1, 0)
    trailing = re.findall(r"\d+", text[match.end() :] if match else text)
    return (*release, *stage, int(trailing[-1]) if trailing else 0)


def parsed(version: str) -> Version | None:
    """The PEP 440 version, None for text that is not one."""
    try:
        return Version(version)
    except InvalidVersion:
        return None


def newest_first(versions: list[str]) -> list[str]:
    """PEP 440 descending; texts that do not parse come last, descending."""
    known = {version: parsed(version) for version in versions}
    readable = sorted(
        ((value, version) for version, value in known.items() if value is not None), key=lambda pair: pair, reverse=True
    )
    return [version for _, version in readable] + sorted((v for v, p in known.items() if p is None), reverse=True)


def slots(tree: DataTree, rules: Mapping[str, Any], system: str, backend: str) -> Slots:
    """Slot names and their versions; empty where the system has no data of the backend or the rules know none."""
    overrides: Mapping[str, Any] = rules.get("overrides") or {}
    own = (overrides.get(system) or {}).get(backend)
    rule = own or (rules.get("defaults") or {}).get(backend)
    if not rule or not tree.versions(system, backend):
        return {}
    found = {name: str(rule[name]) for name in ("current", "previous") if rule.get(name)}
    if own or "current" not in found:
        return found
    fleet = {
        version
        for other in tree.systems()
        if backend not in (overrides.get(other) or {})
        for version in tree.versions(other, backend)
        if tree.has_data(other, backend, version)
    }
    later = [version for version in fleet if slot_order(version) > slot_order(found["current"])]
    if later:
        found["next"] = max(later, key=slot_order)
    return found
