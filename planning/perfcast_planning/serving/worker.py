"""One engine ready to serve: its steps, its memory, its GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from perfcast_engine.answer import F64, Mask
from perfcast_engine.config import ParallelConfig
from perfcast_engine.errors import PerfDataMissing
from perfcast_engine.memory import Footprint, MemoryModel
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.predictor import Engine
from perfcast_engine.profiles import Profile
from perfcast_engine.step import StepModel
from perfcast_engine.step_result import StepResult

from perfcast_planning.serving.encoder import Encoder
from perfcast_planning.serving.rows import Rows
from perfcast_planning.serving.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Worker:
    """One engine (model x system x backend x parallel widths) as the serving models see it.

    ``large_ep``: its experts run under an all-to-all of their own; ``engine``: what it was made from.
    """

    step: StepModel
    memory: MemoryModel
    parallel: ParallelConfig
    layers: int
    profile: Profile
    encoder: Encoder | None = None
    large_ep: bool = False
    engine: Engine | None = field(default=None, compare=False)

    @property
    def spec(self) -> ModelSpec:
        assert self.engine is not None
        return self.engine.model

    @property
    def gpus(self) -> int:
        return self.parallel.gpus

    @property
    def label(self) -> str:
        """The reference's name of a parallel mapping."""
        p = self.parallel
        cp = f"cp{p.cp}" if p.cp > 1 else ""
        return f"tp{p.tp}pp{p.pp}dp{p.attn_dp}etp{p.moe_tp}ep{p.moe_ep}{cp}"

    def prompt_tokens(self, load: Workload) -> int:
        """Tokens that a prompt takes in the KV cache: text and images."""
        return load.isl + (self.encoder.prompt_tokens(load.images) if self.encoder else 0)

    def encode_ms(self, load: Workload, batch: F64) -> F64:
        return self.encoder.ms(load.images, batch) if self.encoder else np.zeros(len(batch))

    def encoder_bytes(self, load: Workload, batch: F64) -> tuple[float, F64]:
        return self.encoder.bytes(load.images, batch) if self.encoder else (0.0, np.zeros(len(batch)))


def worker_of(engine: Engine) -> Worker:
    """The serving view of an engine."""
    plan, db = engine.resolved.plan, engine.resolved.db
    d = plan.deployment
    x = d.spec.x
    encoder = None
    if x.depth:
        encoder = Encoder(
            ops=plan.encoder,
            db=db,
            patch=x.patch_size,
            merge=x.spatial_merge_size,
            hidden=x.hidden_size,
            out_hidden=x.out_hidden_size,
            projectors=x.projector_n_instances,
            tp=d.tp,
            data_parallel=d.config.encoder_dp,
        )
    return Worker(
        step=engine.steps,
        memory=engine.memory,
        parallel=replace(d.parallel, moe_tp=d.moe_tp, moe_ep=d.moe_ep),
        layers=d.spec.layers,
        profile=d.profile,
        encoder=encoder,
        large_ep=d.moe_tp == 1 and bool(d.comm),
        engine=engine,
    )


@dataclass(frozen=True, slots=True)
class Served:
    """What a serving model answers for N points: columns, memory, and the steps behind them."""

    rows: Rows
    memory: Footprint
    steps: dict[str, StepResult]

    def raise_first(self) -> Served:
        """Raises what a point without latencies misses."""
        self.first_miss()
        for step in self.steps.values():
            if self.missing().any():
                step.raise_first()
        return self

    def missing(self) -> Mask:
        return np.isnan(self.rows["request_latency_ms"])

    def first_miss(self) -> PerfDataMissing | None:
        """The first data miss of a point without latencies; any other error is raised: it condemns the engine."""
        found = None
        for step in self.steps.values() if self.missing().any() else ():
            for _, error in step.misses:
                if not isinstance(error, PerfDataMissing):
                    raise error.anew()
                found = found or error
        return found
