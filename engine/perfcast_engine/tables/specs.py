"""Reading system descriptions: our YAML schema, checked on load (spec/01 section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from perfcast_engine.errors import DataCorrupt, InvalidField
from perfcast_engine.system import SystemSpec

# (section, key) of the YAML -> field of SystemSpec
REQUIRED = {
    ("gpu", "mem_bw_bytes_per_s"): "mem_bw",
    ("links", "gpus_per_node"): "gpus_per_node",
    ("links", "intra_node_bw_bytes_per_s"): "intra_node_bw",
    ("links", "inter_node_bw_bytes_per_s"): "inter_node_bw",
}
OPTIONAL = {
    ("gpu", "mem_bw_efficiency"): "mem_bw_efficiency",
    ("gpu", "mem_latency_s"): "mem_latency_s",
    ("gpu", "mem_capacity_bytes"): "mem_capacity",
    ("gpu", "power_w"): "power_w",
    ("gpu", "sm_version"): "sm_version",
    ("links", "gpus_per_rack"): "gpus_per_rack",
    ("links", "inter_rack_bw_bytes_per_s"): "inter_rack_bw",
    ("links", "pcie_bw_bytes_per_s"): "pcie_bw",
    ("links", "p2p_latency_s"): "p2p_latency_s",
    ("links", "inter_rack_latency_s"): "inter_rack_latency_s",
    ("reserved_memory", "other_bytes"): "other_mem",
}
TEXTS = {("libraries", "nccl"): "nccl_version", ("libraries", "oneccl"): "oneccl_version"}
MAPS = {("gpu", "dense_flop_per_s"): "flops", ("reserved_memory", "nccl_bytes_by_ranks"): "nccl_mem"}
WHOLE = frozenset({"gpus_per_node", "gpus_per_rack", "sm_version"})
MAY_BE_ZERO = frozenset({"mem_latency_s", "p2p_latency_s", "inter_rack_latency_s", "other_mem", "nccl_mem"})
LARGEST = 1e30  # of any figure
RATES = ("float32", "bfloat16", "int8", "fp8", "fp4")


def read_spec(path: Path) -> SystemSpec:
    """The system described by ``path``, named by its stem.

    DataCorrupt when the file is no YAML mapping; InvalidField (field ``<system>.<section>.<key>``) when a figure is
    missing, unknown or out of range.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise DataCorrupt(f"system description {path.name} cannot be read: {why}", file=str(path)) from error
    if not isinstance(content, dict):
        raise DataCorrupt(f"system description {path.name} is not a mapping", file=str(path))
    return spec_of(path.stem, content)


def spec_of(name: str, content: Mapping[str, Any]) -> SystemSpec:
    """The system ``name`` from the parsed YAML."""
    fields: dict[str, Any] = {}
    known = {**REQUIRED, **OPTIONAL, **TEXTS, **MAPS}
    for section, entries in content.items():
        if section not in {place[0] for place in known}:
            raise InvalidField(f"{name}.{section}", "unknown section", why="unknown_key")
        if not isinstance(entries, dict):
            raise InvalidField(f"{name}.{section}", "must be a mapping", why="type")
        for key, value in entries.items():
            target = known.get((section, key))
            if target is None:
                raise InvalidField(f"{name}.{section}.{key}", "unknown key", why="unknown_key")
            fields[target] = _value(f"{name}.{section}.{key}", target, value)
    for (section, key), target in REQUIRED.items():
        if target not in fields:
            raise InvalidField(f"{name}.{section}.{key}", "is required", why="missing")
    fields.setdefault("flops", {})
    return SystemSpec(name=name, **fields)


def _value(where: str, target: str, value: Any) -> Any:
    if target in TEXTS.values():
        if not isinstance(value, str) or not value:
            raise InvalidField(where, "must be a text", why="type")
        return value
    if target not in MAPS.values():
        return _figure(where, target, value)
    if not isinstance(value, dict):
        raise InvalidField(where, "must be a mapping", why="type")
    for key in value:
        if target == "flops" and key not in RATES:
            raise InvalidField(f"{where}.{key}", f"unknown rate; one of {', '.join(RATES)}", why="unknown_key")
        if target == "nccl_mem" and (not isinstance(key, int) or isinstance(key, bool) or key < 1):
            raise InvalidField(f"{where}.{key}", "ranks must be a positive integer", why="type")
    return {key: _figure(f"{where}.{key}", target, entry) for key, entry in value.items()}


def _figure(where: str, target: str, value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise InvalidField(where, f"must be a number up to {LARGEST:g}", why="type")
    if value < 0 or (value == 0 and target not in MAY_BE_ZERO):
        raise InvalidField(where, "must be positive", why="range")
    if target in WHOLE:
        if value != int(value):
            raise InvalidField(where, "must be a whole number", why="type")
        return int(value)
    return float(value)
