"""A predicted configuration as a deployment: all that the prediction assumed, and how well it fits the memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from perfcast_engine.errors import UnsupportedCombination
from perfcast_engine.models.resolve import Engine
from perfcast_planning.search.task import AGGREGATED, MODES, Experiment, SearchTask
from perfcast_planning.serving.aggregated import prompt_to_compute
from perfcast_planning.serving.disaggregated import Matching
from perfcast_planning.serving.estimate import Estimate, Pool, estimate_aggregated, estimate_disaggregated
from perfcast_planning.serving.workload import NO_TRANSFER, KvTransfer, Workload

from perfcast_deploy.bundle import Bundle, generate
from perfcast_deploy.deployment import Deployment, Facts, Predicted, Role
from perfcast_deploy.deployment import Workload as Load

QUANT = ("gemm", "moe", "fmha", "comm")
SETTINGS = ("tokens_per_block", "cuda_graphs", "moe_backend", "moe_all_to_all", "attention_backend")  # of every role
# The all-to-all of a prediction (by the start of its name) or its MoE kernel -> what its engine is told.
EXPERTS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("vllm", "deepep_ht"): {"moe_all_to_all": "deepep_high_throughput"},
    ("vllm", "deepep_ll"): {"moe_all_to_all": "deepep_low_latency"},
    ("sglang", "deepep_ht"): {"moe_all_to_all": "deepep"},
    ("sglang", "deepep_ll"): {"moe_all_to_all": "deepep"},
    ("sglang", "deepep_moe"): {"moe_all_to_all": "deepep"},
    **{
        ("trtllm", name): {"moe_backend": "WIDEEP"}
        for name in ("trtllm_deepep_ht", "trtllm_deepep_ll", "nvlink_two_sided", "nvlink_one_sided")
    },
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Engines with their batches: of role agg, or of prefill and decode. ``replicas``: copies of all that.

    ``ctx_tokens``: prefill tokens of an aggregated iteration, by default a whole prompt.
    """

    pools: Mapping[str, Pool]
    load: Workload
    ctx_tokens: int | None = None
    replicas: int = 1
    matching: Matching | None = None
    kv_transfer: KvTransfer = field(default=NO_TRANSFER)

    @classmethod
    def of_row(cls, found: Experiment, task: SearchTask, row: Mapping[str, Any]) -> Choice:
        """The row of a search with as many copies as its GPUs hold."""
        if found.mode not in MODES or task.encode_pool:
            words = "no deployment files with encode workers or with attention and FFN apart; search without them"
            raise UnsupportedCombination("mode", words)
        replicas = int(row.get("replicas", (task.total_gpus or row["gpus"]) // row["gpus"]))
        if found.mode == AGGREGATED:
            pool = Pool(worker=found.engines[row["engine"]], batch=int(row["batch"]), workers=1, limits=task.limits)
            return cls(pools={"agg": pool}, load=task.load, ctx_tokens=int(row["ctx_tokens"]), replicas=replicas)
        pools = {
            role: Pool(
                worker=found.engines[row[f"{role}_engine"]],
                batch=int(row[f"{role}_batch"]),
                workers=int(row[f"{role}_workers"]),
                limits=own,
            )
            for role, own in (("prefill", replace(task.limits, accepted=0.0)), ("decode", task.limits))
        }
        shared: dict[str, Any] = {"matching": task.matching, "kv_transfer": task.kv_transfer}
        return cls(pools=pools, load=task.load, replicas=replicas, **shared)

    @property
    def system(self) -> str:
        return self._first.config.system

    @property
    def _first(self) -> Engine:
        return _engine(next(iter(self.pools.values())))

    def estimate(self) -> Estimate:
        """What one replica achieves. Raises PerfDataMissing and what else a step raises."""
        if "agg" in self.pools:
            pool = self.pools["agg"]
            return estimate_aggregated(pool.worker, self.load, pool.batch, self.ctx_tokens, pool.limits)
        prefill, decode = self.pools["prefill"], self.pools["decode"]
        return estimate_disaggregated(prefill, decode, self.load, self.matching, self.kv_transfer)

    def bundle(self, target: str, policy: str = "as_predicted", **settings: Any) -> Bundle:
        """The files for ``target``, held against the model and the memory, and predicted again where changed."""
        facts, made = self.facts(), self.deployment(**settings)
        return generate(made, target, policy, facts=facts, predict=lambda changed: self.deployed(changed, facts))

    def deployment(self, **settings: Any) -> Deployment:
        """All that was assumed, with the figures that all replicas reach. ``settings``: further fields of Deployment,
        and those of SETTINGS for every role.

        Raises OutOfMemory where it does not fit, UnsupportedCombination for what no engine can be told.
        """
        found = self.estimate().require_fit(kv=False)
        engines = {name: _engine(pool) for name, pool in self.pools.items()}
        first, *others = engines.values()
        config = first.config
        for engine in others:
            for name in ("system", "backend"):
                if getattr(engine.config, name) != getattr(config, name):
                    raise UnsupportedCombination(f"decode.{name}", f"must be that of prefill, {getattr(config, name)}")
            if (engine.db.version, engine.nextn) != (first.db.version, first.nextn):
                raise UnsupportedCombination("decode.version", "prefill and decode must run one version and one nextn")
        of_roles = {name: settings.pop(name) for name in SETTINGS if settings.get(name) is not None}
        fractions = [fit.kv_fraction for fit in found.fit.values()]
        roles = tuple(
            self._role(name, pool, fraction, of_roles)
            for (name, pool), fraction in zip(self.pools.items(), fractions, strict=True)
        )
        told: dict[str, Any] = {
            "model": first.spec.id,
            "version": first.db.version,
            "quant": {
                name if len(engines) == 1 else f"{role}.{name}": getattr(engine.modes, name)
                for role, engine in engines.items()
                for name in QUANT
            },
        } | {name: value for name, value in settings.items() if value is not None}
        _check_checkpoint(first, told["model"])
        accepted = list(self.pools.values())[-1].limits.accepted
        return Deployment(
            backend=config.backend,
            system=config.system,
            roles=roles,
            workload=Load(isl=self.load.isl, osl=self.load.osl, prefix=self.load.prefix),
            is_moe=first.spec.moe.experts > 1,
            nextn=first.nextn,
            predicted=Predicted(
                **self.metrics(found), profile=found.profile, accepted=accepted, basis=_basis(first, told)
            ),
            **told,
        )

    def metrics(self, found: Estimate) -> dict[str, Any]:
        """Figures of all replicas under the names of ``Predicted``, in six digits: equal on every machine."""
        row = found.rows.row(0)
        tpot, rate = row["tpot_ms"] or None, row["tokens_per_s"] * self.replicas
        figures = {"ttft_ms": row["ttft_ms"], "tpot_ms": tpot, "output_tokens_per_s": rate}
        short = {name: value and float(f"{value:.6g}") for name, value in figures.items()}
        return {"concurrency": int(row["concurrency"]) * self.replicas, **short}

    def _role(self, name: str, pool: Pool, fraction: float, told: Mapping[str, Any]) -> Role:
        engine, load, batch, sizes = _engine(pool), self.load, pool.batch, pool.worker.parallel
        if sizes.cp > 1:
            raise UnsupportedCombination(
                f"roles.{name}.cp", "no deployment files with context parallelism; search with cp = 1"
            )
        if load.images:
            raise UnsupportedCombination("workload.images", "no deployment files for requests with images")
        if engine.config.eplb:
            raise UnsupportedCombination("enable_eplb", "no deployment files with expert load balancing; leave it off")
        chunk = self.ctx_tokens or load.isl
        decodes = batch * (1 + engine.nextn)
        tokens = {"agg": chunk + decodes, "prefill": load.isl * batch, "decode": decodes}[name]
        moe = engine.spec.moe.experts > 1
        assumed: dict[str, Any] = {"attention_backend": engine.config.attention_backend} | _experts(name, engine)
        return Role(
            name=name,
            workers=pool.workers * self.replicas,
            tp=sizes.tp,
            pp=sizes.pp,
            dp=sizes.attn_dp,
            moe_tp=(sizes.moe_tp or 1) if moe else 1,
            moe_ep=(sizes.moe_ep or 1) if moe else 1,
            max_batch=batch,
            max_tokens=pool.limits.max_num_tokens or tokens,
            max_seq_len=pool.limits.max_seq_len or load.isl + load.osl,
            kv_fraction=fraction,
            kv_dtype=engine.modes.kv,
            chunked_prefill=name == "agg" and chunk < prompt_to_compute(pool.worker, load),
            prefix_caching=load.prefix > 0,
            **assumed | dict(told),
        )

    def facts(self) -> Facts:
        """What the model and the memory allow."""
        spec, found, capacity = self._first.spec, self.estimate(), {}
        for (name, pool), fit in zip(self.pools.items(), found.fit.values(), strict=True):
            length = self.load.isl + (0 if name == "prefill" else self.load.osl)
            each = pool.worker.memory.kv.bytes(np.array([float(length)]))[0]
            if each > 0:
                capacity[name] = math.floor(fit.kv_budget_bytes[0] / each * (1 + 1e-12)) * length
        return Facts(
            num_heads=spec.heads,
            num_layers=spec.layers,
            num_experts=spec.moe.experts,
            max_context_tokens=spec.ctx or None,
            kv_capacity_tokens=capacity,
        )

    def deployed(self, d: Deployment, facts: Facts) -> dict[str, Any]:
        """Figures of the same engines under the limits of ``d``, filled as far as the KV cache reaches."""
        pools, chunk = {}, self.ctx_tokens
        for role in d.roles:
            batch = min(role.max_batch, facts.held(d, role) or role.max_batch)
            if role.name == "prefill":  # prompts that one iteration takes
                batch = min(batch, role.max_tokens // d.workload.isl)
            if role.name == "agg":
                prompt = prompt_to_compute(self.pools["agg"].worker, self.load)
                chunk = max(1, role.max_tokens - role.max_batch * (d.nextn + 1))
                chunk = chunk if role.chunked_prefill else max(chunk // prompt, 1) * prompt
            pools[role.name] = replace(self.pools[role.name], batch=max(1, batch))
        changed = replace(self, pools=pools, ctx_tokens=chunk)
        return changed.metrics(changed.estimate())


def _engine(pool: Pool) -> Engine:
    assert pool.worker.engine is not None, "an engine made of tables"
    return pool.worker.engine.resolved


def _experts(role: str, engine: Engine) -> dict[str, str]:
    """How experts meet their tokens, where that is not as the engine does by itself."""
    backend, comm = engine.config.backend, engine.plan.deployment.comm
    phases = {"prefill": (comm.context,), "decode": (comm.generation,), "agg": (comm.context, comm.generation)}[role]
    told: dict[str, str] = {}
    for name in {*phases, engine.config.moe_backend} - {None}:
        flags = EXPERTS.get((backend, str(name)))
        if flags is None:
            raise UnsupportedCombination(f"roles.{role}.moe_backend", f"{backend} cannot be told to use {name}")
        if any(told.get(key, value) != value for key, value in flags.items()):
            raise UnsupportedCombination(
                f"roles.{role}.moe_all_to_all", f"one {backend} engine has one all-to-all, not one for each phase"
            )
        told |= flags
    return told


def _check_checkpoint(engine: Engine, model: str) -> None:
    """An engine serves a checkpoint as it is quantised; other modes need another checkpoint."""
    asked, own = engine.config.quant, engine.spec.quant
    for name, implied in (("gemm", own.gemm), ("moe", own.moe or own.gemm)):
        mode = getattr(asked, name)
        if mode is not None and mode != (implied or "bfloat16") and model == engine.spec.id:
            raise UnsupportedCombination(
                f"quant.{name}",
                f"was predicted as {mode}, {model} is {implied or 'bfloat16'}; name a checkpoint that is (model_path)",
            )


def _basis(engine: Engine, told: Mapping[str, Any]) -> dict[str, str]:
    """What else the engine was asked with, in the words of EngineConfig."""
    config, quant = engine.config, engine.config.quant
    given = {
        "model": engine.spec.id if told["model"] != engine.spec.id else None,
        "version": engine.db.version if told["version"] != engine.db.version else None,
        "database_mode": config.database_mode.lower(),
        "transfer_policy": config.transfer_policy,
        "resolution": config.resolution,
        "attention_backend": config.attention_backend,
        "moe_backend": config.moe_backend,
        **{f"{name}_quant": getattr(quant, name) for name in ("gemm", "moe", "kv_cache", "fmha", "comm")},
    }
    return {name: value for name, value in given.items() if value is not None}
