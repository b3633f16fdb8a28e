"""Tables of whole forward passes that a user measured: a parquet file and its sidecar, read and checked.

    <root>/<system>/<backend>/<version>/fpm_forward_perf.parquet
    <root>/<system>/<backend>/<version>/fpm_forward_perf.metadata.json

Such a table answers for exactly the engines it was measured with, so nothing in it is guessed or mended: whatever is
wrong refuses the whole table.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = "fpm_forward_perf.parquet"
SIDECAR = "fpm_forward_perf.metadata.json"
HEADER = {
    "schema_name": "aic_fpm_forward_perf",
    "schema_version": 6,
    "coordinate_system": "iteration_totals_balanced_v1",
    "measurement_policy": "dynamo_native_single_sample_v1",
}
PARTITION = "balanced_v1"
SWITCHES = ("enable_wideep", "enable_eplb")
CHOSEN = ("moe_backend", "attention_backend")
MODES = ("gemm_quant_mode", "moe_quant_mode", "fmha_quant_mode", "comm_quant_mode", "kv_cache_dtype")
SIZES = ("tp", "pp", "dp", "moe_tp", "moe_ep", "cp")
IDENTITY = ("model_path", *MODES, *SIZES, *CHOSEN, *SWITCHES)
COORDINATES = ("workload_kind", "batch_size", "total_prefill_tokens", "total_kv_read_tokens")
COLUMNS = (
    "cell_id",
    *IDENTITY,
    "system",
    "backend",
    "backend_version",
    "weight_quantization",
    *COORDINATES,
    "partition_policy",
    "latency_ms",
)
OPTIONAL = ("kv_seed_regime",)


class PassTableError(Exception):
    """A table of whole passes is damaged or not what it should be. ``path`` and, where it is one, ``row`` say where."""

    def __init__(self, path: Path, message: str, row: int | None = None) -> None:
        super().__init__(f"{path}{'' if row is None else f', row {row}'}: {message}")
        self.path = path
        self.row = row


def read_passes(folder: Path, system: str, backend: str, version: str) -> dict[str, list[Any]] | None:
    """Columns of the table in ``folder``; None where there is none. PassTableError unless everything is right."""
    path = folder / TABLE
    if not path.is_file():
        return None
    identity = {"system": system, "backend": backend, "backend_version": version}
    header = _header(folder / SIDECAR)
    for name, wanted in {**HEADER, **identity}.items():
        if header.get(name) != wanted:
            raise PassTableError(folder / SIDECAR, f"{name} is {header.get(name)!r}, not {wanted!r}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != header.get("parquet_sha256"):
        raise PassTableError(path, "is not the file that its sidecar describes (sha256)")
    columns = _columns(path)
    rows = len(columns["latency_ms"])
    if rows == 0 or rows != header.get("row_count"):
        raise PassTableError(path, f"has {rows} rows; its sidecar says {header.get('row_count')!r}")
    for row, problem in _problems(columns, identity):
        raise PassTableError(path, problem, row)
    return columns


def _header(path: Path) -> dict[str, Any]:
    try:
        header = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PassTableError(path, f"cannot be read: {error}") from error
    if not isinstance(header, dict):
        raise PassTableError(path, "is not an object")
    return header


def _columns(path: Path) -> dict[str, list[Any]]:
    import pyarrow.parquet as parquet  # only readers of such tables need it

    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise PassTableError(path, f"cannot be read: {error}") from error
    missing = [name for name in COLUMNS if name not in table.column_names]
    if missing:
        raise PassTableError(path, f"lacks the columns {', '.join(missing)}")
    names = (*COLUMNS, *(name for name in OPTIONAL if name in table.column_names))
    return {name: table.column(name).to_pylist() for name in names}


def _problems(columns: dict[str, list[Any]], identity: dict[str, str]) -> Iterator[tuple[int | None, str]]:
    """What is wrong, first row first."""
    for row, values in enumerate(zip(*columns.values(), strict=True)):
        problem = _problem(dict(zip(columns, values, strict=True)), identity)
        if problem:
            yield row, problem
    physical = (*IDENTITY, "weight_quantization", *COORDINATES)
    for key in (physical, ("cell_id", *COORDINATES)):
        count = Counter(zip(*(columns[name] for name in key), strict=True))
        twice = next((point for point, times in count.items() if times > 1), None)
        if twice is not None:
            yield None, "measures one pass twice: " + ", ".join(map(str, twice))


def _problem(row: dict[str, Any], identity: dict[str, str]) -> str | None:
    kind, tokens, latency = row["workload_kind"], row["total_prefill_tokens"], row["latency_ms"]
    for name, wanted in {**identity, "partition_policy": PARTITION}.items():
        if row[name] != wanted:
            return f"{name} is {row[name]!r}, not {wanted!r}"
    if kind not in ("prefill", "decode"):
        return f"unknown workload_kind {kind!r}"
    for name in ("batch_size", "total_prefill_tokens", "total_kv_read_tokens", *SIZES):
        if not isinstance(row[name], int) or isinstance(row[name], bool) or row[name] < 0:
            return f"{name} is {row[name]!r}, not a count"
    if not isinstance(latency, int | float) or not (math.isfinite(latency) and latency > 0):
        return f"latency_ms is {latency!r}, not a time"
    if row["batch_size"] < 1:
        return "batch_size is below 1"
    if (tokens > 0) != (kind == "prefill"):
        return f"a {kind} row has {tokens} prefill tokens"
    for name in CHOSEN:
        if not row[name]:
            return f"{name} is empty"
    for name in SWITCHES:
        if not isinstance(row[name], bool):
            return f"{name} is {row[name]!r}, not a truth value"
    return None
