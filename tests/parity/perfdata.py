"""perfdata goldens: slots, versions, sources, folded tables, lanes, system figures, errors (spec/01 section 12).

The reference shows some tables in other shapes than packs hold them; VIEWS says how each of its views reads from ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from perfcast_engine import quant
from perfcast_engine.answer import Points
from perfcast_engine.errors import SystemFlopsMissing
from perfcast_engine.ops.gemm import Gemm
from perfcast_engine.system import SystemSpec
from perfcast_engine.tables.catalog import Catalog
from perfcast_engine.tables.database import Database, Mode
from perfcast_engine.tables.lanes import densities, lane_order
from perfcast_engine.tables.table import Table
from perfcast_systems.pack import Pack, PackTable

from tests.parity.check import NotSupported

Mask = NDArray[np.bool_]
MOE = ("topk", "num_experts", "hidden_size", "inter_size")
STATE = ["d_model", "num_k_heads", "head_k_dim", "num_v_heads", "head_v_dim", "d_conv"]
MAMBA = ["d_model", "d_state", "d_conv", "nheads", "head_dim", "n_groups", "chunk_size"]


@dataclass(frozen=True)
class View:
    """One view of the reference: tables it reads, the files whose rows it counts, its key columns where they differ
    (a tuple inside is joined by "|"), which rows it shows, and a factor."""

    tables: tuple[str, ...]
    files: tuple[str, ...] = ()
    key: tuple[str | tuple[str, ...], ...] = ()
    where: Mapping[str, Callable[[str], bool]] | None = None
    factor: float = 1.0
    without_length: tuple[str, ...] | None = None  # phases whose rows have no seq_len level


def _one(table: str, *files: str, **fields: Any) -> View:
    return View((table,), files or (table,), **fields)


def _is(*names: str) -> Callable[[str], bool]:
    return lambda value: value in names


DEEPEP = ["node_num", "hidden_size", "topk", "num_experts"]
EXPERTS = ("topk", "num_experts", "hidden_size", "inter_size")
GROUP = ("moe_tp_size", "moe_ep_size", "num_tokens")
WIDEEP = ("moe_dtype", "distribution", *EXPERTS, *GROUP)
STATE_KEY = ("kernel_source", "phase", tuple(STATE), "batch_size", "seq_len")

VIEWS = {
    "compute_scale": _one("computescale"),
    "context_mla_module": _one("mla_context_module"),
    "generation_mla_module": _one("mla_generation_module"),
    "moe_low_latency": _one("moe_low_latency", "moe"),
    "nccl": _one("nccl", key=("nccl_dtype", "op_name", "num_gpus", "message_size")),
    "custom_allreduce": _one("custom_allreduce"),
    "context_dsa_module": _one("dsa_context", "dsa_context_module"),
    "context_dsa_module_skip": _one("dsa_context_skip", "dsa_context_module"),
    "generation_dsa_module": _one("dsa_generation", "dsa_generation_module"),
    "generation_dsa_module_skip": _one("dsa_generation_skip", "dsa_generation_module"),
    "context_deepseek_v4_attention_module": View(
        ("dsv4_csa_context_module", "dsv4_hca_context_module"), ("dsv4_csa_context_module", "dsv4_hca_context_module")
    ),
    "generation_deepseek_v4_attention_module": View(
        ("dsv4_csa_generation_module", "dsv4_hca_generation_module"),
        ("dsv4_csa_generation_module", "dsv4_hca_generation_module"),
    ),
    "dsv4_sparse_kernel.paged_mqa_logits": _one("dsv4_paged_mqa_logits_module"),
    "dsv4_csa_topk_calib": _one("dsv4_csa_topk_calib", key=("num_heads", "step", "isl", "batch_size", "score_mode")),
    "mamba2": _one("mamba2", key=("kernel_source", "phase", tuple(MAMBA), "batch_size", "seq_len")),
    "gdn": _one("gdn", key=STATE_KEY, without_length=("generation", "verify")),
    "kda": _one("kda", key=STATE_KEY, without_length=("generation",)),
    "moe_a2a": _one("moe_a2a", "moe_a2a", "wideep_deepep_normal", "wideep_deepep_ll", "trtllm_alltoall"),
    "moe_ep": _one("moe_expert_compute", "wideep_context_moe", "wideep_generation_moe", "wideep_moe"),
    "wideep_context_moe": _one(
        "moe_expert_compute",
        "wideep_context_moe",
        key=WIDEEP,
        where={"kernel_source": _is("deepep_moe"), "inference_phase": _is("context")},
    ),
    "wideep_generation_moe": _one(
        "moe_expert_compute",
        "wideep_generation_moe",
        key=WIDEEP,
        where={"kernel_source": _is("deepep_moe"), "inference_phase": _is("generation")},
    ),
    "wideep_moe_compute": _one(
        "moe_expert_compute",
        "wideep_moe",
        key=("kernel_source", "moe_dtype", "distribution", *EXPERTS, "num_slots", *GROUP),
        where={"kernel_source": lambda kernel: kernel != "deepep_moe", "inference_phase": _is("context")},
    ),
    "wideep_deepep_normal": _one(
        "moe_a2a",
        "wideep_deepep_normal",
        key=(*DEEPEP, "sms", "num_tokens"),
        where={"comm_backend": _is("deepep_ht")},
        factor=1000.0,
    ),
    "wideep_deepep_ll": _one(
        "moe_a2a",
        "wideep_deepep_ll",
        key=(*DEEPEP, "num_tokens"),
        where={"comm_backend": _is("deepep_ll")},
        factor=1000.0,
    ),
}


@cache
def catalog() -> Catalog:
    return Catalog()


def evaluate(case: dict[str, Any]) -> Any:
    return KINDS[case["kind"]](case)


def _slots(case: dict[str, Any]) -> Any:
    return catalog().slots(case["system"], case["backend"]) or None


def _version(case: dict[str, Any]) -> Any:
    return {"version": catalog().resolve_version(case["system"], case["backend"], case["request"])}


def _opened(case: dict[str, Any]) -> tuple[Database, Pack]:
    where = case["system"], case["backend"], case["version"]
    pack = catalog().pack(*where)
    return catalog().database(*where, mode=case["mode"]), pack


def _sources_of(pack: Pack, stem: str, shared: bool) -> list[Mapping[str, Any]]:
    return [s for s in pack.sources(stem) if s["channel"] != "library" and (shared or s["own"])]


def _sources(case: dict[str, Any]) -> Any:
    db, pack = _opened(case)
    found = _sources_of(pack, case["file"].removesuffix("_perf.parquet"), db.mode.shared)
    return {
        "sources": [{key: s[key] for key in ("version", "path", "channel", "kernels")} for s in found],
        "admitted_rows": sum(s["rows"] for s in found),
        "low_fidelity": sorted(s["path"] for s in found if s["low_fidelity"]),
    }


def _table(case: dict[str, Any]) -> Any:
    db, pack = _opened(case)
    view = VIEWS.get(case["table"]) or _one(case["table"])
    shared = db.mode.shared
    packed = [table for name in view.tables if (table := pack.table(name)) is not None]
    files = [s for stem in view.files for s in pack.sources(stem) if shared or s["own"]]
    if not files:
        return {"absent": True}
    leaves: dict[tuple[str, ...], tuple[float, float]] = {}
    first: list[str] | None = None
    for table in packed:
        loaded = db.find(table.name)
        if loaded is None:
            continue
        shown = _shown(table, loaded, view, shared)
        keys = _keys(table, loaded, view)
        if first is None:
            first = _first(table, loaded, keys, view, shared)
        for row in np.flatnonzero(shown):
            power = 0.0 if loaded.power is None else float(loaded.power[row])
            ms, energy = leaves.get(keys[row], (0.0, 0.0)) if view.factor != 1.0 else (0.0, 0.0)
            value = float(loaded.ms[row]) * view.factor
            leaves[keys[row]] = ms + value, energy + power * value
    values = [ms for ms, _ in leaves.values()]
    resolved = not all(source["channel"] == "library" for source in files)
    return {
        "admitted_rows": sum(source["rows"] for source in files) if resolved else None,
        "keys": len(leaves),
        "sum_latency": float(np.sum(values)),
        "sum_energy": float(np.sum([energy for _, energy in leaves.values()])),
        "min": min(values, default=None),
        "max": max(values, default=None),
        "first_key": first,
        "samples": [
            {"key": sample["key"], "latency": leaves.get(tuple(sample["key"]), (float("nan"),))[0]}
            for sample in case["expect"].get("samples", [])
        ],
    }


def _shown(table: PackTable, loaded: Table, view: View, shared: bool) -> Mask:
    shown = ~table.shadowed if shared else ~table.shadowed[table.own]
    for column, test in (view.where or {}).items():
        names = loaded.vocab[column]
        passes = np.array([test(name) for name in names])
        shown = shown & passes[loaded.columns[loaded.key.index(column)]]
    return shown


def _keys(table: PackTable, loaded: Table, view: View) -> list[tuple[str, ...]]:
    def text(column: str) -> list[str]:
        values = loaded.columns[loaded.key.index(column)]
        names = loaded.vocab.get(column)
        return [str(value) if names is None else names[value] for value in values.tolist()]

    parts = []
    for part in view.key or [column for column in table.key if column != "lane"]:
        parts.append(
            text(part) if isinstance(part, str) else ["|".join(row) for row in zip(*map(text, part), strict=True)]
        )
    keys = list(zip(*parts, strict=True))
    if view.without_length is not None:
        keys = [key[:-1] if key[1] in view.without_length else key for key in keys]
    return keys


def _first(table: PackTable, loaded: Table, keys: list[Any], view: View, shared: bool) -> list[str] | None:
    """The key that the first source of the view's files begins with."""
    position = np.arange(len(table.ms)) if shared else np.cumsum(table.own) - 1
    for stem in view.files:
        for index, source in enumerate(table.sources):
            fits = source["path"].endswith(f"/{stem}_perf.parquet") and (shared or source["own"])
            if fits and table.first[index] >= 0:
                return list(keys[position[table.first[index]]])
    return None


