"""From a configuration to an engine: model, modes, all-to-all, operator lists and the database that prices them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from perfcast_engine.config import FUSED, EngineConfig, MoeComm, ParallelConfig
from perfcast_engine.errors import InvalidField, PerfDataMissing
from perfcast_engine.models.build import ModelPlan, build
from perfcast_engine.models.deployment import Deployment
from perfcast_engine.models.large_ep import ExpertPlacement, choose_comm_backend
from perfcast_engine.models.quantization import QuantModes, Situation, choose
from perfcast_engine.models.registry import Registry
from perfcast_engine.models.rules import complete, is_moe
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.ops.attention import ContextAttention, GenerationAttention
from perfcast_engine.ops.base import Op
from perfcast_engine.profiles import profile_named
from perfcast_engine.tables.catalog import Catalog
from perfcast_engine.tables.database import TRANSFER_PRESETS, Database
from perfcast_engine.tables.lanes import lane_order

# context table as the rules name it -> tables that hold its rows
FMHA_TABLES: Mapping[str, tuple[str, ...]] = {
    "context_mla": ("context_mla", "mla_context_module"),
    "context_mla_granular": ("context_mla",),
    "dsa_context_module": ("dsa_context",),
    "deepseek_v4_context_module": ("dsv4_csa_context_module", "dsv4_hca_context_module"),
}
FMHA_COLUMNS = ("attn_dtype", "mla_dtype")
# architecture, backend -> attention and cache modes that its large-EP tables are labelled with
WIDE_MODES = {("DeepseekV3ForCausalLM", "sglang"): ("fp8_block", "fp8")}
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


def resolve(config: EngineConfig, catalog: Catalog, registry: Registry) -> Engine:
    """The engine that ``config`` describes.

    Raises UnknownName, InvalidField and UnsupportedCombination for what cannot be, PerfDataMissing where there are no
    tables, or none that let experts span nodes.
    """
    spec = config.model if isinstance(config.model, ModelSpec) else registry.get(config.model)
    spec = spec.with_layers(config.layers)
    policy = TRANSFER_PRESETS[config.transfer_policy]
    db = catalog.database(
        config.system, config.backend, config.version, config.database_mode, policy, config.allow_unlisted_version
    )
    parallel = complete(spec, config.parallel)
    modes = choose(
        spec,
        config.quant,
        Situation(
            backend=db.backend,
            sm=db.system.sm_version,
            resolution=config.resolution,
            moe_backend=config.moe_backend,
            decode_only=config.role == "decode",
            large_ep=bool(config.moe_comm),
        ),
        lambda table, kv: measured_fmha(db, table, kv),
    )
    comm = config.moe_comm
    if comm is None:
        comm = across_nodes(config, spec, parallel, modes, db)
        modes = _wide_modes(config, spec, modes) if comm else modes
    deployment = Deployment(
        spec=spec,
        parallel=parallel,
        modes=modes,
        backend=db.backend,
        system=db.system.name,
        gpus_per_node=db.system.gpus_per_node,
        nextn=drafted(config, spec),
        comm=comm,
        moe_backend=config.moe_backend,
        attention_backend=config.attention_backend,
        eplb=config.eplb,
        slots=config.slots,
        distribution=config.workload_distribution,
        encoder_dp=config.encoder_dp,
        language_only=config.language_only,
        profile=profile_named(config.profile),
    )
    return Engine(config, with_lanes(build(deployment), db), db)


def drafted(config: EngineConfig, spec: ModelSpec) -> int:
    """Draft depth; "auto" takes the prediction layers of the checkpoint (a model with a draft of its own has none)."""
    if config.nextn != "auto":
        return config.nextn
    return 0 if spec.family == "KIMIK3" else spec.mtp_layers


def measured_fmha(db: Database, name: str, kv: str | None) -> frozenset[str]:
    """Attention modes that a context table has rows of, beside cache mode ``kv`` if given (spec/05 3.7)."""
    found: set[str] = set()
    for part in FMHA_TABLES.get(name, (name,)):
        table = db.find(part)
        if table is not None:
            column = next(column for column in FMHA_COLUMNS if column in table.key)
            beside = {} if kv is None else {"kv_cache_dtype": kv}
            found |= {mode for mode in table.vocab[column] if table.holds(**{column: mode}, **beside)}
    return frozenset(found)


def across_nodes(
    config: EngineConfig, spec: ModelSpec, parallel: ParallelConfig, modes: QuantModes, db: Database
) -> MoeComm:
    """The all-to-all of each phase where experts span nodes, none inside a node (spec/05 8.6)."""
    experts, ep, tp = spec.moe, parallel.moe_ep or 1, parallel.moe_tp or 1
    if not is_moe(spec) or ep <= db.system.gpus_per_node:
        return FUSED
    if tp != 1:
        raise InvalidField("parallel.moe_tp", "must be 1 where experts span nodes", why="cross_node_tp")
    layer = ExpertPlacement(
        hidden=spec.hidden,
        inter=experts.inter,
        topk=experts.topk,
        experts=experts.experts,
        quant=modes.moe,
        attn_dp=parallel.attn_dp,
        moe_tp=tp,
        moe_ep=ep,
    )
    phases = ("context",) if config.role == "prefill" else ("context", "generation")
    chosen = {phase: choose_comm_backend(db, spec.family, phase, layer) for phase in phases}
    if None in chosen.values():
        raise PerfDataMissing(
            f"experts over {ep} ranks need a measured all-to-all for {spec.id} on {db.system.name} with {db.backend}",
            op="moe_a2a",
            key=str(layer),
            system=db.system.name,
            backend=db.backend,
            version=db.version,
        )
    return MoeComm(**chosen)


def _wide_modes(config: EngineConfig, spec: ModelSpec, modes: QuantModes) -> QuantModes:
    labels = WIDE_MODES.get((spec.arch, config.backend))
    if labels is not None:
        fmha = config.quant.fmha or labels[0]
        kv = config.quant.kv_cache or labels[1]
        modes = replace(modes, fmha=fmha, kv=kv)
    return replace(modes, gemm_explicit=modes.gemm_explicit or config.resolution == "estimate")


def with_lanes(plan: ModelPlan, db: Database) -> ModelPlan:
    """``plan`` with the order of kernels on its top-level dense attention (spec/05 section 11)."""
    return replace(
        plan,
        context=tuple(_laned(op, db, plan.deployment) for op in plan.context),
        generation=tuple(_laned(op, db, plan.deployment) for op in plan.generation),
    )


def _laned(op: Op, db: Database, d: Deployment) -> Op:
    table = LANE_TABLES.get(type(op))
    if table is None or not isinstance(op, ContextAttention | GenerationAttention):
        return op
    lanes = db.kept(("lanes", table, d.attention_backend), lambda: lane_order(db, table, d.attention_backend))
    return replace(op, lanes=lanes)
