"""What a row says in terms of a table's key: key columns by name, and those that are derived from other columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from perfcast_systems.build.rows import Ints, Names, Reals, Rows
from perfcast_systems.build.schema import NAMES, TABLES
from perfcast_systems.build.tree import BuildError

Column = Ints | Names
NATIVE_HEADS = {
    "deepseek-ai/DeepSeek-V3": 128,
    "deepseek-ai/DeepSeek-R1": 128,
    "nvidia/DeepSeek-V3.1-NVFP4": 128,
    "moonshotai/Kimi-K3": 96,
}


@dataclass(frozen=True, slots=True)
class Part:
    """Rows for one table: its key columns in order, ms and W (None where the file has no power column)."""

    table: str
    columns: tuple[Column, ...]
    ms: Reals
    power: Reals | None = None

    @property
    def n(self) -> int:
        return len(self.ms)


def _seq(rows: Rows) -> Ints:
    return rows.number("isl") + rows.number("step")


def _kvn(rows: Rows) -> Ints:
    kv = rows.number("num_key_value_heads")
    return np.where(kv == rows.number("num_heads"), 0, kv)


def _heads_of_model(rows: Rows) -> Ints:
    model = rows.name("model")
    unknown = [name for name in model.values if name not in NATIVE_HEADS]
    if unknown:
        raise BuildError(f"{rows.origin}: unknown model {unknown[0]!r}; one of {', '.join(NATIVE_HEADS)}")
    native = np.array([NATIVE_HEADS[name] for name in model.values], np.int64)[model.codes]
    tp = rows.number("tp_size", 1)
    if np.any((tp > 1) & (rows.number("num_heads") * tp != native)):
        raise BuildError(f"{rows.origin}: num_heads times tp_size is not the model's head count")
    return native


def _native_heads(rows: Rows) -> Ints:
    return rows.number("num_heads") * np.maximum(rows.number("tp_size", 1), 1)


def nodes_of_ep(rows: Rows) -> Ints:
    """NVLink nodes of four GPUs that an expert-parallel group spans; the all-to-all files have no such column."""
    return np.maximum(rows.number("moe_ep_size") // 4, 1)


# Key columns that are not read as they stand, per table ("" for every table).
DERIVED: Mapping[tuple[str, str], Callable[[Rows], Column]] = {
    ("", "seq"): _seq,
    ("", "kvn"): _kvn,
    ("", "lane"): lambda rows: rows.name("kernel_source", "default"),
    ("", "window_size"): lambda rows: rows.number("window_size", 0),
    ("", "native_heads"): _native_heads,
    ("mla_context_module", "native_heads"): _heads_of_model,
    ("mla_generation_module", "native_heads"): _heads_of_model,
    ("", "score"): lambda rows: rows.name("score_mode").renamed(lambda mode: "flat" if mode == "flat" else "last"),
    ("custom_allreduce", "nccl_dtype"): lambda rows: Names.constant("half", rows.n),
    ("custom_allreduce", "strategy"): lambda rows: Names.constant("AUTO", rows.n),
    ("trtllm_alltoall", "num_nodes"): nodes_of_ep,
    ("dsv4_megamoe_module", "num_fused_shared_experts"): lambda rows: rows.number("num_fused_shared_experts", 0),
    ("dsv4_megamoe_module", "moe_tp_size"): lambda rows: rows.number("moe_tp_size", 1),
}


def plain(rows: Rows, table: str, **given: Column) -> Part:
    """Key columns by name, those ``given`` as they are, derived ones by rule; latency in ms, power where there is."""

    def column(name: str) -> Column:
        if name in given:
            return given[name]
        rule = DERIVED.get((table, name)) or DERIVED.get(("", name))
        if rule is not None:
            return rule(rows)
        return rows.name(name) if name in NAMES else rows.number(name)

    columns = tuple(column(name) for name in TABLES[table].key)
    return Part(table, columns, rows.real("latency"), rows.reals.get("power"))
