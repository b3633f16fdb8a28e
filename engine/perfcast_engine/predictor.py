"""The facade: what a script imports and the server calls.

from perfcast_engine import EngineConfig, ParallelConfig, Predictor

engine = Predictor().engine(
    EngineConfig(model="Qwen/Qwen3-32B-FP8", system="h200_sxm", backend="trtllm", parallel=ParallelConfig(tp=4))
)
print(engine.steps.prefill(batch=1, isl=4000).ms)
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from perfcast_engine.config import EngineConfig, ParallelConfig
from perfcast_engine.memory import MemoryModel, memory_of
from perfcast_engine.models.build import ModelPlan
from perfcast_engine.models.quantization import QuantModes
from perfcast_engine.models.registry import Registry
from perfcast_engine.models.resolve import Engine as Resolved
from perfcast_engine.models.resolve import resolve
from perfcast_engine.models.spec import ModelSpec
from perfcast_engine.phase import Phase, PhaseMaker
from perfcast_engine.step import StepModel
from perfcast_engine.tables.catalog import Catalog
from perfcast_engine.tables.database import Mode


@dataclass(frozen=True)
class Engine:
    """One serving engine, every question answered: its steps and its memory can be asked, its facts read."""

    resolved: Resolved
    catalog: Catalog = field(compare=False, repr=False)
    phase_of: PhaseMaker = field(default=Phase, compare=False, repr=False)

    @cached_property
    def config(self) -> EngineConfig:
        """The configuration with slot, draft depth and parallel sizes filled in; resolving it gives this engine."""
        resolved = self.resolved
        return replace(resolved.config, version=resolved.db.version, parallel=resolved.parallel, nextn=resolved.nextn)

    @cached_property
    def data_version(self) -> str:
        """Digest of the system's figures, and of the pack where it answers."""
        db = self.resolved.db
        digest = hashlib.sha256(repr(db.system).encode())
        if db.mode is not Mode.SOL:
            digest.update(self.catalog.pack(db.system.name, db.backend, db.version).digest.encode())
        return digest.hexdigest()[:16]

    @cached_property
    def handle(self) -> str:
        """Content hash of the configuration and the data behind it, the same on every replica."""
        return hashlib.sha256(f"{self.config.handle} {self.data_version}".encode()).hexdigest()[:32]

    @cached_property
    def steps(self) -> StepModel:
        plan = self.resolved.plan
        d = plan.deployment
        return StepModel(plan.context, plan.generation, self.resolved.db, d.nextn, d.profile, self.phase_of)

    @cached_property
    def memory(self) -> MemoryModel:
        return memory_of(self.resolved)

    @property
    def model(self) -> ModelSpec:
        return self.resolved.spec

    @property
    def modes(self) -> QuantModes:
        """The quantisation modes in force."""
        return self.resolved.modes

    @property
    def parallel(self) -> ParallelConfig:
        return self.resolved.parallel

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed or replaced, in words."""
        modes, given = self.modes, self.resolved.config
        said = [f"modes: gemm {modes.gemm}, moe {modes.moe}, kv cache {modes.kv}, fmha {modes.fmha}, comm {modes.comm}"]
        if given.version != self.config.version:
            said.append(f"version {given.version} is {self.config.version}")
        comm = self.resolved.plan.deployment.comm
        if comm:
            said.append(f"experts exchanged by {comm.context} in prefill, {comm.generation} in decode")
        return tuple(said)


class Predictor:
    """All measured data and known models. ``roots``: folders of the user's own tables and systems, first ones win.

    Holds the tables that were asked for; build one and keep it. Thread-safe.
    """

    def __init__(self, roots: Sequence[str | Path] = ()) -> None:
        self.catalog = Catalog([Path(root) for root in roots])
        self.registry = Registry.load()

    def engine(
        self,
        config: EngineConfig,
        *,
        plans: dict[Hashable, ModelPlan] | None = None,
        phase_of: PhaseMaker = Phase,
    ) -> Engine:
        """The engine that ``config`` describes. ``plans``, ``phase_of``: what the engines of one search share.

        Raises UnknownName, InvalidField, UnsupportedCombination, PerfDataMissing, DataCorrupt.
        """
        resolved = resolve(config, self.catalog, self.registry, plans)
        if phase_of is Phase:  # no search, whose engines come and go
            resolved = replace(resolved, db=resolved.db.own())
        return Engine(resolved, self.catalog, phase_of)
