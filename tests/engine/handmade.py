"""Small measured tables written by hand, and a database over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.database import AGGRESSIVE, Database, Mode
from perfcast_engine.tables.table import Key, Table

# Round figures: 100 TFLOP/s, 1 TB/s, so that a roofline can be checked by head.
SYSTEM = SystemSpec(
    name="paper_gpu",
    mem_bw=1e12,
    flops={"bfloat16": 1e14, "fp8": 2e14, "int8": 2e14},
    gpus_per_node=8,
    intra_node_bw=4e11,
    inter_node_bw=5e10,
    mem_bw_efficiency=0.8,
    mem_latency_s=3e-6,
    p2p_latency_s=1e-5,
    sm_version=90,
)


def table(name: str, key: str, rows: Sequence[tuple[Key | float, ...]], power: bool = False) -> Table:
    """Rows of (*key values, ms[, W]) in the order in which a file would hold them; the first of equal keys wins."""
    columns = key.split()
    width = len(columns)
    vocab: dict[str, list[str]] = {}
    coded: dict[tuple[int, ...], tuple[Key | float, ...]] = {}
    for row in rows:
        code = []
        for column, value in zip(columns, row[:width], strict=True):
            if isinstance(value, str):
                names = vocab.setdefault(column, [])
                if value not in names:
                    names.append(value)
                code.append(names.index(value))
            else:
                code.append(int(value))
        coded.setdefault(tuple(code), row[width:])
    keys = sorted(coded)
    return Table(
        name=name,
        key=tuple(columns),
        columns=tuple(np.array(column, np.int64) for column in zip(*keys, strict=True)),
        vocab=vocab,
        ms=np.array([float(coded[key][0]) for key in keys]),
        power=np.array([float(coded[key][1]) for key in keys]) if power else None,
    )


def database(*tables: Table, mode: Mode = Mode.SILICON, system: SystemSpec = SYSTEM, policy=AGGRESSIVE) -> Database:
    """A database that shows the same rows to every mode."""
    named = {table.name: table for table in tables}
    return Database(system, "trtllm", "1.0", lambda name, shared: named.get(name), mode, policy)
