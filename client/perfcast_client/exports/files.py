"""What an export leaves behind: whole files or none, and what they hold."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfcast_client.reading import Result
from perfcast_client.results import EngineStamp, Provenance


@dataclass(frozen=True, slots=True)
class Export(Result):
    """Files written, from which engine, over which ranges, and how far a reader's interpolation is off at worst: at
    every whole number of an axis of up to 65,536, of two axes at every pair of about 512 of each."""

    files: tuple[str, ...]
    engine: EngineStamp
    ranges: Mapping[str, Any]
    worst_relative_error: Mapping[str, float]
    silicon_share: float


def meta(stamp: EngineStamp, provenance: Provenance, errors: Mapping[str, float]) -> dict[str, Any]:
    """Origin of a table, under names that its readers ignore."""
    return {
        "meta_engine_handle": stamp.handle,
        "meta_engine": f"{stamp.system} {stamp.backend} {stamp.version} {stamp.database_mode} {stamp.profile}",
        "meta_data_version": stamp.data_version,
        "meta_silicon_share": provenance.silicon_share,
        **{f"meta_worst_relative_error_{name}": value for name, value in errors.items()},
    }


def write_npz(path: Path, arrays: Mapping[str, Any]) -> str:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{name: np.asarray(value) for name, value in arrays.items()})
    return _write(path, buffer.getvalue())


def write_json(path: Path, values: Mapping[str, Any]) -> str:
    return _write(path, json.dumps(values, indent=1, allow_nan=False).encode() + b"\n")


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return _write(path, buffer.getvalue().encode())


def write_text(path: Path, text: str) -> str:
    return _write(path, text.encode())


def _write(path: Path, data: bytes) -> str:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return str(path)
