"""From a configuration to an engine: model, modes, all-to-all, operator lists and the database that prices them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from perfcast_engine.config import FUSED, EngineConfig, MoeComm, ParallelConfig
from perfcast_engine.errors import InvalidField, PerfDataMissing
from perfcast_engine.models.build import ModelPlan, build
from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.families import is_moe
from perfcast_engine.models.large_ep import ExpertPlacement, choose_comm_backend
from perfcast_engine.models.quantization import (
    QuantModes,
    Situation,
    choose,
    context_tables,
    expert_mode,
    fitting,
    rows,
)
from perfcast_engine.models.registry import Registry
from perfcast_engine.models.rules import complete
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.ops.attention import ContextAttention, GenerationAttention
from perfcast_engine.ops.base import Op
from perfcast_engine.tables.catalog import Catalog
from perfcast_engine.tables.database import TRANSFER_PRESETS, Database
from perfcast_engine.tables.lanes import lane_order

# role -> phases that need an all-to-all, for a single estimate and for a candidate of a search
PHASES = {"both": ("context", "generation"), "prefill": ("context",), "decode": ("generation",)}
SEARCHED_PHASES = PHASES | {"decode": ("context", "generation")}
SEARCHED_WIDTHS = (2, 4, 8, 16, 32, 64)
FMHA_COLUMNS = ("attn_dtype", "mla_dtype")
LANE_TABLES = {ContextAttention: "context_attention", GenerationAttention: "generation_attention"}


@dataclass(frozen=True)
class Engine:
    """A configuration with every question answered. ``db.version`` is the literal version."""

    config: EngineConfig
    plan: ModelPlan
    db: Database

    @property
    def spec(self) -> ModelSpec:
        return self.plan.deployment.spec

    @property
    def modes(self) -> QuantModes:
        return self.plan.deployment.modes

    @property
    def parallel(self) -> ParallelConfig:
        return self.plan.deployment.parallel

    @property
    def nextn(self) -> int:
        return self.plan.deployment.nextn


def resolve(
    config: EngineConfig, catalog: Catalog, registry: Registry, plans: dict[Hashable, ModelPlan] | None = None
) -> Engine:
    """The engine that ``config`` describes. ``plans``: of those with the same model and options.

    Raises UnknownName, InvalidField and UnsupportedCombination for what cannot be, PerfDataMissing where there are no
    tables, or none that let experts span nodes.
    """
    spec = registry.spec(config)
    policy = TRANSFER_PRESETS[config.transfer_policy]
    db = catalog.database(
        config.system, config.backend, config.version, config.database_mode, policy, config.allow_unlisted_version
    )
    parallel = complete(spec, config.parallel)
    modes, comm = modes_and_comm(config, spec, parallel, db)
    deployment = Deployment(
        config=config,
        spec=spec,
        parallel=parallel,
        modes=modes,
        gpus_per_node=db.system.gpus_per_node,
        nextn=drafted(config, spec),
        comm=comm,
    )
    key = id(db), parallel, modes, comm, config.encoder_dp, config.language_only
    plan = plans.get(key) if plans is not None else None
    if plan is None:
        plan = with_lanes(build(deployment), db)
        if plans is not None:
            plans[key] = plan
    return Engine(config, plan, db)


def drafted(config: EngineConfig, spec: ModelSpec) -> int:
    """Draft depth; "auto" takes the prediction layers of the checkpoint (a model with a draft of its own has none)."""
    if config.nextn != "auto":
        return config.nextn
    return 0 if spec.family == "KIMIK3" else spec.mtp_layers


def measured_fmha(db: Database, name: str, kv: str | None) -> frozenset[str]:
    """Attention modes that a context table has rows of, beside cache mode ``kv`` if given (spec/05 3.7)."""

    def look() -> frozenset[str]:
        found: set[str] = set()
        for table in filter(None, map(db.find, rows("measured_in").get(name, (name,)))):
            column = next(column for column in FMHA_COLUMNS if column in table.key)
            beside = {} if kv is None else {"kv_cache_dtype": kv}
            found |= {mode for mode in table.vocab[column] if table.holds(**{column: mode}, **beside)}
        return frozenset(found)

    return db.kept(("fmha modes", name, kv), look)


def modes_and_comm(
    config: EngineConfig, spec: ModelSpec, parallel: ParallelConfig, db: Database
) -> tuple[QuantModes, MoeComm]:
    """Quantisation modes and the all-to-all of each phase (spec/05 3.7, 8.6).

    A single estimate looks for an all-to-all only where experts span nodes, and then settles the modes first. A search
    settles the modes over all its candidates, and takes an all-to-all wherever one was measured.
    """
    search, asked = config.resolution == "search", config.quant
    own = context_tables(spec, db.backend, search)
    where = Situation(db.backend, db.system.sm_version, own, config.resolution, config.moe_backend)

    def modes(tables: Sequence[str]) -> QuantModes:
        read = () if config.role == "decode" else tables
        return choose(spec, asked, replace(where, tables=read), partial(measured_fmha, db))

    if config.moe_comm is not None:
        return modes(() if config.moe_comm and not search else own), config.moe_comm
    if search:
        reached = _reaches_large_ep(config, spec, modes(own).moe, db)
        chosen = modes(context_tables(spec, db.backend, search, reached))
        comm = exchange(config, spec, parallel, chosen.moe, db)
    else:
        comm = exchange(config, spec, parallel, expert_mode(spec, asked, where), db)
        chosen = replace(modes(()), gemm_explicit=True) if comm else modes(own)
    return _labelled(config, spec, chosen) if comm else chosen, comm


def exchange(config: EngineConfig, spec: ModelSpec, parallel: ParallelConfig, moe: str, db: Database) -> MoeComm:
    """The all-to-all of each phase that the configuration serves; none where the fused form is taken."""
    ep, tp = parallel.moe_ep or 1, parallel.moe_tp or 1
    spans_nodes, search = ep > db.system.gpus_per_node, config.resolution == "search"
    if not is_moe(spec) or not (spans_nodes or (search and ep > 1 and tp == 1)):
        return FUSED
    if tp != 1:
        raise InvalidField("parallel.moe_tp", "must be 1 where experts span nodes", why="cross_node_tp")
    layer = _placement(spec, moe, parallel.attn_dp, ep)
    phases = (SEARCHED_PHASES if search else PHASES)[config.role]
    chosen = {phase: choose_comm_backend(db, spec.family, phase, layer) for phase in PHASES["both"]}
    if all(chosen[phase] for phase in phases):
        return MoeComm(**chosen)
    if not spans_nodes:
        return FUSED
    raise PerfDataMissing(
        f"experts over {ep} ranks need a measured all-to-all for {spec.id} on {db.system.name} with {db.backend}",
        op="moe_a2a",
        key=str(layer),
        system=db.system.name,
        backend=db.backend,
        version=db.version,
    )


def _placement(spec: ModelSpec, moe: str, attn_dp: int, ep: int) -> ExpertPlacement:
    routed = {name: getattr(spec.moe, name) for name in ("inter", "topk", "experts")}
    return ExpertPlacement(hidden=spec.hidden, **routed, quant=moe, attn_dp=attn_dp, moe_ep=ep)


def _reaches_large_ep(config: EngineConfig, spec: ModelSpec, moe: str, db: Database) -> bool:
    """Whether some candidate of a search would run under an all-to-all."""
    return any(
        all(choose_comm_backend(db, spec.family, phase, layer) for phase in SEARCHED_PHASES[config.role])
        for layer in (_placement(spec, moe, ep, ep) for ep in SEARCHED_WIDTHS)
    )


def _labelled(config: EngineConfig, spec: ModelSpec, modes: QuantModes) -> QuantModes:
    """``modes`` as the large-EP tables call them."""
    label = fitting("large_ep_modes", arch=spec.arch, backend=config.backend)
    fmha, kv = label.get("fmha", modes.fmha), label.get("kv", modes.kv)
    return replace(modes, fmha=config.quant.fmha or fmha, kv=config.quant.kv_cache or kv)


def with_lanes(plan: ModelPlan, db: Database) -> ModelPlan:
    """``plan`` with the order of kernels on its top-level dense attention (spec/05 section 11)."""
    asked = plan.deployment.config.attention_backend

    def laned(op: Op) -> Op:
        if not isinstance(op, ContextAttention | GenerationAttention):
            return op
        table = LANE_TABLES[type(op)]
        return replace(op, lanes=db.kept(("lanes", table, asked), lambda: lane_order(db, table, asked)))

    return replace(plan, context=tuple(map(laned, plan.context)), generation=tuple(map(laned, plan.generation)))
