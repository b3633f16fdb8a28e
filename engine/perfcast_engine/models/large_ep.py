"""Whether measured data let a worker run its experts under a large-EP all-to-all, and which (spec/03 13.2, 05 8.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from perfcast_engine.errors import InvalidField
from perfcast_engine.models.families import runs_large_ep
from perfcast_engine.ops.large_ep import BACKENDS, CommBackend, measured_node, wire_dtype
from perfcast_engine.tables.database import Database

# Frameworks whose ordinary expert table stands in for the large-EP one.
ORDINARY_EXPERTS = frozenset({"vllm", "trtllm"})
STEPS = ("dispatch", "combine")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertPlacement:
    """The expert layers of a model on one worker, every expert whole. ``inter``: width of one expert."""

    hidden: int
    inter: int
    topk: int
    experts: int
    quant: str
    attn_dp: int
    moe_ep: int


def choose_comm_backend(db: Database, family: str, phase: str, layer: ExpertPlacement) -> str | None:
    """The first backend that may run ``phase`` ("context" or "generation") of a model of ``family`` and has measured
    data for it; None where none has. A worker needs one for every phase it runs, and for context in any case."""

    def look() -> str | None:
        if not _covers_experts(db, phase, layer):
            return None
        may_run = (backend for backend in BACKENDS.values() if _feasible(backend, db, phase, layer))
        return next((backend.name for backend in may_run if _covers_exchange(backend, db, phase, layer)), None)

    return db.kept(("comm backend", phase, layer), look) if runs_large_ep(family) else None


def _feasible(backend: CommBackend, db: Database, phase: str, layer: ExpertPlacement) -> bool:
    return (
        db.backend in backend.frameworks
        and phase in backend.phases
        and layer.topk <= backend.max_topk
        and layer.attn_dp >= backend.min_attn_dp
        and (db.system.sm_version or 0) >= backend.min_sm
        and 1 < layer.moe_ep <= layer.experts
        and layer.experts % layer.moe_ep == 0
    )


def _covers_exchange(backend: CommBackend, db: Database, phase: str, layer: ExpertPlacement) -> bool:
    table = db.find("moe_a2a")
    if table is None:
        return False
    nodes = -(-layer.moe_ep // db.system.gpus_per_node)
    spreads = [(layer.moe_ep, nodes)]
    if nodes > 1 and backend.one_node_stands_in:
        spreads.append((measured_node(db), 1))
    try:
        sent = [wire_dtype(backend, phase, step, layer.quant, db.system.name) for step in STEPS]
    except InvalidField:
        return False
    shape = (layer.hidden, layer.topk, layer.experts)
    return any(
        all(table.rows(backend.name, step, dtype, *spread, *shape) for step, dtype in zip(STEPS, sent, strict=True))
        for spread in spreads
    )


def _covers_experts(db: Database, phase: str, layer: ExpertPlacement) -> bool:
    sizes = {"topk": layer.topk, "num_experts": layer.experts, "hidden_size": layer.hidden, "inter_size": layer.inter}
    shape: dict[str, Any] = {"moe_dtype": layer.quant, **sizes, "moe_tp_size": 1, "moe_ep_size": layer.moe_ep}
    own, ordinary = db.find("moe_expert_compute"), db.find("moe") if db.backend in ORDINARY_EXPERTS else None
    return bool(own and own.holds(**shape, inference_phase=phase)) or bool(ordinary and ordinary.holds(**shape))