def _lanes(case: dict[str, Any]) -> Any:
    db, _ = _opened(case)
    shared, own = densities(db, case["table"])
    order = lane_order(db, case["table"])
    return {"shared": _lists(shared), "own": _lists(own), "order": list(order)}


def _lists(density: Mapping[str, tuple[int, int]]) -> dict[str, list[int]]:
    return {lane: list(counts) for lane, counts in density.items()}


def _gemm_leaf(case: dict[str, Any]) -> Any:
    db, _ = _opened(case)
    table = db.table("gemm")
    below = 0
    for name in table.vocab["gemm_dtype"]:
        rows = table.rows(name)
        if rows is None or name not in quant.GEMM:
            continue
        m, n, k = (column[rows] for column in table.columns[1:])
        site, which = np.unique(np.stack([n, k]), axis=1, return_inverse=True)
        for i, (sn, sk) in enumerate(site.T):
            here = which == i
            op = Gemm(name="gemm", n=int(sn), k=int(sk), quant=name)
            try:
                below += int((table.ms[rows][here] < op.sol(db, Points.of(1, m[here])).time).sum())
            except SystemFlopsMissing:
                break
    leaves = []
    for leaf in case["expect"]["leaves"]:
        name, m, n, k = leaf["key"]
        rows = table.rows(name, int(m), int(n), int(k))
        assert rows is not None
        op = Gemm(name="gemm", n=int(n), k=int(k), quant=name)
        loaded = op.evaluate(db, Points.of(1, int(m))).raise_first().ms[0]
        leaves.append({"key": leaf["key"], "raw": float(table.ms[rows][0]), "loaded": float(loaded)})
    return {"points_below_sol": below, "leaves": leaves}


