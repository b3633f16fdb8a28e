"""Rows of a search to deployments. Columns: specification 06 section 13, or the names of our own search."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml
from perfcast_engine.errors import DataCorrupt, InvalidField, OutOfMemory, UnsupportedCombination

from perfcast_deploy.catalog import backend_facts, system_facts
from perfcast_deploy.deployment import Deployment, Facts, Role
from perfcast_deploy.validate import read_json

PARALLEL = re.compile(r"tp(\d+)pp(\d+)dp(\d+)etp(\d+)ep(\d+)(?:cp(\d+))?$")
SIZES = ("tp", "pp", "dp", "moe_tp", "moe_ep", "cp")
PREFIXES = {"agg": ("",), "prefill": ("(p)", "prefill_"), "decode": ("(d)", "decode_")}
NAMES = {  # ours: the names a row may use
    "batch": ("bs", "batch"),
    "workers": ("workers",),
    "memory_gib": ("memory", "memory_gib"),
    "kv_dtype": ("kvcache", "kvcache_quant_mode"),
    "ttft_ms": ("ttft", "ttft_ms"),
    "tpot_ms": ("tpot", "tpot_ms"),
    "per_gpu": ("tokens/s/gpu", "tokens_per_s_per_gpu"),
    "dp": ("dp", "attn_dp"),
}


def from_row(row: Mapping[str, Any], given: Mapping[str, Any] | None = None, facts: Facts | None = None) -> Deployment:
    """The deployment a row stands for: whole replicas that fit ``total_gpus``, limits as predicted.

    ``given``: what the prediction assumed beside the row, under the names of ``Deployment``, of ``Role`` (then for all
    roles), or isl, osl, prefix, total_gpus, profile. ``facts`` of the model and the memory are checked. Raises
    InvalidField, UnsupportedCombination, OutOfMemory.
    """
    told, facts = dict(given or {}), facts or Facts()
    cluster = told.pop("cluster", {})
    if not isinstance(cluster, Mapping):
        raise InvalidField("cluster", f"must be a mapping, not {cluster!r}", "type")
    if any(name.startswith("(e)") and row[name] not in (None, "", 0) for name in row):
        raise UnsupportedCombination("row", "rows with an encode pool have no deployment; search without it")
    names = ("agg",) if _find(row, "agg", "batch") is not None else ("prefill", "decode")
    data = {key: _text(row, key, told.pop(key, None)) for key in ("model", "backend", "version", "system")}
    load = {
        key: _whole(key, told.pop(key, row.get(key)) or 0, least)
        for key, least in (("isl", 1), ("osl", 1), ("prefix", 0))
    }
    total, profile, own = told.pop("total_gpus", None), told.pop("profile", None), {item.name for item in fields(Role)}
    of_roles = {name: told.pop(name) for name in list(told) if name in own}
    sizes = {name: _sizes(row, name) for name in names}
    is_moe = told.pop("is_moe", None)
    if is_moe is None:
        is_moe = _is_moe(facts, sizes)
    fractions = backend_facts(data["backend"])["kv_fraction"]
    fraction = next(
        (f for prefix, f in fractions.items() if prefix and data["version"].startswith(prefix)), fractions[""]
    )
    roles = [
        _role(row, name, sizes[name], load, told.get("nextn", 0), is_moe) | {"kv_fraction": fraction} | of_roles
        for name in names
    ]
    _replicate(roles, total)
    last, gpus = roles[-1], sum(role["tp"] * role["pp"] * role["dp"] * role["workers"] for role in roles)
    per_gpu = _number(row, "", "per_gpu")
    predicted = {
        "concurrency": last["max_batch"] * last["pp"] * last["dp"] * last["workers"],
        "ttft_ms": _number(row, "", "ttft_ms"),
        "tpot_ms": _number(row, "", "tpot_ms"),
        "output_tokens_per_s": None if per_gpu is None else per_gpu * gpus,
        "profile": profile,
    }
    cluster = {"gpus_per_node": system_facts(data["system"])["gpus_per_node"]} | dict(cluster)
    made = {"workload": load, "is_moe": is_moe, "roles": roles, "predicted": predicted, "cluster": cluster}
    deployment = Deployment.from_dict(data | made | told)
    used = {name: _number(row, name, "memory_gib") for name in names}
    bytes_used = {name: value * 2**30 for name, value in used.items() if value is not None}
    replace(facts, used_memory_bytes=bytes_used | dict(facts.used_memory_bytes)).check(deployment)
    return deployment


def _role(
    row: Mapping[str, Any], name: str, sizes: Mapping[str, int], load: Mapping[str, int], nextn: int, is_moe: bool
) -> dict[str, Any]:
    if sizes["cp"] > 1:
        raise UnsupportedCombination(f"roles.{name}.cp", "no context parallelism in deployments; search with cp = 1")
    batch, decoded = _whole(f"{name}.bs", _find(row, name, "batch")), 1 + _whole("nextn", nextn, 0)
    chunk = _whole("ctx_tokens", row.get("ctx_tokens") or load["isl"])
    workers = _find(row, name, "workers")
    return {
        "name": name,
        "workers": 1 if workers is None else _whole(f"{name}.workers", workers),
        **{key: sizes[key] if is_moe or not key.startswith("moe") else 1 for key in SIZES if key != "cp"},
        "max_batch": batch,
        "max_tokens": {"agg": chunk + batch * decoded, "prefill": load["isl"] * batch, "decode": batch * decoded}[name],
        "max_seq_len": load["isl"] + load["osl"],
        "kv_dtype": str(_find(row, name, "kv_dtype") or "bfloat16"),
        "prefix_caching": load["prefix"] > 0,
    }


def _replicate(roles: list[dict[str, Any]], total: int | None) -> None:
    """As many whole replicas as ``total`` GPUs hold."""
    size = sum(role["tp"] * role["pp"] * role["dp"] * role["workers"] for role in roles)
    if total is not None and _whole("total_gpus", total) < size:
        raise InvalidField("total_gpus", f"{total} GPUs hold no replica of {size}", "range")
    for role in roles:
        role["workers"] *= total // size if total else 1


def _is_moe(facts: Facts, sizes: Mapping[str, Mapping[str, int]]) -> bool:
    if facts.num_experts is not None:
        return facts.num_experts > 1
    return any(size["moe_tp"] * size["moe_ep"] > 1 for size in sizes.values())


def _sizes(row: Mapping[str, Any], role: str) -> dict[str, int]:
    label = next((row[f"{prefix}parallel"] for prefix in PREFIXES[role] if row.get(f"{prefix}parallel")), None)
    if label is not None:
        match = PARALLEL.match(str(label))
        if not match:
            raise InvalidField(f"{role}.parallel", f"{label!r} is not of the form tp4pp1dp1etp1ep1", "type")
        return {name: int(size or 1) for name, size in zip(SIZES, match.groups(), strict=True)}
    found = {name: _find(row, role, name) for name in SIZES}
    if found["tp"] is None:
        raise InvalidField(f"{role}.tp", "the row names no parallel sizes", "missing")
    return {name: 1 if size in (None, "") else _whole(f"{role}.{name}", size) for name, size in found.items()}


def _find(row: Mapping[str, Any], role: str, name: str) -> Any:
    for prefix in PREFIXES.get(role, ("",)):
        for spelled in NAMES.get(name, (name,)):
            if row.get(f"{prefix}{spelled}") not in (None, ""):
                return row[f"{prefix}{spelled}"]
    return None


def _text(row: Mapping[str, Any], name: str, given: Any) -> str:
    value = given or _find(row, "agg", name) or _find(row, "decode", name)
    if not isinstance(value, str):
        raise InvalidField(name, "is neither in the row nor given", "missing")
    return value


def _number(row: Mapping[str, Any], role: str, name: str) -> float | None:
    value = _find(row, role, name)
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not (math.isfinite(number) and number > 0):
        raise InvalidField(f"{role}{'.' if role else ''}{name}", f"{value!r} is no positive finite number", "range")
    return number


def _whole(name: str, value: Any, least: int = 1) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidField(name, f"{value!r} is no whole number", "missing" if value is None else "type") from None
    if isinstance(value, bool) or not math.isfinite(number) or number != int(number) or number < least:
        raise InvalidField(name, f"{value!r} is no whole number of at least {least}", "range")
    return int(number)


def naive_row(
    weights_bytes: int, gpu_memory_bytes: int, gpus_per_node: int, total_gpus: int, is_moe: bool
) -> dict[str, int]:
    """An aggregated row without any prediction: the fewest GPUs that hold 1.5 times the weights, batch 128.

    Raises OutOfMemory when the largest worker allowed is too small (specification 08, 12.6).
    """
    gpus = 1
    while gpus * gpu_memory_bytes < 1.5 * weights_bytes:
        gpus *= 2
    most = min(gpus_per_node, total_gpus)
    if gpus > most:
        raise OutOfMemory(
            f"1.5 x {weights_bytes} bytes of weights need {gpus} GPUs, {most} may hold one worker", field="total_gpus"
        )
    return {"tp": gpus, "pp": 1, "dp": 1, "moe_tp": gpus if is_moe else 1, "moe_ep": 1, "bs": 128}


def read_row(path: Path, index: int = 0) -> dict[str, Any]:
    """Row ``index`` of a JSON, YAML or CSV file (an object, or a list of them)."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("row", f"{path} cannot be read: {error}", "missing") from error
    if path.suffix == ".csv":
        rows: Any = list(csv.DictReader(io.StringIO(text)))
    elif path.suffix in (".yaml", ".yml"):
        try:
            rows = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise DataCorrupt(f"{path} is no YAML: {' '.join(str(error).split())}", file=str(path)) from error
    else:
        rows = read_json(path.name, text)
    rows = rows if isinstance(rows, list) else [rows]
    if not 0 <= index < len(rows):
        raise InvalidField("index", f"{path} has {len(rows)} rows, numbered from 0", "range")
    if not isinstance(rows[index], dict) or not rows[index] or None in rows[index]:
        raise InvalidField(
            "row", f"{path} holds no mapping of columns at {index}: {json.dumps(rows[index], default=str)[:60]}", "type"
        )
    return dict(rows[index])