SPEC_KEYS = {
    "gpu": {
        "mem_bw": "mem_bw",
        "mem_bw_empirical_scaling_factor": "mem_bw_efficiency",
        "mem_empirical_constant_latency": "mem_latency_s",
        "mem_capacity": "mem_capacity",
        "power": "power_w",
        "sm_version": "sm_version",
    },
    "node": {
        "num_gpus_per_node": "gpus_per_node",
        "num_gpus_per_rack": "gpus_per_rack",
        "intra_node_bw": "intra_node_bw",
        "inter_node_bw": "inter_node_bw",
        "inter_rack_bw": "inter_rack_bw",
        "pcie_bw": "pcie_bw",
        "p2p_latency": "p2p_latency_s",
        "inter_rack_latency": "inter_rack_latency_s",
    },
    "misc": {"other_mem": "other_mem", "nccl_version": "nccl_version", "oneccl_version": "oneccl_version"},
}


def _spec(case: dict[str, Any]) -> Any:
    spec: SystemSpec = catalog().system(case["system"])
    found: dict[str, dict[str, Any]] = {
        section: {key: value for key, name in keys.items() if (value := getattr(spec, name)) is not None}
        for section, keys in SPEC_KEYS.items()
    }
    found["gpu"] |= {f"{rate}_tc_flops": value for rate, value in spec.flops.items()}
    found["misc"]["nccl_mem"] = {str(ranks): value for ranks, value in spec.nccl_mem.items()}
    return found


def _error(case: dict[str, Any]) -> Any:
    mode = case.get("database_mode", Mode.SILICON)
    db = catalog().database(
        case["system"],
        case["backend"],
        case["version"],
        mode=mode,
        allow_unlisted=case.get("allow_unlisted_version", False),
    )
    return {"version": db.version}


def _unknown(case: dict[str, Any]) -> Any:
    raise NotSupported(f"kind {case['kind']}")


KINDS: Mapping[str, Callable[[dict[str, Any]], Any]] = {
    "slots": _slots,
    "version": _version,
    "sources": _sources,
    "table": _table,
    "lanes": _lanes,
    "gemm_leaf": _gemm_leaf,
    "spec": _spec,
    "error": _error,
}
